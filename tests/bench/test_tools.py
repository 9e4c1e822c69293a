"""One run of each tool that no user calls: shards of tests, the comparison of PTX, counts of SASS, and long
use. A tool that breaks shows in its next run; these tests hold that it notices what it is there for."""

import subprocess
import sys

import pytest
import torch

import wrappers
from bench import results
from bench.results import SoakRow
from cute_kernels import bundle, catalog, env, manifest
from tests.conftest import ARCH, ROOT
from tests.support import fake_bundle
from tests.support.emulated import emulate, emulation
from tests.support.fake_machine import FakeMachine
from tests.support.kernels import COVERING, REPEATED
from tools import installs, profile, proven, ptxdiff, static
from tools.soak import __main__ as soak
from tools.soak import damage, memory, pool, probe, scenarios
from tools.soak.engine import MODELS, ServingEngine
from tools.soak.grouped import GroupedServingLayer
from tools.soak.memory import Sample
from tools.soak.pool import SLOTS, Wrong
from tools.soak.probe import Probe
from wrappers.host import machine

CPU = torch.device("cpu")

# ---- shards of tests

LIMIT = 600  # seconds of a test, and of all: far more than a slow and busy machine needs
SUITE = f"""
import os, pytest, signal
@pytest.mark.parametrize("n", range(3))
def test_right(n): pass
def test_wrong(): assert 1 == 2
def test_dies(): os._exit(7)
def test_hangs():
    assert 0 < signal.alarm(0) <= {LIMIT}, "the limit is not set"
    signal.setitimer(signal.ITIMER_REAL, 0.01)  # the rest of it, which no test need wait for
    while True: signal.pause()
def test_behind(): pass
"""


