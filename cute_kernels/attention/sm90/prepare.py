"""The role of prefill's warps that make operand stages from raw ones."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...device import pipe
from .. import prepare
from ..schedule import work
from .roles import roles


@cute.jit
def prepare_kv(spec: cutlass.Constexpr, plan, s, share: Int32):
    """One warp of the role: its share of every KV block of every tile of this CTA."""
    i, t, more = Int32(0), Int32(0), Int32(1)
    while more != 0:
        w = work.consume(spec, s, t)
        more = w.valid
        if w.valid != 0:
            for j in cutlass.range(w.hi - 1, w.lo - 1, -1, unroll=1):
                pipe.wait_full(s.raw_v_pipe, i)
                pipe.wait_empty(s.v_pipe, i)
                raw, stage = (x[None, None, pipe.stage(s.v_pipe, i)] for x in (s.raw_v, s.v))
                prepare.transpose(raw, stage, w.kv_len - j * spec.tile.n, share, roles(spec).warps("prepare"))
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                pipe.release(s.raw_v_pipe, i)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(pipe.full(s.v_pipe, i))
                i += 1
        t += 1
