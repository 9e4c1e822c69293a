"""One engine in a process of its own: `python -m bench.engine_worker CASE PROVIDER PASSES` prints one line of JSON.

The engine is real; its weights are random, seeded by the name of each parameter, and of the size that trained weights
have, so that a wrong attention shows in the logits. The line is what `Observed` holds.
"""

import json
import os
import statistics
import sys
import tempfile
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from .cases.engine import CASES, CHECKED, CHECKED_OUTPUTS, EngineCase

MARK = "engine: "  # begins the line with the result
BACKENDS = {  # provider -> vLLM's name of the attention backend
    "ours": "CUSTOM", "vllm-flash-attn": "FLASH_ATTN", "vllm-flashinfer": "FLASHINFER", "vllm-triton": "TRITON_ATTN",
    "own-fp8": "CUSTOM",
}  # fmt: skip
OURS = ("ours", "own-fp8")  # the second: our backend with an e4m3 cache, beside a case with an NVFP4 cache
GAINS = {"qkv_proj": 1.5, "q_proj": 1.5, "k_proj": 1.5, "v_proj": 1.5, "lm_head": 4.0}


def seed_weights(model: Any, _: Any = None) -> None:
    """Fill all parameters: matrices with normals of variance 1 / fan-in, embeddings with normals of variance 1, sinks
    with normals, vectors of norms with ones, and biases with small normals."""
    import torch

    for name, parameter in model.named_parameters():
        gen = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
        with torch.no_grad():
            if "sinks" in name:
                parameter.normal_(generator=gen)
            elif parameter.ndim < 2 or name.endswith("bias"):
                if name.endswith("bias"):
                    parameter.normal_(generator=gen).mul_(0.02)
                else:
                    parameter.fill_(0.0 if "gemma" in type(model).__name__.lower() else 1.0)
            else:
                gain = next((g for part, g in GAINS.items() if part in name), 1.0)
                size = 1.0 if "embed" in name else gain * parameter.shape[-1] ** -0.5
                parameter.normal_(generator=gen).mul_(size)


def start_vllm(case: EngineCase, backend: str, folder: Path) -> Any:
    """Return an engine in this process."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # sampling is greedy, and FlashInfer need not be there
        "VLLM_PLUGINS": "cute_kernels",
    }  # fmt: skip
    from vllm import LLM
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    from wrappers.integrations import plugins

    plugins.vllm()  # also where the package is not installed, and vLLM finds no entry point
    DummyModelLoader.load_weights = lambda self, model, config: seed_weights(model)
    (folder / "config.json").write_text(json.dumps(case.config))
    speculative = {"method": "ngram", "num_speculative_tokens": case.drafts, "prompt_lookup_max": 4}
    sizes = sorted({1, 2, 4, *range(8, case.requests + 1, 8), case.requests})
    if case.drafts:
        sizes = sorted({n * (case.drafts + 1) for n in sizes})
    return LLM(
        str(folder), skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", attention_backend=backend,
        kv_cache_memory_bytes=case.memory, max_num_batched_tokens=case.batched, enable_chunked_prefill=True,
        max_num_seqs=max(case.requests, len(CHECKED)), max_model_len=case.longest, disable_log_stats=False,
        kv_cache_dtype="auto" if case.kv == "bf16" else case.kv, enable_prefix_caching=case.cached,
        compilation_config={
            "mode": case.mode, "cudagraph_mode": case.graphs, "cudagraph_capture_sizes": sizes,
        },
        **({"speculative_config": speculative} if case.drafts else {}),
    )  # fmt: skip


def generate(engine: Any, prompts: list[list[int]], outputs: int, logprobs: int | None = None) -> list[Any]:
    """Return what the engine generates, greedily, of exactly `outputs` tokens."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True, logprobs=logprobs, detokenize=False)
    return engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def checked(engine: Any, case: EngineCase) -> list[dict[str, Any]]:
    """Return tokens and their log probabilities for the prompts of the check."""
    found = generate(engine, case.prompts(1, list(CHECKED)), CHECKED_OUTPUTS, logprobs=2)
    return [
        {
            "tokens": list(r.outputs[0].token_ids),
            "logprobs": [each[t].logprob for each, t in zip(r.outputs[0].logprobs, r.outputs[0].token_ids)],
        }
        for r in found
    ]


def timed(engine: Any, case: EngineCase, seed: int) -> dict[str, float]:
    """Return the figures of one pass."""
    prompts = case.prompts(seed, case.lengths(0))
    begin = time.perf_counter()
    found = generate(engine, prompts, case.outputs)
    seconds = time.perf_counter() - begin
    first = sorted(1e3 * r.metrics.first_token_latency for r in found)
    each = sorted(1e3 * (r.metrics.last_token_ts - r.metrics.first_token_ts) / (case.outputs - 1) for r in found)
    made = sum(len(r.outputs[0].token_ids) for r in found)
    return {
        "tokens_per_s": made / seconds, "seconds": seconds,
        "ttft_p50_ms": quantile(first, 0.5), "ttft_p99_ms": quantile(first, 0.99),
        "tpot_p50_ms": quantile(each, 0.5), "tpot_p99_ms": quantile(each, 0.99),
    }  # fmt: skip


def quantile(values: list[float], share: float) -> float:
    """Return the smallest value that at least `share` of the sorted values do not exceed."""
    return values[max(0, -(-int(share * 1000) * len(values) // 1000) - 1)]


def main() -> None:
    name, provider, passes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    case = CASES[name] if provider != "own-fp8" else replace(CASES[name], kv="fp8")
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        engine = start_vllm(case, BACKENDS[provider], Path(folder))
        started = time.perf_counter() - begin
        answers = checked(engine, case)
        warm = timed(engine, case, 2)  # fills the prefix cache, and brings the clocks to where they stay
        found = [timed(engine, case, 2 if case.cached else 3 + i) for i in range(passes)]
    result = {
        "answers": answers, "warm": warm, "passes": found, "started_s": started,
        "cache_tokens": engine.llm_engine.vllm_config.cache_config.kv_cache_size_tokens,
        "median": {key: statistics.median(p[key] for p in found) for key in found[0]},
    }  # fmt: skip
    print(MARK + json.dumps(result), flush=True)
    os._exit(0)  # engines leave threads behind


if __name__ == "__main__":
    main()
