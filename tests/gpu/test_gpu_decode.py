"""The decode functions on a Hopper GPU, against the fp32 reference and against themselves bit by bit."""

import math
from dataclasses import replace

import pytest
import torch

import wrappers
from bench.cases import attention as cases
from bench.cases import outputs
from bench.cases.planted import KEPT, STEP, STEP_SCALE
from tests.support import gpu
from tests.support.gpu import CUDA, captured, close, dims, feature, features, grid, in_threads, same, values
from wrappers import trtllm_batch_decode_with_kv_cache
from wrappers.host import machine

BASE = cases.AttentionCase(
    "", q_lens=(1, 1, 1, 1), kv_lens=(2000, 1, 0, 300), heads_q=8, heads_kv=2, page_size=64, sink=True,
    function="decode",
)  # fmt: skip
D128 = replace(BASE, head_dim_qk=128, head_dim_vo=128)
CACHES = {"": {}, "e4m3": {"kv_dtype": "fp8"}, "nvfp4": {"kv_dtype": "nvfp4"}}
QUANTISED = {name: CACHES[name] for name in ("e4m3", "nvfp4")}
DIMS = dims((64, 64), (128, 128), (256, 256))
TYPES = values("dtype", "bf16", "fp16")


def make(case, seed=0, **changes):
    """Arguments with offsets of the queries, which the case may not need."""
    return cases.as_decode(cases.make_inputs(case, CUDA, seed)) | changes


def run(inputs):
    return gpu.run("decode", inputs)


def matches_reference(case):
    gpu.matches_reference(case, CUDA)


def lengths(lens):
    return {"q_lens": (1,) * len(lens), "kv_lens": tuple(lens)}


@pytest.mark.parametrize(
    "case",
    grid(
        BASE,
        CACHES,
        DIMS,
        TYPES,
        {"": {"sink": False}, "sink": {}},
        {"": {}, "window": {"window_left": 137}},
        {"": {}, "cap": {"soft_cap": 4.0}},
    ),
)
def test_modifiers(case):
    matches_reference(case)


@pytest.mark.parametrize("case", grid(BASE, CACHES, DIMS, values("page_size", *cases.PAGE_SIZES)))
def test_lengths_around_edges_of_tiles_and_pages(case):
    """Batches whose splits fall anywhere, from one request over all SMs to many that fit one."""
    edges = sorted({max(0, n + d) for n in (case.page_size, 80, 128, 256, 640, 1280) for d in (-1, 0, 1)})
    for lens in [(n,) for n in edges[::4]] + [tuple(edges), tuple(edges * 12), (9000, *edges, 1)]:
        matches_reference(replace(case, name=f"{len(lens)} requests", **lengths(lens)))


@pytest.mark.by_shape
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("window_left", [-1, 500])
@pytest.mark.parametrize("requests", [66, 70, 128, 131, 300])
def test_many_tiles(requests, window_left, cache):
    """There are tiles for all SMs, and two CTAs on each."""
    lens = [37 * i * i % 3001 for i in range(requests)]
    many = replace(BASE, **CACHES[cache], **lengths(lens), window_left=window_left, name=f"{requests} requests")
    q_lens = tuple((1, 0, 2)[i % 3] for i in range(requests))
    for case in (many, replace(many, q_lens=q_lens, heads_q=6)):
        matches_reference(case)


@pytest.mark.by_shape
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("requests", [32, 64, 128])
def test_equal_requests(requests, cache):
    """With 8 KV heads, 128 or 256 CTAs of a GPU of 132 SMs take whole tiles, equally many each."""
    for base in (BASE, D128):
        case = replace(base, **CACHES[cache], **lengths((700,) * requests), name=f"{requests} requests")
        matches_reference(replace(case, heads_kv=8))


OTHER_DIMS = dims(*((dim, dim) for dim in (16, 32, 80, 96, 112, 160, 192, 224)))  # a bundle holds no kernels of these


@pytest.mark.parametrize(
    "case",
    [
        *grid(BASE, CACHES, OTHER_DIMS, {"": {}, "page 3": {"page_size": 3}}),
        *grid(BASE, {"nvfp4": CACHES["nvfp4"]}, OTHER_DIMS, {"interleaved": {"interleaved": True, "page_size": 12}}),
    ],
)
def test_padded_head_dims(case):
    matches_reference(case)
    matches_reference(replace(case, q_lens=(2, 1, 1, 3), out_dtype="nvfp4", window_left=300))


HEADS = [(1, 1), (4, 4), (6, 2), (5, 1), (8, 1), (16, 1), (40, 8), (128, 8), (64, 1), (96, 1)]


