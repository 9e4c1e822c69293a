"""Which plan a top-k problem gets, and what is refused. Plain Python: no DSL."""

import re
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import topk as bench
from cute_kernels import archs
from cute_kernels.topk import dispatch, radix, sort
from cute_kernels.topk.request import TopKKernelRequest
from cute_kernels.topk.spec import DTYPES
from tests.conftest import ROOT

ARCH = "sm_90a"
SORTED = 16_384  # pairs that a CTA sorts
LONGEST = {"fp32": 737_280, "fp16": 1_474_560, "bf16": 1_474_560}  # elements of a row that a cluster holds
MOST = 15_872  # k of longer rows
SMS = (78, 114, 132, 148, 160)  # of a Hopper or Blackwell GPU
EDGES = sorted({p.cluster * p.capacity for dtype in DTYPES for p in dispatch.specs(dtype)})

counts = st.one_of(st.integers(0, 300), st.integers(0, 100_000))
lengths = st.one_of(
    st.integers(0, 1 << 14), st.integers(0, 1 << 23), st.tuples(st.sampled_from(EDGES), st.integers(-1, 1)).map(sum)
)
ks = st.one_of(st.sampled_from((1, 64, 2048, 5632, 5633, MOST, MOST + 1)), st.integers(1, 1 << 21))
problems = st.builds(TopKKernelRequest, st.sampled_from(DTYPES), counts, lengths, ks, st.sampled_from(SMS))


def holds(plan, problem):
    """A slice lies in shared memory, or the candidates of a row fit beside what a warp looks at."""
    return problem.k <= radix.max_k(plan) if plan.stream else plan.cluster * plan.capacity >= problem.length


@settings(max_examples=1000)
@given(problems)
def test_a_plan_can_hold_what_it_serves(problem):
    plan = dispatch.candidate(problem)
    if problem.length > LONGEST[problem.dtype] and problem.k > MOST:
        assert plan is None
    else:
        assert plan in dispatch.specs(problem.dtype) and holds(plan, problem)


@pytest.mark.parametrize("sms", SMS)
def test_a_row_is_shared_only_where_all_rows_run_at_once(sms):
    """Whenever `k` leaves the choice: each CTA has keys that are worth it, and no row waits for another."""
    for dtype, rows, length in product(DTYPES, range(1, 162), (4097, *EDGES, 1 << 21)):
        plan = dispatch.candidate(TopKKernelRequest(dtype, rows, length, 5632, sms))
        if plan.cluster > 1:
            assert plan.cluster * dispatch.MIN_KEYS_PER_CTA <= length
            assert plan.cluster * rows <= sms and rows <= dispatch.resident_rows(plan, sms)


@pytest.mark.parametrize("rows, cluster", [(7, 16), (8, 8), (14, 8), (15, 4)])
def test_clusters_that_hold_rows_have_one_cta_on_an_sm(rows, cluster):
    """Seven GPCs of an H200 have 18 SMs, room for one cluster of 16 each or two of 8."""
    plan = dispatch.candidate(TopKKernelRequest("fp32", rows, 131072, 2048, 132))
    assert (plan.cluster, plan.stream) == (cluster, False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_readmes_table_of_plans(dtype):
    """One row or many, of lengths on both sides of each bound; k of many long rows."""
    keys = 1 if dtype == "fp32" else 2  # in the place of one fp32
    for rows, bound, cluster in ((4096, 16384 * keys, 1), (1, LONGEST[dtype], 16)):
        held, streamed = (dispatch.candidate(TopKKernelRequest(dtype, rows, bound + more, 2048)) for more in (0, 1))
        assert (held.stream, held.cluster, streamed.stream, streamed.cluster) == (False, cluster, True, cluster)
        assert dispatch.candidate(TopKKernelRequest(dtype, rows, 1 << 21, MOST)).cluster == cluster


@pytest.mark.parametrize("name", [*bench.HEADLINE, *bench.SORTED, *bench.SWEEP])
def test_measured_cases_have_a_shipped_plan(name):
    dtype, *sizes = re.search(r"-(\w+)-(\d+)x(\d+)-k(\d+)$", name).groups()
    for arch, sms in product(radix.ARCHS, SMS):
        problem = TopKKernelRequest(dtype, *map(int, sizes), sms)
        op, plan = dispatch.select(problem, arch)
        assert (op, plan) in dispatch.shipped(arch) and holds(plan, problem)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4096])
