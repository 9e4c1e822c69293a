"""The warpgroup that keeps O of both halves in step with the maxima of their rows, and stores it: a thread a row."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...device import pipe, tmem
from .. import epilogue, geometry, logits, quant, softmax
from ..schedule import work
from ..schedule.work import Work
from .multiply import O
from .roles import ROWS, SLOTS, WARPS, halves

LOADED = 16  # columns of O that are in registers, and stored, at a time: a block of NVFP4's


class Handed(NamedTuple):
    """Of a row. value: what O is to be multiplied by, at a tile's end the sum of its exponentials. top: then, their
    maximum in log2 units."""

    value: Float32
    top: Float32


def column_of(s, half):
    """Address of O of a half, in this warp's lanes of tensor memory."""
    number = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
    return s.tensor[0] + tmem.lanes(number) + (O + half * ROWS)


@cute.jit
def take(s, half: cutlass.Constexpr, row: Int32, item: Int32):
    """What `scores.hand_over` says of a row."""
    pipe.wait_signal(s.grown + half, item)
    what = Handed(s.growth[row, half, 0], s.growth[row, half, 1])
    cute.arch.sync_warp()
    pipe.send(s.read + half)
    return what


@cute.jit
def rescale(spec: cutlass.Constexpr, at: Int32, factor: Float32):
    """O *= factor of each row, in warps where a row wants that."""
    if cute.arch.vote_any_sync(factor != 1.0):
        for c in cutlass.range_constexpr(0, spec.head_dim_vo, LOADED):
            values = tmem.load(at + c, LOADED)
            tmem.wait_load()
            tmem.store(at + c, [v * factor for v in values])
        tmem.wait_store()


class Row(NamedTuple):
    """A row of the output. keep: the request has it."""

    token: Int32
    head: Int32
    keep: Any


@cute.jit
def finish(spec: cutlass.Constexpr, a, s, w: Work, half: cutlass.Constexpr, row: Int32, i: Int32, q: Int32):
    """The thread's row of a half: O and LSE. i, q: blocks and tiles before."""
    number = (halves(spec) * w.m_block + half) * ROWS + row
    token = geometry.token_of(number, geometry.divisor(w))
    head = geometry.head_of(number, w.head, geometry.divisor(w))
    sink, factor = epilogue.sink_of(a, head), Float32(0.0)
    lse = sink * logits.LOG2_E
    if w.hi > w.lo:
        sums = take(s, half, row, i + q)
        normal = softmax.normalizer(sums.top, sums.value, sink)
        unit = const_expr(quant.format_of(spec).unit)
        out = a.out.out_factor * softmax.factor_of(a.out.out_scale, head) * unit
        lse, factor = normal.lse, normal.factor * out
        pipe.wait_signal(s.done + half, q if const_expr(halves(spec) == SLOTS) else i - 1)
        tmem.after_wait()
    into = Row(w.q_start + token, head, token < w.q_len)
    for c in cutlass.range_constexpr(0, spec.head_dim_vo, LOADED):
        store_columns(spec, a, s, w, into, half, c, factor)
    if w.hi > w.lo:
        tmem.before_signal()
        pipe.send(s.stored + half)
    epilogue.store_lse(a, into.token, head, lse, into.keep)


@cute.jit
def correct(spec: cutlass.Constexpr, plan, s):
    """All tiles of the CTA."""
    a = plan.args
    number = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
    row = number * 32 + cute.arch.lane_idx()
    t, i, q = Int32(0), Int32(0), Int32(0)
    w = work.consume(spec, s, t)
    while w.valid != 0:
        if w.hi > w.lo:
            for j in cutlass.range(w.hi - 1, w.lo - 1, -1, unroll=1):
                for half in cutlass.range_constexpr(halves(spec)):
                    factor = take(s, half, row, i + q).value
                    if j < w.hi - 1:
                        if const_expr(halves(spec) < SLOTS):  # of every block: a phase looks like the one before last
                            pipe.wait_signal(s.done, i - 1)
                        tmem.after_wait()
                        rescale(spec, column_of(s, half), factor)
                        tmem.before_signal()
                    pipe.send(s.early + (half if const_expr(halves(spec) == SLOTS) else i % SLOTS))
                i += 1
        for half in cutlass.range_constexpr(halves(spec)):
            finish(spec, a, s, w, half, row, i, q)
        if w.hi > w.lo:
            q += 1
        t += 1
        w = work.consume(spec, s, t)


@cute.jit
def store_columns(
    spec: cutlass.Constexpr, a, s, w: Work, into: Row, half: cutlass.Constexpr, c: cutlass.Constexpr, factor: Float32
):
    """Columns c to c + LOADED - 1 of the thread's row of O, zeros where no row of the tile sees a key."""
    values = cute.make_rmem_tensor(LOADED, Float32)
    values.fill(0.0)
    if w.hi > w.lo:
        loaded = tmem.load(column_of(s, half) + c, LOADED)
        tmem.wait_load()
        for e in cutlass.range_constexpr(LOADED):
            values[e] = loaded[e] * factor
    if into.keep:
        epilogue.store_piece(spec, a, into.token, into.head, Int32(c // LOADED), values, ())
