"""One engine in a process of its own: `python -m bench.engine_worker CASE PROVIDER PASSES` prints one line of JSON.

The engine is real; its weights are random, seeded by the name of each parameter, and of the size that trained weights
have, so that a wrong attention shows in the logits. The line says what `main` calls `result`.
"""

import fcntl
import json
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .cases import latent_models
from .cases.engine import CASES, EngineCase
from .engine_backends import BACKENDS, ENVIRONMENT, cache_of
from .timing import quantile

MARK = "engine: "  # begins the line with the result
FOLDER = "CUTE_KERNELS_BENCH_MODEL"  # environment variable: where config.json is
TURNS = "CUTE_KERNELS_BENCH_TURNS"  # environment variable: the folder of `Turns`
GAINS = {"qkv_proj": 1.5, "q_proj": 1.5, "q_b_proj": 2.0, "k_proj": 1.5, "v_proj": 1.5, "lm_head": 4.0}


@dataclass(frozen=True)
class EngineAnswer:
    """The tokens that an engine generates for a prompt. logprobs: of the tokens, if they were asked for. first_s: time
    from the request's arrival to its first token. last_s: time from there to its last token. cached: tokens of the
    prompt that were in the prefix cache."""

    tokens: list[int]
    logprobs: list[float]
    first_s: float
    last_s: float
    cached: int


class RunningEngine(Protocol):
    """A running engine. cache_tokens: tokens that its cache holds."""

    cache_tokens: int

    def generate(self, prompts: list[list[int]], outputs: int, logprobs: bool) -> list[EngineAnswer]:
        """Return the engine's greedy answers, each of exactly `outputs` tokens. logprobs: with log probabilities."""
        ...

    def preempted(self) -> int:
        """Return how often requests were preempted until now."""
        ...


def checkpoint(folder: str) -> Iterator[tuple[str, Any]]:
    """Yield the weights of the model of `folder`, by the names of Hugging Face's checkpoints: engines split and merge
    them as they do with real ones, so all engines and any number of GPUs have the same model.

    Matrices are normals of variance 1 / fan-in, embeddings normals of variance 1, sinks normals, vectors of norms ones,
    and biases small normals. If embeddings are also the weights of the logits, these are as large as in other models,
    and the last norm changes signs: otherwise a model without training repeats its input."""
    import torch

    config = json.loads((Path(folder) / "config.json").read_text())
    tied = config["tie_word_embeddings"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    offset = 1.0 if "gemma" in config["model_type"] else 0.0  # its norms add 1 to their weights
    for name, shape in named_shapes(folder, config):
        if tied and name.startswith("lm_head"):
            continue
        gen = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        weight = torch.empty(shape, dtype=torch.bfloat16, device=device)
        gain = next((g for part, g in GAINS.items() if part in name), 1.0)
        if "embed" in name and tied:
            weight.normal_(generator=gen).mul_(GAINS["lm_head"] * weight.shape[1] ** -0.5)
        elif "sinks" in name or "embed" in name:
            weight.normal_(generator=gen)
        elif "bias" in name:
            weight.normal_(generator=gen).mul_(0.02)
        elif name == "model.norm.weight" and tied:
            weight.normal_(generator=gen).sign_().sub_(offset)
        elif weight.ndim < 2:
            weight.fill_(1.0 - offset)
        else:
            fan_in = weight.shape[1]  # of experts, too: (experts, in, out)
            weight.normal_(generator=gen).mul_(gain * fan_in**-0.5)
        yield name, weight


def named_shapes(folder: str, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and the shapes of the weights of a model, of which config is the config.json."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if "kv_lora_rank" in config:
        yield from latent_models.shapes(config)
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    for name, meta in model.state_dict().items():
        yield name, tuple(meta.shape)


def write_config(case: EngineCase, folder: Path) -> None:
    """Write the model's config.json, which is all that engines need beside the seeded weights."""
    (folder / "config.json").write_text(json.dumps(case.config))


def use_plugins(folder: Path, group: str, *entries: str) -> None:
    """Let the engine find plugins, also in processes that it spawns, and where this package is not installed."""
    plugins = folder / "plugins" / "bench-0.dist-info"
    plugins.mkdir(parents=True)
    (plugins / "entry_points.txt").write_text("\n".join([f"[{group}]", *entries, ""]))
    (plugins / "METADATA").write_text("Metadata-Version: 2.1\nName: bench\nVersion: 0\n")
    sys.path.insert(0, str(plugins.parent))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(plugins.parent), os.getcwd(), os.environ.get("PYTHONPATH", "")])


