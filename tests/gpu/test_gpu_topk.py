"""The top-k functions on a Hopper GPU, bit by bit against the reference and against themselves.

Kernels come from a bundle where one is built (`make cubins`), else they are compiled as they are met, seconds each.
"""

import itertools
from dataclasses import replace

import pytest
import torch

import wrappers
from bench.cases import topk as cases
from bench.cases.topk import DECODE, FUNCTIONS, PAGE_TABLE, PER_ROW, PLAIN, PREFILL, RAGGED, TOP_K, TopKCase
from cute_kernels.topk import dispatch, radix
from tests.support.gpu import CUDA, captured, feature, in_threads
from wrappers import TopKTieBreak, reference, top_k
from wrappers.host import machine

WIDTHS = (1, 2, 31, 127, 128, 129, 1000, 4095, 8193, 16384, 65536, 129280, 200001, 524288, 786433, 1_000_000, 1_200_000)
KS = (1, 2, 3, 7, 8, 31, 32, 33, 127, 128, 255, 256, 257, 511, 513, 1000, 1024, 2047, 2048, 2049, 3000, 4095, 4096)
SORTED = (1, 2, 31, 32, 33, 127, 128, 129, 500, 2047, 2048, 2049, 5000, 16_383, 16_384, 16_385)
PLANS = [plan for dtype in cases.DTYPES for plan in dispatch.specs(dtype)]
DTYPES = [pytest.param(dtype, marks=feature(f"top-k scores {dtype}")) for dtype in cases.DTYPES]


def marked(plan):
    """The plan as a parameter of a test, which then carries the plan's features."""
    rows = "streamed" if plan.stream else "over several CTAs" if plan.cluster > 1 else "in one CTA"
    return pytest.param(plan, id=plan.name, marks=feature(f"top-k scores {plan.dtype}", f"top-k rows {rows}"))


def make(case, seed=0):
    return cases.make_inputs(case, CUDA, seed)


def run(case, inputs):
    return cases.call(case.function, inputs)


def expected(case, inputs):
    with cases.on_reference():
        return run(case, inputs)


def ascending(index):
    """Indices rise strictly until the padding: none comes twice."""
    later, earlier = index[:, 1:], index[:, :-1]
    assert ((later > earlier) | (later == -1)).all() and ((earlier != -1) | (later == -1)).all()


def matches(case, seed=0):
    inputs = make(case, seed)
    want = expected(case, inputs)
    got = run(case, inputs)
    cases.same(got, want, case)
    for name, t in got.items():
        if name == "out_raw_indices" or (name == "indices" and not case.sorted):
            ascending(t)


