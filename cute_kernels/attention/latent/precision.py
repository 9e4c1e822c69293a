"""Operands of the MMAs of few query rows, from rows in shared memory as they are stored, and from Q and P.

Codes become bf16 in registers (`to_bf16`), where they are used, and are multiplied by the factor of their row there: an
instruction of conversion takes as long as one that moves a converted value through shared memory. Four MMAs take a box
of 64 columns: over codes of e4m3, one has the columns of 16 bytes, and over codes of e2m1, two have those of 16 bytes.

`key_operands` has keys as rows of operand A, for S^T = K Q^T, and `value_operands` columns, for O^T = V^T P^T.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

from ...device import memory, mma, to_bf16, warp
from ...records import RECORDS
from ..kv.record_rows import BOX, BYTES, sections
from .tile_table import KEYS, PIECE, STEP, records, row_pitch

# Codes of a type are 2^-BELOW times their values. Factors are multiplied by a power of two less, so that their products
# with codes are 2^-RAISED times values; Q and P are multiplied by 2^RAISED. Products are then rounded as bf16 are,
# unless they are less than 2^-66. Factors must be less than 2^68.
RAISED = 60
RAISED_PAIR, LOWERED_PAIR = to_bf16.power_pair(RAISED), to_bf16.power_pair(-RAISED)
MMAS = BOX // STEP
LANES = 32
ORDER = 0, 2, 1, 3  # of codes of e4m3 of two keys: those of a column together


def record_of(spec, which):
    """Return a record of `records`."""
    return RECORDS[records(spec)[which]]


def sections_of(spec, which, columns):
    """Return the sections of the first columns of a row of a record: those of K or of V."""
    return [x for x in sections(record_of(spec, which), [spec.head_dim_qk]) if x.first < columns // BOX]


def lane_piece(spec):
    """Return the offset of the row and the piece that a lane names of 16 rows and 2 pieces of 16 bytes."""
    lane = cute.arch.lane_idx()
    return lane % KEYS * row_pitch(spec) + lane // KEYS * PIECE


def value_piece(spec, section):
    """Return what `lane_piece` does for a section of V. Values of 16 bits are operand A as they are loaded, if both
    pieces of eight rows come before the next eight rows."""
    lane = cute.arch.lane_idx()
    if section.code != "bf16":
        return lane_piece(spec)
    return (lane % 8 + lane // 16 * 8) * row_pitch(spec) + lane // 8 % 2 * PIECE


def stage_of(spec, s, kv):
    """Return the address of the rows of a block."""
    return s.k.raw.iterator.toint() + kv.index * (spec.tile.n * row_pitch(spec))


# Factors: in bf16, as FlashMLA rounds them


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


def held_factors(spec, which, rows):
    """Return words of factors of e4m3 of keys g and g + 8, as they are stored: those of a lane's columns of all boxes,
    of both halves of 32; None for other records."""
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


def factors_of(spec, s, key, index, stage):
    """Return a factor of a lane's four keys of 16, which begin at `key`, as two pairs."""
    at = s.scores.factors[key, None, stage].iterator.toint()
    at += 2 * (index * spec.tile.n + 2 * (cute.arch.lane_idx() % 4))
    return [mma.load(at + 16 * half, 1)[0] for half in range(2)]


# Operands: from words of codes of two MMAs (e4m3) or of four (e2m1)


def converted(code, word, order):
    """Return the codes of a word as words of two bf16. order: of codes of e4m3."""
    return to_bf16.e4m3_words(word, order) if code == "e4m3" else to_bf16.e2m1_pairs(word)


