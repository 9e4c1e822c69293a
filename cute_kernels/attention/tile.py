"""The bases of tile configs: what shared seams may ask of `spec.tile`. Plain Python: it runs without the DSL.

Each op has a frozen class of its own. It states what differs from the defaults here, so that a property of one op's
tiles, such as a tuning field of decode, is stated here and there, and no other op names it. An op's own files may ask
for more. `Resources` says what a kernel with a tile takes of an SM, counted on integers before anything is compiled.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .request import Refusal

SPLIT_COUNTERS = 2  # counters per tile of which CTAs merge the splits together: those of `stripes.SplitCounters`


@dataclass(frozen=True)
class TileConfig(ABC):
    """The static shape of the tiles of a CTA: at most m query rows x n keys, with `stages` stages of K and of V.

    Its fields, and those of its subclasses, are part of a spec, so of artifact names and keys; everything else is a
    property of all tiles of an op, or follows from the fields. A subclass may turn a property into a field with a
    default, or into a constant.
    """

    m: int
    n: int
    stages: int

    @property
    @abstractmethod
    def name(self) -> str:
        """The tile's part of a spec's name."""

    @abstractmethod
    def head_dims(self, bits: int) -> tuple[int, ...]:
        """Return the head dims that kernels compute with, ascending. bits: per stored element of K and V."""

    def column_groups(self, kv: Any, dims: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of a stage's columns that are loaded and freed apart, as numbers of boxes of 64 columns, in
        the order in which they are loaded; an empty group has all columns. kv: the `KVSpec`. dims: padded columns of K
        and of V."""
        return ((),)

    @property
    def m_choices(self) -> tuple[int, ...]:
        """The numbers of rows that a tile may have, ascending."""
        return (self.m * self.cluster,)

    @property
    def pieces(self) -> int:
        """The stages that a block of K takes, each with some of its columns, and a block of V, each with some keys."""
        return 1

    @property
    def ctas_per_sm(self) -> int:
        """The CTAs that an SM has room for."""
        return 1

    @property
    def load_warps(self) -> int:
        """Warps that fill a stage of K, or of V, together."""
        return 1

    @property
    def cluster(self) -> int:
        """The CTAs of a cluster, which compute a tile together: each has m rows of it, and loads a part of its keys for
        all of them."""
        return 1

    @property
    def loaders(self) -> int:
        """The warps, of all CTAs of a cluster, that fill a stage together."""
        return self.load_warps * self.cluster

    @property
    def counters_per_split(self) -> int:
        """Counters per split tile."""
        return 1

    @property
    def per_tile_pack_gqa(self) -> bool:
        """Whether `work.WorkTileInfo` says of each tile if its rows are packed. Else all tiles are packed."""
        return False

    @property
    def pdl_prologue(self) -> bool:
        """Whether a CTA finds its first tile during the previous kernel, see `pdl`."""
        return False

    @property
    def reverses_odd_blocks(self) -> bool:
        """Whether the groups of columns of a tile's odd blocks are loaded in reverse order (`column_groups`)."""
        return False

    @property
    def alternates_m_blocks(self) -> bool:
        """Whether CTAs that share keys visit the m_blocks of a sequence in the order first, last, second, and so on, so
        that they get equal shares of a prompt. Else tiles come in ascending order."""
        return False

    @property
    def end_blocks(self) -> int:
        """The time that the end of a tile takes, in KV blocks, for the schedule "stream_k" (`stream_k.end_units`)."""
        return 0

    @property
    def prefers_whole_tiles(self) -> bool:
        """Whether, when all tiles are equal, giving whole tiles to fewer CTAs beats splitting them among all."""
        return False

    @property
    def boxes_at_once(self) -> int:
        """The TMA boxes that an iteration of the loop over the boxes of a stage loads; 0: that loop is unrolled."""
        return 0

    @property
    def bulk_rows(self) -> bool:
        """Whether rows of packed records reach shared memory as they are stored, by a bulk copy each (`kv.bulk`)."""
        return False

    @property
    def o_tiles(self) -> int:
        """The tiles that have the same query rows, all of S, and a part each of the columns of O."""
        return 1

    @property
    def e2m1(self) -> bool:
        """Whether the architecture has a `cvt` of e2m1 codes."""
        return False


class WholeTileConfig(TileConfig):
    """Tiles of ops with the schedule "tiles"."""

    @property
    @abstractmethod
    def l2_bytes(self) -> int:
        """Bytes of K and V that are in use at a time, so that L2 holds them."""


class PreparedTileConfig(TileConfig):
    """Tiles of ops with warps that dequantise K and V to stages of their own."""

    @property
    @abstractmethod
    def dequant_pieces(self) -> int:
        """Pieces of rows that a lane dequantises at a time: as many as registers leave room for."""


class MergedTileConfig(TileConfig):
    """Tiles of ops in which each warp merges the splits of its own rows."""

    @property
    @abstractmethod
    def combine_columns(self) -> int:
        """Registers per lane for the columns of splits that it merges, as far as O and Q leave room."""


class Resources(NamedTuple):
    """The resources that a kernel takes of an SM, and the limit of each.

    smem: bytes of shared memory per CTA. registers: of the thread that needs most, besides those for addresses and
    state. tmem: columns of tensor memory.
    """

    smem: int
    smem_limit: int
    registers: int = 0
    register_limit: int = 0
    tmem: int = 0
    tmem_limit: int = 0

    @property
    def excess(self) -> str | None:
        """The first resource of which there is too little, with numbers; None if the kernel fits."""
        if self.smem > self.smem_limit:
            return f"needs {self.smem} bytes of shared memory, must be at most {self.smem_limit}"
        if self.registers > self.register_limit:
            return f"needs {self.registers} registers per thread, must be at most {self.register_limit}"
        if self.tmem > self.tmem_limit:
            return f"needs {self.tmem} columns of tensor memory, must be at most {self.tmem_limit}"
        return None

    def refusal(self, tile: TileConfig) -> Refusal | None:
        """Return the refusal of a tile that takes more than there is, with numbers; None if it fits."""
        return Refusal("tile", f"{tile}: {self.excess}") if self.excess else None


def distinct_dims(pairs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return the head dims in pairs of (head_dim_qk, head_dim_vo), ascending: what `head_dims` of a tile returns."""
    return tuple(sorted({dim for pair in pairs for dim in pair}))
