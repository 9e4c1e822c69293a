"""One scale factor per row of K and of V: it multiplies scores of a key, and elements of P.

A factor of K multiplies the scores of its key in fp32, before the soft cap, the mask and the softmax. A factor of V
multiplies the key's elements of P, which are fp16, so factors are divided by a power of two (`unit`) that is at least
as large as any factor of V that the warp has met; O is in this unit until the tile ends. When a larger factor comes,
O is divided by what the unit grows, as it is rescaled when a row maximum grows.

These are the scales per token and head that `cache_write.store.row_scale` writes; prefill multiplies elements of K and
V by them (`attention.prepare`).
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...device import mma, pipeline, warp
from .. import precision, quant
from ..kv import scales
from .layout import keys

BYTES = 4  # of a factor
LEAST, MOST = 27, 227  # bounds of the biased exponent of the unit: its inverse, and the product of two, are normal


class KeyFactors(NamedTuple):
    """Registers for factors. k: of this lane's keys, those of the scores that it has. unit: the biased exponent of the
    unit of O."""

    k: cute.Tensor
    unit: cute.Tensor


def make(spec):
    """Allocate the registers, None if rows have no factors."""
    if not scales.has_row_factors(spec):
        return None
    return KeyFactors(cute.make_rmem_tensor(keys(spec) // 8, Float32), cute.make_rmem_tensor(1, Int32))


def reset(r):
    """Begin a tile."""
    if r.row_scales is not None:
        r.row_scales.unit[0] = Int32(LEAST)


def load_k(spec, s, r, stage, row):
    """Load the factors of the keys [row, row + keys) of a K stage, before the stage is released."""
    if r.row_scales is not None:
        first = row + cute.arch.lane_idx() // 4
        base = s.k.scales.iterator.toint() + (stage * spec.tile.n + first) * BYTES
        for j in range(keys(spec) // 8):
            r.row_scales.k[j] = warp.from_bits(mma.load(base + 8 * j * BYTES, 1)[0])


def scale_scores(r, scores: cute.Tensor):
    """Multiply scores (rows, keys) by the factors of `load_k`. Called when the MMAs that compute them are done."""
    if r.row_scales is not None:
        for j in range(cute.size(scores, mode=[1])):
            for row in range(cute.size(scores, mode=[0])):
                scores[row, j] *= r.row_scales.k[j]


@cute.jit
def scale_p(spec: cutlass.Constexpr, s, r, tile, at, p: cute.Tensor):
    """Multiply P, words of pairs of keys, by the factors of V of its keys, in the unit of O. Factors of keys past
    kv_len count as 0: a page may hold anything there."""
    if const_expr(r.row_scales is not None):
        acc_o, own_unit = r.acc_o, r.row_scales.unit
        stage, t = pipeline.stage(s.v.pipe, at.block), cute.arch.lane_idx() % 4
        base = s.v.scales.iterator.toint() + (stage * spec.tile.n + at.row + 2 * t) * BYTES
        words = const_expr(keys(spec) // 8)  # of P: keys 8 i + 2 t and the next one
        found = cute.make_rmem_tensor((2, words), Float32)
        for i in cutlass.range_constexpr(words):
            for e, word in enumerate(mma.load(base + 8 * i * BYTES, 2)):
                found[e, i] = warp.from_bits(word)
        if at.key + keys(spec) > tile.w.sequence.kv_len:
            for i in cutlass.range_constexpr(words):
                for e in cutlass.range_constexpr(2):
                    if at.key + 8 * i + 2 * t + e >= tile.w.sequence.kv_len:
                        found[e, i] = Float32(0.0)
        # the unit: a power of two above the largest magnitude
        top = Int32(0)
        for i in cutlass.range_constexpr(cute.size(found)):
            top = cutlass.max(top, warp.bits(found[i]) & 0x7FFFFFFF)
        top = cute.arch.warp_redux_sync(top, "max")
        unit = cutlass.min((top >> 23) + 1, MOST)
        if unit > own_unit[0]:
            less = warp.from_bits(cutlass.max(127 + own_unit[0] - unit, 0) << 23)
            acc_o.store(acc_o.load() * less)
            own_unit[0] = unit
        inverse = warp.from_bits((254 - own_unit[0]) << 23)
        mma_type = precision.of_mma_sync(spec).mma_type
        for i in cutlass.range_constexpr(words):
            pair = warp.pack_16bit(mma_type, found[0, i] * inverse, found[1, i] * inverse)
            for n_tile in cutlass.range_constexpr(cute.size(p, mode=[1])):
                p[i, n_tile] = quant.mul_f16x2(p[i, n_tile], pair)


def finish(r):
    """End a tile: O in units of 1."""
    if r.row_scales is not None:
        r.acc_o.store(r.acc_o.load() * warp.from_bits(r.row_scales.unit[0] << 23))
