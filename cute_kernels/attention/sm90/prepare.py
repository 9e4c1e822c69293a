"""The `prepare_k` and `prepare_v` roles: make the operand stages of K and V from the stages that were loaded."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...device import pipeline
from .. import mask_blocks, prepare
from ..kv.rings import operand_smem
from ..schedule import work
from . import precision
from .roles import roles


@cute.jit
def prepare_kv(spec: cutlass.Constexpr, plan, s, which: cutlass.Constexpr, share: Int32):
    """Run a prepare role in one warp: its share of each KV block of K or V (`which`, of kv.pages) of all work tiles."""
    # A warp waits for a tile in work_pipe and, for each of its KV blocks from high to low, for the loaded stage
    # (raw_pipe full) and a free operand stage (pipe empty). It dequantises or transposes its share, makes it
    # visible to WGMMA, which reads through the async proxy, by a proxy fence, releases the loaded stage and arrives at
    # the operand stage. Both pipelines count the same items, so that one counter is all the state. Tiles that see
    # no key have no blocks.
    x = operand_smem(s, which)

    def prepare_tile(w, _, i):
        for position in cutlass.range(w.n_block_max - 1, w.n_block_min - 1, -1, unroll=1):
            n_block = mask_blocks.n_block_at(spec, plan.args, w, position)
            # wait for the loaded stage and a free operand stage
            pipeline.consumer_wait(x.raw_pipe, i)
            pipeline.producer_acquire(x.pipe, i)
            # dequantise or transpose
            prepare_stage(spec, plan.args, s, which, share, i, w.sequence.kv_len - n_block * spec.tile.n)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            # release the loaded stage, commit the operand stage
            pipeline.consumer_release(x.raw_pipe, i)
            pipeline.producer_commit(x.pipe, i)
            i += 1
        return i

    work.for_each_tile(spec, s, prepare_tile, Int32(0))


@cute.jit
def prepare_stage(spec: cutlass.Constexpr, a, s, which: cutlass.Constexpr, share: Int32, i: Int32, valid: Int32):
    """Prepare this warp's share of item i of K or V. valid: keys of the sequence from the block's first key on; keys of
    the block past them become zeros in V."""
    own = prepare.Share(share, roles(spec).warps(("prepare_k", "prepare_v")[which]))
    if const_expr(precision.of(spec).converts_kv):
        prepare.dequantise_stage(spec, a, s, which, own, i, valid)
    else:
        prepare.transpose(*prepare.stage_tensors(s, which, i), valid, own)
