"""State of an mma warpgroup: its fragments, its current work tile, its position in the pipelines."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ...device import pipeline, wgmma
from .. import mask, softmax
from ..schedule.work import WorkTileInfo
from . import precision, promotion, query
from .epilogue import CallScales, RowScales
from .groups import o_part, row_group
from .roles import roles
from .tile_table import P_STAGES


@dataclass(frozen=True)
class Sm90Fragments:
    """Fragments of one warpgroup: operands Q, K, V and P, accumulators S and O, and the state of this thread's rows."""

    q: cute.Tensor  # smem descriptors, or registers with tile.q_in_regs
    k: cute.Tensor  # smem descriptors, as v
    v: cute.Tensor
    acc_s: cute.Tensor
    acc_o: cute.Tensor
    p: cute.Tensor  # A operand of P V, in registers
    st: softmax.SoftmaxState
    tokens: cute.Tensor  # query token of each of this thread's rows
    cols: cute.Tensor  # (rows, cols), coordinates of acc_s in the tile
    scales: Any = None  # `RowScales`, if rows have their own
    q_row_scales: Any = None  # power of two by which Q of each row was divided (bf16 Q multiplied as fp16)
    slopes: Any = None  # ALiBi slope of each row
    offsets: Any = None  # number to add to the row's scores of the block at hand, see `logits.add_bias`
    words: Any = None  # bits of the custom mask of each row in the current block
    promoted: Any = None  # `PromotedAcc`, if O is promoted
    shared_p: Any = None  # descriptors of the stages of P, if warpgroups share it; p is then this warpgroup's part


@dataclass(frozen=True)
class Sm90TileState:
    """The work tile that a warpgroup computes. mask_bits: the sequence's custom mask, if there is one."""

    w: WorkTileInfo
    seqlen: mask.SeqlenInfo
    scales: CallScales
    rescale_params: softmax.RescaleParams
    mask_bits: Any = None


class BlockFlags(NamedTuple):
    """Static flags of the loop over the KV blocks of one `mask.Segment`."""

    capped: Any  # apply the soft cap
    masked: Any  # apply the mask
    is_first: Any  # the blocks processed first in a tile, in which maxima grow: row_max is updated before exponentials


class ConsumerState(NamedTuple):
    """Pipeline items of the KV block and of the tile's Q that a warpgroup is at.

    kv: `PipelineState` in k_pipe and, unless v is there, in v_pipe; where a block of K has a part per warpgroup, of
    this warpgroup's part. v: `PipelineState` in v_pipe of this warpgroup's part of V. p: the stage of P, where
    warpgroups share it. q: running number in q_pipe. kept_in_turn: 0 if skip-softmax leaves the block out; else P V of
    item kv is still to be issued, and this is the number of blocks since the last one that was left out (`skip` counts
    them; without skip-softmax it stays 1).
    """

    kv: pipeline.PipelineState
    q: Int32
    kept_in_turn: Int32
    v: Any = None
    p: Any = None


def initial_state(spec):
    """Return the `ConsumerState` of the first block of the first tile."""
    t, zero = spec.tile, Int32(0)
    own = pipeline.PipelineState(Int32(o_part(spec)), zero) if t.v_parts > 1 else None  # of this warpgroup's parts
    kv = pipeline.initial_state() if t.s_parts == 1 else own
    return ConsumerState(kv, zero, Int32(1), own, zero if t.s_parts > 1 else None)


def next_block(spec, s, at: ConsumerState):
    """Return the `ConsumerState` of the block after that of `at`."""
    t = spec.tile
    kv = pipeline.next_item(s.k_pipe, at.kv) if t.s_parts == 1 else pipeline.skip_states(s.k_pipe, at.kv, t.s_parts)
    v = None if at.v is None else pipeline.skip_states(s.v_pipe, at.v, t.v_parts)
    return at._replace(kv=kv, v=v, p=None if at.p is None else next_p_stage(at.p))


@cute.jit
def next_p_stage(stage: Int32):
    """Return the stage of P of the next block."""
    after = stage + 1
    return after if after < P_STAGES else Int32(0)


def v_item(at: ConsumerState):
    """Return the item of v_pipe with the V of a block, or with this warpgroup's part of it."""
    return at.kv if at.v is None else at.v


def make_fragments(spec, plan, s) -> Sm90Fragments:
    """Make the fragments of this thread's warpgroup."""
    t = spec.tile
    tid = cute.arch.thread_idx()[0] - roles(spec).first_thread("mma")
    base = row_group(spec) * 128
    if t.o_parts > 1:
        tid = base + tid % 128
    qk, pv = plan.mma_qk.get_slice(base), plan.mma_pv.get_slice(base)
    acc_s = cute.make_rmem_tensor(qk.partition_shape_C((t.m, t.s_columns)), Float32)
    acc_o = cute.make_rmem_tensor(pv.partition_shape_C((t.m, spec.padded_vo // t.o_parts)), Float32)
    p = precision.make_p(spec, pv, acc_s)
    rows = cute.size(wgmma.rows_cols(acc_o), mode=[0])
    coords = plan.mma_qk.get_slice(tid).partition_C(cute.make_identity_tensor((t.m, t.s_columns)))
    return Sm90Fragments(
        query.make_fragment(spec, plan.mma_qk, qk, s),
        plan.mma_qk.make_fragment_B(qk.partition_B(s.k)),
        plan.mma_pv.make_fragment_B(pv.partition_B(precision.v_operand(spec, s.v))),
        acc_s,
        acc_o,
        p,
        softmax.make(rows),
        cute.make_rmem_tensor(rows, Int32),
        wgmma.rows_cols(coords),
        scales_of_rows(spec, rows) if precision.scales_rows(spec) else None,
        cute.make_rmem_tensor(rows, Float32) if precision.of(spec).scales_q_rows else None,
        cute.make_rmem_tensor(rows, Float32) if spec.logits.alibi else None,
        cute.make_rmem_tensor(rows, Float32) if has_offsets(spec) else None,
        cute.make_rmem_tensor(rows, Uint32) if spec.mask.custom else None,
        promotion.make(spec, s.o_promoted),
        None if s.scores is None else plan.mma_pv.make_fragment_A(pv.partition_A(s.scores.p)),
    )


def has_offsets(spec):
    """Return whether the softmax adds ALiBi's bias of a block's first column. A soft cap needs whole scores, and so do
    the votes of skip-softmax."""
    return spec.logits.alibi and not (spec.logits.soft_cap or spec.logits.skip)


def scales_of_rows(spec, rows):
    """Make `RowScales` of `rows` rows. Its two tensors differ only with a soft cap."""
    score = cute.make_rmem_tensor(rows, Float32)
    return RowScales(score, cute.make_rmem_tensor(rows, Float32) if spec.logits.soft_cap else score)
