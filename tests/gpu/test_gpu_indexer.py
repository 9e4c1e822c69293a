"""Logits of an indexer on a Hopper GPU: against the reference, equal bits in every run, batch and schedule, graphs for
other lengths; and the keys that are chosen by them."""

from dataclasses import replace

import pytest
import torch

import wrappers
from bench.cases import indexer as cases
from bench.cases.indexer import PAGED, PAGED_FP4, RAGGED, RAGGED_FP4, SEGMENTS, LogitsCase
from tests.sim.workloads.indexer import logits_cases, logits_features
from tests.support.gpu import CUDA, feature
from wrappers.indexer import logits

SIMULATED = {
    f"{spec.name}, {scenario.name}": scenario
    for _, spec in logits.dispatch.shipped("sm_90a")
    for scenario in logits_cases(spec)
} | {scenario.name: scenario for scenario in logits_features()}
CASES = {
    "prompt": LogitsCase(lens=(300, 5000)),
    "prompt, 32 heads": LogitsCase(RAGGED_FP4, lens=(1030, 1030), heads=32, dtype="bf16"),
    "prompt, few heads": LogitsCase(lens=(77, 3001), heads=5, dim=64, windows="random"),
    "prompt, hostile": LogitsCase(lens=(513, 2001), windows="hostile", strided=True, shift=4),
    "prompt, compressed": LogitsCase(lens=(300, 4000), windows="random", compressed=1999, clean=False),
    "prompt, bf16": LogitsCase(SEGMENTS, lens=(300, 5000)),
    "prompt, bf16, few heads": LogitsCase(SEGMENTS, lens=(77, 3001), heads=19, windows="hostile", shift=4),
    "a token": LogitsCase(lens=(1, 9001), heads=64),
    "decode": LogitsCase(PAGED, lens=(8000, 1, 0, 65, 30_000)),
    "decode, 2 tokens": LogitsCase(PAGED, lens=(8000, 2, 0, 65), next_n=2, page_size=16),
    "decode, 4 tokens": LogitsCase(PAGED_FP4, lens=(8000, 5, 0, 65), next_n=4, page_size=256, dtype="bf16"),
    "decode, 6 tokens": LogitsCase(PAGED, lens=(3000, 5, 0, 65), next_n=6, own=True, heads=32),
    "decode, 8 tokens": LogitsCase(PAGED, lens=(5000, 700), next_n=8, own=True),
    "decode, 11 tokens": LogitsCase(PAGED, lens=(900, 70), next_n=11, heads=17, clean=False),
    "pages of a key": LogitsCase(PAGED, lens=(500, 700), page_size=1, next_n=2),
    "pages of 3": LogitsCase(PAGED, lens=(500, 700), page_size=3, gap=4, heads=32, dim=32),
    "hostile": LogitsCase(PAGED, lens=(500, 700, 3), page_size=48, hostile=True, next_n=3),
    "many requests": LogitsCase(PAGED, lens=tuple(range(0, 3000, 5)), gap=12),
    "large": LogitsCase(PAGED, lens=(3000,) * 9, data="large", strided=True),
}  # fmt: skip


def marked(name):
    case = CASES[name]
    heads = "64 heads" if case.heads > 32 else "32 heads"
    return pytest.param(name, marks=feature(
        f"indexer logits of {'a paged cache' if case.paged else 'a prompt'}", f"indexer logits with {heads}",
        f"indexer logits output {case.dtype}",
        *["indexer logits of queries and keys in bf16"] * (case.function == SEGMENTS),
    ))  # fmt: skip


def matches(case, seed=0, runs=2):
    """Run a case on equal memory several times."""
    given = cases.make_inputs(case, "cpu", seed)
    on_device = cases.moved(given, CUDA)
    got = cases.run(case, on_device)
    want = cases.expected(case, given)
    assert cases.error(case, got, want) <= 1, (case, seed)
    seen = (want[0] != -torch.inf).to(CUDA)
    for _ in range(runs - 1):
        assert torch.equal(bits(cases.run(case, on_device)[seen]), bits(got[seen]))
    return got


def bits(x: torch.Tensor) -> torch.Tensor:
    """View the bytes of a tensor: NaN equals no NaN."""
    return x.view(torch.uint8)


@pytest.mark.parametrize("name", SIMULATED)
def test_cases_of_the_simulator(name):
    for case in SIMULATED[name].calls:
        for seed in range(3):
            matches(case, seed)


