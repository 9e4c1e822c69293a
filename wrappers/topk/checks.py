"""Validate calls of the top-k functions.

`validate` looks only at types, shapes, dtypes, strides and devices, never at device values. A wrong rank, shape or
stride raises ValueError, a wrong dtype TypeError; every message names the argument, its value and what is allowed.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import torch

from cute_kernels.topk.args import ABSOLUTE, DECODE, ENDS, FULL, LENGTHS

from ..host import overlap
from ..host.checks import (
    check_apart,
    check_flag,
    check_integer,
    check_last_stride,
    check_memory,
    check_one_of,
    check_operand,
    check_shape,
    check_strided,
    listed,
)
from ..host.plain import refuse_grad
from ..host.scalars import integer
from ..host.schema import GivenTensor, MaybeTensor

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
PAGE_TABLE, RAGGED, TOP_K = "top_k_page_table_transform", "top_k_ragged_transform", "top_k"
PREFILL, DECODING, PERSISTENT = "top_k_per_row_prefill", "top_k_per_row_decode", "persistent_topk"
# Selections by logits of an indexer: slots of a cache, from a length per request or per token, rows of a tensor, and
# keys of segments.
SELECT_REQUESTS, SELECT_TOKENS, SELECT_ROWS = "select_slots", "select_slots, lengths of tokens", "select_rows"
SEGMENTS = "dsa_indexer_topk"
WINDOWS = {PAGE_TABLE: LENGTHS, RAGGED: LENGTHS, TOP_K: FULL, PREFILL: ENDS, DECODING: DECODE, PERSISTENT: DECODE,
           SELECT_REQUESTS: DECODE, SELECT_TOKENS: LENGTHS, SELECT_ROWS: ABSOLUTE, SEGMENTS: LENGTHS}  # fmt: skip
PER_ROW = (PREFILL, DECODING, PERSISTENT)
LARGEST = 2**31 - 1  # bound of the row length and of k
MAX_PAGE_SIZE = 1 << 30


class TopKTieBreak(IntEnum):
    """Which of the scores equal to the k-th largest are selected. NONE leaves this open and acts as SMALL.

    FlashInfer's enum.

    >>> top_k(torch.zeros(1, 4), 2, tie_break=TopKTieBreak.LARGE)[1]
    tensor([[2, 3]])
    """

    NONE = 0
    SMALL = 1  # those with the lowest indices
    LARGE = 2  # those with the highest indices


TIES = tuple(map(int, TopKTieBreak))


class TopKCall(NamedTuple):
    """A call of any of the functions, in the terms of `TopKArgs`. None stands for an argument that is absent.

    layout: (num_rows, stride0, stride1), as a caller of the per-row functions states them.
    """

    function: str
    scores: GivenTensor
    k: int
    starts: MaybeTensor = None
    lengths: MaybeTensor = None
    out: MaybeTensor = None
    raw: MaybeTensor = None
    values: MaybeTensor = None
    indices: MaybeTensor = None
    table: MaybeTensor = None
    row_to_batch: MaybeTensor = None
    table_starts: MaybeTensor = None
    offsets: MaybeTensor = None
    next_n: int = 1
    page_size: int = 1
    tie_break: int = TopKTieBreak.NONE
    sorted: bool = False
    layout: Any = None


# Public names of TopKCall's fields that have another name there.
_TRANSFORM = {
    "scores": "input", "starts": "row_starts", "raw": "out_raw_indices", "table": "src_page_table",
    "table_starts": "page_table_row_starts",
}  # fmt: skip
_PER_ROW = {"scores": "logits", "starts": "row_starts", "raw": "indices", "k": "top_k"}
_SELECT = {"scores": "logits", "k": "top_k"}
NAMES: dict[str, dict[str, str]] = {
    PAGE_TABLE: _TRANSFORM,
    RAGGED: _TRANSFORM,
    TOP_K: _TRANSFORM,
    PREFILL: _PER_ROW | {"lengths": "row_ends"},
    DECODING: _PER_ROW | {"lengths": "seq_lens"},
    PERSISTENT: {"scores": "logits", "raw": "output"},
    **dict.fromkeys((SELECT_REQUESTS, SELECT_TOKENS), _SELECT | {"lengths": "context_lens", "table": "block_table"}),
    SEGMENTS: _SELECT | {"lengths": "cu_seqlens_k"},
    SELECT_ROWS: _SELECT | {"starts": "cu_seq_len_k_start", "lengths": "cu_seq_len_k_end"},
}  # fmt: skip


def with_ints(call: TopKCall) -> TopKCall:
    """Return the call with numpy's integers converted to Python's."""
    ints = {field: integer(getattr(call, field)) for field in ("k", "next_n", "page_size", "tie_break")}
    return call._replace(**ints)


def each_row(seq_lens: torch.Tensor, next_n: Any, logits: Any) -> torch.Tensor:
    """Return `seq_lens` of two dimensions, which hold the end of each row of logits, as (rows,), for next_n = 1."""
    check_strided("seq_lens", seq_lens)
    if isinstance(logits, torch.Tensor) and logits.dim() == 2:
        rows, tokens = logits.shape[0], check_integer("next_n", integer(next_n), 1)
        if seq_lens.shape != (rows, 1) and (rows % tokens or seq_lens.shape != (rows // tokens, tokens)):
            allowed = f"({rows}, 1) or (rows / next_n, next_n), one per row, with {rows} rows and next_n {tokens}"
            raise ValueError(f"seq_lens: shape {tuple(seq_lens.shape)}, must be {allowed}")
    return seq_lens.contiguous().view(-1)


def validate(call: TopKCall) -> None:
    """Raise on the first argument that does not fit."""
    call, names = with_ints(call), NAMES[call.function]
    rows, width = _scores(names["scores"], call)
    for field in (*INPUTS, *OUTPUTS):
        check_memory(names.get(field, field), getattr(call, field), call.scores)
    scalars(call, width)
    if call.layout is not None:
        stated(call)
    if rows % call.next_n:
        raise ValueError(f"next_n: {call.next_n}, must divide the {rows} rows of logits")
    required = {"lengths"} if call.function != TOP_K else set()
    required |= {"starts"} if call.function in (PREFILL, SELECT_ROWS) else set()
    required |= {"offsets"} if call.function == RAGGED else set()
    requests = rows // call.next_n if WINDOWS[call.function] == DECODE else rows
    for field in ("starts", "lengths", "row_to_batch", "table_starts", "offsets"):
        value, name = getattr(call, field), names.get(field, field)
        if value is not None or field in required:
            count = requests if field == "lengths" else rows
            _integers(name, value, 1, call.scores)
            check_shape(name, value, (count,), "one per row" if count == rows else "one per next_n rows")
    if call.function in (PAGE_TABLE, SELECT_REQUESTS, SELECT_TOKENS):
        _table(call, rows)
    for field in ("out", "raw"):
        value, name = getattr(call, field), names.get(field, field)
        if value is not None or (field == "raw" and call.function in PER_ROW):
            _integers(name, value, 2, call.scores)
            check_shape(name, value, (rows, call.k), "rows, k")
    given = {names.get(f, f): getattr(call, f) for f in OUTPUTS if getattr(call, f) is not None}
    check_apart(given, {names.get(f, f): getattr(call, f) for f in INPUTS})


def scalars(call: TopKCall, width: int) -> None:
    """Raise on a number that does not fit scores of `width` columns."""
    name = NAMES[call.function].get("k", "k")
    _bounded(name, call.k, LARGEST)
    if call.function == TOP_K and call.k > width:
        raise ValueError(f"{name}: {call.k}, must not exceed the {width} elements of a row of input")
    check_integer("next_n", call.next_n, 1)
    _bounded("page_size", call.page_size, MAX_PAGE_SIZE)
    if isinstance(call.tie_break, bool) or not isinstance(call.tie_break, int) or call.tie_break not in TIES:
        raise ValueError(f"tie_break: {call.tie_break!r}, must be one of {listed(tuple(map(repr, TopKTieBreak)))}")


INPUTS = ("scores", "starts", "lengths", "table", "row_to_batch", "table_starts", "offsets")
OUTPUTS = ("out", "raw", "values", "indices")


def stated(call: TopKCall) -> None:
    """Check num_rows, stride0 and stride1 against the tensor; a stride that is never used may have any value."""
    num_rows, *strides = call.layout
    if num_rows != call.scores.shape[0]:
        raise ValueError(f"num_rows: {num_rows}, must be the {call.scores.shape[0]} rows of logits")
    for dim, stride in enumerate(strides):
        if call.scores.shape[dim] > 1 and stride != call.scores.stride(dim):
            raise ValueError(f"stride{dim}: {stride}, must be that of logits, {call.scores.stride(dim)}")


def _scores(name: str, call: TopKCall) -> tuple[int, int]:
    scores = call.scores
    device = check_strided(name, scores, 2).device
    refuse_grad({name: scores})
    if device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{name}: device {device}, must be cpu or cuda")
    check_one_of(f"{name}: dtype", scores.dtype, DTYPES)
    if scores.shape[1] > LARGEST:
        raise ValueError(f"{name}: shape {tuple(scores.shape)}, a row must have at most {LARGEST} elements")
    if call.function not in PER_ROW:
        check_last_stride(name, scores)
    if overlap.folded(scores):
        layout = f"strides {scores.stride()} of shape {tuple(scores.shape)}"
        raise ValueError(f"{name}: {layout}, rows must not overlap")
    return scores.shape[0], scores.shape[1]


def _integers(name: str, value: Any, ndim: int, scores: torch.Tensor) -> None:
    check_operand(name, value, ndim, (torch.int32,), scores.device, "that of the scores")


def _table(call: TopKCall, rows: int) -> None:
    name, table = NAMES[call.function]["table"], call.table
    _integers(name, table, 2, call.scores)
    batches, requests = table.shape[0], rows // call.next_n
    if rows and batches < (requests if call.row_to_batch is None else 1):
        least = f"{requests} rows, one per row of input, without row_to_batch"
        least = least if call.row_to_batch is None else "1 row"
        raise ValueError(f"{name}: shape {tuple(table.shape)}, must have at least {least}")
    size = call.page_size
    if size > 1 and call.starts is not None and call.table_starts is None:
        raise ValueError(f"page_table_row_starts: None, required if row_starts is given and page_size is {size}")


def _bounded(name: str, value: Any, most: int) -> int:
    if check_integer(name, value, 1) > most:
        raise ValueError(f"{name}: {value}, must be at most {most}")
    return value


def refuse_other_than(kind: type, **given: Any) -> None:
    """Raise on the first argument that is not a bool, or not an int."""
    for name, value in given.items():
        if kind is bool:
            check_flag(name, value)
        else:
            check_integer(name, value)
