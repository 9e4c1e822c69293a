"""The tiles of decode's kernels: the only table of the head dims that they have. Plain Python.

A row of `TABLE` is a padded head dim; its cells are the tiles, by type of the cache and by rows per warp. The tiles
were measured (bench/notes/decode.md). A new head dim is a new row. Architectures with less shared memory get tiles that
`small_tile` makes.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import ClassVar, NamedTuple

from ... import archs
from ...dtypes import BITS
from ..operands import Operand, operands_of
from ..spec import KVSpec
from ..tile import MergedTileConfig, Resources

FEW_ROWS = 8  # rows per warp; kernels for calls with more rows have twice as many
COLUMNS = {16: "half", 8: "e4m3", 4: "nvfp4"}  # bits per stored element -> column of `TABLE`


@dataclass(frozen=True)
class DecodeTileConfig(MergedTileConfig):
    """The static shape of a CTA's tile: at most m query rows x n keys, with `stages` K stages and as many V stages.

    The mma warps of `warpgroups` compute `rows_per_warp` rows each, 8 or 16, on keys of their own. blackwell: the code
    for architectures with a `cvt` of e2m1 codes, which differs in `quant.kv_format` and `operands.fill`. end_blocks:
    the time that the end of a tile takes, in KV blocks, for the schedule (`stream_k.end_units`). boxes_at_once: TMA
    boxes per iteration of the loop over them. o_tiles: tiles that have the same rows, all of S, and a part each of the
    columns of O: with head_dim 512, O and Q of 8 rows would take 192 registers per thread. ctas_per_sm: CTAs that an
    SM has room for: one computes while another ends its tile.
    """

    warpgroups: int = 2
    rows_per_warp: int = FEW_ROWS
    blackwell: bool = False
    end_blocks: int = 0
    boxes_at_once: int = 4
    o_tiles: int = 1
    ctas_per_sm: int = 1

    pdl_prologue: ClassVar[bool] = True

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
    def prefers_whole_tiles(self) -> bool:
        """Whether, of equal tiles, fewer CTAs that take whole ones are faster than all CTAs that split them: where the
        ends of tiles take long."""
        return self.end_blocks > 0 or self.ctas_per_sm > 1

    @property
    def combine_columns(self) -> int:
        """Registers per lane for the columns of splits that it merges, as far as O and Q leave room."""
        return 96 if self.rows_per_warp == FEW_ROWS and self.warpgroups < 3 and self.ctas_per_sm == 1 else 32

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
        name += f"o{self.o_tiles}" if self.o_tiles > 1 else ""
        name += f"x{self.ctas_per_sm}" if self.ctas_per_sm > 1 else ""
        return name + ("b" if self.blackwell else "")

    @property
    def e2m1(self) -> bool:
        """Whether the architecture has a `cvt` of e2m1 codes."""
        return self.blackwell

    def head_dims(self, bits: int) -> tuple[int, ...]:
        """Return the head dims that kernels compute with. bits: per stored element of K and V."""
        return DIMS_OF_KIND[COLUMNS[bits]]


class DecodeTiles(NamedTuple):
    """Tiles over caches of one type. few: 8 rows per warp. more: 16 rows; None: no kernel. few_blackwell: instead of
    `few` on architectures with a `cvt` of e2m1 codes; None: `few`. narrow, many: instead of `few` on Hopper, for the
    calls that `TileKey` describes; None: `few`."""

    few: DecodeTileConfig
    more: DecodeTileConfig | None = None
    few_blackwell: DecodeTileConfig | None = None
    narrow: DecodeTileConfig | None = None
    many: DecodeTileConfig | None = None


class DecodeRow(NamedTuple):
    """The tiles for a padded head dim, by type of the cache; e4m3 is the column of all types of 8 bits. None: no
    kernel."""

    head_dim: int
    half: DecodeTiles | None = None
    e4m3: DecodeTiles | None = None
    nvfp4: DecodeTiles | None = None


# Nearly all shared memory holds K and V in their storage type. A warp has 16 to 64 keys of a stage. Stages are small,
# so that CTAs get equal shares of the work. More warps convert if registers suffice. Kernels with 16 rows per warp hold
# more in registers (8 warps at most) and add up more of O in shared memory. From head_dim 160 on there are none: O and
# Q of 16 rows would take 120 registers per thread with head_dim 160, 192 with 256.
# Where tokens see few keys, the end of a tile takes as long as its keys (bench/notes/decode.md): two CTAs of four mma
# warps then share an SM. That is also faster with some tiles if there are many of them (`many_from`).
_T = DecodeTileConfig
_NARROW = DecodeTileConfig(32, 128, 1, 1, ctas_per_sm=2)
TABLE = (
    DecodeRow(
        32,
        half=DecodeTiles(_T(64, 256, 6), _T(64, 256, 6, 2, 16)),
        e4m3=DecodeTiles(_T(64, 512, 6), _T(64, 512, 6, 2, 16)),
    ),
    DecodeRow(
        64,
        half=DecodeTiles(
            _T(64, 128, 6),
            _T(64, 128, 6, 2, 16),
            narrow=replace(_NARROW, stages=3),
            many=replace(_NARROW, stages=3),
        ),
        e4m3=DecodeTiles(
            _T(64, 256, 6),
            _T(64, 256, 6, 2, 16),
            narrow=replace(_NARROW, stages=5),
            many=_T(32, 256, 3, 1, ctas_per_sm=2),
        ),
        nvfp4=DecodeTiles(
            _T(64, 512, 4),
            _T(64, 512, 4, 2, 16),
            narrow=replace(_NARROW, stages=8),
            many=_T(32, 256, 5, 1, ctas_per_sm=2),
        ),
    ),
    DecodeRow(
        96,
        half=DecodeTiles(_T(64, 128, 4), _T(64, 128, 4, 2, 16)),
        e4m3=DecodeTiles(_T(64, 256, 4), _T(64, 256, 4, 2, 16)),
    ),
    DecodeRow(
        128,
        half=DecodeTiles(_T(64, 128, 3), _T(64, 128, 3, 2, 16)),
        e4m3=DecodeTiles(
            _T(64, 256, 3),
            _T(64, 256, 3, 2, 16),
            few_blackwell=_T(64, 128, 6),  # the tile of `few` would spill there
            narrow=replace(_NARROW, stages=2),
            many=replace(_NARROW, stages=2),
        ),
        nvfp4=DecodeTiles(_T(48, 384, 3, 3), _T(64, 256, 5, 2, 16), narrow=replace(_NARROW, stages=5)),
    ),
    DecodeRow(
        160,
        half=DecodeTiles(_T(32, 64, 5, 1)),
        e4m3=DecodeTiles(_T(64, 128, 5)),
    ),
    DecodeRow(
        192,
        half=DecodeTiles(_T(32, 64, 4, 1)),
        e4m3=DecodeTiles(_T(64, 128, 4)),
    ),
    DecodeRow(
        256,
        half=DecodeTiles(_T(32, 64, 3, 1)),
        e4m3=DecodeTiles(_T(64, 128, 3)),
        nvfp4=DecodeTiles(_T(64, 128, 5)),
    ),
    DecodeRow(
        512,
        half=DecodeTiles(_T(32, 64, 2, 1, o_tiles=2)),
        e4m3=DecodeTiles(_T(32, 64, 4, 1, o_tiles=2)),
        nvfp4=DecodeTiles(_T(32, 64, 6, 1, o_tiles=2)),
    ),
)
END_BLOCKS = {"half": 0, "e4m3": 2, "nvfp4": 2}  # column of `TABLE` -> `end_blocks` of a tile
# Column of `TABLE` -> `boxes_at_once`. More are faster to issue, fewer are less code: with NVFP4, the code of all roles
# that run at a time hardly fits the instruction cache, 32 KB.
BOXES_AT_ONCE = {"half": 4, "e4m3": 4, "nvfp4": 2}
# (column of `TABLE`, head_dim) -> tiles per SM from which on `many` serves a call; with the others, 1
MANY_FROM = {("e4m3", 128): 6}
MANY_PER_SM = max(MANY_FROM.values())  # tiles per SM from which on all tiles of `MANY` serve
# Column of `TABLE` -> head dims with which one CTA for each TPC, a pair of SMs, reads K and V as fast as the memory
# allows. With the others, its arithmetic takes longer.
CTA_PER_TPC: dict[str, tuple[int, ...]] = {"half": (128, 192, 256), "e4m3": (128, 256), "nvfp4": ()}
FEWEST_STAGES = 4  # of a tile that `with_row_bytes` makes without halving its keys
SMALL_STAGES = 6  # most stages of a tile that `small_tile` makes
WINDOW_KEYS = 256  # `TileKey.work`
DIMS_OF_KIND = {kind: tuple(row.head_dim for row in TABLE if getattr(row, kind)) for kind in COLUMNS.values()}
HEAD_DIMS = DIMS_OF_KIND["half"]
ANY, NARROW, MANY = "any", "narrow", "many"  # `TileKey.work`


class TileKey(NamedTuple):
    """The choice of a tile. kind: a column of `TABLE`. head_dim: a padded one. rows: per warp. work: the calls that the
    tile serves. A tile of `ANY` serves all calls. A tile of `NARROW` serves calls in which a request's tokens see at
    most `WINDOW_KEYS` keys. A tile of `MANY` serves calls that have many tiles (`many_from`).
    """

    kind: str
    head_dim: int
    rows: int
    work: str = ANY


def many_from(kind: str, dim: int) -> int:
    """Return the tiles per SM from which on the tile of `MANY` serves a call. kind, dim: as in `TileKey`."""
    return MANY_FROM.get((kind, dim), 1)


def kind_of(kv: str) -> str:
    """Return the column of `TABLE` for a type of cache."""
    return COLUMNS[BITS[kv]]


def bits_of(kind: str) -> int:
    """Return the bits per stored element of a column of `TABLE`."""
    return BITS.get(kind, 16)


@cache
def measured(blackwell: bool) -> dict[TileKey, DecodeTileConfig]:
    """Return the tiles of `TABLE`. blackwell: of architectures with a `cvt` of e2m1 codes."""
    found = {}
    for row, kind in product(TABLE, ("half", "e4m3", "nvfp4")):
        tiles: DecodeTiles | None = getattr(row, kind)
        if tiles is None:
            continue
        few = tiles.few_blackwell if blackwell and tiles.few_blackwell else tiles.few
        found[TileKey(kind, row.head_dim, FEW_ROWS)] = few
        if tiles.more is not None:
            found[TileKey(kind, row.head_dim, 2 * FEW_ROWS)] = tiles.more
        for work in (NARROW, MANY):
            if (tile := getattr(tiles, work)) is not None:
                found[TileKey(kind, row.head_dim, FEW_ROWS, work)] = tile
    return found


def columns_at_once(dim: int) -> int:
    """Return how many of a lane's columns of `dim` one reduction pass adds up: a power of two."""
    return next(count for count in (16, 8, 4) if dim // 8 % count == 0)


def rows_at_once(dim: int, rows_per_warp: int) -> int:
    """Return how many of a warp's rows one reduction pass adds up."""
    return FEW_ROWS if columns_at_once(dim) == 16 else rows_per_warp


def operands(kv: KVSpec, tile: DecodeTileConfig, dims: tuple[int, int]) -> tuple[Operand, ...]:
    """Return the operands of the main loop, which converts quantised K and V in registers. dims: columns of K, and of V
    of a tile."""
    return operands_of(kv, tile, dims)


def smem_bytes(kind: str, dim: int, tile: DecodeTileConfig) -> int:
    """Return the bytes of shared memory per CTA, or slightly more: stages of K and V with their scale factors, O and
    statistics of the reduction, tiles and mbarriers. kind, dim: as in `TileKey`. A head dim that is padded to `dim`
    takes less if its rows are dense (`layout.is_dense`), which are not padded in shared memory."""
    vo = dim // tile.o_tiles
    kv = KVSpec(kind) if kind in BITS else KVSpec()
    reduced = rows_at_once(vo, tile.rows_per_warp) * 8 * columns_at_once(vo) + 2 * tile.rows_per_warp
    return sum(x.smem_bytes for x in operands(kv, tile, (dim, vo))) + 4 * tile.warps * reduced + 1024


# Rows per warp -> registers per thread for O and Q of its warp: S, P and the statistics of 16 rows take twice as many
REGISTERS = {FEW_ROWS: 128, 2 * FEW_ROWS: 96}


def resources(key: TileKey, tile: DecodeTileConfig, smem: int) -> Resources:
    """Return what a kernel takes of an SM with `smem` bytes of shared memory: O, in fp32, and Q, in 16 bits, of a
    warp's rows are in registers."""
    held = tile.rows_per_warp * (key.head_dim + 2 * key.head_dim // tile.o_tiles) // 64
    return Resources(smem_bytes(key.kind, key.head_dim, tile), smem, held, REGISTERS[tile.rows_per_warp])


def propose(key: TileKey, smem: int) -> DecodeTileConfig | None:
    """Return a tile for a padded head dim without a row, None if none fits: eight mma warps if three stages then fit,
    else four. A measurement may find a better one."""
    choices = product((2, 1), range(SMALL_STAGES, 0, -1))
    each = 16 * max(1, 256 // (key.head_dim * bits_of(key.kind) // 8) // 2)  # keys per warp: 2 to 4 KiB of K
    for groups, stages in choices:
        tile = DecodeTileConfig(32 * groups, 4 * groups * each, stages, groups, key.rows)
        if (stages > 2 or groups == 1) and resources(key, tile, smem).excess is None:
            return tile
    return None


def small_tiles(key: TileKey, o_tiles: int) -> list[DecodeTileConfig]:
    """Return the tiles among which `small_tile` chooses, from the largest to the smallest."""
    choices, rows = product((2, 1) if o_tiles == 1 else (1,), range(SMALL_STAGES, 0, -1)), key.rows
    return [
        DecodeTileConfig(4 * groups * rows, 64 * groups, stages, groups, rows, o_tiles=o_tiles)
        for groups, stages in choices
    ]


def small_tile(key: TileKey, o_tiles: int, smem: int) -> DecodeTileConfig | None:
    """Return the tile for `smem` bytes of shared memory: two mma warpgroups if two stages then fit, else one; as many
    stages as fit. None if none fits."""
    fit = [tile for tile in small_tiles(key, o_tiles) if smem_bytes(key.kind, key.head_dim, tile) <= smem]
    return next((tile for tile in fit if tile.stages > 1), fit[-1] if fit else None)


def least_bytes(key: TileKey) -> int:
    """Return the bytes of shared memory of the smallest tile for a padded head dim that has a row."""
    tile = measured(False)[key]
    return smem_bytes(key.kind, key.head_dim, small_tiles(key, tile.o_tiles)[-1])


def with_row_bytes(key: TileKey, tile: DecodeTileConfig, more: int, arch: str) -> DecodeTileConfig | None:
    """Return a tile like `tile` in which each row of a stage takes `more` bytes: with fewer stages, or, if fewer than
    `FEWEST_STAGES` were left, with half the keys and nearly twice the stages. None if none fits."""
    smem = archs.of(arch).smem_per_cta
    halves = [replace(tile, n=tile.n // 2, stages=stages) for stages in range(2 * tile.stages - 1, 0, -1)]
    choices = [replace(tile, stages=stages) for stages in range(tile.stages, FEWEST_STAGES - 1, -1)] + halves
    fit = (one for one in choices if one.n % (16 * one.warps) == 0
           and smem_bytes(key.kind, key.head_dim, one) + one.stages * one.n * more <= smem)  # fmt: skip
    return next(fit, None)


@cache
def tiles_of(arch: str) -> dict[TileKey, DecodeTileConfig]:
    """Return the tiles of an architecture."""
    row = archs.of(arch)
    blackwell, hopper = archs.CVT_E2M1 in row.instructions, archs.WGMMA in row.instructions
    tiles = {key: tile for key, tile in measured(blackwell).items() if hopper or key.work == ANY}
    if row.smem_per_cta < max(smem_bytes(key.kind, key.head_dim, tile) for key, tile in tiles.items()):
        small = {key: small_tile(key, tile.o_tiles, row.smem_per_cta) for key, tile in tiles.items()}
        tiles = {key: tile for key, tile in small.items() if tile is not None}
    found = {}
    for key, tile in tiles.items():
        ends, boxes = END_BLOCKS[key.kind], BOXES_AT_ONCE[key.kind]
        found[key] = replace(tile, blackwell=blackwell, end_blocks=ends, boxes_at_once=boxes)
    return found