# ---- against the reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data", cases.DATA)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_data(function, data, dtype):
    for width, k, tie_break in itertools.product((700, 9000, 70_000), (5, 512), (0, TopKTieBreak.LARGE)):
        matches(TopKCase(function, dtype, 4, width, k, data, "mixed", next_n=2, tie_break=tie_break, sorted=k == 5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(width, dtype):
    for rows, k in itertools.product((1, 5), (1, 64, 2048)):
        for data in ("normal", "relu"):
            matches(TopKCase(PAGE_TABLE, dtype, rows, width, k, data, "mixed" if rows > 1 else "full"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", KS)
def test_k(k, dtype):
    for width, data in itertools.product((4096, 20_000, 150_000), ("normal", "low bits")):
        matches(TopKCase(TOP_K, dtype, 3, width, k, data, sorted=k % 2 == 0))
        matches(TopKCase(PREFILL, dtype, 6, width, k, data, "mixed", starts=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", SORTED)
@feature("top-k with sorted values")
def test_sorted(k, dtype):
    """Values of every kind, few and many of them equal; of rows as long as k, and longer ones. Ties come in ascending
    order of their indices, whichever got in."""
    data = ("special", "normal", "relu", "constant", "nine bits", "all bits", "nan", "-inf")
    matches(TopKCase(TOP_K, dtype, 8, k, k, data, sorted=True))
    matches(TopKCase(TOP_K, dtype, 8, k + 1000, k, data, tie_break=TopKTieBreak.LARGE, sorted=True))


@pytest.mark.parametrize("rows,k", [(1, 2048), (133, 2048), (5000, 2048), (133, 9000), (70_000, 40)])
@feature("top-k with sorted values")
def test_sorted_rows(rows, k):
    """Of more rows than run at once; against torch's stable sort of all of them."""
    scores = make(TopKCase(TOP_K, "fp32", rows, k + 100, k, "coarse"))["input"]
    want = dict(zip("vi", top_k(scores, k), strict=True))
    reference.sort_rows(want["v"], want["i"], 1)
    cases.same(dict(zip("vi", top_k(scores, k, sorted=True), strict=True)), want)


@pytest.mark.parametrize("rows", [1, 2, 7, 63, 64, 131, 132, 133, 265, 1024, 4096, 70_000])
def test_rows(rows):
    for width in (300, 3000):
        if rows * width < 1 << 24:
            matches(TopKCase(RAGGED, "bf16", rows, width, 200, "normal", "mixed", starts=True))


@pytest.mark.parametrize("plan", [marked(plan) for plan in PLANS])
def test_every_plan(monkeypatch, plan):
    """Whichever plan dispatch would take, all that can hold a row give the reference's bits."""
    monkeypatch.setattr(dispatch, "select", lambda problem, arch: ("topk.radix", plan))
    monkeypatch.setattr(machine, "current", machine.HostMachine())  # without the plans of other tests
    room = 60_000 * plan.cluster if plan.stream else plan.capacity * plan.cluster
    for width in (1, 100, room // 3 + 1, room - 1, room):
        for data, lengths, k in (("normal", "mixed", 333), ("special", "wild", 2048), ("constant", "full", 64)):
            case = TopKCase(PAGE_TABLE, plan.dtype, 5, width, k, data, lengths, starts=lengths != "full")
            matches(replace(case, page_size=4, batch_map=True))
            matches(replace(case, tie_break=TopKTieBreak.LARGE, shift=3, pad=5))


@pytest.mark.parametrize("plan", [marked(plan) for plan in PLANS if plan.stream])
def test_streams_whatever_the_sample_says(monkeypatch, plan):
    """Candidates come all at the end or at the start, in what a sample takes or in what it leaves, or are all equal."""
    monkeypatch.setattr(dispatch, "select", lambda problem, arch: ("topk.radix", plan))
    monkeypatch.setattr(machine, "current", machine.HostMachine())  # without the plans of other tests
    width = 70_000 * min(plan.cluster, 4)
    rising = torch.linspace(-3, 3, width, device=CUDA)
    line = torch.arange(width, device=CUDA) // 32 % (width // 4096) == 0
    orders = [
        rising,
        -rising,
        rising.abs(),
        torch.where(line, rising + 9, rising),
        torch.where(line, -9, rising.flip(0)),
    ]
    scores = torch.stack([*orders, torch.full_like(rising, -1.0)]).to(cases.DTYPES[plan.dtype])
    for k, tie_break in itertools.product((1, 777, radix.max_k(plan)), (TopKTieBreak.SMALL, TopKTieBreak.LARGE)):
        got = top_k(scores, k, tie_break=tie_break)
        with cases.on_reference():
            want = top_k(scores, k, tie_break=tie_break)
        cases.same(dict(zip("vi", got, strict=True)), dict(zip("vi", want, strict=True)), (k, tie_break))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [129, 5000, 70_001])
def test_any_address_and_row_stride(width, dtype):
    for shift, pad in itertools.product((0, 1, 2, 3, 5, 7, 8), (0, 1, 4)):
        matches(TopKCase(RAGGED, dtype, 4, width, 100, "normal", "mixed", starts=True, pad=pad, shift=shift))


@pytest.mark.parametrize("stride", [2, 5])
def test_strided_logits(stride):
    for function in PER_ROW:
        matches(TopKCase(function, rows=6, width=5000, k=300, lengths="mixed", stride=stride, pad=3, next_n=2))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("width", [50, 5000, 300_000])
def test_bounds_may_hold_anything(function, width):
    for seed in range(4):
        case = TopKCase(function, rows=24, width=width, k=20, lengths="wild", starts=True, batch_map=True, next_n=3)
        matches(case, seed)
        matches(replace(case, page_size=16, width_table=2), seed)


@pytest.mark.parametrize("page_size", [1, 2, 64, 1 << 30])
def test_page_sizes(page_size):
    for starts, batch_map, narrow in itertools.product((False, True), (False, True), (0, 3)):
        case = TopKCase(PAGE_TABLE, rows=9, width=6000, k=512, lengths="mixed", page_size=page_size, width_table=narrow)
        matches(replace(case, starts=starts, batch_map=batch_map))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_without_elements(function):
    for rows, width in ((0, 9), (0, 0), (3, 0)) if function != TOP_K else ((0, 9),):
        matches(TopKCase(function, rows=rows, width=width, k=5, lengths="mixed"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data", ["constant", "-inf", "nan", "mostly zero", "low bits"])
@feature("top-k with a million equal scores")
def test_a_million_equal_scores(data, dtype):
    for tie_break, rows in itertools.product((TopKTieBreak.SMALL, TopKTieBreak.LARGE), (1, 3)):
        case = TopKCase(TOP_K, dtype, rows, 1_000_000, 2048, data, tie_break=tie_break)
        matches(case)
        if data == "constant":
            first = 1_000_000 - 2048 if tie_break == TopKTieBreak.LARGE else 0
            assert torch.equal(run(case, make(case))["indices"][0].cpu(), torch.arange(first, first + 2048))


def test_scores_outside_the_window_never_matter():
    """Changing them, to the largest key too, changes no bit; windows start and end at any alignment."""
    scores = torch.randn(64, 9000, device=CUDA)
    starts = torch.arange(64, dtype=torch.int32, device=CUDA) * 17
    ends = starts + torch.arange(64, dtype=torch.int32, device=CUDA) * 120
    found = []
    column = torch.arange(9000, device=CUDA)
    outside = (column < starts[:, None]) | (column >= ends[:, None])
    for value in (float("nan"), -float("nan"), float("inf"), 0.0):
        logits = scores.masked_fill(outside, value)
        indices = torch.full((64, 600), cases.POISON, dtype=torch.int32, device=CUDA)
        wrappers.top_k_per_row_prefill(logits, starts, ends, indices, 64, 9000, 1, 600)
        found.append({"indices": indices})
    for other in found[1:]:
        cases.same(other, found[0])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_inputs_and_neighbours_of_outputs_are_left_alone(function):
    case = TopKCase(function, rows=5, width=20_000, k=129, lengths="mixed", pad=7, next_n=5)
    inputs = make(case)
    guarded = {}
    for name in cases.OUTPUTS[function]:
        guarded[name] = torch.full((7, 129), 12345, dtype=torch.int32, device=CUDA)
        inputs[name] = guarded[name][1:6]
    before = {name: t.clone() for name, t in inputs.items() if isinstance(t, torch.Tensor)}
    run(case, inputs)
    for name, t in before.items():
        if name not in guarded:
            assert torch.equal(t.view(torch.int32), inputs[name].view(torch.int32)), name
    for name, t in guarded.items():
        assert (t[0] == 12345).all() and (t[-1] == 12345).all(), name


# ---- same bits


@pytest.mark.parametrize("width", [3000, 60_000, 1_200_000])
@pytest.mark.parametrize("data", ["normal", "relu"])
def test_repeats(width, data):
    case = TopKCase(PAGE_TABLE, rows=4, width=width, k=2048, data=data)
    inputs = make(case)
    first = run(case, inputs)
    for _ in range(30):
        cases.same(run(case, inputs), first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3000, 60_000])
def test_batch_independence(width, dtype):
    """A row gives the same bits alone and among any number of others, where it may take another plan."""
    scores = make(TopKCase(TOP_K, dtype, 300, width, data="special"))["input"]
    values, indices = top_k(scores, 777)
    for rows in (1, 2, 9, 40, 140):
        for first in (0, 300 - rows):
            v, i = top_k(scores[first : first + rows], 777)
            want = {"v": values[first : first + rows], "i": indices[first : first + rows]}
            cases.same({"v": v, "i": i}, want, rows)


@pytest.mark.parametrize("in_order", [False, True])
def test_launches_wait_for_their_predecessor(in_order):
    """Back to back, so that a kernel which starts early reads half-written scores, or overwrites what is still read."""
    case = TopKCase(TOP_K, rows=64, width=16_384, k=512, sorted=in_order)
    inputs = make(case)
    source, scores = inputs["input"].clone(), inputs["input"]
    first = run(case, inputs)
    for _ in range(20):
        scores.copy_(source)
        values, indices = top_k(scores, 512, sorted=in_order)
        scores.zero_()
        again = top_k(values, 100)  # of what the launch before it wrote
        cases.same({"values": values, "indices": indices}, first)
        with cases.on_reference():
            cases.same(dict(zip("vi", again, strict=True)), dict(zip("vi", top_k(values, 100), strict=True)))


# ---- graphs, streams, memory


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("width", [2000, 100_000])
@pytest.mark.parametrize("function", FUNCTIONS)
@feature("top-k with CUDA graph replay")
def test_replay_with_other_values(monkeypatch, function, width, warm):
    """Scores, bounds and tables change in place between replays; lengths cross k both ways."""
    case = TopKCase(function, rows=12, width=width, k=1000, lengths="mixed", next_n=3, batch_map=True, sorted=True)
    inputs = make(case)
    run(case, inputs)
    if not warm:  # as in a process whose first call is captured
        monkeypatch.setattr(machine, "current", machine.HostMachine())  # without the plans of other tests
    graph, result = captured(getattr(wrappers, case.function), inputs)
    returned = {TOP_K: ("values", "indices"), PAGE_TABLE: ("out",), RAGGED: ("out",)}.get(function, ())
    for seed in range(1, 9):
        for name, value in make(replace(case, data=tuple(cases.DATA)[seed]), seed).items():
            if isinstance(value, torch.Tensor):
                inputs[name].copy_(value)
        want = expected(case, inputs)
        outputs = {name: inputs[name] for name in cases.OUTPUTS[function]}
        outputs |= dict(zip(returned, result if isinstance(result, tuple) else (result,), strict=False))
        for t in outputs.values():
            t.fill_(cases.POISON)
        graph.replay()
        cases.same({name: outputs[name] for name in want}, want, seed)


@pytest.mark.parametrize("k", [64, 2048])
@feature("top-k with CUDA graph replay")
def test_replay_around_length_k(k):
    case = TopKCase(PAGE_TABLE, rows=5, width=3 * k, k=k)
    inputs = make(case)
    graph, _ = captured(getattr(wrappers, case.function), inputs)
    for length in (k - 1, k, k + 1, 3 * k, k, 0, -1, k + 1, 3 * k + 1):
        inputs["lengths"].fill_(length)
        inputs["input"].copy_(torch.randn(5, 3 * k, device=CUDA))
        want = expected(case, inputs)
        inputs["out"].fill_(cases.POISON), inputs["out_raw_indices"].fill_(cases.POISON)
        graph.replay()
        cases.same({"out": inputs["out"], "out_raw_indices": inputs["out_raw_indices"]}, want, length)


def concurrent_cases():
    return [TopKCase(f, rows=12, width=w, k=400, data="relu", next_n=2) for f, w in zip(
        (PAGE_TABLE, TOP_K, PREFILL, DECODE), (5000, 40_000, 300_000, 1_000_000), strict=True)]  # fmt: skip


def test_graphs_replay_side_by_side():
    every = concurrent_cases()
    inputs = [make(case, seed) for seed, case in enumerate(every)]
    wants = [run(case, i) for case, i in zip(every, inputs, strict=True)]
    graphs = [captured(getattr(wrappers, case.function), i)[0] for case, i in zip(every, inputs, strict=True)]
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = top_k(inputs[1]["input"], 400)
        torch.cuda.synchronize()
        cases.same(dict(zip(("values", "indices"), eager, strict=True)), wants[1])
        for case, i, want in zip(every, inputs, wants, strict=True):
            cases.same({name: i[name] for name in cases.OUTPUTS[case.function]} or want, want, case)


def test_two_streams_on_the_same_scores():
    case = TopKCase(TOP_K, rows=2, width=1_000_000, k=2048)
    inputs = make(case)
    want = run(case, inputs)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(30):
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(top_k(inputs["input"], 2048))
        torch.cuda.synchronize()
        for values, indices in found:
            cases.same({"values": values, "indices": indices}, want)


def test_streams_and_threads():
    every = concurrent_cases()
    inputs = [make(case, seed) for seed, case in enumerate(every)]
    wants = [run(case, i) for case, i in zip(every, inputs, strict=True)]
    torch.cuda.synchronize()

    def work(index):
        for _ in range(40):
            cases.same(run(every[index], inputs[index]), wants[index], f"thread {index}")

    in_threads(work, len(every))


@pytest.mark.parametrize("dtype,rows", [("fp32", 1100), ("bf16", 2200)])
def test_scores_beyond_four_gib(dtype, rows):
    """bf16: more elements than 2^31 as well. The last rows lie behind both."""
    scores = torch.empty(rows, 1_000_000, dtype=cases.DTYPES[dtype], device=CUDA)
    assert scores.numel() * scores.element_size() > 1 << 32
    scores.normal_(generator=torch.Generator(CUDA).manual_seed(5))
    values, indices = top_k(scores, 500)
    for picked in (slice(0, 2), slice(rows - 3, rows)):
        with cases.on_reference():
            v, i = top_k(scores[picked], 500)
        cases.same({"v": values[picked], "i": indices[picked]}, {"v": v, "i": i}, picked)


def test_row_stride_beyond_two_billion_elements():
    flat = torch.zeros((1 << 31) + 50_000, dtype=torch.bfloat16, device=CUDA)
    scores = flat.as_strided((2, 40_000), ((1 << 31) + 9, 1))
    scores.copy_(torch.randn(2, 40_000, device=CUDA))
    assert torch.equal(top_k(scores, 999)[1], top_k(scores.contiguous(), 999)[1])


def test_outputs_beyond_two_billion_elements():
    rows, k = 1_100_000, 2000
    offsets = torch.arange(rows, dtype=torch.int32, device=CUDA)
    lengths = torch.arange(rows, dtype=torch.int32, device=CUDA) % 4
    out = wrappers.top_k_ragged_transform(torch.zeros(rows, 3, device=CUDA), offsets, lengths, k)
    for first in range(0, rows, 50_000):
        part = slice(first, first + 50_000)
        want = offsets[part, None] + torch.arange(k, dtype=torch.int32, device=CUDA)
        want.masked_fill_(torch.arange(k, device=CUDA) >= lengths[part, None], -1)
        assert torch.equal(out[part], want)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_planned_calls_never_synchronise(function):
    case = TopKCase(function, rows=6, width=5000, k=64, lengths="mixed", next_n=2, sorted=True)
    inputs = make(case)
    run(case, inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        getattr(wrappers, function)(**inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- around the kernel


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_tensor_on_the_cpu_is_refused(function):
    case = replace(PLAIN[function], starts=function in (PAGE_TABLE, RAGGED), batch_map=True)
    inputs = make(case)
    run(case, inputs)
    names = [name for name, t in inputs.items() if isinstance(t, torch.Tensor) and name not in ("input", "logits")]
    for name in names:
        with pytest.raises(ValueError, match=f"^{name}: device cpu"):
            getattr(wrappers, function)(**inputs | {name: inputs[name].cpu()})
