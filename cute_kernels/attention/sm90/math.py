"""Math role of prefill: one warpgroup per 64 rows of the tile. S = Q K^T, softmax, O += P V, store.

A warpgroup issues QK of a block together with PV of the block before, and computes the softmax of the one under the
other (`step`), across tiles too (`last`). Warpgroups take turns at issuing, so that one's softmax runs under another's
MMAs.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...device import pipe, warp, wgmma
from .. import epilogue, geometry, kv, mask, schedule, softmax

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
    score_scale: Float32  # what `scores` reduces -> log2 units


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


def ahead(spec):
    """Whether the first QK of a tile is issued before the epilogue of the tile before."""
    return not spec.pack_gqa and (spec.tile.q_registers or spec.tile.q_stages > 1)


@cute.jit
def scores(spec: cutlass.Constexpr, r: Registers, x: Tile, j: Int32, masked: cutlass.Constexpr):
    """Soft cap, mask and new maxima of block j in r.s."""
    view = wgmma.rows_cols(r.s)
    if const_expr(spec.soft_cap):
        softmax.cap_scores(r.s, x.scale_log2, x.cap)
    if const_expr(masked):
        mine = r.cols[0, 0][1]
        cols = [r.cols[0, c][1] - mine for c in range(cute.size(view, mode=[1]))]
        mask.apply(spec, view, r.tokens, cols, j * spec.tile.n + mine, x.n)
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
def ready(spec: cutlass.Constexpr, plan, s, r: Registers, w: schedule.Work, at):
    """Wait for what the first QK of a tile needs: its Q, item q, and K of its last block, item i."""
    i, q = at
    if const_expr(spec.pack_gqa):
        gather_q(spec, s, w, plan.args, pipe.slot(s.q_pipe, q))
    else:
        pipe.wait_full(s.q_pipe, q)
    if const_expr(spec.tile.q_registers):
        wgmma.load_a(plan.mma_qk, s.q[None, None, pipe.slot(s.q_pipe, q)], r.q, cute.arch.thread_idx()[0] - 128)
        if const_expr(not spec.pack_gqa):
            pipe.release(s.q_pipe, q)
    pipe.wait_full(s.k_pipe, i)


@cute.jit
def issue_qk(spec: cutlass.Constexpr, plan, s, r: Registers, at):
    i, q = at
    a = r.q if const_expr(spec.tile.q_registers) else r.q[None, None, None, pipe.slot(s.q_pipe, q)]
    wgmma.issue(plan.mma_qk, r.s, a, r.k[None, None, None, pipe.slot(s.k_pipe, i)], True)


@cute.jit
def begin(spec: cutlass.Constexpr, plan, s, r: Registers, w: schedule.Work, at):
    """The first QK of a tile."""
    ready(spec, plan, s, r, w, at)
    issue_qk(spec, plan, s, r, at)


@cute.jit
def issue_pv(plan, s, r: Registers, i: Int32):
    pipe.wait_full(s.v_pipe, i)
    wgmma.issue(plan.mma_pv, r.o, r.p, r.v[None, None, None, pipe.slot(s.v_pipe, i)], False)


@cute.jit
def first(spec: cutlass.Constexpr, s, r: Registers, x: Tile, at):
    """The last KV block j, item i of the pipes, its QK in flight: P is left in r.p, its PV is owed."""
    i, j = at
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
    issue_qk(spec, plan, s, r, (i + 1, q))
    issue_pv(plan, s, r, i)
    pass_turn(spec)
    warpgroup.wait_group(1)
    scores(spec, r, x, j, masked)
    probabilities(r, x, 0)
    # An exponential is never below -|score_scale|, whatever a device tensor holds: the release always happens, and the
    # wait stays behind it.
    pipe.release_after(s.k_pipe, i + 1, wgmma.rows_cols(r.s)[0, 0], -cute.math.absf(x.score_scale))
    warpgroup.wait_group(0)
    pipe.release(s.v_pipe, i)
    operand_p(r, 0)
    probabilities(r, x, 1)
    operand_p(r, 1)
    softmax.rescale(r.st, wgmma.rows_cols(r.o))


@cute.jit
def last(spec: cutlass.Constexpr, plan, s, r: Registers, after: schedule.Work, at):
    """The PV owed by the tile at hand, item i, and, where Q has room for it, the first QK of the tile `after`, which
    then runs under this tile's epilogue. Past the last tile that QK multiplies what the stages happen to hold: with
    MMAs in flight across a conditional the compiler waits after each of them."""
    i, q = at
    if const_expr(ahead(spec)):
        if after.valid != 0:
            ready(spec, plan, s, r, after, (i + 1, q + 1))
        wait_turn(spec)
        issue_pv(plan, s, r, i)
        issue_qk(spec, plan, s, r, (i + 1, q + 1))
        pass_turn(spec)
        warpgroup.wait_group(1)
    else:
        issue_pv(plan, s, r, i)
        warpgroup.wait_group(0)
    pipe.release(s.v_pipe, i)


@cute.jit
def gather_q(spec: cutlass.Constexpr, s, w: schedule.Work, a, stage: Int32):
    """Packed GQA: this warpgroup copies its 64 rows of Q, (token, head) pairs, into swizzled shared memory.

    A warp writes rows that others of the group read: all of them must have finished with the tile before.
    """
    vec = 8  # 16-bit elements of 16 bytes
    cute.arch.barrier(barrier_id=GROUP_BARRIER + group_index(), number_of_threads=128)
    per_row = spec.head_dim_qk // vec
    tid = cute.arch.thread_idx()[0] % 128
    fold = geometry.fold(spec, a)
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
def store(spec: cutlass.Constexpr, plan, r: Registers, w: schedule.Work, scales, empty: cutlass.Constexpr):
    """Normalise and write this thread's rows of O and LSE that belong to the request; `empty`: no row sees a key."""
    a = plan.args
    score_scale, out_scale = scales
    fold = geometry.fold(spec, a)
    o = wgmma.rows_cols(r.o)
    words = cute.make_rmem_tensor(cute.size(o, mode=[1]) // 2, Int32)
    for k in cutlass.range_constexpr(cute.size(o, mode=[0])):
        row = w.m_block * spec.tile.m + r.cols[k, 0][0]
        token = geometry.token_of(row, fold, spec.pack_gqa)
        keep = token < w.q_len
        head = geometry.head_of(row, w.head, fold, spec.pack_gqa)
        sink = epilogue.sink_of(a, head)
        out = a.o[w.q_start + token, head, None]
        lse = sink * softmax.LOG2_E
        if const_expr(empty):
            words.fill(0)
        else:
            inverse, lse = softmax.finish(r.st, k, score_scale, sink)
            values = cute.make_rmem_tensor(cute.size(o, mode=[1]), Float32)
            values.store(o[k, None].load() * (inverse * out_scale))
            warp.convert16(values, cute.recast_tensor(words, a.o.element_type))
        epilogue.store_row(out, words, keep)
        if keep and a.lse.shape[0] > 0 and cute.arch.lane_idx() % 4 == 0:
            a.lse[w.q_start + token, head] = lse


@cute.jit
def set_tokens(spec: cutlass.Constexpr, r: Registers, w: schedule.Work, a):
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        row = w.m_block * spec.tile.m + r.cols[k, 0][0]
        r.tokens[k] = geometry.token_of(row, geometry.fold(spec, a), spec.pack_gqa)


@cute.jit
def run_tile(spec: cutlass.Constexpr, plan, s, r: Registers, x: Tile, at):
    """The KV blocks of a tile whose first QK is in flight, up to the PV of the last; returns that one's pipe item."""
    i, q = at
    softmax.reset(r.st)
    r.o.fill(0.0)
    set_tokens(spec, r, x.w, plan.args)
    first(spec, s, r, x, (i, x.w.hi - 1))
    segments = mask.segments(spec, x.w.lo, x.w.hi - 1, x.w.full_lo, x.w.full_hi)
    for g in cutlass.range_constexpr(len(segments)):
        lo, hi, masked = segments[g]
        for j in cutlass.range(hi - 1, lo - 1, -1, unroll=1):
            step(spec, plan, s, r, x, (i, j, q), masked)
            i += 1
    if const_expr(not spec.pack_gqa and not spec.tile.q_registers):
        pipe.release(s.q_pipe, q)
    return i


@cute.jit
def next_tile(spec: cutlass.Constexpr, plan, s, r: Registers, scales, t: Int32):
    """(Work of the CTA's t-th tile or of the first after it that sees a key, t'); those that see none are stored."""
    w = schedule.hear(s, t)
    while w.valid != 0 and w.hi <= w.lo:
        store(spec, plan, r, w, scales, True)
        t += 1
        w = schedule.hear(s, t)
    return w, t + 1


@cute.jit
def math(spec: cutlass.Constexpr, plan, s):
    a = plan.args
    r = registers(spec, plan, s)
    scale_log2 = softmax.factor(a.scale_log2, a.scale)
    score_scale = softmax.capped_scale(a.soft_cap) if const_expr(spec.soft_cap) else scale_log2
    scales = (score_scale, softmax.factor(a.out_factor, a.out_scale))
    if group_index() == spec.tile.warpgroups - 1:
        pass_turn(spec)
    i, q = Int32(0), Int32(0)
    w, t = next_tile(spec, plan, s, r, scales, Int32(0))
    if w.valid != 0:
        if const_expr(ahead(spec)):
            begin(spec, plan, s, r, w, (i, q))
        while w.valid != 0:
            if const_expr(not ahead(spec)):
                begin(spec, plan, s, r, w, (i, q))
            x = Tile(w, mask.Lengths(w.q_len, w.kv_len, a.window_left), scale_log2, a.soft_cap, scales[0])
            i = run_tile(spec, plan, s, r, x, (i, q))
            w, t = next_tile(spec, plan, s, r, scales, t)
            last(spec, plan, s, r, w, (i, q))
            store(spec, plan, r, x.w, scales, False)
            i += 1
            q += 1
        warpgroup.wait_group(0)
