"""Prefill on Blackwell: host part and device entry.

A tile is 256 rows, two halves of 128, each with a warpgroup for its softmax, S and O in tensor memory. Roles (`roles`):
warps 0-3 and 4-7 softmax of half 0 and 1, a thread a row (`scores`); 8-11 rescale O where its maximum has grown,
normalise and store it (`correction`); 12 issues all MMAs (`multiply`); 13 loads K, publishes the tiles; 14 loads V, 15
Q (`query`). CTAs are persistent, one an SM.

Tensor memory, columns: S of half h from 128 h on, O from 256 + 128 h on; P, 16 bits, two a column, in the second half
of its S, all of which is in registers by then.

Pipelines: work_pipe, 2 stages, loader of K -> all: the next tile. q_pipe, `tile.q_stages` stages, k_pipe and v_pipe,
`tile.stages` stages, load -> multiply: freed when the MMAs that read them are done. Signals, of each half: scores
(multiply -> softmax), S of a block is there; grown (softmax -> correct), what O is owed is there, in shared memory, and
read (correct -> softmax); early (softmax, correct -> multiply), much of P is there, and O has been rescaled;
late (softmax -> multiply), all of P; done (multiply -> correct), O of a tile is complete; stored (correct -> multiply),
it may be overwritten.

What orders accesses to O: the MMAs of a half are issued in turn, P V of a block in front of Q K^T of the next, so that
S of a block says that O of the block before is complete.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ... import abi
from ...device import copy, pipe, tmem
from .. import fakes, load, votes
from ..args import Args, pack
from ..kv import arrivals, pages, source
from ..schedule import tiles, work
from .correction import correct
from .multiply import multiply
from .query import load_q
from .roles import HALVES, ROWS, WARPS, roles
from .scores import softmax

fake_args = fakes.fake_args


@dataclass(frozen=True)
class Plan:
    """Everything the host part makes for the kernel."""

    args: Args
    k: Any  # operands of the source of K and V
    v: Any
    q: copy.Operand


@dataclass(frozen=True)
class Shared:
    """Shared memory of a CTA. Pointers: signals, of each half."""

    raw_q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    work: cute.Tensor
    order: tiles.Order
    growth: cute.Tensor  # (ROWS, HALVES, 2): factor on O; at a tile's end, sum and maximum in log2 units
    tensor: cute.Tensor  # (1,): address of tensor memory
    work_pipe: pipe.Pipe
    q_pipe: pipe.Pipe
    k_pipe: pipe.Pipe
    v_pipe: pipe.Pipe
    scores: cute.Pointer
    grown: cute.Pointer
    read: cute.Pointer
    early: cute.Pointer
    late: cute.Pointer
    done: cute.Pointer
    stored: cute.Pointer
    votes: Any = None  # of `skip`


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    a = pack(spec, flat)
    t = spec.tile
    k, v = (source(spec).operand(x, (t.n, x.shape[3]), t.stages) for x in (a.kv.k, a.kv.v))
    rows = cute.make_tensor(a.query.q.iterator, cute.select(a.query.q.layout, mode=[0, 2, 1]))
    q = copy.operand(rows, (t.m, spec.head_dim_qk), t.q_stages, (t.m,))
    kernel(spec, Plan(a, k, v, q)).launch(
        grid=[a.schedule.grid, 1, 1],
        block=[32 * roles(spec).warps(), 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=a.schedule.enable_pdl,
    )


def shared(spec, plan):
    smem, r, t = cutlass.utils.SmemAllocator(), roles(spec), spec.tile
    dtype = abi.DTYPES[spec.q]
    q, k, v = (copy.allocate(smem, operand, dtype) for operand in (plan.q, plan.k, plan.v))
    published = work.allocate(spec, smem)
    growth = smem.allocate_tensor(cutlass.Float32, cute.make_layout((ROWS, HALVES, 2)), 16)
    tensor = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
    signals = lambda arrivals: pipe.signals(smem, HALVES, arrivals)  # noqa: E731
    return Shared(
        raw_q=q,
        k=k,
        v=v,
        work=published,
        order=tiles.allocate(smem),
        growth=growth,
        tensor=tensor,
        work_pipe=pipe.make(smem, work.STAGES[spec.schedule], 1, r.warps()),
        q_pipe=pipe.make(smem, t.q_stages, 1, 1),
        k_pipe=pipe.make(smem, t.stages, arrivals(spec, r), 1),
        v_pipe=pipe.make(smem, t.stages, arrivals(spec, r), 1),
        scores=signals(1),
        grown=signals(WARPS),
        read=signals(WARPS),
        early=signals(2 * WARPS),
        late=signals(WARPS),
        done=signals(1),
        stored=signals(WARPS),
        votes=votes.allocate(smem, HALVES) if spec.logits.skip else None,
    )


@cute.jit
def serve(spec: cutlass.Constexpr, plan, s, warp: Int32):
    """The warps of the last warpgroup."""
    if warp == roles(spec).first("mma"):
        multiply(spec, plan, s)
    elif warp == roles(spec).first("load_k"):
        load.load_kv(spec, plan, s, load.Stages(plan.k, s.k, s.k_pipe), pages.K, Int32(0), publishes=True)
    elif warp == roles(spec).first("load_v"):
        load.load_kv(spec, plan, s, load.Stages(plan.v, s.v, s.v_pipe), pages.V, Int32(0))
    else:
        load_q(spec, plan, s)


@cute.kernel
def kernel(spec: cutlass.Constexpr, plan: Plan):
    s = shared(spec, plan)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == roles(spec).first("mma"):
        tmem.allocate(s.tensor.iterator)
    cute.arch.mbarrier_init_fence()
    tmem.before_signal()
    cute.arch.barrier()
    tmem.after_wait()
    cute.arch.griddepcontrol_wait()
    if warp < roles(spec).first("correct"):
        cute.arch.setmaxregister_increase(roles(spec).registers("softmax"))
        softmax(spec, plan, s)
    elif warp < roles(spec).first("mma"):
        cute.arch.setmaxregister_decrease(roles(spec).registers("correct"))
        correct(spec, plan, s)
    else:
        cute.arch.setmaxregister_decrease(roles(spec).registers("mma"))
        serve(spec, plan, s, warp)
        cute.arch.griddepcontrol_launch_dependents()
    tmem.before_signal()
    cute.arch.barrier()
    tmem.after_wait()
    if warp == roles(spec).first("mma"):
        tmem.free(s.tensor[0])
