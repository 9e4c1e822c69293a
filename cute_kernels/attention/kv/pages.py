"""From a row of a sequence to its page: the only reader of page tables."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...device import pipeline
from .. import geometry
from ..operands import K as K
from ..operands import V as V


class KVBlock(NamedTuple):
    """A KV block as one load warp sees it. loader: index of the warp among the `tile.loaders` of a stage. item: of
    the pipeline. n_block: index of the block in the sequence. head: KV head. o_tile: which part of the columns of V the
    stage gets, see `tile.o_tiles`; 0, known at trace time: the stage gets all columns, or it is one of K. next_n_block:
    the block that the tile visits next, less than 0 if there is none. odd: with `tile.reverses_odd_blocks`, whether
    the tile visits an odd number of blocks before this one."""

    loader: Int32
    item: Int32
    n_block: Int32
    head: Int32
    kv_len: Int32
    o_tile: Any = 0
    next_n_block: Int32 = -1  # type: ignore[assignment]
    odd: Any = False


class LoadTarget(NamedTuple):
    """Where K or V goes. op: operand of the source. smem (n, D, stages). rings: the pipelines of the stages, one for
    each of `column_groups`."""

    op: Any
    smem: cute.Tensor
    rings: tuple[pipeline.Pipeline, ...]

    @property
    def ring(self):
        """The pipeline of stages that are loaded as a whole."""
        return self.rings[0]


def column_groups(spec):
    """Return the groups of a stage's columns that are loaded and freed apart, see `TileConfig.column_groups`."""
    return spec.tile.column_groups(spec.kv, (spec.padded_qk, spec.padded_vo))


class SequencePages(NamedTuple):
    """Where the K (or V) rows of a sequence are. pages: its page ids, in order. start: -1, or, if ragged, the first row
    of the sequence in k and v. extra: its slots in the second cache; first_keys: its keys in the first one. tokens:
    which of its tokens have chosen each slot, as bits, where they share slots."""

    pages: cute.Tensor
    start: Int32
    extra: Any = None
    first_keys: Any = None
    tokens: Any = None


@cute.jit
def of_sequence(a, batch: Int32, which, first_keys=None):
    """Return the `SequencePages` of a sequence. which: K or V. first_keys: `geometry.Sequence.extra`."""
    first, start = Int32(0), Int32(-1)
    if a.kv.kv_starts.shape[0] > 0:
        first, batch = geometry.kv_start(a, batch), Int32(0)
        if geometry.ragged(a):
            first, start = Int32(0), first
    found = SequencePages(cute.domain_offset((first,), a.kv.page_table[batch, which, None]), start)
    if const_expr(a.kv.union_slots is not None):
        found = SequencePages(a.kv.union_slots[batch, None], start, tokens=a.kv.union_tokens[batch, None])
    if const_expr(a.kv.extra_slots is not None):
        found = found._replace(extra=a.kv.extra_slots[batch, None], first_keys=first_keys)
    return found


def shift(page_size):
    """Return log2 of a page size, which must be a power of two."""
    return cute.arch.popc(page_size - 1)


@cute.jit
def page_of(sequence_pages: SequencePages, row: Int32, page_size: Int32):
    """Return the page of a row of a sequence; 0 if ragged. page_size must be a power of two."""
    page = Int32(0)
    if sequence_pages.start < 0:
        page = sequence_pages.pages[row >> shift(page_size)]
    return page


@cute.jit
def row_in_page(sequence_pages: SequencePages, row: Int32, page_size: Int32):
    """Return the index, in its page, of a row of a sequence; if ragged, its row of k and v. page_size must be a power
    of two."""
    inside = row & (page_size - 1)
    if sequence_pages.start >= 0:
        inside = sequence_pages.start + row
    return inside
