"""The tiles of the kernels for Hopper: the only table of the head dims that they have. Plain Python.

A row of `TABLE` is a pair of padded head dims; its cells are the tiles, by types and by modifiers. The tiles were
measured (bench/notes/attention-sm90.md). A new head dim is a new row.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import ClassVar, NamedTuple

from ... import archs
from ...dtypes import BITS
from ..operands import K, Operand, Prepared, V, operands_of
from ..spec import DTYPES, AttentionSpec, KVSpec
from ..tile import SPLIT_COUNTERS, PreparedTileConfig, Resources, WholeTileConfig, distinct_dims

FP8 = "e4m3"
BOX = 64  # columns of 16 bits that a swizzle of 128 bytes holds


@dataclass(frozen=True)
class Sm90TileConfig(WholeTileConfig, PreparedTileConfig):
    """Tile of a CTA: m query rows x n keys, with `o_parts` mma warpgroups per 64 rows.

    stages: stages of K, and of V, in flight. q_stages: stages of Q. q_in_regs: Q is a register operand of Q K^T, which
    saves a third of the reads of shared memory. raw_stages: stages of K and V as they are stored, if they are prepared;
    0: `stages`. load_warps: warps each for K and for V that fill a stage together, because issuing a TMA takes a warp
    tens of cycles. promote_interval: KV blocks after which O is added to fp32 sums in shared memory, 0: never. Hopper's
    8-bit MMAs add to O in 14 bits, rounding towards zero: without promotion, the mean of 2,048 equal values comes out
    1.4 % short, that of 8,192 values 8 % (simulated, with sums that have the bits of an H200's). o_parts: warpgroups
    that have the same 64 rows, all of S, and a part each of the columns of O: 512 columns of 64 rows would take all
    registers of a warpgroup. pieces: the stages that a block of K takes, each with some of its
    columns, and a block of V, each with some keys. The warpgroups that have the same rows then share scores.
    scores_apart: a warpgroup of its own computes the scores (`scoring`). alternates: the warpgroups of a part each of O
    compute the scores of blocks in turn (`alternating`). cluster: CTAs that have m rows each of a tile.
    """

    m: int = 128
    n: int = 128
    stages: int = 2
    q_stages: int = 1
    q_in_regs: bool = False

    raw_stages: int = 0
    load_warps: int = 2
    promote_interval: int = 0
    o_parts: int = 1
    pieces: int = 1
    scores_apart: bool = False
    alternates: bool = False
    cluster: int = 1
    per_tile_pack_gqa: ClassVar[bool] = True
    l2_bytes: ClassVar[int] = 16 << 20  # Hopper's L2 is 50 MB in two halves

    @property
    def warpgroups(self) -> int:
        return self.m // 64 * self.o_parts

    @property
    def s_parts(self) -> int:
        """Return the warpgroups that have a part each of the keys of a block, so of S and P, and share P through shared
        memory (`shared_scores`); 1 if each has all of S."""
        return self.o_parts if self.pieces > 1 else 1

    @property
    def s_columns(self) -> int:
        """Return the keys of a block of which a warpgroup has the scores."""
        return self.n // self.s_parts

    @property
    def counters_per_split(self) -> int:
        """Return the counters per split tile: with `has_stripes`, those of `stripes.SplitCounters`."""
        return SPLIT_COUNTERS if self.has_stripes else 1

    @property
    def prefers_whole_tiles(self) -> bool:
        """Return whether equal tiles are not split where nearly all CTAs can take as many whole ones: with 512 columns
        of O, a merge takes as long as several blocks."""
        return self.has_stripes

    @property
    def has_stripes(self) -> bool:
        """Return whether V lies in K, and CTAs merge splits in `stripes`."""
        return self.scores_apart or self.alternates

    @property
    def reverses_odd_blocks(self) -> bool:
        """Return whether odd blocks are loaded in reverse order, which is that in which `alternating` frees them."""
        return self.alternates

    @property
    def dequant_pieces(self) -> int:
        """Return the pieces of rows that a lane dequantises at a time: as many as registers leave room for."""
        return 2 if self.q_in_regs or self.o_parts > 1 else 4

    @property
    def name(self) -> str:
        parts = (
            (f"o{self.o_parts}" if self.o_parts > 1 else "")
            + (f"p{self.s_parts}" if self.s_parts > 1 else "")
            + "a" * self.scores_apart
            + "t" * self.alternates
            + (f"c{self.cluster}" if self.cluster > 1 else "")
        )
        return f"m{self.m}n{self.n}s{self.stages}" + ("r" if self.q_in_regs else "") + parts

    def head_dims(self, bits: int) -> tuple[int, ...]:
        """Return the head dims that kernels compute with. bits: per stored element of K and V."""
        return HEAD_DIMS if bits == 16 else QUANTISED_HEAD_DIMS

    def column_groups(self, kv: KVSpec, dims: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of a stage's columns that have barriers of their own, see `TileConfig`. With
        `scores_apart`, the first group has the columns that P V does not read, the second one half of the columns of
        each warpgroup, the third one the others. Packed records are converted as a whole. With `alternates`, the
        groups are the columns of each warpgroup; the first one has those that P V does not read, too."""
        if self.alternates:
            half, of_v = dims[1] // BOX // 2, dims[1] // BOX
            return (*range(half), *range(of_v, dims[0] // BOX)), tuple(range(half, of_v))
        if not self.scores_apart or kv.record:
            return ((),)
        boxes, of_v = dims[0] // BOX, dims[1] // BOX
        half = of_v // self.o_parts // 2
        halves = [tuple(x for x in range(of_v) if x // half % 2 == which) for which in range(2)]
        return tuple(group for group in (tuple(range(of_v, boxes)), *halves) if group)


class Sm90Tiles(NamedTuple):
    """Tiles of kernels of the same types. general: the kernel takes every modifier. plain: it takes none; None: the
    general tile. split: CTAs share the keys of a sequence, and the head dims are those of the row; None: there is no
    such kernel. shared: instead of `plain` and `general`, where warpgroups can share scores (`shared_scores`)."""

    general: Sm90TileConfig
    plain: Sm90TileConfig | None = None
    split: Sm90TileConfig | None = None
    shared: Sm90TileConfig | None = None


class Sm90Row(NamedTuple):
    """The tiles for padded (head_dim_qk, head_dim_vo). half: Q, K and V have 16 bits. fp8: they have 8 bits. quantised:
    e4m3 and e5m2 caches, dequantised. nvfp4: NVFP4 caches. latent: 16 bits, and V lies in K. None: no kernel."""

    dims: tuple[int, int]
    half: Sm90Tiles | None = None
    latent: Sm90Tiles | None = None
    fp8: Sm90Tiles | None = None
    quantised: Sm90Tiles | None = None
    nvfp4: Sm90Tiles | None = None


# 227 KiB of shared memory hold `q_stages` of Q, `stages` of K and of V; the 232 registers of a thread (160 with three
# mma warpgroups) hold S, P, O and, with q_in_regs, Q. n depends on the head dims only: the rounding of a row depends on
# n, and the result of a sequence must depend on that sequence alone. In 8 bits, warps that do not load transpose V.
# NVFP4 has no plain tiles with q_in_regs: conversion is the bottleneck, and it needs the registers that Q would take.
_T = Sm90TileConfig
_LATENT = _T(64, 64, 2, load_warps=1, o_parts=2, scores_apart=True)
TABLE = (
    Sm90Row(
        (32, 32),
        half=Sm90Tiles(_T(128, 128, 4), plain=_T(192, 128, 4, 2)),
    ),
    Sm90Row(
        (64, 64),
        half=Sm90Tiles(_T(128, 128, 4), plain=_T(192, 128, 4, 2), split=_T(64, 128, 6, load_warps=1)),
        fp8=Sm90Tiles(
            _T(128, 128, 4, load_warps=1, promote_interval=16),
            plain=_T(192, 128, 4, 2, load_warps=1, promote_interval=16),
        ),
        quantised=Sm90Tiles(
            _T(128, 128, 3, raw_stages=3, load_warps=1),
            plain=_T(128, 128, 3, 1, True, raw_stages=3, load_warps=1),
            split=_T(64, 128, 4, raw_stages=4, load_warps=1),
        ),
        nvfp4=Sm90Tiles(
            _T(128, 128, 3, raw_stages=3, load_warps=1),
            split=_T(64, 128, 4, raw_stages=4, load_warps=1),
        ),
    ),
    Sm90Row(
        (96, 96),
        half=Sm90Tiles(_T(128, 128, 3), plain=_T(128, 128, 4, 1, True)),
    ),
    Sm90Row(
        (128, 128),
        half=Sm90Tiles(_T(128, 128, 2), plain=_T(128, 128, 3, 1, True), split=_T(64, 128, 3, load_warps=1)),
        fp8=Sm90Tiles(
            _T(128, 96, 3, load_warps=1, promote_interval=21),
            plain=_T(192, 96, 3, raw_stages=2, load_warps=1, promote_interval=21),
        ),
        quantised=Sm90Tiles(
            _T(128, 128, 2, raw_stages=2, load_warps=1),
            plain=_T(128, 128, 2, 1, True, raw_stages=2, load_warps=1),
            split=_T(64, 128, 2, raw_stages=2, load_warps=1),
        ),
        nvfp4=Sm90Tiles(
            _T(128, 128, 2, raw_stages=2, load_warps=1),
            split=_T(64, 128, 2, raw_stages=3, load_warps=1),
        ),
    ),
    Sm90Row(
        (160, 160),
        half=Sm90Tiles(_T(128, 96, 3)),
    ),
    Sm90Row(
        (192, 128),
        half=Sm90Tiles(_T(128, 128, 2)),
        fp8=Sm90Tiles(_T(128, 128, 2, load_warps=1, promote_interval=16)),
        quantised=Sm90Tiles(_T(128, 80, 2, raw_stages=2, load_warps=1)),
        nvfp4=Sm90Tiles(_T(128, 80, 2, raw_stages=2, load_warps=1)),
    ),
    Sm90Row(
        (192, 192),
        half=Sm90Tiles(_T(128, 96, 2)),
        fp8=Sm90Tiles(_T(128, 64, 2, load_warps=1, promote_interval=32)),
        quantised=Sm90Tiles(_T(128, 64, 2, raw_stages=2, load_warps=1)),
        nvfp4=Sm90Tiles(_T(128, 64, 2, raw_stages=2, load_warps=1)),
    ),
    Sm90Row(
        (256, 256),
        half=Sm90Tiles(_T(128, 80, 2)),
        fp8=Sm90Tiles(_T(64, 64, 3, load_warps=1, promote_interval=32)),
        quantised=Sm90Tiles(_T(64, 48, 2, raw_stages=2, load_warps=1)),
        nvfp4=Sm90Tiles(_T(64, 48, 2, raw_stages=2, load_warps=1)),
    ),
    Sm90Row(
        (512, 512),
        half=Sm90Tiles(
            _T(64, 48, 1, o_parts=2),
            plain=_T(64, 48, 1, 2, o_parts=2),
            split=_T(64, 32, 2, load_warps=1, o_parts=2),
            shared=_T(64, 128, 4, load_warps=1, o_parts=2, pieces=8),
        ),
        fp8=Sm90Tiles(_T(64, 32, 1, load_warps=1, promote_interval=64, o_parts=2)),
        quantised=Sm90Tiles(_T(64, 32, 1, raw_stages=2, load_warps=1, o_parts=2)),
        nvfp4=Sm90Tiles(_T(64, 32, 1, raw_stages=2, load_warps=1, o_parts=2)),
        latent=Sm90Tiles(_LATENT, split=_LATENT),
    ),
    Sm90Row(
        (576, 512),
        latent=Sm90Tiles(_LATENT, split=_LATENT),
    ),
)
SPLIT_CACHES = (FP8, "nvfp4")  # caches of the kernels in which CTAs share keys; the queries have bf16
HEAD_DIMS = distinct_dims(row.dims for row in TABLE if row.half or row.latent)
QUANTISED_HEAD_DIMS = distinct_dims(row.dims for row in TABLE if row.fp8 or row.quantised or row.nvfp4)


def kind_of(q: str, kv: str, shares_v: bool = False) -> str:
    """Return the column of `TABLE` for these types. shares_v: V lies in K."""
    if shares_v and q == kv and q != FP8:
        return "latent"
    return ("fp8" if q == FP8 else "half") if q == kv else "nvfp4" if kv == "nvfp4" else "quantised"


@cache
def column(kind: str) -> dict[tuple[int, int], Sm90Tiles]:
    """Return padded head dims -> tiles, for a column of `TABLE`."""
    found = {row.dims: getattr(row, kind) for row in TABLE}
    return {dims: tiles for dims, tiles in found.items() if tiles}


def tile_of(
    q: str, kv: str, dims: tuple[int, int], plain: bool, shared: bool = False, shares_v: bool = False
) -> Sm90TileConfig | None:
    """Return the tile of a kernel with whole tiles, None if there is none for these padded head dims. plain: it takes
    no modifier. shared: warpgroups can share scores. shares_v: V lies in K."""
    tiles = column(kind_of(q, kv, shares_v)).get(dims)
    if tiles is None:
        return None
    tile = shared and tiles.shared or plain and tiles.plain or tiles.general
    fewer = (
        q == FP8 and kind_of(q, kv) == "quantised" and tile.o_parts == 1
    )  # shared memory holds Q twice, as loaded and as fp16
    return replace(tile, raw_stages=1) if fewer else tile


def split_tile_of(q: str, kv: str, dims: tuple[int, int], shares_v: bool = False) -> Sm90TileConfig | None:
    """Return the tile of the kernel in which CTAs share the keys of a sequence, or None if there is no such kernel.
    shares_v: V lies in K."""
    if not (q in DTYPES and q == kv or q == "bf16" and kv in SPLIT_CACHES):
        return None
    tiles = column(kind_of(q, kv, shares_v)).get(dims)
    return tiles and tiles.split


# Bytes of shared memory for tiles of work and the scheduler, besides an mbarrier pair per stage of each pipeline
WORK_BYTES = {"tiles": 176, "stream_k": 392}
WORK_STAGES = {"tiles": 2, "stream_k": 4}
EXTRA_BYTES = 72  # a tile's words of a second cache, in the stages of work and of splits
STAGE_BYTES = 16
QUAD = 4  # lanes that share a row of S
P_STAGES = 2  # of P that warpgroups share: one is written while P V reads the other
# Registers per thread of a mma warpgroup, as `roles` has them at least, by the columns of `TABLE`; with `s_parts`,
# or `alternates`, as "shared scores"
REGISTERS = {"half": 232, "latent": 216, "fp8": 216, "quantised": 208, "nvfp4": 208, "shared scores": 224}
THREE_WARPGROUPS = 160  # with three mma warpgroups
SPLIT_TWO_WARPGROUPS = 216  # with two, and the schedule "stream_k"
Q_IN_REGS = 224  # over a quantised cache, with q_in_regs
OTHER_REGISTERS = 32  # besides S, P, O and Q


def operands(spec: AttentionSpec[Sm90TileConfig], t: Sm90TileConfig, dims: tuple[int, int]) -> tuple[Operand, ...]:
    """Return the operands of the main loop. Quantised K and V become fp16; V of 8-bit MMAs is transposed, since WGMMA
    takes 8-bit operands only K-major. dims: padded head dims."""
    kind, fp16 = kind_of(spec.smem_q, spec.kv.dtype, spec.kv.shares_v), Prepared(16, t.stages)
    prepared = {"half": {}, "latent": {}, "fp8": {V: Prepared(8, t.stages, transposed=True)}}.get(
        kind, {K: fp16, V: fp16}
    )
    found = operands_of(spec.kv, t, dims, prepared, t.raw_stages)
    return tuple(x._replace(groups=len(t.column_groups(spec.kv, dims))) for x in found)


def smem_bytes(spec: AttentionSpec[Sm90TileConfig], t: Sm90TileConfig, dims: tuple[int, int]) -> int:
    """Return the bytes of shared memory that a kernel of `spec` with tile `t` allocates. dims: padded head dims."""
    each, dequantises, (qk, vo) = operands(spec, t, dims), spec.smem_q != spec.kv.dtype, dims
    found = sum(x.smem_bytes for x in each)
    stages = sum(x.all_stages for x in each) + t.q_stages + WORK_STAGES[spec.schedule]
    found += t.q_stages * t.m * qk * BITS[spec.smem_q] // 8
    if dequantises and BITS[spec.smem_q] < 16 and not t.q_in_regs:
        found += 2 * t.q_stages * t.m * qk
    if t.promote_interval:
        found += 4 * t.m * vo
    if t.o_parts > 1 and dequantises and spec.smem_q == "bf16":  # a scale per row of Q
        found += 4 * t.m
    if t.scores_apart:  # P of a block, factors, maxima and sums of rows
        found += 2 * t.m * t.n + 20 * t.m + 2 * STAGE_BYTES
    if t.alternates:  # P of one or two blocks, maxima and sums of rows
        found += 2 * t.m * t.n * (1 if has_free_box(dims) else 2) + 12 * t.m * t.o_parts
    if t.s_parts > 1:  # P of some blocks, maxima and sums of rows
        found += 2 * t.m * t.n * P_STAGES + 4 * t.m * t.s_parts * (1 + QUAD)
    if waits_for_votes(spec):  # votes, and an mbarrier each
        found += 12 * t.stages * t.warpgroups
    if spec.kv.extra:
        found += EXTRA_BYTES
    return found + WORK_BYTES[spec.schedule] + STAGE_BYTES * stages


def has_free_box(dims: tuple[int, int]) -> bool:
    """Return whether a stage of K has a box of columns that P V does not read. dims: padded head dims."""
    return dims[0] - dims[1] >= BOX


def exact_max_blocks(spec: AttentionSpec[Sm90TileConfig]) -> int:
    """Return the least number of blocks after a tile's first in which row_max follows every growth.

    In 8 bits that is 2: maxima that lag behind there would grow out of P's range later. Long sequences have more of
    them (`precision.exact_max_blocks`), unless blocks are skipped.
    """
    return 2 if kind_of(spec.smem_q, spec.kv.dtype) == "fp8" else 0


# Skip-softmax. After every VOTES votes on full blocks of a tile, a warpgroup that has kept at least STEADY blocks in
# turn keeps UNASKED times as many without a vote.
VOTES, STEADY, UNASKED = 4, 40, 2


def waits_for_votes(spec: AttentionSpec[Sm90TileConfig]) -> bool:
    """Report whether V of a block is fetched only if a warpgroup keeps the block: if TMA fetches it, unprepared."""
    return spec.logits.skip and spec.kv.source == "tma" and kind_of(spec.smem_q, spec.kv.dtype) == "half"


def keeps_unasked(spec: AttentionSpec[Sm90TileConfig]) -> bool:
    """Report whether warpgroups keep blocks without a vote. They tell the loaders of V before they issue Q K^T of the
    block: with one stage, a loader may not yet have read what they told before."""
    return not waits_for_votes(spec) or (spec.tile is not None and spec.tile.stages > 1)


def resources(spec: AttentionSpec[Sm90TileConfig], t: Sm90TileConfig, dims: tuple[int, int]) -> Resources:
    """Return what a kernel of `spec` with tile `t` takes of an SM: S, P, O and perhaps Q of a thread are in registers.
    dims: padded head dims."""
    kind, p_bytes = (
        kind_of(spec.smem_q, spec.kv.dtype, spec.kv.shares_v),
        1 if spec.smem_q == spec.kv.dtype == FP8 else 2,
    )
    kind = "shared scores" if t.s_parts > 1 or t.alternates else kind
    if t.scores_apart:  # of the warpgroups that compute O
        smem = min(row.smem_per_cta for row in archs.TABLE if archs.WGMMA in row.instructions)
        return Resources(smem_bytes(spec, t, dims), smem, dims[1] // 2 // t.o_parts + OTHER_REGISTERS, THREE_WARPGROUPS)
    held = t.s_columns // 2 + t.s_columns * p_bytes // 8 + dims[1] // 2 // t.o_parts + t.q_in_regs * dims[0] // 4
    limit = THREE_WARPGROUPS if t.warpgroups > 2 else REGISTERS[kind]
    limit = SPLIT_TWO_WARPGROUPS if t.warpgroups == 2 and spec.schedule == "stream_k" else limit
    limit = Q_IN_REGS if t.q_in_regs and kind != "half" else limit
    smem = min(row.smem_per_cta for row in archs.TABLE if archs.WGMMA in row.instructions)
    return Resources(smem_bytes(spec, t, dims), smem, held + OTHER_REGISTERS, limit)


def propose(q: str, kv: str, dims: tuple[int, int]) -> Sm90TileConfig | None:
    """Return a tile that fits, for padded head dims without a row: the most rows, then keys, then stages. None if none
    fits. A measurement may find a better one."""
    spec = AttentionSpec[Sm90TileConfig](q, KVSpec(kv), (q,), *dims, tile=Sm90TileConfig())
    rows, keys = ((128, 1), (64, 1), (64, 2)), (128, 96, 80, 64, 48, 32)
    for (m, o_parts), n, stages in product(rows, keys, (4, 3, 2, 1)):
        tile = Sm90TileConfig(m, n, stages, o_parts=o_parts)
        if q != kv:
            tile = replace(tile, raw_stages=stages, load_warps=1)
        elif q == FP8:
            tile = replace(tile, load_warps=1, promote_interval=2048 // n)
        if stages > 1 or o_parts > 1:
            if resources(spec, tile, dims).excess is None:
                return tile
    return None
