"""State of a compute warpgroup: its fragments, the tile at hand, where it is in the pipelines."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ... import abi
from ...device import pipeline, wgmma
from .. import mask, softmax
from ..prepare import mma_dtype, scales_q_rows
from ..schedule.work import WorkTileInfo
from . import promotion
from .epilogue import CallScales, RowScales
from .groups import warpgroup_idx
from .roles import fp8, roles, scaled_rows


@dataclass(frozen=True)
class Sm90Fragments:
    """Fragments of one warpgroup: descriptors of Q, K, V in shared memory, accumulators, P."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    s: cute.Tensor
    o: cute.Tensor
    p: cute.Tensor
    st: softmax.SoftmaxState
    tokens: cute.Tensor  # query token of each of this thread's rows
    cols: cute.Tensor  # coordinates in the tile
    scales: Any = None  # `RowScales`, where rows have their own
    q_row_scales: Any = None  # that Q of each row is in, where it is not Q's own
    slopes: Any = None  # of ALiBi, of each row
    words: Any = None  # of a custom mask, of each row in the block at hand
    promoted: Any = None  # of O, where it is promoted


@dataclass(frozen=True)
class Sm90TileState:
    """What a warpgroup knows of the tile at hand."""

    w: WorkTileInfo
    seqlen: mask.SeqlenInfo
    scales: CallScales
    rescale_params: softmax.RescaleParams
    mask_start: Any = None


class BlockFlags(NamedTuple):
    """What a loop does with its blocks, a `mask.Segment`. static: bools. Where it begins a tile, maxima grow."""

    capped: Any
    masked: Any
    is_first: Any


class ConsumerState(NamedTuple):
    """Items of the pipes: the KV block, by its place, and the tile's Q, by its number."""

    kv: pipeline.PipelineState
    q: Int32


class PendingPV(NamedTuple):
    """The last block of a tile that was looked at: its item, and whether its PV is owed (static: a bool)."""

    kv: pipeline.PipelineState
    is_pending: Any


class MainloopVariant(NamedTuple):
    """The functions that run the KV blocks of a tile: `run_tile` and `finish_pv`, or those of `skip`. owes: whether PV
    of the last block is owed, if that is known before (static: a bool)."""

    run_tile: Any
    finish_pv: Any
    pv_pending: Any


def registers(spec, plan, s) -> Sm90Fragments:
    t = spec.tile
    tid = cute.arch.thread_idx()[0] - roles(spec).first_thread("mma")
    base = warpgroup_idx(spec) * 128
    qk, pv = plan.mma_qk.get_slice(base), plan.mma_pv.get_slice(base)
    vt = s.v if fp8(spec) else cute.make_tensor(s.v.iterator, cute.select(s.v.layout, mode=[1, 0, 2]))
    acc_s = cute.make_rmem_tensor(qk.partition_shape_C((t.m, t.n)), Float32)
    acc_o = cute.make_rmem_tensor(pv.partition_shape_C((t.m, spec.head_dim_vo)), Float32)
    if fp8(spec):
        p = cute.make_rmem_tensor(pv.partition_shape_A((t.m, t.n)), s.v.element_type)
    else:
        p = cute.make_rmem_tensor_like(wgmma.as_operand_a(acc_s), s.v.element_type)
    rows = cute.size(wgmma.rows_cols(acc_o), mode=[0])
    coords = plan.mma_qk.get_slice(tid).partition_C(cute.make_identity_tensor((t.m, t.n)))
    if spec.tile.q_in_regs:
        q = cute.make_rmem_tensor(qk.partition_shape_A((t.m, spec.head_dim_qk)), abi.DTYPES[mma_dtype(spec)])
    else:
        q = plan.mma_qk.make_fragment_A(qk.partition_A(s.q))
    return Sm90Fragments(
        q,
        plan.mma_qk.make_fragment_B(qk.partition_B(s.k)),
        plan.mma_pv.make_fragment_B(pv.partition_B(vt)),
        acc_s,
        acc_o,
        p,
        softmax.make(rows),
        cute.make_rmem_tensor(rows, Int32),
        wgmma.rows_cols(coords),
        scales_of_rows(spec, rows) if scaled_rows(spec) else None,
        cute.make_rmem_tensor(rows, Float32) if scales_q_rows(spec) else None,
        cute.make_rmem_tensor(rows, Float32) if spec.logits.alibi else None,
        cute.make_rmem_tensor(rows, Uint32) if spec.mask.custom else None,
        promotion.make(spec, s.o_promoted) if spec.tile.promote_interval else None,
    )


def scales_of_rows(spec, rows):
    """The two differ where there is a cap."""
    score = cute.make_rmem_tensor(rows, Float32)
    return RowScales(score, cute.make_rmem_tensor(rows, Float32) if spec.logits.soft_cap else score)
