"""The operands of a main loop: what it streams through shared memory, block by block. Plain Python.

An op's `tile_table` lists them (`operands`): K and V or, if V lies in K (`KVSpec.shares_v`), one that is both. From the
list follow the roles that load and prepare them, their rings of stages with barriers (`kv.rings`), and their bytes.
"""

from collections.abc import Mapping
from typing import NamedTuple

from .spec import KVSpec
from .tile import TileConfig

K, V = 0, 1  # tensors of the cache, and rows of a sequence's page table


class Prepared(NamedTuple):
    """Stages that a prepare role makes for the MMAs from those that were loaded. bits: per element. transposed: a stage
    is (columns, rows)."""

    bits: int
    stages: int
    transposed: bool = False


class Operand(NamedTuple):
    """An operand. holds: what MMAs read from it: K (S = Q K^T), V (O += P V), or both. rows, columns: of a stage.
    stages: those that it is loaded to. bits: per element, as it is loaded. sf_bytes: of the scale factors of a row.
    prepared: None if MMAs read the loaded stages. groups: of columns of a loaded stage with barriers of their own."""

    holds: tuple[int, ...]
    rows: int
    columns: int
    stages: int
    bits: int
    sf_bytes: int = 0
    prepared: Prepared | None = None
    groups: int = 1

    @property
    def tensor(self) -> int:
        """The tensor of the cache that it is loaded from, K or V."""
        return self.holds[0]

    @property
    def load_role(self) -> str:
        return f"load_{'kv'[self.tensor]}"

    @property
    def prepare_role(self) -> str:
        return f"prepare_{'kv'[self.tensor]}"

    @property
    def all_stages(self) -> int:
        """The stages that are loaded, times their groups of columns, and those that are prepared: each has a full and
        an empty barrier."""
        return self.stages * self.groups + (self.prepared.stages if self.prepared else 0)

    @property
    def smem_bytes(self) -> int:
        """The bytes of all stages, with their scale factors."""
        elements = self.rows * self.columns
        found = self.stages * (elements * self.bits // 8 + self.rows * self.sf_bytes)
        return found + (self.prepared.stages * elements * self.prepared.bits // 8 if self.prepared else 0)


def tensors(kv: KVSpec) -> tuple[int, ...]:
    """Return the tensors of the cache that are loaded."""
    return (K,) if kv.shares_v else (K, V)


def operands_of(
    kv: KVSpec,
    t: TileConfig,
    dims: tuple[int, int],
    prepared: Mapping[int, Prepared] | None = None,
    raw_stages: int = 0,
) -> tuple[Operand, ...]:
    """Return the operands of a loop over a cache of `kv`. dims: padded columns of K and of V. prepared: what is made of
    K and of V. raw_stages: stages to which that is loaded; 0: `t.stages`."""
    found = []
    for tensor in tensors(kv):
        made, rows, columns = (prepared or {}).get(tensor), t.n, dims[tensor]
        if t.pieces > 1:  # K comes in pieces of some columns, V in pieces of some keys
            rows, columns = (rows, columns // t.pieces) if tensor == K else (rows // t.pieces, columns)
        holds = (K, V) if kv.shares_v else (tensor,)
        stages, sf_bytes = made and raw_stages or t.stages, kv.layout.row_bytes(columns)
        found.append(Operand(holds, rows, columns, stages, kv.bits, sf_bytes, made))
    return tuple(found)


def holding(operands: tuple[Operand, ...], which: int) -> Operand:
    """Return the operand from which MMAs read K or V."""
    return next(x for x in operands if which in x.holds)
