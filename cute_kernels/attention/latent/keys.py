"""Operands of S^T = K Q^T: keys as rows of operand A, and query rows as columns of operand B.

Four MMAs take a box of 64 columns. Over codes of e4m3, one has the columns of 16 bytes; over codes of e2m1, two have
those of 16 bytes. A word of codes, which are neighbours, becomes words of one or of two MMAs, and Q has the same order.
`precision` states the types.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

from ...device import memory, to_bf16, warp
from .. import quant
from ..kv.record_rows import BYTES
from . import precision
from .precision import MMAS, RAISED_PAIR
from .tile_table import PIECE, STEP, row_pitch


class KeyStep(NamedTuple):
    """An MMA: its number; operand A; which factor multiplies its sums, or None."""

    number: int
    keys: list[Any]
    factor: int | None


class KeyRows(NamedTuple):
    """16 rows of K. at: the address of the first one. mantissas: a function that returns those of a factor of keys g
    and g + 8, by which K is multiplied; None if it is not. held: `precision.held_factors`."""

    at: Any
    mantissas: Any
    held: Any


def steps(spec, which, section, rows: KeyRows):
    """Yield the MMAs of a section of K, of the which-th record."""
    form, size = precision.record_of(spec, which), BYTES[section.code]
    for box in range(section.first, section.first + section.boxes):
        at, number = rows.at + precision.lane_piece(spec) + section.at + (box - section.first) * size, MMAS * box
        for piece in range(0, size // PIECE, 2):
            words = warp.ldmatrix_x4(at + PIECE * piece)
            for keys, factor in operands(spec, form, section, rows, box, piece, words):
                yield KeyStep(number, keys, factor)
                number += 1


def operands(spec, form, section, rows: KeyRows, box, piece, words):
    """Return operands A of two pieces of a box, and which factors their sums have. words: of `ldmatrix`."""
    if section.code == "bf16":
        return [(words, None)]
    halves = words[:2], words[2:]
    if section.code == "e4m3":
        return [e4m3_operand(form, section, rows, box, piece + i, two) for i, two in enumerate(halves)]
    return [(x, None) for i, two in enumerate(halves) for x in e2m1_operands(spec, form, rows, box, i, two)]


def e4m3_operand(form, section, rows: KeyRows, box, quarter, words):
    """Return operand A of 16 columns, and which factor its sums have."""
    index = form.factor_index(box, quarter) if section.factored else None
    if rows.mantissas is None or index is None:
        keys = [quant.from_e4m3(word) for word in words]
    else:
        keys = [precision.rounded_products(*each) for each in zip(words, rows.mantissas(index), strict=True)]
    return [keys[e][part] for part in range(2) for e in range(2)], index


def e2m1_operands(spec, form, rows: KeyRows, box, half, words):
    """Return operands A of 32 columns, of which a lane has eight neighbours."""
    lane = cute.arch.lane_idx()
    if form.permuted:
        factors = [precision.held_factor(form, rows.held[half][e], box) for e in range(2)]
    else:
        index = form.factor_index(box, 2 * half)
        index += lane % 4 // 2 * (form.factor_index(box, 1) - form.factor_index(box, 0))
        starts = [rows.at + (lane // 4 + 8 * e) * row_pitch(spec) for e in range(2)]
        factors = [precision.stored_factor(form, start, index) for start in starts]
    keys = [to_bf16.e2m1_pairs(word) for word in words]
    return [
        [to_bf16.multiply(keys[e][first + part], factors[e]) for part in range(2) for e in range(2)] for first in (0, 2)
    ]


def query_words(section, address, kind, step):
    """Load this lane's words of operand B, of a row of Q, for an MMA of a box over a section of K. address: of the
    box's first column. kind: the type of Q. step: the number of the MMA, 0 to 3. Codes of e4m3 become fp16."""
    t, size = cute.arch.lane_idx() % 4, kind.width // 8
    if section.code == "bf16":  # columns 2 t and 2 t + 1 of each half of 16
        return [memory.load_words(address + (STEP * step + 8 * part + 2 * t) * size, 0, 1)[0] for part in range(2)]
    if section.code == "e2m1":  # columns c and c + 4 of a lane's 8 of 32
        at = address + (2 * STEP * (step // 2) + 8 * t + 2 * (step % 2)) * size
        x, y = (memory.load_words(at + 4 * k * size, 0, 1)[0] for k in range(2))
        return [x & Uint32(0xFFFF) | y << 16, x >> 16 | y & Uint32(0xFFFF0000)]
    if size == 2:  # a lane's 4 columns of 16
        return memory.load_words(address + (STEP * step + 4 * t) * size, 0, 2)
    return quant.from_e4m3(memory.load_words(address + STEP * step + 4 * t, 0, 1)[0])


def query_operand(section, kind, word, power):
    """Return a word of `query_words` as operand B. power: that of two by which fp16 is multiplied."""
    if section.code == "e2m1":
        return to_bf16.multiply(word, RAISED_PAIR)
    if section.code == "bf16" or kind.width == 8:
        return word
    return warp.pack_16bit(cutlass.Float16, *(x * power for x in memory.widen("bf16", word)))
