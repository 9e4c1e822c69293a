"""Math role: one warpgroup per 64 rows of the tile. S = Q K^T, softmax, O += P V, store.

A warpgroup issues QK of the next block before the softmax of the current one has let PV of the block before finish
(`step`), and two warpgroups take turns at issuing, so that one's softmax runs under the other's MMA.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...device import pipe, warp, wgmma
from .. import epilogue, geometry, kv, mask, schedule, softmax
from . import tile as tiles

TURN_BARRIER = 1  # + warpgroup: may issue MMAs
ALL_BARRIER = 4  # all math threads
GROUP_BARRIER = 5  # + warpgroup: its 128 threads


@dataclass(frozen=True)
class Registers:
    """Fragments of one warpgroup: descriptors of Q, K, V in shared memory, accumulators, P."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    s: cute.Tensor
    o: cute.Tensor
    p: cute.Tensor
    st: softmax.State
    tokens: cute.Tensor  # query token of each of this thread's rows
    cols: cute.Tensor  # coordinates in the tile


@dataclass(frozen=True)
class Tile:
    """What a warpgroup knows of the tile at hand, and the scales."""

    w: schedule.Work
    n: mask.Lengths
    scale_log2: Float32  # raw score -> log2 units
    cap: Float32
    score_scale: Float32  # what `softmax.score` left -> log2 units


def group_index():
    return cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128 - 1)


@cute.jit
def wait_turn(spec: cutlass.Constexpr):
    if const_expr(spec.tile.warpgroups > 1):
        cute.arch.barrier(barrier_id=TURN_BARRIER + group_index(), number_of_threads=256)


@cute.jit
def pass_turn(spec: cutlass.Constexpr):
    if const_expr(spec.tile.warpgroups > 1):
        after = (group_index() + 1) % spec.tile.warpgroups
        cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + after, number_of_threads=256)


def registers(spec, plan, s) -> Registers:
    t = spec.tile
    tid = cute.arch.thread_idx()[0] - 128
    base = group_index() * 128
    qk, pv = plan.mma_qk.get_slice(base), plan.mma_pv.get_slice(base)
    vt = cute.make_tensor(s.v.iterator, cute.select(s.v.layout, mode=[1, 0, 2]))
    acc_s = cute.make_rmem_tensor(qk.partition_shape_C((t.m, t.n)), Float32)
    acc_o = cute.make_rmem_tensor(pv.partition_shape_C((t.m, spec.head_dim_vo)), Float32)
    p = cute.make_rmem_tensor_like(wgmma.as_operand_a(acc_s), s.v.element_type)
    rows = cute.size(wgmma.rows_cols(acc_o), mode=[0])
    coords = plan.mma_qk.get_slice(tid).partition_C(cute.make_identity_tensor((t.m, t.n)))
    if spec.tile.q_registers:
        q = cute.make_rmem_tensor(qk.partition_shape_A((t.m, spec.head_dim_qk)), s.q.element_type)
    else:
        q = plan.mma_qk.make_fragment_A(qk.partition_A(s.q))
    return Registers(
        q,
        plan.mma_qk.make_fragment_B(qk.partition_B(s.k)),
        plan.mma_pv.make_fragment_B(pv.partition_B(vt)),
        acc_s,
        acc_o,
        p,
        softmax.make(rows),
        cute.make_rmem_tensor(rows, Int32),
        wgmma.rows_cols(coords),
    )


def queries(spec, r: Registers, stage):
    """The A operand of Q K^T."""
    return r.q if spec.tile.q_registers else r.q[None, None, None, stage]


@cute.jit
def scores(spec: cutlass.Constexpr, r: Registers, x: Tile, j: Int32, masked: cutlass.Constexpr):
    """Soft cap, mask and new maxima of block j in r.s."""
    view = wgmma.rows_cols(r.s)
    softmax.score(spec, r.s, x.scale_log2, x.cap)
    if const_expr(masked):
        mask.apply(spec, view, r.tokens, r.cols, j * spec.tile.n, x.n)
    softmax.maxima(r.st, view, x.score_scale)


@cute.jit
def probabilities(r: Registers, x: Tile, row: cutlass.Constexpr):
    """exp2 of a row of r.s."""
    softmax.exponentials(r.st, wgmma.rows_cols(r.s), x.score_scale, row)


