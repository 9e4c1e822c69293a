"""Merge the states of rows: host part and device entry.

A group of 1 to 32 lanes handles a row, that is one head of one token. A lane holds two vectors of 16 bytes of the
output in fp32: vectors `lane` and `lane + lanes`, so that neighbouring lanes access neighbouring vectors; longer rows
take more rounds. There is no shared memory, and no barrier.

| phase | threads | reads | waits for | writes / signals |
| --- | --- | --- | --- | --- |
| entry | all | | `griddepcontrol.wait`: the kernels that made the states | `launch_dependents` |
| `merge_row` | a group per row | S and V of all states | | V of the row |
| end | all | | the lanes of the warp: none reads S any more | S of the row |

Every CTA waits for the grid before it, so a kernel that waits for this one sees what both have written."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ... import abi
from ...device import copy, memory, warp
from ...device.divisor import divide
from ..args import MergeArgs, fields, pack
from ..spec import BYTES, VECTOR_BYTES
from . import THREADS, UNROLL, VECTORS, ctas_per_sm


def fake_args(spec) -> dict[str, Any]:
    dtype, states = abi.DTYPES[spec.dtype], 0 if spec.pair else 1
    ranks = {"v": 3 + states, "v_out": 3, "v_other": 3, "s": 2 + states, "s_out": 2, "s_other": 2}
    found: dict[str, Any] = {}
    for name, rank in ranks.items():
        kind = Float32 if name.startswith("s") else dtype
        found[name] = abi.tensor(
            kind, (None,) * rank, align=kind.width // 8, last_stride_one=not name.startswith("s")
        )  # fmt: skip
    found["mask"] = abi.tensor(cutlass.Uint8, (None,), align=1, last_stride_one=False)
    return {name: found.get(name, Int32(0)) for name in fields(spec)}


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    a = pack(spec, flat)
    rows = Int64(a.v_out.shape[0]) * a.v_out.shape[1]
    grid = ((rows << a.lanes_log2) + THREADS - 1) // THREADS
    kernel(spec, a).launch(
        grid=[Int32(grid), 1, 1],
        block=[THREADS, 1, 1],
        stream=stream,
        use_pdl=a.enable_pdl,
        min_blocks_per_mp=ctas_per_sm(spec),
        preferred_smem_carveout=1,  # percent: the L1 cache gets the rest
    )


class RowGroup(NamedTuple):
    """The lanes that handle a row. lane: of this thread in the group."""

    lane: Int32
    lanes: Int32
    token: Int32
    head: Int32


class RowVectors(NamedTuple):
    """The vectors of a row that a lane handles: their first elements. dim: elements of a row."""

    first: tuple[Int32, Int32]
    dim: Int32


class RowMerge(NamedTuple):
    """The states of a row that were merged so far, in registers. out: fp32 (elements, VECTORS), the sum of weighted V.
    lse: (2,), the largest S, and the sum of weights in units of 2^it."""

    out: cute.Tensor
    lse: cute.Tensor


def group_of(a) -> RowGroup:
    """Return the group of this thread; its token may be past the last one."""
    tid = cute.arch.thread_idx()[0]
    row = cute.arch.block_idx()[0] * (Int32(THREADS) >> a.lanes_log2) + (tid >> a.lanes_log2)
    lanes, heads = Int32(1) << a.lanes_log2, a.v_out.shape[1]
    token = divide(row, heads)
    return RowGroup(tid & (lanes - 1), lanes, token, row - token * heads)


def row_of(tensor, g: RowGroup):
    """Return the address of a group's row of V, of its first state."""
    token, head = memory.bytes_of(tensor, 0), memory.bytes_of(tensor, cute.rank(tensor) - 2)
    return tensor.iterator.toint() + g.token * token + g.head * head


