"""trtllm_batch_context_with_kv_cache on a Hopper GPU, against the fp32 reference and against itself bit by bit.

Kernels come from a bundle where one is built (`make cubins`), else they are compiled as they are met, seconds each.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from bench.cases import attention as cases
from bench.cases import forms, outputs, serving
from bench.cases.planted import STEP_SCALE
from tests.support import gpu
from tests.support.gpu import CUDA, captured, dims, feature, features, grid, in_threads, marked, same, values
from wrappers import trtllm_batch_context_with_kv_cache
from wrappers.attention.op import serve
from wrappers.host import machine

BASE = cases.AttentionCase("", q_lens=(70, 1, 0, 150), kv_lens=(200, 259, 3, 90), heads_q=8, heads_kv=2, sink=True)
PACKED = replace(BASE, q_lens=(1, 5, 0, 16), kv_lens=(131, 5, 7, 300))
DIMS = dims((64, 64), (128, 128), (192, 128), (256, 256))
CAUSAL = {"causal": {}, "full": {"causal": False}}
CAP = {"": {}, "cap": {"soft_cap": 4.0}}


def make(case, seed=0, **changes):
    return cases.make_inputs(case, CUDA, seed) | changes


def run(inputs):
    return gpu.run("context", inputs)


def matches_reference(case, **changes):
    inputs = make(case, **changes)
    gpu.as_expected(case, run(inputs), cases.reference_of(inputs))


# ---- against the reference


@pytest.mark.parametrize(
    "case",
    grid(
        BASE,
        DIMS,
        values("dtype", "bf16", "fp16"),
        CAUSAL,
        {"": {}, "window": {"window_left": 37}},
        CAP,
        {"rows": {}, "packed": {"q_lens": PACKED.q_lens, "kv_lens": PACKED.kv_lens}},
    ),
)
@feature(*(f"prefill page size {size}" for size in cases.PAGE_SIZES))
def test_modifiers(case):
    """Every sink, LSE, layout and page size of a kernel: close to the reference, and the same bits among themselves."""
    for sink in (True, False):
        want, first = None, None
        for page, layout, lse in itertools.product(cases.PAGE_SIZES, ("HND", "NHD"), (True, False)):
            variant = replace(case, sink=sink, page_size=page, layout=layout, lse=lse)
            inputs = make(variant)
            got = run(inputs)
            if want is None or first is None:
                want, first = cases.reference_of(inputs), got
                gpu.as_expected(replace(case, name=f"{sink=} {page=} {layout}"), got, want)
            same(got, first, f"{sink=} {page=} {layout} {lse=}")


OTHER_DIMS = dims(*((dim, dim) for dim in (16, 32, 80, 96, 112, 160, 192, 224)))  # a bundle holds no kernels of these
TYPES = {"": {}, "e4m3": {"dtype": "fp8", "out_dtype": "nvfp4"}, "e4m3 cache": {"kv_dtype": "fp8"}}
TYPES |= {"NVFP4 cache": {"kv_dtype": "nvfp4"}}
WIDE = grid(BASE, dims((512, 512)), TYPES, CAUSAL, CAP)


@pytest.mark.parametrize("case", [*grid(BASE, OTHER_DIMS, TYPES, CAUSAL), *WIDE])
def test_padded_head_dims(case):
    matches_reference(replace(case, strided_q=True))
    matches_reference(replace(case, q_lens=PACKED.q_lens, kv_lens=PACKED.kv_lens, page_size=64))
    if not case.kv_dtype and case.causal:
        matches_reference(replace(case, page_size=3))


EIGHT = replace(BASE, dtype="fp8", out_dtype="bf16")


@pytest.mark.parametrize(
    "case",
    grid(
        EIGHT,
        DIMS,
        CAUSAL,
        {"": {}, "window": {"window_left": 37}},
        CAP,
        {"rows": {}, "packed": {"q_lens": PACKED.q_lens, "kv_lens": PACKED.kv_lens}},
    ),
)
def test_fp8(case):
    for page, layout in ((16, "HND"), (64, "NHD")):
        inputs = make(replace(case, page_size=page, layout=layout))
        got = run(inputs)
        gpu.as_expected(replace(case, name=f"{page=}"), got, cases.reference_of(inputs))
        same(run(inputs), got)


@pytest.mark.parametrize(
    "case", grid(EIGHT, dims((128, 128)), {"page 5": {"page_size": 5}, "fp16": {"out_dtype": "fp16"}}, CAUSAL)
)
def test_fp8_of_kernels_that_are_compiled_at_their_first_call(case):
    matches_reference(case)


@pytest.mark.parametrize("case", grid(EIGHT, DIMS))
def test_every_value_of_an_fp8_v_comes_to_its_place(case):
    """A row that sees its own key alone gives the bits of its V."""
    inputs = make(replace(case, q_lens=(333,), kv_lens=(333,), heads_q=2, window_left=0, sink=False))
    table, (_, v) = inputs["block_tables"][0], inputs["kv_cache"]
    rows = v[table[: -(-333 // v.shape[2])].long()].float().transpose(1, 2).flatten(0, 1)[:333]
    assert torch.equal(run(inputs)[0].float(), rows)


def test_fp8_finds_a_needle_among_128k_keys_whose_values_have_a_large_mean():
    keys = 131072
    case = replace(EIGHT, q_lens=(64,), kv_lens=(keys,), heads_q=2, heads_kv=1, page_size=64, data="needles",
                   head_dim_qk=128, head_dim_vo=128, causal=False, sink=0.0)  # fmt: skip
    inputs = make(case)
    inputs["kv_cache"][1].copy_((inputs["kv_cache"][1].float() + 4).to(torch.float8_e4m3fn))
    got, want = run(inputs), cases.reference_of(inputs)
    gpu.close(got, want, 0.03, 0.05, limit_lse=case.lse_tolerance)


SKIPPING = replace(BASE, data="levels", scale=STEP_SCALE, kv_lens=(700, 1190, 3, 600), skip=160.0)
LATE = {"data": "levels-late", "scale": STEP_SCALE / 2, "kv_lens": (17800, 18700, 3, 17500), "skip": 7300.0}


@pytest.mark.parametrize(
    "case",
    grid(
        SKIPPING,
        DIMS,
        values("dtype", "bf16", "fp16"),
        {"causal": {}, "full": {"causal": False}, "window-cap": {"window_left": 480, "soft_cap": 30.0}, "late": LATE},
        {"rows": {"q_lens": (210, 1, 0, 150)}, "packed": {"q_lens": (1, 5, 0, 16)}},
    ),
)
def test_skip_softmax(case):
    """Leaves out the blocks that the rule in plain torch does; none, and the bits of the dense kernel, with a tiny
    factor."""
    for seed in itertools.count():
        try:
            inputs, want = gpu.call_of(case, CUDA, seed)
        except ValueError as too_close:  # a vote that rounding decides
            assert seed < 20, too_close
            continue
        break
    got = run(inputs)
    gpu.as_expected(case, got, want)
    same(run(inputs), got)
    dense = run(inputs | {"skip_softmax_threshold_scale_factor": None})
    assert (got[1] < dense[1] - 0.01).any(), "nothing was left out"
    same(run(inputs | {"skip_softmax_threshold_scale_factor": 1e-30}), dense)


@pytest.mark.parametrize("case", [marked(case) for case in cases.EDGE.values()])
def test_edges(case):
    matches_reference(case)


def of_group(group, q_len):
    lens = (q_len, max(0, q_len - 1), q_len)
    return replace(BASE, q_lens=lens, kv_lens=(q_len, 333, 2 * q_len), heads_q=2 * group, heads_kv=2)


@pytest.mark.parametrize(
    "case",
    [
        marked(of_group(group, q_len), f"{group}-{q_len}")
        for group in (1, 2, 3, 4, 5, 6, 7, 8, 16)
        for q_len in (1, 2, 63, 64, 65, 128, 129, 200)
    ],
)
def test_groups_and_row_counts(case):
    matches_reference(case)


LENGTHS = (0, 1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 1000, 4097)


@pytest.mark.parametrize(
    "case", grid(BASE, {f"s{n}": {"q_lens": (130, 3), "kv_lens": (n, 20)} for n in LENGTHS}, CAUSAL)
)
def test_kv_lengths(case):
    for sink, q in itertools.product((True, False), (1, 130)):
        matches_reference(replace(case, q_lens=(q, 3), sink=sink))


@pytest.mark.parametrize(
    "case",
    grid(
        replace(BASE, q_lens=(200, 5), kv_lens=(700, 600)),
        values("window_left", 0, 1, 127, 128, 129, 5000, 1 << 29),
        CAUSAL,
    ),
)
def test_windows(case):
    matches_reference(case)


@pytest.mark.parametrize("case", [*map(marked, (cases.PREFILL_BF16 | serving.PREFILL | serving.SERVE).values())])
def test_headline_cases(case):
    matches_reference(case)


@feature(*features(BASE))
def test_many_requests():
    """More requests than a warp looks at in one step, most of them short or empty."""
    q_lens = tuple((i * 7) % 5 for i in range(300))
    kv_lens = tuple((i * 11) % 90 for i in range(300))
    matches_reference(replace(BASE, q_lens=q_lens, kv_lens=kv_lens))
    matches_reference(replace(BASE, q_lens=(*q_lens, 500), kv_lens=(*kv_lens, 600)))


def test_large_logits():
    matches_reference(replace(BASE, sink=False), bmm1_scale=100.0)
    inputs = make(replace(BASE, sink=False))
    inputs["query"][0, 0], inputs["kv_cache"][0][:, 0] = 64.0, -64.0  # every logit of row 0, head 0 is -3.3e4
    gpu.as_expected(BASE, run(inputs), cases.reference_of(inputs))


@feature("prefill with sinks")
def test_sink_limits():
    case = replace(BASE, sink=False)
    plain = run(make(case))
    same(run(make(case, sinks=torch.full((8,), -math.inf, device=CUDA))), plain)
    matches_reference(case, sinks=torch.full((8,), 50.0, device=CUDA))


@pytest.mark.parametrize("shape", [(), (1,)])
@feature("prefill with scales on the device")
def test_device_scales(shape):
    scales = {"bmm1_scale": torch.full(shape, 0.2, device=CUDA), "bmm2_scale": torch.full(shape, 0.5, device=CUDA)}
    got = run(make(BASE, **scales))
    gpu.as_expected(BASE, got, cases.reference_of(make(BASE, **scales)))
    gpu.as_expected(BASE, got, [t.float() for t in run(make(BASE, bmm1_scale=0.2, bmm2_scale=0.5))])


@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_device_scale_that_is_not_positive(scale):
    """Gives NaN, as rows with sinks show, and ends."""
    case = replace(BASE, q_lens=(40, 300), kv_lens=(700, 900))
    out, lse = run(make(case, bmm1_scale=torch.full((1,), scale, device=CUDA)))
    assert out.isnan().all() and lse.isnan().all()


def test_strided_outputs():
    inputs = make(BASE)
    want = run(inputs)
    tokens = len(inputs["query"])
    wide, wide_lse = (
        torch.zeros(tokens, 16, 128, dtype=torch.bfloat16, device=CUDA),
        torch.zeros(8, tokens, device=CUDA),
    )
    inputs |= {"out": wide[:, ::2, :64], "lse": wide_lse.T}
    same(run(inputs), want)
    assert not wide[:, 1::2].any() and not wide[..., 64:].any()


# ---- same bits


@pytest.mark.parametrize(
    "case",
    [marked(BASE, "rows"), marked(PACKED, "pack"), marked(replace(BASE, q_lens=(700,), kv_lens=(3000,)), "long")],
)
def test_repeats(case):
    inputs = make(case)
    first = run(inputs)
    for _ in range(30):
        same(run(inputs), first)


def alone(inputs, request):
    """A request of a batch as a call of its own."""
    begin, end = inputs["cum_seq_lens_q"][request : request + 2].tolist()
    one = slice(request, request + 1)
    return inputs | {
        "query": inputs["query"][begin:end],
        "block_tables": inputs["block_tables"][one],
        "seq_lens": inputs["seq_lens"][one],
        "cum_seq_lens_q": torch.tensor([0, end - begin], dtype=torch.int32, device=CUDA),
        "batch_size": 1,
        "max_q_len": end - begin,
        "out": None,
        "lse": None,
    }


@pytest.mark.parametrize(
    "case",
    grid(replace(BASE, q_lens=(1, 300, 20, 64, 0, 7), kv_lens=(500, 300, 777, 64, 9, 200)), DIMS, CAP, CAUSAL),
)
def test_batch_invariance(case):
    """A request gives the same bits alone and in a batch, where it may take another kernel (packed or not)."""
    inputs = make(case)
    o, lse = run(inputs)
    starts = inputs["cum_seq_lens_q"].tolist()
    for request in range(case.batch):
        rows = slice(starts[request], starts[request + 1])
        same(run(alone(inputs, request)), (o[rows], lse[rows]), f"{request=}")


@pytest.mark.parametrize("case", [marked(BASE, "rows"), marked(PACKED, "packed")])
def test_bounds_do_not_matter(case):
    first = run(make(case))
    for bound in (0, 1, 64, 65, 10**6):
        same(run(make(case, max_q_len=bound, max_kv_len=bound)), first, f"max_q_len={bound}")


@feature(*features(BASE))
def test_pdl_does_not_matter():
    """Back to back, so that a kernel which does not wait for its predecessor reads a half-written query."""
    case = replace(BASE, q_lens=(500, 300), kv_lens=(900, 700))
    source, inputs = make(case)["query"].clone(), make(case)
    first = run(inputs)
    for pdl in (True, False, None):
        inputs["enable_pdl"] = pdl
        inputs["query"].zero_()
        for _ in range(10):
            inputs["query"].copy_(source)
            o, lse = trtllm_batch_context_with_kv_cache(**inputs)
            inputs["query"].zero_()
        same((o, lse), first, f"{pdl=}")
        inputs["query"].copy_(source)
        chained = inputs | {"out": torch.empty_like(inputs["out"])}  # the next launch reads what the last one wrote
        for _ in range(10):
            chained = chained | {"query": trtllm_batch_context_with_kv_cache(**chained)[0], "out": None}
        if pdl is True:
            last = chained["query"]
        else:
            assert torch.equal(chained["query"], last)


def test_unsigned_lengths():
    inputs = make(BASE)
    same(run(inputs | {"seq_lens": inputs["seq_lens"].view(torch.uint32)}), run(inputs))


# ---- graphs, streams, memory


def fill_lengths(inputs, q_lens, kv_lens):
    inputs["cum_seq_lens_q"].copy_(torch.tensor([0, *q_lens]).cumsum(0))
    inputs["seq_lens"].copy_(torch.tensor(kv_lens))


@pytest.mark.parametrize("warm", [True, False])
@feature("prefill with CUDA graph replay at other lengths")
def test_capture_short_replay_long(monkeypatch, warm):
    case = replace(BASE, q_lens=(300, 100, 60), kv_lens=(900, 100, 555))
    inputs = make(case)
    want = run(inputs)
    if not warm:  # as in a process whose first call is captured
        monkeypatch.setattr(machine, "current", machine.HostMachine())
    fill_lengths(inputs, (1, 0, 2), (1, 0, 5))
    graph, result = captured(trtllm_batch_context_with_kv_cache, inputs)
    for q_lens, kv_lens in (((5, 6, 7), (5, 60, 70)), (case.q_lens, case.kv_lens)):
        fill_lengths(inputs, q_lens, kv_lens)
        inputs["out"].fill_(math.nan)
        graph.replay()
        assert not result[0][: sum(q_lens)].isnan().any()
    same(result, want)


def test_graphs_replay_side_by_side():
    shapes = [replace(BASE, q_lens=(200 + 50 * i, 33), kv_lens=(1500, 100 + i)) for i in range(4)]
    inputs = [make(case, seed) for seed, case in enumerate(shapes)]
    wants = [run(i) for i in inputs]
    graphs = [captured(trtllm_batch_context_with_kv_cache, i) for i in inputs]
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(25):
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = run(inputs[0] | {"out": None, "lse": None, "return_lse": True})
        torch.cuda.synchronize()
        for (_, result), want in zip(graphs, wants, strict=True):
            same(result, want)
        same(eager, wants[0])


@feature(*features(BASE))
def test_streams_and_threads():
    shapes = [replace(BASE, q_lens=(100 + 90 * i, 5), kv_lens=(900, 50 + i), page_size=16 << i % 3) for i in range(4)]
    inputs = [make(case, seed) for seed, case in enumerate(shapes)]
    wants = [run(i) for i in inputs]
    torch.cuda.synchronize()

    def work(index):
        for _ in range(50):
            same(run(inputs[index]), wants[index], f"thread {index}")

    in_threads(work, len(inputs))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_pool_beyond_two_billion_elements(layout):
    case = replace(BASE, head_dim_qk=128, head_dim_vo=128, page_size=64, layout=layout)
    inputs = make(case)
    want = run(inputs)
    small = inputs["kv_cache"]
    pages = (1 << 31) // small[0][0].numel() + 1000
    big = tuple(torch.empty(pages, *t.shape[1:], dtype=t.dtype, device=CUDA).fill_(math.nan) for t in small)
    for to, source in zip(big, small, strict=True):
        to[-len(source) :] = source
    table = inputs["block_tables"]
    shifted = torch.where(table < len(small[0]), table + pages - len(small[0]), table)
    same(run(inputs | {"kv_cache": big, "block_tables": shifted}), want)


def test_planned_calls_never_synchronise():
    inputs = make(BASE, bmm1_scale=torch.ones(1, device=CUDA), out=None)
    trtllm_batch_context_with_kv_cache(**inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        trtllm_batch_context_with_kv_cache(**inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- around the kernel


@pytest.mark.parametrize("name", ["seq_lens", "block_tables", "cum_seq_lens_q", "sinks", "kv_cache", "out", "lse"])
def test_a_tensor_on_the_cpu_is_refused(name):
    inputs = make(cases.EDGE["plain"])
    run(inputs)
    value = inputs[name]
    inputs[name] = tuple(t.cpu() for t in value) if isinstance(value, tuple) else value.cpu()
    with pytest.raises(ValueError, match=f"^{name}.*device cpu"):
        trtllm_batch_context_with_kv_cache(**inputs)


@pytest.mark.parametrize(
    "case",
    grid(
        BASE,
        DIMS,
        values("dtype", "bf16", "fp16", "fp8"),
        {"e4m3": {"out_dtype": "fp8", "out_scale": 300.0}, "nvfp4": {"out_dtype": "nvfp4"}},
        {"rows": {}, "packed": {"q_lens": PACKED.q_lens, "kv_lens": PACKED.kv_lens}},
    ),
)
def test_quantised_outputs(case):
    gpu.matches_reference(case, CUDA)


@pytest.mark.parametrize("case", grid(BASE, {"fp16": {"dtype": "bf16", "out_dtype": "fp16"}}, DIMS))
def test_the_other_16_bits(case):
    gpu.matches_reference(case, CUDA)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(8, 8), (4, 1)], ids=str)
@feature("prefill output NVFP4")
def test_bytes_of_nvfp4_output(heads, dim):
    """The quantiser's, from any row of the factors on; a request has no keys."""
    known = outputs.known("prefill", "bf16", dim, heads, "", (512, 1, 0, 128), CUDA)
    for start in (0, 126, 300):
        gpu.writes_bytes(known, start)


