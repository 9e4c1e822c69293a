"""The protocols of tile configs: what shared seams may ask of `spec.tile`. Plain Python: it runs without the DSL.

Each op has a frozen class of its own, which mypy checks against these protocols. An op's own files may ask for more.
`Resources` says what a kernel with a tile takes of an SM, counted on integers before anything is compiled.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from .request import Refusal


class TileConfig(Protocol):
    """The static shape of the tiles of a CTA, as every op has it."""

    @property
    def name(self) -> str:
        """The tile's part of a spec's name."""

    @property
    def m(self) -> int:
        """The most query rows of a tile."""

    @property
    def pieces(self) -> int:
        """The stages that a block of K takes, each with some of its columns, and a block of V, each with some keys."""

    @property
    def n(self) -> int:
        """The keys of a KV block."""

    @property
    def stages(self) -> int:
        """The stages of K, and of V, that MMAs read."""

    @property
    def m_choices(self) -> tuple[int, ...]:
        """The numbers of rows that a tile may have, ascending."""

    @property
    def ctas_per_sm(self) -> int:
        """The CTAs that an SM has room for."""

    @property
    def load_warps(self) -> int:
        """Warps that fill a stage of K, or of V, together."""

    @property
    def counters_per_split(self) -> int:
        """Counters per split tile."""

    @property
    def per_tile_pack_gqa(self) -> bool:
        """Whether `work.WorkTileInfo` says of each tile if its rows are packed. Else all tiles are packed."""

    @property
    def pdl_prologue(self) -> bool:
        """Whether a CTA finds its first tile during the previous kernel, see `pdl`."""

    @property
    def alternates_m_blocks(self) -> bool:
        """Whether CTAs that share keys visit the m_blocks of a sequence in the order first, last, second, and so on, so
        that they get equal shares of a prompt."""

    @property
    def end_blocks(self) -> int:
        """The time that the end of a tile takes, in KV blocks, for the schedule "stream_k" (`stream_k.end_units`)."""

    @property
    def prefers_whole_tiles(self) -> bool:
        """Whether, of equal tiles, fewer CTAs that take whole ones are faster than all CTAs that split them."""

    @property
    def boxes_at_once(self) -> int:
        """The TMA boxes that an iteration of the loop over the boxes of a stage loads; 0: that loop is unrolled."""

    @property
    def o_tiles(self) -> int:
        """The tiles that have the same query rows, all of S, and a part each of the columns of O."""

    @property
    def e2m1(self) -> bool:
        """Whether the architecture has a `cvt` of e2m1 codes."""

    def head_dims(self, bits: int) -> tuple[int, ...]:
        """Return the head dims that kernels compute with, ascending. bits: per stored element of K and V."""


class WholeTileConfig(TileConfig, Protocol):
    """Tiles of ops with the schedule "tiles"."""

    @property
    def l2_bytes(self) -> int:
        """Bytes of K and V that are in use at a time, so that L2 holds them."""


class PreparedTileConfig(TileConfig, Protocol):
    """Tiles of ops with warps that dequantise K and V to stages of their own."""

    @property
    def dequant_pieces(self) -> int:
        """Pieces of rows that a lane dequantises at a time: as many as registers leave room for."""


class MergedTileConfig(TileConfig, Protocol):
    """Tiles of ops in which each warp merges the splits of its own rows."""

    @property
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
