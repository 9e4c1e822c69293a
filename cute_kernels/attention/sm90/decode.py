"""Math role of spec.split: few query rows, so that memory and the conversion of what it delivers set the pace.

A warp computes 8 rows of the tile, in wide kernels 16, with `mma.sync`, on keys of its own: `Place`. Keys are the rows
of the MMA, and then columns of V, so that query rows need no padding to 16: S^T = K Q^T and O^T = V^T P^T. It reads
cached rows from shared memory as they are stored, converts them in registers to operands (`quant`), and has a softmax
of its own; the warps of a row meet once, at the end of a tile (`merge`). Which element of k, or column of the output, a
lane's words are is free, if Q has the same order: lane 4 g + t takes the t-th quarter of the bytes of every box of a
row of K, and the g-th eighth of a row of V, so that its words are neighbours.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ... import abi
from ...device import copy, mma, pipe, warp
from ...device.divisor import Divisor
from .. import combine, epilogue, geometry, mask, quant, schedule, softmax

BARRIER = 1  # all math threads
warps = geometry.warps
PIECE = 4  # columns that a thread adds up


@dataclass(frozen=True)
class Row:
    """Bytes of a cached row. static: numbers."""

    width: Any  # of a box
    boxes: Any

    @staticmethod
    def of(spec, dim) -> "Row":
        size = dim * spec.kv.bits // 8
        return Row(min(size, copy.SWIZZLE_BYTES), max(1, size // copy.SWIZZLE_BYTES))


def keys(spec):
    """Keys that a warp computes at a time, a multiple of 16: all warps of a row together a KV block, or part of it."""
    return spec.tile.n // warps(spec)


def columns(spec):
    """Columns of the output that a lane's piece of a box has."""
    return Row.of(spec, spec.head_dim_vo).width // spec.kv.bits


def first_column(spec, number, eighth):
    """Of the output, of a lane's column `number` on, in the `eighth` of its boxes."""
    each = columns(spec)
    return number // each * each * 8 + eighth * each + number % each


