"""Decode: few query rows per sequence, on any architecture with mma.sync and TMA; on `ALONE` ones also prefill.

This file is plain Python. It states what the kernel can do (`supports`, and the constants that `dispatch` reads), which
tile a spec gets (`TILES`) and which kernels are shipped. It imports no DSL: a process that runs a bundle has none.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, ClassVar

from ... import archs
from ..request import KernelRequest, Refusal
from ..spec import (
    BITS,
    DTYPES,
    SF_VEC_SIZE,
    AttentionSpec,
    KVSpec,
    LogitsSpec,
    MaskSpec,
    kv_source,
    outputs,
    padded_dims,
    refuse_dims,
)

ARCHS = archs.NAMES
ALONE = archs.lacking(archs.WGMMA, archs.TCGEN05)  # architectures without a kernel of prefill: decode's serves it
QUANTISED = {"e4m3": "e4m3", "e5m2": "e4m3", "nvfp4": "nvfp4"}  # type of a cache -> the type in the keys of `TILES`
QUERIES = (*DTYPES, "e4m3")
FEW_ROWS = 8  # rows per warp; kernels for calls with more rows have twice as many


@dataclass(frozen=True)
class DecodeTileConfig:
    """The static shape of a CTA's tile: at most m query rows x n keys, with `stages` K stages and as many V stages.

    The mma warps of `warpgroups` compute `rows_per_warp` rows each, 8 or 16, on keys of their own. blackwell: the code
    for architectures with a `cvt` of e2m1 codes, which differs in `quant.kv_format` and `operands.fill`. end_blocks:
    the time that the end of a tile takes, in KV blocks, for the schedule (`stream_k.end_units`).
    """

    m: int
    n: int
    stages: int
    warpgroups: int = 2
    rows_per_warp: int = FEW_ROWS
    blackwell: bool = False
    end_blocks: int = 0

    head_dim_steps: ClassVar[tuple[int, int]] = (32, 32)  # padded dims are multiples: of the first in 16 bits
    load_warps: ClassVar[int] = 1  # warps that fill a stage together
    loops_over_boxes: ClassVar[bool] = True  # less code: that of all roles shares an instruction cache of 32 KB
    per_tile_pack_gqa: ClassVar[bool] = False  # PackGQA is the same for all tiles, see `work.WorkTileInfo`
    pdl_prologue: ClassVar[bool] = True  # a CTA finds its first tile during the previous kernel, see `pdl`

    @property
    def warps(self) -> int:
        """The number of mma warps."""
        return 4 * self.warpgroups

    @property
    def alternates_m_blocks(self) -> bool:
        """Whether the m_blocks of a sequence come as the first, the last, the second, and so on, so that CTAs get equal
        shares of a prompt. They do if each warp of a full tile has 16 rows of its own: such tiles are for prompts."""
        return self.rows_per_warp > FEW_ROWS and self.m == self.rows_per_warp * self.warps

    @property
    def counters_per_split(self) -> int:
        """Counters per split tile: each warp counts the splits of its own rows, and merges them."""
        return self.warps

    @property
    def combine_columns(self) -> int:
        """Registers per lane for the columns of splits that it merges, as far as O and Q leave room."""
        return 96 if self.rows_per_warp == FEW_ROWS and self.warpgroups < 3 else 32

    @property
    def m_choices(self) -> tuple[int, ...]:
        """The numbers of rows that a tile may have, ascending: `rows_per_warp` times a divisor of the warps, at
        most m."""
        each = self.rows_per_warp
        return tuple(n * each for n in range(1, self.warps + 1) if self.warps % n == 0 and n * each <= self.m)

    @property
    def name(self) -> str:
        """The tile's part of a spec's name."""
        name = f"m{self.m}n{self.n}s{self.stages}g{self.warpgroups}r{self.rows_per_warp}"
        return name + ("b" if self.blackwell else "")

    @property
    def e2m1(self) -> bool:
        """Whether the architecture has a `cvt` of e2m1 codes."""
        return self.blackwell


Spec = AttentionSpec[DecodeTileConfig]

# Nearly all shared memory holds K and V in their storage type. A warp has 16 to 64 keys of a stage. Stages are small,
# so that CTAs get equal shares of the work. More warps convert if registers suffice. Kernels with 16 rows per warp hold
# more in registers (8 warps at most) and add up more of O in shared memory.
TILES = {  # (type of the cache, padded head_dim, rows per warp) -> tile
    ("16-bit", 32, 8): DecodeTileConfig(64, 256, 6),
    ("16-bit", 64, 8): DecodeTileConfig(64, 128, 6),
    ("16-bit", 96, 8): DecodeTileConfig(64, 128, 4),
    ("16-bit", 128, 8): DecodeTileConfig(64, 128, 3),
    ("16-bit", 160, 8): DecodeTileConfig(32, 64, 5, 1),
    ("16-bit", 192, 8): DecodeTileConfig(32, 64, 4, 1),
    ("16-bit", 256, 8): DecodeTileConfig(32, 64, 3, 1),
    ("e4m3", 32, 8): DecodeTileConfig(64, 512, 6),
    ("e4m3", 64, 8): DecodeTileConfig(64, 256, 6),
    ("e4m3", 96, 8): DecodeTileConfig(64, 256, 4),
    ("e4m3", 128, 8): DecodeTileConfig(64, 256, 3),
    ("e4m3", 160, 8): DecodeTileConfig(64, 128, 5),
    ("e4m3", 192, 8): DecodeTileConfig(64, 128, 4),
    ("e4m3", 256, 8): DecodeTileConfig(64, 128, 3),
    ("nvfp4", 64, 8): DecodeTileConfig(64, 512, 4),
    ("nvfp4", 128, 8): DecodeTileConfig(48, 384, 3, 3),
    ("nvfp4", 256, 8): DecodeTileConfig(64, 128, 5),
    ("16-bit", 32, 16): DecodeTileConfig(64, 256, 6, 2, 16),
    ("16-bit", 64, 16): DecodeTileConfig(64, 128, 6, 2, 16),
    ("16-bit", 96, 16): DecodeTileConfig(64, 128, 4, 2, 16),
    ("16-bit", 128, 16): DecodeTileConfig(64, 128, 3, 2, 16),
    ("e4m3", 32, 16): DecodeTileConfig(64, 512, 6, 2, 16),
    ("e4m3", 64, 16): DecodeTileConfig(64, 256, 6, 2, 16),
    ("e4m3", 96, 16): DecodeTileConfig(64, 256, 4, 2, 16),
    ("e4m3", 128, 16): DecodeTileConfig(64, 256, 3, 2, 16),
    ("nvfp4", 64, 16): DecodeTileConfig(64, 512, 4, 2, 16),
    ("nvfp4", 128, 16): DecodeTileConfig(64, 256, 5, 2, 16),
    # none with more: O and Q of 16 rows would take 120 registers per thread with head_dim 160, 192 with 256
}
END_BLOCKS = {"16-bit": 0, "e4m3": 2, "nvfp4": 2}  # type of the cache -> `end_blocks` of a tile
SMALL_STAGES = 6  # most stages of a tile that `small_tile` makes
USUAL = (64, 128)  # head dims
SHIPPED = (*USUAL, 256)  # head dims with shipped kernels
GATHERED = ("16-bit", "e4m3")  # cache types with a shipped kernel for pages of any size
BLACKWELL = TILES | {("e4m3", 128, 8): DecodeTileConfig(64, 128, 6)}  # the tile of TILES would spill there


def columns_at_once(dim: int) -> int:
    """Return how many of a lane's columns of `dim` one reduction pass adds up: a power of two."""
    return next(count for count in (16, 8, 4) if dim // 8 % count == 0)


def rows_at_once(dim: int, rows_per_warp: int) -> int:
    """Return how many of a warp's rows one reduction pass adds up."""
    return FEW_ROWS if columns_at_once(dim) == 16 else rows_per_warp


def row_bytes(kind: str, dim: int) -> int:
    """Return the bytes of a key's K and V, with their scale factors. kind, dim: as in `TILES`."""
    return 2 * dim * BITS.get(kind, 16) // 8 + 2 * dim // SF_VEC_SIZE * (kind == "nvfp4")


def smem_bytes(kind: str, dim: int, tile: DecodeTileConfig) -> int:
    """Return the bytes of shared memory per CTA, or slightly more: stages of K and V with their scale factors, O and
    statistics of the reduction, tiles and mbarriers. kind, dim: as in `TILES`."""
    reduced = rows_at_once(dim, tile.rows_per_warp) * 8 * columns_at_once(dim) + 2 * tile.rows_per_warp
    return tile.stages * tile.n * row_bytes(kind, dim) + 4 * tile.warps * reduced + 1024


def small_tile(kind: str, dim: int, rows: int, smem: int) -> DecodeTileConfig:
    """Return the tile for `smem` bytes of shared memory: two mma warpgroups if two stages then fit, else one; as many
    stages as fit."""
    choices = product((2, 1), range(SMALL_STAGES, 0, -1))
    tiles = [DecodeTileConfig(4 * groups * rows, 64 * groups, stages, groups, rows) for groups, stages in choices]
    fit = [tile for tile in tiles if smem_bytes(kind, dim, tile) <= smem]
    return next((tile for tile in fit if tile.stages > 1), fit[-1])


@cache
def tiles_of(arch: str) -> dict[tuple[str, int, int], DecodeTileConfig]:
    """Return the tiles of an architecture, with the keys of `TILES`."""
    row = archs.of(arch)
    blackwell = archs.CVT_E2M1 in row.instructions
    tiles = BLACKWELL if blackwell else TILES
    if row.smem_per_cta < max(smem_bytes(kind, dim, tile) for (kind, dim, _), tile in TILES.items()):
        tiles = {key: small_tile(*key, row.smem_per_cta) for key in tiles}
    return {
        (kind, dim, rows): replace(tile, blackwell=blackwell, end_blocks=END_BLOCKS[kind])
        for (kind, dim, rows), tile in tiles.items()
    }


def spec_of(q: str, kv: str, dim: int, rows: int, arch: str) -> Spec:
    """Return the spec of these types with every modifier; with `rows` rows per warp if there is such a tile, else with
    `FEW_ROWS`."""
    tiles = tiles_of(arch)
    kind, (wide, _) = QUANTISED.get(kv, "16-bit"), padded_dims(kv, (dim, dim), DecodeTileConfig.head_dim_steps)
    tile: Any = tiles.get((kind, wide, rows)) or tiles.get((kind, wide, FEW_ROWS))
    mask, logits = MaskSpec("always", True, True), LogitsSpec(True, True)
    return AttentionSpec(q, KVSpec(kv), outputs(q), dim, dim, mask, logits, "stream_k", tile)


def candidate(request: KernelRequest, arch: str, split: bool = True) -> Spec:
    """Return the spec that would serve a request; `supports` says whether the kernel can. It always splits keys."""
    p, alone = request, arch in ALONE
    # rows: the maximum over the batch, on which the bits of a request must not depend with "never" and "fixed"
    many = p.split_kv in ("auto", "always") and p.packed_rows > FEW_ROWS or alone and p.split_kv == "never"
    full = "value" if alone else "never"  # elsewhere, other kernels serve calls without a causal mask
    spec = spec_of(p.q, p.kv, p.head_dim_qk, 2 * FEW_ROWS if many else FEW_ROWS, arch)
    mask = replace(spec.mask, causal="always" if p.causal else full, custom=p.custom_mask)
    logits = replace(spec.logits, alibi=p.alibi, head_scales=p.head_scales)
    out = outputs(p.q, p.out)
    return replace(spec, kv=KVSpec(p.kv, kv_source(p)), head_dim_vo=p.head_dim_vo, mask=mask, logits=logits, out=out)


def supports(spec: Spec) -> Refusal | None:
    """Return None if the kernel runs `spec`, else the reason why not: the only statement of what the kernel can do."""
    if spec.q not in QUERIES:
        return Refusal("q", f"{spec.q}: the kernel has {', '.join(QUERIES)}")
    if spec.kv.dtype not in (kinds := dict.fromkeys((spec.q, *QUANTISED))):
        return Refusal("kv", f"{spec.kv.dtype}: the kernel has {', '.join(kinds)}")
    if spec.out not in [outputs(spec.q, out) for out in DTYPES]:
        return Refusal("out", f"{', '.join(spec.out)}: the kernel has {', '.join((*DTYPES, 'e4m3', 'nvfp4'))}")
    dims = padded_dims(spec.kv.dtype, spec.dims, DecodeTileConfig.head_dim_steps)
    kind = QUANTISED.get(spec.kv.dtype, "16-bit")
    if spec.head_dim_qk != spec.head_dim_vo:
        return Refusal("head_dim", f"{spec.dims}: must be equal")
    if refusal := refuse_dims(spec, dims, [(dim, dim) for k, dim, rows in TILES if (k, rows) == (kind, FEW_ROWS)]):
        return refusal
    if spec.mask.custom:
        return Refusal("custom_mask", "True: the kernel has the tree mask only")
    if spec.logits.alibi:
        return Refusal("alibi", "True: the kernel has no ALiBi")
    if spec.logits.head_scales:
        return Refusal("head_scales", "True: the kernel has one scale for all heads")
    if spec.mask.causal == "never":
        return Refusal("causal", "False: the kernel is causal, or as the argument says")
    if spec.schedule != "stream_k":
        return Refusal("schedule", f"{spec.schedule}: the kernel has stream_k")
    if not (spec.logits.soft_cap and spec.logits.skip):
        return Refusal("logits", f"{spec.logits}: the kernel takes a soft cap and skip-softmax as values, off or not")
    t = spec.tile
    if t is None:
        return Refusal("tile", "None: must be the op's TileConfig")
    if t.rows_per_warp not in (FEW_ROWS, 2 * FEW_ROWS) or t.m not in t.m_choices:
        return Refusal("tile", f"{t}: m must be rows_per_warp (8 or 16) times a divisor of {t.warps} warps")
    if t.n % (16 * t.warps):
        return Refusal("tile", f"{t}: n must be a multiple of 16 keys times {t.warps} warps")
    return None


def shipped(arch: str) -> list[Spec]:
    """Return the specs of a bundle. Every kernel takes every modifier.

    For bf16 queries: one kernel per type of cache and head_dim, and one more with 16 rows per warp. For the usual head
    dims the same for fp16, and for e4m3 queries over e4m3 caches. For 16-bit queries, the usual head dims and the cache
    types `GATHERED`, also one for pages of any size. The architectures `ALONE` have none of the latter, none for e4m3
    queries, and for fp16 queries only those over fp16. Other kernels are compiled at their first call.
    """
    found = []
    for q, (kv, dim, rows) in product(QUERIES, TILES):
        if dim not in (SHIPPED if q == "bf16" else USUAL) or q == "e4m3" != kv:
            continue
        if arch in ALONE and (q == "e4m3" or q == "fp16" and kv != "16-bit"):
            continue
        spec = spec_of(q, q if kv == "16-bit" else kv, dim, rows, arch)
        found.append(spec)
        if q != "e4m3" and kv in GATHERED and dim in USUAL and arch not in ALONE:
            found.append(replace(spec, kv=replace(spec.kv, source="gather")))
    return found if arch in ARCHS else []
