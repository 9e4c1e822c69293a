"""Softmax of a half of the tile, or of every other block of its only half: a warpgroup, a thread a row."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ... import abi
from ...device import exp2, pipe, tmem, warp
from .. import geometry, logits, mask, parts, quant
from .. import softmax as online
from ..logits import Cols, Rows
from ..prepare import in_units, operand
from ..schedule import work
from ..schedule.work import Work
from . import skip
from .correction import Handed
from .issue import S, early, first_p, fp8, pieces
from .roles import ROWS, SLOTS, WARPS, always, groups, roles, tile_halves, turns

LOADED = 32  # columns that an instruction loads
CHAINS = 4  # of pairs, of a row's sum
EVERY = 16  # columns, of which the last `tile.emulated` do without the special function unit
MERGED = 8  # rows of a part that a warp merges at a time


@dataclass(frozen=True)
class Registers:
    """Of a thread, whose row is the only one: (1,) but for s, (1, n)."""

    s: cute.Tensor
    st: online.State
    tokens: cute.Tensor
    score: cute.Tensor  # of raw scores to log2 units
    reduced: cute.Tensor  # of what the softmax reduces, scores or capped ones
    slopes: Any = None  # of ALiBi
    words: Any = None  # of a custom mask, in the block at hand


class Place(NamedTuple):
    """The thread's: group, row of the half, and of the block at hand the slot of S, how often it was taken before, and
    its address in tensor memory."""

    group: Int32
    row: Int32
    slot: Int32
    turn: Int32
    s: Int32


class Tile(NamedTuple):
    """The tile at hand. capped: whether the call has a soft cap."""

    w: Work
    place: Place
    rows: Rows
    capped: Any
    mask_start: Any
    rule: Any = None  # of skip-softmax


class Count(NamedTuple):
    """Of the group: rounds of all tiles so far, in each of which it got S of a block or passed, and what was handed
    over."""

    blocks: Int32
    item: Int32


def place(spec, s) -> Place:
    number = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - roles(spec).first("softmax")
    group = number // WARPS
    row = number % WARPS * 32 + cute.arch.lane_idx()
    return Place(group, row, group, Int32(0), s.tensor[0] + tmem.lanes(number) + (S + group * ROWS))


def place_at(spec, x: Place, blocks) -> Place:
    """That of the next block of a group which got S of so many. x: that of its first."""
    if groups(spec) == SLOTS:
        return x._replace(turn=blocks)
    slot = blocks % SLOTS
    return x._replace(slot=slot, turn=blocks // SLOTS, s=x.s + slot * ROWS)


def registers(spec) -> Registers:
    one = lambda dtype: cute.make_rmem_tensor(1, dtype)  # noqa: E731
    scores = cute.make_rmem_tensor((1, spec.tile.n), Float32)
    slopes = one(Float32) if spec.logits.alibi else None
    words = cute.make_rmem_tensor(spec.tile.n // 32, Uint32) if spec.mask.custom else None
    return Registers(scores, online.make(1), one(Int32), one(Float32), one(Float32), slopes, words)


@cute.jit
def fetch(spec: cutlass.Constexpr, r: Registers, x: Place):
    """S of the block at hand."""
    for c in cutlass.range_constexpr(0, spec.tile.n, LOADED):
        values = tmem.load(x.s + c, LOADED)
        for e in cutlass.range_constexpr(LOADED):
            r.s[0, c + e] = values[e]
    tmem.wait_load()


@cute.jit
def hand_over(s, x: Place, what: Handed):
    """Tells who corrects O what there is to know."""
    s.growth[x.row, x.group, 0], s.growth[x.row, x.group, 1] = what.value, what.top
    cute.arch.sync_warp()
    pipe.send(s.grown + x.group)


def powers(logs, emulated):
    """2^x of two values."""
    return exp2.pair(logs) if emulated else [cute.math.exp2(x, fastmath=True) for x in logs]


def packed(spec, r: Registers, columns):
    """P of these columns in the MMA's type, as words."""
    if fp8(spec):
        return [warp.e4m3_word([r.s[0, c + e] for e in range(4)]) for c in columns[::4]]
    return [warp.word16(abi.DTYPES[operand(spec)], r.s[0, c], r.s[0, c + 1]) for c in columns[::2]]


