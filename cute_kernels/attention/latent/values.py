"""Operands of O^T = V^T P^T: columns of V as rows of operand A, and P as operand B. `precision` states the types."""

import operator
from functools import reduce
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Uint32

from ...device import mma, to_bf16, warp
from .. import quant
from ..kv.record_rows import BYTES
from . import precision
from .precision import LOWERED_PAIR, RAISED_PAIR
from .tile_table import PIECE, SCORE_WARPS, row_pitch

ORDER = 0, 2, 1, 3  # of codes of e4m3 of two keys: those of a column together
ORDER_BYTES = 0x3120  # the same, for `quant.permute`


class ValueRows(NamedTuple):
    """16 rows of V, of which a box of columns is multiplied. at: its address, with `piece`. key: the number of the
    first row in its block. stage: of P."""

    at: Any
    box: Any
    key: int
    stage: Any


def piece(spec, section):
    """Return what `precision.lane_piece` does for a section of V. Values of 16 bits are operand A as they are loaded,
    if both pieces of eight rows come before the next eight rows."""
    lane = cute.arch.lane_idx()
    if section.code != "bf16":
        return precision.lane_piece(spec)
    return (lane % 8 + lane // 16 * 8) * row_pitch(spec) + lane // 8 % 2 * PIECE


def any_inexact(s, stage):
    """Return whether some factor of a block is no power of two."""
    first, *others = mma.load(s.scores.inexact[None, stage].iterator.toint(), SCORE_WARPS)
    return reduce(operator.or_, others, first) != 0


def products(spec, s, which, section, rows: ValueRows, p, rounded):
    """Yield operands A and B of the MMAs of a box of V, of the which-th record. p: words of P. rounded: V is multiplied
    by factors, and rounded as dequantised values are, in place of P. Columns have the order of `exchange`."""
    form, found = precision.record_of(spec, which), {}
    if section.code == "bf16" and precision.lowered(spec):
        p = [to_bf16.multiply(word, LOWERED_PAIR) for word in p]
    for i in range(0, BYTES[section.code] // PIECE, 2):
        words = warp.ldmatrix_x4_trans(rows.at + PIECE * i)
        if section.code == "bf16":
            yield words, p
            continue
        for quarter, two in enumerate((words[:2], words[2:]), i):
            if section.code == "e2m1":
                for columns in e2m1_columns(spec, s, form, rows, 2 * quarter, two):
                    yield columns, p
                continue
            index = form.factor_index(0, quarter) if section.factored else 0  # of the first box: known at trace time
            if index not in found:
                factors = e4m3_factors(spec, s, form, section, rows, quarter)
                multiplied = factors is not None and not rounded
                weights = [to_bf16.multiply(word, factors[k % 2]) for k, word in enumerate(p)] if multiplied else p
                found[index] = factors, weights
            factors, weights = found[index]
            yield e4m3_columns(spec, two, factors if rounded else None), weights


def e4m3_factors(spec, s, form, section, rows: ValueRows, quarter):
    """Return the factors of 16 columns of codes of e4m3, of a lane's four keys; None if there are none."""
    if precision.value_kind(spec) == "fp16":
        return None
    if not section.factored:
        return [Uint32(RAISED_PAIR)] * 2
    return precision.factors_of(spec, s, rows.key, form.factor_index(rows.box, quarter), rows.stage)


def e4m3_columns(spec, words, factors):
    """Return operand A of 16 columns, multiplied by factors, or by none. words: of codes of two groups of 8 keys."""
    if precision.value_kind(spec) == "fp16":
        columns = [quant.from_e4m3(quant.permute(word, Uint32(0), ORDER_BYTES)) for word in words]
    else:
        columns = [to_bf16.e4m3_words(word, ORDER) for word in words]
    if factors is not None:
        columns = [[to_bf16.multiply(word, own) for word in two] for two, own in zip(columns, factors, strict=True)]
    return [columns[e][part] for e in range(2) for part in range(2)]


def e2m1_columns(spec, s, form, rows: ValueRows, quarter, words):
    """Return operands A of 32 columns, multiplied by their factors. quarter: the first one of their box."""
    index = form.factor_index(rows.box, quarter + cute.arch.lane_idx() // 16)
    columns = [to_bf16.e2m1_pairs(word) for word in words]
    factors = precision.factors_of(spec, s, rows.key, index, rows.stage)
    return [
        [to_bf16.multiply(columns[e][first + part], factors[e]) for e in range(2) for part in range(2)]
        for first in (0, 2)
    ]


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