CACHES = {"e4m3": {"kv_dtype": "fp8"}, "nvfp4": {"kv_dtype": "nvfp4"}, "e5m2": {"kv_dtype": "e5m2"}}
D128 = replace(BASE, head_dim_qk=128, head_dim_vo=128)
QUERIES = {q: {"dtype": q} for q in ("bf16", "fp16")} | {"e4m3": {"dtype": "fp8", "out_dtype": "bf16"}}


@pytest.mark.parametrize(
    "case",
    grid(
        BASE,
        dims((64, 64), (128, 128)),
        values("kv_dtype", "fp8", "nvfp4"),
        CAUSAL,
        {"": {}, "window-cap": {"window_left": 37, "soft_cap": 4.0}},
        {"rows": {}, "packed": {"q_lens": PACKED.q_lens, "kv_lens": PACKED.kv_lens}},
    ),
)
def test_quantised_caches(case):
    """Every page size: the same bits."""
    first = None
    for page in cases.PAGE_SIZES:
        inputs = make(replace(case, page_size=page))
        got = run(inputs)
        if first is None:
            first = got
            gpu.as_expected(case, got, cases.reference_of(inputs))
        same(got, first, f"{page=}")


OTHERS = [*grid(replace(BASE, data="needles"), DIMS, CACHES), *grid(replace(D128, data="needles"), CACHES, QUERIES)]