@pytest.mark.parametrize("name", list(map(marked, CASES)))
def test_right_and_equal_in_twenty_runs(name):
    matches(CASES[name], len(name), 21)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].clean and not CASES[name].compressed])
def test_selection(name):
    case, given = cases.selectable(CASES[name])
    given = exact(case, cases.moved(given, CUDA))
    if case.function != SEGMENTS:
        case = replace(case, function=PAGED if case.paged else RAGGED)
    scores = cases.run(case, given).cpu()
    for count, scratch in ((64, 1 << 28), (2048, 1 << 16)):
        got = cases.select(case, given, top_k=count, scratch_bytes=scratch)
        assert torch.equal(got.cpu(), cases.chosen(case, given, scores, count))


def exact(case, given):
    """Return the arguments of the function that computes the same logits in fp32."""
    given = {name: value for name, value in given.items() if name != "logits_dtype"}
    return given | {"q": given["q"][0] if isinstance(given["q"], tuple) else given["q"]}


def test_a_row_depends_on_neither_batch_nor_schedule():
    case = LogitsCase(PAGED, lens=(3000, 200, 64, 900), next_n=2)
    given = cases.moved(cases.make_inputs(case), CUDA)
    whole = cases.run(case, given)
    for b in range(4):
        one = given | {name: given[name][b : b + 1] for name in ("q", "context_lens", "block_table")}
        one |= {"weights": given["weights"][2 * b : 2 * b + 2]}
        assert torch.equal(cases.run(case, one), whole[2 * b : 2 * b + 2])
    for n in range(2):  # one token at a time, in another tile
        alone = given | {"q": given["q"][:, n : n + 1], "weights": given["weights"][n::2].contiguous()}
        alone |= {"context_lens": given["context_lens"] - 1 + n}
        assert torch.equal(cases.run(case, alone), whole[n::2])


@pytest.mark.feature("indexer with CUDA graph replay")
def test_a_graph_serves_other_lengths():
    case = LogitsCase(PAGED, lens=(2000, 700, 64, 1), next_n=2)
    given = cases.moved(cases.make_inputs(case), CUDA)
    cases.run(case, given)
    cases.select(case, given, top_k=100)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores, picked = cases.run(case, given), cases.select(case, given, top_k=100)
    for lens in ((2000, 700, 64, 1), (3, 500, 0, 1), (1999, 1, 63, 1)):
        given["context_lens"].copy_(torch.tensor(lens))
        graph.replay()
        torch.cuda.synchronize()
        want = cases.run(case, given)
        assert torch.equal(scores, want)
        assert torch.equal(picked.cpu(), cases.chosen(case, given, want.cpu(), 100))


def test_hostile_tables_and_lengths():
    """No value makes a kernel leave its tensors: the next call is right."""
    case = LogitsCase(PAGED, lens=(500, 70))
    given = cases.moved(cases.make_inputs(case), CUDA)
    want = cases.run(case, given)
    for value in (-1, -(2**31), 2**31 - 1, 1 << 30):
        for name in ("block_table", "context_lens"):
            cases.run(case, given | {name: torch.full_like(given[name], value)})
            cases.select(case, given | {name: torch.full_like(given[name], value)}, top_k=9)
    torch.cuda.synchronize()
    assert torch.equal(cases.run(case, given), want)


def test_a_cache_beyond_4_gib():
    """Offsets of pages do not fit 32 bits."""
    pages = (1 << 32) // (64 * 132) + 9
    cache = torch.zeros(pages, 64, 1, 132, dtype=torch.uint8, device=CUDA)
    last = cache[-1].view(-1)
    last[: 64 * 128] = torch.ones(1).to(torch.float8_e4m3fn).view(torch.uint8).to(CUDA)
    last[64 * 128 :] = torch.ones(64, device=CUDA).view(torch.uint8)
    q = torch.ones(1, 1, 64, 128, device=CUDA).to(torch.float8_e4m3fn)
    table, lens = (torch.tensor(x, device=CUDA).int() for x in ([[0, pages - 1]], [128]))
    got = wrappers.fp8_paged_mqa_logits(q, cache, torch.ones(1, 64, device=CUDA), lens, table, None, 128)
    assert got[0, :64].eq(0).all() and got[0, 64:].eq(64 * 128).all()
