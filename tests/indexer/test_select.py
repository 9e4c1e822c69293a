"""Keys chosen in one call, on the CPU: against a selection from the logits, in passes, and bad arguments."""

import math

import pytest
import torch

import wrappers
from bench.cases import indexer as cases
from bench.cases.indexer import PAGED, RAGGED, LogitsCase
from tests.support.good_calls import inputs_of

SLOTS = [
    LogitsCase(PAGED, (40, 0, 17, 300), 8, 32, page_size=12),
    LogitsCase(PAGED, (40, 1, 300), 8, 32, page_size=64, next_n=3),
    LogitsCase(PAGED, (40, 1, 300), 8, 32, page_size=5, next_n=2, own=True),
    LogitsCase(PAGED, (0, 0), 8, 32, page_size=5),
    LogitsCase(PAGED, (40, 1), 8, 32, page_size=64, next_n=2, data="zeros"),
]
ROWS = [LogitsCase(RAGGED, (21, 90), 8, 32, windows=kind) for kind in ("causal", "random", "hostile")]
K = 16


def slots_of(case, given, **more):
    names = "q", "kv_cache", "weights", "context_lens", "block_table"
    return wrappers.select_slots(*(given[name] for name in names), **{"top_k": K} | more)


def rows_of(given, **more):
    names = "q", "kv", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end"
    return wrappers.select_rows(*(given[name] for name in names), **{"top_k": K} | more)


def chosen(logits):
    """The positions of the K largest numbers of a row, ascending; of equal ones the first. Then -1."""
    seen = (logits != -math.inf).nonzero()[:, 0].tolist()
    best = sorted(sorted(seen, key=lambda i: (-logits[i].item(), i))[:K])
    return best + [-1] * (K - len(best))


