"""Rows of Q, K and V, a few lanes per row: the facts and limits of the kernel, in plain Python.

`supports` is the only statement of what the kernel can do. Nothing here imports the DSL, because a process that
runs a bundle has none."""

from ... import archs
from ...dtypes import LARGEST
from ..request import CacheWriteRequest
from ..spec import BYTES, CACHES, SF_VEC_SIZE, CacheWriteSpec

Spec = CacheWriteSpec
ARCHS = archs.NAMES
THREADS = 256  # per CTA
MAX_LANES = 32  # per row: a warp
MAX_TRANSFORMED = 512  # elements of a row that a warp holds in registers
ROTATED = 16  # rotated elements are a multiple of this: the pairs of a vector lie in whole vectors


def supports(spec: CacheWriteSpec) -> str | None:
    """Return None if the kernel runs `spec`, else the reason why not."""
    if spec.dequantises:
        return None if spec == CacheWriteSpec("nvfp4", "fp32") else "dtype nvfp4: its values are written as fp32 alone"
    if spec.dtype not in BYTES:
        return f"dtype {spec.dtype}: the kernel has {', '.join(BYTES)}"
    if spec.cache not in CACHES:
        return f"cache {spec.cache}: the kernel has {', '.join(CACHES)}"
    if spec.quantised and (spec.dtype == "uint8" or spec.cache in BYTES):
        return f"cache {spec.cache}: rows of {spec.dtype} are not converted to it"
    if spec.transform and spec.dtype == "uint8":
        return "transform: needs rows of bf16 or fp16"
    if spec.scales and (spec.scales != "token" or spec.cache not in LARGEST or not spec.transform):
        return f"scales {spec.scales}: the kernel has token, with a transform and a cache of {', '.join(LARGEST)}"
    if spec.gather and (spec.quantised or not spec.transform):
        return "gather: needs a transform, and a cache of the rows' type"
    return None


def ctas_per_sm(spec: CacheWriteSpec) -> int:
    """Return how many CTAs an SM holds at least; the compiler is told this number. Without it, it spills a register or
    two to hold more."""
    if spec.dequantises:
        return 6
    if spec.gather:
        return 4
    if spec.transform:
        return 2
    return 3 if spec.quantised else 4


def lanes(head_dim: int, elements: int) -> int:
    """Return the lanes per row of `head_dim` elements, where a lane has two vectors of `elements`: a power of two."""
    each = 2 * elements
    return min(MAX_LANES, max(2, 1 << (-(-head_dim // each) - 1).bit_length()))


def refuses(request: CacheWriteRequest) -> str | None:
    """Return None if the kernel serves a call's sizes, else the reason why not."""
    if request.transform and request.head_dim > MAX_TRANSFORMED:
        return f"head_dim {request.head_dim}: must be at most {MAX_TRANSFORMED} with Q, a norm or a rotary embedding"
    if request.rotated % ROTATED or request.rotated > request.head_dim:
        return (
            f"rotated elements {request.rotated}: must be a multiple of {ROTATED}, at most head_dim {request.head_dim}"
        )
    if request.cache == "nvfp4" and request.head_dim % SF_VEC_SIZE:
        return f"head_dim {request.head_dim}: must be a multiple of {SF_VEC_SIZE} for nvfp4"
    return None
