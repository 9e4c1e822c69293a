"""Q of a tile: gathered for packed GQA, converted to the MMA's type, and an operand in shared memory or in registers.

The main loop does not ask where the operand is (`tile.q_in_regs`): it calls `receive_q` before the first Q K^T of a
tile, `operand_of` for each, and `release_q` after the last.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ...device import copy, layout, mma, pipeline, warp, wgmma
from .. import geometry, prepare, quant
from ..barriers import NamedBarrier
from ..kv.rings import allocate_stages
from ..schedule.work import WorkTileInfo
from . import precision
from .epilogue import LANES
from .groups import o_part, row_group, rows_barrier, warpgroup_idx
from .roles import roles


def operand(spec, a):
    """Make the TMA operand of Q; None where a role gathers all rows. Called on the host."""
    if spec.kv.shares_v:
        return None
    rows = cute.make_tensor(a.query.q.iterator, cute.select(a.query.q.layout, mode=[0, 2, 1]))
    return copy.operand(rows, (spec.tile.m, spec.padded_qk), spec.tile.q_stages, (spec.tile.m,))


def allocate_raw(spec, smem, plan):
    """Return the stages that Q is loaded to."""
    if plan.q is None:
        return allocate_stages(spec, smem, (spec.tile.m, spec.padded_qk), spec.tile.q_stages)
    return copy.allocate(smem, plan.q, plan.args.query.q.element_type)


def allocate(spec, smem, raw_q):
    """Return the Q stages that MMAs read: `raw_q`, to which Q is loaded, unless a converted Q has no room there."""
    p, shape = precision.of(spec), (spec.tile.m, spec.padded_qk)
    if spec.tile.q_in_regs or not p.converts_q:
        return raw_q
    if p.widens_q:
        return allocate_stages(spec, smem, shape, spec.tile.q_stages)
    kind = layout.smem_layout(shape, spec.tile.q_stages, p.mma_type)
    return cute.make_tensor(cute.recast_ptr(raw_q.iterator, kind.inner, p.mma_type), kind.outer)


def allocate_row_scales(spec, smem):
    """Allocate the scales of the rows of Q; None unless warpgroups that have the same rows convert bf16."""
    if spec.tile.o_parts == 1 or not precision.of(spec).scales_q_rows:
        return None
    return smem.allocate_tensor(Float32, cute.make_layout((spec.tile.m, 1)), 16)


def make_fragment(spec, mma_qk, thread_qk, s):
    """Return the A operand of Q K^T: registers, or descriptors of the stages. thread_qk: a thread's part of mma_qk."""
    if spec.tile.q_in_regs:
        shape = thread_qk.partition_shape_A((spec.tile.m, spec.padded_qk))
        return cute.make_rmem_tensor(shape, precision.of(spec).mma_type)
    return mma_qk.make_fragment_A(thread_qk.partition_A(s.q))


def overlap_next_qk(spec):
    """Return whether the first Q K^T of a tile is issued before the epilogue of the tile before: Q must have room."""
    return spec.tile.q_in_regs or spec.tile.q_stages > 1


@cute.jit
def receive_q(spec: cutlass.Constexpr, plan, s, r, w: WorkTileInfo, item: Int32):
    """Wait for Q of a tile, an item of q_pipe, and make it an operand: gather packed rows, then load it into registers
    and release its stage, or convert it in shared memory if necessary."""
    pipeline.consumer_wait(s.q_pipe, item)
    if w.pack_factor > 1:
        gather_q(spec, s, w, plan.args, pipeline.stage(s.q_pipe, item))
    if const_expr(spec.tile.q_in_regs):
        load_q(spec, plan.mma_qk, s, r, r.q, pipeline.stage(s.q_pipe, item))
        cute.arch.sync_warp()  # all lanes have read before one of them arrives
        pipeline.consumer_release(s.q_pipe, item)
    elif const_expr(precision.of(spec).converts_q):
        convert_q(spec, s, r, pipeline.stage(s.q_pipe, item))


def operand_of(spec, s, r, item):
    """Return the operand of Q K^T for Q of an item of q_pipe."""
    return r.q if spec.tile.q_in_regs else r.q[None, None, None, pipeline.stage(s.q_pipe, item)]


@cute.jit
def release_q(spec: cutlass.Constexpr, s, item: Int32):
    """Release the stage of Q after the last Q K^T of its tile, unless `receive_q` has done it."""
    if const_expr(not spec.tile.q_in_regs):
        pipeline.consumer_release(s.q_pipe, item)


