"""Top-k cases, their inputs, and a brute-force solution, shared by tests and benchmarks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import wrappers
from wrappers import TopKTieBreak
from wrappers.host import machine

PAGE_TABLE, RAGGED, TOP_K = "top_k_page_table_transform", "top_k_ragged_transform", "top_k"
PREFILL, DECODE = "top_k_per_row_prefill", "top_k_per_row_decode"
FUNCTIONS = (PAGE_TABLE, RAGGED, TOP_K, PREFILL, DECODE)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
INTEGER = {"fp32": torch.int32, "fp16": torch.int16, "bf16": torch.int16}
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
PER_ROW = (PREFILL, DECODE)
POISON = -77  # value of outputs before a call
LARGE = 1 << 26  # buffers of at least this many elements are not filled
CPU = torch.device("cpu")


@dataclass(frozen=True)
class TopKCase:
    """One call. data: a name in DATA, or several, which the rows use in turn.

    lengths: "full", "mixed" (around 0, k and the row's end), "wild" (any int32), or the values themselves; for the
    per-row functions these are the ends. starts: whether row_starts are given, or their values. pad: elements between
    rows. shift: offset of the first element from an aligned address, in elements. stride: stride of a row's elements
    (per-row functions only). hollow: elements at the front of each row that are in no window and hold arbitrary values.
    width_table: columns of the page table, 0: enough; pad_table: elements between its rows. batch_map: whether
    row_to_batch is given, or its values. table_starts: page_table_row_starts, instead of those from the seed. pad_out:
    elements between rows of given outputs. each_row: seq_lens has the shape (rows / next_n, next_n) and holds the end
    of each row.
    """

    function: str = PAGE_TABLE
    dtype: str = "fp32"
    rows: int = 3
    width: int = 50
    k: int = 7
    data: str | tuple[str, ...] = "normal"
    lengths: str | tuple[int, ...] = "full"
    starts: bool | tuple[int, ...] = False
    pad: int = 0
    shift: int = 0
    stride: int = 1
    hollow: int = 0
    page_size: int = 1
    width_table: int = 0
    pad_table: int = 0
    batch_map: bool | tuple[int, ...] = False
    table_starts: tuple[int, ...] = ()
    next_n: int = 1
    tie_break: int = TopKTieBreak.NONE
    sorted: bool = False
    given: bool = True  # whether out and out_raw_indices are given
    pad_out: int = 0
    each_row: bool = False


PLAIN = {function: TopKCase(function, lengths="mixed", next_n=3) for function in FUNCTIONS}


# ---- data


def _patterns(dtype: str) -> list[int]:
    """Return bit patterns that a float comparison, or one at lower precision, gets wrong: NaN, inf, zeros,
    denormals."""
    kind = torch.finfo(DTYPES[dtype])
    floats = torch.tensor([0.0, float("inf"), kind.max, kind.smallest_normal, 1.0, 65504.0], dtype=DTYPES[dtype])
    plain = floats.view(INTEGER[dtype]).tolist()
    inf = plain[1]
    positive = [*plain, inf - 1, 1, 2, inf + 1, torch.iinfo(INTEGER[dtype]).max]  # the last two are NaN
    return positive + [p + torch.iinfo(INTEGER[dtype]).min for p in positive]


def _random(gen: torch.Generator, shape: tuple[int, int], low: int, high: int, dtype: str) -> torch.Tensor:
    """Return scores of random bit patterns low..high-1."""
    bits = torch.randint(low, high, shape, generator=gen, device=gen.device, dtype=torch.int64)
    return bits.to(INTEGER[dtype]).view(DTYPES[dtype])


def _special(gen: torch.Generator, shape: tuple[int, int], dtype: str) -> torch.Tensor:
    patterns = torch.tensor(_patterns(dtype), dtype=INTEGER[dtype], device=gen.device)
    return patterns[torch.randint(len(patterns), shape, generator=gen, device=gen.device)].view(DTYPES[dtype])


def _normal(gen: torch.Generator, shape: tuple[int, int], dtype: str) -> torch.Tensor:
    return torch.randn(shape, generator=gen, device=gen.device).to(DTYPES[dtype])


def _constant(value: float) -> Any:
    return lambda gen, shape, dtype: torch.full(shape, value, dtype=DTYPES[dtype], device=gen.device)


def _low_bits(count: int) -> Any:
    """Return a maker of scores from `count` neighbouring floats, starting at 1."""

    def make(gen: torch.Generator, shape: tuple[int, int], dtype: str) -> torch.Tensor:
        one = int(torch.ones(1, dtype=DTYPES[dtype]).view(INTEGER[dtype]))
        return _random(gen, shape, one, one + count, dtype)

    return make


def _all_bits(gen: torch.Generator, shape: tuple[int, int], dtype: str) -> torch.Tensor:
    limits = torch.iinfo(INTEGER[dtype])
    return _random(gen, shape, limits.min, limits.max + 1, dtype)


def _quantised(step: float) -> Any:
    return lambda *a: (_normal(*a).float() / step).round().mul(step).to(DTYPES[a[2]])


def _shelf(gen: torch.Generator, shape: tuple[int, int], dtype: str) -> torch.Tensor:
    """Make scores of which one in 32 is larger than 3/4 and half of the others are 3/4."""
    draw = torch.rand(shape, generator=gen, device=gen.device)
    value = torch.where(draw < 1 / 32, 1 + draw, torch.where(draw < 33 / 64, torch.full_like(draw, 0.75), -draw))
    return value.to(DTYPES[dtype])


def _filler(gen: torch.Generator, shape: tuple[int, int], dtype: str) -> torch.Tensor:
    """Make scores of which one in 32 is a number, one in 16 the negative NaN next to the least, and the others the
    least NaN."""
    draw = torch.rand(shape, generator=gen, device=gen.device)
    bits = torch.where(draw < 3 / 32, -2, -1).to(INTEGER[dtype])
    return torch.where(draw < 1 / 32, _normal(gen, shape, dtype).view(INTEGER[dtype]), bits).view(DTYPES[dtype])


def _ties(count: int) -> Any:
    """Return a maker of scores of which `count` are 1, one in 32 is larger, and the others are smaller."""

    def make(gen: torch.Generator, shape: tuple[int, int], dtype: str) -> torch.Tensor:
        scores = -torch.rand(shape, generator=gen, device=gen.device)
        order = scores.argsort(1)
        scores.scatter_(1, order[:, :count], 1.0)
        scores.scatter_(1, order[:, count : count + shape[1] // 32], 3.0)
        return scores.to(DTYPES[dtype])

    return make


def _bin(count: int) -> Any:
    """Return a maker of scores of which `count` are one of two neighbours that share a bin, one in 32 is larger, and
    the others are smaller."""

    def make(gen: torch.Generator, shape: tuple[int, int], dtype: str) -> torch.Tensor:
        scores = _ties(count)(gen, shape, dtype)
        upper = torch.rand(shape, generator=gen, device=gen.device) < 0.5
        return torch.where((scores == 1) & upper, 1 + 2**-7, scores)

    return make


def _seam(gen: torch.Generator, shape: tuple[int, int], dtype: str) -> torch.Tensor:
    """Make scores around 2^-8, the end of the bin of small magnitudes of fp32 and bf16; its width is no power of
    two."""
    draw = torch.rand(shape, generator=gen, device=gen.device)
    return (2**-8 * (1 + (draw - 0.5) / 16)).to(DTYPES[dtype])


def sampled(width: int, size: int, lanes: int) -> torch.Tensor:
    """Return the mask of the elements of an aligned row that a streaming kernel samples: `size` keys in lines of 8
    vectors."""
    vectors = (width + lanes - 1) // lanes
    lines = (torch.arange(size // lanes // 8) * (vectors * 8 / (size // lanes))).int() // 8 * 8
    found = torch.zeros(width + 8 * lanes, dtype=torch.bool)
    found[(lines[:, None] * lanes + torch.arange(8 * lanes)).flatten()] = True
    return found[:width]


def _sample(size: int, inside: float, outside: float) -> Any:
    """Return a maker of normal scores with one mean where a sample of `size` keys is taken and another mean
    elsewhere."""

    def make(gen: torch.Generator, shape: tuple[int, int], dtype: str) -> torch.Tensor:
        where = sampled(shape[1], size, 4 if dtype == "fp32" else 8).to(gen.device)
        return (_normal(gen, shape, dtype).float() + torch.where(where, inside, outside)).to(DTYPES[dtype])

    return make


DATA: dict[str, Any] = {
    "normal": _normal,
    "constant": _constant(1.5),
    "-inf": _constant(-float("inf")),
    "nan": _constant(float("nan")),
    "relu": lambda *a: _normal(*a).relu(),  # half of the row is +0
    "mostly zero": lambda *a: (_normal(*a) - 3).relu(),
    "ascending": lambda *a: _normal(*a).sort().values,
    "descending": lambda *a: _normal(*a).sort(descending=True).values,
    "low bits": _low_bits(64),
    "nine bits": _low_bits(257),
    "special": _special,
    "all bits": _all_bits,
    "negative": lambda *a: -_normal(*a).abs(),
    "huge": lambda *a: (_normal(*a).float() * 2000).to(DTYPES[a[2]]),  # outermost bins, except for fp16
    "tiny": lambda *a: (_normal(*a).float() / 2000).to(DTYPES[a[2]]),  # the bins of zero, except for fp16
    "coarse": _quantised(1 / 8),
    "shelf": _shelf,
    "filler": _filler,
    "256 ties": _ties(256),
    "257 ties": _ties(257),
    "257 in a bin": _bin(257),
    "seam": _seam,
    "sample too high": _sample(4096, 9.0, 0.0),  # sample size of kernels with one CTA per row
    "sample too low": _sample(4096, -9.0, 0.0),
    "cluster's sample too high": _sample(8192, 9.0, 0.0),
    "cluster's sample too low": _sample(8192, -9.0, 0.0),
}


def _bounds(gen: torch.Generator, count: int, case: TopKCase) -> torch.Tensor:
    """Return lengths, ends or starts, int32 (count,)."""
    if isinstance(case.lengths, tuple):
        return torch.tensor(case.lengths, dtype=torch.int32, device=gen.device)
    mixed = [-1, 0, 1, case.k - 1, case.k, case.k + 1, case.width - 1, case.width, case.width + 1, case.width // 2]
    wild = [INT_MIN, INT_MIN + 1, -case.width, 2 * case.width, INT_MAX - 1, INT_MAX]
    values = {"full": [case.width], "mixed": mixed, "wild": mixed + wild}[case.lengths]
    chosen = torch.randint(len(values), (count,), generator=gen, device=gen.device)
    return torch.tensor(values, dtype=torch.int32, device=gen.device)[chosen]


def make_scores(case: TopKCase, gen: torch.Generator) -> torch.Tensor:
    """Return the scores (rows, width). The memory between rows and around them holds +NaN, the largest key."""
    shape = (case.rows, case.width - case.hollow)
    if isinstance(case.data, str):
        scores = DATA[case.data](gen, shape, case.dtype)
    else:
        lines = [DATA[case.data[row % len(case.data)]](gen, (1, shape[1]), case.dtype) for row in range(case.rows)]
        scores = torch.cat([line.view(INTEGER[case.dtype]) for line in lines]).view(lines[0].dtype)
    if not case.pad and not case.shift and case.stride == 1 and not case.hollow:
        return scores
    pitch = case.width * case.stride + case.pad
    size = case.rows * pitch + case.shift
    nan = torch.iinfo(INTEGER[case.dtype]).max
    if size < LARGE:
        flat = torch.full((size,), nan, dtype=INTEGER[case.dtype], device=gen.device).view(scores.dtype)
    else:  # touches only the memory pages that hold scores
        flat = torch.empty(size, dtype=scores.dtype, device=gen.device)
    view = flat.as_strided((case.rows, case.width), (pitch, case.stride), case.shift)
    view[:, case.hollow :].view(INTEGER[case.dtype]).copy_(scores.view(INTEGER[case.dtype]))
    return view


def make_inputs(case: TopKCase, device: torch.device = CPU, seed: int = 0) -> dict[str, Any]:
    """Return the function's arguments by name."""
    gen = torch.Generator(device).manual_seed(seed)
    scores = make_scores(case, gen)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=gen, device=device, dtype=torch.int32)

    def blank() -> torch.Tensor:
        pitch = case.k + case.pad_out
        flat = torch.empty((case.rows + 2) * pitch, dtype=torch.int32, device=device)
        for around in (flat,) if len(flat) < LARGE else (flat[: case.k], flat[-case.k :]):
            around.fill_(POISON)
        return flat.view(-1, pitch)[1:-1, : case.k]

    def values(given: bool | tuple[int, ...]) -> torch.Tensor | None:
        return torch.tensor(given, dtype=torch.int32, device=device) if isinstance(given, tuple) else None

    if case.function in PER_ROW:
        inputs = {"logits": scores, "indices": blank(), "num_rows": case.rows, "top_k": case.k}
        inputs |= {"stride0": scores.stride(0), "stride1": scores.stride(1)}
        if case.function == DECODE:
            ends = _bounds(gen, case.rows if case.each_row else case.rows // case.next_n, case)
            ends = ends.view(-1, case.next_n) if case.each_row else ends
            return inputs | {"next_n": case.next_n, "seq_lens": ends}
        starts = values(case.starts)
        if starts is None:
            starts = _bounds(gen, case.rows, case) // 2 if case.starts else ints(0, 1, case.rows)
        return inputs | {"row_starts": starts, "row_ends": _bounds(gen, case.rows, case)}
    inputs = {"input": scores, "k": case.k, "tie_break": case.tie_break}
    if case.function == TOP_K:
        return inputs | {"sorted": case.sorted}
    inputs |= {"lengths": _bounds(gen, case.rows, case)}
    starts = values(case.starts)
    if starts is None and case.starts:
        starts = _bounds(gen, case.rows, case) // 2
    inputs |= {"row_starts": starts}
    if case.function == RAGGED:
        return inputs | {"offsets": ints(-1000, 1000, case.rows)}
    batches = case.rows // 2 + 1 if case.batch_map else case.rows + 1
    columns = case.width_table or case.width // case.page_size + 3
    most = max(8, 10_000 // case.page_size)
    table = ints(-1 - most // 8, most, batches, columns)
    if case.pad_table:
        flat = torch.empty(batches * (columns + case.pad_table), dtype=torch.int32, device=device)
        table = flat.as_strided(table.shape, (columns + case.pad_table, 1)).copy_(table)
    inputs |= {"src_page_table": table, "page_size": case.page_size}
    if case.batch_map:
        rows = values(case.batch_map)
        inputs["row_to_batch"] = ints(-1 if case.lengths == "wild" else 0, batches, case.rows) if rows is None else rows
    if case.table_starts:
        inputs["page_table_row_starts"] = values(case.table_starts)
    elif case.starts and case.page_size > 1:
        inputs["page_table_row_starts"] = ints(-2, 3, case.rows)
    return inputs | ({"out": blank(), "out_raw_indices": blank()} if case.given else {})


# ---- calls and comparison

OUTPUTS = {PAGE_TABLE: ("out", "out_raw_indices"), RAGGED: (), TOP_K: (), PREFILL: ("indices",), DECODE: ("indices",)}


def call(function: str, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Call a function and return copies of its results by name. The outputs are poisoned first."""
    for name in OUTPUTS[function]:
        if inputs.get(name) is not None:
            inputs[name].fill_(POISON)
    returned = getattr(wrappers, function)(**inputs)
    found = {name: inputs[name] for name in OUTPUTS[function] if inputs.get(name) is not None}
    if function == TOP_K:
        found |= {"values": returned[0], "indices": returned[1]}
    elif returned is not None:
        found["out"] = returned
    return {name: t.clone() for name, t in found.items()}


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: object = "") -> None:
    """Assert that the results have equal bits."""
    assert got.keys() == want.keys(), what
    for name, t in got.items():
        other = want[name]
        assert t.dtype == other.dtype and t.shape == other.shape, (what, name)
        if t.is_floating_point():
            bits = torch.int16 if t.element_size() == 2 else torch.int32
            t, other = t.view(bits), other.view(bits)
        if not torch.equal(t, other):
            row = int((t != other).any(1).nonzero()[0])
            raise AssertionError(f"{what} {name}, row {row}: {t[row].tolist()[:20]}, want {other[row].tolist()[:20]}")


@contextmanager
def on_reference() -> Iterator[None]:
    """Make the calls in the block run the reference, on tensors of any device."""
    reference = machine.HostMachine()
    reference.device_info = lambda device: None  # type: ignore[method-assign]
    with machine.override(reference):
        yield


# ---- the rules of the functions, one element at a time


def score_keys(row: torch.Tensor) -> list[int]:
    """Return unsigned integers in the order of the scores: negative patterns with all bits flipped, others with the
    sign bit set."""
    width = row.element_size() * 8
    patterns = row.contiguous().view(torch.int16 if width == 16 else torch.int32).tolist()
    mask, sign = (1 << width) - 1, 1 << (width - 1)
    return [~p & mask if p < 0 else p | sign for p in patterns]


def chosen(row: torch.Tensor, k: int, start: int, end: int, large: bool) -> list[int]:
    """Return the selected positions of row[start:end), counted from start, in ascending order."""
    keys = score_keys(row[start:end])
    if len(keys) <= k:
        return list(range(len(keys)))
    ranked = sorted(range(len(keys)), key=lambda i: (-keys[i], -i if large else i))
    return sorted(ranked[:k])


def window(function: str, inputs: dict[str, Any], row: int, width: int) -> tuple[int, int]:
    """Return [start, end) of a row, clamped to the row."""

    def at(name: str, index: int) -> int:
        return 0 if inputs.get(name) is None else int(inputs[name][index])

    start = min(max(at("row_starts", row), 0), width)
    if function == TOP_K:
        end = width
    elif function == PREFILL:
        end = at("row_ends", row)
    elif function == DECODE and inputs["seq_lens"].dim() == 2:
        end = int(inputs["seq_lens"].flatten()[row])
    elif function == DECODE:
        end = at("seq_lens", row // inputs["next_n"]) - inputs["next_n"] + row % inputs["next_n"] + 1
    else:
        end = start + at("lengths", row)
    return start, min(max(end, start), width)


def entry(inputs: dict[str, Any], row: int, position: int) -> int:
    """Return the page table's translation of a position."""
    table, size = inputs["src_page_table"], inputs["page_size"]
    batch = row if inputs.get("row_to_batch") is None else int(inputs["row_to_batch"][row])
    begin = inputs.get("page_table_row_starts")
    if begin is None and size == 1:
        begin = inputs.get("row_starts")
    column = (0 if begin is None else int(begin[row])) + position // size
    if not 0 <= batch < table.shape[0] or not 0 <= column < table.shape[1]:
        return -1
    page = int(table[batch, column])
    return page if size == 1 else -1 if page < 0 else page * size + position % size


def brute(function: str, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the results that `call` must return."""
    scores = inputs["logits" if "logits" in inputs else "input"]
    k, large = inputs["top_k" if "top_k" in inputs else "k"], inputs.get("tie_break") == 2
    found: dict[str, list[list[Any]]] = {"out": [], "raw": []}
    for row, line in enumerate(scores):
        picked = chosen(line, k, *window(function, inputs, row, len(line)), large)
        if function == TOP_K and inputs["sorted"]:
            keys = score_keys(line)
            picked = sorted(picked, key=lambda i: (-keys[i], i))
        if function == PAGE_TABLE:
            mapped = [entry(inputs, row, i) for i in picked]
        else:
            mapped = [i + int(inputs["offsets"][row]) for i in picked] if function == RAGGED else picked
        found["out"].append(mapped + [-1] * (k - len(picked)))
        found["raw"].append(picked + [-1] * (k - len(picked)))
    shape = (len(scores), k)
    out, raw = (torch.tensor(found[name], dtype=torch.int64).reshape(shape) for name in ("out", "raw"))
    if function == TOP_K:
        return {"values": scores[torch.arange(len(raw))[:, None], raw], "indices": raw}
    if function in PER_ROW:
        return {"indices": raw.int()}
    given = inputs.get("out_raw_indices") is not None
    return {"out": out.int()} | ({"out_raw_indices": raw.int()} if given else {})


# ---- calls that are refused


def _zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _refusals(function: str) -> dict[str, Any]:
    """Return name -> (change, error, message). The case in PLAIN has 3 rows of 50 scores, k 7.

    tests/host/test_bad_calls.py has every bad value of each argument alone; here are those that it lacks, and those
    that only other arguments make wrong."""
    scores, k = ("logits", "top_k") if function in PER_ROW else ("input", "k")
    bad: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
        "k large": ({k: 2**31}, ValueError, f"{k}: 2147483648"),
    }
    per_row = {PAGE_TABLE: ["lengths"], RAGGED: ["lengths", "offsets"], TOP_K: []}.get(function, [])
    per_row += {PREFILL: ["row_starts", "row_ends"], DECODE: ["seq_lens"]}.get(function, [])
    optional = {PAGE_TABLE: ["row_to_batch", "row_starts", "page_table_row_starts"], RAGGED: ["row_starts"]}
    if per_row:
        scores_there = {scores: torch.zeros(3, 50, device="meta")}
        bad["scores device"] = scores_there, ValueError, f"{per_row[0]}: device .*, must be that of the scores, meta"
    for name in per_row + optional.get(function, []):
        unsigned = _zeros(1 if name == "seq_lens" else 3, dtype=torch.uint32)
        bad[f"{name} unsigned"] = ({name: unsigned}, TypeError, f"{name}: dtype torch.uint32")
    for name in {PAGE_TABLE: ["out", "out_raw_indices"], TOP_K: [], RAGGED: []}.get(function, ["indices"]):
        bad |= {
            f"{name} overlap": ({name: _zeros(20).as_strided((3, 7), (6, 1))}, ValueError, f"{name}: strides"),
            f"{name} expanded": ({name: _zeros(1, 7).expand(3, 7)}, ValueError, f"{name}: strides"),
        }
    if function in PER_ROW:
        rows = torch.zeros(200)
        bad |= {
            "num_rows": ({"num_rows": 2}, ValueError, "num_rows: 2"),
            "stride0": ({"stride0": 49}, ValueError, "stride0: 49"),
            "stride1": ({"stride1": 2}, ValueError, "stride1: 2"),
            "overlap": ({scores: rows.as_strided((3, 50), (49, 1)), "stride0": 49}, ValueError, f"{scores}: strides"),
            "expanded": ({scores: rows[:50].expand(3, 50), "stride0": 0}, ValueError, f"{scores}: strides"),
        }
    else:
        bad |= {
            "overlap": ({scores: torch.zeros(200).as_strided((3, 50), (49, 1))}, ValueError, f"{scores}: strides"),
            "expanded": ({scores: torch.zeros(50).expand(3, 50)}, ValueError, f"{scores}: strides"),
        }
    if function == DECODE:
        bad |= {
            "next_n": ({"next_n": 2}, ValueError, "next_n: 2"),
            "each row, few": ({"seq_lens": _zeros(2, 1)}, ValueError, r"seq_lens: shape \(2, 1\)"),
            "each row, next_n": ({"seq_lens": _zeros(1, 3), "next_n": 2}, ValueError, r"seq_lens: shape \(1, 3\)"),
            "each row, next_n 0": ({"seq_lens": _zeros(3, 1), "next_n": 0}, ValueError, "next_n: 0"),
        }
    if function == TOP_K:
        bad["k > V"] = ({k: 51}, ValueError, "k: 51, must not exceed the 50")
    if function == PAGE_TABLE:
        table = "src_page_table"
        bad |= {
            "table rows": ({table: _zeros(2, 50)}, ValueError, rf"{table}: shape \(2, 50\).*row_to_batch"),
            "table no rows": ({table: _zeros(0, 50), "row_to_batch": _zeros(3)}, ValueError, f"{table}: shape"),
            "table stride": ({table: _zeros(50, 3).T}, ValueError, f"{table}: stride"),
            "page_size 0": ({"page_size": 0}, ValueError, "page_size: 0"),
            "page_size large": ({"page_size": 2**31}, ValueError, "page_size: 2147483648"),
            "starts in pages": ({"page_size": 4, "row_starts": _zeros(3)}, ValueError, "page_table_row_starts: None"),
        }
    return bad


def refusals() -> dict[str, Any]:
    """Return id -> (function, change of the arguments of its case in PLAIN, error, beginning of the message)."""
    return {f"{function}: {name}": (function, *row) for function in PLAIN for name, row in _refusals(function).items()}
