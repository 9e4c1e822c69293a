"""Rows of V, a few lanes per row: the facts and limits of the kernel, in plain Python.

`supports` is the only statement of what the kernel can do. Nothing here imports the DSL, because a process that
runs a bundle has none."""

from ... import archs
from ..request import MergeRequest
from ..spec import BYTES, MergeSpec

Spec = MergeSpec
ARCHS = archs.NAMES
THREADS = 128  # per CTA; few, so that the rows of a decode step are spread over the SMs
MAX_LANES = 32  # per row: a warp
VECTORS = 2  # of a row that a lane holds
UNROLL = 2  # states of which the loads are in flight together; a power of two
MAX_ROWS = (1 << 31) - THREADS  # the number of a row is an Int32


def supports(spec: MergeSpec) -> str | None:
    """Return None if the kernel runs `spec`, else the reason why not."""
    return None if spec.dtype in BYTES else f"dtype {spec.dtype}: the kernel has {', '.join(BYTES)}"


def ctas_per_sm(spec: MergeSpec) -> int:
    """Return how many CTAs an SM holds at least; the compiler is told this number. With one more, fp32 kernels use the
    first loads before they issue the last."""
    return 7 if spec.dtype == "fp32" else 8


def lanes(head_dim: int, elements: int) -> int:
    """Return the lanes per row of `head_dim` elements, in vectors of `elements`: a power of two."""
    return min(MAX_LANES, 1 << (-(-head_dim // (VECTORS * elements)) - 1).bit_length())


def refuses(request: MergeRequest) -> str | None:
    """Return None if the kernel serves a call's sizes, else the reason why not."""
    if request.rows > MAX_ROWS:
        return f"n * heads {request.rows}: must be at most {MAX_ROWS}"
    return None