@pytest.mark.parametrize("case", SLOTS, ids=str)
def test_slots(case):
    given = cases.make_inputs(case)
    got, logits = slots_of(case, given), cases.run(case, given)
    assert got.dtype == torch.int32 and got.shape == (len(case.lens), case.next_n, K)
    for token, row in enumerate(got.view(-1, K).tolist()):
        table = given["block_table"][token // case.next_n].tolist()
        size = case.page_size
        assert row == [-1 if x < 0 else table[x // size] * size + x % size for x in chosen(logits[token])]


@pytest.mark.parametrize("scratch", [0, 1 << 28])
@pytest.mark.parametrize("case", SLOTS, ids=str)
def test_slots_of_another_table(case, scratch):
    """The keys are those of block_table, in every pass, and also if a token gets all of its keys."""
    given = cases.make_inputs(case)
    size, named = case.page_size, torch.randperm(1000)[: given["block_table"].numel()].int()
    named = named.view(given["block_table"].shape)
    for k in (K, 400):
        found = slots_of(case, given, top_k=k, slot_table=named, scratch_bytes=scratch)
        same = slots_of(case, given, top_k=k, slot_table=given["block_table"])
        assert torch.equal(same, slots_of(case, given, top_k=k))
        for token, row in enumerate(same.view(-1, k).tolist()):
            pages = given["block_table"][token // case.next_n].tolist()
            mine = named[token // case.next_n].tolist()
            want = [-1 if x < 0 else mine[pages.index(x // size)] * size + x % size for x in row]
            assert found.view(-1, k)[token].tolist() == want


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_rows(case):
    given = cases.make_inputs(case)
    got, logits = rows_of(given), cases.run(case, given)
    assert got.tolist() == [chosen(row) for row in logits]


@pytest.mark.parametrize("scratch", [0, 1 << 12, 1 << 15])
def test_passes_change_nothing(scratch):
    for case in SLOTS:
        given = cases.make_inputs(case)
        assert torch.equal(slots_of(case, given), slots_of(case, given, scratch_bytes=scratch))
    for case in ROWS:
        given = cases.make_inputs(case)
        assert torch.equal(rows_of(given), rows_of(given, scratch_bytes=scratch))


def test_memory_of_the_logits_is_bounded(monkeypatch):
    held = []
    new = wrappers.indexer.logits.new_logits
    monkeypatch.setattr("wrappers.indexer.logits.new_logits", lambda call: held.append(new(call)) or held[-1])
    rows_of(cases.make_inputs(LogitsCase(RAGGED, (64, 3000), 8, 32)), scratch_bytes=1 << 18)
    assert len(held) == 1 and held[0].untyped_storage().nbytes() <= 1 << 18


def test_an_output_that_is_given():
    case = SLOTS[1]
    given = cases.make_inputs(case)
    out = torch.full((3, 3, K), 7, dtype=torch.int32)
    got = slots_of(case, given, out=out)
    assert got.data_ptr() == out.data_ptr() and torch.equal(out, slots_of(case, given))
    rows = cases.make_inputs(ROWS[0])
    wide = torch.full((21, 2 * K), 7, dtype=torch.int32)
    rows_of(rows, out=wide[:, :K])
    assert torch.equal(wide[:, :K], rows_of(rows)) and bool((wide[:, K:] == 7).all())


def test_max_context_len_bounds_the_keys():
    case = SLOTS[0]
    given = cases.make_inputs(case)
    less = given | {"context_lens": given["context_lens"].clamp(max=30)}
    assert torch.equal(slots_of(case, given, max_context_len=30), slots_of(case, less))


def test_no_logits_are_computed_of_at_most_top_k_keys(monkeypatch):
    case, rows, computed = SLOTS[1], cases.make_inputs(ROWS[1]), []
    given, compute = cases.make_inputs(case), wrappers.indexer.logits.serve
    most, keys = given["block_table"].shape[1] * case.page_size, rows["kv"][0].shape[0]
    monkeypatch.setattr("wrappers.indexer.logits.serve", lambda call: computed.append(call) or compute(call))
    for k, calls in ((most, 0), (most - 1, 1)):
        got, lens = slots_of(case, given, top_k=k), given["context_lens"].tolist()
        assert len(computed) == calls and got.shape[2] == k
        counts = (got >= 0).sum(2).tolist()
        assert counts == [[max(n - case.next_n + t + 1, 0) for t in range(case.next_n)] for n in lens]
    assert slots_of(case, given, top_k=40, max_context_len=40).shape[2] == 40 and len(computed) == 1
    few = rows_of(rows, top_k=keys)
    assert len(computed) == 1 and torch.equal(few[:, :-1], rows_of(rows, top_k=keys - 1)) and len(computed) == 2


def test_more_keys_than_there_are():
    case = SLOTS[0]
    got = slots_of(case, cases.make_inputs(case), top_k=400)
    assert [(row >= 0).sum().item() for row in got[:, 0]] == [40, 0, 17, 300]


REFUSED = [
    ({"top_k": 0}, ValueError, "top_k: 0, must be at least 1"),
    ({"top_k": 2.0}, TypeError, "top_k: 2.0, must be an int"),
    ({"top_k": 1 << 31}, ValueError, "top_k: 2147483648, must be at most"),
    ({"scratch_bytes": -1}, ValueError, "scratch_bytes: -1, must be at least 0"),
    ({"max_context_len": -1}, ValueError, "max_context_len: -1, must be at least 0"),
    ({"out": torch.zeros(2, 3, 7).int()}, ValueError, r"out: shape \(2, 3, 7\), must be \(2, 3, 16\)"),
    ({"out": torch.zeros(2, 3, 16)}, TypeError, "out: dtype torch.float32, must be torch.int32"),
    ({"block_table": torch.zeros(2, 3).long()}, TypeError, "block_table: dtype torch.int64"),
    ({"slot_table": torch.zeros(2, 3).long()}, TypeError, "slot_table: dtype torch.int64"),
    ({"slot_table": torch.zeros(9, 3).int()}, ValueError, r"slot_table: shape \(9, 3\), must be .*that of block_table"),
    ({"kv_cache": torch.zeros(6, 4, 2, 132).byte()}, ValueError, "kv_cache: .*must have one head"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_refusals(change, error, message):
    with pytest.raises(error, match=message):
        wrappers.select_slots(**inputs_of("select_slots") | change)


def test_refusals_of_rows():
    given = inputs_of("select_rows")
    with pytest.raises(ValueError, match=r"out: shape \(5, 7\), must be \(5, 16\)"):
        wrappers.select_rows(**given | {"out": torch.zeros(5, 7).int()})
    with pytest.raises(ValueError, match=r"cu_seq_len_k_end: shape \(4,\)"):
        wrappers.select_rows(**given | {"cu_seq_len_k_end": given["cu_seq_len_k_end"][:4]})
