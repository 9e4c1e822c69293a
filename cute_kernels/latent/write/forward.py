"""Write rows of latent attention to a cache, and join the parts of queries: host part and device entry.

A warp takes rows in turn: the key of a token, or one head of its query. Lane l holds values 16 l to 16 l + 15 of the
latent, and pair l of the rotated part, so that a factor of 16 to 128 values belongs to 1 to 8 neighbouring lanes. The
rows of an indexer are in `indexer`. There is no shared memory, and no barrier.

| phase | threads | reads | waits for | writes / signals |
| --- | --- | --- | --- | --- |
| entry | all | | `griddepcontrol.wait`: the kernels that made the rows | `launch_dependents` |
| `request` | a warp per row | both parts of K or Q, slot, position | | registers |
| `write_key` | | table | the row; its lanes, by shuffles | a row of the cache |
| `write_query` | | table | the row | a row of Q's output |
| `indexer.write_rows` | 8 lanes per row | a row, slot, table | its lanes, by shuffles | cache, Q, weights |

Every CTA waits for the grid before it, so a kernel that waits for this one sees what both have written."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32, const_expr

from ... import abi
from ...cache_write import places, store
from ...device import memory, warp
from ...device.divisor import divide
from ..args import LatentArgs, fields, indexer_args, pack
from . import THREADS, VALUES, WARP, ctas_per_sm, factors, indexer, rotation, whole


def fake_args(spec) -> dict[str, Any]:
    dtype = abi.DTYPES[spec.dtype]
    tensors = [
        (dtype, 1, "weight bias i_weight i_bias"),
        (dtype, 2, "kv pe rope_rows pe_out i_kv i_rope_rows"),
        (dtype, 3, "q q_pe q_out i_q"),
        (abi.DTYPES["e4m3"], 3, "q_fp8 i_q_fp8"),
        (Float32, 1, "scale_ptr q_scale_ptr"),
        (Float32, 2, "rope_table weights weights_out i_rope_table"),
        (Int32, 1, "slots batch_indices positions kv_indices kv_indptr cu_seqlens kv_lens rope_positions"),
        (Int32, 1, "i_slots i_rope_positions"),
        (Int32, 2, "page_table"),
    ]
    found: dict[str, Any] = {
        name: abi.tensor(kind, (None,) * rank, align=kind.width // 8)
        for kind, rank, names in tensors
        for name in names.split()
    }
    for name, form in (("cache", spec.form), ("pe_cache", spec.form), ("i_cache", spec.indexer.form)):
        found[name] = abi.tensor(cutlass.Uint8, (None,) * 3, align=form.unit, stride_divisibility=form.unit)
    found |= dict.fromkeys(("scale", "q_scale", "norm_eps", "norm_offset", "weight_scale", "i_norm_eps"), Float32(1.0))
    return {name: found.get(name, Int32(0)) for name in fields(spec)}


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    a = pack(spec, flat)
    kernel(spec, a).launch(
        grid=[a.ctas, 1, 1],
        block=[THREADS, 1, 1],
        stream=stream,
        use_pdl=a.enable_pdl,
        min_blocks_per_mp=ctas_per_sm(spec),
        preferred_smem_carveout=1,  # percent: the L1 cache gets the rest
    )


def tokens_of(a):
    """Return the number of tokens of a launch: those of keys or, if there are none, those of queries."""
    return cutlass.max(a.kv.shape[0], a.q_pe.shape[0])


@cute.kernel
def kernel(spec: cutlass.Constexpr, a: LatentArgs):
    warp = cute.arch.block_idx()[0] * (THREADS // WARP) + cute.arch.thread_idx()[0] // WARP
    step = cute.arch.grid_dim()[0] * (THREADS // WARP)
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    if const_expr(spec.index):
        if whole.applies_to_index(spec, a):
            whole.write_index_rows(spec, a, warp, step)
        else:
            indexer.write_rows(spec, a, warp, step)
    elif whole.applies(spec, a):
        whole.write_rows(spec, a, warp, step)
    else:
        write_rows(spec, a, warp, step)
    if const_expr(spec.joined):
        # the warp that is next in turn has the first of these rows
        first = warp - tokens_of(a) * (1 + a.q_pe.shape[1]) % step
        indexer.write_rows(spec.indexer, indexer_args(a), first if first >= 0 else first + step, step)


class LanePair(NamedTuple):
    """Where a lane's pair of the rotated part is: numbers of both values. exists: whether the lane has one."""

    first: Int32
    second: Int32
    exists: cutlass.Boolean


@cute.jit
def pair_of(a, lane: Int32, rotated: Int32) -> LanePair:
    """Return the pair of a lane. rotated: values of the rotated part."""
    half, first, second = rotated >> 1, 2 * lane, 2 * lane + 1
    if not rotation.interleaved(a):
        first, second = lane, lane + half
    return LanePair(first, second, lane < half)


