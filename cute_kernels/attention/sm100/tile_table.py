"""The tiles of the kernels for Blackwell: the only table of the head dims that they have. Plain Python.

A row of `TABLE` is a pair of padded head dims; its cells are the tiles, by types. A new head dim is a new row.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import ClassVar, NamedTuple

from ... import archs
from ...dtypes import BITS
from ..operands import K, Operand, Prepared, V, operands_of
from ..schedule import policy
from ..spec import DTYPES, AttentionSpec, KVSpec
from ..tile import PreparedTileConfig, Resources, WholeTileConfig, distinct_dims

FP8 = "e4m3"


@dataclass(frozen=True)
class Sm100TileConfig(WholeTileConfig, PreparedTileConfig):
    """A tile of m query rows x n keys. m is two halves of 128 rows, or one half.

    stages, q_stages: K, and as many V, tiles in flight; Q tiles. raw_stages: of K and V as stored, if they are
    dequantised; 0 means `stages`. load_warps: warps that fill a stage together. ex2_emu: of 16 exponentials, those that
    do without the special function unit in blocks that need no mask. has_half_tiles: requests of at most 128 rows get
    tiles of one half. o_tiles: tiles that have the same rows, all of S, and a part each of the columns of O, since 512
    columns would take all of tensor memory.
    """

    m: int = 256
    n: int = 128
    stages: int = 2
    q_stages: int = 1
    raw_stages: int = 0
    load_warps: int = 1
    ex2_emu: int = 0
    has_half_tiles: bool = False
    o_tiles: int = 1
    dequant_pieces: ClassVar[int] = 2
    l2_bytes: ClassVar[int] = 32 << 20  # L2 is 126 MB in two halves
    per_tile_pack_gqa: ClassVar[bool] = True
    e2m1: ClassVar[bool] = True

    @property
    def m_choices(self) -> tuple[int, ...]:
        """Return the numbers of rows that a tile may have."""
        return (self.m // 2, self.m) if self.has_half_tiles else (self.m,)

    @property
    def name(self) -> str:
        parts = f"e{self.ex2_emu}" if self.ex2_emu else ""
        return f"m{self.m}n{self.n}s{self.stages}" + parts + (f"o{self.o_tiles}" if self.o_tiles > 1 else "")

    def head_dims(self, bits: int) -> tuple[int, ...]:
        """Return the head dims that kernels compute with. bits: per stored element of K and V."""
        return HEAD_DIMS if bits == 16 else QUANTISED_HEAD_DIMS


class Sm100Row(NamedTuple):
    """The tiles for padded (head_dim_qk, head_dim_vo). half: Q, K and V have 16 bits. fp8: they have 8 bits. quantised:
    16-bit queries over a quantised cache. e4m3_query: the same with e4m3 queries. split, split_fp8, split_quantised:
    kernels of the first three columns in which CTAs share the keys of a sequence; their head dims are those of the row.
    None: there is no such kernel."""

    dims: tuple[int, int]
    half: Sm100TileConfig | None = None
    fp8: Sm100TileConfig | None = None
    quantised: Sm100TileConfig | None = None
    e4m3_query: Sm100TileConfig | None = None
    split: Sm100TileConfig | None = None
    split_fp8: Sm100TileConfig | None = None
    split_quantised: Sm100TileConfig | None = None


# Shared memory, 227 KiB, must hold `q_stages` stages of Q and `stages` stages each of K and V. Over a quantised cache a
# KV block has fewer keys, because softmax gives up registers to the prepare warpgroup; e4m3 queries are in shared
# memory as loaded and as fp16.
_T = Sm100TileConfig
TABLE = (
    Sm100Row(
        (32, 32),
        half=_T(stages=4),
    ),
    Sm100Row(
        (64, 64),
        half=_T(stages=4),
        fp8=_T(stages=6, q_stages=2),
        quantised=_T(n=96, stages=3, raw_stages=4),
        e4m3_query=_T(n=96, stages=3, raw_stages=4),
        split=_T(m=128, stages=6),
        split_fp8=_T(m=128, stages=8),
        split_quantised=_T(m=128, n=96, stages=3, raw_stages=6),
    ),
    Sm100Row(
        (96, 96),
        half=_T(stages=3),
    ),
    Sm100Row(
        (128, 128),
        half=_T(stages=2),
        fp8=_T(stages=5),
        quantised=_T(n=96, raw_stages=2),
        e4m3_query=_T(n=96, raw_stages=1),
        split=_T(m=128, n=96, stages=3),  # 128 keys take 688 bytes too many
        split_fp8=_T(m=128, stages=6),
        split_quantised=_T(m=128, n=96, raw_stages=3),
    ),
    Sm100Row(
        (160, 160),
        half=_T(m=128, n=96),
    ),
    Sm100Row(
        (192, 128),
        half=_T(n=64, stages=3),
        fp8=_T(stages=4),
        quantised=_T(n=64, raw_stages=2),
        e4m3_query=_T(n=64, stages=1, raw_stages=1),
    ),
    Sm100Row(
        (192, 192),
        half=_T(m=128, n=96),
        fp8=_T(m=128, stages=3),
        quantised=_T(m=128, n=64, stages=1, raw_stages=2),
        e4m3_query=_T(m=128, n=64, stages=1, raw_stages=2),
    ),
    Sm100Row(
        (256, 256),
        half=_T(m=128, n=64),
        fp8=_T(m=128, stages=3),
        quantised=_T(m=128, n=64, stages=1, raw_stages=2),
        e4m3_query=_T(m=128, n=64, stages=1, raw_stages=2),
    ),
    Sm100Row(
        (512, 512),
        half=_T(m=128, n=32, o_tiles=2),
        fp8=_T(m=128, n=64, stages=3, o_tiles=2),
        quantised=_T(m=128, n=32, stages=1, raw_stages=2, o_tiles=2),
    ),
)
HALF = 128  # with more columns of O, a tile has one half of the rows: two O do not fit in tensor memory
EX2_EMU_ARCHS = ("sm_100a",)  # sm_103a's special function unit has twice the rate
HEAD_DIMS = distinct_dims(row.dims for row in TABLE if row.half)
QUANTISED_HEAD_DIMS = distinct_dims(row.dims for row in TABLE if row.fp8 or row.quantised or row.e4m3_query)


def kind_of(q: str, kv: str) -> str:
    """Return the column of `TABLE` for these types."""
    return ("fp8" if q == FP8 else "half") if q == kv else "e4m3_query" if q == FP8 else "quantised"


SPLIT_TYPES = {  # (type of queries, of K and V) -> the column of `TABLE` of kernels in which CTAs share keys
    **{(q, q): "split" for q in DTYPES},
    (FP8, FP8): "split_fp8",
    **{("bf16", kv): "split_quantised" for kv in (FP8, "nvfp4")},
}


@cache
def column(kind: str) -> dict[tuple[int, int], Sm100TileConfig]:
    """Return padded head dims -> tile, for a column of `TABLE`."""
    found = {row.dims: getattr(row, kind) for row in TABLE}
    return {dims: tile for dims, tile in found.items() if tile}


def tile_of(q: str, kv: str, dims: tuple[int, int], arch: str) -> Sm100TileConfig | None:
    """Return the tile of a kernel with whole tiles, None if there is none for these padded head dims."""
    kind = kind_of(q, kv)
    tile = column(kind).get(dims)
    return tile and replace(tile, ex2_emu=emulated(kind, dims) if arch in EX2_EMU_ARCHS else 0)


def emulated(kind: str, dims: tuple[int, int]) -> int:
    """Return how many of 16 exponentials do without the special function unit.

    Four where they take longer than the MMAs: head_dim 64, or 8-bit operands up to head_dim 128. Two where they take
    as long: P @ V then begins so early that a period of two blocks takes 2,012 cycles, and its MMAs 2,048 (with none
    2,100; with four 1,948, for 64 instructions more per block). None where MMAs or, over quantised caches, reads of
    shared memory take longer."""
    if dims[1] > HALF:
        return 0
    if kind == "fp8" or sum(dims) < 2 * HALF:
        return 4
    return 2 if kind == "half" and sum(dims) == 2 * HALF else 0


def split_tile_of(q: str, kv: str, dims: tuple[int, int]) -> Sm100TileConfig | None:
    """Return the tile of the kernel in which CTAs share the keys of a sequence, or None if there is no such kernel."""
    kind = SPLIT_TYPES.get((q, kv))
    return column(kind).get(dims) if kind else None


# Bytes of shared memory for tiles of work and the scheduler, besides an mbarrier pair per stage of each pipeline
WORK_BYTES = {"tiles": 192, "stream_k": 400}
STAGE_BYTES = 16
SINGLE_MBARRIERS = 7 * 2 * 8  # bytes: seven pairs, see `forward.Sm100SharedStorage`
SOFTMAX_REGISTERS = {  # (groups, whether K and V are dequantised) -> registers per thread, as `roles` has them
    (2, False): 184,
    (2, True): 160,
    (1, False): 240,
    (1, True): 208,
}
OTHER_REGISTERS = 56  # of a softmax thread, besides its row of S
TMEM_COLUMNS = 512
S_COLUMNS = 2 * 128  # of both slots
MAX_TILE_VO = TMEM_COLUMNS - S_COLUMNS  # columns of O of a tile
KEYS = (128, 96, 64, 32)  # keys that a KV block may have


def num_groups(tile_vo: int) -> int:
    """Return the number of softmax warpgroups, each with an O of its own. tile_vo: the columns of O of a tile."""
    return 2 if tile_vo <= HALF else 1


def operands(spec: AttentionSpec[Sm100TileConfig], t: Sm100TileConfig, dims: tuple[int, int]) -> tuple[Operand, ...]:
    """Return the operands of the main loop. Quantised K and V become fp16. dims: padded columns of K, and of V of a
    tile."""
    fp16 = Prepared(16, t.stages)
    return operands_of(spec.kv, t, dims, {K: fp16, V: fp16} if spec.q != spec.kv.dtype else {}, t.raw_stages)


def smem_bytes(spec: AttentionSpec[Sm100TileConfig], t: Sm100TileConfig, dims: tuple[int, int]) -> int:
    """Return the bytes of shared memory that a kernel of `spec` with tile `t` allocates. dims: padded head dims."""
    dequantises, qk, vo = spec.q != spec.kv.dtype, dims[0], dims[1] // t.o_tiles
    each = operands(spec, t, (qk, vo))
    found = sum(x.smem_bytes for x in each) + t.q_stages * t.m * qk * BITS[spec.q] // 8
    stages = sum(x.all_stages for x in each) + t.q_stages + policy.work_stages(spec)
    if dequantises:  # Q as fp16, in place or besides
        found += 2 * t.q_stages * t.m * qk if BITS[spec.q] < 16 else 0
        # a scale per row of Q, aligned to 16 bytes behind the mbarriers
        found += 8 * t.m + 8 * (spec.schedule == "stream_k") if spec.q == "bf16" else 0
        stages += 2
    stats = 128 * num_groups(vo) * 2 * 4
    votes = 4 * num_groups(vo) * 2 * 4 if spec.logits.skip else 0
    return found + stats + votes + SINGLE_MBARRIERS + WORK_BYTES[spec.schedule] + STAGE_BYTES * stages


def resources(spec: AttentionSpec[Sm100TileConfig], t: Sm100TileConfig, dims: tuple[int, int]) -> Resources:
    """Return what a kernel of `spec` with tile `t` takes of an SM: a softmax thread has a row of S in registers; S and
    O are in tensor memory. dims: padded head dims."""
    smem = min(row.smem_per_cta for row in archs.TABLE if archs.TCGEN05 in row.instructions)
    vo, groups = dims[1] // t.o_tiles, num_groups(dims[1] // t.o_tiles)
    limit, tmem = SOFTMAX_REGISTERS[groups, spec.q != spec.kv.dtype], S_COLUMNS + groups * max(vo, HALF)
    return Resources(smem_bytes(spec, t, dims), smem, t.n + OTHER_REGISTERS, limit, tmem, TMEM_COLUMNS)


def propose(q: str, kv: str, dims: tuple[int, int]) -> Sm100TileConfig | None:
    """Return a tile that fits, for padded head dims without a row: the most keys, then stages. None if none fits. A
    measurement may find a better one."""
    spec = AttentionSpec[Sm100TileConfig](q, KVSpec(kv), (q,), *dims, tile=Sm100TileConfig())
    o_tiles = -(-dims[1] // MAX_TILE_VO)
    for n, stages in product(KEYS, (6, 5, 4, 3, 2, 1)):
        m = 128 * num_groups(dims[1] // o_tiles)
        tile = Sm100TileConfig(m, n, stages, raw_stages=stages if q != kv else 0, o_tiles=o_tiles)
        if (stages > 1 or q != kv) and resources(spec, tile, dims).excess is None:
            return tile
    return None
