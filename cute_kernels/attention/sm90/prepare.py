"""The roles of prefill's warps that make operand stages from raw ones."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...device import pipeline
from .. import prepare
from ..schedule import work
from .roles import roles


@cute.jit
def prepare_kv(spec: cutlass.Constexpr, plan, s, which: cutlass.Constexpr, share: Int32):
    """One warp of a role: its share of every block of K or V (`which`, of kv.pages) of every tile of this CTA."""
    raw_ring, ring = prepare.stage_pipelines(s, which)
    i, t, more = Int32(0), Int32(0), Int32(1)
    while more != 0:
        w = work.consume(spec, s, t)
        more = w.is_valid
        if w.is_valid != 0:
            for n_block in cutlass.range(w.n_block_max - 1, w.n_block_min - 1, -1, unroll=1):
                pipeline.consumer_wait(raw_ring, i)
                pipeline.producer_acquire(ring, i)
                prepare_stage(spec, plan.args, s, which, share, i, w.kv_len - n_block * spec.tile.n)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                pipeline.consumer_release(raw_ring, i)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(pipeline.full_barrier(ring, i))
                i += 1
        t += 1


@cute.jit
def prepare_stage(spec: cutlass.Constexpr, a, s, which: cutlass.Constexpr, share: Int32, i: Int32, valid: Int32):
    """Item i of the pipes of K or V, a block of which the first `valid` keys, or all, are the request's."""
    shares = const_expr(roles(spec).warps(("prepare_k", "prepare_v")[which]))
    if const_expr(prepare.dequantises(spec)):
        prepare.dequantise_stage(spec, a, s, which, share, shares, i, valid)
    else:
        prepare.transpose(*prepare.stage_tensors(s, which, i), valid, share, shares)
