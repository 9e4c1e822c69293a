"""The decode functions on a Hopper GPU, against the fp32 reference and against themselves bit by bit."""

import math
from dataclasses import replace

import pytest
import torch

import wrappers
from bench.cases import attention as cases
from tests.gpu import captured, in_threads
from tests.test_decode_wrapper import brute, packed, tree, xqa_inputs
from wrappers import machine, trtllm_batch_decode_with_kv_cache, xqa

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 device"
)

CUDA = torch.device("cuda", 0)
BASE = cases.AttentionCase(
    "", q_lens=(1, 1, 1, 1), kv_lens=(2000, 1, 0, 300), heads_q=8, heads_kv=2, page_size=64, sink=True
)
DIMS = (64, 128, 256)
CACHES = pytest.mark.parametrize("kv", ["", "fp8", "nvfp4"])


def make(case, seed=0, **changes):
    return cases.as_decode(cases.make_inputs(case, CUDA, seed)) | changes


def run(inputs):
    """(o, lse), copies, so that a second run cannot pass on the first one's result."""
    for name in ("out", "lse"):
        inputs[name].fill_(math.nan)
    o, lse = trtllm_batch_decode_with_kv_cache(**inputs)
    return o.clone(), lse.clone()


def close(got, want, tolerance, what=""):
    message = (lambda text: f"{what}: {text}") if what else None
    for g, w, limit in zip(got, want, (tolerance, cases.LSE_TOLERANCE)):
        torch.testing.assert_close(g.float(), w, rtol=limit, atol=limit, msg=message)


def matches_reference(case, seed=0, **changes):
    expected = cases.reference_of(cases.make_inputs(case, CUDA, seed))
    inputs = make(case, seed, **changes)
    first = run(inputs)
    close(first, expected, case.tolerance, case.name)
    assert all(map(torch.equal, run(inputs), first)), "bits"


@pytest.mark.parametrize("cap", [0.0, 4.0], ids=["", "cap"])
@pytest.mark.parametrize("window", [-1, 137], ids=["", "window"])
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dim", DIMS, ids=lambda d: f"d{d}")
@CACHES
def test_modifiers(kv, dim, dtype, sink, window, cap):
    case = replace(BASE, dtype=dtype, head_dim_qk=dim, head_dim_vo=dim, sink=sink, window_left=window, soft_cap=cap)
    matches_reference(replace(case, kv_dtype=kv))