@pytest.mark.slow
def test_a_hang_costs_one_test_and_a_run_is_resumed(tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # names of tests begin here, wherever the checkout is
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "0.log").write_text("begin test_suite.py::test_right[0]\nend test_suite.py::test_right[0]\n")
    command = [sys.executable, "-m", "tests.shards", str(tmp_path / "test_suite.py"), "--out", str(tmp_path / "out")]
    command += ["--processes", "2", "--limit", str(LIMIT), "--seconds", "3600", "--resume"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    *problems, last = done.stdout.splitlines()
    said = {problem.partition("::")[2] for problem in problems}
    assert said == {"test_wrong assert 1 == 2", "test_dies did not end", "test_hangs did not end"}, done.stderr
    assert last.startswith("5 tests ended in ")


# ---- PTX and SASS

PTX = """\
// Compiler Build ID: CL-{build}
.visible .entry {name}(
\t.param .align 8 .b8 {name}_param_0[{size}],
\t.param .u32 {name}_param_1
)
{{
\t.reg .b32 \t%r<{registers}>;
\t.loc 1 {line} 5
\tld.param.b32 \t%r1, [{name}_param_0{offset}];
\tmov.u32 \t%r{third}, %tid.x;
\tadd.s32 \t%r5, %r{third}, {added};\t// comment
\tret;
}}
"""


def ptx(**changes):
    plain = dict(build=1, name="decode_m16_0", size=32, registers=7, line=3, offset="+8", third=4, added=1)
    return PTX.format(**plain | changes)


def test_equal_ptx_is_told_from_other_ptx(tmp_path, capsys):
    same = ptxdiff.normalise(ptx())
    assert ptxdiff.normalise(ptx(name="narrow__m16", build=2, line=90)) == same
    for changes in ({"size": 48}, {"offset": "+16"}, {"registers": 8, "third": 7}, {"added": 2}):
        assert ptxdiff.normalise(ptx(**changes)) != same
    for folder, kernels in {"a": {"m16": ptx(), "m32": ptx(added=2)}, "b": {"x": ptx(), "m32": ptx(added=3)}}.items():
        for label, text in kernels.items():
            (tmp_path / folder / "op").mkdir(exist_ok=True, parents=True)
            (tmp_path / folder / "op" / f"{label}.ptx").write_text(text)
    assert ptxdiff.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 kernels have an equal, 1 have none, 1 are new" in said and "lines differ from op/m32" in said
    assert ptxdiff.main(["compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0


def test_a_profile_shows_the_instructions_where_warps_wait():
    heading = "Address,Source,# Samples,Instructions Executed,stall_wait,stall_long_sb,stall_wait (Not Issued)"
    lines = ["Kernel Name,attention,", heading, '0x0,"  LDG R1, [R2]",0,64,0,0,0', '0x10,"  FADD R1, R1",30,64,10,20,9']
    lines += ["0x20,  EXIT,10,32,10,0,3"]
    found = profile.sampled(lines)
    assert found[0] == (0, 64, 0, {}, "LDG R1, [R2]")
    assert found[1] == (1, 64, 30, {"wait": 10, "long_sb": 20}, "FADD R1, R1") and found[1].reason == "long_sb"
    assert [line.split()[0] for line in profile.hottest(found, 2).splitlines()] == ["number", "1", "2"]
    _, loop, end = (line.split() for line in profile.stretches(found).splitlines())
    assert loop == ["0-", "1", "64", "75.0%", "long_sb", "50.0%,", "wait", "25.0%"]
    assert end == ["2-", "2", "32", "25.0%", "wait", "25.0%"]


def test_a_steady_path_leaves_out_what_is_not_owed():
    texts = ["MOV R1, R2", "VOTE.ANY P0, P0", "@!P0 BRA 0x50", "LDTM.x32 R4, tmem[UR4]", "STTM.x32 tmem[UR4], R4",
             "FADD R1, R1, R2", "@P1 BRA 0x10", "EXIT"]  # fmt: skip
    lines = ["Function : k"]
    for k, text in enumerate(texts):
        lines.append(f"        /*{16 * k:04x}*/                   {text} ;    /* 0x{k:016x} */")
        lines.append(f"                                                /* 0x{2 << 41:016x} */")
    (code,) = static.parse("\n".join(lines) + "\n").values()
    (loop,) = static.loops(code)
    assert loop.role == "correction" and loop.stall == 8
    assert [i.address for i in loop.path] == [0x10, 0x20, 0x50, 0x60]


KERNELS = [
    pytest.param(*kernel[::2], id=f"{kernel[0]}-{kernel[2].name}", marks=() if kernel in COVERING else pytest.mark.full)
    for kernel in REPEATED
    if kernel[1] == static.OP
]


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize(("arch", "spec"), KERNELS)
def test_kernels_use_what_kernels_that_ran_on_a_device_use(blackwell, arch, spec):
    """As docs/blackwell.md says of the forms of Blackwell's instructions."""
    entry = blackwell(arch).find(static.OP, spec)
    assert not proven.unproven((ROOT / "build" / "obj" / f"{entry['key']}.ptx").read_text())
    planted = "tcgen05.st.sync.aligned.32x32b.x64.b32 [%r1], {%r2};\nadd.rm.f32x2 %rd1, %rd2, %rd3;"
    assert proven.unproven(planted) == {"tcgen05.st.sync.aligned.32x32b.x64.b32"}


# ---- installations


def test_installations_cover_the_ends_of_the_ranges_and_the_page_lists_them():
    """The table of the page is what `python -m tools.installs` printed."""
    tried = {(row.dsl, row.ffi) for row in installs.ENVIRONMENTS}
    assert (env.VERSIONS[env.DSL][0], env.VERSIONS[env.FFI][0]) in tried
    assert {row.python for row in installs.ENVIRONMENTS} >= {"3.10", "3.11", "3.12", "3.13", "3.14"}
    assert {row.source for row in installs.ENVIRONMENTS} == {"wheel", "sdist"}
    assert installs.ONLY in {manifest.label(*kernel) for kernel in catalog.shipped(installs.ARCH)}
    page = (ROOT / "docs" / "installs.md").read_text()
    for row in installs.ENVIRONMENTS:
        cells = (row.python, row.source, row.torch or "-", row.dsl or "-", row.ffi)
        assert f"| {' | '.join(cells)} | " in page


@pytest.mark.kernels
@pytest.mark.full
def test_a_stranger_can_install_and_use_it():
    """Needs a package index, 1 GB of downloads and 20 minutes."""
    rows = installs.table(ROOT / "build" / "installs of strangers")
    assert not [row for row in rows if "FAILED" in row[-1]] and any("passed" in row[-1] for row in rows)


# ---- long use


@pytest.fixture
def short(monkeypatch):
    """Prompts that are long enough for a selection of their keys."""
    monkeypatch.setattr(pool, "LONGEST_PROMPT", 80)


@pytest.fixture
def given(monkeypatch, short):
    monkeypatch.setattr(scenarios, "COUNT", 8)
    monkeypatch.setattr(scenarios, "THREADS", 3)
    monkeypatch.setattr(scenarios, "FEW", 3)
    return scenarios.Soak(CPU, 3, 0.0, 26)


@pytest.mark.slow
def test_scenarios_hold(given):
    found = scenarios.serving(given)
    assert found.startswith(f"{26 * len(MODELS)} steps, 0 replays, ")
    assert "equal bits at the start, in the middle" in found
    assert "3 threads, 3 rounds" in scenarios.threads(given)
    with emulation() as fake:
        fake.max_plans = 12
        assert scenarios.plans(given).startswith("248 forms, at most 12 plans kept, ")


def only(monkeypatch, model):
    monkeypatch.setattr(scenarios, "MODELS", (model,))


def grows(monkeypatch, kept):
    only(monkeypatch, MODELS[0])
    real = ServingEngine.step
    monkeypatch.setattr(ServingEngine, "step", lambda self, check: kept.append(b"x" * (4 << 20)) or real(self, False))


def computes_wrongly(monkeypatch, kept):
    """`call_of` knows the public function, not the spoiled one."""
    only(monkeypatch, MODELS[0])
    name = "trtllm_batch_decode_with_kv_cache"
    real, compare = getattr(wrappers, name), GroupedServingLayer._compare

    def wrong(**arguments):
        out = real(**arguments)
        out.view(-1)[3] += 0.5
        return out

    monkeypatch.setattr(wrappers, name, wrong)
    monkeypatch.setattr(
        GroupedServingLayer,
        "_compare",
        lambda self, f, given, out: compare(self, real if f is wrong else f, given, out),
    )


def flips_bits(monkeypatch, kept):
    real = Probe.results

    def flips(self, work, tree):
        found = real(self, work, tree)
        kept.append(0)
        found[0].view(-1)[:1] ^= len(kept) == 12
        return found

    monkeypatch.setattr(Probe, "results", flips)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "scenario", "said"),
    [
        (grows, scenarios.serving, "host memory grew by"),
        (computes_wrongly, scenarios.serving, "1 values are off"),
        (flips_bits, scenarios.threads, r"thread \d, round \d, .*other bits"),
    ],
)
def test_planted_faults_are_noticed(given, monkeypatch, plant, scenario, said):
    plant(monkeypatch, [])
    with pytest.raises(Wrong, match=said):
        scenario(given)


SPARSE, DENSE = MODELS[2:]


def off(real):
    """Change the first value of the first result."""

    def spoiled(*given, **named):
        found = real(*given, **named)
        first = found[0] if isinstance(found, tuple) else found
        first[(0,) * first.dim()] += 0.5
        return found

    return spoiled


def smallest(real):
    """Select the keys with the smallest logits."""
    return lambda q, keys, weights, *rest, **named: real(q, keys, -weights, *rest, **named)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("model", "name", "spoil", "said"),
    [
        (SPARSE, "flash_mla_with_kvcache", off, "flash_mla_with_kvcache: 1 values are off"),
        (SPARSE, "flash_mla_sparse_fwd", off, "flash_mla_sparse_fwd: 1 values are off"),
        (SPARSE, "select_slots", smallest, r"\d+ tokens have selected other keys"),
        (SPARSE, "select_rows", smallest, r"\d+ tokens have selected other keys"),
        (SPARSE, "fp8_paged_mqa_logits", off, "the indexer: 1 values are off"),
        (SPARSE, "fp8_mqa_logits", off, "the indexer: 1 values are off"),
        (DENSE, "flash_mla_with_kvcache", off, "flash_mla_with_kvcache: 1 values are off"),
        (DENSE, "flash_attn_varlen_func", off, "flash_attn_varlen_func: 1 values are off"),
    ],
)
def test_planted_faults_of_latent_attention_are_noticed(monkeypatch, model, name, spoil, said):
    engine = ServingEngine(model, CPU, 3)
    monkeypatch.setattr(wrappers, name, spoil(getattr(wrappers, name)))
    with pytest.raises(Wrong, match=said):
        for _ in range(40):
            engine.step(check=True)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("what", "written"),
    [
        ("rows of the cache", lambda cache, query, index: cache.cache),
        ("rows of the indexer", lambda cache, query, index: index.cache),
        ("queries", lambda cache, query, index: query.out),
        ("queries of the indexer", lambda cache, query, index: index.weights_out),
    ],
)
def test_rows_that_were_not_written_are_noticed(monkeypatch, what, written):
    engine, real = ServingEngine(SPARSE, CPU, 3), wrappers.append_latent

    def forgets(latent, rotated, cache, places, **rest):
        tensor = written(cache, **rest)
        before = tensor.clone()
        real(latent, rotated, cache, places, **rest)
        tensor.copy_(before)

    monkeypatch.setattr(wrappers, "append_latent", forgets)
    with pytest.raises(Wrong, match=f"append_latent, {what}: "):
        for _ in range(20):
            engine.step(check=True)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_steps_run_kernels_of_bundles_and_wait_for_nothing(model):
    """A kernel that no bundle holds would compile in the middle of a run. A wait would end the capture of a step."""
    used = []
    with machine.override(FakeMachine(lambda op, spec: used.append((op, spec)) or emulate(op, spec, []))) as fake:
        engine = ServingEngine(model, CPU, 3)
        for _ in range(4):
            engine.step(check=True)
        for slots in SLOTS:
            step = engine.new_step(slots)
            engine.layer.decode(step)
            fake.waits, fake.capturing, fake.capture = [], True, slots
            engine.layer.decode(step)
            fake.capturing = False
            assert not fake.waits
    assert set(used) <= set(catalog.shipped(ARCH))


