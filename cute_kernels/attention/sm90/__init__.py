"""Hopper attention forward. This file is plain Python: what the kernel can do, and which tile it takes.

`supports` is the only statement of what the kernel can do: dispatch, tests, the list of shipped kernels and README's
support table come from it. It imports no DSL, because a process that runs a bundle has none.
"""

from ..spec import DTYPES, AttentionSpec, TileSpec

ARCHS = ("sm_90a",)

# 227 KiB of shared memory hold `q_stages` of Q, `stages` of K and of V; the 232 registers of a thread (160 with three
# math warpgroups) hold S, P, O and, with q_registers, Q.
TILES = {  # (head_dim_qk, head_dim_vo) -> tile
    (64, 64): TileSpec(128, 128, 4, 1),
    (128, 128): TileSpec(128, 128, 2, 1),
    (192, 128): TileSpec(128, 128, 2, 1),
    (256, 256): TileSpec(128, 80, 2, 1),
}
# Decoding: nearly all the shared memory that there is holds K and V as they are stored. A warp has 16 to 64 keys of a
# stage. Stages are small, so that work is shared among CTAs evenly. More warps convert where registers suffice.
# Wide kernels hold more in registers, 8 warps at most, and add up more of O in shared memory.
SPLIT_TILES = {  # (KV dtype, head_dim) -> tile
    ("", 64): TileSpec(64, 128, 6, 1, False, 2),
    ("", 128): TileSpec(64, 128, 3, 1, False, 2),
    ("", 256): TileSpec(32, 64, 3, 1, False, 1),
    ("e4m3", 64): TileSpec(64, 256, 6, 1, False, 2),
    ("e4m3", 128): TileSpec(64, 256, 3, 1, False, 2),
    ("e4m3", 256): TileSpec(64, 128, 3, 1, False, 2),
    ("nvfp4", 64): TileSpec(64, 512, 4, 1, False, 2),
    ("nvfp4", 128): TileSpec(48, 384, 3, 1, False, 3),
    ("nvfp4", 256): TileSpec(64, 128, 5, 1, False, 2),
}
WIDE_DIMS = (64, 128)  # 256: O and Q of 16 rows are 192 registers of a thread
WIDE_TILES = {key: tile for key, tile in SPLIT_TILES.items() if key[1] in WIDE_DIMS}
WIDE_TILES["nvfp4", 128] = TileSpec(64, 256, 5, 1, False, 2)
PAGE_SIZES = (8, 16, 32, 64, 128, 256)


def split_tiles(spec: AttentionSpec) -> dict[tuple[str, int], TileSpec]:
    return WIDE_TILES if spec.wide else SPLIT_TILES


def tile_for(spec: AttentionSpec) -> TileSpec | None:
    """The tile that `spec` runs with. Its n depends on the head dims, split and the cache's type alone: a row's
    rounding depends on n, and a request's result must depend on nothing but the request."""
    dims = (spec.head_dim_qk, spec.head_dim_vo)
    if spec.split:
        return split_tiles(spec).get((spec.kv.dtype, dims[0])) if dims[0] == dims[1] else None
    few_registers = not spec.soft_cap and not spec.pack_gqa
    if dims == (64, 64) and few_registers and not spec.mask.window:
        return TileSpec(192, 128, 4, 2)
    if dims == (128, 128) and few_registers:
        return TileSpec(128, 128, 3, 1, True)
    return TILES.get(dims)


def supports(spec: AttentionSpec) -> str | None:
    """None where the kernel runs `spec`, else the reason why not."""
    if spec.dtype not in DTYPES:
        return f"dtype {spec.dtype}: the sm_90a kernel has {', '.join(DTYPES)}"
    dims = (spec.head_dim_qk, spec.head_dim_vo)
    if dims not in TILES:
        return f"head_dim {dims}: the sm_90a kernel has {', '.join(map(str, TILES))}"
    if spec.split:
        if tile_for(spec) is None or not spec.pack_gqa or spec.soft_cap:
            shipped = ", ".join(sorted({str(dim) for _, dim in split_tiles(spec)}))
            asked = f"head_dim {dims}, pack_gqa {spec.pack_gqa}, wide {spec.wide}"
            return f"split: {asked}: has packed rows of head_dim {shipped}"
        rows = spec.warp_rows
        if spec.tile.m % rows or 4 * spec.tile.warpgroups % (spec.tile.m // rows):
            return f"tile {spec.tile}: m is {rows} rows for each of a divisor of {4 * spec.tile.warpgroups} warps"
        if spec.tile.n % (64 * spec.tile.warpgroups):
            return f"tile {spec.tile}: n is a multiple of 16 keys for each of {4 * spec.tile.warpgroups} warps"
    elif spec.kv.dtype:
        return f"kv {spec.kv.dtype}: the sm_90a kernel has it for decoding only"
    if spec.kv.source != "paged":
        return f"kv {spec.kv}: the sm_90a kernel reads paged KV"
    if not spec.split and (spec.tile.m % 64 or not 64 <= spec.tile.m <= 192 or spec.tile.n % 16):
        return f"tile {spec.tile}: m is 64, 128 or 192, n a multiple of 16"
    return None
