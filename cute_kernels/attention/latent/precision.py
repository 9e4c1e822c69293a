"""Types of the operands of the MMAs of few query rows, and the factors of rows. `keys` and `values` make operands.

    codes of    K, Q        factors of K multiply           V, P                     factors of V multiply
    e4m3        fp16        sums of S over their columns    bf16, V times 2^-120     P
    e2m1        bf16        K                               bf16                     V
    e4m3 alone  fp16                                        fp16

The last line has caches with one scale for all rows, which multiplies logits and outputs. Codes become numbers of 16
bits in registers, where they are used: an instruction of conversion takes as long as one that moves a converted value
through shared memory. One instruction converts two codes of e4m3 to fp16, and six convert four to bf16.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Uint32

from ...device import mma, to_bf16, warp
from ...records import RECORDS
from ..kv.record_rows import BOX, sections
from .tile_table import KEYS, PIECE, PLAIN, STEP, records, row_pitch

# Codes of a type are 2^-BELOW times their values. Factors are multiplied by a power of two less, so that products of V
# and P, and K of e2m1, are 2^-RAISED times what they stand for. They are then rounded as bf16 are, unless they are less
# than 2^-66. Factors must be less than 2^68.
RAISED = 60
RAISED_PAIR, LOWERED_PAIR = to_bf16.power_pair(RAISED), to_bf16.power_pair(-RAISED)
RAISED_FP16 = 8  # P in fp16 is multiplied by 2 to this power, and may grow by as much
MMAS = BOX // STEP
LANES = 32
FACTOR_BYTES = {"fp32": 4, "ue8m0": 1}
FP16_BELOW = to_bf16.BELOW["e4m3"] - 112  # 112: from the bias of fp16 to that of bf16


def record_of(spec, which):
    """Return a record of `records`."""
    return RECORDS[records(spec)[which]]


def sections_of(spec, which, columns):
    """Return the sections of the first columns of a row of a record: those of K or of V."""
    return [x for x in sections(record_of(spec, which), [spec.head_dim_qk]) if x.first < columns // BOX]


def key_kind(section):
    """Return the type of K and Q over a section."""
    return "fp16" if section.code == "e4m3" else "bf16"


def value_kind(spec):
    """Return the type of V and P."""
    return "fp16" if records(spec) == ("e4m3",) else "bf16"


def lowered(spec):
    """Return the power of two by which sums of O are too small."""
    if value_kind(spec) == "fp16":
        return -RAISED_FP16
    return 0 if records(spec) == (PLAIN,) else RAISED


def scaled_kind(spec):
    """Return the type in which rows of Q are multiplied by powers of two, so that it holds them; None if there is none.
    fp16 holds codes of e4m3."""
    found = [x for which in range(len(records(spec))) for x in sections_of(spec, which, spec.head_dim_qk)]
    return "fp16" if spec.q != "e4m3" and "fp16" in map(key_kind, found) else None


def lane_piece(spec):
    """Return the offset of the row and the piece that a lane names of 16 rows and 2 pieces of 16 bytes."""
    lane = cute.arch.lane_idx()
    return lane % KEYS * row_pitch(spec) + lane // KEYS * PIECE


def stage_of(spec, s, kv):
    """Return the address of the rows of a block."""
    return s.k.raw.iterator.toint() + kv.index * (spec.tile.n * row_pitch(spec))


def weight_pair(spec, x, y):
    """Return two entries of P as a word of operand B, which `values.products` multiplies by factors."""
    if value_kind(spec) == "fp16":
        return warp.pack_16bit(Float16, *(p * 2.0**RAISED_FP16 for p in (x, y)))
    return warp.pack_16bit(BFloat16, x, y)


# Factors that multiply V, P, or K of e2m1: in bf16, as FlashMLA rounds them


def stored_factor(form, row, index):
    """Return factor `index` of the row at an address, times a power of two, as a bf16, twice."""
    at, exponent = row + (form.row if form.planar else form.factors_at), to_bf16.BELOW[form.codes] - RAISED
    bits = mma.load(at + 4 * index, 1)[0] if form.factor == "fp32" else mma.load_bytes(at + index, 1)
    if form.factor == "ue8m0":  # infinite from 2^68 on
        bits = cutlass.min(bits, Uint32(255 - exponent))
    return to_bf16.factor_pair(form.factor, bits, exponent)


def store_factors(spec, s, rows, first, stage, which):
    """Store the factors of 16 keys, the rows of which begin at an address, for the warps that compute O. first: their
    number in the block. Half of the lanes have a key each, and the other lanes have the other half of its factors."""
    form, lane = record_of(spec, which), cute.arch.lane_idx()
    row, count = rows + lane % KEYS * row_pitch(spec), -(-form.factors // 2)
    if form.permuted:
        store_words_of_factors(spec, s, row + form.factors_at, first + lane % KEYS, count, stage, form)
        return
    for i in range(count):
        index = lane // KEYS * count + i
        s.scores.factors[first + lane % KEYS, index, stage] = stored_factor(form, row, index).to(cutlass.Uint16)


def store_words_of_factors(spec, s, start, key, count, stage, form):
    """Store this lane's half of the factors of e4m3 of a key, which begin at an address, four at a time."""
    half, exponent = cute.arch.lane_idx() // KEYS, to_bf16.BELOW[form.codes] - RAISED
    for i, word in enumerate(mma.load(start + half * count, count // 4)):
        for j, two in enumerate(to_bf16.e4m3_words(word & Uint32(0x7F7F7F7F))):
            both = to_bf16.multiply(to_bf16.multiply(two, to_bf16.EXACT["e4m3"]), to_bf16.power_pair(exponent))
            for k in range(2):
                index = half * count + 4 * i + 2 * j + k
                s.scores.factors[key, index, stage] = (both >> (16 * k)).to(cutlass.Uint16)


def factors_of(spec, s, key, index, stage):
    """Return a stored factor of a lane's four keys of 16, which begin at `key`, as two pairs."""
    at = s.scores.factors[key, None, stage].iterator.toint()
    at += 2 * (index * spec.tile.n + 2 * (cute.arch.lane_idx() % 4))
    return [mma.load(at + 16 * half, 1)[0] for half in range(2)]


# Factors of keys g and g + 8, from their rows


def held_factors(spec, which, rows):
    """Return words of factors of e4m3, as they are stored: those of a lane's columns of all boxes, of both halves of
    32; None for other records."""
    form, lane = record_of(spec, which), cute.arch.lane_idx()
    if not form.permuted:
        return None
    at = rows + lane // 4 * row_pitch(spec) + form.factors_at + lane % 4 // 2 * 8
    return [[mma.load(at + 8 * e * row_pitch(spec) + 16 * half, 2) for e in range(2)] for half in range(2)]


def held_factor(form, words, box):
    """Return the factor of a box among `held_factors`, times a power of two, as a bf16, twice."""
    byte, exponent = box % 4, to_bf16.BELOW[form.codes] - RAISED
    text = (
        f"prmt.b32 {{$w0}}, {{$r0}}, 0, 0x4{byte}4{byte}; mul.lo.u32 {{$w0}}, {{$w0}}, 16; "
        "and.b32 {$w0}, {$w0}, 0x07F007F0;"
    )
    bits = cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[words[box // 4]])
    return to_bf16.multiply(to_bf16.multiply(bits, to_bf16.EXACT["e4m3"]), to_bf16.power_pair(exponent))


def sum_factors(spec, which, rows):
    """Return the factors that multiply sums of S, as they are stored, as lists of words; None if there are none."""
    form, lane = record_of(spec, which), cute.arch.lane_idx()
    if form.codes != "e4m3" or not form.packed:
        return None
    at, count = form.row if form.planar else form.factors_at, -(-form.factors * FACTOR_BYTES[form.factor] // 4)
    return [mma.load(rows + (lane // 4 + 8 * e) * row_pitch(spec) + at, count) for e in range(2)]


def sum_factor(form, words, index, rounded):
    """Return a factor of `sum_factors` in fp32. rounded: without its mantissa, by which K has been multiplied."""
    if form.factor == "ue8m0":
        word, up = words[index // 4], 23 - 8 * (index % 4)
        word = (word << up if up > 0 else word >> -up) & Uint32(0x7F800000)
        return warp.from_bits(cutlass.max(word, Uint32(0x400000)))  # 0 is 2^-127, which is subnormal
    if not rounded:
        return warp.from_bits(words[index])
    bits = to_bf16.factor_pair("fp32", words[index]) & Uint32(0xFFFF0000)
    power, is_nan = bits & Uint32(0xFF800000), bits & Uint32(0x7FFFFFFF) > 0x7F800000
    return warp.select(is_nan, warp.from_bits(bits), warp.from_bits(power))


def may_be_inexact(spec, which):
    """Return whether codes of e4m3 may have factors that are no powers of two."""
    form = record_of(spec, which)
    return form.codes == "e4m3" and form.factor == "fp32"


def any_inexact(spec, which, factors):
    """Return whether some factor of the warp's keys is no power of two."""
    if not may_be_inexact(spec, which):
        return False
    bits = Uint32(0)
    for word in [*factors[0], *factors[1]]:
        bits = bits | word
    return cute.arch.vote_any_sync(bits & Uint32(0x7FFFFF) != 0)


def mantissa(factor):
    """Return the mantissa of a factor in fp32 as a bf16, twice, for `rounded_products`."""
    return to_bf16.factor_pair("fp32", factor) & Uint32(0x007F007F) | Uint32(to_bf16.power_pair(FP16_BELOW))


def rounded_products(word, mantissa):
    """Return the products of four codes of e4m3 and the mantissa of their factor, as `quant.from_e4m3` returns codes.
    They are rounded as bf16 are, since dequantised keys have that type."""
    found = [to_bf16.multiply(two, mantissa) for two in to_bf16.e4m3_words(word)]
    return [(x << 3) & Uint32(0x7FF87FF8) | x & Uint32(0x80008000) for x in found]  # from 8 bits of exponent to 5
