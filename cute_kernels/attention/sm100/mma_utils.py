"""What tiles of all forms issue: MMAs of a block, and what they wait for."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ...device import layout, pipeline, umma
from ..kv import source
from ..prepare import dequantises, mma_dtype
from ..schedule import work
from .roles import ROWS, q_stage

S, O = 0, 256  # noqa: E741  columns of S, of O


def fp8(spec):
    """Whether the MMAs multiply numbers of 8 bits."""
    return mma_dtype(spec) == "e4m3"


def bytes_of(spec):
    """Of an element of the operands."""
    return 1 if fp8(spec) else 2


def kind(spec):
    """Of the MMAs."""
    return "f8f6f4" if fp8(spec) else "f16"


def p_splits(spec):
    """Of P, of whose columns tensor memory takes powers of two at a time. Of P in 8 bits two alone: with four, ptxas
    computes what is emulated of all before it stores the first."""
    return 3 if spec.tile.n % 3 == 0 else 2 if fp8(spec) else 4


def p_early_splits(spec):
    """Pieces of P that the MMAs may begin with: all but one. In 8 bits that is half: MMAs are faster than the
    exponentials."""
    return p_splits(spec) - 1


def p_column(spec):
    """Column of P in its S, whose last ones it takes."""
    return spec.tile.n - spec.tile.n * bytes_of(spec) // 4


def steps(spec, dim, rows):
    """Offsets in bytes of each MMA's part of the rows of a stage (rows, dim), K-major."""
    width, each = layout.width(dim * bytes_of(spec)), umma.STEP
    return [at // width * (rows * width) + at % width for at in range(0, dim * bytes_of(spec), each)]


class TmemColumns(NamedTuple):
    """Addresses in tensor memory."""

    s: Int32
    o: Int32


def columns(base, slot, half) -> TmemColumns:
    return TmemColumns(base + (S + slot * ROWS), base + (O + half * ROWS))


def q_descriptors(spec, s, q):
    """Descriptors of each MMA's part of Q, item q of its pipe, of its halves. In 64 bits: they stay in registers."""
    t, size = spec.tile, spec.head_dim_qk * bytes_of(spec)
    width = layout.width(size)
    first = umma.make_descriptor(umma.k_major(width), s.q.iterator.toint() + pipeline.stage(s.q_pipe, q) * (t.m * size))
    parts = steps(spec, spec.head_dim_qk, t.m)
    return [[umma.offset_descriptor(first, half * ROWS * width + at) for at in parts] for half in range(q_stage(spec))]


def first_word(spec, stages, i, ring, base, dim):
    """Low word of the descriptor of item i of K or V."""
    return umma.descriptor_low(base, stages.iterator.toint()) + pipeline.stage(ring, i) * (
        spec.tile.n * dim * bytes_of(spec) >> 4
    )


@cute.jit
def gemm_qk(spec: cutlass.Constexpr, s, base: Int32, slot, rows, i: Uint32):
    """One thread: S of a slot is Q K^T of block i of the pipe. rows: of `q_descriptors`, those of the slot's half."""
    t, dim = spec.tile, spec.head_dim_qk
    width = const_expr(layout.width(dim * bytes_of(spec)))
    keys, each = first_word(spec, s.k, i, s.k_pipe, umma.k_major(width), dim), const_expr(steps(spec, dim, t.n))
    made = const_expr(umma.instruction_descriptor(kind(spec), mma_dtype(spec), ROWS, t.n))
    for n in cutlass.range_constexpr(len(each)):
        part = umma.DescriptorLow(keys + (each[n] >> 4), umma.k_major(width))
        umma.mma(kind(spec), base + (S + slot * ROWS), rows[n], part, made, n > 0)
    umma.commit(s.s_full + slot)


@cute.jit
def gemm_pv(spec: cutlass.Constexpr, s, at: TmemColumns, i: Uint32, some: cutlass.Constexpr, first: Int32):
    """One thread: O += P V of block i of the pipe, of some pieces of P. first: 1 where O begins."""
    t, dim = spec.tile, spec.head_dim_vo
    width, keys = const_expr(layout.width(dim * bytes_of(spec))), umma.STEP // bytes_of(spec)
    values = first_word(spec, s.v, i, s.v_pipe, umma.mn_major(width, t.n), dim)
    made = const_expr(umma.instruction_descriptor(kind(spec), mma_dtype(spec), ROWS, dim, "mn"))
    for piece in some:
        for n in range(piece * t.n // p_splits(spec) // keys, (piece + 1) * t.n // p_splits(spec) // keys):
            left = at.s + (p_column(spec) + n * umma.STEP // 4)
            part = umma.DescriptorLow(values + (n * keys * width >> 4), umma.mn_major(width, t.n))
            umma.mma(kind(spec), at.o, left, part, made, Int32(1) if n > 0 else 1 - first)


@cute.jit
def wait_operand(spec: cutlass.Constexpr, ring: pipeline.Pipeline, i: Uint32):
    """Until MMAs may read item i of K or V."""
    pipeline.consumer_wait(ring, i)
    fence_before_mma(spec)


@cute.jit
def fence_before_mma(spec: cutlass.Constexpr):
    """Between waits for items of K or V and the MMAs that read them."""
    if const_expr(not dequantises(spec)):
        source(spec).fence_before_mma()


@cute.jit
def zero_tail(spec: cutlass.Constexpr, s, w: work.WorkTileInfo, i: Uint32):
    """Zeros into the rows of V, item i of its pipe, that lie past the request's last key and may hold anything. Nothing
    waits for it: S of the tile has just begun."""
    valid = w.kv_len - (w.n_block_max - 1) * spec.tile.n
    if valid < spec.tile.n and source(spec).has_partial_tail(spec, valid):
        stage = s.v[None, None, pipeline.stage(s.v_pipe, i)]
        source(spec).zero_tail(spec, stage, valid, cute.arch.lane_idx(), 32)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()


class MmaState(NamedTuple):
    """Before the block at hand: items of the pipes of K and V, unsigned, whose stage then takes fewer instructions;
    rounds; tiles with keys."""

    item: Uint32
    iteration: Any
    tile: Int32