def key_operands(spec, which, section, rows, box, held):
    """Yield the operands A of a box of K. rows: the address of 16 rows. held: `held_factors`. A word of codes, which
    are neighbours, becomes words of one or of two MMAs, see `query_words`."""
    form, lane, pairs = record_of(spec, which), cute.arch.lane_idx(), {}

    def factor(quarter, apart):
        """Return the factors of keys g and g + 8."""
        if not section.factored:
            return [Uint32(RAISED_PAIR)] * 2
        if held is not None:
            return [held_factor(form, held[quarter // 2][e], box) for e in range(2)]
        index = form.factor_index(box, quarter)
        if index not in pairs:
            own = index + apart * (form.factor_index(box, 1) - form.factor_index(box, 0))
            pairs[index] = [stored_factor(form, rows + (lane // 4 + 8 * e) * row_pitch(spec), own) for e in range(2)]
        return pairs[index]

    size = BYTES[section.code]
    at = rows + lane_piece(spec) + section.at + (box - section.first) * size
    for i in range(0, size, 2 * PIECE):
        words = warp.ldmatrix_x4(at + i)
        if section.code == "bf16":
            yield words
            continue
        for half in range(2):
            keys = [converted(section.code, words[2 * half + e], range(4)) for e in range(2)]
            # over e2m1, a lane's eight columns are in one half of 32
            quarter, apart = (i // PIECE + half, 0) if section.code == "e4m3" else (2 * half, lane % 4 // 2)
            factors = factor(quarter, apart)
            for first in range(0, len(keys[0]), 2):
                yield [to_bf16.multiply(keys[e][first + part], factors[e]) for part in range(2) for e in range(2)]


def value_operands(spec, s, which, section, rows, key, stage, box):
    """Yield the operands A of a box of V for 16 keys. rows: their address, with `value_piece`. key: the first of them.
    Columns have the order of `exchange`."""
    form, g, pairs = record_of(spec, which), cute.arch.lane_idx() // 4, {}

    def factor(quarter, apart):
        """Return the factors of a lane's four keys."""
        if not section.factored:
            return [Uint32(RAISED_PAIR)] * 2
        index = form.factor_index(0, quarter)  # of the first box: known at trace time
        if index not in pairs:
            pairs[index] = factors_of(spec, s, key, form.factor_index(box, quarter + apart), stage)
        return pairs[index]

    for i in range(0, BYTES[section.code], 2 * PIECE):
        words = warp.ldmatrix_x4_trans(rows + i)
        if section.code == "bf16":
            yield words
            continue
        for half in range(2):
            values = [converted(section.code, words[2 * half + e], ORDER) for e in range(2)]
            quarter, apart = (i // PIECE + half, 0) if section.code == "e4m3" else (2 * half, g // 4)
            factors = factor(quarter, apart)
            for first in range(0, len(values[0]), 2):
                yield [to_bf16.multiply(values[e][first + part], factors[e]) for e in range(2) for part in range(2)]


def query_words(section, address, kind, step):
    """Load this lane's words of operand B, of a row of Q, for an MMA of a box over K. section: of K. address: of the
    box's first column. kind: the type of Q. step: the number of the MMA, 0 to 3."""
    t, size = cute.arch.lane_idx() % 4, kind.width // 8
    if section.code == "bf16":  # columns 2 t and 2 t + 1 of each half of 16
        return [memory.load_words(address + (STEP * step + 8 * part + 2 * t) * size, 0, 1)[0] for part in range(2)]
    if section.code == "e2m1":  # columns c and c + 4 of a lane's 8 of 32
        at = address + (2 * STEP * (step // 2) + 8 * t + 2 * (step % 2)) * size
        x, y = (memory.load_words(at + 4 * k * size, 0, 1)[0] for k in range(2))
        loaded = [x & Uint32(0xFFFF) | y << 16, x >> 16 | y & Uint32(0xFFFF0000)]
    elif size == 2:  # a lane's 4 columns of 16
        loaded = memory.load_words(address + (STEP * step + 4 * t) * size, 0, 2)
    else:
        words = to_bf16.e4m3_words(memory.load_words(address + STEP * step + 4 * t, 0, 1)[0])
        loaded = [to_bf16.multiply(word, to_bf16.EXACT["e4m3"]) for word in words]
    return [to_bf16.multiply(word, RAISED_PAIR) for word in loaded]


def weights(section, words):
    """Return words of P, which are multiplied by 2^RAISED, as operand B over a section of V."""
    return [to_bf16.multiply(word, LOWERED_PAIR) for word in words] if section.code == "bf16" else words


# Columns of O: what a lane has of the two halves of an exchange, and the lanes with which it exchanges. Codes of e4m3
# leave columns 2 g and 2 g + 1 of each MMA's 16 in lane 4 g + t, as they are stored; values of 16 bits, g and g + 8;
# codes of e2m1, two of 4 g ... 4 g + 3 of 32 in each of two MMAs.
EXCHANGES = {"e4m3": (), "bf16": (16, 8, 4), "e2m1": (4, 8, 16)}


def exchange(acc_o, code, back):
    """Exchange columns of O between lanes, so that they lie as with codes of e4m3; or, `back`, as they lay before."""
    mmas, n_tiles = cute.size(acc_o, mode=[1]), cute.size(acc_o, mode=[2])
    if code == "bf16":
        couples = [((k, i, n), (2 + k, i, n)) for n in range(n_tiles) for i in range(mmas) for k in range(2)]
    else:
        couples = [((e, i, n), (e, i + 1, n)) for n in range(n_tiles) for i in range(0, mmas, 2) for e in range(4)]
    for lanes in EXCHANGES[code][:: -1 if back else 1]:
        odd = cute.arch.lane_idx() // lanes % 2 != 0
        for low, high in couples:
            x, y = acc_o[low], acc_o[high]
            other = cute.arch.shuffle_sync_bfly(warp.select(odd, x, y), lanes)
            acc_o[low], acc_o[high] = warp.select(odd, other, x), warp.select(odd, y, other)
