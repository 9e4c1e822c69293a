"""MMAs of a KV block, S = Q @ K^T and O += P @ V, and the waits in front of them: the same for tiles of all forms."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ...device import layout, pipeline, umma
from .. import mask_blocks
from ..kv import source
from ..schedule import work
from . import precision
from .precision import mma_kind, operand_bytes, p_column, p_splits
from .roles import ROWS, q_stage

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


def q_descriptors(spec, s, q):
    """Return the descriptors of Q, item q of its pipeline: for each half, one per MMA."""
    t, size = spec.tile, spec.padded_qk * operand_bytes(spec)
    width = layout.width(size)
    first = umma.make_descriptor(umma.k_major(width), s.q.iterator.toint() + pipeline.stage(s.q_pipe, q) * (t.m * size))
    offsets, halves = k_offsets(spec, spec.padded_qk, t.m), range(q_stage(spec))
    return [[umma.offset_descriptor(first, half * ROWS * width + at) for at in offsets] for half in halves]


def kv_descriptor(stages, i, ring, base, size):
    """Return the low word of the descriptor of K or V, item i of the pipeline `ring`. base: static descriptor of an
    operand at address 0. size: bytes of a stage."""
    return umma.descriptor_low(base, stages.iterator.toint()) + pipeline.stage(ring, i) * (size >> 4)


def k_descriptors(spec, s, i):
    """Return the descriptors of K's item i, one per MMA.

    One is made from its low word and the others by 64-bit additions, each of which ptxas makes one instruction as long
    as the first stays in a pair of registers."""
    dim, size = spec.padded_qk, spec.padded_qk * operand_bytes(spec)
    base = umma.k_major(layout.width(size))
    first = umma.of_low(kv_descriptor(s.k, i, s.k_pipe, base, spec.tile.n * size), base)
    return [umma.offset_descriptor(first, at) for at in k_offsets(spec, dim, spec.tile.n)]


def v_descriptors(spec, s, i):
    """Return the descriptors of V's item i, one per MMA.

    Each is made from its low word: both halves of a tile read them, and ptxas keeps them in registers meanwhile. With
    64-bit additions the loop over blocks has 8 more instructions."""
    t, size = spec.tile, spec.padded_vo * operand_bytes(spec)
    width, keys = layout.width(size), umma.STEP // operand_bytes(spec)
    base = umma.mn_major(width, t.n)
    low = kv_descriptor(s.v, i, s.v_pipe, base, t.n * size)
    return [umma.of_low(low + (key * width >> 4), base) for key in range(0, t.n, keys)]


def gemm_qk(spec, s, base, slot, q_half, k):
    """Issue S = Q @ K^T and commit it to s_full. One thread. q_half: the half's `q_descriptors`. k: `k_descriptors`."""
    instruction = mma_instruction(spec, spec.tile.n)
    for n, (a, b) in enumerate(zip(q_half, k, strict=True)):
        umma.mma(mma_kind(spec), base + (S + slot * ROWS), a, b, instruction, n > 0)
    umma.commit(s.s_full + slot)


def gemm_pv(spec, at: TmemColumns, v, parts, is_first):
    """Issue O += P @ V for some `parts` of P (see `p_splits`), neighbours. One thread. v: `v_descriptors`. is_first: 1
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
    valid = w.kv_len - mask_blocks.n_block_at(spec, a, w, w.n_block_max - 1) * spec.tile.n
    if valid < spec.tile.n and source(spec).has_partial_tail(spec, valid):
        stage = s.v[None, None, pipeline.stage(s.v_pipe, i)]
        source(spec).zero_tail(spec, stage, valid, cute.arch.lane_idx(), 32)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
