"""State of an mma warpgroup: its fragments, its current work tile, its position in the pipelines."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ...device import pipeline, wgmma
from .. import mask, softmax
from ..schedule.work import WorkTileInfo
from . import precision, promotion, query
from .epilogue import CallScales, RowScales, scales_of_call
from .groups import row_group
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
    call_scales: CallScales
    scales: Any = None  # `RowScales`, if rows have their own
    q_row_scales: Any = None  # power of two by which Q of each row was divided (bf16 Q multiplied as fp16)
    slopes: Any = None  # ALiBi slope of each row
    offsets: Any = None  # number to add to the row's scores of the block at hand, see `logits.add_bias`
    # bits of the custom mask of each row in the current block, or of keys that exist, for all rows; where tokens share
    # their keys, of those that the token of each row has chosen
    words: Any = None
    promoted: Any = None  # `PromotedAcc`, if O is promoted
    shared_p: Any = None  # descriptors of the stages of P, if warpgroups share it; p is then this warpgroup's part
    limits: Any = None  # by how much the maximum of each row may grow before row_max follows; None: as for all rows


@dataclass(frozen=True)
class Sm90TileState:
    """The work tile that a warpgroup computes, with its fragments r. mask_source: of its custom mask
    (`custom_mask`), if there is one. slots: of the next block that
    this warpgroup scores, in kernels with slots (`kv.gather`). chosen_by: which
    tokens have chosen them, where tokens share their keys."""

    r: Sm90Fragments
    w: WorkTileInfo
    seqlen: mask.SeqlenInfo
    rescale_params: softmax.RescaleParams
    mask_source: Any = None
    slots: Any = None
    chosen_by: Any = None


class BlockFlags(NamedTuple):
    """Static flags of the loop over the KV blocks of one `mask.Segment`."""

    capped: Any  # apply the soft cap
    masked: Any  # apply the mask
    is_first: Any  # the blocks processed first in a tile, in which maxima grow: row_max is updated before exponentials


class ConsumerState(NamedTuple):
    """Pipeline items of the KV block and of the tile's Q that a warpgroup is at.

    kv: `PipelineState` in k.pipe and v.pipe; None if blocks are loaded in pieces, since each piece then has the same
    stage and phase in every block. q: running number in q_pipe. kept_in_turn: 0 if skip-softmax leaves the block out;
    else P V of item kv is still to be issued, and this is the number of blocks since the last one that was left out
    (`skip` counts them; without skip-softmax it stays 1). p: the stage of P, where warpgroups share it. keys: there,
    the keys of the block that the sequence has, if they are fewer than n; else n.
    """

    kv: Any
    q: Int32
    kept_in_turn: Int32
    p: Any = None
    keys: Any = None


def initial_state(spec):
    """Return the `ConsumerState` of the first block of the first tile."""
    if spec.tile.s_parts > 1:
        return ConsumerState(None, Int32(0), Int32(1), Int32(0), Int32(spec.tile.n))
    return ConsumerState(pipeline.initial_state(), Int32(0), Int32(1))


def next_block(spec, s, at: ConsumerState):
    """Return the `ConsumerState` of the block after that of `at`."""
    if spec.tile.s_parts > 1:
        return at._replace(p=(at.p + 1) % P_STAGES, keys=Int32(spec.tile.n))
    return at._replace(kv=pipeline.next_item(s.k.pipe, at.kv))


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
        plan.mma_qk.make_fragment_B(qk.partition_B(s.k.smem)),
        plan.mma_pv.make_fragment_B(pv.partition_B(precision.v_operand(spec, s.v.smem))),
        acc_s,
        acc_o,
        p,
        softmax.make(rows),
        cute.make_rmem_tensor(rows, Int32),
        wgmma.rows_cols(coords),
        scales_of_call(spec, plan.args),
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
