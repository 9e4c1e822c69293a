"""MMAs of a KV block, S = Q @ K^T and O += P @ V, and the waits in front of them: the same for tiles of all forms."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ...device import layout, pipeline, umma
from .. import mask_blocks
from ..kv import source
from ..schedule import work
from . import precision
from .precision import mma_kind, operand_bytes, p_column, p_splits
from .roles import ROWS

S, O = 0, 256  # noqa: E741  first columns of S and of O in tensor memory


class MmaState(NamedTuple):
    """Counters before the block at hand. item: of the pipelines of K and V, unsigned because its stage then takes fewer
    instructions; iteration: see `roles.num_iterations`; tile: tiles that have keys."""

    item: Uint32
    iteration: Any
    tile: Int32


class TmemColumns(NamedTuple):
    """Addresses in tensor memory of S (and P, in its last columns) and O."""

    s: Int32
    o: Int32


def columns(base, slot, group) -> TmemColumns:
    """Return the addresses of a slot of S and of a group's O. base: of the CTA's tensor memory."""
    return TmemColumns(base + (S + slot * ROWS), base + (O + group * ROWS))


def mma_instruction(spec, n, b_major="k"):
    """Return the instruction descriptor of an MMA of ROWS rows and n columns. b_major: of the B operand."""
    return umma.instruction_descriptor(mma_kind(spec), precision.of(spec).mma_dtype, ROWS, n, b_major)


def k_offsets(spec, dim, rows):
    """Return the byte offset of the operand of each MMA along `dim`, in a K-major stage (rows, dim)."""
    size = dim * operand_bytes(spec)
    width = layout.width(size)
    return [at // width * (rows * width) + at % width for at in range(0, size, umma.STEP)]


class FirstDescriptors(NamedTuple):
    """Descriptors of the first operands of a tile's Q, and of stage 0 of K and of V."""

    q: Int64
    k: Int64
    v: Int64


def q_address(spec, s, q):
    """Return the address of Q, item q of its pipeline, in shared memory."""
    return s.q.iterator.toint() + pipeline.stage(s.q_pipe, q) * (spec.tile.m * spec.padded_qk * operand_bytes(spec))


def k_base(spec):
    """Return the descriptor of an operand of Q or K at address 0."""
    return umma.k_major(layout.width(spec.padded_qk * operand_bytes(spec)))


def v_base(spec):
    """Return the descriptor of an operand of V at address 0."""
    return umma.mn_major(layout.width(spec.padded_vo * operand_bytes(spec)), spec.tile.n)


def first_descriptors(spec, s, q) -> FirstDescriptors:
    """Return the first descriptors for a tile. q: item of Q's pipeline."""
    k, v = (x.iterator.toint() for x in (s.k.smem, s.v.smem))
    make = umma.make_descriptor
    return FirstDescriptors(make(k_base(spec), q_address(spec, s, q)), make(k_base(spec), k), make(v_base(spec), v))


def q_offsets(spec, half):
    """Return the byte offset of the operand of each MMA in a half of Q."""
    dim, size = spec.padded_qk, spec.padded_qk * operand_bytes(spec)
    return [half * ROWS * layout.width(size) + at for at in k_offsets(spec, dim, spec.tile.m)]


def q_descriptors(spec, first: FirstDescriptors, half, offset):
    """Return the descriptors of a half of Q, one per MMA. offset: `umma.offset_descriptor` or `offset_descriptor_here`,
    whichever takes fewer instructions in the loop that calls this."""
    return [offset(first.q, at) for at in q_offsets(spec, half)]


def q_descriptors_of_first_block(spec, s, q, half):
    """Return what `q_descriptors` returns, made from low words: ptxas would share 64-bit sums with the loop over the
    other blocks, where they would take two instructions each."""
    low = umma.descriptor_low(k_base(spec), q_address(spec, s, q))
    return [umma.of_low(low + (at >> 4), k_base(spec)) for at in q_offsets(spec, half)]


def k_descriptors(spec, s, first: FirstDescriptors, i, offset):
    """Return the descriptors of K's item i, one per MMA. offset: see `q_descriptors`."""
    dim, rows = spec.padded_qk, spec.tile.n
    k = umma.stage_descriptor(first.k, pipeline.stage(s.k.pipe, i), rows * dim * operand_bytes(spec))
    return [offset(k, at) for at in k_offsets(spec, dim, rows)]


def v_descriptors(spec, s, first: FirstDescriptors, i, offset):
    """Return the descriptors of V's item i, one per MMA. offset: see `q_descriptors`."""
    rows, size = spec.tile.n, spec.padded_vo * operand_bytes(spec)
    v = umma.stage_descriptor(first.v, pipeline.stage(s.v.pipe, i), rows * size)
    keys = umma.STEP // operand_bytes(spec)
    return [offset(v, key * layout.width(size)) for key in range(0, rows, keys)]


def gemm_qk(spec, s, base, slot, q, k):
    """Issue S = Q @ K^T and commit it to s_full. One warp. q, k: descriptors, one per MMA."""
    instruction = mma_instruction(spec, spec.tile.n)
    for n, (a, b) in enumerate(zip(q, k, strict=True)):
        umma.mma(mma_kind(spec), base + (S + slot * ROWS), a, b, instruction, n > 0)
    umma.commit(s.s_full + slot)


def gemm_pv(spec, at: TmemColumns, v, parts, is_first):
    """Issue O += P @ V for some `parts` of P (see `p_splits`), neighbours. One warp. v: `v_descriptors`. is_first: 1
    for the block that O begins with, which overwrites O."""
    instruction, count = mma_instruction(spec, spec.padded_vo, "mn"), p_splits(spec)
    for n in range(parts[0] * len(v) // count, (parts[-1] + 1) * len(v) // count):
        p = at.s + (p_column(spec) + n * umma.STEP // 4)
        umma.mma(mma_kind(spec), at.o, p, v[n], instruction, Int32(1) if n > 0 else 1 - is_first)


@cute.jit
def wait_operand(spec: cutlass.Constexpr, ring: pipeline.Pipeline, i: Uint32):
    """Wait until MMAs may read item i of K or V."""
    pipeline.consumer_wait(ring, i)
    fence_before_mma(spec)


@cute.jit
def fence_before_mma(spec: cutlass.Constexpr):
    """Make K and V visible to MMAs, after the wait for them: gathered stages need a proxy fence, of 6 instructions."""
    if const_expr(not precision.of(spec).converts_kv):
        source(spec).fence_before_mma()


def zeroes_tail(spec):
    """Return whether the mma warp calls `zero_tail`. The prepare role zeroes these rows in converted stages."""
    return source(spec).PARTIAL_TAIL and not precision.of(spec).converts_kv


@cute.jit
def zero_tail(spec: cutlass.Constexpr, a, s, w: work.WorkTileInfo, i: Uint32):
    """Write zeros to the rows of V, item i, past the request's last key: they may hold anything, and 0 * NaN is NaN.

    The mma warp does this, because it consumes V's stages. A warp that did not consume them once did it: it saw an old
    phase and zeroed an older block. No role waits for the zeros: S of the tile's first block is computed meanwhile.
    """
    valid = w.sequence.kv_len - mask_blocks.n_block_at(spec, a, w, w.n_block_max - 1) * spec.tile.n
    if valid < spec.tile.n and source(spec).has_partial_tail(spec.tile.n, valid):
        stage = s.v.smem[None, None, pipeline.stage(s.v.pipe, i)]
        source(spec).zero_tail(spec, stage, valid, cute.arch.lane_idx(), 32)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
