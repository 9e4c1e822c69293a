"""Rows of latent attention read from a cache, lanes of a warp per row: the facts and limits of the kernel, in plain
Python.

`supports` is the only statement of what the kernel can do. Nothing here imports the DSL, because a process that
runs a bundle has none."""

from ... import archs
from ...records import BYTES, INDEX, RECORDS, ROWS
from ..request import ReadRequest
from ..spec import ReadSpec

Spec = ReadSpec
ARCHS = archs.NAMES
DTYPES = ("bf16", "fp16")
THREADS = 128  # per CTA
WARP = 32
VALUES = 16  # of a row that a lane holds at a time
INDEX_LANES = 8  # per row of an indexer
WAVES = 32  # CTAs per SM of a launch of many rows; half as many of an indexer's
MAX_ROWS = (1 << 31) - THREADS  # the number of a row is an Int32


def supports(spec: ReadSpec) -> str | None:
    """Return None if the kernel runs `spec`, else the reason why not."""
    if spec.record in (BYTES, INDEX):
        return None if spec.dtype == "uint8" else f"dtype {spec.dtype}: rows of record {spec.record} are bytes"
    if spec.record not in RECORDS or spec.record == ROWS:
        return f"record {spec.record}: the kernel has {BYTES} and all of {', '.join(RECORDS)} but {ROWS}"
    return None if spec.dtype in DTYPES else f"dtype {spec.dtype}: the kernel has {', '.join(DTYPES)}"


def ctas_per_sm(spec: ReadSpec) -> int:
    """Return how many CTAs an SM holds at least; the compiler is told this number."""
    return 8


def lanes(spec: ReadSpec) -> int:
    """Return the lanes that share a row."""
    return INDEX_LANES if spec.record == INDEX else WARP


def grid(spec: ReadSpec, rows: int, sms: int) -> int:
    """Return the CTAs of a launch of so many rows."""
    waves = WAVES // 2 if spec.record == INDEX else WAVES
    return max(1, min(-(-rows * lanes(spec) // THREADS), waves * sms))


def refuses(request: ReadRequest) -> str | None:
    """Return None if the kernel serves a call's sizes, else the reason why not."""
    return f"rows {request.rows}: must be at most {MAX_ROWS}" if request.rows > MAX_ROWS else None
