"""Write rows of K and V to a cache, and rows of Q to a tensor: host part and device entry.

A group of 2 to 32 lanes handles rows of one token. A lane handles two vectors of 16 bytes of a row: vectors `lane` and
`lane + lanes`, so that neighbouring lanes access neighbouring vectors; for NVFP4 without transform, the two vectors of
a block, so that no other lane has a part of it. Only rows that are not transformed may be longer; they take more
rounds. There is no shared memory, and no barrier.

| phase | threads | reads | waits for | writes / signals |
| --- | --- | --- | --- | --- |
| entry | all | the launch's arguments | `griddepcontrol.wait`: the kernel that made the rows | `launch_dependents` |
| `places` | all | index tensors | | page and row in registers |
| `load_rotation` | all | `rope_table` | | cosines and sines in registers, for all rows |
| `transform_rows` | groups of rows of Q, K and V | Q, K, V, weights | its group, by shuffles | Q's output, the cache |
| `plain_rows` | groups of rows of K, or of V | K or V | | the cache |
| `whole` | as these two, in launches of whole, aligned vectors | | | |
| `gather_rows` | groups of rows of Q or K | Q, or K in the cache | | new Q, K and page table |

The entry computes what depends on the arguments alone, such as the address of a first row, before its wait, while the
kernel before may still run. Every CTA waits for the grid before it, so a kernel that waits for this one sees what both
have written. The kernel that dequantises has an entry of its own, in `dequantise`."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ... import abi
from ...device import memory
from .. import places, rotate, store
from ..args import CacheWriteArgs, fields, pack
from ..spec import BYTES, SF_VEC_SIZE
from . import THREADS, ctas_per_sm, dequantise, gather, whole
from .whole import K, Q, TokenParams, V, row_count


def fake_args(spec) -> dict[str, Any]:
    dtype, cached = (abi.DTYPES[name] for name in (spec.dtype, spec.cache))

    tensors = [
        (dtype, 1, "q_weight k_weight"),
        (Int32, 1, "kv_lens_out"),
        (dtype, 3, "k v q q_out"),
        (cached, 4, "k_cache v_cache"),
        (abi.DTYPES[spec.q_cache], 3, "q_fp8"),
        (cutlass.Uint8, 4, "k_sf v_sf"),
        (cutlass.Uint8, 1, "sf"),
        (Float32, 1, "k_scale_ptr v_scale_ptr q_scale_ptr"),
        (Int32, 1, "slots batch_indices positions kv_indices kv_indptr cu_seqlens kv_lens rope_positions"),
        (Int32, 2, "page_table"),
        (Int32, 3, "tables tables_out"),
    ]
    found: dict[str, Any] = {
        name: abi.tensor(kind, (None,) * rank, align=kind.width // 8)
        for kind, rank, names in tensors
        for name in names.split()
    }
    for name in ("rope_cos", "rope_sin"):
        found[name] = abi.tensor(dtype, (None, None), align=8, stride_divisibility=4)
    if spec.gather:  # vectors need no other path: attention kernels refuse these tensors too
        for name in ("q", "k", "q_out", "k_cache"):
            rank = 4 if name == "k_cache" else 3
            found[name] = abi.tensor(dtype, (None,) * rank, align=16, stride_divisibility=8)
    found["rope_table"] = abi.tensor(Float32, (None, None), align=16, stride_divisibility=4)
    found["codes"] = abi.tensor(cutlass.Uint8, (None, SF_VEC_SIZE // 2), align=1)
    found["values"] = abi.tensor(Float32, (None, SF_VEC_SIZE), align=16, stride_divisibility=4)
    found |= dict.fromkeys(("k_scale", "v_scale", "q_scale", "norm_eps", "norm_offset"), Float32(1.0))
    return {name: found.get(name, Int32(0)) for name in fields(spec)}


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    a = pack(spec, flat)
    run = dequantise.kernel(a) if const_expr(spec.dequantises) else kernel(spec, a)
    run.launch(
        grid=[Int32(dequantise.grid(a) if const_expr(spec.dequantises) else grid(spec, a)), 1, 1],
        block=[THREADS, 1, 1],
        stream=stream,
        use_pdl=a.enable_pdl,
        min_blocks_per_mp=ctas_per_sm(spec),
        preferred_smem_carveout=1,  # percent: the L1 cache gets the rest
    )


def grid(spec, a):
    """Return the number of CTAs."""
    groups = Int64(tokens_of(spec, a)) * (a.k_groups + a.v_groups)
    return ((groups << a.lanes_log2) + THREADS - 1) // THREADS


class LaneGroup(NamedTuple):
    """The lanes that handle rows of one token. lane: of this thread in the group. own: number of the group among those
    of its token: first those of K, then those of V."""

    lane: Int32
    lanes: Int32
    token: Int32
    own: Int32


class RowRange(NamedTuple):
    """Rows of a token of one operand, K or V; source: address of head 0. dim: elements of a row. The group handles
    heads first, first + step, ..."""

    is_v: cutlass.Boolean
    source: Int64
    source_stride: Int64  # bytes per head
    dim: Int32
    first: Int32
    step: Int32
    heads: Int32


def group_of(a) -> LaneGroup:
    """Return the group of this thread; its token may be past the last one."""
    tid = cute.arch.thread_idx()[0]
    group = cute.arch.block_idx()[0] * (Int32(THREADS) >> a.lanes_log2) + (tid >> a.lanes_log2)
    each = a.k_groups + a.v_groups
    lanes = Int32(1) << a.lanes_log2
    token = places.divide(group, each)
    return LaneGroup(tid & (lanes - 1), lanes, token, group - token * each)


def tokens_of(spec, a):
    """Return the number of tokens of a launch; gather: the rows of Q, then those of K."""
    return a.q.shape[0] + a.k.shape[0] if spec.gather else a.k.shape[0]


class CacheStrides(NamedTuple):
    """Strides of a cache or of its scale factors, in bytes."""

    page: Int64
    head: Int64
    row: Int64


@cute.jit
def strides_of(a, cache: cute.Tensor) -> CacheStrides:
    head, row = memory.bytes_of(cache, 1), memory.bytes_of(cache, 2)
    if a.nhd > 0:
        head, row = row, head
    return CacheStrides(memory.bytes_of(cache, 0), head, row)


@cute.jit
def rows_of(a, g: LaneGroup) -> RowRange:
    """Return the rows of a group: of K or, in the last groups of a token, of V."""
    is_v, source, source_stride = g.own >= a.k_groups, memory.row_of(a.k, g.token, 0), memory.bytes_of(a.k, 1)
    dim, first, step, heads = a.k.shape[2], g.own, a.k_groups, a.k.shape[1]
    if is_v:
        source, source_stride = memory.row_of(a.v, g.token, 0), memory.bytes_of(a.v, 1)
        dim, first, step, heads = a.v.shape[2], g.own - a.k_groups, a.v_groups, a.v.shape[1]
    return RowRange(is_v, source, source_stride, dim, first, step, heads)


class TargetRows(NamedTuple):
    """The rows of all heads of K or V at a place of the cache. first: that of head 0, without its scale. Strides are in
    bytes per head."""

    is_v: cutlass.Boolean
    first: store.TargetRow
    stride: Int64
    sf_stride: Int64


@cute.jit
def targets_of(spec: cutlass.Constexpr, a, is_v, at: places.CachePlace) -> TargetRows:
    """Return the rows of the cache of K or V at a place."""
    interleaved, base, strides = Int32(0), a.k_cache.iterator.toint(), strides_of(a, a.k_cache)
    sf, sf_strides = Int64(0), CacheStrides(Int64(0), Int64(0), Int64(0))
    if const_expr(spec.stores_factors):
        sf, sf_strides = a.k_sf.iterator.toint(), strides_of(a, a.k_sf)
    if is_v:
        base, strides = a.v_cache.iterator.toint(), strides_of(a, a.v_cache)
        if const_expr(spec.stores_factors):
            sf, sf_strides = a.v_sf.iterator.toint(), strides_of(a, a.v_sf)
        if const_expr(spec.cache == "nvfp4"):
            interleaved = a.v_sf_interleaved
    address = base + at.page * strides.page + at.row * strides.row
    sf += at.page * sf_strides.page
    first = store.TargetRow(address, sf, sf_strides.row, at.row, interleaved, Float32(1.0))
    return TargetRows(is_v, first, strides.head, sf_strides.head)


@cute.jit
def target_of(spec: cutlass.Constexpr, a, rows: TargetRows, head: Int32) -> store.TargetRow:
    """Return the row of the cache of a head."""
    scale = Float32(1.0)
    if const_expr(spec.quantised):
        if rows.is_v:
            scale = store.scale_of(spec, a, a.v_scale, a.v_scale_ptr, head)
        else:
            scale = store.scale_of(spec, a, a.k_scale, a.k_scale_ptr, head)
    address, sf = rows.first.address + head * rows.stride, rows.first.sf + head * rows.sf_stride
    return rows.first._replace(address=address, sf=sf, scale=scale)


@cute.kernel
def kernel(spec: cutlass.Constexpr, a: CacheWriteArgs):
    g = with_arguments(spec, a, group_of(a))
    first, in_whole_vectors = first_rows(spec, a, g), cutlass.Boolean(False)
    if const_expr(not spec.gather):
        in_whole_vectors = whole.applies(spec, a, g)
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    if g.token < tokens_of(spec, a):
        if const_expr(spec.gather):
            gather.gather_rows(spec, a, g)
        elif const_expr(spec.transform):
            transform_rows(spec, a, g, first, in_whole_vectors)
        else:
            plain_rows(spec, a, g, first, in_whole_vectors)
    if const_expr(a.kv_lens_out is not None):
        write_lengths(a)  # by all threads: there may be more requests than threads with rows


@cute.jit
def with_arguments(spec: cutlass.Constexpr, a, g: LaneGroup) -> LaneGroup:
    """Return `g`, after the constant cache has got the arguments that are used after the wait.

    A launch finds none of its arguments in that cache, and waits for each of its lines that it touches first. Sizes are
    never negative, which the compiler does not know, so it must load these before it can compare `g.token`."""
    sizes = a.k_cache.shape[0] | a.v_cache.shape[0] | a.slots.shape[0] | a.kv_lens.shape[0]
    if const_expr(spec.transform):
        sizes |= a.rope_table.shape[0] | a.q_weight.shape[0] | a.k_weight.shape[0]
    return g._replace(token=g.token if sizes >= 0 else Int32(places.MOST))


def first_rows(spec, a, g: LaneGroup):
    """Return the rows of a group that are not transformed, or the first that is."""
    if spec.gather:
        return None
    return head_row(a, g, g.own) if spec.transform else rows_of(a, g)


@cute.jit
def write_lengths(a):
    """Write the number of keys of each request, with the tokens of the launch, if it is asked for."""
    tid, ctas = cute.arch.thread_idx()[0], cute.arch.grid_dim()[0]
    request = cute.arch.block_idx()[0] * THREADS + tid
    while request < a.kv_lens_out.shape[0]:
        a.kv_lens_out[request] = a.kv_lens[request] + (a.cu_seqlens[request + 1] - a.cu_seqlens[request])
        request += ctas * THREADS


@cute.jit
def plain_rows(spec: cutlass.Constexpr, a, g: LaneGroup, rows: RowRange, in_whole_vectors):
    """Write the group's rows of K or V, which are not transformed, to the token's place, if it has one."""
    words = cute.make_rmem_tensor((4, 2), Uint32)
    words.fill(0)
    tokens, (begin, _) = a.v.shape[0], vector_layout(spec, g)
    if g.own < a.k_groups:
        tokens = a.k.shape[0]
    if g.token < tokens:
        load_vectors(spec, g, rows, RowCursor(rows.first, begin), words)
        slot = places.request_slot(a, g.token)
        at = places.place_of(a, places.pool_of(a), g.token, places.position_of(a, g.token), slot)
        if at.page >= 0:
            to = targets_of(spec, a, rows.is_v, at)
            if in_whole_vectors:
                whole.write_rows(spec, g, rows, to, target_of(spec, a, to, rows.first), words)
            else:
                write_rows(spec, a, g, rows, to, words)


class RowCursor(NamedTuple):
    """A lane's place in its group's rows: a head, and the first of two vectors of it."""

    head: Int32
    vector: Int32


def vector_layout(spec, g: LaneGroup):
    """Return (a lane's first vector, distance of its second one): `lanes` behind the first; of a block of NVFP4, the
    next one."""
    return (g.lane * 2, Int32(1)) if spec.cache == "nvfp4" else (g.lane, g.lanes)


@cute.jit
def load_vectors(spec: cutlass.Constexpr, g: LaneGroup, rows: RowRange, at: RowCursor, words: cute.Tensor):
    """Load two vectors of a row of K or V; those past the row are left out."""
    per, unit = const_expr(spec.elements), const_expr(BYTES[spec.dtype])
    _, stride = vector_layout(spec, g)
    if at.head < rows.heads:
        source = rows.source + at.head * rows.source_stride
        for half in cutlass.range_constexpr(2):
            first = (at.vector + half * stride) * per
            if first < rows.dim:
                memory.load(source + first * unit, words[None, half], rows.dim - first, unit)


@cute.jit
def store_vectors(
    spec: cutlass.Constexpr, a, g: LaneGroup, rows: RowRange, to: TargetRows, at: RowCursor, words: cute.Tensor
):  # fmt: skip
    """Store two vectors of a row to the cache, quantised if it is."""
    per, unit = const_expr(spec.elements), const_expr(BYTES[spec.dtype])
    _, stride = vector_layout(spec, g)
    target, values = target_of(spec, a, to, at.head), cute.make_rmem_tensor((8, 2), Float32)
    if const_expr(spec.quantised):
        for half in cutlass.range_constexpr(2):
            memory.unpack(spec.dtype, words[None, half], values[None, half])
    if const_expr(spec.cache == "nvfp4"):
        if at.vector * per < rows.dim:
            block = cute.make_tensor(values.iterator, cute.make_layout(SF_VEC_SIZE))
            store.store(spec, target, at.vector * per, rows.dim, block)
    else:
        for half in cutlass.range_constexpr(2):
            first = (at.vector + half * stride) * per
            if first < rows.dim:
                if const_expr(spec.quantised):
                    store.store(spec, target, first, rows.dim, values[None, half])
                else:
                    memory.store(target.address + first * unit, words[None, half], rows.dim - first, unit)


# The loop over rows of K or V that are copied or quantised: one iteration per row of the group, or part of a long row.
#   waits for   the loads of its vectors, which the iteration before issued
#   computes    their values in the cache's type
#   stores      them, and the scale factors of NVFP4
# The first vectors are requested before the place of the token is known, so that a decode step waits for the index
# tensors and for the rows at the same time.
@cute.jit
def write_rows(spec: cutlass.Constexpr, a, g: LaneGroup, rows: RowRange, to: TargetRows, words: cute.Tensor):
    """Write the rows of a group to their place in the cache. words: this lane's first two vectors."""
    vectors = (rows.dim + spec.elements - 1) // spec.elements
    begin, _ = vector_layout(spec, g)
    head, vector = rows.first, begin
    held = cute.make_rmem_tensor((4, 2), Uint32)
    while head < rows.heads:
        for i in cutlass.range_constexpr(cute.size(words)):
            held[i] = words[i]
        at = RowCursor(head, vector)
        vector += 2 * g.lanes
        if vector >= vectors:
            head, vector = head + rows.step, begin
        load_vectors(spec, g, rows, RowCursor(head, vector), words)
        store_vectors(spec, a, g, rows, to, at, held)


class HeadRow(NamedTuple):
    """A row of a token. operand: Q, K or V. source, weights: addresses of the row and of its norm's weights, 0 for
    none. dim: elements of the row."""

    operand: Int32
    head: Int32
    source: Int64
    weights: Int64
    dim: Int32


@cute.jit
def head_row(a, g: LaneGroup, row: Int32) -> HeadRow:
    """Return row `row` of the group's token."""
    operand, head, dim = Int32(Q), row, a.k.shape[2]
    source, weights, count = memory.row_of(a.q, g.token, row), a.q_weight.iterator.toint(), a.q_weight.shape[0]
    if row >= a.q.shape[1]:
        operand, head = Int32(K), row - a.q.shape[1]
        source, weights, count = memory.row_of(a.k, g.token, head), a.k_weight.iterator.toint(), a.k_weight.shape[0]
        if head >= a.k.shape[1]:
            operand, head, dim, count = Int32(V), head - a.k.shape[1], a.v.shape[2], 0
            source = memory.row_of(a.v, g.token, head)
    if count == 0:
        weights = Int64(0)
    elif count > dim:  # per head
        weights += Int64(head) * (2 * dim)
    return HeadRow(operand, head, source, weights, dim)


@cute.jit
def load_words(g: LaneGroup, address: Int64, dim: Int32, words: cute.Tensor):
    """Load a lane's two vectors of a row as words (4, 2); elements past the row are 0."""
    for half in cutlass.range_constexpr(2):
        first = (g.lane + half * g.lanes) * rotate.HALF
        if first < dim:
            memory.load(address + first * 2, words[None, half], dim - first, 2)
        else:
            words[None, half].fill(0)


@cute.jit
def fetch(a, g: LaneGroup, x: HeadRow, words: cute.Tensor, weights: cute.Tensor):
    """Load a row of the group's token, if it exists, and the weights of its norm."""
    if x.operand != V or g.token < a.v.shape[0]:
        load_words(g, x.source, x.dim, words)
    if x.weights != 0:
        load_words(g, x.weights, x.dim, weights)


@cute.jit
def transform_rows(spec: cutlass.Constexpr, a, g: LaneGroup, first: HeadRow, in_whole_vectors):
    """Normalise and rotate the group's rows of Q and K, and write them and its rows of V. first: its first row."""
    rotates = places.rotation_rows(a) > 0
    cos, sin = (cute.make_rmem_tensor((rotate.HALF, 2), Float32) for _ in range(2))
    words, weights = (cute.make_rmem_tensor((4, 2), Uint32) for _ in range(2))
    words.fill(0)
    weights.fill(0)
    # Request the position, the slot and the first row, then wait for the position and for its cosines: in a decode
    # step, the time of a launch is that of loads that wait for one another. The page is negative if K and V are not
    # written.
    turned, slot = places.request_rope_position(a, g.token), places.request_slot(a, g.token)
    if g.own < row_count(a):
        if in_whole_vectors:
            whole.fetch(g, first.source, words)
            if first.weights != 0:
                whole.fetch(g, first.weights, weights)
        else:
            fetch(a, g, first, words, weights)
    position = places.position_of(a, g.token)
    rope_position = places.rope_position(a, position, turned)
    if rotates and rope_position >= 0:
        rotate.load_rotation(spec, a, g, rope_position, cos, sin)
    at = places.place_of(a, places.pool_of(a), g.token, position, slot)
    page = at.page if rope_position >= 0 else Int32(-1)
    place = places.CachePlace(cutlass.max(page, 0), at.row)
    to_k, to_v = (targets_of(spec, a, cutlass.Boolean(is_v), place) for is_v in (False, True))
    params = TokenParams(to_k, to_v, rope_position >= 0, page >= 0, rotates, cos, sin)
    if in_whole_vectors:
        whole.transform_rows(spec, a, g, words, weights, params)
    else:
        transform_any(spec, a, g, words, weights, params)


# The loop over rows of Q, K and V: one iteration per row of the group.
#   waits for   the loads of the row and of its weights, which the iteration before issued; in shuffles, for the other
#               lanes of the group
#   computes    Q and K in fp32 registers: RMS norm, rotary embedding
#   stores      Q in its output, 16 or 8 bits; K and V in the cache, and the scales of their rows, if these have some
# The next row is requested before this one is worked on: with 120 registers per thread, too few warps run for their
# loads alone to fill the memory's pipeline. A row is in registers before it is stored, so Q's output may be Q itself.
# All groups have the same mix of rows. If some had the few rows of V alone, half of each warp would wait for the rest.
@cute.jit
def transform_any(
    spec: cutlass.Constexpr, a, g: LaneGroup, words: cute.Tensor, weights: cute.Tensor, params: TokenParams
):  # fmt: skip
    """Transform and write rows of any length and alignment. words, weights: the first row, and the weights of its
    norm."""
    values = cute.make_rmem_tensor((rotate.HALF, 2), Float32)
    held, held_weights = (cute.make_rmem_tensor((4, 2), Uint32) for _ in range(2))
    inv_dim = Float32(1.0) / Float32(a.k.shape[2])
    row = g.own
    while row < row_count(a):
        x = head_row(a, g, row)
        for half in cutlass.range_constexpr(2):
            memory.unpack(spec.dtype, words[None, half], values[None, half])
            for i in cutlass.range_constexpr(4):
                held[i, half], held_weights[i, half] = words[i, half], weights[i, half]
        if row + a.k_groups < row_count(a):
            fetch(a, g, head_row(a, g, row + a.k_groups), words, weights)
        if (x.operand == Q and params.writes_q) or (x.operand != Q and params.writes_kv):
            if x.operand != V:
                if x.weights != 0:
                    rotate.normalise(spec, a, g, values, held_weights, inv_dim)
                if params.rotates:
                    rotate.rotate(a, g, values, params.cos, params.sin)
            if x.operand == Q:
                store_query(spec, a, g, x.head, values)
            else:
                store_row(spec, a, g, params.to_k, params.to_v, x, values, held)
        row += a.k_groups


@cute.jit
def store_row(
    spec: cutlass.Constexpr, a, g: LaneGroup, to_k, to_v, x: HeadRow, values: cute.Tensor, words: cute.Tensor
):
    """Store a lane's two vectors of a row of K, or of V as it was read unless the cache is quantised."""
    target = target_of(spec, a, to_k, x.head)
    if x.operand == V:
        target = target_of(spec, a, to_v, x.head)
    if const_expr(spec.by_token):
        target = target._replace(scale=store.row_scale(spec.cache, g, values))
        store.store_row_scale(g, target.sf + target.row * target.sf_row, target.scale)
    for half in cutlass.range_constexpr(2):
        first = (g.lane + half * g.lanes) * rotate.HALF
        if first < x.dim:
            if const_expr(spec.quantised):
                store.store(spec, target, first, x.dim, values[None, half])
            elif x.operand == V:
                memory.store(target.address + first * 2, words[None, half], x.dim - first, 2)
            else:
                store.store(spec, target, first, x.dim, values[None, half])


@cute.jit
def store_query(spec: cutlass.Constexpr, a, g: LaneGroup, head: Int32, values: cute.Tensor):
    """Store a lane's two vectors of a row of Q."""
    dim = a.q.shape[2]
    for half in cutlass.range_constexpr(2):
        first = (g.lane + half * g.lanes) * rotate.HALF
        if first < dim:
            if a.q_out.shape[0] > 0:
                memory.store_values(spec.dtype, memory.row_of(a.q_out, g.token, head), first, dim, values[None, half])
            if const_expr(spec.quantised):
                if a.q_fp8.shape[0] > 0:
                    scale = a.q_scale
                    if a.q_scale_ptr.shape[0] > 0:
                        scale = a.q_scale_ptr[cutlass.min(head, a.q_scale_ptr.shape[0] - 1)]
                    address = memory.row_of(a.q_fp8, g.token, head)
                    store.store_narrow(spec.q_cache, address, first, dim, values[None, half], scale)