def lse_of(tensor, g: RowGroup):
    """Return the address of the S of a group's row, of its first state."""
    token, head = memory.bytes_of(tensor, 0), memory.bytes_of(tensor, cute.rank(tensor) - 1)
    return tensor.iterator.toint() + g.token * token + g.head * head


def is_aligned(spec, a):
    """Return whether all vectors of all rows are whole and at multiples of 16 bytes."""
    bits = Int64(a.v_out.shape[2]) * BYTES[spec.dtype]
    for tensor in (a.v, a.v_out, a.v_other) if spec.pair else (a.v, a.v_out):
        bits |= tensor.iterator.toint()
        for mode in range(cute.rank(tensor) - 1):
            bits |= memory.bytes_of(tensor, mode)
    return bits & (VECTOR_BYTES - 1) == 0


@cute.kernel
def kernel(spec: cutlass.Constexpr, a: MergeArgs):
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    g = group_of(a)
    merges = Int32(0)
    if g.token < a.v_out.shape[0]:
        merges = Int32(1)
        if const_expr(spec.pair):
            if a.mask.shape[0] > 0:
                merges = Int32(a.mask[g.token] != 0)
    lse = Float32(0.0)
    if merges != 0:
        if is_aligned(spec, a):
            lse = merge_row(spec, a, g, True)
        else:
            lse = merge_row(spec, a, g, False)
    cute.arch.sync_warp()  # s_out may be s, which all lanes of the row have read
    if merges != 0 and g.lane == 0:
        memory.view(lse_of(a.s_out, g), Float32, 1, 4)[0] = lse


# The loop over the states of a row, or of two vectors per lane of a long one.
#   loads       S and V of up to UNROLL states, all before the first of them is used
#   computes    the largest S; what was summed before is scaled to it
#               weights 2^(S - largest), and the sums of them and of weighted V
# The sums are divided, rounded and stored behind the loop. V of a row is in registers before any of it is stored, so
# the output may be a state.
@cute.jit
def merge_row(spec: cutlass.Constexpr, a, g: RowGroup, aligned: cutlass.Constexpr):
    """Merge the states of a row, write its V and return its S. aligned: see `is_aligned`."""
    per, dim = const_expr(spec.elements), a.v_out.shape[2]
    vectors = (dim + per - 1) // per
    r = RowMerge(cute.make_rmem_tensor((per, VECTORS), Float32), cute.make_rmem_tensor(2, Float32))
    lse, begin = Float32(0.0), g.lane
    while begin - g.lane < vectors:
        # a lane without a vector loads the last one once more, and stores none
        first = tuple(cutlass.min(begin + half * g.lanes, vectors - 1) * per for half in range(VECTORS))
        r.out.fill(0.0)
        r.lse[0], r.lse[1] = -Float32.inf, Float32(0.0)
        if const_expr(spec.pair):
            rows, sums = (row_of(a.v, g), row_of(a.v_other, g)), (lse_of(a.s, g), lse_of(a.s_other, g))
            add_states(spec, aligned, (rows, sums), RowVectors(first, dim), r)
        else:
            add_all(spec, a, g, aligned, RowVectors(first, dim), r)
        lse = r.lse[0] + cute.math.log2(r.lse[1], fastmath=True)
        store_row(spec, a, g, aligned, begin, r)
        begin += VECTORS * g.lanes
    return lse


@cute.jit
def add_all(
    spec: cutlass.Constexpr, a, g: RowGroup, aligned: cutlass.Constexpr, at: RowVectors, r: RowMerge
):  # fmt: skip
    """Add all states of one tensor to a row."""
    states, state = cutlass.max(a.v.shape[1], 1), Int32(0)  # the compiler needs no code for no states
    step = const_expr(UNROLL if aligned else 1)
    while states - state >= step:
        add_states(spec, aligned, several(a, g, state, step), at, r)
        state += step
    for bit in cutlass.range_constexpr(step.bit_length() - 2, -1, -1):
        if states - state >= 1 << bit:
            add_states(spec, aligned, several(a, g, state, 1 << bit), at, r)
            state += 1 << bit


