"""The decode functions on a Hopper GPU, against the fp32 reference and against themselves bit by bit."""

import math
from dataclasses import replace

import pytest
import torch

from tests import cases
from tests.gpu import captured, in_threads
from tests.test_decode_wrapper import brute, xqa_inputs
from wrappers import trtllm_batch_decode_with_kv_cache, xqa

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 device"
)

CUDA = torch.device("cuda", 0)
BASE = cases.AttentionCase(
    "", q_lens=(1, 1, 1, 1), kv_lens=(2000, 1, 0, 300), heads_q=8, heads_kv=2, page_size=64, sink=True
)
DIMS = (64, 128, 256)


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
def test_modifiers(dim, dtype, sink, window, cap):
    matches_reference(
        replace(BASE, dtype=dtype, head_dim_qk=dim, head_dim_vo=dim, sink=sink, window_left=window, soft_cap=cap)
    )


@pytest.mark.parametrize("page", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("dim", DIMS, ids=lambda d: f"d{d}")
def test_lengths_around_edges_of_tiles_and_pages(dim, page):
    """Batches whose splits fall anywhere, from one request over all SMs to many that fit one."""
    edges = sorted({max(0, n + d) for n in (page, 80, 128, 256, 640, 1280) for d in (-1, 0, 1)})
    for lens in [(n,) for n in edges[::4]] + [tuple(edges), tuple(edges * 12), (9000, *edges, 1)]:
        case = replace(BASE, name=f"{len(lens)} requests", q_lens=(1,) * len(lens), kv_lens=lens, page_size=page)
        matches_reference(replace(case, head_dim_qk=dim, head_dim_vo=dim))


@pytest.mark.parametrize(
    "heads", [(1, 1), (4, 4), (6, 2), (5, 1), (16, 1), (40, 8), (128, 8), (64, 1), (96, 1)], ids=str
)
def test_groups(heads):
    matches_reference(replace(BASE, heads_q=heads[0], heads_kv=heads[1], head_dim_qk=128, head_dim_vo=128))


@pytest.mark.parametrize("q_len", [1, 2, 3, 8, 16, 33, 64])
def test_several_query_tokens(q_len):
    lens = (q_len, 2000, 129, 64 + q_len, 900)
    case = replace(BASE, q_lens=(q_len,) * len(lens), kv_lens=lens, window_left=500)
    expected = cases.reference_of(cases.make_inputs(case, CUDA))
    inputs = make(case)
    ragged = run(inputs)
    close(ragged, expected, case.tolerance)
    plain = inputs | {"cum_seq_lens_q": None, "max_q_len": None, "q_len_per_req": q_len}
    assert all(map(torch.equal, run(plain), ragged))


def test_ragged_queries():
    matches_reference(
        replace(BASE, q_lens=(3, 0, 17, 1, 40), kv_lens=(2500, 9, 17, 0, 300), head_dim_qk=128, head_dim_vo=128)
    )


@pytest.mark.parametrize(
    "change",
    [{"layout": "NHD"}, {"cache": "stacked"}, {"cache": "shared"}, {"separate_tables": True}, {"strided_q": True}],
    ids=lambda c: next(iter(c)),
)
def test_forms_of_the_cache(change):
    matches_reference(replace(BASE, **change))


def test_one_long_request_and_many_short_ones():
    lens = (100_000, *([200] * 255))
    case = replace(BASE, q_lens=(1,) * 256, kv_lens=lens, head_dim_qk=128, head_dim_vo=128, spare_pages=1)
    matches_reference(case)
    matches_reference(replace(case, q_lens=(1,), kv_lens=(131_072,)))


def test_workspace_may_hold_anything():
    inputs = make(BASE, workspace_buffer=torch.randint(0, 255, (1 << 20,), dtype=torch.uint8, device=CUDA))
    close(run(inputs), cases.reference_of(cases.make_inputs(BASE, CUDA)), BASE.tolerance)


@pytest.mark.parametrize("sink", [-math.inf, 80.0])
def test_sink_of_any_size(sink):
    inputs = cases.make_inputs(BASE, CUDA) | {"sinks": torch.full((8,), sink, device=CUDA)}
    close(run(cases.as_decode(inputs)), cases.reference_of(inputs), BASE.tolerance)


def test_graph_replay_at_other_lengths():
    """Captured at 2 tokens, replayed at 8192 and back: the bits of eager calls."""
    case = replace(BASE, q_lens=(1,) * 3, kv_lens=(8192, 5000, 8191), head_dim_qk=128, head_dim_vo=128)
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
