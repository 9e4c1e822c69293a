"""The runner of compute-sanitizer without a GPU: its calls launch every structure, its excuses name kernels without a
race, and output that is not clean is noticed."""

import re
from contextlib import nullcontext

import numpy as np
import pytest

from bench import results
from bench.cases.cache_write import copied
from bench.cases.choice import by_function
from bench.results import ROOT, Environment, SanitizerRow
from cute_kernels import build, catalog, shipped
from cute_kernels.attention import dispatch
from tests.conftest import ARCH
from tests.support.fake_machine import FakeMachine
from tools.fuzz.families import FAMILIES
from tools.sanitize import __main__ as command
from tools.sanitize import calls, report
from tools.sanitize.pieces import ON_DEMAND, PIECES
from wrappers.host import machine

pytestmark = pytest.mark.slow

CLEAN = "3 calls, all right\n========= ERROR SUMMARY: 0 errors"
RACE = """3 calls, all right
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at {}+0x6a0 in x.py
=========     and Read access at {}+0x2340 in x.py [992 hazards]
=========
========= RACECHECK SUMMARY: 992 hazards displayed"""


@pytest.fixture(scope="module")
def launched():
    """The kernels of every piece, which launch nothing here."""
    found = {}
    for piece, own in PIECES.items():
        kernels = []
        fake = FakeMachine(lambda op, spec, kernels=kernels: kernels.append((op, spec)) or (lambda *_: None))
        for call in own:
            work = FAMILIES[call.family].builds.build(call, calls.CPU)
            with machine.override(fake), by_function() if call.choice == "function" else nullcontext():
                tree = copied(work.variants[0], calls.CPU)
                if work.prepare is not None:
                    work.prepare(tree, 0)
                work.call(tree)
        found[piece] = kernels
    return found


def test_pieces_launch_only_kernels_of_a_bundle_and_few_of_them(launched):
    held = set(catalog.shipped(ARCH))
    for piece, kernels in launched.items():
        assert kernels and (set(kernels) <= held or piece in ON_DEMAND), piece
        assert len(set(kernels)) <= 6, piece  # a tool takes seconds for each


def structures(kernels):
    """Return the structures of top-k and of rows that are written. Copies in fp16 are those in bf16."""
    top_k = {(s.dtype, s.stream, s.cluster > 1) for op, s in kernels if op == "topk.radix" and s.dtype != "fp16"}
    sorts = {spec.threads for op, spec in kernels if op == "topk.sort"}
    writes = [spec for op, spec in kernels if op == "cache_write.rows"]
    merges = {spec for op, spec in kernels if op == "merge_states.rows"}
    records = {spec for op, spec in kernels if op.startswith("latent.")}
    return top_k | sorts | merges | records | {(s.cache.replace("fp16", "bf16"), s.transform, s.gather) for s in writes}


def test_every_structure_is_launched(launched):
    """For attention: a kernel of each row, cache and kind of `shipped`."""
    found = {kernel for kernels in launched.values() for kernel in kernels}
    assert structures(found) >= structures(catalog.shipped(ARCH))
    for row in (row for row in shipped.ATTENTION if ARCH in row.archs):
        for one in (row._replace(kv=(kv,), kinds=(kind,)) for kv in row.kv for kind in row.kinds):
            if row.q == ("fp16",):  # the bf16 kernels renamed, as test_ptxsim_kernels holds
                one = one._replace(q=("bf16",))
            specs = [(row.op, dispatch.OPS[row.op].candidate(r, ARCH, split)) for split, r in dispatch.requests(one)]
            assert found & set(specs), one


def sanitizer(tmp_path, text):
    """Return the options for a tool that prints a text."""
    tool = tmp_path / "sanitizer"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    tool.chmod(0o755)
    return ["--sanitizer", str(tool), "--out", str(tmp_path / "out")]