def test_k_of_a_long_row_is_limited_and_named(dtype, rows):
    longest = LONGEST[dtype]
    for length in (longest + 1, 4_000_000):
        assert dispatch.select(TopKKernelRequest(dtype, rows, length, MOST), ARCH)[1].stream
        for k in (MOST + 1, length):
            with pytest.raises(NotImplementedError) as error:
                dispatch.select(TopKKernelRequest(dtype, rows, length, k), ARCH)
            assert f"k {k} of rows of {length} {dtype}" in str(error.value)
            assert f"k must be at most {MOST}, or the rows at most {longest} elements" in str(error.value)
    assert not dispatch.select(TopKKernelRequest(dtype, rows, longest, longest), ARCH)[1].stream


@pytest.mark.parametrize(
    "problem",
    [TopKKernelRequest("bf16", 4096, 65536, 2048), TopKKernelRequest("fp32", 1, LONGEST["fp32"] + 1, MOST + 1)],
)
def test_explain_says_what_select_does(problem):
    """A row for each kernel, on every architecture; the reason is in the error."""
    for arch in (*radix.ARCHS, "sm_80"):
        rows = dispatch.explain(problem, arch)
        assert [op for op, _, _ in rows] == list(dispatch.KERNELS)
        (op, spec, reason), *_ = rows
        assert spec == (None if arch == "sm_80" else dispatch.candidate(problem, arch))
        assert (reason is None) == (arch != "sm_80" and spec is not None)
        if reason is None:
            assert dispatch.select(problem, arch) == (op, spec)
        else:
            with pytest.raises(NotImplementedError, match=f"no top-k kernel: {op}: {reason}"):
                dispatch.select(problem, arch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_smallest_kernel_that_holds_a_row_sorts_it(dtype):
    every = dispatch.sort_specs(dtype)
    assert [sort.supports(spec) for spec in every] == [None] * len(every)
    for k, most in ((1, 2048), (2048, 2048), (2049, SORTED), (SORTED, SORTED)):
        assert dispatch.sort_spec(TopKKernelRequest(dtype, 3, 1 << 20, k)).capacity == most
    assert dispatch.sort_spec(TopKKernelRequest(dtype, 3, 1 << 20, SORTED + 1)) is None
    assert f"k up to {SORTED}" in (ROOT / "docs" / "top-k.md").read_text()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("arch", "sms"), [("sm_90a", 132), ("sm_100a", 148), ("sm_120a", 188), ("sm_121a", 48)])
def test_every_plan_is_somebodys(dtype, arch, sms):
    """A plan that no problem gets would be compiled, tested and shipped for nothing."""
    lengths = sorted({size for e in range(12, 22) for size in (1 << e, 3 << e - 1, (1 << e) + 1)})
    found = {
        dispatch.candidate(TopKKernelRequest(dtype, rows, length, k, sms), arch)
        for rows, length, k in product((1, 5, 8, 12, 16, 20, 30, 40, 50, 70, 100, 200), lengths, (1, 5633))
    }
    assert {plan.name for plan in dispatch.specs(dtype, arch)} == {plan.name for plan in found}


@pytest.mark.parametrize("arch", archs.NAMES)
def test_plans_fit_in_the_shared_memory_of_their_architecture(arch):
    most = archs.of(arch).smem_per_cta
    for dtype in DTYPES:
        assert all(radix.smem_bytes(plan) <= most for plan in dispatch.specs(dtype, arch))
        assert all(sort.smem_bytes(plan) <= most for plan in dispatch.sort_specs(dtype, arch))
        assert all(plan.cluster <= archs.of(arch).max_cluster for plan in dispatch.specs(dtype, arch))


def test_limits_of_sm_120a_are_named():
    """Shared memory of 99 KiB holds fewer candidates and shorter rows."""
    with pytest.raises(NotImplementedError, match="k must be at most 9728, or the rows at most 155648 elements"):
        dispatch.select(TopKKernelRequest("fp32", 1, 1 << 21, 9729, 188), "sm_120a")
    assert dispatch.select(TopKKernelRequest("fp32", 1, 155648, 155648, 188), "sm_120a")[1].cluster == 8
