"""Logits by wgmma, with keys on M and (token, head) pairs on N: the facts and limits of the kernel, in plain Python.

`supports` is the only statement of what the kernel can do. Nothing here imports the DSL, because a process that
runs a bundle has none."""

from ... import archs
from ..request import IndexerRequest
from ..spec import IndexerSpec

Spec = IndexerSpec
ARCHS = archs.having(archs.WGMMA)
DIMS = (32, 64, 128)
OUTS = ("fp32", "bf16")
TYPES = ("e4m3", "bf16")  # of queries and keys
HEADS = (32, 64)  # of a token, padded
MOST_ROWS = 8
COLUMNS = 128  # of the accumulator of an MMA, at most
HELD = 256  # columns of which registers hold the weights, at most
KEYS = 64  # of a block: rows of an MMA
GROUPS = 2  # mma warpgroups, which take blocks in turn
STAGES = {"e4m3": 8, "bf16": 4}  # of keys, as many bytes
Q_STAGES = 2  # of the tokens of a tile
MAX_TOKENS = 1 << 30  # the number of a tile is an Int32


def padded_heads(heads: int) -> int:
    """Return the heads of the kernel that computes so many; more than it has are returned as they are."""
    return next((n for n in HEADS if heads <= n), heads)


def rows_of_tile(heads: int, rows: int, keys: str = "e4m3") -> int:
    """Return the tokens of a tile, a power of two: all `rows` of a request, if these are few, or as many as registers
    hold the weights of. Shared memory has no room for more queries in bf16."""
    most = next(n for n in (8, 4, 2, 1) if heads * n <= HELD or n == 1)
    few = keys == "e4m3" and rows <= MOST_ROWS
    return min(MOST_ROWS if few else most, 1 << (rows - 1).bit_length())


def chunk_rows(spec: IndexerSpec) -> int:
    """Return the tokens of an MMA."""
    return next(n for n in (8, 4, 2, 1) if n <= spec.rows and (spec.heads * n <= COLUMNS or n == 1))


def accumulators(spec: IndexerSpec) -> int:
    """Return the accumulators of a warpgroup: an MMA fills one while another one is weighed."""
    return min(2, spec.rows // chunk_rows(spec))


def holds_weights(spec: IndexerSpec) -> bool:
    """Return whether registers hold the weights of all tokens of a tile; otherwise they are loaded for each MMA."""
    return spec.heads * spec.rows <= HELD


def loaders(spec: IndexerSpec) -> int:
    """Return the warps that load keys: more where a block takes the MMAs little time, and leaves registers."""
    return 4 if spec.heads * spec.rows <= COLUMNS else 2


def supports(spec: IndexerSpec) -> str | None:
    """Return None if the kernel runs `spec`, else the reason why not."""
    if spec.dim not in DIMS:
        return f"head_dim {spec.dim}: the kernel has {', '.join(map(str, DIMS))}"
    if spec.heads not in HEADS:
        return f"heads {spec.heads}: the kernel has {' and '.join(map(str, HEADS))}, to which fewer ones are padded"
    if spec.rows not in (1, 2, 4, 8):
        return f"rows {spec.rows}: a tile has 1, 2, 4 or 8"
    if spec.keys not in TYPES:
        return f"keys in {spec.keys}: the kernel has {', '.join(TYPES)}"
    if spec.keys == "bf16" and spec.heads * spec.rows > HELD:
        return f"rows {spec.rows}: a tile of bf16 queries has {HELD} heads in all"
    return None if spec.out in OUTS else f"output {spec.out}: the kernel has {', '.join(OUTS)}"


def refuses(request: IndexerRequest) -> str | None:
    """Return None if the kernel serves a call's sizes, else the reason why not."""
    return f"tokens {request.tokens}: must be at most {MAX_TOKENS}" if request.tokens > MAX_TOKENS else None
