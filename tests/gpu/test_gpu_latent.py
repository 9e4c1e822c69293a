"""Rows of latent attention and of its indexer on a Hopper GPU: bytes of the reference, caches over 4 GiB, graphs, and
the operators of vLLM and FlashInfer.

Kernels come from a bundle where one is built (`make cubins`), else they are compiled as they are met, seconds each.
"""

from dataclasses import replace

import pytest
import torch

import wrappers
from bench.cases import latent as cases
from bench.cases import latent_read as reads
from bench.cases.latent import of_record
from bench.cases.latent_read import ReadCase
from cute_kernels.latent import dispatch
from cute_kernels.records import INDEX, RECORDS
from tests.sim.workloads.latent import latent_cases, latent_features
from tests.support.gpu import CUDA, feature, repeated
from wrappers import reference
from wrappers.host.machine import HostMachine, override

SIMULATED = {
    f"{spec.name}, {scenario.name}": scenario
    for _, spec in dispatch.shipped("sm_90a")
    for scenario in latent_cases(spec)
} | {scenario.name: scenario for scenario in latent_features()}
NAMES = [name for name in RECORDS if name != INDEX]
FEATURES = [f"latent record {name}" for name in NAMES]
FEATURES += [f"latent with {what}" for what in ("RMS norm", "RoPE", "a query")]
FEATURES += ["latent rows of an indexer", "latent rows of an indexer in one launch"]
FEATURES += [f"latent gathers of record {name}" for name in (*(n for n in NAMES if n != "rows"), "rows", "an indexer")]


def outcome(case, device, seed=0):
    given = cases.make_inputs(case, device, seed)
    with override(HostMachine()):
        cases.run(given) if device == "cpu" else cases.run_case(case, given)
    return given


def gathered(case):
    """Return what is wrong with rows that were gathered on the GPU."""
    got, want = reads.make_inputs(case, CUDA), reads.make_inputs(case)
    for given in (got, want):
        with override(HostMachine()):
            reads.run(case, given)
    return reads.difference(got, want)


@pytest.mark.parametrize("record", [*NAMES, INDEX])
def test_many_rows_are_gathered(record):
    """More rows than a launch has warps, of requests from none to thousands of rows."""
    function = reads.INDEXER if record == INDEX else reads.OWN
    case = ReadCase(function, record, lens=(0, 5000, 1, 777, 0, 12000, 64), page_size=64, starts=function == reads.OWN)
    assert not gathered(case)


@pytest.mark.parametrize("name", SIMULATED)
@feature(*FEATURES)
def test_simulated_problems(name):
    for case in SIMULATED[name].calls:
        if isinstance(case, ReadCase):
            assert not gathered(case)
            continue
        assert not cases.difference(case, outcome(case, CUDA), outcome(case, "cpu"))


@pytest.mark.parametrize("record", NAMES)
def test_many_rows(record):
    """More rows than an SM has threads, in pages of 64, with a query and an indexer; twice the same bytes."""
    rope = "" if record == "528_fp32" else "fp32"
    case = of_record(record, tokens=3000, pages=60, page_size=64, gap=528, heads=3 if rope else 0, rope=rope,
                     interleaved=True, index=5 if record in ("rows", "656") else -1)  # fmt: skip
    got = outcome(case, CUDA)
    assert not cases.difference(case, got, outcome(case, "cpu"))
    again = outcome(case, CUDA)
    assert all(torch.equal(a, b) for a, b in zip(cases.written(got).values(), cases.written(again).values()))


@pytest.mark.parametrize("record", ["656", "584", "rows"])
def test_a_cache_over_4_gib(record):
    """Rows at byte offsets past 2^32."""
    form, size = RECORDS[record], 64
    width, kind = (form.token_bytes, torch.uint8) if form.token_bytes else (576, torch.bfloat16)
    pages = (5 << 30) // (size * width * kind.itemsize)
    cache = torch.zeros(pages, size, width, dtype=kind, device=CUDA)
    latent = torch.randn(4, 448 if record == "584" else 512, device=CUDA).bfloat16()
    rotated = torch.randn(4, 64, device=CUDA).bfloat16()
    slots = torch.tensor([pages * size - 1, pages * size, 3, (pages - 2) * size + 5], device=CUDA)
    wrappers.append_latent(latent, rotated, wrappers.LatentCache(cache, record), slots)
    small = torch.zeros(1, 4, width, dtype=kind)
    order = torch.tensor([0, -1, 1, 2])
    wrappers.append_latent(latent.cpu(), rotated.cpu(), wrappers.LatentCache(small, record), order)
    picked = [(pages - 1, size - 1), (0, 3), (pages - 2, 5)]
    values = reference.latent_values(record, torch.stack([cache[page] for page, _ in picked]).view(torch.uint8).cpu())
    want = reference.latent_values(record, small.view(torch.uint8))[0]
    assert torch.equal(torch.stack([values[i, row] for i, (_, row) in enumerate(picked)]), want[:3])
    parts = cache.view(torch.uint8).split(1 << 12)  # count_nonzero of the whole would take 40 GiB
    assert sum(int(part.count_nonzero()) for part in parts) <= 3 * width * kind.itemsize


@feature("latent with CUDA graph replay")
def test_a_graph_is_replayed_with_other_values():
    case = replace(of_record("656"), heads=4, rope="fp32", norm="latent", index=4, tokens=6)
    given, other = (cases.make_inputs(case, CUDA, seed) for seed in (0, 1))
    replay = repeated(CUDA, lambda: cases.run(given))
    for name in ("latent", "rotated", "places"):
        given[name].copy_(other[name])
    for field in ("nope", "rotated"):
        getattr(given["query"], field).copy_(getattr(other["query"], field))
    given["index"].k.copy_(other["index"].k)
    given["index"].q.copy_(other["index"].q)
    for t in cases.written(given).values():
        t.fill_(cases.FILL)
    replay()
    want = dict(given)
    fresh = cases.make_inputs(case, CUDA, 0)
    for name in ("latent", "rotated", "places"):
        fresh[name].copy_(want[name])
    for field in ("nope", "rotated"):
        getattr(fresh["query"], field).copy_(getattr(want["query"], field))
    fresh["index"].k.copy_(want["index"].k)
    fresh["index"].q.copy_(want["index"].q)
    for t in cases.written(fresh).values():
        t.fill_(cases.FILL)
    cases.run(fresh)
    for name, got in cases.written(given).items():
        assert torch.equal(got, cases.written(fresh)[name]), name