@cute.jit
def operand_p(r: Registers, row: cutlass.Constexpr):
    """A row of r.s in 16 bits, as A operand in r.p."""
    src, dst = wgmma.rows_cols(r.s), wgmma.rows_cols(wgmma.like_accumulator(r.p, r.s))
    warp.convert16(src[row, None], dst[row, None])


@cute.jit
def first(spec: cutlass.Constexpr, plan, s, r: Registers, x: Tile, at):
    """The last KV block j, item i of the pipes: P is left in r.p, its PV is owed."""
    i, j, q = at
    pipe.wait_full(s.k_pipe, i)
    wgmma.issue(plan.mma_qk, r.s, queries(spec, r, q), r.k[None, None, None, pipe.slot(s.k_pipe, i)], True)
    warpgroup.wait_group(0)
    pipe.release(s.k_pipe, i)
    scores(spec, r, x, j, True)
    for row in cutlass.range_constexpr(cute.size(r.tokens)):
        probabilities(r, x, row)
        operand_p(r, row)
    valid = x.n.kv_len - j * spec.tile.n
    if valid < spec.tile.n and valid % kv.boxes(spec.tile.n)[-1] != 0:
        pipe.wait_full(s.v_pipe, i)
        threads = 128 * spec.tile.warpgroups
        kv.zero_tail(spec, s.v[None, None, pipe.slot(s.v_pipe, i)], valid, threads)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=ALL_BARRIER, number_of_threads=threads)


@cute.jit
def step(spec: cutlass.Constexpr, plan, s, r: Registers, x: Tile, at, masked: cutlass.Constexpr):
    """QK of block j (item i + 1) and the PV owed to item i in flight together; softmax of j under PV and the other
    warpgroup's MMAs. PV has ended by the time the first row is done, whose conversion then runs under the second's
    exponentials."""
    i, j, q = at
    pipe.wait_full(s.k_pipe, i + 1)
    wait_turn(spec)
    wgmma.issue(plan.mma_qk, r.s, queries(spec, r, q), r.k[None, None, None, pipe.slot(s.k_pipe, i + 1)], True)
    pipe.wait_full(s.v_pipe, i)
    wgmma.issue(plan.mma_pv, r.o, r.p, r.v[None, None, None, pipe.slot(s.v_pipe, i)], False)
    pass_turn(spec)
    warpgroup.wait_group(1)
    pipe.release(s.k_pipe, i + 1)
    scores(spec, r, x, j, masked)
    probabilities(r, x, 0)
    warpgroup.wait_group(0)
    pipe.release(s.v_pipe, i)
    operand_p(r, 0)
    probabilities(r, x, 1)
    operand_p(r, 1)
    softmax.rescale(r.st, wgmma.rows_cols(r.o))


@cute.jit
def last(spec: cutlass.Constexpr, plan, s, r: Registers, i: Int32):
    """The PV owed to item i."""
    pipe.wait_full(s.v_pipe, i)
    wgmma.issue(plan.mma_pv, r.o, r.p, r.v[None, None, None, pipe.slot(s.v_pipe, i)], False)
    warpgroup.wait_group(0)
    pipe.release(s.v_pipe, i)


@cute.jit
def gather_q(spec: cutlass.Constexpr, s, w: schedule.Work, a, stage: Int32):
    """Packed GQA: this warpgroup copies its 64 rows of Q, (token, head) pairs, into swizzled shared memory."""
    vec = 8  # 16-bit elements of 16 bytes
    per_row = spec.head_dim_qk // vec
    tid = cute.arch.thread_idx()[0] % 128
    fold = tiles.fold(spec, a)
    rows = geometry.tile_rows(w.q_len, fold)
    for c in cutlass.range_constexpr(64 * per_row // 128):
        i = tid + c * 128
        local = group_index() * 64 + i // per_row
        row = w.m_block * spec.tile.m + local
        piece = cute.make_rmem_tensor(vec, s.q.element_type)
        piece.fill(0.0)
        if row < rows:
            token = w.q_start + geometry.token_of(row, fold, True)
            head = geometry.head_of(row, w.head, fold, True)
            cute.autovec_copy(cute.local_tile(a.q[token, head, None], (vec,), (i % per_row,)), piece)
        cute.autovec_copy(piece, cute.local_tile(s.q, (1, vec, 1), (local, i % per_row, stage))[0, None, 0])
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=GROUP_BARRIER + group_index(), number_of_threads=128)