@pytest.mark.parametrize("case", grid(D128, CACHES, {f"{q}x{kv}": {"heads_q": q, "heads_kv": kv} for q, kv in HEADS}))
def test_groups(case):
    matches_reference(case)


@pytest.mark.parametrize("tokens", [1, 4, 20])
@pytest.mark.parametrize(
    "case",
    [
        *grid(BASE, dims((512, 512)), TYPES, {"": {}, "page 8": {"page_size": 8}}),
        *grid(
            BASE, dims((512, 512)), QUANTISED, {"": {}, "page 12": {"page_size": 12}, "window": {"window_left": 500}}
        ),
    ],
)
def test_head_dim_512(case, tokens):
    matches_reference(replace(case, q_lens=(tokens,) * 4))
    matches_reference(replace(case, q_lens=(tokens, 1, 0, 1), kv_lens=(9000, 1, 0, 300), sink=False))


def equal_queries(tokens):
    return {"q_lens": (tokens,) * 5, "kv_lens": (tokens, 2000, 129, 64 + tokens, 900)}


@pytest.mark.parametrize(
    "case",
    grid(replace(BASE, window_left=500), CACHES, {f"q{n}": equal_queries(n) for n in (1, 2, 3, 8, 16, 33, 64)}),
)
def test_several_query_tokens(case):
    """Said by their number, and by offsets: the same bits."""
    inputs, want = gpu.call_of(case, CUDA)
    got = run(inputs)
    gpu.as_expected(case, got, want)
    same(run(make(case)), got)


@pytest.mark.parametrize(
    "case", grid(replace(BASE, q_lens=(3, 0, 17, 1, 40), kv_lens=(2500, 9, 17, 0, 300)), CACHES, DIMS)
)
def test_ragged_queries(case):
    matches_reference(case)


FORMS = {
    "NHD": {"layout": "NHD"},
    "stacked": {"cache": "stacked"},
    "shared": {"cache": "shared"},
    "separate": {"separate_tables": True},
    "strided-q": {"strided_q": True},
}


@pytest.mark.parametrize("case", grid(BASE, CACHES, FORMS))
def test_forms_of_the_cache(case):
    matches_reference(case)


@pytest.mark.parametrize("case", grid(replace(D128, spare_pages=1), CACHES))
def test_one_long_request_and_many_short_ones(case):
    matches_reference(replace(case, name="among others", **lengths((100_000, *([200] * 255)))))
    matches_reference(replace(case, name="alone", **lengths((131_072,))))
    matches_reference(replace(case, name="needles", data="needles", **lengths((131_072,))))


@pytest.mark.parametrize(
    "case", grid(replace(D128, kv_dtype="nvfp4", interleaved=True), DIMS, values("page_size", 8, 16, 64, 256))
)
def test_interleaved_factors_of_v(case):
    """Of 4 tokens each; a few rows, and more than a warp's."""
    matches_reference(case)
    matches_reference(replace(case, q_lens=(4, 1, 0, 3), data="needles", separate_tables=True))


@pytest.mark.parametrize("case", grid(replace(BASE, kv_dtype="e5m2"), DIMS, {"": {}, "needles": {"data": "needles"}}))
def test_caches_of_e5m2(case):
    matches_reference(case)
    matches_reference(replace(case, q_lens=(4, 1, 0, 3)))


SCALED = replace(BASE, q_lens=(3, 1, 2, 3), device=("scale", "out"), out_scale=0.3)


@pytest.mark.parametrize("case", grid(SCALED, CACHES))
def test_scales_on_the_device(case):
    """Of logits, in natural units and in powers of two, and of the output."""
    matches_reference(case)
    matches_reference(replace(case, device=("log2", "out"), o_scale=2.0))


