"""Cases of whole engines: a model's shape, a load of requests, a cache, and how the engine is started."""

import math
import random
from dataclasses import dataclass, replace
from typing import Any

from . import latent_models

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QWEN3_8B: dict[str, Any] = LLAMA_8B | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "intermediate_size": 12288, "num_hidden_layers": 36,
    "head_dim": 128, "vocab_size": 151936, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "attention_bias": False,
}  # fmt: skip
GEMMA2_9B: dict[str, Any] = LLAMA_8B | {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336,
    "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    "vocab_size": 256000, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "tie_word_embeddings": True,
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = LLAMA_8B | {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
    "rope_theta": 150000.0, "sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "attention_bias": True, "swiglu_limit": 7.0,
}  # fmt: skip
GPT_OSS_DENSE: dict[str, Any] = GPT_OSS_20B | {"num_local_experts": 4}  # all are chosen: rounding changes no choice
MODELS = {
    "llama8b": LLAMA_8B, "qwen3-8b": QWEN3_8B, "gemma2-9b": GEMMA2_9B, "gptoss20b": GPT_OSS_20B,
    "gptoss-dense": GPT_OSS_DENSE, **latent_models.MODELS,
}  # fmt: skip
GIB = 1 << 30
CHECKED = (3, 17, 64, 129, 300, 517, 800, 1200)  # prompts of the check: tokens
CHECKED_OUTPUTS = 48
# The check of batch-invariant bits has each length so often, and answers so long that a small cache preempts requests
INVARIANT_COPIES, INVARIANT_OUTPUTS = 4, 128
ABANDONED_OUTPUTS = 4096  # tokens that are asked for in requests that their clients abandon


@dataclass(frozen=True)
class EngineCase:
    """A load of one engine.

    engine: "vllm" or "sglang". model: of MODELS; layers: of them, None for all. requests: their number, which all
    arrive at once. prompt: tokens of each prompt, or the median of log-normal lengths with `spread`, the sigma of
    their logarithm. outputs: tokens that each request generates. cached: the timed passes find all prompts in the
    prefix cache, so they show decoding; else each pass has other prompts. kv: type of the cache. memory: bytes of
    the cache, on each GPU. batched: tokens of a step at most. gpus: their number; they share the model. graphs, mode:
    the engine's CUDA graphs and compilation. drafts: tokens that n-gram speculation proposes. invariant: the bits of a
    request must not depend on its batch.
    """

    name: str
    model: str
    requests: int
    prompt: int
    outputs: int = 256
    spread: float = 0.0
    cached: bool = False
    kv: str = "bf16"
    memory: int = 72 * GIB
    batched: int = 8192
    graphs: str = "FULL_DECODE_ONLY"
    mode: int = 0
    drafts: int = 0
    invariant: bool = False
    layers: int | None = None
    gpus: int = 1
    engine: str = "vllm"

    @property
    def config(self) -> dict[str, Any]:
        """Return the model's config.json."""
        found = dict(MODELS[self.model])
        if self.layers is not None:
            found["num_hidden_layers"] = self.layers
            if "layer_types" in found:
                found["layer_types"] = found["layer_types"][: self.layers]
        return found

    @property
    def attention(self) -> str:
        """Return the kind of attention: "gqa"; or latent, over all keys, "mla", or over chosen ones, "dsa"."""
        c = self.config
        return "dsa" if "index_topk" in c else "mla" if "kv_lora_rank" in c else "gqa"

    @property
    def token_bytes(self) -> int:
        """Return the bytes of a token in the caches of all layers."""
        c = self.config
        if self.attention != "gqa":
            return latent_models.token_bytes(c, self.kv)
        dim = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
        elements = 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * dim
        return int(elements * {"bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}[self.kv])

    @property
    def capacity(self) -> int:
        """Return the tokens that the cache holds. GPUs share the heads of a cache; each has a whole latent one."""
        return self.memory * (self.gpus if self.attention == "gqa" else 1) // self.token_bytes

    @property
    def checked(self) -> list[int]:
        """Return the tokens of each prompt of the check."""
        return list(CHECKED * INVARIANT_COPIES if self.invariant else CHECKED)

    @property
    def checked_outputs(self) -> int:
        """Return the tokens of each answer of the check."""
        return INVARIANT_OUTPUTS if self.invariant else CHECKED_OUTPUTS

    @property
    def preempts(self) -> bool:
        """Return whether the cache is too small for all requests of the check at a time."""
        return self.capacity < sum(self.checked)

    @property
    def most_requests(self) -> int:
        """Return how many requests the engine runs at a time."""
        return max(self.requests, len(self.checked))

    @property
    def graph_sizes(self) -> list[int]:
        """Return the numbers of requests of which the engine captures graphs."""
        return sorted({1, 2, 4, *range(8, self.requests + 1, 8), self.requests})

    @property
    def longest(self) -> int:
        """Return the tokens of the longest request that a pass may have."""
        return max(*self.lengths(0), *CHECKED) + self.outputs + self.checked_outputs

    def lengths(self, seed: int) -> list[int]:
        """Return the tokens of each prompt."""
        if not self.spread:
            return [self.prompt] * self.requests
        draw = random.Random(f"lengths {seed}")
        longest = 8 * self.prompt
        return [
            min(longest, max(1, round(self.prompt * math.exp(self.spread * draw.gauss(0, 1)))))
            for _ in range(self.requests)
        ]

    def prompts(self, seed: int, lengths: list[int]) -> list[list[int]]:
        """Return prompts of random tokens; the first tokens of a vocabulary, which may end a text, are left out."""
        draw, vocabulary = random.Random(f"tokens {seed}"), self.config["vocab_size"]
        return [[draw.randrange(100, vocabulary - 100) for _ in range(n)] for n in lengths]


def _tiny() -> list[EngineCase]:
    """Return cases of two layers, which show that answers are right: `tests/gpu/test_gpu_engines.py` runs them."""
    llama = EngineCase("tiny-llama-bf16", "llama8b", 16, 700, outputs=64, layers=2, memory=4 * GIB)
    return [
        llama,
        replace(llama, name="tiny-llama-fp8", kv="fp8"),
        replace(llama, name="tiny-llama-nvfp4", kv="nvfp4"),
        replace(llama, name="tiny-llama-bf16-cached", cached=True),
        replace(llama, name="tiny-llama-bf16-full", graphs="FULL"),
        replace(llama, name="tiny-llama-bf16-piecewise", graphs="FULL_AND_PIECEWISE", mode=3),
        replace(llama, name="tiny-llama-bf16-ngram", drafts=3),
        replace(llama, name="tiny-llama-bf16-x2", gpus=2),
        replace(llama, name="tiny-llama-bf16-invariant", invariant=True),  # of vLLM's own layers
        replace(llama, name="tiny-qwen3-bf16", model="qwen3-8b"),
        replace(llama, name="tiny-gemma2-bf16", model="gemma2-9b"),
        replace(llama, name="tiny-gptoss-bf16", model="gptoss-dense"),
    ]


def _latent() -> list[EngineCase]:
    """Return cases of models with latent attention. Heads fewer than a model's are those of one of 8 GPUs."""
    sparse = EngineCase("dsv32-b64-c16k-kv656", "dsv32", 64, 16384, cached=True, kv="fp8_ds_mla", memory=14 * GIB)
    dense = EngineCase("v3-b64-c8k-bf16", "v3", 64, 8192, cached=True, memory=10 * GIB)
    tiny = EngineCase("tiny-dsv32-kv656", "dsv32-few", 16, 700, outputs=64, layers=2, kv="fp8_ds_mla", memory=1 * GIB)
    prefill = EngineCase("dsv32-prefill-b8-s32k-kv656", "dsv32", 8, 32768, outputs=8, kv="fp8_ds_mla", memory=14 * GIB)
    invariant = replace(tiny, name="tiny-dsv32-kv656-invariant", invariant=True)
    blocks = 64 * 64 * tiny.token_bytes  # bytes of 64 blocks of 64 tokens
    return [
        sparse,
        replace(sparse, name="dsv32-tp8heads-b64-c16k-kv656", model="dsv32-h16"),
        replace(sparse, name="dsv32-tp8heads-b64-c8k-kv656", model="dsv32-h16", prompt=8192),
        replace(sparse, name="dsv32-tp8heads-b64-c16k-kv352", model="dsv32-h16", kv="nvfp4_ds_mla"),
        replace(sparse, name="dsv32-tp8heads-b64-c16k-bf16", model="dsv32-h16", kv="bf16"),
        replace(sparse, name="dsv32-b1-c32k-kv656", requests=1, prompt=32768),
        replace(sparse, name="dsv32-b64-c16k-kv656-x2", gpus=2),
        prefill,
        replace(prefill, name="dsv32-tp8heads-prefill-b8-s32k-kv656", model="dsv32-h16"),
        EngineCase("dsv32-mixed-kv656", "dsv32", 128, 2500, spread=1.0, batched=2048, kv="fp8_ds_mla", memory=14 * GIB),
        replace(sparse, name="glm5-tp8heads-b64-c16k-kv656", model="glm5-h8"),
        dense,
        replace(dense, name="v3-b64-c8k-fp8", kv="fp8"),
        replace(dense, name="v3-tp8heads-b64-c8k-bf16", model="v3-h16"),
        replace(dense, name="kimi-k2-b64-c8k-bf16", model="kimi-k2"),
        replace(dense, name="kimi-k2-tp8heads-b64-c8k-bf16", model="kimi-k2-h8"),
        EngineCase("v3-prefill-b8-s32k-bf16", "v3", 8, 32768, outputs=8, memory=10 * GIB),
        EngineCase("v3-mixed-bf16", "v3", 128, 2500, spread=1.0, batched=2048, memory=10 * GIB),
        tiny,
        replace(tiny, name="tiny-dsv32-kv352", kv="nvfp4_ds_mla"),
        replace(tiny, name="tiny-dsv32-bf16", kv="bf16"),
        replace(tiny, name="tiny-dsv32-kv656-cached", cached=True),
        replace(tiny, name="tiny-dsv32-kv656-full", graphs="FULL"),
        replace(tiny, name="tiny-dsv32-kv656-piecewise", graphs="FULL_AND_PIECEWISE", mode=3),
        replace(tiny, name="tiny-dsv32-kv656-ngram1", drafts=1),
        replace(tiny, name="tiny-dsv32-kv656-ngram3", drafts=3),
        replace(tiny, name="tiny-dsv32-kv656-x2", gpus=2),
        invariant,
        replace(invariant, name="tiny-dsv32-kv656-preempted", memory=blocks),
        replace(invariant, name="tiny-dsv32-bf16-invariant", kv="bf16"),
        replace(tiny, name="tiny-dsv32-kv656-dense", model="dsv32-h16"),  # no prompt is longer than index_topk
        replace(tiny, name="tiny-glm5-kv656", model="glm5-h8"),
        replace(tiny, name="tiny-v3-bf16", model="v3-h16", kv="bf16"),
        replace(tiny, name="tiny-v3-fp8", model="v3-h16", kv="fp8"),
        replace(tiny, name="tiny-v3-bf16-chunks", model="v3-h16", kv="bf16", batched=256),
        replace(tiny, name="tiny-v3-bf16-ngram3", model="v3-h16", kv="bf16", drafts=3),
    ]


def _cases() -> dict[str, EngineCase]:
    llama = EngineCase("llama8b-b64-c8k-bf16", "llama8b", 64, 8192, cached=True)
    long = replace(llama, prompt=16384)
    found = [
        llama,
        replace(llama, name="llama8b-b64-c8k-fp8", kv="fp8"),
        replace(llama, name="llama8b-b64-c8k-nvfp4", kv="nvfp4"),
        replace(long, name="llama8b-b64-c16k-fp8", kv="fp8"),
        replace(long, name="llama8b-b64-c16k-nvfp4", kv="nvfp4"),
        EngineCase("llama8b-b256-lognormal-bf16", "llama8b", 256, 1500, spread=0.8),
        EngineCase("llama8b-prefill-b8-s32k-bf16", "llama8b", 8, 32768, outputs=8),
        EngineCase("llama8b-mixed-bf16", "llama8b", 128, 2500, spread=1.0, batched=2048),
        EngineCase("qwen3-8b-b64-c4k-bf16", "qwen3-8b", 64, 4096, cached=True),
        EngineCase("gemma2-9b-b24-c8k-bf16", "gemma2-9b", 24, 8192, cached=True),
        EngineCase("gptoss20b-b64-c8k-bf16", "gptoss20b", 64, 8192, cached=True, memory=40 * GIB),
        replace(llama, name="llama8b-b64-c8k-bf16-inductor", graphs="FULL_AND_PIECEWISE", mode=3),
        replace(llama, name="llama8b-b64-c8k-bf16-ngram", drafts=3),
        replace(llama, name="llama8b-b64-c8k-bf16-x2", gpus=2, memory=36 * GIB),
        *_tiny(),
    ]
    found += _latent()
    found += [
        replace(case, engine="sglang")
        for case in found
        if "nvfp4" not in case.kv and not (case.drafts or case.invariant) and case.graphs == "FULL_DECODE_ONLY"
    ]
    return {f"engine-{case.engine}-{case.name}": case for case in found}


CASES = _cases()


@dataclass(frozen=True)
class ServerCase:
    """A load of vLLM's HTTP server.

    engine: how the server is started; its prompts and outputs are mean lengths, and its requests run at a time.
    requests: their number. range: lengths are drawn from 1 - range to 1 + range times their mean.
    """

    name: str
    engine: EngineCase
    requests: int = 1000
    range: float = 0.9

    @property
    def longest(self) -> int:
        """Return the tokens of the longest request, abandoned ones included."""
        return 2 * self.engine.prompt + ABANDONED_OUTPUTS


def _servers() -> dict[str, ServerCase]:
    """Return the loads: prompts of 150 to 2,850 tokens, and outputs of 13 to 243. A third of the prompts are longer
    than the `index_topk` of the model with an indexer."""
    name = "server-vllm-dsv32-tp8heads-kv656"
    sparse = EngineCase(name, "dsv32-h16", 128, 1500, outputs=128, kv="fp8_ds_mla", memory=4 * GIB, layers=4)
    found = {name: ServerCase(name, sparse)}
    for kv in ("bf16", "fp8", "nvfp4"):
        engine = EngineCase(f"llama8b-{kv}", "llama8b", 128, 1500, outputs=128, kv=kv, memory=40 * GIB)
        name = f"server-vllm-{engine.name}"
        found[name] = ServerCase(name, engine)
        tiny = replace(engine, name=f"tiny-llama-{kv}", layers=2, requests=32, memory=4 * GIB)
        found[f"server-vllm-{tiny.name}"] = ServerCase(f"server-vllm-{tiny.name}", tiny, requests=100)
    return found


SERVERS = _servers()
