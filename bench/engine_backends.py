"""The attention backends of the engines, by the names of their providers, and which loads each of them runs."""

from dataclasses import replace

from cute_kernels.attention.spec import tokens_of_union

from .cases.engine import EngineCase

BACKENDS: dict[str, dict[str, str]] = {  # engine -> provider -> the engine's name of its attention backend
    "vllm": {
        "ours": "CUSTOM", "vllm-flash-attn": "FLASH_ATTN", "vllm-flashinfer": "FLASHINFER",
        "vllm-triton": "TRITON_ATTN", "own-fp8": "CUSTOM", "own-kv656": "CUSTOM", "ours-shared": "CUSTOM",
        "ours-packed": "CUSTOM",
        "vllm-flashmla": "FLASHMLA", "vllm-flash-attn-mla": "FLASH_ATTN_MLA", "vllm-triton-mla": "TRITON_MLA",
        "vllm-flashmla-sparse": "FLASHMLA_SPARSE", "vllm-flash-attn-mla-sparse": "FLASH_ATTN_MLA_SPARSE",
    },
    "sglang": {
        "ours": "cute_kernels", "ours-shared": "cute_kernels",
        "sglang-fa3": "fa3", "sglang-flashinfer": "flashinfer", "sglang-triton": "triton",
        "sglang-flashmla": "flashmla", "sglang-dsa": "dsa",
    },
}  # fmt: skip
SGLANG_OWN = ("sglang-fa3", "sglang-flashinfer", "sglang-triton")
OF_ATTENTION = {  # kind of a model's attention -> the engines' own backends that have it
    "gqa": ("vllm-flash-attn", "vllm-flashinfer", "vllm-triton", *SGLANG_OWN),
    "mla": ("vllm-flashmla", "vllm-flash-attn-mla", "vllm-triton-mla", "sglang-flashmla", *SGLANG_OWN),
    "dsa": ("vllm-flashmla-sparse", "vllm-flash-attn-mla-sparse", "sglang-dsa"),
}
OTHER_CACHE = {"own-fp8": "fp8", "own-kv656": "fp8_ds_mla"}  # our backend over another cache than the case's
BESIDE = {"nvfp4": "own-fp8", "nvfp4_ds_mla": "own-kv656"}  # cache of a case -> which of these runs beside
CACHES = {  # of the engines' own backends on Hopper; those that are not here have bf16 and fp8
    "vllm-flash-attn-mla": ("bf16",), "vllm-flash-attn-mla-sparse": ("bf16",),
    "vllm-flashmla-sparse": ("bf16", "fp8_ds_mla"), "sglang-dsa": ("bf16", "fp8_ds_mla"),
}  # fmt: skip
ONLY_BF16 = ("vllm-flash-attn-mla-sparse",)  # runs cases with other caches over a cache in bf16
OURS = ("ours", "ours-shared", "ours-packed", *OTHER_CACHE)
INVARIANT = ("ours", "vllm-flash-attn")  # have batch-invariant bits; ours for chosen keys alone
DEFAULTS = {"CUTE_KERNELS_SHARE_KEYS": "0", "CUTE_KERNELS_STAGE_KEYS": ""}
ENVIRONMENT = {  # provider -> what its process has in the environment
    "ours": DEFAULTS,
    "ours-shared": DEFAULTS | {"CUTE_KERNELS_SHARE_KEYS": "1"},
    "ours-packed": DEFAULTS | {"CUTE_KERNELS_STAGE_KEYS": "0"},
}
STAGED_CACHES, STAGED_HEADS = ("fp8_ds_mla", "nvfp4_ds_mla"), 64  # that `vllm_staging` stages; the least heads


def cache_of(case: EngineCase, provider: str) -> EngineCase:
    """Return the case with the cache over which the provider runs it."""
    return replace(case, kv=OTHER_CACHE.get(provider, "bf16" if provider in ONLY_BF16 else case.kv))


def has_backend(case: EngineCase, provider: str) -> bool:
    """Return whether a provider runs a case: the engine has its backend, for this attention, cache and mode."""
    if provider not in BACKENDS[case.engine]:
        return False
    if case.invariant and not (provider in INVARIANT and (provider == "ours") == (case.attention == "dsa")):
        return False
    if provider in OTHER_CACHE:
        return BESIDE.get(case.kv) == provider
    if provider == "ours-shared":
        heads = case.config["num_attention_heads"] // case.gpus
        return case.attention == "dsa" and case.kv != "nvfp4_ds_mla" and tokens_of_union(heads) > 1
    if provider == "ours-packed":
        heads = case.config["num_attention_heads"] // case.gpus
        return case.attention == "dsa" and case.kv in STAGED_CACHES and heads >= STAGED_HEADS
    if provider == "ours":
        return True
    kv = cache_of(case, provider).kv
    return provider in OF_ATTENTION[case.attention] and kv in CACHES.get(provider, ("bf16", "fp8"))