@pytest.mark.parametrize("case", grid(replace(BASE, q_lens=(1, 1), kv_lens=(600, 5000)), CACHES))
def test_pages_that_do_not_exist_are_zeros(case):
    """Negative entries of the table, past a length or before it, and ones past the pool."""
    inputs = make(case, cum_seq_lens_q=None, max_q_len=None)
    want = cases.make_inputs(case, CUDA)
    table = inputs["block_tables"]
    last = int(inputs["kv_cache"][0].shape[0])
    for gone, entry in ((2, -1), (5, last)):
        for pool in (*want["kv_cache"], *(want.get("kv_block_scales") or ())):
            (pool.view(torch.uint8) if pool.element_size() == 1 else pool)[table[0, gone].long()] = 0
        table[0, gone] = entry
    table[0, -(-600 // case.page_size) :] = -7
    gpu.as_expected(case, run(inputs), cases.reference_of(want))


def test_counters_of_parts_are_zero_after_launches():
    for lens in ((100_000,), (3, 70_000, 500), (9000,) * 40):
        run(make(replace(BASE, **lengths(lens)), cum_seq_lens_q=None, max_q_len=None))
    torch.cuda.synchronize()
    parts = machine.current.split_scratch
    assert parts and not any(torch.from_dlpack(counters).any() for _, counters in parts.values())


def test_workspace_may_hold_anything():
    inputs, want = gpu.call_of(BASE, CUDA)
    inputs["workspace_buffer"] = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8, device=CUDA)
    gpu.as_expected(BASE, run(inputs), want)


@pytest.mark.parametrize("sink", [-math.inf, 80.0])
@feature("decode with sinks")
def test_sink_of_any_size(sink):
    inputs = cases.make_inputs(BASE, CUDA) | {"sinks": torch.full((8,), sink, device=CUDA)}
    gpu.as_expected(BASE, run(cases.as_decode(inputs)), cases.reference_of(inputs))


@pytest.mark.parametrize("case", grid(replace(D128, **lengths((8192, 5000, 8191))), CACHES))
@feature("decode with CUDA graph replay at other lengths")
def test_graph_replay_at_other_lengths(case):
    """Captured at 2 tokens, replayed at 8192 and back: the bits of eager calls."""
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
            same((o, lse), expected, lens.tolist())


@pytest.mark.parametrize("case", grid(replace(D128, **lengths((4096, 900, 1, 2000))), CACHES))
@feature(*features(D128))
def test_lengths_written_right_before_a_launch(case):
    """A launch that begins while the one before still runs does not keep what it guessed of them."""
    inputs, expected = make(case), []
    full = inputs["seq_lens"].clone()
    lens = (full, full // 3, torch.ones_like(full), torch.zeros_like(full))
    for each in lens:
        inputs["seq_lens"].copy_(each)
        torch.cuda.synchronize()
        expected.append(run(inputs))
        torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for each in lens:
            inputs["seq_lens"].copy_(each)
            found.append(run(inputs))
    for i, results in enumerate(found):
        same(results, expected[i % len(lens)], lens[i % len(lens)].tolist())


@feature(*features(D128))
def test_streams_side_by_side():
    case = replace(D128, kv_lens=(3000, 900, 1, 2000))
    many = [make(case, seed) for seed in range(4)]
    expected = [run(inputs) for inputs in many]
    torch.cuda.synchronize()

    def work(i):
        for _ in range(20):
            same(run(many[i]), expected[i])

    in_threads(work, 4)


# ---- masks, output types, what may be left out


def drafting(tokens, ragged):
    lens = (tokens + 2000, tokens, 77, 257, 100 + tokens)
    return {"q_lens": (tokens, tokens, 0, 3, 1) if ragged else (tokens,) * 5, "kv_lens": lens, "drafts": True}


@pytest.mark.parametrize(
    "case",
    grid(
        replace(BASE, window_left=300),
        CACHES,
        {f"{'ragged' if ragged else 'equal'}-q{n}": drafting(n, ragged)
         for n in (2, 5, 16, 33, 64) for ragged in (False, True)},
    ),
)  # fmt: skip
def test_masks_of_drafts(case):
    """Any mask, of more than 32 drafts too; drafts over the edges of tiles; with a window."""
    matches_reference(case)


@pytest.mark.parametrize(
    "case", grid(replace(BASE, window_left=300), CACHES, {f"q{n}": drafting(n, False) for n in (2, 16, 33, 64)})
)
def test_a_mask_of_earlier_drafts_is_causal(case):
    """Bits behind the last draft are set, as garbage."""
    inputs, _ = gpu.call_of(case, CUDA)
    tokens, (batch, _, words) = case.q_lens[0], inputs["mask"].shape
    bit = torch.arange(16 * words)
    seen = (bit <= torch.arange(tokens)[:, None]) | (bit >= tokens)
    mask = (seen.unflatten(1, (words, 16)).int() << torch.arange(16, dtype=torch.int32)).sum(-1).to(torch.uint16)
    inputs["mask"] = mask.expand(batch, -1, -1).contiguous().to(CUDA)
    causal, want = gpu.call_of(replace(case, drafts=False), CUDA)
    got = run(inputs)
    gpu.as_expected(case, got, want)
    gpu.as_expected(case, got, [t.float() for t in run(causal)])


@pytest.mark.parametrize(
    "case",
    grid(replace(D128, kv_lens=(9000, 1, 0, 300), out_dtype="fp8", out_scale=300.0, o_scale=3.0), CACHES, TYPES),
)
def test_e4m3_output(case):
    """The kernel's own fp32 output rounded and saturated, whole tiles and merged ones."""
    inputs, want = gpu.call_of(case, CUDA)
    assert (want[0].abs() == 448).any(), "nothing is saturated"
    got = run(inputs)
    assert got[0].dtype == torch.float8_e4m3fn
    gpu.as_expected(case, got, want)


SKIPPING = replace(
    BASE, data="steps", scale=STEP_SCALE, q_lens=(1,), kv_lens=(1536,), heads_q=6, sink=False, skip=1.0, invariant=True
)  # one CTA looks first at the last KEPT keys, above which the others lie STEP log2 units lower


@pytest.mark.parametrize("case", grid(SKIPPING, CACHES, DIMS))
def test_skip_softmax_leaves_out_what_it_may(case):
    """All keys below the threshold; none where it lies below them all."""
    below, above = (1536 * 2 ** -(STEP + step) for step in (0.2, -0.2))
    matches_reference(replace(case, name="below", skip=below))
    matches_reference(replace(case, name="above", skip=above, kept=KEPT))


@pytest.mark.parametrize("case", grid(replace(D128, sink=False, kv_lens=(200_000, 1, 0, 300), skip=1.0), CACHES))
def test_skip_softmax(case):
    """A tiny factor leaves nothing out. A large one leaves out keys only: every LSE lies between those of the largest
    key and of all, and outputs of rows with one dominant key stay."""
    inputs, want = gpu.call_of(replace(case, skip=0.0), CUDA)
    dense = run(inputs)
    gpu.as_expected(case, dense, want)
    same(run(inputs | {"skip_softmax_threshold_scale_factor": 1e-30}), dense)
    o, lse = run(inputs | {"skip_softmax_threshold_scale_factor": 1e6})
    assert o.isfinite().all() and (lse <= dense[1] + 1e-3).all() and (lse[0] < dense[1][0] - 0.1).any()
    flat = inputs | {"query": inputs["query"] * 0}  # equal logits: nothing is below the largest
    same(run(flat | {"skip_softmax_threshold_scale_factor": 0.5}), run(flat))
    sharp = cases.make_inputs(replace(case, skip=0.0), CUDA)
    sharp["query"] = sharp["query"] * 20
    got = run(inputs | {"query": sharp["query"], "skip_softmax_threshold_scale_factor": 50.0})
    close((got[0], None), cases.reference_of(sharp), 2 * case.tolerance, 2 * case.tolerance)


INVARIANT = replace(D128, kv_lens=(9000, 4096, 100, 70_000, 4097, 1, 0, 12_289), invariant=True)


@pytest.mark.parametrize("case", grid(INVARIANT, CACHES, {f"q{n}": {"q_lens": (n,) * 8} for n in (1, 20)}))
def test_batch_invariant_bits(case):
    """A request alone, among others, and among others in another order; short ones and many parts."""
    q_len = case.q_lens[0]
    inputs, want = gpu.call_of(case, CUDA)
    o, lse = run(inputs)
    gpu.as_expected(case, (o, lse), want)
    o, lse = o.view(8, q_len, 8, 128), lse.view(8, q_len, 8)
    for chosen in (*([b] for b in range(8)), [7, 3, 0], [4] * 40):
        part = dict(inputs)
        for name in ("query", "out", "lse"):
            part[name] = inputs[name].unflatten(0, (8, q_len))[chosen].flatten(0, 1).contiguous()
        for name in ("block_tables", "seq_lens"):
            part[name] = inputs[name][chosen].contiguous()
        got = run(part)
        same(got, (o[chosen].flatten(0, 1), lse[chosen].flatten(0, 1)), chosen)


@pytest.mark.parametrize("case", grid(replace(INVARIANT, q_lens=(1, 20, 3), kv_lens=(9000, 300, 70)), CACHES))
def test_batch_invariant_bits_of_ragged_requests(case):
    """A request with few rows beside one with many, for which there would be a kernel of its own. 80 rows are more than
    one tile of NVFP4's kernel."""
    inputs, _ = gpu.call_of(case, CUDA)
    o, lse = run(inputs)
    for b, n in enumerate(case.q_lens):
        own = slice(sum(case.q_lens[:b]), sum(case.q_lens[: b + 1]))
        alone = inputs | {"cum_seq_lens_q": None, "max_q_len": None, "q_len_per_req": n}
        alone |= {name: inputs[name][own].contiguous() for name in ("query", "out", "lse")}
        alone |= {name: inputs[name][b : b + 1].contiguous() for name in ("block_tables", "seq_lens")}
        same(run(alone), (o[own], lse[own]), b)


@pytest.mark.parametrize("case", grid(replace(D128, heads_q=2, heads_kv=1, sink=False, **lengths((131_072,))), CACHES))
def test_needle_in_128k_keys(case):
    """A long row over values far from zero: sums lose nothing, and one key among all is found."""
    inputs = cases.make_inputs(replace(case, kv_dtype=""), CUDA)
    k, v = (t.float() for t in inputs["kv_cache"])
    v, k = v * 0.1 + 100.0, k * 0.05
    page, inside = int(inputs["block_tables"][0, 77_777 // 64]), 77_777 % 64
    k[page, 0, inside] = inputs["query"][0, 0].float()
    v[page, 0, inside] = torch.linspace(-6.0, 6.0, 128, device=CUDA)
    if case.kv_dtype != "nvfp4":
        inputs["kv_cache"] = tuple(t.to(cases.DTYPES[case.kv_dtype or case.dtype]) for t in (k, v))
    else:
        made = [wrappers.nvfp4_quantize(t) for t in (k, v)]
        inputs |= {"kv_cache": tuple(t[0] for t in made), "kv_block_scales": tuple(t[1] for t in made)}
    want = cases.reference_of(inputs)
    got = run(cases.as_decode(inputs))
    close(got, want, 5e-3, 5e-3)
    assert (want[0][0, 0] - 100).abs().max() > 10  # the needle shows, in the head that looks for it
    assert (want[0][0, 1] - 100).abs().max() < 5  # NVFP4 has 96 for 100


# ---- xqa

XQA = replace(
    BASE, function="xqa", dtype="fp16", layout="NHD", lse=False, sink=False, uint32_lens=True, page_size=16, heads_q=6,
    q_lens=(1,) * 5, kv_lens=(900, 0, 1, 64, 300),
)  # fmt: skip
XQA_FORMS = {
    "NHD": {},
    "HND": {"layout": "HND"},
    "flat": {"cache": "flat"},
    "d128": {"heads_q": 64, "heads_kv": 8, "head_dim_qk": 128, "head_dim_vo": 128},
    "bf16": {"dtype": "bf16"},
    "scales": {"device": ("scale", "out"), "out_scale": 1.2, "sink": True},
    "zero-page": {"zero_page": True},
}


@pytest.mark.parametrize("case", grid(XQA, XQA_FORMS, values("window_left", -1, 0, 199)))
def test_xqa(case):
    matches_reference(case)


@pytest.mark.parametrize("case", grid(replace(D128, kv_lens=(9000, 1, 0, 300), out_dtype="nvfp4"), CACHES, TYPES))
def test_nvfp4_output(case):
    matches_reference(case)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(4, 2), (12, 1)], ids=str)
@pytest.mark.parametrize("types", [("bf16", ""), ("fp16", "e4m3"), ("e4m3", "")], ids=str)
@feature("decode output NVFP4")
def test_bytes_of_nvfp4_output(types, heads, dim):
    """The quantiser's, of whole tiles and merged ones, from any row of the factors on. Parts of another number of keys
    than a power of two would have rounded."""
    q, kv = types
    for lengths, invariant in (((128, 1, 0, 64, 16), False), ((1 << 14, 1, 0, 512, 16), True)):
        known = outputs.known("decode", q, dim, heads, kv, lengths, CUDA)
        for start in (0, 127, 300):
            gpu.writes_bytes(
                known._replace(problem=known.problem._replace(split_kv="fixed" if invariant else "auto")), start
            )


@pytest.mark.parametrize(
    "case",
    grid(
        replace(D128, dtype="fp8", kv_lens=(9000, 1, 0, 300)),
        values("kv_dtype", "fp8", "nvfp4"),
        DIMS,
        values("out_dtype", "bf16", "fp16", "fp8", "nvfp4"),
        {"": {}, "12 rows": {"q_lens": (3, 1, 1, 2)}},
    ),
)
def test_e4m3_queries(case):
    matches_reference(case)


@pytest.mark.parametrize("case", grid(XQA, CACHES, values("page_size", 16, 32, 64, 128)))
def test_xqa_of_quantised_caches(case):
    matches_reference(case)


@pytest.mark.parametrize(
    "case",
    grid(
        replace(XQA, drafts=True, sink=True, kv_lens=(400, 9, 5)),
        {"equal": {"q_lens": (5, 5, 5)}, "ragged": {"q_lens": (5, 0, 2)}},
        {"": {}, "e4m3-output": {"out_dtype": "fp8", "o_scale": 30.0}},
    ),
)
def test_xqa_drafts(case):
    matches_reference(case)
