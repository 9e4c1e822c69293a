"""Math role of spec.split: few query rows, so that memory and the conversion of what it delivers set the pace.

A warp computes 16 rows of the tile with `mma.sync`, on keys of its own: `Place`. It reads cached rows from shared
memory as they are stored, converts them in registers to operands (`quant`), and has a softmax of its own; the warps of
a row meet once, at the end of a tile (`merge`). Which element of k, or column of the output, a lane's words are is
free, if Q has the same order: lane 4 g + t takes the t-th quarter of the bytes of every box of a row of K, and the g-th
eighth of a row of V, so that its words are neighbours.
"""

import functools
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ... import abi
from ...device import copy, mma, pipe, warp
from .. import epilogue, geometry, mask, quant, schedule, softmax

BARRIER = 1  # all math threads
COLUMNS = 8  # of a lane's that are merged at a time: 64 of a warp's
PIECE = 4  # of these, that a thread adds up


@dataclass(frozen=True)
class Row:
    """Bytes of a cached row. static: numbers."""

    width: Any  # of a box
    boxes: Any

    @staticmethod
    def of(spec, dim) -> "Row":
        size = dim * spec.kv.bits // 8
        return Row(min(size, copy.SWIZZLE_BYTES), max(1, size // copy.SWIZZLE_BYTES))


def halves(spec):
    """Warps that compute the same scores, for different columns of the output: a warp has registers for 128."""
    return max(1, spec.head_dim_vo // 128)


def warps(spec):
    return 4 * spec.tile.warpgroups


def keys(spec):
    """Keys that a warp computes at a time: where it has none to convert, more registers hold a key."""
    return 32 if spec.kv.dtype else 16


def columns(spec):
    """Columns of the output that a lane's piece of a box, and that all its pieces have."""
    row = Row.of(spec, spec.head_dim_vo)
    each = row.width // spec.kv.bits
    return (each // halves(spec) if row.boxes == 1 else each), spec.head_dim_vo // halves(spec) // 8


def first_column(spec, half, number, eighth):
    """Of the output, of a lane's column `number` on, of half `half`, in the `eighth` of its boxes."""
    row, (each, count) = Row.of(spec, spec.head_dim_vo), columns(spec)
    if row.boxes == 1:
        return eighth * each * halves(spec) + half * each + number
    return (half * (count // each) + number // each) * each * 8 + eighth * each + number % each


@dataclass(frozen=True)
class Meeting:
    """Shared memory in which the warps of a row add up."""

    o: cute.Tensor  # (warp, row, eighth, COLUMNS)
    stats: cute.Tensor  # (warp, row, maximum and sum)
    normal: cute.Tensor  # (row of the tile,) factor that normalises
    q: Any  # (4 words of a lane, lane, 16 of k, 16 rows), unless in registers


def meeting(spec, smem):
    row_major = lambda *shape: cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape)))))  # noqa: E731
    return Meeting(
        smem.allocate_tensor(Float32, row_major(warps(spec), geometry.MMA_ROWS, 8, COLUMNS), 16),
        smem.allocate_tensor(Float32, row_major(warps(spec), geometry.MMA_ROWS, 2), 8),
        smem.allocate_tensor(Float32, cute.make_layout(spec.tile.m)),
        None
        if spec.tile.q_registers
        else smem.allocate_tensor(
            Uint32, cute.make_layout((4, 32, spec.head_dim_qk // 16, spec.tile.m // geometry.MMA_ROWS)), 16
        ),
    )


@dataclass(frozen=True)
class Registers:
    """Fragments of a warp."""

    q: Any  # words of two rows: element 2 w of k of row g, of row g + 8; or in Meeting.q
    unit: cute.Tensor  # what the two rows were divided by
    o: cute.Tensor
    st: softmax.State
    tokens: cute.Tensor
    k_at: cute.Tensor  # offsets of this lane's pieces of rows of K
    v_at: cute.Tensor  # of V: keys 2 t, 2 t + 1
    scales_at: cute.Tensor  # of the scale factors: of K; of V, keys 2 t, 2 t + 1


@dataclass(frozen=True)
class Place:
    """What a warp has of the tile at hand: 16 rows, number `group` of such, every `shares`-th group of `keys`, from
    `share` on, and one of the `halves` of the output."""

    w: schedule.Work
    n: mask.Lengths
    m: Int32  # rows of the tile
    rows: Int32  # of the request
    group: Int32  # of rows in the tile
    share: Int32
    shares: Int32
    half: Int32


def swizzle(width, row, byte):
    """Where TMA puts a byte of a row of a box of `width` bytes, under the widest swizzle that it allows."""
    return row * width + (byte ^ (row * width // 128 % (width // 16) * 16))


def registers(spec, a):
    """Fragments of a warp, with the offsets that never change."""
    rmem = cute.make_rmem_tensor
    lane = cute.arch.lane_idx()
    g, t = lane // 4, lane % 4
    k, v = Row.of(spec, spec.head_dim_qk), Row.of(spec, spec.head_dim_vo)
    pieces = max(1, k.width // 64)
    r = Registers(
        rmem(spec.head_dim_qk // 4, Uint32) if spec.tile.q_registers else None,
        rmem(2, Float32),
        rmem(spec.head_dim_vo // halves(spec) // 2, Float32),
        softmax.make(2),
        *(rmem(count, Int32) for count in (2, pieces, 2, 3)),
    )
    for i in range(pieces):
        r.k_at[i] = swizzle(k.width, g, t * (k.width // 4) + 16 * i)
    for i in range(2):
        r.v_at[i] = swizzle(v.width, 2 * t + i, g * (v.width // 8))
    r.scales_at[0] = g * (spec.head_dim_qk // 16) + t * (spec.head_dim_qk // 64)
    size = spec.head_dim_vo // 16
    block = g * size // 8 + (cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4) % halves(spec)
    for i in range(2):
        key = 2 * t + i
        linear, interleaved = key * size + block, key // 4 * 4 * size + block * 4 + key % 4
        r.scales_at[1 + i] = linear + cutlass.min(a.interleaved, 1) * (interleaved - linear)
    return r


@cute.jit
def place(spec: cutlass.Constexpr, a, w: schedule.Work):
    rows = geometry.tile_rows(w.q_len, geometry.fold(spec, a))
    m = geometry.tile_m(spec, rows)
    number = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4
    half, number = number % halves(spec), number // halves(spec)
    shares = warps(spec) // halves(spec) * geometry.MMA_ROWS // m
    n = schedule.lengths(spec, a, w.q_len, w.kv_len)
    return Place(w, n, m, rows, number // shares, number % shares, shares, half)


def early(spec):
    """Whether Q of a tile is fetched before the merge of the tile before, where registers hold both."""
    return spec.kv.dtype != "nvfp4" or spec.head_dim_qk < 128


@cute.jit
def fetch_q(spec: cutlass.Constexpr, a, w: schedule.Work, words: cute.Tensor):
    """Words (D / 8, 2) of this lane's two rows, zeros past the request: its columns as the cached rows' boxes are."""
    x, row, fold = place(spec, a, w), Row.of(spec, spec.head_dim_qk), geometry.fold(spec, a)
    g, t = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
    vectors = const_expr(row.width * 8 // spec.kv.bits // 4 // 8)  # of a box, 8 elements each
    words.fill(0)
    for k in cutlass.range_constexpr(2):
        at = w.m_block * x.m + 16 * x.group + 8 * k + g
        if at < x.rows:
            source = a.q[w.q_start + geometry.token_of(at, fold, True), geometry.head_of(at, w.head, fold, True), None]
            for i in cutlass.range_constexpr(row.boxes * vectors):
                piece = cute.local_tile(source, (8,), ((i // vectors * 4 + t) * vectors + i % vectors,))
                into = cute.local_tile(words[None, k], (4,), (i,))
                cute.autovec_copy(piece, cute.recast_tensor(into, source.element_type))


@cute.jit
def set_q(spec: cutlass.Constexpr, a, s, r: Registers, x: Place, words: cute.Tensor):
    """Operand A of this warp's rows, in the type that is multiplied and the order of the cached words."""
    fold, fmt = geometry.fold(spec, a), quant.FORMATS[spec.kv.dtype]
    for k in cutlass.range_constexpr(2):
        at = x.w.m_block * x.m + 16 * x.group + 8 * k + cute.arch.lane_idx() // 4
        r.tokens[k] = geometry.token_of(at, fold, True)
        r.unit[k] = Float32(1.0)
        if const_expr(spec.kv.dtype != "" and spec.dtype == "bf16"):
            r.unit[k] = to_fp16(words[None, k])
        ordered = [in_order(fmt, words[None, k], i) for i in range(spec.head_dim_qk // 8)]
        for i in cutlass.range_constexpr(spec.head_dim_qk // 8):
            if const_expr(spec.tile.q_registers):
                r.q[2 * i + k] = ordered[i]
            elif x.share == 0 and x.half == 0:
                s.merge.q[i % 2 * 2 + k, cute.arch.lane_idx(), i // 2, x.group] = ordered[i]
    if const_expr(not spec.tile.q_registers):
        sync(spec)


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
    top = cute.arch.warp_reduction_max(top, threads_in_group=softmax.LANES)
    exponent = cutlass.max(Int32(27), cutlass.min(Int32(227), warp.bits(top) >> 23))
    values.store(values.load() * warp.from_bits((254 - exponent) << 23))
    warp.convert16(values, cute.recast_tensor(words, cutlass.Float16))
    return warp.from_bits(exponent << 23)


def words_of_q(spec, s, r, x, step):
    """Operand A of 16 of k."""
    if spec.tile.q_registers:
        return [r.q[4 * step + c] for c in range(4)]
    offset = cute.crd2idx((0, cute.arch.lane_idx(), step, x.group), s.merge.q.layout)
    return mma.load(s.merge.q.iterator.toint() + 4 * offset, 4)


def issue_qk(spec, s, r, x, scores, stage, row):
    """scores = Q K^T of the rows [row, row + keys) of a stage."""
    name, fmt = quant.operand(spec), quant.FORMATS[spec.kv.dtype]
    k, n, dim, tiles = Row.of(spec, spec.head_dim_qk), spec.tile.n, spec.head_dim_qk, keys(spec) // 8
    base = s.k.iterator.toint() + stage * (n * k.width * k.boxes) + row * k.width
    quarter, operands = k.width // 4, []
    for j in range(tiles):
        words = []
        for b in range(k.boxes):
            for piece in range(max(1, quarter // 16)):
                words += mma.load(base + (b * n + 8 * j) * k.width + r.k_at[piece], min(4, quarter // 4))
        pairs = [fmt.pairs(word) for word in words]
        if spec.kv.dtype == "nvfp4":
            at = s.k_scales.iterator.toint() + (stage * n + row + 8 * j) * (dim // 16) + r.scales_at[0]
            factors = quant.scale_pairs(mma.load_bytes(at, dim // 64))
            each = [quant.permute(factors[b // 2], factors[b // 2], (0x1010, 0x3232)[b % 2]) for b in range(dim // 64)]
            pairs = [[quant.times(pair, each[w // 2]) for pair in some] for w, some in enumerate(pairs)]
        operands.append([pair for some in pairs for pair in some])
    chains = 4 // tiles  # of MMAs for each 8 keys: so many are in flight
    sums = [cute.make_rmem_tensor(cute.size(scores), Float32) for _ in range(chains - 1)]
    for part in (scores, *sums):
        part.fill(0.0)
    for step in range(dim // 16):
        a = words_of_q(spec, s, r, x, step)
        for j in range(tiles):
            mma.issue(name, (scores, *sums)[step % chains], 4 * j, a, operands[j][2 * step : 2 * step + 2])
    for part in sums:
        scores.store(scores.load() + part.load())


@cute.jit
def load_v(spec: cutlass.Constexpr, s, r: Registers, x: Place, at, raw: cute.Tensor, factors: cute.Tensor):
    """This lane's words raw (word, key of 4, 16 keys) of V, and the scale factor of each key; at = (position, first row
    in the stage, its key). Rows past kv_len hold whatever the page held, and 0 * NaN is NaN: zeros."""
    where, row, key = at
    pipe.wait_full_at(s.v_pipe, where)
    v, n, (each, count) = Row.of(spec, spec.head_dim_vo), spec.tile.n, columns(spec)
    stage, t = pipe.stage_of(where), cute.arch.lane_idx() % 4
    base = s.v.iterator.toint() + stage * (n * v.width * v.boxes) + row * v.width
    base += x.half * (each * spec.kv.bits // 8 if const_expr(v.boxes == 1) else v.boxes // halves(spec) * n * v.width)
    per = const_expr(each * spec.kv.bits // 32)
    for c in cutlass.range_constexpr(keys(spec) // 16):
        for e in cutlass.range_constexpr(4):
            inside = const_expr(16 * c + 8 * (e // 2))
            for b in cutlass.range_constexpr(count // each):
                words = mma.load(base + (b * n + inside) * v.width + r.v_at[e % 2], per)
                for u in cutlass.range_constexpr(per):
                    raw[b * per + u, e, c] = words[u]
            if const_expr(spec.kv.dtype == "nvfp4"):
                size = const_expr(spec.head_dim_vo // 16)
                at = s.v_scales.iterator.toint() + (stage * n + row + inside) * size
                factors[e, c] = mma.load_bytes(at + r.scales_at[1 + e % 2], 1)
    if key + keys(spec) > x.w.kv_len:
        for c in cutlass.range_constexpr(keys(spec) // 16):
            for e in cutlass.range_constexpr(4):
                if key + 16 * c + 8 * (e // 2) + 2 * t + e % 2 >= x.w.kv_len:
                    for u in cutlass.range_constexpr(cute.size(raw, mode=[0])):
                        raw[u, e, c] = Uint32(0)
                    factors[e, c] = Uint32(0)


def issue_pv(spec, r, p, raw, factors):
    """O += P V; p: words of P as the scores lie."""
    name, fmt = quant.operand(spec), quant.FORMATS[spec.kv.dtype]
    for c in range(keys(spec) // 16):
        a = [p[4 * c + i] for i in range(4)]
        if spec.kv.dtype == "nvfp4":
            word = factors[0, c] | factors[1, c] << 8 | factors[2, c] << 16 | factors[3, c] << 24
            scales = quant.scale_pairs(word)
        for u in range(cute.size(raw, mode=[0])):
            both = [fmt.values(raw[u, 2 * e, c], raw[u, 2 * e + 1, c]) for e in range(2)]
            if spec.kv.dtype == "nvfp4":
                both = [[quant.times(pair, scales[e]) for pair in both[e]] for e in range(2)]
            for element, pairs in zip(fmt.order, zip(*both)):
                mma.issue(name, r.o, 4 * (u * fmt.elements + element), a, pairs)


def rows_view(fragment):
    """(2 rows, columns) of an accumulator."""
    tiles = cute.size(fragment) // 4
    return cute.make_tensor(fragment.iterator, cute.make_layout((2, (2, tiles)), stride=(2, (1, 4))))


@cute.jit
def mask_scores(spec: cutlass.Constexpr, a, view: cute.Tensor, r: Registers, x: Place, key: Int32):
    """-inf where a row does not see one of the keys that begin with `key`."""
    cols = [8 * j + e for j in range(keys(spec) // 8) for e in range(2)]
    key += cute.arch.lane_idx() % 4 * 2
    mask.apply(spec, view, r.tokens, cols, key, x.n)
    if x.n.drafts != 0:
        drafts = cute.domain_offset((x.w.q_start, 0), a.drafts)
        mask.apply_drafts(view, drafts, r.tokens, cols, key - (x.w.kv_len - x.w.q_len))


@cute.jit
def skips(view: cute.Tensor, r: Registers, x: Place, score_scale: Float32, least: Float32):
    """Skip-softmax: whether each row of this warp finds all these keys below its maximum so far by the threshold."""
    votes = True
    for k in cutlass.range_constexpr(2):
        top = cute.arch.warp_reduction_max(
            softmax.reduce(view[k, None], cute.arch.fmax), threads_in_group=softmax.LANES
        )
        below = top == -Float32.inf or (top - r.st.m[k]) * score_scale < least
        votes = votes and (below or r.tokens[k] >= x.w.q_len)
    return cute.arch.vote_all_sync(votes)


@cute.jit
def probabilities(spec: cutlass.Constexpr, a, r: Registers, x: Place, scales, at, scores: cute.Tensor, p: cute.Tensor):
    """Scores of keys `key` on, of KV block j, to words of P, unless skip-softmax leaves them out; whether they count.
    scales = (raw score -> log2 units, what is reduced -> these); at = (j, key)."""
    view, (j, key) = rows_view(scores), at
    if const_expr(spec.kv.dtype != "" and spec.dtype == "bf16"):
        for k in cutlass.range_constexpr(2):
            view[k, None].store(view[k, None].load() * r.unit[k])
    if a.soft_cap > 0.0:
        softmax.cap_scores(scores, scales[0], a.soft_cap)
    if j >= x.w.full_hi or j < x.w.full_lo:
        mask_scores(spec, a, view, r, x, key)
    count = True
    if a.skip != -Float32.inf:
        count = not skips(view, r, x, scales[1], a.skip - cute.math.log2(Float32(x.w.kv_len), fastmath=True))
    if count:
        softmax.maxima(r.st, view, scales[1])
        for k in cutlass.range_constexpr(2):
            softmax.exponentials(r.st, view, scales[1], k)
        warp.convert16(scores, cute.recast_tensor(p, abi.DTYPES[quant.operand(spec)]))
        softmax.rescale(r.st, rows_view(r.o))
    return count


@cute.jit
def run(spec: cutlass.Constexpr, a, s, r: Registers, x: Place, scales, at: Int32):
    """O of this warp's keys of all KV blocks, from position `at` of the pipes on; the position behind. PV of some keys
    is issued behind QK of the next ones, whose latency it hides."""
    softmax.reset(r.st)
    r.o.fill(0.0)
    scores = cute.make_rmem_tensor(keys(spec) // 2, Float32)
    p = cute.make_rmem_tensor(keys(spec) // 4, Uint32)
    raw = cute.make_rmem_tensor((columns(spec)[1] * spec.kv.bits // 32, 4, keys(spec) // 16), Uint32)
    factors = cute.make_rmem_tensor((4, keys(spec) // 16), Uint32)
    unread = False  # whether the stage of V in `before` is to be freed
    owed, before, row = False, (at, Int32(0), Int32(0)), x.share * keys(spec)
    for j in cutlass.range(x.w.hi - 1, x.w.lo - 1, -1, unroll=1):
        pipe.wait_full_at(s.k_pipe, at)
        while row < spec.tile.n:
            issue_qk(spec, s, r, x, scores, pipe.stage_of(at), row)
            if owed:
                load_v(spec, s, r, x, before, raw, factors)
                issue_pv(spec, r, p, raw, factors)
            if unread and before[0] != at:
                free_v(s, before[0])
            unread, before = True, (at, row, j * spec.tile.n + row)
            owed = probabilities(spec, a, r, x, scales, (j, before[2]), scores, p)
            row += x.shares * keys(spec)
        row -= spec.tile.n
        pipe.release_at(s.k_pipe, at)
        if not unread or before[0] != at:  # no keys of this warp
            free_v(s, at)
        at = pipe.behind(s.k_pipe, at)
    if owed:
        load_v(spec, s, r, x, before, raw, factors)
        issue_pv(spec, r, p, raw, factors)
    if unread:
        free_v(s, before[0])
    return at


def free_v(s, at):
    """Nobody frees a stage that is being filled, though it may have no use for it."""
    pipe.wait_full_at(s.v_pipe, at)
    pipe.release_at(s.v_pipe, at)


def sync(spec):
    cute.arch.barrier(barrier_id=BARRIER, number_of_threads=32 * warps(spec))


@cute.jit
def weigh(spec: cutlass.Constexpr, a, s, r: Registers, x: Place, scales):
    """Scale this warp's O to the maximum of all the keys of its rows; what normalises a row goes to s.merge.normal, its
    LSE to where it belongs."""
    own = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4
    g, t = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
    most = const_expr((warps(spec) // halves(spec) + 3) // 4)
    for k in cutlass.range_constexpr(2):
        total = cute.arch.warp_reduction_sum(r.st.l[k], threads_in_group=softmax.LANES)
        if t == 0:
            s.merge.stats[own, 8 * k + g, 0] = r.st.m[k] * scales[1]
            s.merge.stats[own, 8 * k + g, 1] = total
    sync(spec)
    view = rows_view(r.o)
    for k in cutlass.range_constexpr(2):  # a lane of a quad looks at every fourth warp
        tops, sums = [-Float32.inf] * most, [Float32(0.0)] * most
        for c in cutlass.range_constexpr(most):
            if 4 * c + t < x.shares:
                other = (x.group * x.shares + 4 * c + t) * halves(spec)
                tops[c], sums[c] = s.merge.stats[other, 8 * k + g, 0], s.merge.stats[other, 8 * k + g, 1]
        top = cute.arch.warp_reduction_max(functools.reduce(cute.arch.fmax, tops), threads_in_group=softmax.LANES)
        base = Float32(0.0) if top == -Float32.inf else top
        total = Float32(0.0)
        for c in cutlass.range_constexpr(most):
            total += sums[c] * cute.math.exp2(tops[c] - base, fastmath=True)
        total = cute.arch.warp_reduction_sum(total, threads_in_group=softmax.LANES)
        mine = cute.math.exp2(r.st.m[k] * scales[1] - base, fastmath=True)
        view[k, None].store(view[k, None].load() * mine)
        if x.share == 0 and x.half == 0 and t == 0:
            row = 16 * x.group + 8 * k + g
            at = x.w.m_block * x.m + row
            if at < x.rows:
                s.merge.normal[row] = normalise(spec, a, x, (top, total), (row, at))


@cute.jit
def normalise(spec: cutlass.Constexpr, a, x: Place, sums, rows):
    """Factor on the merged O of a row, whose LSE is written; rows = (of the tile, of the request)."""
    (top, total), (row, at) = sums, rows
    fold = geometry.fold(spec, a)
    factor, lse = Float32(0.0), Float32(0.0)
    if x.w.slot >= 0:
        factor, lse = softmax.close(top, total, -Float32.inf)
        a.part[x.w.slot, row, spec.head_dim_vo] = lse
    else:
        token, head = x.w.q_start + geometry.token_of(at, fold, True), geometry.head_of(at, x.w.head, fold, True)
        factor, lse = softmax.close(top, total, epilogue.sink_of(a, head))
        factor *= softmax.factor(a.out_factor, a.out_scale)
        if a.lse.shape[0] > 0:
            a.lse[token, head] = lse
    return factor


@cute.jit
def merge(spec: cutlass.Constexpr, a, s, r: Registers, x: Place, scales):
    """The tile's output, or its part's: the warps of a row add up what they have, COLUMNS of a lane at a time."""
    weigh(spec, a, s, r, x, scales)
    own, tid = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4, cute.arch.thread_idx()[0] - 128
    g, t, fold = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4, geometry.fold(spec, a)
    left = x.rows - x.w.m_block * x.m  # rows of this tile and later ones
    for number in cutlass.range_constexpr(0, columns(spec)[1], COLUMNS):
        for k in cutlass.range_constexpr(2):
            if 16 * x.group + 8 * k < left:
                for e in cutlass.range_constexpr(2):
                    piece = cute.make_rmem_tensor(COLUMNS, Float32)
                    for u in cutlass.range_constexpr(COLUMNS):
                        piece[u] = r.o[4 * (number + u) + 2 * k + e]
                    cute.autovec_copy(piece, s.merge.o[own, 8 * k + g, (2 * t + e) ^ g, None])
        sync(spec)
        pieces = const_expr(COLUMNS // PIECE)
        for index in cutlass.range(tid, 8 * pieces * halves(spec) * cutlass.min(left, x.m), 32 * warps(spec), unroll=1):
            part, eighth, half = index % pieces, index // pieces % 8, index // pieces // 8 % halves(spec)
            row = index // pieces // 8 // halves(spec)
            total, piece = cute.make_rmem_tensor(PIECE, Float32), cute.make_rmem_tensor(PIECE, Float32)
            total.fill(0.0)
            for c in cutlass.range(x.shares, unroll=4):
                other = (row // 16 * x.shares + c) * halves(spec) + half
                source = s.merge.o[other, row % 16, eighth ^ (row % 8), None]
                cute.autovec_copy(cute.local_tile(source, (PIECE,), (part,)), piece)
                total.store(total.load() + piece.load())
            total.store(total.load() * s.merge.normal[row])
            column = first_column(spec, half, number, eighth) // PIECE + part
            if x.w.slot >= 0:
                cute.autovec_copy(total, cute.local_tile(a.part[x.w.slot, row, None], (PIECE,), (column,)))
            else:
                at = x.w.m_block * x.m + row
                token, head = geometry.token_of(at, fold, True), geometry.head_of(at, x.w.head, fold, True)
                epilogue.store_piece(a, x.w.q_start + token, head, column, total)
        sync(spec)


@cute.jit
def math(spec: cutlass.Constexpr, plan, s):
    a = plan.args
    r = registers(spec, a)
    scale_log2 = softmax.factor(a.scale_log2, a.scale)
    scales = (scale_log2, softmax.capped_scale(a.soft_cap) if a.soft_cap > 0.0 else scale_log2)
    at, t = Int32(0), Int32(0)
    words = cute.make_rmem_tensor((spec.head_dim_qk // 8, 2), Uint32)
    w = schedule.hear(s, t)
    if const_expr(early(spec)) and w.valid != 0:
        fetch_q(spec, a, w, words)
    while w.valid != 0:
        x = place(spec, a, w)
        if const_expr(not early(spec)):
            fetch_q(spec, a, w, words)
        set_q(spec, a, s, r, x, words)
        at = run(spec, a, s, r, x, scales, at)
        t += 1
        w = schedule.hear(s, t)
        if const_expr(early(spec)) and w.valid != 0:
            fetch_q(spec, a, w, words)
        merge(spec, a, s, r, x, scales)
