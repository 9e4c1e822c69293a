"""The tiles of the kernels with few query rows over latents. Plain Python."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ... import archs
from ...records import RECORDS
from ...records import ROWS as PLAIN
from ..operands import Operand, operands_of
from ..tile import SPLIT_COUNTERS, Resources, TileConfig, distinct_dims

ROWS = 8  # query rows of an MMA
MOST_ROWS = 16
WARPS = 8  # that compute O
SCORE_WARPS = 4  # of a group, which computes the scores of a block
KEYS = 16  # keys of a block of which a warp has the scores
P_STAGES = 2
STATS = 4  # shared memory holds the maxima and sums of the rows of so many tiles at once
STEP = 16  # columns of K, and keys of V, of an MMA
PIECE = 16  # bytes


def pitch(row: int) -> int:
    """Return the bytes from a row in shared memory to the next: an odd number of pieces, so that the pieces of eight
    rows are in different banks."""
    return PIECE * (-(-row // PIECE) | 1)


WIDE, NARROW = (576, 512), (512, 512)
# Record, of the first or of a second cache -> (head_dim_qk, head_dim_vo)
DIMS: dict[str, list[tuple[int, int]]] = {
    "e4m3": [WIDE, NARROW], "656": [WIDE], "352": [WIDE], "528_fp32": [NARROW], "528": [NARROW],
    "528_planar": [NARROW], "584": [NARROW], "288": [NARROW], PLAIN: [WIDE],
}  # fmt: skip
HEAD_DIMS = distinct_dims(dims for each in DIMS.values() for dims in each)
ELEMENT = {"e4m3": 1, PLAIN: 2}  # bytes of a value of rows that are not packed
PITCH = {name: pitch(RECORDS[name].token_bytes or max(DIMS[name])[0] * ELEMENT[name]) for name in DIMS}


@dataclass(frozen=True)
class LatentTileConfig(TileConfig):
    """Tile of a CTA: m query rows x n keys, of which a score warp has 16."""

    bulk_rows: ClassVar[bool] = True
    load_warps: ClassVar[int] = 3
    per_tile_pack_gqa: ClassVar[bool] = True
    prefers_whole_tiles: ClassVar[bool] = True
    counters_per_split: ClassVar[int] = SPLIT_COUNTERS

    @property
    def groups(self) -> int:
        """Groups of score warps, which have blocks in turn. Two stages leave a second one nothing to do."""
        return 2 if self.stages > 2 else 1

    @property
    def n_tiles(self) -> int:
        """The number of MMAs that take the query rows."""
        return self.m // ROWS

    @property
    def name(self) -> str:
        return f"m{self.m}n{self.n}s{self.stages}k"

    def head_dims(self, bits: int) -> tuple[int, ...]:
        """Return the head dims that kernels compute with. bits: per stored element of K and V."""
        return HEAD_DIMS


def tile_of(rows: int, record: str) -> LatentTileConfig | None:
    """Return the tile for a number of rows; None if there is none. Rows of 16 bits leave room for two stages."""
    if rows > MOST_ROWS or (record or PLAIN) not in PITCH:
        return None
    return LatentTileConfig(ROWS if rows <= ROWS else MOST_ROWS, KEYS * SCORE_WARPS, 4 if record else 2)


def records(spec: Any) -> tuple[str, ...]:
    """Return the different records of the caches: that of the first one, then that of the second one."""
    extra = (spec.kv.extra_record or PLAIN,) if spec.kv.extra else ()
    return tuple(dict.fromkeys((spec.kv.record or PLAIN, *extra)))


def row_pitch(spec: Any) -> int:
    """Return the bytes from a row of a block in shared memory to the next."""
    return max(PITCH[record] for record in records(spec))


def factors(spec: Any) -> int:
    """Return the number of factors of a row that shared memory has room for."""
    return max(1, *(RECORDS[record].factors + RECORDS[record].factors % 2 for record in records(spec)))


def operands(spec: Any) -> tuple[Operand, ...]:
    """Return the operand of the main loop: rows as they are stored, of which V is a part."""
    t = spec.tile
    each = operands_of(replace(spec.kv, dtype="e4m3"), t, (row_pitch(spec), 0))
    return tuple(x._replace(bits=8) for x in each)


def q_words(spec: Any) -> int:
    """Return the words of Q that a lane has of all MMAs over rows of one record."""
    return spec.head_dim_qk // STEP * 2 * spec.tile.n_tiles


def smem_bytes(spec: Any) -> Resources:
    """Return the shared memory of a CTA: keys, Q, P, factors, maxima and sums of rows, tiles and barriers."""
    m = spec.tile.m
    found = sum(x.smem_bytes for x in operands(spec)) + 4 * 32 * q_words(spec) * len(records(spec))
    found += P_STAGES * (16 * SCORE_WARPS * m * 2 + 2 * spec.tile.n * factors(spec) + 4 * m + 4 * SCORE_WARPS)
    found += 4 * m * (2 * SCORE_WARPS + 1 + STATS * (2 + spec.tile.groups * SCORE_WARPS)) + 1536
    smem = min(row.smem_per_cta for row in archs.TABLE if archs.WGMMA in row.instructions)
    return Resources(found, smem)
