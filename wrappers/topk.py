"""Top-k of the rows of a score matrix: public signatures -> reference (CPU) or compiled kernel (CUDA).

What all functions promise. The selection is exact by the order of the scores' bit patterns at their own width: +NaN >
+inf > ... > +0 > -0 > ... > -inf > -NaN. Equal scores at the boundary: the lowest indices get in, the highest with
`TopKTieBreak.LARGE`. Indices come out in ascending order. A window of n <= k elements is taken whole, 0 .. n - 1, its
scores not read, then -1. Bounds of windows may hold anything: starts are clamped to [0, L], lengths to [0, L - start].
Results are the same bits in every run, stream and batch, so `deterministic=False` and `dsa_graph_safe` ask for nothing
that differs: both are accepted. Calls can be captured in a CUDA graph, and replayed with other values in the tensors.

Host time: a call whose signature (dtypes, shapes, strides, k) was seen before is one dict lookup and the compiled call,
which itself checks rank, dtype, device and strides. Everything else, detailed messages too, is `checks_topk`. Nothing
here synchronises or reads device values. Errors are raised before any launch and before anything is written: ValueError
rank, shape, stride, device, range; TypeError dtype or type; NotImplementedError what no kernel does: on CUDA, k above
15872 where L is above 737280 (fp32) or 1474560 (16 bits), more than a cluster can hold.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cute_kernels.topk import dispatch

from . import ops_topk, reference, runtime
from .checks_topk import (
    DECODING,
    DTYPES,
    PAGE_TABLE,
    PER_ROW,
    PREFILL,
    RAGGED,
    TOP_K,
    WINDOWS,
    Call,
    TopKTieBreak,
    validate,
)

MAX_PLANS = 4096  # the cache is emptied at this size: a caller may vary shapes for ever
_is_compiling = torch.compiler.is_compiling  # module globals: an attribute look-up saved is 20 ns
_empty_like = torch.empty_like


class Plan(NamedTuple):
    """What a signature decides. `no_...` stand for absent arguments: empty tensors, in the form that `fn` takes them in
    without a conversion."""

    fn: Callable[..., Any]  # the compiled kernel, or the reference
    device: torch.device
    alone: bool  # the only device of the process
    copies: bool  # the kernel cannot read the scores where they are
    rows: int
    window: int
    page_shift: int
    last_ties: int
    no_ints: Any  # (0,) int32
    no_table: Any  # (0, 1) int32
    no_out: Any  # (0, k) int32
    no_values: Any  # (0, k), the scores' dtype
    no_indices: Any  # (0, k) int64
    like_out: torch.Tensor  # (R, k) int32, one element expanded: empty_like is 0.5 us cheaper than empty
    like_values: torch.Tensor  # (R, k), the scores' dtype
    like_indices: torch.Tensor  # (R, k) int64


_plans: dict[tuple[Any, ...], Plan] = {}


def top_k_page_table_transform(
    input: torch.Tensor, src_page_table: torch.Tensor, lengths: torch.Tensor, k: int,
    row_to_batch: torch.Tensor | None = None, deterministic: bool = True, tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False, row_starts: torch.Tensor | None = None,
    page_table_row_starts: torch.Tensor | None = None, *, page_size: int = 1, out: torch.Tensor | None = None,
    out_raw_indices: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Page-table entries of the k largest scores of each row, in ascending order of their positions, then -1.

    out[i, j] = src_page_table[b, p + x // page_size] * page_size + x % page_size for the j-th chosen index x of row i,
    b = row_to_batch[i], p = page_table_row_starts[i].

    Args, upstream's order (FlashInfer):
        input: (R, L) fp32, fp16 or bf16, any row stride that keeps rows apart, any address; row i's window is the
            lengths[i] elements from row_starts[i] on, and x counts from there.
        src_page_table: int32 (B, M), any row stride. lengths: int32 (R,). k: at least 1; may exceed L.
        row_to_batch: int32 (R,), row of the table; None: i, and B >= R.
        row_starts: int32 (R,), None: 0. page_table_row_starts: int32 (R,), None: row_starts, and with page_size > 1
            required where row_starts is given.
        page_size: a power of two up to 2^30. With 1, entries are copied as they are; else a negative one gives -1.
        out, out_raw_indices: int32 (R, k), contiguous; the second is filled with x.

    -1 also where b or the column lies outside the table. Returns out, int32 (R, k).
    """
    if page_table_row_starts is None and page_size == 1:
        page_table_row_starts = row_starts
    return run(
        PAGE_TABLE, input, k, row_starts, lengths, out, out_raw_indices, None, None, src_page_table, row_to_batch,
        page_table_row_starts, None, 1, page_size, tie_break, None)[0]  # fmt: skip