@pytest.mark.parametrize(
    ("text", "status", "bad"),
    [(CLEAN, report.CLEAN, 0), (CLEAN.replace("0 errors", "2 errors"), report.FOUND, 4), ("", report.UNFINISHED, 4)],
)
def test_a_row_for_each_process(monkeypatch, tmp_path, capsys, text, status, bad):
    monkeypatch.setattr(results, "environment", lambda: Environment("2026-01-02", "abc", "some-gpu", "1.2", "2.11"))
    given = [*sanitizer(tmp_path, text), "--tool", "memcheck", "synccheck", "--piece", "merge", "--jobs", "2"]
    assert command.main(given) == bad
    rows = results.read(tmp_path / "out" / command.FILE, SanitizerRow)
    assert {(r.tool, r.piece) for r in rows} == {(t, f"merge-{p}") for t in given[5:7] for p in ("states", "pair")}
    assert {r.status for r in rows} == {status} and f"4 processes, {bad} not clean" in capsys.readouterr().out


def test_wrong_results_and_reports_without_an_excuse_are_noticed(monkeypatch):
    import wrappers

    own = RACE.format(*["attention_decode__bf16"] * 2)
    assert report.read("racecheck", own).status == report.EXPECTED_ONLY
    for tool, text in (("racecheck", own.replace("Read", "Write")), ("synccheck", own)):
        assert report.read(tool, text).status == report.FOUND, text
    pattern = command.ONLY_OURS[1].removeprefix("regex=")
    assert all(re.match(pattern, op.replace(".", "_")) for op, _ in catalog.shipped(ARCH)), "the tool's filter"
    assert calls.run("topk-sort", calls.CPU) == len(PIECES["topk-sort"])

    def wrong(**given):
        values, indices = wrappers.flashinfer.topk.top_k(**given)
        return values, indices.flip(0)

    monkeypatch.setattr(wrappers, "top_k", wrong)
    with pytest.raises(AssertionError, match="indices: "):
        calls.run("topk-sort", calls.CPU)


@pytest.mark.parametrize(
    ("first", "second", "excused"),
    [
        ("s2o2ac2_0", "s2o2ac2_0", True), ("s2o2a_0", "s2o2a_1", True), ("s2o2t_0", "s2o2t_0", False),
        ("s2o2a_0", "s2o2t_0", False), ("s2o2ac2_0", "s2o2ac2b_0", False), ("s2o2a_0", "s2o2a_0_s_0", False),
        ("s3r_0", "s3r_0", False),
    ],
)  # fmt: skip
def test_a_read_before_a_write_is_no_error_where_maxima_are_handed_over(first, second, excused):
    """A name that only resembles theirs excuses nothing."""
    kernels = (f"attention_sm90__bf16_kvbf16v_d576x512_causal_tma_m64n64{end}" for end in (first, second))
    text = RACE.replace("Write", "{read}").replace("Read", "Write").replace("{read}", "Read").format(*kernels)
    assert report.read("racecheck", text).status == (report.EXPECTED_ONLY if excused else report.FOUND)


# ---- minimal kernels


def test_every_excuse_names_a_minimal_kernel():
    """One that the same tool does not see, in the text of the module, which needs the DSL."""
    variants = re.findall(
        r'^    "(\w+)": Variant\("(\w+)", (\w+),', (ROOT / "tools/sanitize/minimal.py").read_text(), re.M
    )
    unseen = {(tool, name) for name, tool, seen in variants if seen == "False"}
    named = {(e.tool, *re.findall(r"`tools\.sanitize\.minimal`, `(\w+)`", e.reason)) for e in report.EXPECTED}
    assert named <= unseen and len(named) > 1 and len(variants) == 2 * len(unseen)


@pytest.mark.kernels
def test_minimal_kernels_are_right_in_the_simulator(tmp_path):
    """In any order of warps: they have no race, whatever a tool says."""
    build.use_arch(ARCH)
    from ptxsim import host
    from ptxsim.runner import run

    from tools.sanitize import minimal

    given = np.arange(1, 33, dtype=np.int32) * 7
    for variant in minimal.VARIANTS:
        with build.host_functions() as hosts:
            fn = minimal.compiled(variant, str(tmp_path))
        (host_function,) = hosts
        want = minimal.expected(variant, given.tolist())
        for mode in ("eager", "late", "random"):
            out = np.zeros(64, np.int32)
            (call,) = host.evaluate(host_function, fn.__ptx__, [given, out], build._dynamic_shared(str(fn.ir_module)))
            run(call, mode)
            assert out[: len(want)].tolist() == want, (variant, mode)
