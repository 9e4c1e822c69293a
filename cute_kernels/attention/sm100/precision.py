"""The decisions of Blackwell's kernel for a precision (`..precision`): the kind of MMA, and how P is stored."""

from cutlass import Float32

from .. import softmax
from ..precision import of as of
from . import tile_table

P_MAX_OFFSET = 8.0  # log2 of P at row_max in e4m3, which ends at 448


def operands(spec):
    """Return the operands of the main loop."""
    return tile_table.operands(spec, spec.tile, (spec.padded_qk, spec.padded_vo))


def mma_kind(spec):
    """Return the kind of tcgen05.mma."""
    return "f8f6f4" if of(spec).is_8bit else "f16"


def operand_bytes(spec):
    """Return the bytes of an element of Q, K, V and P as the MMAs read them."""
    return of(spec).operand_bytes


def p_splits(spec):
    """Return the number of parts in which softmax stores P, each of a power of two columns of tensor memory.

    These parts are not the splits of split tiles (`..splits`), which divide the keys of a tile among CTAs. In e4m3 it
    is 2: with 4, ptxas computes all emulated exponentials before it stores the first part (half of P after 786 cycles
    instead of 616, all of it after 1,087 instead of 1,006). With 32 keys it is 2, an MMA each.
    """
    return 3 if spec.tile.n % 3 == 0 else 2 if of(spec).is_8bit or spec.tile.n < 64 else 4


def p_early_splits(spec):
    """Return the number of parts of P with which P @ V may begin: all but the last. In e4m3 that is half of P, because
    MMAs are faster than the exponentials."""
    return p_splits(spec) - 1


def p_column(spec):
    """Return the column of P within S: P takes the last columns."""
    return spec.tile.n - spec.tile.n * operand_bytes(spec) // 4


def exact_max(spec):
    """Return whether row_max follows every growth: in e4m3, where P has no room to exceed its value at row_max."""
    return of(spec).is_8bit


def rescale_params(spec):
    """Return when O is rescaled and where P lies. 16 bits: when the maximum has grown by RESCALE_THRESHOLD. e4m3:
    whenever it has grown, and P is 2^P_MAX_OFFSET at the maximum, so that small values lose little."""
    if exact_max(spec):
        return softmax.RescaleParams(Float32(0.0), Float32(P_MAX_OFFSET))
    return softmax.RescaleParams(Float32(softmax.RESCALE_THRESHOLD), Float32(0.0))