@pytest.mark.parametrize("page", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("dim", DIMS, ids=lambda d: f"d{d}")
@CACHES
def test_lengths_around_edges_of_tiles_and_pages(kv, dim, page):
    """Batches whose splits fall anywhere, from one request over all SMs to many that fit one."""
    edges = sorted({max(0, n + d) for n in (page, 80, 128, 256, 640, 1280) for d in (-1, 0, 1)})
    for lens in [(n,) for n in edges[::4]] + [tuple(edges), tuple(edges * 12), (9000, *edges, 1)]:
        case = replace(BASE, name=f"{len(lens)} requests", q_lens=(1,) * len(lens), kv_lens=lens, page_size=page,
                       kv_dtype=kv)  # fmt: skip
        matches_reference(replace(case, head_dim_qk=dim, head_dim_vo=dim))


@pytest.mark.parametrize(
    "heads", [(1, 1), (4, 4), (6, 2), (5, 1), (16, 1), (40, 8), (128, 8), (64, 1), (96, 1)], ids=str
)
@CACHES
def test_groups(kv, heads):
    case = replace(BASE, heads_q=heads[0], heads_kv=heads[1], head_dim_qk=128, head_dim_vo=128, kv_dtype=kv)
    matches_reference(case)


@pytest.mark.parametrize("q_len", [1, 2, 3, 8, 16, 33, 64])
@CACHES
def test_several_query_tokens(kv, q_len):
    lens = (q_len, 2000, 129, 64 + q_len, 900)
    case = replace(BASE, q_lens=(q_len,) * len(lens), kv_lens=lens, window_left=500, kv_dtype=kv)
    expected = cases.reference_of(cases.make_inputs(case, CUDA))
    inputs = make(case)
    ragged = run(inputs)
    close(ragged, expected, case.tolerance)
    plain = inputs | {"cum_seq_lens_q": None, "max_q_len": None, "q_len_per_req": q_len}
    assert all(map(torch.equal, run(plain), ragged))


@pytest.mark.parametrize("dim", DIMS, ids=lambda d: f"d{d}")
@CACHES
def test_ragged_queries(kv, dim):
    case = replace(BASE, q_lens=(3, 0, 17, 1, 40), kv_lens=(2500, 9, 17, 0, 300), head_dim_qk=dim, head_dim_vo=dim)
    matches_reference(replace(case, kv_dtype=kv))


@pytest.mark.parametrize(
    "change",
    [{"layout": "NHD"}, {"cache": "stacked"}, {"cache": "shared"}, {"separate_tables": True}, {"strided_q": True}],
    ids=lambda c: next(iter(c)),
)
@CACHES
def test_forms_of_the_cache(kv, change):
    matches_reference(replace(BASE, kv_dtype=kv, **change))


@CACHES
def test_one_long_request_and_many_short_ones(kv):
    lens = (100_000, *([200] * 255))
    case = replace(BASE, q_lens=(1,) * 256, kv_lens=lens, head_dim_qk=128, head_dim_vo=128, spare_pages=1, kv_dtype=kv)
    matches_reference(case)
    matches_reference(replace(case, q_lens=(1,), kv_lens=(131_072,)))


@CACHES
def test_pages_that_do_not_exist_are_zeros(kv):
    """Negative entries of the table, past a length or before it, and ones past the pool."""
    case = replace(BASE, q_lens=(1, 1), kv_lens=(600, 5000), kv_dtype=kv)
    inputs = make(case, cum_seq_lens_q=None, max_q_len=None)
    want = cases.make_inputs(case, CUDA)
    table = inputs["block_tables"]
    page, last = inputs["kv_cache"][0].shape[2], int(inputs["kv_cache"][0].shape[0])
    for gone, entry in ((2, -1), (5, last)):
        for pool in (*want["kv_cache"], *(want.get("kv_block_scales") or ())):
            (pool.view(torch.uint8) if pool.element_size() == 1 else pool)[table[0, gone].long()] = 0
        table[0, gone] = entry
    table[0, -(-600 // page) :] = -7
    close(run(inputs), cases.reference_of(want), case.tolerance)


def test_counters_of_parts_are_zero_after_launches():
    for lens in ((100_000,), (3, 70_000, 500), (9000,) * 40):
        inputs = make(replace(BASE, q_lens=(1,) * len(lens), kv_lens=lens), cum_seq_lens_q=None, max_q_len=None)
        run(inputs)
    torch.cuda.synchronize()
    parts = machine.current.parts
    assert parts and not any(counters.any() for _, counters in parts.values())


def test_workspace_may_hold_anything():
    inputs = make(BASE, workspace_buffer=torch.randint(0, 255, (1 << 20,), dtype=torch.uint8, device=CUDA))
    close(run(inputs), cases.reference_of(cases.make_inputs(BASE, CUDA)), BASE.tolerance)


@pytest.mark.parametrize("sink", [-math.inf, 80.0])
def test_sink_of_any_size(sink):
    inputs = cases.make_inputs(BASE, CUDA) | {"sinks": torch.full((8,), sink, device=CUDA)}
    close(run(cases.as_decode(inputs)), cases.reference_of(inputs), BASE.tolerance)


@CACHES
def test_graph_replay_at_other_lengths(kv):
    """Captured at 2 tokens, replayed at 8192 and back: the bits of eager calls."""
    case = replace(BASE, q_lens=(1,) * 3, kv_lens=(8192, 5000, 8191), head_dim_qk=128, head_dim_vo=128, kv_dtype=kv)
    inputs = make(case)
    full = inputs["seq_lens"].clone()
    inputs["seq_lens"].fill_(2)
    for plain in (False, True):
        if plain:
            inputs |= {"cum_seq_lens_q": None, "max_q_len": None}
        graph, (o, lse) = captured(trtllm_batch_decode_with_kv_cache, inputs)
        for lens in (torch.full_like(full, 2), full, torch.zeros_like(full), full // 3, torch.full_like(full, 2)):
            inputs["seq_lens"].copy_(lens)
            expected = run(inputs)
            o.fill_(math.nan), lse.fill_(math.nan)
            graph.replay()
            assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1]), lens.tolist()


def test_streams_side_by_side():
    case = replace(BASE, kv_lens=(3000, 900, 1, 2000), head_dim_qk=128, head_dim_vo=128)
    many = [make(case, seed) for seed in range(4)]
    expected = [run(inputs) for inputs in many]
    torch.cuda.synchronize()

    def work(i):
        for _ in range(20):
            assert all(map(torch.equal, run(many[i]), expected[i]))

    in_threads(work, 4)


def on_cpu(inputs):
    """What the reference makes of the same call."""
    here = lambda x: tuple(map(here, x)) if isinstance(x, tuple) else x.cpu() if isinstance(x, torch.Tensor) else x  # noqa: E731
    return trtllm_batch_decode_with_kv_cache(**{name: here(x) for name, x in inputs.items()})


@pytest.mark.parametrize("form", ["equal", "ragged", "causal"])
@pytest.mark.parametrize("q_len", [2, 5, 16, 33, 64])
@CACHES
def test_masks_of_drafts(kv, q_len, form):
    """Linear and tree masks, of more than 32 drafts too; drafts over the edges of tiles; with a window."""
    q_lens = (q_len, q_len, 0, 3, 1) if form == "ragged" else (q_len,) * 5
    lens = (q_len + 2000, q_len, 77, 257, 100 + q_len)
    masks = [torch.ones(n, n).bool().tril() if form == "causal" else tree(n, b) for b, n in enumerate(q_lens)]
    case = replace(BASE, q_lens=q_lens, kv_lens=lens, kv_dtype=kv, window_left=300)
    inputs = make(case, mask=packed(masks).to(CUDA))
    if form != "ragged":
        inputs |= {"cum_seq_lens_q": None, "max_q_len": None, "q_len_per_req": q_len}
        inputs["mask"] = inputs["mask"].unflatten(0, (5, q_len))
    got = run(inputs)
    close([t.cpu() for t in got], [t.float() for t in on_cpu(inputs)], case.tolerance)
    assert all(map(torch.equal, run(inputs), got))
    if form == "causal":
        close(got, [t.float() for t in run(make(case))], case.tolerance)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@CACHES
def test_e4m3_output(kv, dtype):
    """The kernel's own fp32 output rounded and saturated, whole tiles and merged ones."""
    case = replace(BASE, dtype=dtype, kv_dtype=kv, head_dim_qk=128, head_dim_vo=128, kv_lens=(9000, 1, 0, 300))
    inputs = make(case, bmm2_scale=300.0)
    want, lse = cases.reference_of(cases.make_inputs(case, CUDA) | {"bmm2_scale": 300.0})
    inputs["out"] = torch.empty(want.shape, dtype=torch.float8_e4m3fn, device=CUDA)
    inputs["out"].view(torch.uint8).fill_(0x7F)
    o, got = trtllm_batch_decode_with_kv_cache(**inputs)
    assert o is inputs["out"] and (want.abs() > 448).any()
    close((got,), (lse,), cases.LSE_TOLERANCE)
    torch.testing.assert_close(o.float(), want.clamp(-448, 448), rtol=0.07, atol=0.5)


@CACHES
def test_skip_softmax(kv):
    """A tiny factor leaves nothing out. A large one leaves out keys only: every LSE lies between those of the largest
    key and of all, and outputs of rows with one dominant key stay."""
    case = replace(BASE, kv_dtype=kv, head_dim_qk=128, head_dim_vo=128, sink=False, kv_lens=(200_000, 1, 0, 300))
    dense = run(make(case))
    tiny = run(make(case, skip_softmax_threshold_scale_factor=1e-30))
    assert all(map(torch.equal, tiny, dense))
    inputs = make(case, skip_softmax_threshold_scale_factor=1e6)
    o, lse = run(inputs)
    inputs["query"] = inputs["query"] * 0  # equal logits: nothing is below the largest
    flat = run(inputs | {"skip_softmax_threshold_scale_factor": 0.5})
    inputs["skip_softmax_threshold_scale_factor"] = None
    assert all(map(torch.equal, run(inputs), flat))
    assert o.isfinite().all() and (lse <= dense[1] + 1e-3).all() and (lse[0] < dense[1][0] - 0.1).any()
    inputs = make(case, skip_softmax_threshold_scale_factor=50.0)
    inputs["query"] = inputs["query"] * 20
    sharp = run(inputs)
    inputs["skip_softmax_threshold_scale_factor"] = None
    close(sharp, [t.float() for t in run(inputs)], case.tolerance)


@pytest.mark.parametrize("q_len", [1, 20])
@CACHES
def test_batch_invariant_bits(kv, q_len):
    """A request alone, among others, and among others in another order; short ones and many parts."""
    lens = (9000, 4096, 100, 70_000, 4097, 1, 0, 12_289)
    case = replace(BASE, q_lens=(q_len,) * 8, kv_lens=lens, head_dim_qk=128, head_dim_vo=128, kv_dtype=kv)
    inputs = make(case, batch_invariant=True, cum_seq_lens_q=None, max_q_len=None, q_len_per_req=q_len)
    o, lse = run(inputs)
    close((o, lse), cases.reference_of(cases.make_inputs(case, CUDA)), case.tolerance)
    o, lse = o.view(8, q_len, 8, 128), lse.view(8, q_len, 8)
    for chosen in (*([b] for b in range(8)), [7, 3, 0], [4] * 40):
        part = dict(inputs)
        for name in ("query", "out", "lse"):
            part[name] = inputs[name].unflatten(0, (8, q_len))[chosen].flatten(0, 1).contiguous()
        for name in ("block_tables", "seq_lens"):
            part[name] = inputs[name][chosen].contiguous()
        got = run(part)
        assert torch.equal(got[0], o[chosen].flatten(0, 1)) and torch.equal(got[1], lse[chosen].flatten(0, 1)), chosen


@CACHES
def test_batch_invariant_bits_of_ragged_requests(kv):
    """A request with few rows beside one with many, for which there would be a kernel of its own."""
    q_lens = (1, 20, 3)  # 80 rows: more than one tile of NVFP4's kernel
    case = replace(BASE, q_lens=q_lens, kv_lens=(9000, 300, 70), head_dim_qk=128, head_dim_vo=128, kv_dtype=kv)
    inputs = make(case, batch_invariant=True)
    o, lse = run(inputs)
    for b, n in enumerate(q_lens):
        own = slice(sum(q_lens[:b]), sum(q_lens[: b + 1]))
        alone = inputs | {"cum_seq_lens_q": None, "max_q_len": None, "q_len_per_req": n}
        alone |= {name: inputs[name][own].contiguous() for name in ("query", "out", "lse")}
        alone |= {name: inputs[name][b : b + 1].contiguous() for name in ("block_tables", "seq_lens")}
        got = run(alone)
        assert torch.equal(got[0], o[own]) and torch.equal(got[1], lse[own]), b


@pytest.mark.parametrize("kv", ["fp8", "nvfp4"])
def test_needle_in_128k_keys(kv):
    """A long row over values far from zero: sums lose nothing, and one key among all is found."""
    length, heads, dim = 131_072, 2, 128
    case = replace(BASE, q_lens=(1,), kv_lens=(length,), heads_q=heads, heads_kv=1, kv_dtype=kv,
                   head_dim_qk=dim, head_dim_vo=dim, sink=False)  # fmt: skip
    inputs = cases.make_inputs(replace(case, kv_dtype=""), CUDA)
    k, v = (t.float() for t in inputs["kv_cache"])
    v, k = v * 0.1 + 100.0, k * 0.05
    page, inside = int(inputs["block_tables"][0, 77_777 // 64]), 77_777 % 64
    k[page, 0, inside] = inputs["query"][0, 0].float()
    v[page, 0, inside] = torch.linspace(-6.0, 6.0, dim, device=CUDA)
    if kv == "fp8":
        inputs["kv_cache"] = tuple(t.to(torch.float8_e4m3fn) for t in (k, v))
    else:
        made = [wrappers.nvfp4_quantize(t) for t in (k, v)]
        inputs |= {"kv_cache": tuple(t[0] for t in made), "kv_block_scales": tuple(t[1] for t in made)}
    want = cases.reference_of(inputs)
    got = run(cases.as_decode(inputs))
    close(got, want, 5e-3)
    assert (want[0][0, 0] - 100).abs().max() > 10  # the needle shows, in the head that looks for it
    assert (want[0][0, 1] - 100).abs().max() < 5  # NVFP4 has 96 for 100


def test_xqa_of_quantised_caches():
    for kind in ("e4m3", "nvfp4"):
        inputs, _ = xqa_inputs(lens=(900, 0, 1, 64, 300))
        for name, sf in (("k_cache", "k_sf_cache"), ("v_cache", "v_sf_cache")):
            inputs[name] = inputs[name].nan_to_num(0.0)
            if kind == "e4m3":
                inputs[name] = inputs[name].to(torch.float8_e4m3fn)
            else:
                inputs[name], factors = wrappers.nvfp4_quantize(inputs[name])
                inputs[sf] = factors.view(torch.uint8)
        there = {name: x.to(CUDA) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        xqa(**inputs), xqa(**there)
        torch.testing.assert_close(there["output"].cpu(), inputs["output"], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("ragged", [False, True])
def test_xqa_drafts(ragged):
    q_lens = (5, 0, 2) if ragged else (5, 5, 5)
    case = replace(BASE, q_lens=q_lens, kv_lens=(400, 9, 5), dtype="fp16", layout="NHD")
    inputs = make(case, mask=packed([tree(n, b) for b, n in enumerate(q_lens)]).to(CUDA))
    want, _ = run(inputs)
    q, mask, extra = inputs["query"], inputs["mask"], {"q_cu_seq_lens": inputs["cum_seq_lens_q"]}
    if not ragged:
        q, mask, extra = q.unflatten(0, (3, 1, 5)), mask.unflatten(0, (3, 5)), {}
    out = torch.full(q.shape, math.nan, dtype=torch.float16, device=CUDA)
    xqa(q, *inputs["kv_cache"], inputs["block_tables"], inputs["seq_lens"][:, None], out, None, None, 2, 64,
        sinks=inputs["sinks"].view(2, -1), q_seq_len=5, mask=mask, **extra)  # fmt: skip
    torch.testing.assert_close(out.view(want.shape), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "form", [{}, {"layout": "HND"}, {"flat": True}, {"heads": (64, 8), "dim": 128, "page": 64}], ids=str
)
@pytest.mark.parametrize("window", [0, 1, 200])
def test_xqa(form, window):
    inputs, rows = xqa_inputs(lens=(900, 0, 1, 64, 300), **form)
    hkv, group = inputs["num_kv_heads"], inputs["q"].shape[2] // inputs["num_kv_heads"]
    inputs |= {"sliding_win_size": window, "sinks": torch.randn(hkv, group), "q_scale": 0.8,
               "kv_scale": torch.tensor([1.2])}  # fmt: skip
    want = brute(inputs, rows)
    there = {name: x.to(CUDA) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    assert xqa(**there) is None
    torch.testing.assert_close(there["output"].cpu().double(), want, rtol=2e-3, atol=2e-3)


def test_xqa_negative_page_is_zeros():
    inputs, rows = xqa_inputs(lens=(300, 40))
    inputs["page_table"][0, 1] = -1
    for t in rows[0]:
        t[16:32] = 0
    there = {name: x.to(CUDA) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    xqa(**there)
    torch.testing.assert_close(there["output"].cpu().double(), brute(inputs, rows), rtol=2e-3, atol=2e-3)