@pytest.mark.parametrize("case", [*OTHERS, *grid(replace(D128, page_size=24), CACHES)])
def test_kernels_of_quantised_caches(case):
    """Long rows as well, and, of bf16, ones beyond fp16's range."""
    matches_reference(case)
    matches_reference(replace(case, kv_lens=(4000, 259, 3, 1151), separate_tables=True))
    if case.dtype == "bf16":
        matches_reference(replace(case, data="normal", sink=False, q_unit=2.0**90, scale=2.0**-93))


@pytest.mark.parametrize("case", grid(replace(BASE, kv_dtype="nvfp4", interleaved=True), DIMS, CAUSAL))
def test_interleaved_factors_of_v(case):
    """As the classes of the prefill family take them."""
    problem = forms.apply(cases.make_call(case, CUDA), ("csr",))
    shape = *problem.q.shape[:2], case.head_dim_vo
    out, lse = (torch.full(s, math.nan, dtype=t, device=CUDA) for s, t in ((shape, problem.q.dtype), (shape[:2], None)))
    serve(problem._replace(out=out, lse=lse))
    gpu.as_expected(case, (out, lse), cases.expected(case, problem))


@pytest.mark.parametrize(
    "case", grid(replace(BASE, q_lens=(300, 129), kv_lens=(700, 140)), values("kv_dtype", "fp8", "e5m2"))
)
def test_what_no_key_is_stays_out_of_quantised_caches(case):
    """Zeros instead of NaN past the lengths: the same bits."""
    inputs = make(case)
    want = run(inputs)
    for cache in inputs["kv_cache"]:
        raw = cache.view(torch.uint8)
        raw[raw & 0x7F >= (0x7F if case.kv_dtype == "fp8" else 0x7D)] = 0
    same(run(inputs), want)


@pytest.mark.parametrize("shift", [1, 4])
def test_misaligned_query(shift):
    inputs = make(BASE)
    run(inputs)
    q = inputs["query"]
    inputs["query"] = torch.zeros(q.numel() + 8, dtype=q.dtype, device=CUDA)[shift : shift + q.numel()].view(q.shape)
    with pytest.raises(ValueError, match="query: address"):
        trtllm_batch_context_with_kv_cache(**inputs)