@cute.jit
def probabilities(spec: cutlass.Constexpr, s, r: Registers, x: Place, masked: cutlass.Constexpr):
    """P of the block to tensor memory, announced in two parts."""
    count = const_expr(pieces(spec))
    piece = const_expr(spec.tile.n // count)
    scale, shift = (r.reduced[0],) * 2, (-r.st.shift[0],) * 2
    for k in cutlass.range_constexpr(count):
        for c in cutlass.range_constexpr(k * piece, (k + 1) * piece, 2):
            logs = cute.arch.fma_packed_f32x2((r.s[0, c], r.s[0, c + 1]), scale, shift)
            values = powers(logs, const_expr(not masked and c % EVERY >= EVERY - spec.tile.emulated))
            for e in cutlass.range_constexpr(2):
                r.s[0, c + e] = values[e]
        words = packed(spec, r, range(k * piece, (k + 1) * piece))
        tmem.store(x.s + (first_p(spec) + k * len(words)), words)
        if const_expr(k + 1 in (early(spec), count)):
            tmem.wait_store()
            tmem.before_signal()
            pipe.send((s.late if k + 1 == count else s.early) + x.slot)


def total(spec, r: Registers):
    """The sum of the block's P."""
    parts = [(r.s[0, c], r.s[0, c + 1]) for c in range(0, 2 * CHAINS, 2)]
    for c in range(2 * CHAINS, spec.tile.n, 2):
        k = c // 2 % CHAINS
        parts[k] = cute.arch.add_packed_f32x2(parts[k], (r.s[0, c], r.s[0, c + 1]))
    while len(parts) > 1:
        parts = [cute.arch.add_packed_f32x2(*pair) for pair in zip(parts[::2], parts[1::2])]
    return parts[0][0] + parts[0][1]


def span(spec):
    """Of P. In e4m3, which ends at 448, the running maximum is always the maximum, and P raised to 2^8 there, so that
    little is lost of what is small."""
    return online.Span(Float32(0.0), Float32(8.0)) if fp8(spec) else online.Span(Float32(online.LAZY), Float32(0.0))


class How(NamedTuple):
    """static. masked: some row may not see some key of the block; first: of its tile."""

    masked: bool
    first: bool = False


@cute.jit
def block(spec: cutlass.Constexpr, a, s, r: Registers, x: Tile, at: Count, j: Int32, how: cutlass.Constexpr):
    """Softmax of block j, unless it is left out."""
    logits.fetch_mask(spec, a, x.rows, x.mask_start, j * spec.tile.n, 1)
    x = x._replace(place=place_at(spec, x.place, at.blocks))
    pipe.wait_signal(s.scores + x.place.slot, x.place.turn)
    tmem.after_wait()
    fetch(spec, r, x.place)
    cols = Cols(j * spec.tile.n, list(range(spec.tile.n)))
    logits.transform(spec, a, r.s, r.score, x.rows, cols, x.capped, how.masked)
    if const_expr(spec.logits.skip and not how.first):
        top, out = skip.look(s, r, x.rows, x.rule, x.place.group, at.blocks)
        if out != 0:
            pass_over(s, x.place, at)
        else:
            x.rule.peak[0] = cute.arch.fmax(x.rule.peak[0], top[0])
            compute(spec, s, r, x, at, top, how.masked)
    else:
        compute(spec, s, r, x, at, r.s, how.masked)


@cute.jit
def pass_over(s, x: Place, at: Count):
    """A block that the group leaves out, to those who wait for it."""
    hand_over(s, x, Handed(Float32(1.0), Float32(0.0)))
    tmem.before_signal()
    pipe.send(s.early + x.slot)
    pipe.send(s.late + x.slot)
    pipe.wait_signal(s.read + x.group, at.item)


@cute.jit
def compute(spec: cutlass.Constexpr, s, r: Registers, x: Tile, at: Count, tops: cute.Tensor, masked: cutlass.Constexpr):
    """P of the block at hand, whose maximum is that of `tops`, and its sum."""
    online.update_max(r.st, tops, r.reduced, 1, span(spec), fp8(spec))
    hand_over(s, x.place, Handed(r.st.rescale[0], Float32(0.0)))
    probabilities(spec, s, r, x.place, masked)
    pipe.wait_signal(s.read + x.place.group, at.item)  # keeps the sum behind P, on which others wait
    sum_of_p = total(spec, r)
    if const_expr(not masked and spec.tile.emulated > 0):
        # the P of a NaN is 448, or infinity in 16 bits
        sum_of_p = sum_of_p if sum_of_p < exp2.HUGE else Float32(float("nan"))
    r.st.l[0] += sum_of_p


@cute.jit
def begin(spec: cutlass.Constexpr, a, s, r: Registers, x: Tile, at: Count, half):
    """What the thread's row of a tile is, in a half, and that it has seen no key."""
    w = x.w
    row = (tile_halves(spec, w) * w.m_block + half) * ROWS + x.place.row
    head = geometry.head_of(row, w.head, geometry.divisor(w))
    r.tokens[0] = warp.anew(geometry.token_of(row, geometry.divisor(w)))  # what it is made of is kept in no register
    r.score[0] = a.logits.scale_log2 * online.factor_of(a.logits.scale, head) * quant.format_of(spec).unit
    if const_expr(in_units(spec)):
        tile = at.item - at.blocks
        pipe.wait_full(s.ready_pipe, tile)
        r.score[0] *= s.units[half * ROWS + x.place.row, pipe.stage(s.ready_pipe, tile)]
    r.reduced[0] = r.score[0]
    if const_expr(spec.logits.alibi):
        r.slopes[0] = logits.slope_of(a, head, r.score[0])
    if const_expr(spec.logits.soft_cap):
        r.reduced[0] = logits.capped_to_log2(a.logits.soft_cap) if x.capped else r.score[0]
    online.reset(r.st, online.NO_KEY)


@cute.jit
def first_block(spec: cutlass.Constexpr, a, s, r: Registers, x: Tile, at: Count, j: Int32):
    """The group's first block of a tile. Returns the `Count` of the next."""
    block(spec, a, s, r, x, at, j, How(True, True))
    if const_expr(spec.logits.skip):
        x.rule.peak[0] = r.st.m[0]  # exact after one block
    return Count(at.blocks + 1, at.item + 1)


@cute.jit
def run_segment(spec: cutlass.Constexpr, a, s, r: Registers, x: Tile, at: Count, part: mask.Segment, own: Int32):
    """The group's blocks of a segment of a tile. own: its first one of the tile. Returns the `Count` of the next."""
    n = turns(spec, x.w)
    if const_expr(always(n, 1)):
        for j in cutlass.range(part.hi - 1, part.lo - 1, -1, unroll=1):
            block(spec, a, s, r, x, at, j, How(part.masked))
            at = Count(at.blocks + 1, at.item + 1)
    else:
        j = part.hi - 1
        j -= (own - j) & (n - 1)
        while j >= part.lo:
            block(spec, a, s, r, x, at, j, How(part.masked))
            at = Count(at.blocks + 1, at.item + 1)
            j -= n
    return at


@cute.jit
def run_tile(spec: cutlass.Constexpr, a, s, r: Registers, x: Tile, at: Count):
    """The group's blocks of a tile, and what becomes of its sums. Returns the `Count` of the next."""
    w, n, group = x.w, turns(spec, x.w), x.place.group
    half = group * (tile_halves(spec, w) - 1)
    first, last = geometry.tile_tokens(tile_halves(spec, w) * w.m_block + half, ROWS, w.q_len, w.per_token)
    full_lo, full_hi = mask.full_range(spec, first, last, x.rows.n)
    begin(spec, a, s, r, x, at, half)
    own = w.hi - 1
    if const_expr(always(n, 1)):
        at = first_block(spec, a, s, r, x, at, own)
    else:
        own -= (n - 1) * group
        if own >= w.lo:
            at = first_block(spec, a, s, r, x, at, own)
    segments = mask.segments(spec, w.lo, own, full_lo, full_hi)
    for g in cutlass.range_constexpr(len(segments)):
        at = run_segment(spec, a, s, r, x, at, segments[g], own)
    if const_expr(not always(n, 1)):
        if (w.hi - w.lo) & (n - 1) & group != 0:  # the other group has the tile's last block
            mine = place_at(spec, x.place, at.blocks)
            pipe.wait_signal(s.scores + mine.slot, mine.turn)
            pass_over(s, mine, at)
            at = Count(at.blocks + 1, at.item + 1)
    top = -Float32.inf if r.st.m[0] == -Float32.inf else r.st.shift[0]
    hand_over(s, x.place, Handed(r.st.l[0], top))
    pipe.wait_signal(s.read + x.place.group, at.item)
    return Count(at.blocks, at.item + 1)


@cute.jit
def softmax(spec: cutlass.Constexpr, plan, s):
    """All tiles of the CTA."""
    a, r, mine, capped = plan.args, registers(spec), place(spec, s), False
    if const_expr(spec.logits.soft_cap):
        capped = a.logits.soft_cap > 0.0
    t, at, count = Int32(0), Count(Int32(0), Int32(0)), Int32(0)
    w = work.consume(spec, s, t)
    while w.valid != 0:
        if const_expr(work.parts(spec)):
            if w.split.slot >= 0:
                parts.note(s.parts, w, count, cute.arch.thread_idx()[0])
                count += 1
        if w.hi > w.lo:
            rows = Rows(r.tokens, w.q_start, mask.lengths(spec, a, w.q_len, w.kv_len), r.slopes, r.words)
            start = geometry.mask_start(a, w.batch) if const_expr(spec.mask.custom) else None
            x = Tile(w, mine, rows, capped, start, skip.rule(spec, a, w.kv_len))
            at = run_tile(spec, a, s, r, x, at)
        t += 1
        w = work.consume(spec, s, t)
    if const_expr(work.parts(spec)):
        threads, tid = const_expr(roles(spec).warps("softmax")), cute.arch.thread_idx()[0]
        parts.meet(roles(spec).warps("softmax", "correct"))
        parts.merge(spec, a, s.parts, count, tid, threads, MERGED)
