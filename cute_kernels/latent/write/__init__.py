"""Rows of latent attention, a warp per row: the facts and limits of the kernel, in plain Python.

`supports` is the only statement of what the kernel can do. Nothing here imports the DSL, because a process that
runs a bundle has none."""

from ... import archs
from ...records import INDEX, RECORDS
from ..request import LatentRequest
from ..spec import LatentSpec

Spec = LatentSpec
ARCHS = archs.NAMES
DTYPES = ("bf16", "fp16")
THREADS = 128  # per CTA; few, so that the rows of a decode step are spread over the SMs
WARP = 32
VALUES = 16  # of the latent that a lane holds
INDEX_LANES = 8  # per row of an indexer
MOST_LATENT, MOST_ROTATED = WARP * VALUES, 2 * WARP
WAVES = 32  # CTAs per SM of a launch of many rows: about four times those that run at a time
MAX_ROWS = (1 << 31) - THREADS  # the number of a row is an Int32


def supports(spec: LatentSpec) -> str | None:
    """Return None if the kernel runs `spec`, else the reason why not."""
    if spec.dtype not in DTYPES:
        return f"dtype {spec.dtype}: the kernel has {', '.join(DTYPES)}"
    if spec.joined and spec.index:
        return "joined: the rows are those of an indexer alone"
    return None if spec.record in RECORDS else f"record {spec.record}: the kernel has {', '.join(RECORDS)}"


def ctas_per_sm(spec: LatentSpec) -> int:
    """Return how many CTAs an SM holds at least; the compiler is told this number."""
    return 7 if spec.joined else 8  # with 8, a joined launch would spill registers


def grid(warps: int, sms: int) -> int:
    """Return the CTAs of a launch that has the rows of so many warps."""
    return max(1, min(-(-warps * WARP // THREADS), WAVES * sms))


def refuses(request: LatentRequest) -> str | None:
    """Return None if the kernel serves a call's sizes, else the reason why not."""
    if request.record == INDEX:
        return None
    for latent, rotated in ((request.latent, request.rotated), request.of_query):
        if latent % VALUES or latent > MOST_LATENT:
            return f"latent {latent}: must be a multiple of {VALUES}, at most {MOST_LATENT}"
        if rotated % 2 or rotated > MOST_ROTATED:
            return f"rotated {rotated}: must be even, at most {MOST_ROTATED}"
    if request.rows > MAX_ROWS:
        return f"n * heads {request.rows}: must be at most {MAX_ROWS}"
    return None