@cute.jit
def store(spec: cutlass.Constexpr, plan, r: Registers, x: Tile, out_scale: Float32):
    """Normalise and write this thread's rows of O and LSE that belong to the request."""
    a = plan.args
    fold = tiles.fold(spec, a)
    o = wgmma.rows_cols(r.o)
    words = cute.make_rmem_tensor(cute.size(o, mode=[1]) // 2, Int32)
    for k in cutlass.range_constexpr(cute.size(o, mode=[0])):
        row = x.w.m_block * spec.tile.m + r.cols[k, 0][0]
        keep = r.tokens[k] < x.w.q_len
        head = geometry.head_of(row, x.w.head, fold, spec.pack_gqa)
        token = x.w.q_start + r.tokens[k]
        sink = -Float32.inf
        if a.sink.shape[0] > 0:
            sink = a.sink[head]
        inverse, lse = softmax.finish(r.st, k, x.score_scale, sink)
        values = cute.make_rmem_tensor(cute.size(o, mode=[1]), Float32)
        values.store(o[k, None].load() * (inverse * out_scale))
        warp.convert16(values, cute.recast_tensor(words, a.o.element_type))
        epilogue.store_row(a.o[token, head, None], words, keep)
        if keep and a.lse.shape[0] > 0 and cute.arch.lane_idx() % 4 == 0:
            a.lse[token, head] = lse


@cute.jit
def factor(constant: Float32, tensor: cute.Tensor):
    """constant times the one-element device tensor, if there is one."""
    if tensor.shape[0] > 0:
        constant *= tensor[0]
    return constant


@cute.jit
def run_tile(spec: cutlass.Constexpr, plan, s, r: Registers, x: Tile, i: Int32, q: Int32):
    """All KV blocks of a tile; returns the next items of the K and V pipes and of the Q pipe."""
    b = tiles.blocks(spec, x.w, plan.args)
    softmax.reset(r.st)
    r.o.fill(0.0)
    fold = tiles.fold(spec, plan.args)
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        row = x.w.m_block * spec.tile.m + r.cols[k, 0][0]
        r.tokens[k] = geometry.token_of(row, fold, spec.pack_gqa)
    if b.hi > b.lo:
        stage = pipe.slot(s.q_pipe, q)
        if const_expr(spec.pack_gqa):
            gather_q(spec, s, x.w, plan.args, stage)
        else:
            pipe.wait_full(s.q_pipe, q)
        if const_expr(spec.tile.q_registers):
            wgmma.load_a(plan.mma_qk, s.q[None, None, stage], r.q, cute.arch.thread_idx()[0] - 128)
            if const_expr(not spec.pack_gqa):
                pipe.release(s.q_pipe, q)
        first(spec, plan, s, r, x, (i, b.hi - 1, stage))
        segments = mask.segments(spec, b.lo, b.hi - 1, b.full_lo, b.full_hi)
        for g in cutlass.range_constexpr(len(segments)):
            lo, hi, masked = segments[g]
            for j in cutlass.range(hi - 1, lo - 1, -1, unroll=1):
                step(spec, plan, s, r, x, (i, j, stage), masked)
                i += 1
        if const_expr(not spec.pack_gqa and not spec.tile.q_registers):
            pipe.release(s.q_pipe, q)
        last(spec, plan, s, r, i)
        i += 1
        q += 1
    return i, q


@cute.jit
def math(spec: cutlass.Constexpr, plan, s):
    a = plan.args
    r = registers(spec, plan, s)
    scale_log2 = factor(a.scale_log2, a.scale)
    out_scale = factor(a.out_factor, a.out_scale)
    if group_index() == spec.tile.warpgroups - 1:
        pass_turn(spec)
    i, q, t, more = Int32(0), Int32(0), Int32(0), Int32(1)
    while more != 0:
        w = schedule.hear(s, t)
        more = w.valid
        if w.valid != 0:
            score_scale = softmax.score_scale(spec, scale_log2, a.soft_cap)
            x = Tile(w, tiles.lengths(spec, w, a), scale_log2, a.soft_cap, score_scale)
            i, q = run_tile(spec, plan, s, r, x, i, q)
            store(spec, plan, r, x, out_scale)
        t += 1