class Pair(NamedTuple):
    """A lane's pair of the rotated part, in registers: as it is stored, and in fp32."""

    halves: cute.Tensor
    values: cute.Tensor


def new_pair() -> Pair:
    """Return a pair of zeros."""
    halves, values = cute.make_rmem_tensor(2, Uint16), cute.make_rmem_tensor(2, Float32)
    halves.fill(0)
    values.fill(0.0)
    return Pair(halves, values)


@cute.jit
def load_pair(spec: cutlass.Constexpr, address: Int64, at: LanePair, pair: Pair):
    """Load a lane's pair of a row, if it has one, as it is stored."""
    if at.exists:
        for i in cutlass.range_constexpr(2):
            pair.halves[i] = memory.view(address + 2 * at[i], Uint16, 1, 2)[0]


def round_pair(spec, pair: Pair):
    """Round the values of a pair to the rows' type."""
    word = warp.pack_16bit(memory.HALVES[spec.dtype], pair.values[0], pair.values[1])
    pair.halves[0], pair.halves[1] = word.to(Uint16), (word >> 16).to(Uint16)


@cute.jit
def turn_pair(spec: cutlass.Constexpr, a, turn: rotation.RowTurn, lane: Int32, rotated: Int32, pair: Pair):
    """Rotate a lane's pair."""
    if turn.turns and lane < (rotated >> 1):
        cos, sin = rotation.cosine_and_sine(spec, a, turn, lane, rotated)
        pair.values[0], pair.values[1] = rotation.turned(pair.values[0], pair.values[1], cos, sin)
        round_pair(spec, pair)


@cute.jit
def store_pair(address: Int64, at: LanePair, pair: Pair):
    """Store a lane's pair to a row of 16 bits."""
    if at.exists:
        for i in cutlass.range_constexpr(2):
            memory.view(address + 2 * at[i], Uint16, 1, 2)[0] = pair.halves[i]


@cute.jit
def store_pair_e4m3(address: Int64, at: LanePair, pair: Pair, scale: Float32):
    """Store a lane's pair, divided by a scale, to a row of e4m3."""
    if at.exists:
        inverse = store.reciprocal(scale)
        for i in cutlass.range_constexpr(2):
            byte = factors.e4m3_byte(store.quotient(pair.values[i], scale, inverse))
            memory.view(address + at[i], Uint8, 1, 1)[0] = byte.to(Uint8)


