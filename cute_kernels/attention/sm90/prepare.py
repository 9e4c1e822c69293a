"""The roles of prefill's warps that make operand stages from raw ones."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...device import pipe
from .. import prepare
from ..kv import pages, source
from ..schedule import work
from .roles import dequantises, roles


class Rings(NamedTuple):
    """Pipes of raw and of operand stages of K or V."""

    raw: pipe.Pipe
    operand: pipe.Pipe


def rings(s, which):
    return (Rings(s.raw_k_pipe, s.k_pipe), Rings(s.raw_v_pipe, s.v_pipe))[which]


@cute.jit
def prepare_kv(spec: cutlass.Constexpr, plan, s, which: cutlass.Constexpr, share: Int32):
    """One warp of a role: its share of every block of K or V (`which`, of kv.pages) of every tile of this CTA."""
    raw_ring, ring = rings(s, which)
    i, t, more = Int32(0), Int32(0), Int32(1)
    while more != 0:
        w = work.consume(spec, s, t)
        more = w.valid
        if w.valid != 0:
            for j in cutlass.range(w.hi - 1, w.lo - 1, -1, unroll=1):
                pipe.wait_full(raw_ring, i)
                pipe.wait_empty(ring, i)
                prepare_stage(spec, plan.args, s, which, share, i, w.kv_len - j * spec.tile.n)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                pipe.release(raw_ring, i)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(pipe.full(ring, i))
                i += 1
        t += 1


@cute.jit
def prepare_stage(spec: cutlass.Constexpr, a, s, which: cutlass.Constexpr, share: Int32, i: Int32, valid: Int32):
    """Item i of the pipes of K or V, a block of which the first `valid` keys, or all, are the request's."""
    raw_ring, ring = rings(s, which)
    raw, into = ((s.raw_k, s.k), (s.raw_v, s.v))[which]
    raw, into = raw[None, None, pipe.stage(raw_ring, i)], into[None, None, pipe.stage(ring, i)]
    shares = const_expr(roles(spec).warps(("prepare_k", "prepare_v")[which]))
    if const_expr(dequantises(spec)):
        prepare.dequantise(spec, raw, into, factors(spec, a, s, which, i), share, shares)
        if const_expr(which == pages.V and (source(spec).CUTS or spec.kv.scaled)):  # a factor past them may be NaN
            if valid < spec.tile.n:
                cute.arch.sync_warp()
                prepare.blank(into, valid, share, shares)
    else:
        prepare.transpose(raw, into, valid, share, shares)


def factors(spec, a, s, which, i):
    """Scale factors of item i, None where the cache has none."""
    if not spec.kv.scaled:
        return None
    stage = (s.k_scales, s.v_scales)[which][None, None, pipe.stage(rings(s, which).raw, i)]
    if which == pages.K:
        return prepare.linear(stage, spec.head_dim_qk)
    return prepare.interleaved(stage, spec.head_dim_vo, a.kv.v_scales_interleaved)