def test_a_probe_has_a_call_of_each_kind():
    calls = Probe(CPU, 5, 1).calls
    assert len(calls) <= 1 + len(probe.KINDS) and all(any(map(kind.of, calls)) for kind in probe.KINDS)


@pytest.mark.parametrize("kind", [None, *memory.LIMITS])
def test_memory_that_grows_is_named(kind):
    waves = [Sample(i, 500.0 * (i < 4) + 900 + i % 3, 10.0, 20.0, 700.0 + i % 2) for i in range(24)]
    if kind is None:
        assert memory.grown(waves) == "", "warm-up and waves are no growth"
        return
    leak = [sample._replace(**{kind: 50 + memory.LIMITS[kind] / 8 * i}) for i, sample in enumerate(waves)]
    assert memory.grown(leak).startswith(f"{kind} memory grew by ")


def test_damaged_bundles_are_what_they_should_be(tmp_path):
    good, kernel = fake_bundle.make(tmp_path / "good" / ARCH), catalog.shipped(ARCH)[0]
    cut = damage.truncated(good, tmp_path / "cut")
    assert any("truncated or changed" in said for said in bundle.verify(cut, ARCH))
    assert bundle.verify(damage.unloadable(good, tmp_path / "zeros", [kernel]), ARCH) == []
    assert bundle.verify(good, ARCH) == []


@pytest.mark.full  # test_robust.py provokes both in its own process
@pytest.mark.kernels
def test_full_disks_and_read_only_caches(tmp_path):
    assert soak.main(["--device", "cpu", "--scenario", "disk", "read-only-cache", "--out", str(tmp_path)]) == 0
    rows = results.read(tmp_path / soak.FILE, SoakRow)
    assert {(r.scenario, r.result) for r in rows} == {("disk", "held"), ("read-only-cache", "held")}


def test_the_command_writes_a_row(tmp_path, capsys):
    assert soak.main(["--device", "cpu", "--scenario", "devices", "--out", str(tmp_path)]) == 0
    (row,) = results.read(tmp_path / soak.FILE, SoakRow)
    assert (row.scenario, row.result, row.detail) == ("devices", soak.SKIPPED, "needs a GPU")
    assert "1 scenarios, 0 failed" in capsys.readouterr().out