@cute.jit
def load_latent(address: Int64, lane: Int32, dim: Int32, words: cute.Tensor):
    """Load a lane's values of a row of 16 bits as words (4, 2); zeros past the row."""
    for half in cutlass.range_constexpr(2):
        first = lane * VALUES + half * (VALUES // 2)
        if first < dim:
            memory.load(address + 2 * first, words[None, half], dim - first, 2)
        else:
            words[None, half].fill(0)


@cute.jit
def normalise(
    spec: cutlass.Constexpr, a, lane: Int32, values: cute.Tensor, pair: Pair, at: LanePair
):  # fmt: skip
    """Multiply a row by its inverse root mean square and by the weights, which may be of the rotated part, too."""
    latent, both = a.kv.shape[1], a.weight.shape[0] > a.kv.shape[1]
    total, inside = Float32(0.0), lane * VALUES < a.weight.shape[0]
    for e in cutlass.range_constexpr(VALUES):
        total = warp.fma(values[e], values[e], total)
    total = total if inside else Float32(0.0)
    if const_expr(spec.form.rotated_as != "codes"):
        if both:
            for i in cutlass.range_constexpr(2):
                total = warp.fma(pair.values[i], pair.values[i], total)
    for i in cutlass.range_constexpr(5):
        total += cute.arch.shuffle_sync_bfly(total, 1 << i)
    mean = store.divided(total, Float32(a.weight.shape[0]))
    inverse = cute.math.rsqrt(mean + a.norm_eps, fastmath=True)
    words, weights = cute.make_rmem_tensor((4, 2), Uint32), cute.make_rmem_tensor(VALUES, Float32)
    load_latent(a.weight.iterator.toint(), lane, a.weight.shape[0], words)
    unpack(spec, words, weights)
    if inside:
        for e in cutlass.range_constexpr(VALUES):
            values[e] = values[e] * inverse * (weights[e] + a.norm_offset)
    if const_expr(spec.form.rotated_as != "codes"):
        if both and at.exists:
            address = a.weight.iterator.toint() + 2 * latent
            for i in cutlass.range_constexpr(2):
                weight = rotation.narrow_value(spec, address + 2 * at[i])
                pair.values[i] = pair.values[i] * inverse * (weight + a.norm_offset)
            round_pair(spec, pair)


def unpack(spec, words, values):
    """Convert words (4, 2) of 16 bits to 16 values."""
    for half in range(2):
        memory.unpack(spec.dtype, words[None, half], cute.make_tensor(values.iterator + 8 * half, cute.make_layout(8)))


class RowRequest(NamedTuple):
    """A row that a warp has requested. own: 0 for the key of the token, h + 1 for head h of its query."""

    token: Int32
    own: Int32
    slot: places.IndexWords
    turned: places.IndexWords


@cute.jit
def request(spec: cutlass.Constexpr, a, row: Int32, words: cute.Tensor, pair: Pair) -> RowRequest:
    """Request a row, its slot and its position: nothing waits for them before `write_row`. words: of the latent."""
    each, lane = 1 + a.q_pe.shape[1], cute.arch.lane_idx()
    token = divide(row, each)
    own = row - token * each
    slot = places.request_slot(a, token)
    turned = places.request_rope_position(a, token)
    if own == 0:
        if token < a.kv.shape[0]:
            latent, rotated = a.kv.shape[1], a.pe.shape[1]
            load_latent(memory.row_of(a.kv, token), lane, latent, words)
            source = memory.row_of(a.pe, token)
            if const_expr(spec.form.rotated_as == "codes"):
                inside = lane - latent // VALUES  # lanes behind those of the latent
                if inside >= 0 and rotated > 0:
                    load_latent(source, inside, rotated, words)
            else:
                load_pair(spec, source, pair_of(a, lane, rotated), pair)
    else:
        load_latent(memory.row_of(a.q, token, own - 1), lane, a.q.shape[2], words)
        load_pair(spec, memory.row_of(a.q_pe, token, own - 1), pair_of(a, lane, a.q_pe.shape[2]), pair)
    return RowRequest(token, own, slot, turned)


# The loop over the rows of a warp: one iteration per row.
#   waits for   the loads of the row, which the iteration before issued; in shuffles, for the other lanes
#   computes    norm, rotation, factors and codes, in registers
#   stores      the row
# The next row is requested before this one is worked on.
@cute.jit
def write_rows(spec: cutlass.Constexpr, a, row: Int32, step: Int32):
    """Write every `step`-th row of keys and queries, from one on."""
    rows = tokens_of(a) * (1 + a.q_pe.shape[1])
    words, pair = cute.make_rmem_tensor((4, 2), Uint32), new_pair()
    held, held_pair = cute.make_rmem_tensor((4, 2), Uint32), new_pair()
    words.fill(0)
    none = places.IndexWords(Int32(-1), Int32(-1))
    at = RowRequest(Int32(0), Int32(0), none, none)
    if row < rows:
        at = request(spec, a, row, words, pair)
    while row < rows:
        own = at
        for i in cutlass.range_constexpr(cute.size(words)):
            held[i] = words[i]
        for i in cutlass.range_constexpr(2):
            held_pair.halves[i] = pair.halves[i]
        row += step
        if row < rows:
            at = request(spec, a, row, words, pair)
        word = held_pair.halves[0].to(Uint32) | held_pair.halves[1].to(Uint32) << 16
        held_pair.values[0], held_pair.values[1] = memory.widen(spec.dtype, word)
        if own.own == 0:
            write_key(spec, a, own, held, held_pair)
        else:
            write_query(spec, a, own, held, held_pair)


@cute.jit
def write_key(spec: cutlass.Constexpr, a, row: RowRequest, words: cute.Tensor, pair: Pair):
    """Write the key of a token to its place in the cache, if it has one."""
    lane, form = cute.arch.lane_idx(), const_expr(spec.form)
    latent, rotated = a.kv.shape[1], a.pe.shape[1]
    if row.token < a.kv.shape[0]:
        values, at = cute.make_rmem_tensor(VALUES, Float32), pair_of(a, lane, rotated)
        unpack(spec, words, values)
        position = places.position_of(a, row.token)
        turn = rotation.turn_of(a, position, row.turned)
        pool = places.PagePool(a.cache.shape[0], a.cache.shape[1])
        place = places.place_of(a, pool, row.token, position, row.slot)
        if a.weight.shape[0] > 0:
            normalise(spec, a, lane, values, pair, at)
            for half in cutlass.range_constexpr(2):
                eight = cute.make_tensor(values.iterator + 8 * half, cute.make_layout(8))
                memory.pack(spec.dtype, eight, words[None, half])
        if const_expr(form.rotated_as == "codes"):
            rotation.turn_values(spec, a, turn, values, Int32(lane * VALUES - latent), rotated, Uint32(factors.ALL))
        else:
            turn_pair(spec, a, turn, lane, rotated, pair)
        if turn.exists:
            if row.token < a.pe_out.shape[0]:
                store_pair(memory.row_of(a.pe_out, row.token), at, pair)
            if place.page >= 0:
                store_key(spec, a, lane, place, values, words, pair)


@cute.jit
def store_key(
    spec: cutlass.Constexpr, a, lane: Int32, place: places.CachePlace, values: cute.Tensor, words: cute.Tensor,
    pair: Pair,
):  # fmt: skip
    """Store a row of the cache. words: the latent in the rows' type; values: in fp32."""
    form, latent = const_expr(spec.form), a.kv.shape[1]
    page = a.cache.iterator.toint() + Int64(place.page) * a.cache.stride[0]
    if const_expr(form.planar):
        address = page + Int64(place.row) * form.row
        behind = page + Int64(a.cache.shape[1]) * form.row + Int64(place.row) * form.factor_row
    else:
        address = page + Int64(place.row) * a.cache.stride[1]
        behind = address + form.factors_at
    if const_expr(form.codes == ""):
        for half in cutlass.range_constexpr(2):
            first = lane * VALUES + half * (VALUES // 2)
            if first < latent:
                memory.store(address + 2 * first, words[None, half], latent - first, 2)
    elif const_expr(form.codes == "e2m1"):
        f = factors.block_scale(values)
        factors.store_e2m1_factor(spec, behind, lane, f)
        memory.store(address + lane * (VALUES // 2), factors.e2m1_words(values, f), Int32(VALUES // 2), 1)
    else:
        scale = a.scale
        if a.scale_ptr.shape[0] > 0:
            scale = a.scale_ptr[0]
        many = latent
        if const_expr(form.vec > 0):
            lanes = const_expr(form.vec // VALUES)
            scale = factors.scale_of(spec, a, factors.largest(values, lanes, Uint32(factors.ALL)))
            many = Int32(form.latent)
            if lane % lanes == 0 and lane * VALUES < many:
                size = const_expr(4 if form.factor == "fp32" else 1)
                factors.store_factor(spec, behind + (lane // lanes) * size, scale)
        if lane * VALUES < many:
            out = factors.e4m3_words(spec, a, values, scale)
            memory.store(address + lane * VALUES, out, Int32(VALUES), 1)
    if const_expr(form.rotated_as != "codes"):
        at = pair_of(a, lane, Int32(form.rotated or a.pe.shape[1]))
        size = const_expr(1 if form.rotated_as == "e4m3" else 2)
        target = address + form.rotated_at
        if const_expr(form.row == 0):
            target = address + size * latent
        if a.pe_cache.shape[0] > 0:
            target = a.pe_cache.iterator.toint() + Int64(place.page) * a.pe_cache.stride[0]
            target += Int64(place.row) * a.pe_cache.stride[1]
        if const_expr(form.rotated_as == "e4m3"):
            scale = Float32(1.0)
            if const_expr(form.vec == 0):
                scale = a.scale
                if a.scale_ptr.shape[0] > 0:
                    scale = a.scale_ptr[0]
            store_pair_e4m3(target, at, pair, scale)
        else:
            store_pair(target, at, pair)


@cute.jit
def write_query(spec: cutlass.Constexpr, a, row: RowRequest, words: cute.Tensor, pair: Pair):
    """Join and rotate the parts of a head of a token's query, and store them in 16 or 8 bits."""
    lane, head = cute.arch.lane_idx(), row.own - 1
    latent, rotated = a.q.shape[2], a.q_pe.shape[2]
    at = pair_of(a, lane, rotated)
    turn = rotation.turn_of(a, places.position_of(a, row.token), row.turned)
    turn_pair(spec, a, turn, lane, rotated, pair)
    if turn.exists:
        if a.q_out.shape[0] > 0:
            target = memory.row_of(a.q_out, row.token, head)
            for half in cutlass.range_constexpr(2):
                first = lane * VALUES + half * (VALUES // 2)
                if first < latent:
                    memory.store(target + 2 * first, words[None, half], latent - first, 2)
            store_pair(target + 2 * latent, at, pair)
        if a.q_fp8.shape[0] > 0:
            target, scale = memory.row_of(a.q_fp8, row.token, head), a.q_scale
            if a.q_scale_ptr.shape[0] > 0:
                scale = a.q_scale_ptr[0]
            values = cute.make_rmem_tensor(VALUES, Float32)
            unpack(spec, words, values)
            if lane * VALUES < latent:
                out = store.narrow_words("e4m3", values, scale, store.reciprocal(scale))
                memory.store(target + lane * VALUES, out, Int32(VALUES), 1)
            store_pair_e4m3(target + latent, at, pair, scale)
