"""Parts of tiles whose keys CTAs share (`schedule.stream_k`): what a CTA found on its keys; the last one merges."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...device import wgmma
from .. import combine, geometry, quant, softmax
from ..schedule.work import Work
from .groups import GROUP_BARRIER
from .roles import WARPS, roles
from .store import LANES

PIECE = 2  # columns that a lane has side by side


@cute.jit
def store_part(spec: cutlass.Constexpr, a, r, w: Work, empty: cutlass.Constexpr):
    """This thread's rows of O, normalised, and LSE, of the keys of the part; `empty`: no row sees one."""
    o, lane = wgmma.rows_cols(r.o), cute.arch.lane_idx() % LANES
    left = geometry.tile_rows(w.q_len, geometry.divisor(w)) - w.m_block * spec.tile.m
    for k in cutlass.range_constexpr(cute.size(o, mode=[0])):
        factor, lse = Float32(0.0), -Float32.inf
        if const_expr(not empty):
            normal = softmax.row_normalizer(r.st, k, -Float32.inf, LANES)
            factor, lse = normal.factor * quant.format_of(spec).unit, normal.lse
        row, piece = r.cols[k, 0][0], cute.make_rmem_tensor(PIECE, Float32)
        if row < left:
            target = a.schedule.o_partial[w.split.slot, row, None]
            for i in cutlass.range_constexpr(spec.head_dim_vo // (LANES * PIECE)):
                for e in cutlass.range_constexpr(PIECE):
                    piece[e] = Float32(0.0) if const_expr(empty) else o[k, PIECE * i + e] * factor
                cute.autovec_copy(piece, cute.local_tile(target, (PIECE,), (LANES * i + lane,)))
            if lane == 0:
                target[spec.head_dim_vo] = lse


@cute.jit
def share(spec: cutlass.Constexpr, a, s, r, w: Work, empty: cutlass.Constexpr):
    """Store the part, and merge the tile if no other part is still to come."""
    store_part(spec, a, r, w, empty)
    tid = cute.arch.thread_idx()[0] - roles(spec).first_thread("math")
    if combine.is_last(a, w, s.last, tid, GROUP_BARRIER, 32 * WARPS):
        warp = Int32(cute.arch.make_warp_uniform(tid // 32))
        combine.merge(spec, a, w, geometry.divisor(w), warp, WARPS)