@cute.jit
def load_q(spec: cutlass.Constexpr, qk: cute.TiledMma, s, r, q: cute.Tensor, stage: Int32):
    """Load Q of a stage into q, a register A operand of `qk`, in the type that the MMA multiplies.

    bf16 becomes fp16 divided by a power of two per row, which goes to r.q_row_scales.
    """
    if const_expr(precision.of(spec).widens_q):
        load_q8(spec, s, r, q, stage)
    else:
        thread = cute.arch.thread_idx()[0] - roles(spec).first_thread("mma")
        if const_expr(precision.of(spec).converts_kv):
            thread = warp.opaque(thread)  # compute the addresses again for each tile: no registers hold them between
        wgmma.load_a(qk, s.q[None, None, stage], q, thread)
        if const_expr(precision.of(spec).scales_q_rows):
            words, own = cute.recast_tensor(q, Uint32), cute.make_rmem_tensor(spec.padded_qk // 8, Uint32)
            for row in cutlass.range_constexpr(cute.size(r.q_row_scales)):
                at = const_expr([i // 2 * 4 + i % 2 * 2 + row for i in range(spec.padded_qk // 8)])
                for i in cutlass.range_constexpr(len(at)):
                    own[i] = words[at[i]]
                r.q_row_scales[row] = quant.to_fp16(own)
                for i in cutlass.range_constexpr(len(at)):
                    words[at[i]] = own[i]


@cute.jit
def load_q8(spec: cutlass.Constexpr, s, r, q: cute.Tensor, stage: Int32):
    """Load e4m3 Q of a stage into q as fp16. Per 16 columns of a row, a lane has two pairs, 8 columns apart."""
    words, width = cute.recast_tensor(q, Uint32), const_expr(layout.width(spec.padded_qk))
    base = s.raw_q.iterator.toint() + stage * (spec.tile.m * spec.padded_qk)
    for row in cutlass.range_constexpr(2):
        mine, byte = r.cols[row, 0][0], cute.arch.lane_idx() % LANES * 2
        for k in cutlass.range_constexpr(spec.padded_qk // 16):
            box = base + const_expr(16 * k // width * (spec.tile.m * width))
            at = [box + layout.swizzle(width, mine, 16 * k % width + 8 * half + byte) for half in range(2)]
            pairs = [mma.load_bytes(address, 2) for address in at]
            both = quant.from_e4m3(quant.permute(pairs[0], pairs[1], 0x5410))
            words[4 * k + row], words[4 * k + 2 + row] = both[0], both[1]


@cute.jit
def convert_q(spec: cutlass.Constexpr, s, r, stage: Int32):
    """Convert Q of a stage, in shared memory, to the type that the MMA multiplies. Each warp converts its own rows or,
    if warpgroups have the same rows, a share of all."""
    if const_expr(spec.tile.o_parts > 1):
        convert_shared_q(spec, s, r, stage)
    else:
        convert_own_q(spec, s, r, stage)


@cute.jit
def convert_shared_q(spec: cutlass.Constexpr, s, r, stage: Int32):
    """Do the work of `convert_q` for warpgroups that have the same rows. The loader overwrites neither Q nor the scales
    of its rows before both have released the stage."""
    share = prepare.Share(cute.arch.warp_idx() - roles(spec).first("mma"), roles(spec).warps("mma"))
    if const_expr(precision.of(spec).scales_q_rows):
        prepare.q_to_fp16(spec, s, stage, 0, share)
    else:
        prepare.widen_q(spec, s, stage, share)
    cute.arch.fence_proxy("async.shared", space="cta")
    rows_barrier(spec)
    if const_expr(precision.of(spec).scales_q_rows):
        for k in cutlass.range_constexpr(cute.size(r.q_row_scales)):
            r.q_row_scales[k] = s.q_row_scales[r.cols[k, 0][0], 0]


@cute.jit
def convert_own_q(spec: cutlass.Constexpr, s, r, stage: Int32):
    """Do the work of `convert_q` for a warpgroup that has rows of its own."""
    t, thread = spec.tile, cute.arch.thread_idx()[0] - roles(spec).first_thread("mma")
    qk = wgmma.mma_nt(s.q.element_type, t.warpgroups, t.n, True)
    q = cute.make_rmem_tensor(qk.get_slice(0).partition_shape_A((t.m, spec.padded_qk)), s.q.element_type)
    load_q(spec, qk, s, r, q, stage)
    cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + warpgroup_idx(spec), number_of_threads=128)
    wgmma.store_a(qk, q, s.q[None, None, stage], thread)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + warpgroup_idx(spec), number_of_threads=128)


@cute.jit
def gather_q(spec: cutlass.Constexpr, s, w: WorkTileInfo, a, stage: Int32):
    """Packed GQA: copy this warpgroup's 64 rows of Q, (token, head) pairs, into the swizzled stage. Warpgroups with the
    same rows share the work.

    Rows past the sequence repeat its last row; columns past head_dim_qk become zeros. The stage may be written: q_pipe
    reports it full only after all mma warps have released the item before.
    """
    vec = const_expr(128 // s.raw_q.element_type.width)  # elements in 16 bytes
    per_row = const_expr(spec.padded_qk // vec)
    stored = const_expr(spec.head_dim_qk // vec)
    threads, tid = const_expr(128 * spec.tile.o_parts), cute.arch.thread_idx()[0] % 128
    if const_expr(spec.tile.o_parts > 1):
        tid += 128 * o_part(spec)
    rows = geometry.num_rows(w.sequence.q_len, w.pack_factor)
    count = const_expr(64 * per_row // threads)
    pieces = cute.make_rmem_tensor((vec, count), s.raw_q.element_type)
    if const_expr(stored < per_row):
        pieces.fill(0.0)
    for c in cutlass.range_constexpr(count):  # all loads are in flight before the first is stored
        i = tid + c * threads
        row = cutlass.min(w.m_block * spec.tile.m + row_group(spec) * 64 + i // per_row, rows - 1)
        token = w.sequence.q_start + geometry.token_of(row, geometry.pack_divisor(w))
        head = geometry.head_of(row, w.head_idx, geometry.pack_divisor(w))
        source = cute.local_tile(a.query.q[token, head, None], (vec,), (i % per_row,))
        if const_expr(stored == per_row):
            copy.vector(source, pieces[None, c])
        elif i % per_row < stored:
            copy.vector(source, pieces[None, c])
    for c in cutlass.range_constexpr(count):
        i = tid + c * threads
        target = cute.local_tile(s.raw_q, (1, vec, 1), (row_group(spec) * 64 + i // per_row, i % per_row, stage))
        copy.vector(pieces[None, c], target[0, None, 0])
    cute.arch.fence_proxy("async.shared", space="cta")
    rows_barrier(spec)
