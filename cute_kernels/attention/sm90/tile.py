"""The KV blocks of a tile: computed alike by the role that loads them and by those that consume them."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .. import geometry, mask
from ..schedule import Work


@dataclass(frozen=True)
class Blocks:
    """Half-open block ranges: [lo, hi) has a visible key, [full_lo, full_hi) needs no mask."""

    lo: Int32
    hi: Int32
    full_lo: Int32
    full_hi: Int32


def lengths(spec, w: Work, a) -> mask.Lengths:
    return mask.Lengths(w.q_len, w.kv_len, a.window_left)


def fold(spec, a):
    """Rows a token has in a tile."""
    return a.q.shape[1] // a.k.shape[1] if spec.pack_gqa else 1


def blocks(spec, w: Work, a) -> Blocks:
    first_row = w.m_block * spec.tile.m
    rows = geometry.tile_rows(w.q_len, fold(spec, a))
    first = geometry.token_of(first_row, fold(spec, a), spec.pack_gqa)
    last_row = cutlass.min(first_row + spec.tile.m, rows) - 1
    last = geometry.token_of(last_row, fold(spec, a), spec.pack_gqa)
    n = lengths(spec, w, a)
    return Blocks(*mask.kv_range(spec, first, last, n), *mask.full_range(spec, first, last, n))


@cute.jit
def any_block(spec: cutlass.Constexpr, w: Work, a):
    """Whether a valid tile has a key to see."""
    b = blocks(spec, w, a)
    return w.valid != 0 and b.hi > b.lo