def seed_vllm() -> None:
    """Replace vLLM's dummy weights, as a plugin that each of its processes loads."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = lambda self, model, config: model.load_weights(checkpoint(config.model))


VLLM_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "cute_kernels,seeded",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # sampling is greedy, and FlashInfer need not be there
}  # fmt: skip


def prepare_vllm(folder: Path) -> None:
    """Set the environment in which vLLM's processes find the plugins."""
    os.environ |= VLLM_ENVIRONMENT
    use_plugins(
        folder, "vllm.general_plugins", "seeded = bench.engine_worker:seed_vllm",
        "cute_kernels = wrappers.integrations.plugins:vllm",
    )  # fmt: skip


def vllm_arguments(case: EngineCase, backend: str) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`, which are also the flags of `vllm serve`."""
    sizes = [n * (case.drafts + 1) for n in case.graph_sizes]
    found: dict[str, Any] = {
        "load_format": "dummy", "dtype": "bfloat16", "attention_backend": backend, "tensor_parallel_size": case.gpus,
        "kv_cache_memory_bytes": case.memory, "gpu_memory_utilization": 0.2,  # what must be free; no more than that
        "max_num_batched_tokens": case.batched, "enable_chunked_prefill": True,
        "max_num_seqs": case.most_requests, "max_model_len": case.longest,
        "kv_cache_dtype": "auto" if case.kv == "bf16" else case.kv, "enable_prefix_caching": case.cached,
        "compilation_config": {
            "mode": case.mode, "cudagraph_mode": case.graphs, "cudagraph_capture_sizes": sizes
        },
    }  # fmt: skip
    if case.attention != "gqa":
        found["block_size"] = 64
    if case.drafts:
        found["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": case.drafts, "prompt_lookup_max": 4
        }  # fmt: skip
    return found


class Vllm:
    """vLLM in this process."""

    def __init__(self, case: EngineCase, backend: str, folder: Path) -> None:
        prepare_vllm(folder)
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_BATCH_INVARIANT": str(int(case.invariant))}
        from vllm import LLM

        options = vllm_arguments(case, backend)
        self.engine = LLM(str(folder), skip_tokenizer_init=True, disable_log_stats=False, **options)
        self.cache_tokens: int = self.engine.llm_engine.vllm_config.cache_config.kv_cache_size_tokens

    def generate(self, prompts: list[list[int]], outputs: int, logprobs: bool) -> list[EngineAnswer]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=outputs, ignore_eos=True, logprobs=2 if logprobs else None, detokenize=False
        )
        found = []
        for r in self.engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False):
            tokens = list(r.outputs[0].token_ids)
            each = [at[t].logprob for at, t in zip(r.outputs[0].logprobs, tokens)] if logprobs else []
            m = r.metrics
            last = m.last_token_ts - m.first_token_ts
            found.append(EngineAnswer(tokens, each, m.first_token_latency, last, r.num_cached_tokens or 0))
        return found

    def preempted(self) -> int:
        return sum(int(m.value) for m in self.engine.get_metrics() if m.name == "vllm:num_preemptions")

    def close(self) -> None:
        """Do nothing: the engine ends with the process."""


def seed_sglang() -> None:
    """Replace SGLang's dummy weights, as a plugin that each of its processes loads."""
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = lambda model: model.load_weights(checkpoint(os.environ[FOLDER]))


class Sglang:
    """SGLang. Its scheduler is a process of its own."""

    def __init__(self, case: EngineCase, backend: str, folder: Path) -> None:
        if case.kv == "nvfp4" or case.drafts or case.invariant:
            what = "with bf16 and fp8 caches, without drafts and batch-invariant bits"
            raise NotImplementedError(f"{case.name}: SGLang is measured {what}")
        use_plugins(
            folder, "sglang.srt.plugins", "seeded = bench.engine_worker:seed_sglang",
            "cute_kernels = wrappers.integrations.plugins:sglang",
            "cute_kernels_trtllm_mha = wrappers.integrations.plugins:sglang_trtllm_mha",
            "cute_kernels_dsa = wrappers.integrations.plugins:sglang_dsa",
        )  # fmt: skip
        os.environ |= {FOLDER: str(folder), "SGLANG_PLUGINS": "seeded,cute_kernels"}
        options: dict[str, Any] = {"attention_backend": backend}
        if case.attention == "dsa":  # SGLang has one backend, in which the plugin replaces functions
            options["attention_backend"] = "dsa"
            os.environ["SGLANG_PLUGINS"] += ",cute_kernels_dsa" if backend == "cute_kernels" else ""
        elif backend == "cute_kernels":
            options["page_size"] = 16 if case.attention == "gqa" else 64
        if case.config["model_type"] == "gpt_oss":
            options["moe_runner_backend"] = "triton"
            if backend == "cute_kernels":  # SGLang allows only backends that it knows
                os.environ["SGLANG_PLUGINS"] += ",cute_kernels_trtllm_mha"
                options["attention_backend"] = "trtllm_mha"
        import sglang

        self.engine = sglang.Engine(
            model_path=str(folder), skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", random_seed=0,
            tp_size=case.gpus, kv_cache_dtype="auto" if case.kv == "bf16" else "fp8_e4m3", context_length=case.longest,
            max_total_tokens=case.capacity, mem_fraction_static=0.88,
            chunked_prefill_size=case.batched, disable_radix_cache=not case.cached,
            max_running_requests=case.most_requests, cuda_graph_bs_decode=case.graph_sizes,
            enable_metrics=True, log_level="error", **options,
        )  # fmt: skip
        self.cache_tokens = int(self.engine.get_server_info()["max_total_num_tokens"])

    def generate(self, prompts: list[list[int]], outputs: int, logprobs: bool) -> list[EngineAnswer]:
        params = {"temperature": 0.0, "max_new_tokens": outputs, "ignore_eos": True}
        found = []
        for r in self.engine.generate(input_ids=prompts, sampling_params=params, return_logprob=logprobs):
            m = r["meta_info"]
            each = [at[0] for at in m["output_token_logprobs"]] if logprobs else []
            first = m["first_token_latency"]
            found.append(EngineAnswer(list(r["output_ids"]), each, first, m["e2e_latency"] - first, m["cached_tokens"]))
        return found

    def preempted(self) -> int:
        raise NotImplementedError("preemption: SGLang's retractions are not counted, only vLLM's preemptions are")

    def close(self) -> None:
        """End the processes of the engine."""
        self.engine.shutdown()


ENGINES: dict[str, Any] = {"vllm": Vllm, "sglang": Sglang}


def timed(engine: RunningEngine, case: EngineCase, seed: int) -> dict[str, float]:
    """Return the figures of one pass."""
    prompts = case.prompts(seed, case.lengths(0))
    begin = time.perf_counter()
    found = engine.generate(prompts, case.outputs, False)
    seconds = time.perf_counter() - begin
    first = [1e3 * a.first_s for a in found]
    each = [1e3 * a.last_s / max(1, case.outputs - 1) for a in found]
    return {
        "tokens_per_s": sum(len(a.tokens) for a in found) / seconds, "seconds": seconds,
        "computed": sum(map(len, prompts)) - sum(a.cached for a in found),
        "ttft_p50_ms": quantile(0.5, first), "ttft_p99_ms": quantile(0.99, first),
        "tpot_p50_ms": quantile(0.5, each), "tpot_p99_ms": quantile(0.99, each),
    }  # fmt: skip


def repeats(
    engine: RunningEngine, case: EngineCase, prompts: list[list[int]], answers: list[EngineAnswer]
) -> dict[str, int]:
    """Return how many answers have the same tokens and log probabilities when the engine is asked again.

    again: the same prompts. alone: each prompt by itself. mixed: in the reverse order, between as many other prompts.
    resumed: each with half of its answer, as a request goes on that was preempted.
    """
    outputs, half = case.checked_outputs, case.checked_outputs // 2
    halves = [prompt + a.tokens[:half] for prompt, a in zip(prompts, answers)]
    others = case.prompts(4, [len(prompt) for prompt in prompts])
    pairs = [prompt for pair in zip(others, reversed(prompts)) for prompt in pair]
    found = {
        "again": (0, engine.generate(prompts, outputs, True)),
        "alone": (0, [engine.generate([prompt], outputs, True)[0] for prompt in prompts]),
        "mixed": (0, engine.generate(pairs, outputs, True)[:0:-2]),
        "resumed": (half, engine.generate(halves, outputs - half, True)),
    }
    return {
        name: sum((a.tokens[at:], a.logprobs[at:]) == (b.tokens, b.logprobs) for a, b in zip(answers, others))
        for name, (at, others) in found.items()
    }


class Turns:
    """Lets engines that have started side by side use the GPU one after the other. folder: has a file per worker that
    has not started, and the file `lock`; "": this worker is alone."""

    def __init__(self, folder: str = "") -> None:
        self.folder = Path(folder) if folder else None

    def await_others(self, own: str) -> None:
        """Wait until all workers have started. own: the name of this one's file."""
        if self.folder:
            (self.folder / own).unlink(missing_ok=True)
            while any(f.name != "lock" for f in self.folder.iterdir()):
                time.sleep(0.1)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Have the GPU alone. Another worker that waits for it is next."""
        if not self.folder:
            yield
            return
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        time.sleep(0.1)


def observe(engine: RunningEngine, case: EngineCase, passes: int, turns: Turns) -> dict[str, Any]:
    """Return the answers to the prompts of the check, how many of them come again, and the figures of the passes, of
    which there may be none; before them, `warm` fills the prefix cache, and brings the clocks to where they stay.
    preempted: requests that were preempted in the check, if the cache is too small for it."""
    prompts = case.prompts(1, case.checked)
    with turns.turn():
        answers = engine.generate(prompts, case.checked_outputs, True)
    result: dict[str, Any] = {
        "answers": [{"tokens": a.tokens, "logprobs": a.logprobs} for a in answers],
        "cache_tokens": engine.cache_tokens,
    }
    if case.preempts:
        result["preempted"] = engine.preempted()
    if passes:
        found = []
        for i in range(passes + 1):
            with turns.turn():
                found.append(timed(engine, case, 2 if case.cached else 2 + i))
        warm = found.pop(0)
        middle = {key: statistics.median(p[key] for p in found) for key in found[0]}
        result |= {"warm": warm, "passes": found, "median": middle}
    with turns.turn():
        return result | {"repeats": repeats(engine, case, prompts, answers)}


def start(name: str, provider: str, folder: Path) -> tuple[Any, EngineCase]:
    """Start the engine of a case with a provider's backend. Return it, and the case with the provider's cache."""
    case = cache_of(CASES[name], provider)
    os.environ |= ENVIRONMENT.get(provider, {})
    write_config(case, folder)
    return ENGINES[case.engine](case, BACKENDS[case.engine][provider], folder), case


def finish(result: dict[str, Any], engine: Any) -> None:
    """Print the result and end the process."""
    print(MARK + json.dumps(result), flush=True)
    engine.close()
    os._exit(0)  # engines leave threads behind


def main() -> None:
    name, provider, passes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        engine, case = start(name, provider, Path(folder))
        started = time.perf_counter() - begin
        turns = Turns(os.environ.get(TURNS, ""))
        turns.await_others(provider)
        result = observe(engine, case, passes, turns) | {"started_s": started}
    finish(result, engine)


if __name__ == "__main__":
    main()
