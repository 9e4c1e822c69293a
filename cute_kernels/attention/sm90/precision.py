"""The decisions of Hopper's kernel for a precision (`..precision`): prepared operands, the layout of V, P's range.

Three cases: 16-bit K and V are operands as loaded; quantised K and V are converted to fp16 by the prepare roles; with
8-bit MMAs, K is an operand as loaded, and V is transposed, since WGMMA takes 8-bit operands only K-major.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr

from ...device import layout, warp, wgmma
from .. import softmax
from ..kv import pages
from ..operands import holding
from ..precision import of as of
from . import tile_table

P_MAX_LOG2 = 14.0  # log2 of the largest P in 16 bits: fp16 ends at 2^16
P_MAX_LOG2_E4M3 = 8.76  # the same in e4m3, which ends at 448; values from 432 = 2^8.755 on round to that
# If the sum of some exponentials stays below this, none of them exceeds 2^P_MAX_LOG2 (3 % are for rounding).
P_SUM_LIMIT = 0.97 * 2.0**P_MAX_LOG2
E4M3_TO_MSB, MSB_MASK = 0x02020202, 0x80808080  # e4m3 is 0x7e at 448, 0x7f for NaN: plus 2, their top bit is set


# Operands


def transposes_v(spec):
    """Return whether the operand stages of V are (Dvo, n), made by `prepare.transpose`, which permutes keys and
    columns, instead of (n, Dvo)."""
    return of(spec).is_8bit


def operands(spec):
    """Return the operands of the main loop."""
    return tile_table.operands(spec, spec.tile, (spec.padded_qk, spec.padded_vo))


def is_prepared(spec, which):
    """Return whether operand stages of K or V (`which`, of kv.pages) are made from loaded stages: converted, or
    transposed."""
    return holding(operands(spec), which).prepared is not None


def prepares_any(spec):
    """Return whether there is a prepare role."""
    return is_prepared(spec, pages.V)


def scales_rows(spec):
    """Return whether each row has its own score and output scale. Scales may then be per head, and that of a row may
    include the power of two by which its Q was divided."""
    return prepares_any(spec)


def tiled_mmas(spec):
    """Return the tiled MMAs of S = Q K^T and O = P V."""
    t, dtype = spec.tile, of(spec).mma_type
    qk = wgmma.mma_nt(dtype, t.m // 64, t.s_columns, t.q_in_regs)
    if transposes_v(spec):
        return qk, wgmma.mma_nt(dtype, t.m // 64, pv_columns(spec), True)
    return qk, wgmma.mma_nn(dtype, t.m // 64, pv_columns(spec), t.s_parts == 1 and not t.scores_apart)


def pv_columns(spec):
    """Return the columns of O that an instruction of P V computes: all those of a warpgroup, but 128 of 256 in a CTA of
    four warpgroups, where ptxas has no instruction of more than 128 registers."""
    columns = spec.padded_vo // spec.tile.o_parts
    four = of(spec).converts_kv and spec.tile.warpgroups > 1 or spec.tile.scores_apart
    return columns // 2 if columns > 192 and four else columns


def v_operand(spec, v):
    """View the operand stages of V as (Dvo, n, stages), the B operand of P V. Those of K are wider, if V lies there."""
    if transposes_v(spec):
        return v
    if spec.kv.shares_v:
        v = first_columns(v, spec.padded_vo)
    return cute.make_tensor(v.iterator, cute.select(v.layout, mode=[1, 0, 2]))


def first_columns(stages, columns):
    """View the first columns of stages (n, all columns, stages): boxes of columns lie one after another."""
    n, _, count = stages.shape
    own = layout.smem_layout((cute.size(n), columns), 1, stages.element_type).outer
    whole = cute.make_layout(cute.size(count), stride=cute.size(stages, mode=[0]) * cute.size(stages, mode=[1]))
    return cute.make_tensor(stages.iterator, cute.append(cute.select(own, mode=[0, 1]), whole))


def make_p(spec, pv, acc_s):
    """Allocate P, the A operand of P V in registers. pv: the thread's slice of that MMA."""
    if transposes_v(spec):
        return cute.make_rmem_tensor(pv.partition_shape_A((spec.tile.m, spec.tile.n)), of(spec).mma_type)
    return cute.make_rmem_tensor_like(wgmma.as_operand_a(acc_s), of(spec).mma_type)


def p_word(spec, row, i):
    """Return the index in P, as words, of the i-th word of a thread's row. In 8 bits, a word has four neighbours of the
    row's registers: `prepare.transpose` puts the keys of these side by side in V."""
    return i // 2 * 4 + i % 2 * 2 + row if of(spec).is_8bit else 2 * i + row


# The range of P


def extra_offset(kv_len):
    """Return log2 of the factor on P in e4m3 beyond 2^4: 1 from 4,097 keys on, 2 from 8,193, 3 from 16,385."""
    above = cutlass.max(0, kv_len - 1) >> 12
    return cutlass.min(1, above) + cutlass.min(1, above >> 1) + cutlass.min(1, above >> 2)


def exact_max_blocks(spec, kv_len):
    """Return the number of blocks after a tile's first in which row_max follows every growth.

    It is 0 in 16 bits, known at trace time. In 8 bits it is 2, and 6 or 14 where P is raised by 2^6 or 2^7: row_max may
    lag behind less there, and a block in which it would lag too far is computed twice.
    """
    if not of(spec).is_8bit:
        return 0
    steps = extra_offset(kv_len)
    return tile_table.exact_max_blocks(spec) + 2 * steps * (steps - 1)


def rescale_params(spec, kv_len) -> softmax.RescaleParams:
    """Return the range of P for a sequence of kv_len keys.

    In 16 bits, P is at most 1 for the running maximum, which may lag behind by 2^14. In e4m3, P is raised by
    2^max_offset: keys that are 2^(10 + max_offset) times smaller than the running maximum round to zero, so that a
    sequence of up to 2^15 keys loses in all less than a fourth of its largest one. A whole power of two keeps P exact
    for a key that outweighs all others.
    """
    if not of(spec).is_8bit:
        return softmax.RescaleParams(Float32(P_MAX_LOG2), Float32(0.0))
    # The bits of 4.0, plus 1.0 for each step: a float that is uniform in the warp costs no register.
    max_offset = warp.from_bits(cute.arch.make_warp_uniform(0x40800000 + (extra_offset(kv_len) << 21)))
    return softmax.RescaleParams(P_MAX_LOG2_E4M3 - max_offset, max_offset)


def columns_under_pv(spec, columns):
    """Return how many of a thread's columns of its first row get their exponentials while P V of the block before still
    reads P: in 8 bits all, in 16 bits half, since a whole row spills."""
    return columns if of(spec).is_8bit else columns // 8 * 4


def add_overflow(spec, overflow, words):
    """Return `overflow` with the words of P added: the top bit of a byte tells that P holds 448 or NaN. In 16 bits, the
    sums of P tell it (`exceeds_range`)."""
    if of(spec).is_8bit:
        for word in words:
            overflow = overflow | (word + Uint32(E4M3_TO_MSB))
    return overflow


@cute.jit
def exceeds_range(spec: cutlass.Constexpr, row_sums, overflow):
    """Return whether P may have left the range of its type in some row of the thread. row_sums: of the exponentials."""
    if const_expr(of(spec).is_8bit):
        exceeds = (overflow & Uint32(MSB_MASK)) != 0
    else:
        exceeds = row_sums[0] >= P_SUM_LIMIT or row_sums[1] >= P_SUM_LIMIT
    return exceeds