def top_k_ragged_transform(
    input: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    deterministic: bool = True,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """offsets[i] + x for the indices x of the k largest scores of each row, ascending, then -1 (without offset).

    input (R, L), lengths, row_starts and k as in `top_k_page_table_transform`; offsets int32 (R,), any values (sums
    wrap at 32 bits). Signature: FlashInfer. Returns int32 (R, k).
    """
    return run(
        RAGGED, input, k, row_starts, lengths, None, None, None, None, None, None, None, offsets, 1, 1, tie_break, None
    )[0]  # fmt: skip


def top_k(
    input: torch.Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = True,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, indices) of the k largest scores of each row: the scores' dtype and int64, both (R, k).

    input (R, V) as in `top_k_page_table_transform`; k <= V. Order: ascending index, or with sorted=True descending
    value, then ascending index. Signature: FlashInfer.
    """
    _, values, indices = run(
        TOP_K, input, k, None, None, None, None, None, None, None, None, None, None, 1, 1, tie_break, None)  # fmt: skip
    if not sorted:
        return values, indices
    order = reference.order_keys(values).sort(dim=1, descending=True, stable=True).indices
    return reference.gather_bits(values, order), indices.gather(1, order)


def top_k_per_row_prefill(
    logits: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    top_k: int,
) -> None:
    """Write the indices of the top_k largest logits of each row's window, relative to its start, ascending, then -1.

    Args (FlagGems, vLLM): logits (num_rows, V) fp32, fp16 or bf16, never modified, of strides (stride0, stride1);
    copied first unless stride1 is 1. row_starts, row_ends int32 (num_rows,): the window [start, end), clamped to the
    row, the start first; no element where end <= start. indices int32 (num_rows, top_k), contiguous. top_k may exceed
    V.
    """
    layout = (num_rows, stride0, stride1)
    run(
        PREFILL, logits, top_k, row_starts, row_ends, None, indices, None, None, None, None, None, None, 1, 1, 0, layout
    )  # fmt: skip


def top_k_per_row_decode(
    logits: torch.Tensor,
    next_n: int,
    seq_lens: torch.Tensor,
    indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    top_k: int,
) -> None:
    """`top_k_per_row_prefill` for next_n rows a request: row r's window is [0, end) with
    end = seq_lens[r // next_n] - next_n + r % next_n + 1, clamped to the row.

    Args (vLLM): seq_lens int32 (num_rows / next_n,), the others as there.
    """
    layout = (num_rows, stride0, stride1)
    run(
        DECODING, logits, top_k, None, seq_lens, None, indices, None, None, None, None, None, None, next_n, 1, 0, layout
    )  # fmt: skip


def run(*call: Any) -> tuple[Any, Any, Any]:
    """(out, values, indices) of a call, the fields of `Call`; None for what its function does not return."""
    if _is_compiling():
        return ops_topk.trace(Call(*call))
    (
        function, scores, k, starts, lengths, out, raw, values, indices, table, row_to_batch, table_starts, offsets,
        next_n, page_size, tie_break, layout,
    ) = call  # fmt: skip
    try:
        key = (
            function, scores.get_device(), scores.dtype, scores.shape, scores.stride(), k, type(k), next_n,
            type(next_n), page_size, type(page_size), tie_break, layout,
            None if starts is None else (starts.shape, starts.dtype),
            None if lengths is None else (lengths.shape, lengths.dtype),
            None if table is None else (table.shape, table.dtype),
            None if row_to_batch is None else (row_to_batch.shape, row_to_batch.dtype),
            None if table_starts is None else (table_starts.shape, table_starts.dtype),
            None if offsets is None else (offsets.shape, offsets.dtype),
            None if out is None else (out.shape, out.is_contiguous()),
            None if raw is None else (raw.shape, raw.is_contiguous()),
        )  # fmt: skip
        plan = _plans.get(key)
    except (AttributeError, TypeError):
        validate(Call(*call))
        raise
    if plan is None:
        plan = _add_plan(key, Call(*call))
    if not plan.alone and torch.cuda.current_device() != plan.device.index:
        with torch.cuda.device(plan.device):
            return run(*call)
    try:
        if plan.copies:
            scores = scores.clone(memory_format=torch.contiguous_format)
        if function == TOP_K:
            if values is None:
                values, indices = _empty_like(plan.like_values), _empty_like(plan.like_indices)
        elif out is None and function not in PER_ROW:
            out = _empty_like(plan.like_out)
        if plan.rows:
            ints = plan.no_ints
            plan.fn(
                scores, ints if starts is None else starts, ints if lengths is None else lengths,
                plan.no_out if out is None else out, plan.no_out if raw is None else raw,
                plan.no_values if values is None else values, plan.no_indices if indices is None else indices,
                plan.no_table if table is None else table, ints if row_to_batch is None else row_to_batch,
                ints if table_starts is None else table_starts, ints if offsets is None else offsets, plan.window,
                next_n, plan.page_shift, k, plan.last_ties, 1,
            )  # fmt: skip
    except Exception:
        validate(Call(*call))  # says which argument was refused
        raise
    return out, values, indices


def _add_plan(key: tuple[Any, ...], call: Call) -> Plan:
    """The plan of a call, checked, and entered under its key if a kernel runs it: the reference checks nothing."""
    validate(call)
    scores, k = call.scores, call.k
    (rows, width), device = scores.shape, scores.device
    machine = runtime.machine(device)
    if machine is None:
        fn: Callable[..., Any] = reference.top_k_rows
        given: Callable[[torch.Tensor], Any] = lambda tensor: tensor  # noqa: E731
    else:
        given = runtime.argument
        arch, sms = machine
        op, spec = dispatch.select(dispatch.Request(DTYPES[scores.dtype], rows, width, k, sms), arch)
        fn = runtime.kernel(op, spec, arch)

    def absent(dtype: torch.dtype, *shape: int) -> Any:
        return given(torch.empty(0, *shape, dtype=dtype, device=device))

    plan = Plan(
        fn=fn,
        device=device,
        alone=device.type != "cuda" or torch.cuda.device_count() == 1,
        copies=width != 1 and scores.stride(1) != 1,  # per-row functions, and rows without elements
        rows=rows,
        window=WINDOWS[call.function],
        page_shift=call.page_size.bit_length() - 1,
        last_ties=int(call.tie_break == TopKTieBreak.LARGE),
        no_ints=absent(torch.int32),
        no_table=absent(torch.int32, 1),
        no_out=absent(torch.int32, k),
        no_values=absent(scores.dtype, k),
        no_indices=absent(torch.int64, k),
        like_out=torch.empty(1, dtype=torch.int32, device=device).expand(rows, k),
        like_values=torch.empty(1, dtype=scores.dtype, device=device).expand(rows, k),
        like_indices=torch.empty(1, dtype=torch.int64, device=device).expand(rows, k),
    )
    if machine is not None:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan
