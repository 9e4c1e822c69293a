"""The warpgroup that keeps O of both halves in step with the maxima of their rows, and stores it: a thread a row."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...device import pipe, tmem
from .. import epilogue, logits, softmax
from ..schedule import work
from ..schedule.work import Work
from .multiply import O
from .roles import HALVES, ROWS, WARPS

LOADED = 16  # columns of O that are in registers at a time
PIECE = 16  # values that are stored at once: a block of NVFP4's


@cute.jit
def take(s, half: cutlass.Constexpr, row: Int32, item: Int32):
    """(first, second) of `scores.hand_over`."""
    pipe.wait_signal(s.grown + half, item)
    first, second = s.growth[row, half, 0], s.growth[row, half, 1]
    cute.arch.sync_warp()
    pipe.send(s.read + half)
    return first, second


@cute.jit
def rescale(spec: cutlass.Constexpr, at: Int32, factor: Float32):
    """O *= factor of each row, in warps where a row wants that."""
    if cute.arch.vote_any_sync(factor != 1.0):
        for c in cutlass.range_constexpr(0, spec.head_dim_vo, LOADED):
            values = tmem.load(at + c, LOADED)
            tmem.wait_load()
            tmem.store(at + c, [v * factor for v in values])
        tmem.wait_store()


@cute.jit
def correct(spec: cutlass.Constexpr, plan, s):
    """All tiles of the CTA."""
    a = plan.args
    number = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
    row, at = number * 32 + cute.arch.lane_idx(), s.tensor[0] + tmem.lanes(number) + O
    t, i, q = Int32(0), Int32(0), Int32(0)
    w = work.consume(spec, s, t)
    while w.valid != 0:
        if w.hi > w.lo:
            for j in cutlass.range(w.hi - 1, w.lo - 1, -1, unroll=1):
                for half in cutlass.range_constexpr(HALVES):
                    factor, _ = take(s, half, row, i + q)
                    if j < w.hi - 1:
                        tmem.after_wait()
                        rescale(spec, at + half * ROWS, factor)
                        tmem.before_signal()
                    pipe.send(s.early + half)
                i += 1
        for half in cutlass.range_constexpr(HALVES):
            token, sink = (2 * w.m_block + half) * ROWS + row, epilogue.sink_of(a, w.head)
            lse, factor = sink * logits.LOG2_E, Float32(0.0)
            if w.hi > w.lo:
                total, top = take(s, half, row, i + q)
                normal = softmax.normalizer(top, total, sink)
                scale = a.out.out_factor * softmax.factor_of(a.out.out_scale, w.head)
                lse, factor = normal.lse, normal.factor * scale
                pipe.wait_signal(s.done + half, q)
                tmem.after_wait()
            for c in cutlass.range_constexpr(0, spec.head_dim_vo, LOADED):
                store_columns(spec, a, w, token, at + half * ROWS, c, factor)
            if w.hi > w.lo:
                tmem.before_signal()
                pipe.send(s.stored + half)
            epilogue.store_lse(a, w.q_start + token, w.head, lse, token < w.q_len)
        if w.hi > w.lo:
            q += 1
        t += 1
        w = work.consume(spec, s, t)


@cute.jit
def store_columns(spec: cutlass.Constexpr, a, w: Work, token: Int32, at: Int32, c: cutlass.Constexpr, factor: Float32):
    """Columns c to c + LOADED - 1 of the thread's row of O, zeros where no row of the tile sees a key."""
    values = cute.make_rmem_tensor(LOADED, Float32)
    values.fill(0.0)
    if w.hi > w.lo:
        loaded = tmem.load(at + c, LOADED)
        tmem.wait_load()
        for e in cutlass.range_constexpr(LOADED):
            values[e] = loaded[e] * factor
    if token < w.q_len:
        for k in cutlass.range_constexpr(LOADED // PIECE):
            piece = cute.make_tensor(values.iterator + k * PIECE, cute.make_layout(PIECE))
            epilogue.store_piece(spec, a, w.q_start + token, w.head, Int32(c // PIECE + k), piece, ())
