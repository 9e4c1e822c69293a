"""The caches that vLLM's layers of latent attention and of their indexer may have: what their backends share."""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import MultipleOf

from ..vllm.latent import concat_and_cache_mla
from .latent_support import COLUMNS, ROTATED, latent_refusal
from .support import ARCHS, SIXTEEN_BITS

BLOCK = 64  # tokens that TMA loads at a time: blocks of a multiple of them are the fastest


class Blocks:
    """The blocks of a cache, and of metadata, that a backend supports, in vLLM's terms."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the tokens of a block, if the user asked for none."""
        return default_block_size if default_block_size % BLOCK == 0 else BLOCK

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False


class LatentCaches(Blocks):
    """The configurations of latent attention that kernels support, in vLLM's terms.

    RECORDS: names of quantised caches, and the records of their rows. SPARSE: tokens choose their keys.
    """

    RECORDS: ClassVar[dict[str, str]]
    SPARSE: ClassVar[bool]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [COLUMNS + ROTATED]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return (capability.major, capability.minor) in ARCHS

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, block_size: int | None, use_mla: bool,
        has_sink: bool, use_sparse: bool, use_mm_prefix: bool, device_capability: Any,
    ) -> str | None:  # fmt: skip
        """Return the reason of `explain` if no kernel of the architecture takes these types, else None."""
        arch = ARCHS.get((device_capability.major, device_capability.minor))
        if arch is None or head_size != COLUMNS + ROTATED:
            return None  # other methods refuse these
        if SIXTEEN_BITS.get(kv_cache_dtype, dtype) is not dtype:
            return f"kv_cache_dtype: {kv_cache_dtype}, must be that of the model, {dtype}"
        return latent_refusal(arch, dtype, cls.RECORDS.get(kv_cache_dtype, ""), sparse=cls.SPARSE)


class LatentLayer:
    """A layer's checks, and how it writes rows."""

    def do_kv_cache_update(
        self, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor,
        kv_cache_dtype: str, k_scale: torch.Tensor, skip_scale: bool = False,
    ) -> None:  # fmt: skip
        """Store rows at their slots. skip_scale: the scale is 1."""
        if kv_cache.numel():
            concat_and_cache_mla(
                kv_c_normed, k_pe.squeeze(1), kv_cache, slot_mapping.flatten(), kv_cache_dtype, k_scale
            )


def check_layer(supported: list[Any], kv_cache_dtype: str, kv_lora_rank: int, **absent: Any) -> None:
    """Raise NotImplementedError on a layer that no kernel supports. supported: names of caches. absent: options that
    must be None."""
    for name, value in absent.items():
        if value is not None:
            raise NotImplementedError(f"{name}: {value}, must be None")
    if kv_cache_dtype not in supported:
        raise NotImplementedError(f"kv_cache_dtype: {kv_cache_dtype!r}, must be one of {', '.join(supported)}")
    if kv_lora_rank != COLUMNS:
        raise NotImplementedError(f"kv_lora_rank: {kv_lora_rank}, must be {COLUMNS}")
