"""Hopper attention forward. This file is plain Python: what the kernel can do, and which tile it takes.

`supports` is the only statement of what the kernel can do: dispatch, tests, the list of shipped kernels and README's
support table come from it. It imports no DSL, because a process that runs a bundle has none.
"""

from ..spec import DTYPES, AttentionSpec, TileSpec

ARCHS = ("sm_90a",)

# (head_dim_qk, head_dim_vo) -> tile. 227 KiB of shared memory hold `q_stages` of Q, `stages` of K and of V; a warpgroup's registers
# (240 a thread) hold S, P and O.
TILES = {
    (64, 64): TileSpec(128, 128, 2),
    (128, 128): TileSpec(128, 128, 2),
    (192, 128): TileSpec(128, 128, 2, 1),
    (256, 256): TileSpec(128, 64, 2, 1),
}
BOXES = (8, 16)


def supports(spec: AttentionSpec) -> str | None:
    """None where the kernel runs `spec`, else the reason why not."""
    if spec.dtype not in DTYPES:
        return f"dtype {spec.dtype}: the sm_90a kernel has {', '.join(DTYPES)}"
    dims = (spec.head_dim_qk, spec.head_dim_vo)
    if dims not in TILES:
        return f"head_dim {dims}: the sm_90a kernel has {', '.join(map(str, TILES))}"
    if spec.kv.source != "paged" or spec.kv.box not in BOXES:
        return f"kv {spec.kv}: the sm_90a kernel reads paged KV in TMA boxes of {BOXES} rows"
    if spec.tile.m % 64 or not 64 <= spec.tile.m <= 192 or spec.tile.n % spec.kv.box:
        return f"tile {spec.tile}: m is 64, 128 or 192, n a multiple of the TMA box"
    return None
