"""Hugging Face transformers with this project's attention: four models, a paged KV cache, decoding in a CUDA graph.

    python -m examples.hugging_face            (needs transformers: pip install '.[examples]')

Small models with random weights generate tokens greedily for prompts of different lengths. The prompts are packed, not
padded, and keys and values are stored in pages (`wrappers.integrations.transformers`). Gemma-2 has a soft cap and a
sliding window in every other layer; GPT-OSS has sinks and such windows; Qwen3 has norms of queries and keys; Llama has
none of these.

Then transformers' eager attention processes the same tokens, in fp32 and in bf16, and the logits of every prompt token
and every step are compared. The error of eager attention in bf16 sets the scale: ours may be at most twice that error.

On CUDA the decode step, from the lengths to the next tokens, is captured once and replayed at growing lengths. On the
CPU the reference runs; it shows whether the results are right, but nothing about speed.
"""

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers

from wrappers.integrations.transformers import PagedCache, register

MODELS = ("llama", "gemma2", "gpt_oss", "qwen3")
PROMPTS = (5, 130, 1, 37)  # tokens per request
WINDOW = 24  # keys; fewer than some prompts have
VOCABULARY = 512


def config_of(name: str, hidden: int = 256, layers: int = 4) -> Any:
    """Return a small configuration of a model. Its random weights will be large enough that attention is not
    uniform."""
    common = {
        "hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": layers, "vocab_size": VOCABULARY,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "initializer_range": 1.2 * hidden**-0.5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    # GPT-OSS: every token uses all experts. Otherwise rounding would select other experts, and the errors would tell
    # nothing.
    own: dict[str, dict[str, Any]] = {
        "llama": {"head_dim": 128},
        "gemma2": {
            "head_dim": 128, "query_pre_attn_scalar": 128, "attn_logit_softcapping": 5.0, "sliding_window": WINDOW,
        },
        "gpt_oss": {"head_dim": 64, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 4},
        "qwen3": {"head_dim": 128},
    }  # fmt: skip
    return transformers.AutoConfig.for_model(name, **common, **own[name])


def model_of(config: Any, device: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, mean=1.0)
    return model.to(device)


Report = Callable[[str], None]  # prints how far a model is
EVERY = 8  # tokens between two reports


class Generated(NamedTuple):
    tokens: list[torch.Tensor]  # per request: prompt and output without the last token, for which no logits exist
    logits: list[torch.Tensor]  # per request (its tokens, vocabulary)
    rate: float  # decoded tokens per second


@torch.no_grad()
def generate(
    model: Any, prompts: list[torch.Tensor], count: int, page_size: int = 16, report: Report = lambda text: None
) -> Generated:
    """Generate `count` tokens (at least 3) per request, greedily: the first from the prompt's logits, then one per
    step."""
    model.set_attn_implementation(register())
    lens, device = [len(p) for p in prompts], prompts[0].device
    most = max(lens) + count
    cache = PagedCache(len(lens), len(lens) * -(-most // page_size) + 1, most, page_size, device)
    for request, length in enumerate(lens):
        cache.admit(request, length + count)

    def forward(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return model(tokens, position_ids=positions, paged_cache=cache, use_cache=False).logits

    report(f"{sum(lens)} tokens of prompts")
    logits = forward(torch.cat(prompts)[None], cache.extend(lens))[0]
    tokens = logits[cache.last_rows].argmax(-1, keepdim=True)  # (requests, 1): the next step's, at a fixed address

    def step() -> torch.Tensor:
        found = forward(tokens, cache.extend())[:, -1]
        tokens.copy_(found.argmax(-1, keepdim=True))
        return found

    inputs, steps = [tokens.clone()], [step()]  # the first step is eager: it loads the kernels
    decode = captured(step) if device.type == "cuda" else step
    start = seconds(device)
    for made in range(2, count):
        if made % EVERY == 0:
            report(f"{made} of {count} tokens")
        inputs.append(tokens.clone())
        steps.append(decode().clone())  # the next replay overwrites this memory
    rate = len(lens) * (count - 2) / (seconds(device) - start)

    all_tokens = [torch.cat(both) for both in zip(prompts, torch.cat(inputs, 1))]
    all_logits = [torch.cat(both) for both in zip(logits.split(lens), torch.stack(steps, 1))]
    return Generated(all_tokens, all_logits, rate)


def captured(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Capture the step as a CUDA graph. Its result is at the same address after each replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


def seconds(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def eager(model: Any, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the logits of transformers' own attention, request by request, without a cache."""
    model.set_attn_implementation("eager")
    return [model(t[None], use_cache=False).logits[0].float() for t in tokens]


class Errors(NamedTuple):
    """Largest differences from the logits of eager attention in fp32."""

    largest: float  # the largest logit
    ours: float
    eager: float  # in bf16


def errors(model: Any, found: Generated, report: Report = lambda text: None) -> Errors:
    report("eager attention in fp32 and bf16")
    exact = eager(copy.deepcopy(model).float(), found.tokens)

    def error(logits: list[torch.Tensor]) -> float:
        return max(float((a.float() - b).abs().max()) for a, b in zip(logits, exact))

    return Errors(max(float(x.abs().max()) for x in exact), error(found.logits), error(eager(model, found.tokens)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--tokens", type=int, default=32, help="tokens generated per request, at least 3")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prompts = [torch.randint(3, VOCABULARY, (n,), device=device) for n in PROMPTS]
    print(f"{len(PROMPTS)} requests of {PROMPTS} tokens, {args.tokens} more each; {device}", flush=True)
    for name in args.models:

        def report(text: str, name: str = name) -> None:
            print(f"{name:<8} {text}", flush=True)

        model = model_of(config_of(name, args.hidden, args.layers), device)
        found = generate(model, prompts, args.tokens, report=report)
        e = errors(model, found, report)
        report(f"{found.rate:.0f} tokens/s; largest logit {e.largest:.2f}; error {e.ours:.3f}, of eager {e.eager:.3f}")
        assert e.ours <= 2 * e.eager, f"{name}: further from fp32 than twice eager attention in bf16"


if __name__ == "__main__":
    main()