def merged(spec):
    """Columns of a lane that are merged at a time."""
    return min(8 if spec.wide else 16, spec.head_dim_vo // 8)


def halves(spec):
    """Columns of 8 query rows that a warp's operands of K and V are multiplied with."""
    return spec.warp_rows // 8


@dataclass(frozen=True)
class Meeting:
    """Shared memory in which the warps of a row add up."""

    o: cute.Tensor  # (warp, row, piece of it, PIECE): piece i at i ^ (row / 2), for the banks
    stats: cute.Tensor  # (warp, row, maximum in log2 units and sum)
    last: cute.Tensor  # (1,) of `combine.is_last`
    ready: pipe.Pipe  # of one stage, that all warps fill and free


def meeting(spec, smem):
    row_major = lambda *shape: cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape)))))  # noqa: E731
    return Meeting(
        smem.allocate_tensor(Float32, row_major(warps(spec), spec.warp_rows, 8 * merged(spec) // PIECE, PIECE), 16),
        smem.allocate_tensor(Float32, row_major(warps(spec), spec.warp_rows, 2), 8),
        smem.allocate_tensor(Int32, cute.make_layout(1)),
        pipe.make(smem, 1, warps(spec), warps(spec)),
    )


@dataclass(frozen=True)
class Registers:
    """Fragments of a warp. Of each 8 rows, a half, its lane has Q of row g, and what the scores and the output are of,
    rows 2 t and 2 t + 1."""

    fold: Any  # `geometry.fold`, as a divisor
    q: cute.Tensor  # (words of a row: element 2 w of k, half)
    o: cute.Tensor  # (2 rows x 2 columns x pairs of columns, half)
    st: softmax.State
    tokens: cute.Tensor
    raw: cute.Tensor  # a score of a row, as it is multiplied, to log2 units
    scale: cute.Tensor  # what is reduced of it to log2 units
    k_at: cute.Tensor  # offsets of this lane's pieces of rows of K
    v_at: cute.Tensor  # of V: keys 2 t, 2 t + 1, where these are swizzled differently
    scales_at: cute.Tensor  # of the scale factors: of K; of V, key 2 t; from there to key 2 t + 1; to the next block


@dataclass(frozen=True)
class Place:
    """What a warp has of the tile at hand: `warp_rows`, number `group` of such, every `shares`-th group of `keys`, from
    `share` on."""

    w: schedule.Work
    n: mask.Lengths
    first: Int32  # row of the request, that the tile begins with
    rows: Int32  # of the request
    left: Int32  # of these in the tile
    group: Int32  # of rows in the tile
    share: Int32
    shares: Int32
    plain: Int32  # keys from w.full_lo on, whose scores are neither masked nor changed


def swizzle(width, row, byte):
    """Where TMA puts a byte of a row of a box of `width` bytes, under the widest swizzle that it allows."""
    return row * width + (byte ^ (row * width // 128 % (width // 16) * 16))


def blocks(spec):
    """Scale factors of a row of V that a lane needs."""
    return max(1, spec.head_dim_vo // 128) if spec.kv.dtype == "nvfp4" else 1


def v_pieces(spec):
    """1 where the rows of V of two keys in a line of 128 bytes are swizzled alike."""
    return 2 if Row.of(spec, spec.head_dim_vo).width == copy.SWIZZLE_BYTES else 1


def registers(spec, a):
    """Fragments of a warp, with the offsets that never change."""
    rmem = cute.make_rmem_tensor
    lane = cute.arch.lane_idx()
    g, t = lane // 4, lane % 4
    k, v = Row.of(spec, spec.head_dim_qk), Row.of(spec, spec.head_dim_vo)
    pieces, rows = max(1, k.width // 64), 2 * halves(spec)
    r = Registers(
        Divisor(geometry.fold(spec, a)),
        rmem((spec.head_dim_qk // 8, halves(spec)), Uint32),
        rmem((spec.head_dim_vo // 4, halves(spec)), Float32),
        softmax.make(rows),
        rmem(rows, Int32),
        *(rmem(rows, Float32) for _ in range(2)),
        *(rmem(count, Int32) for count in (pieces, v_pieces(spec), 4)),
    )
    for i in range(pieces):
        r.k_at[i] = swizzle(k.width, g, t * (k.width // 4) + 16 * i)
    for i in range(v_pieces(spec)):
        r.v_at[i] = swizzle(v.width, 2 * t + i, g * (v.width // 8))
    r.scales_at[0] = g * (spec.head_dim_qk // 16) + t * (spec.head_dim_qk // 64)
    size, inter = spec.head_dim_vo // 16, a.interleaved
    linear, interleaved = 2 * t * size + g * size // 8, t // 2 * 4 * size + g * size // 8 * 4 + 2 * t % 4
    r.scales_at[1] = linear + inter * (interleaved - linear)
    r.scales_at[2] = size + inter * (1 - size)
    r.scales_at[3] = 1 + 3 * inter
    return r


@cute.jit
def place(spec: cutlass.Constexpr, a, r: Registers, w: schedule.Work):
    rows = geometry.tile_rows(w.q_len, r.fold)
    m = geometry.tile_m(spec, rows)
    number = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4
    n, shares = schedule.lengths(spec, a, w.q_len, w.kv_len), geometry.shares(spec, m)
    group = number * (m // spec.warp_rows) // warps(spec)
    first = w.m_block * m
    plain = cutlass.max(w.full_hi - w.full_lo, 0) * spec.tile.n
    if a.soft_cap > 0.0 or a.skip != -Float32.inf:
        plain = Int32(0)
    return Place(w, n, first, rows, cutlass.min(rows - first, m), group, number - group * shares, shares, plain)


def early(spec):
    """Whether Q of a tile is fetched before O of the tile before is out of registers, which hides the latency."""
    return spec.head_dim_qk * halves(spec) <= 128


@cute.jit
def fetch_q(spec: cutlass.Constexpr, a, r: Registers, x: Place, words: cute.Tensor):
    """Words (D / 8, half) of this lane's rows g, zeros past the request, their columns in the order of boxes."""
    w, row = x.w, Row.of(spec, spec.head_dim_qk)
    g, t = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
    vectors = const_expr(row.width * 8 // spec.kv.bits // 4 // 8)  # of a box, 8 elements each
    words.fill(0)
    for half in cutlass.range_constexpr(halves(spec)):
        at = x.first + spec.warp_rows * x.group + 8 * half + g
        if at < x.rows:
            token, head = geometry.token_of(at, r.fold, True), geometry.head_of(at, w.head, r.fold, True)
            source = a.q[w.q_start + token, head, None]
            for i in cutlass.range_constexpr(row.boxes * vectors):
                piece = cute.local_tile(source, (8,), ((i // vectors * 4 + t) * vectors + i % vectors,))
                target = cute.local_tile(words[None, half], (4,), (i,))
                cute.autovec_copy(piece, cute.recast_tensor(target, source.element_type))


@cute.jit
def set_q(spec: cutlass.Constexpr, a, r: Registers, x: Place, words: cute.Tensor, scale_log2: Float32):
    """Operand B of this warp's rows, in the type that is multiplied and the order of the cached words."""
    fmt = quant.FORMATS[spec.kv.dtype]
    t = cute.arch.lane_idx() % 4
    for half in cutlass.range_constexpr(halves(spec)):
        unit, own = Float32(fmt.unit), words[None, half]
        if const_expr(spec.kv.dtype != "" and spec.dtype == "bf16"):
            unit *= to_fp16(own)
        for i in cutlass.range_constexpr(2):
            k, row = 2 * half + i, x.first + spec.warp_rows * x.group + 8 * half + 2 * t + i
            r.tokens[k] = geometry.token_of(row, r.fold, True)
            r.raw[k] = cute.arch.shuffle_sync(unit, 8 * t + 4 * i) * scale_log2
            r.scale[k] = softmax.capped_scale(a.soft_cap) if a.soft_cap > 0.0 else r.raw[k]
        for i in cutlass.range_constexpr(spec.head_dim_qk // 8):
            r.q[i, half] = in_order(fmt, own, i)


def in_order(fmt, words, i):
    """The i-th pair of a row in the order of its cached words."""
    start = i * 2 // fmt.elements * fmt.elements
    first, second = (start + fmt.order[i * 2 % fmt.elements + e] for e in range(2))
    if second == first + 1:
        return words[i]
    return quant.permute(words[first // 2], words[second // 2], (0x5410, 0x7632)[first % 2])


@cute.jit
def to_fp16(words: cute.Tensor):
    """bf16 pairs of a row, of which a quad has a quarter each, to fp16 in place, divided by the returned power of two,
    near the largest: fp16 has neither bf16's range nor needs it then."""
    values = cute.make_rmem_tensor(2 * cute.size(words), Float32)
    values.store(cute.recast_tensor(words, cutlass.BFloat16).load().to(Float32))
    top = Float32(0.0)
    for i in cutlass.range_constexpr(cute.size(values)):
        top = cute.arch.fmax(top, cute.math.absf(values[i]))
    top = cute.arch.warp_reduction_max(top, threads_in_group=4)
    exponent = cutlass.max(Int32(27), cutlass.min(Int32(227), warp.bits(top) >> 23))
    values.store(values.load() * warp.from_bits((254 - exponent) << 23))
    warp.convert16(values, cute.recast_tensor(words, cutlass.Float16))
    return warp.from_bits(exponent << 23)


def issue_qk(spec, s, r, scores, stage, row):
    """scores = K Q^T of the rows [row, row + keys) of a stage."""
    name, fmt = quant.operand(spec), quant.FORMATS[spec.kv.dtype]
    k, n = Row.of(spec, spec.head_dim_qk), spec.tile.n
    base = s.k.iterator.toint() + stage * (n * k.width * k.boxes) + row * k.width
    quarter = k.width // 4
    scores.fill(0.0)
    for tile in range(keys(spec) // 16):
        rows = (16 * tile, 16 * tile + 8)
        if spec.kv.dtype == "nvfp4":
            factors = [k_factors(spec, s, r, stage, row + inside) for inside in rows]
        for b in range(k.boxes):
            operands: list[list[Any]] = [[], []]
            for half, inside in enumerate(rows):
                for piece in range(max(1, quarter // 16)):
                    at = base + (b * n + inside) * k.width + r.k_at[piece]
                    for word in mma.load(at, min(4, quarter // 4)):
                        pairs = fmt.pairs(word)
                        if spec.kv.dtype == "nvfp4":
                            factor = factors[half][(b * quarter // 4 + len(operands[half]) // 4) // 2]
                            pairs = [quant.times(pair, factor) for pair in pairs]
                        operands[half] += pairs
            for i in range(0, len(operands[0]), 2):
                a = [operands[half][i + e] for e in range(2) for half in range(2)]
                at = b * len(operands[0]) + i
                for h in range(halves(spec)):
                    mma.issue(name, scores[None, h], 4 * tile, a, [r.q[at, h], r.q[at + 1, h]])


def k_factors(spec, s, r, stage, row):
    """Scale factors of this lane's quarter of a row of K, a pair of each."""
    count = spec.head_dim_qk // 64
    at = s.k_scales.iterator.toint() + (stage * spec.tile.n + row) * (spec.head_dim_qk // 16) + r.scales_at[0]
    both = quant.from_e4m3(mma.load_bytes(at, count))
    return [quant.twice(both[b // 2], b % 2) for b in range(count)]


@cute.jit
def load_v(
    spec: cutlass.Constexpr,
    s,
    r: Registers,
    x: Place,
    spot,
    b: cutlass.Constexpr,
    raw: cute.Tensor,
    factors: cute.Tensor,
):
    """This lane's words raw (word, key of 4, 16 keys) of a box of V, and the scale factors of each key. Rows past
    kv_len hold whatever the page held, and 0 * NaN is NaN: zeros."""
    v, n, row, key = Row.of(spec, spec.head_dim_vo), spec.tile.n, spot.row, spot.key
    stage, t = pipe.stage_of(spot.at), cute.arch.lane_idx() % 4
    base = s.v.iterator.toint() + stage * (n * v.width * v.boxes) + row * v.width
    per = const_expr(v.width // 32)
    for c in cutlass.range_constexpr(keys(spec) // 16):
        for e in cutlass.range_constexpr(4):
            inside = const_expr(16 * c + 8 * (e // 2))
            at = const_expr(e % 2 if v_pieces(spec) == 2 else 0)
            words = mma.load(base + (b * n + inside + e % 2 - at) * v.width + r.v_at[at], per)
            for u in cutlass.range_constexpr(per):
                raw[u, e, c] = words[u]
            if const_expr(spec.kv.dtype == "nvfp4"):
                size = const_expr(spec.head_dim_vo // 16)
                at = s.v_scales.iterator.toint() + (stage * n + row + inside) * size + r.scales_at[1]
                for k in cutlass.range_constexpr(blocks(spec)):
                    factors[k, e, c] = mma.load_bytes(at + e % 2 * r.scales_at[2] + k * r.scales_at[3], 1)
    if key + keys(spec) > x.w.kv_len:
        for c in cutlass.range_constexpr(keys(spec) // 16):
            for e in cutlass.range_constexpr(4):
                if key + 16 * c + 8 * (e // 2) + 2 * t + e % 2 >= x.w.kv_len:
                    raw[None, e, c].fill(0)
                    factors[None, e, c].fill(0)


def issue_pv(spec, r, p, b, raw, factors):
    """O^T += V^T P^T of a box; p: words of P (two for 16 keys, half)."""
    name, fmt = quant.operand(spec), quant.FORMATS[spec.kv.dtype]
    for c in range(keys(spec) // 16):
        if spec.kv.dtype == "nvfp4":
            pair = lambda k, e: quant.permute(factors[k, 2 * e, c], factors[k, 2 * e + 1, c], 0x40)  # noqa: B023, E731
            scales = [[quant.from_e4m3(pair(k, e))[0] for e in range(2)] for k in range(blocks(spec))]
        for u in range(cute.size(raw, mode=[0])):
            both = [fmt.values(raw[u, 2 * e, c], raw[u, 2 * e + 1, c]) for e in range(2)]
            if spec.kv.dtype == "nvfp4":
                both = [[quant.times(pair, scales[u // 2][e]) for pair in both[e]] for e in range(2)]
            of = [dict(zip(fmt.order, pairs)) for pairs in both]
            for i in range(0, fmt.elements, 2):
                a = [of[e][i + half] for e in range(2) for half in range(2)]
                at = 2 * (b * columns(spec) + u * fmt.elements + i)
                for h in range(halves(spec)):
                    mma.issue(name, r.o[None, h], at, a, [p[2 * c, h], p[2 * c + 1, h]])


def rows_view(fragment):
    """(2 rows of each half, columns) of accumulators: of rows 2 t and 2 t + 1 what row g, row g + 8 of each MMA has."""
    size, count = cute.size(fragment, mode=[0]), cute.size(fragment, mode=[1])
    layout = cute.make_layout(((2, count), (2, size // 4)), stride=((1, size), (2, 4)))
    return cute.make_tensor(fragment.iterator, layout)


@cute.jit
def mask_scores(spec: cutlass.Constexpr, a, view: cute.Tensor, r: Registers, x: Place, key: Int32):
    """-inf where a row does not see one of the keys that begin with `key`."""
    cols = [8 * j for j in range(keys(spec) // 8)]
    key += cute.arch.lane_idx() // 4
    mask.apply(spec, view, r.tokens, cols, key, x.n)
    if x.n.drafts != 0:
        drafts = cute.domain_offset((x.w.q_start, 0), a.drafts)
        mask.apply_drafts(view, drafts, r.tokens, cols, key - (x.w.kv_len - x.w.q_len))


@cute.jit
def skips(view: cute.Tensor, r: Registers, x: Place, least: Float32):
    """Skip-softmax: whether each row of this warp finds all these keys below its maximum so far by the threshold."""
    votes = True
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        top = warp.across_quads(softmax.reduce(view[k, None], cute.arch.fmax), cute.arch.fmax)
        below = top == -Float32.inf or (top - r.st.m[k]) * r.scale[k] < least
        votes = votes and (below or r.tokens[k] >= x.w.q_len)
    return cute.arch.vote_all_sync(votes)


@cute.jit
def change(spec: cutlass.Constexpr, a, r: Registers, x: Place, key: Int32, scores: cute.Tensor):
    """Soft cap and mask on the scores of the keys that begin with `key`; whether skip-softmax leaves V in: where not,
    they are all masked."""
    view, wanted, n = rows_view(scores), True, spec.tile.n
    if a.soft_cap > 0.0:
        for k in cutlass.range_constexpr(cute.size(r.tokens)):
            softmax.cap_scores(view[k, None], r.raw[k], a.soft_cap)
    if key >= x.w.full_hi * n or key < x.w.full_lo * n:
        mask_scores(spec, a, view, r, x, key)
    if a.skip != -Float32.inf:
        wanted = not skips(view, r, x, a.skip - cute.math.log2(Float32(x.w.kv_len), fastmath=True))
        if not wanted:
            scores.fill(-Float32.inf)
    return wanted


@cute.jit
def probabilities(spec: cutlass.Constexpr, r: Registers, scores: cute.Tensor, p: cute.Tensor):
    """Scores to words of P."""
    view = rows_view(scores)
    softmax.keep_up(r.st, view, rows_view(r.o), r.scale)
    for k in cutlass.range_constexpr(cute.size(r.tokens)):
        softmax.exponentials(r.st, view, r.scale[k], k)
    warp.convert16(scores, cute.recast_tensor(p, abi.DTYPES[quant.operand(spec)]))
    for i in cutlass.range_constexpr(cute.size(p)):
        p[i] = mma.transpose(p[i])


class Spot(NamedTuple):
    """`keys` that a warp is at: position of their block in the pipes, row in the stage, key of the request."""

    at: Int32
    row: Int32
    key: Int32


@cute.jit
def onward(spec: cutlass.Constexpr, s, x: Place, k: Spot):
    """The warp's next keys, those that come before these."""
    at, row = k.at, k.row - x.shares * keys(spec)
    if row < 0:
        at, row = pipe.behind(s.k_pipe, at), row + spec.tile.n
    return Spot(at, row, k.key - x.shares * keys(spec))


def leave(spec, ring, x: Place, k: Spot):
    """Frees the stage, if these are this warp's last keys of it."""
    pipe.release_at(ring, k.at, k.row < x.shares * keys(spec))


@cute.jit
def run(spec: cutlass.Constexpr, a, s, r: Registers, x: Place, at: Int32):
    """O of this warp's keys of all KV blocks, from position `at` of the pipes on; the position behind. P V of some keys
    is issued behind Q K of the next ones, whose latency it hides. What few keys need is out of the inner loop, which
    the instruction cache then holds."""
    softmax.reset(r.st)
    r.st.shift.fill(0.0)
    r.o.fill(0.0)
    scores = cute.make_rmem_tensor((keys(spec) // 4, halves(spec)), Float32)
    p = cute.make_rmem_tensor((keys(spec) // 8, halves(spec)), Uint32)
    raw = cute.make_rmem_tensor((Row.of(spec, spec.head_dim_vo).width // 32, 4, keys(spec) // 16), Uint32)
    factors = cute.make_rmem_tensor((blocks(spec), 4, keys(spec) // 16), Uint32)
    row, end = spec.tile.n - (x.shares - x.share) * keys(spec), x.w.lo * spec.tile.n
    k = Spot(at, row, (x.w.hi - 1) * spec.tile.n + row)
    while k.key >= cutlass.max(end, x.w.kv_len):  # no arithmetic past kv_len
        for ring in (s.k_pipe, s.v_pipe):
            pipe.wait_full_at(ring, k.at)
            leave(spec, ring, x, k)
        k = onward(spec, s, x, k)
    before, scored, wanted, more = Spot(k.at, Int32(spec.tile.n), k.key), False, False, k.key >= end  # nothing to leave
    while more:
        if scored:
            wanted = change(spec, a, r, x, before.key, scores)
        plain = True
        while plain:
            k_there, v_there = pipe.is_full_at(s.k_pipe, k.at), pipe.is_full_at(s.v_pipe, before.at)
            if scored:
                probabilities(spec, r, scores, p)
            if k.key >= end:
                pipe.wait_full_at(s.k_pipe, k.at, k_there)
                issue_qk(spec, s, r, scores, pipe.stage_of(k.at), k.row)
                leave(spec, s.k_pipe, x, k)
            pipe.wait_full_at(s.v_pipe, before.at, v_there)
            if wanted:
                for b in cutlass.range_constexpr(Row.of(spec, spec.head_dim_vo).boxes):
                    load_v(spec, s, r, x, before, b, raw, factors)
                    issue_pv(spec, r, p, b, raw, factors)
            leave(spec, s.v_pipe, x, before)
            before = k
            k = onward(spec, s, x, k)
            scored = before.key >= end
            wanted = scored
            # one comparison: keys before full_lo wrap
            plain = scored & (Uint32(before.key - x.w.full_lo * spec.tile.n) < Uint32(x.plain))
        more = scored
    return before.at


@cute.jit
def store_sums(spec: cutlass.Constexpr, s, r: Registers, x: Place, turn: Int32, number: cutlass.Constexpr):
    """This warp's O, `merged` columns of a lane from `number` on, and the maxima and sums of its rows, to s.merge."""
    own = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4
    g, t, count = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4, const_expr(merged(spec) // PIECE)
    pipe.wait_empty(s.merge.ready, turn)
    if spec.warp_rows * x.group < x.left:
        for k in cutlass.range_constexpr(cute.size(r.tokens)):
            row = k // 2 * 8 + 2 * t + k % 2
            if const_expr(number == 0):
                total = warp.across_quads(r.st.l[k], lambda x, y: x + y)
                s.merge.stats[own, row, 0], s.merge.stats[own, row, 1] = r.st.m[k] * r.scale[k], total
            for i in cutlass.range_constexpr(count):
                piece = cute.make_rmem_tensor(PIECE, Float32)
                for e in cutlass.range_constexpr(PIECE):
                    piece[e] = r.o[2 * (number + PIECE * i + e) + k % 2, k // 2]
                cute.autovec_copy(piece, s.merge.o[own, row, (g * count + i) ^ (t + k // 2 * 4), None])
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(pipe.full(s.merge.ready, turn))


@cute.jit
def add_up(spec: cutlass.Constexpr, s, x: Place, row: Int32, piece: Int32, total: cute.Tensor):
    """total = sum of O x 2^(maximum - top) over the warps of a row; returns (top, sum of all exponentials / 2^top)."""
    first, inside, part = (
        row // spec.warp_rows * x.shares,
        row % spec.warp_rows,
        cute.make_rmem_tensor(PIECE, Float32),
    )
    top, exponentials = -Float32.inf, Float32(0.0)
    total.fill(0.0)
    for c in cutlass.range(x.shares, unroll=4):
        top = cute.arch.fmax(top, s.merge.stats[first + c, inside, 0])
    base = Float32(0.0) if top == -Float32.inf else top
    for c in cutlass.range(x.shares, unroll=4):
        factor = cute.math.exp2(s.merge.stats[first + c, inside, 0] - base, fastmath=True)
        exponentials += factor * s.merge.stats[first + c, inside, 1]
        cute.autovec_copy(s.merge.o[first + c, inside, piece ^ (inside // 2), None], part)
        total.store(total.load() + part.load() * factor)
    return top, exponentials


@cute.jit
def finish(spec: cutlass.Constexpr, a, fold, x: Place, row: Int32, column: Int32, total: cute.Tensor, sums):
    """PIECE columns of a row of the tile, from `column` * PIECE on, to the output or to its part; with the first ones
    its LSE. sums: of `add_up`."""
    at, unit = x.first + row, Float32(quant.FORMATS[spec.kv.dtype].unit)
    if x.w.slot >= 0:
        factor, lse = softmax.close(*sums, -Float32.inf)
        total.store(total.load() * (factor * unit))
        cute.autovec_copy(total, cute.local_tile(a.part[x.w.slot, row, None], (PIECE,), (column,)))
        if column == 0:
            a.part[x.w.slot, row, spec.head_dim_vo] = lse
    else:
        token, head = geometry.token_of(at, fold, True), geometry.head_of(at, x.w.head, fold, True)
        factor, lse = softmax.close(*sums, epilogue.sink_of(a, head))
        total.store(total.load() * (factor * unit * softmax.factor(a.out_factor, a.out_scale)))
        epilogue.store_piece(a, x.w.q_start + token, head, column, total)
        if column == 0 and a.lse.shape[0] > 0:
            a.lse[x.w.q_start + token, head] = lse


@cute.jit
def merge(spec: cutlass.Constexpr, a, s, fold, x: Place, turn: Int32, number: cutlass.Constexpr):
    """`merged` columns of a lane, from `number` on, of the tile's output, or its part's, that all warps have stored."""
    tid = cute.arch.thread_idx()[0] - 128
    pieces, count = const_expr(8 * merged(spec) // PIECE), const_expr(merged(spec) // PIECE)  # of a row, of a lane
    pipe.wait_full(s.merge.ready, turn)
    for index in cutlass.range(tid, pieces * x.left, 32 * warps(spec), unroll=1):
        row, piece = index // pieces, index % pieces
        total = cute.make_rmem_tensor(PIECE, Float32)
        sums = add_up(spec, s, x, row, piece, total)
        column = first_column(spec, number + PIECE * (piece % count), piece // count)
        finish(spec, a, fold, x, row, column // PIECE, total, sums)
    cute.arch.sync_warp()
    pipe.release(s.merge.ready, turn)


@cute.jit
def math(spec: cutlass.Constexpr, plan, s):
    a = plan.args
    own, tid = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4, cute.arch.thread_idx()[0] - 128
    r = registers(spec, a)
    scale_log2 = softmax.factor(a.scale_log2, a.scale)
    at, t, turn = Int32(0), Int32(0), Int32(0)
    words = cute.make_rmem_tensor((spec.head_dim_qk // 8, halves(spec)), Uint32)
    w = schedule.read(s, t)
    x = place(spec, a, r, w)
    if w.valid != 0:
        fetch_q(spec, a, r, x, words)
        set_q(spec, a, r, x, words, scale_log2)
    while w.valid != 0:
        at = run(spec, a, s, r, x, at)
        w = schedule.read(s, t + 1)
        next_x = place(spec, a, r, w)
        if const_expr(early(spec)) and w.valid != 0:
            fetch_q(spec, a, r, next_x, words)
        for number in cutlass.range_constexpr(0, spec.head_dim_vo // 8, merged(spec)):
            store_sums(spec, s, r, x, turn, number)
            if const_expr(number + merged(spec) == spec.head_dim_vo // 8) and w.valid != 0:
                if const_expr(not early(spec)):
                    fetch_q(spec, a, r, next_x, words)
                set_q(spec, a, r, next_x, words, scale_log2)  # while other warps still compute
            merge(spec, a, s, r.fold, x, turn, number)
            turn += 1
        if x.w.slot >= 0:
            done = schedule.read(s, t)  # again, instead of in registers all the time
            if combine.is_last(a, done, s.merge.last, tid, BARRIER, 32 * warps(spec)):
                combine.merge(spec, a, done, r.fold, own, warps(spec))
        pipe.release(s.work_pipe, t)
        x = next_x
        t += 1
