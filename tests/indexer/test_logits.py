"""Logits of an indexer on the CPU: against a loop over tokens and keys, bad arguments, and values that name nothing."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import wrappers
from bench.cases import indexer as cases
from bench.cases.indexer import BYTE, E4M3, PAGED, PAGED_FP4, RAGGED, RAGGED_FP4, LogitsCase
from tests.support.emulated import emulation
from tests.support.good_calls import inputs_of

INF = math.inf
CASES = [
    LogitsCase(),
    LogitsCase(lens=(9, 40), heads=3, dim=32, windows="random", data="zeros"),
    LogitsCase(lens=(9, 40), heads=8, dim=64, windows="hostile", strided=True, shift=1, data="large"),
    LogitsCase(lens=(9, 40), heads=8, dim=64, windows="random", compressed=11),
    LogitsCase(RAGGED_FP4, lens=(4, 5), heads=2, dim=32, dtype="bf16"),
    LogitsCase(RAGGED_FP4, lens=(0, 5), heads=2, dim=32),
    LogitsCase(lens=(3, 0), heads=2, dim=32, windows="random"),
    LogitsCase(PAGED, lens=(40, 0, 7), heads=4, dim=32, page_size=16),
    LogitsCase(PAGED, lens=(40, 1), heads=4, dim=32, page_size=3, next_n=3, gap=12),
    LogitsCase(PAGED, lens=(40, 1), heads=4, dim=32, page_size=1, next_n=4, own=True, strided=True, shift=4),
    LogitsCase(PAGED, lens=(40, 9), heads=4, dim=32, page_size=5, next_n=2, hostile=True),
    LogitsCase(PAGED_FP4, lens=(40, 9), heads=4, dim=32, page_size=64, next_n=2, own=True, dtype="bf16"),
    LogitsCase(PAGED, lens=(40, 9), heads=4, dim=32, data="nan"),
]


def windows(case, given):
    """The keys [start, end) that each token sees, and how many columns stand before its first key."""
    if not case.paged:
        keys, found = given["kv"][0].shape[0], []
        for start, end in zip(given["cu_seq_len_k_start"].tolist(), given["cu_seq_len_k_end"].tolist(), strict=True):
            start, end = min(max(start, 0), keys), min(end, keys)
            if case.compressed:
                end = min(end, start + case.compressed)
            found.append((start, end, start if case.compressed else 0))
        return found
    lens, found = given["context_lens"].tolist(), []
    most = min(given["max_context_len"], given["block_table"].shape[1] * case.page_size)
    for own in lens:
        for i in range(case.next_n):
            end = own[i] if isinstance(own, list) else max(own, 0) - case.next_n + 1 + i
            found.append((0, min(end, most), 0))
    return found


def key_at(case, given, token, position):
    """A key and its scale, both zero if its page does not exist."""
    if not case.paged:
        return given["kv"][0][position].double(), given["kv"][1][position].double()
    cache, size = given["kv_cache"], case.page_size
    page = given["block_table"][token // case.next_n, position // size].item()
    if not 0 <= page < len(cache):
        return torch.zeros(case.dim).double(), torch.zeros(()).double()
    row = position % size
    flat = cache.as_strided((len(cache), size * (case.dim + 4)), (cache.stride(0), 1))[page]
    code, scale = flat[row * case.dim : (row + 1) * case.dim], flat[size * case.dim + 4 * row :][:4]
    return code.clone().view(E4M3).double(), scale.clone().view(torch.float32)[0].double()


def by_loop(case, given):
    """The logits in float64, -inf where a token sees no key."""
    q = given["q"][0] if isinstance(given["q"], tuple) else given["q"]
    q, weights = q.reshape(-1, case.heads, case.dim).double(), given["weights"].double()
    width = given["max_context_len"] if case.paged else case.compressed or case.lens[1]
    found = torch.full((len(q), width), -INF).double()
    for token, (start, end, before) in enumerate(windows(case, given)):
        for position in range(start, end):
            key, scale = key_at(case, given, token, position)
            found[token, position - before] = ((q[token] @ key).clamp(min=0) * weights[token]).sum() * scale
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_a_loop(case):
    given = cases.make_inputs(case)
    got, want = cases.run(case, given), by_loop(case, given)
    assert got.dtype == cases.DTYPES[case.dtype] and got.shape == want.shape
    assert torch.equal(got == -INF, want == -INF)
    seen = want != -INF
    size = 1e-2 if case.dtype == "bf16" else 1e-5
    largest = max(want[seen].abs().nan_to_num(0.0).tolist(), default=0.0)
    torch.testing.assert_close(got[seen].double(), want[seen], rtol=size, atol=size * largest, equal_nan=True)
    assert bool(want[seen].isnan().any()) == (case.data == "nan")
    assert cases.error(case, got, cases.expected(case, given)) <= 1


def poisoned(call):
    """New memory for logits, which holds NaN."""
    return torch.full((call.q.shape[0], call.width), math.nan, dtype=cases.DTYPES[call.dtype])


@pytest.mark.parametrize("case", [c for c in CASES if c.paged or c.windows != "causal"][:4], ids=str)
def test_unseen_columns_stay_as_they_are(case, monkeypatch):
    """Without `clean_logits`, in new memory."""
    monkeypatch.setattr("wrappers.indexer.logits.new_logits", poisoned)
    dirty = replace(case, clean=False)
    got, clean = (cases.run(c, cases.make_inputs(c)) for c in (dirty, case))
    assert torch.equal(got.isnan(), clean == -INF)
    assert torch.equal(got.nan_to_num(-INF), clean)


def test_rows_begin_at_multiples_of_1024_bytes():
    for dtype in (torch.float32, torch.bfloat16):
        got = wrappers.fp8_fp4_mqa_logits(**inputs_of(RAGGED_FP4) | {"logits_dtype": dtype})
        assert got.stride(0) * got.element_size() % 1024 == 0 and got.stride(1) == 1


@pytest.mark.parametrize("value", [math.nan, INF])
def test_unreferenced_memory_is_not_read(value):
    """`make_inputs` fills it with NaN; the result is finite all the same."""
    case = LogitsCase(PAGED, lens=(7, 40), heads=2, dim=32, page_size=16, next_n=2, gap=4)
    got = cases.run(case, cases.make_inputs(case))
    assert got[got != -INF].isfinite().all()


def test_fp8_functions_are_those_of_fp4_with_fp8_queries():
    for fp8, fp4 in ((RAGGED, RAGGED_FP4), (PAGED, PAGED_FP4)):
        given = inputs_of(fp8)
        both = [getattr(wrappers, fp8)(**given), getattr(wrappers, fp4)(**given | {"q": (given["q"], None)})]
        both = [x.nan_to_num(0.0) for x in both]
        assert torch.equal(*both) or not given.get("clean_logits", True)


def test_calls_as_vllm_0_33_has_them(monkeypatch):
    """`max_seqlen_k` and `schedule_meta`, or `indices`, in the place of `clean_logits`; nothing is cleaned."""
    monkeypatch.setattr("wrappers.indexer.logits.new_logits", poisoned)
    hint = torch.zeros(133, 2).int()
    given = inputs_of(RAGGED_FP4)
    start, end = torch.tensor([0, 3, 9, 38, 7]).int(), torch.tensor([4, 9, 14, 40, 7]).int()
    args = given["q"], given["kv"], given["weights"], start, end
    want = wrappers.fp8_fp4_mqa_logits(*args, False, 6)
    for columns in (6, np.int64(6)):
        for more in ((), (None,), (hint,)):
            got = wrappers.fp8_fp4_mqa_logits(*args, columns, *more)
            assert got.shape == (5, 6) and all(map(torch.equal, seen(got, end - start), seen(want, end - start)))
    given = inputs_of(PAGED_FP4)
    lens = torch.tensor([[1, 2, 9], [0, 38, 40]]).int()
    args = *(given[name] for name in ("q", "kv_cache", "weights")), lens, given["block_table"], hint, 44
    want = wrappers.fp8_fp4_paged_mqa_logits(*args)
    for indices in (None, torch.arange(2).int()):
        for got in (
            wrappers.fp8_fp4_paged_mqa_logits(*args, indices),
            wrappers.fp8_fp4_paged_mqa_logits(*args, indices=indices),
        ):
            assert all(map(torch.equal, seen(got, lens.flatten()), seen(want, lens.flatten())))


def seen(logits, counts):
    """The first columns of each row. No other column is written."""
    behind = torch.arange(logits.shape[1]) >= counts[:, None]
    assert torch.equal(logits.isnan(), behind)
    return [row[:count] for row, count in zip(logits, counts.tolist(), strict=True)]


REFUSED = [
    (RAGGED, {"q": lambda q: q.half()}, TypeError, r"q: dtype torch\.float16, must be torch\.float8_e4m3fn"),
    (RAGGED, {"q": lambda q: q[0]}, ValueError, r"q: shape \(8, 128\), must have 3 dimensions"),
    (RAGGED, {"kv": lambda kv: kv[0]}, TypeError, r"kv: Tensor, must be a tuple \(keys, scales\)"),
    (RAGGED, {"kv": lambda kv: (kv[0][:, :64], kv[1])}, ValueError, r"kv\[0\]: shape .* must be .*that of q"),
    (RAGGED, {"kv": lambda kv: (kv[0], kv[1][1:])}, ValueError, r"kv\[1\]: shape \(39,\), must be \(40,\)"),
    (RAGGED, {"kv": lambda kv: (kv[0], kv[1].double())}, TypeError, r"kv\[1\]: dtype torch\.float64"),
    (RAGGED, {"weights": lambda w: w.bfloat16()}, TypeError, r"weights: dtype torch\.bfloat16, must be torch\.float32"),
    (RAGGED, {"weights": lambda w: w[:, :3]}, ValueError, r"weights: shape \(5, 3\), must be \(5, 8\)"),
    (RAGGED, {"cu_seq_len_k_start": lambda x: x.long()}, TypeError, "cu_seq_len_k_start: dtype torch.int64"),
    (RAGGED, {"cu_seq_len_k_end": lambda x: x[:4]}, ValueError, r"cu_seq_len_k_end: shape \(4,\), must be \(5,\)"),
    (RAGGED, {"clean_logits": lambda x: 1}, TypeError, "clean_logits: 1, must be True or False"),
    (RAGGED, {"max_seqlen_k": lambda x: -1}, ValueError, "max_seqlen_k: -1, must be at least 0"),
    (RAGGED_FP4, {"clean_logits": lambda x: 0}, ValueError, "clean_logits: 0, must be at least 1"),
    (RAGGED_FP4, {"clean_logits": lambda x: "7"}, TypeError, "clean_logits: '7', must be True, False or an int"),
    (RAGGED_FP4, {"clean_logits": lambda x: 7, "max_seqlen_k": lambda x: 7}, TypeError,
     "max_seqlen_k, in the place of schedule_meta: int, must be a torch.Tensor"),
    (RAGGED_FP4, {"schedule_meta": lambda x: 7}, TypeError, "schedule_meta: int, must be a torch.Tensor"),
    (RAGGED_FP4, {"max_seqlen_k": lambda x: None}, TypeError, "max_seqlen_k: None, must be an int"),
    (PAGED_FP4, {"clean_logits": lambda x: 1}, TypeError, "clean_logits: 1, must be True, False or indices"),
    (RAGGED_FP4, {"q": lambda q: (q[0], q[0])}, NotImplementedError, r"q\[1\]: given, not supported"),
    (RAGGED_FP4, {"q": lambda q: q[0]}, TypeError, r"q: Tensor, must be a tuple"),
    (RAGGED_FP4, {"logits_dtype": lambda x: torch.float16}, TypeError, "logits_dtype: torch.float16, must be"),
    (PAGED, {"q": lambda q: q.flatten(0, 1)}, ValueError, r"q: shape .* must have 4 dimensions"),
    (PAGED, {"kv_cache": lambda c: c[..., :128]}, ValueError, r"kv_cache: shape .*bytes of a key, with its scale"),
    (PAGED, {"kv_cache": lambda c: c.view(torch.int16)}, TypeError, "kv_cache: dtype torch.int16"),
    (PAGED, {"kv_cache": lambda c: torch.zeros(6, 4, 2, 132).byte()}, ValueError, "kv_cache: .*must have one head"),
    (PAGED, {"kv_cache": lambda c: torch.zeros(6, 8, 1, 132).byte()[:, ::2]}, ValueError, "a page must be dense"),
    (PAGED, {"kv_cache": lambda c: torch.zeros(6, 0, 1, 132).byte()}, ValueError, "a page must have a key"),
    (PAGED, {"context_lens": lambda x: x.long()}, TypeError, "context_lens: dtype torch.int64"),
    (PAGED, {"context_lens": lambda x: x[:1]}, ValueError, r"context_lens: shape \(1,\), must be \(2,\) or \(6,\)"),
    (PAGED, {"context_lens": lambda x: x[:, None]}, ValueError, r"context_lens: shape \(2, 1\), must be \(2, 3\)"),
    (PAGED, {"block_table": lambda x: x[:1]}, ValueError, r"block_table: shape \(1, 11\), must have 2 rows"),
    (PAGED, {"block_table": lambda x: x.long()}, TypeError, "block_table: dtype torch.int64"),
    (PAGED, {"max_context_len": lambda x: 8.0}, TypeError, "max_context_len: 8.0, must be an int"),
    (PAGED, {"schedule_meta": lambda x: 3}, TypeError, "schedule_meta: int, must be a torch.Tensor"),
    (PAGED, {"weights": lambda w: w.requires_grad_()}, RuntimeError, "weights: requires grad"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "change", "error", "message"), REFUSED)
def test_refusals(function, change, error, message):
    given = inputs_of(function)
    given |= {name: make(given.get(name)) for name, make in change.items()}
    with pytest.raises(error, match=message):
        getattr(wrappers, function)(**given)


def test_pages_must_begin_at_words():
    given = inputs_of(PAGED)
    memory = torch.zeros(6 * 528 + 1, dtype=BYTE)
    with pytest.raises(ValueError, match="pages must begin at multiples of 4 bytes"):
        wrappers.fp8_paged_mqa_logits(**given | {"kv_cache": memory[1:].view(6, 4, 1, 132)})


COPIED = [  # case -> whether TMA copies its keys
    (LogitsCase(PAGED, lens=(40, 100), heads=4, dim=32), True),
    (LogitsCase(PAGED, lens=(40, 100), heads=4, dim=32, page_size=128, gap=16), True),
    (LogitsCase(PAGED, lens=(40, 100), heads=4, dim=32, gap=4), False),
    (LogitsCase(PAGED, lens=(40, 100), heads=4, dim=32, page_size=96), False),
    (LogitsCase(PAGED, lens=(40, 100), heads=4, dim=32, shift=4), False),
    (LogitsCase(lens=(4, 5), heads=4, dim=32), True),
    (LogitsCase(lens=(4, 5), heads=4, dim=32, shift=8), False),
    (LogitsCase(lens=(4, 5), heads=4, dim=32, shift=1), True),  # copied to another address
]


@pytest.mark.parametrize(("case", "boxes"), COPIED, ids=str)
def test_keys_that_tma_copies(case, boxes):
    given = cases.make_inputs(case)
    want = cases.run(case, given)
    with emulation() as here:
        got = cases.run(case, given)
    assert torch.equal(got, want) and [launch["boxes"] for launch in here.launches] == [int(boxes)]


@pytest.mark.parametrize("change", ["scales", "rows"])
def test_keys_that_tma_does_not_copy(change):
    """Scales apart or at an odd address, and rows that overlap."""
    q, k = torch.randn(3, 4, 32).to(E4M3), torch.randn(70, 32).to(E4M3)
    ends, w = torch.full((3,), 70).int(), torch.randn(3, 4)
    kvs = {
        "scales": [(k, torch.rand(140)[::2]), (k, torch.rand(71)[1:])],
        "rows": [(k[:1].expand(70, -1), torch.rand(70)), (k.flatten().as_strided((70, 32), (16, 1)), torch.rand(70))],
    }[change]
    for kv in kvs:
        want = wrappers.fp8_mqa_logits(q, kv, w, ends * 0, ends)
        with emulation() as here:
            assert torch.equal(wrappers.fp8_mqa_logits(q, kv, w, ends * 0, ends), want)
        assert here.launches[0]["boxes"] == 0


def test_metadata():
    lens = torch.tensor([[9], [40]]).int()
    for given in (lens, lens[:, 0]):
        got = wrappers.get_paged_mqa_logits_metadata(given, 64, 132)
        assert got.dtype == torch.int32 and got.shape == (133, 2)
    with pytest.raises(ValueError, match="num_sms: 0, must be at least 1"):
        wrappers.get_paged_mqa_logits_metadata(lens, 64, 0)