def several(a, g: RowGroup, state, count):
    """Return the addresses of V, and of S, of `count` states of a row."""
    v, v_step, s, s_step = row_of(a.v, g), memory.bytes_of(a.v, 1), lse_of(a.s, g), memory.bytes_of(a.s, 1)
    numbers = [Int64(state + i) for i in range(count)]
    return tuple(v + i * v_step for i in numbers), tuple(s + i * s_step for i in numbers)


@cute.jit
def add_states(
    spec: cutlass.Constexpr, aligned: cutlass.Constexpr, states: tuple, at: RowVectors, r: RowMerge
):  # fmt: skip
    """Add states to a row. states: the addresses of their V, and of their S."""
    rows, sums = states
    count, size = const_expr(len(rows)), const_expr(BYTES[spec.dtype])
    words = cute.make_rmem_tensor((4, VECTORS, count), Uint32)
    lse, values = cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(spec.elements, Float32)
    for i in cutlass.range_constexpr(count):
        lse[i] = memory.view(sums[i], Float32, 1, 4)[0]
    for i in cutlass.range_constexpr(count):
        for half in cutlass.range_constexpr(VECTORS):
            offset, vector = Int64(at.first[half]) * size, words[None, half, i]
            if const_expr(aligned):
                copy.vector(memory.view(rows[i] + offset, Uint32, 4, VECTOR_BYTES), vector)
            else:
                memory.load(rows[i] + offset, vector, at.dim - at.first[half], size)
    largest = r.lse[0]
    for i in cutlass.range_constexpr(count):
        largest = cute.arch.fmax(largest, lse[i])
    # without any key so far, weights are 2^-inf
    unit = warp.select(largest == -Float32.inf, 0.0, largest)
    scale = cute.math.exp2(r.lse[0] - unit, fastmath=True)
    total = r.lse[1] * scale
    for half in cutlass.range_constexpr(VECTORS):
        for e in cutlass.range_constexpr(spec.elements):
            r.out[e, half] = r.out[e, half] * scale
    for i in cutlass.range_constexpr(count):
        weight = cute.math.exp2(lse[i] - unit, fastmath=True)
        total += weight
        # V of no keys counts as 0, whatever it holds
        mask = Uint32(cutlass.select_(lse[i] == -Float32.inf, Uint32(0).ir_value(), Uint32(0xFFFFFFFF).ir_value()))
        for half in cutlass.range_constexpr(VECTORS):
            for w in cutlass.range_constexpr(4):
                words[w, half, i] = words[w, half, i] & mask
            memory.unpack(spec.dtype, words[None, half, i], values)
            warp.add_scaled(r.out[None, half], values, weight)
    r.lse[0], r.lse[1] = largest, total


@cute.jit
def store_row(
    spec: cutlass.Constexpr, a, g: RowGroup, aligned: cutlass.Constexpr, vector: Int32, r: RowMerge
):  # fmt: skip
    """Divide the sums of a lane's vectors by that of the weights and store them. vector: the lane's first one."""
    per, size, dim = const_expr(spec.elements), const_expr(BYTES[spec.dtype]), a.v_out.shape[2]
    inverse = cute.arch.rcp_approx(warp.select(r.lse[1] == 0.0, 1.0, r.lse[1]))
    words = cute.make_rmem_tensor(4, Uint32)
    for half in cutlass.range_constexpr(VECTORS):
        first = (vector + half * g.lanes) * per
        if first < dim:
            for e in cutlass.range_constexpr(per):
                r.out[e, half] = r.out[e, half] * inverse
            memory.pack(spec.dtype, r.out[None, half], words)
            address = row_of(a.v_out, g) + Int64(first) * size
            if const_expr(aligned):
                copy.vector(words, memory.view(address, Uint32, 4, VECTOR_BYTES))
            else:
                memory.store(address, words, dim - first, size)
