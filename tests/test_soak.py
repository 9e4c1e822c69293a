"""The scenarios of `tools.soak` without a GPU: on the reference and with emulated kernels. Each planted fault must be
noticed by the scenario that is there for it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import wrappers
from bench import results
from bench.results import ROOT, Environment, SoakRow
from cute_kernels import bundle, catalog, device_code, manifest
from tests import fake_bundle
from tests.conftest import ARCH
from tests.emulated import emulation
from tools.soak import __main__ as command
from tools.soak import damage, memory, scenarios
from tools.soak.engine import MODELS, ServingEngine, Wrong
from tools.soak.memory import Sample
from tools.soak.probe import Probe
from tools.soak.scenarios import Soak

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture
def soak(tmp_path, monkeypatch):
    monkeypatch.setattr(scenarios, "COUNT", 8)
    return Soak(CPU, 3, 0.0, 30, tmp_path)


# ---- memory


def test_flat_memory_may_wave_and_warm_up():
    waves = [Sample(i, 500.0 * (i < 4) + 900 + i % 3, 10.0, 20.0, 700.0 + i % 2) for i in range(24)]
    assert memory.grown(waves) == ""
    with pytest.raises(ValueError, match="samples: 7, must be at least 8"):
        memory.grown(waves[:7])


@pytest.mark.parametrize("kind", memory.LIMITS)
def test_memory_that_grows_is_named(kind):
    step = memory.LIMITS[kind] / 8
    leak = [Sample(i, 900.0, 10.0, 20.0, 700.0)._replace(**{kind: 50 + step * i}) for i in range(24)]
    assert memory.grown(leak).startswith(f"{kind} memory grew by ")


def test_a_leak_of_the_host_is_noticed(monkeypatch, soak):
    """Also if the process has freed more before than the leak takes, and the C library keeps it."""
    kept = [bytes(100_000) for _ in range(4000)][::50]
    real = ServingEngine.step
    monkeypatch.setattr(ServingEngine, "step", lambda self, check: kept.append(b"x" * (4 << 20)) or real(self, False))
    with pytest.raises(Wrong, match="host memory grew by"):
        scenarios.serving(soak)


# ---- serving


def test_serving_holds(soak):
    found = scenarios.serving(soak)
    assert found.startswith("60 steps, 0 replays, ") and "equal bits at the start, in the middle" in found
    lines = (soak.out / "memory-cpu.csv").read_text().splitlines()
    assert lines[0] == ",".join(Sample._fields) and len(lines) >= 20


def test_requests_come_and_go():
    """No page has two owners, none is lost, and the same seed serves the same requests."""
    engines = [ServingEngine(MODELS[1], CPU, 5) for _ in range(2)]
    pages = len(engines[0].kv)
    for step in range(60):
        for engine in engines:
            engine.step(check=step == 40)
        own = [page for request in engine.requests for page in request.pages]
        assert sorted([*own, *engine.free]) == list(range(pages))
    assert engines[0].count == engines[1].count and engines[0].count["left"] > 2
    assert torch.equal(engines[0].kv.view(torch.uint8), engines[1].kv.view(torch.uint8))


def spoiled(function):
    def wrong(*args, **given):
        found = function(*args, **given)
        out = given.get("out") if given.get("out") is not None else found
        out.view(-1)[3] += 0.5
        return found

    return wrong


@pytest.mark.parametrize("name", ["trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"])
def test_a_wrong_result_of_serving_is_noticed(monkeypatch, name):
    engine, real = ServingEngine(MODELS[0], CPU, 1), getattr(wrappers, name)
    for _ in range(3):
        engine.step(check=True)
    monkeypatch.setattr(ServingEngine, "_compare", compare_with(ServingEngine._compare, real))
    monkeypatch.setattr(wrappers, name, spoiled(real))
    with pytest.raises(Wrong, match=f"{name}: 1 values are off"):
        for _ in range(30):
            engine.step(check=True)


def compare_with(compare, real):
    """`call_of` knows the public function, not the spoiled one."""
    return lambda self, function, given, out: compare(
        self, function if function.__name__ != "wrong" else real, given, out
    )


def test_bits_that_change_are_noticed(monkeypatch):
    probe = Probe(CPU, 3, 6)
    first = probe.digest()
    assert len(first) >= 4
    probe.compare(first, "again")
    call = probe.calls[0]
    with pytest.raises(Wrong, match="later: the bits of a call changed"):
        probe.compare(first | {str(call): "0"}, "later")


# ---- plans, with emulated kernels


def test_plans_are_dropped_and_made_anew(soak):
    with emulation() as fake:
        fake.max_plans = 12
        found = scenarios.plans(soak)
    assert found.startswith("248 forms, at most 12 plans kept, ")


def test_plans_that_are_never_dropped_are_noticed(soak, monkeypatch):
    with emulation() as fake:
        fake.max_plans = 12
        monkeypatch.setattr(type(fake), "keep", lambda self, key, plan: self.plans.__setitem__(key, plan))
        with pytest.raises(Wrong, match="plans of at most 12 were kept"):
            scenarios.plans(soak)


# ---- callers


def test_a_thread_with_other_bits_is_noticed(soak, monkeypatch):
    monkeypatch.setattr(scenarios, "THREADS", 3)
    monkeypatch.setattr(scenarios, "FEW", 3)
    assert "3 threads, 3 rounds" in scenarios.threads(soak)
    real, made = Probe.results, []

    def flips(self, work, tree):
        found = real(self, work, tree)
        made.append(0)
        found[0].view(-1)[:1] ^= len(made) == 12
        return found

    monkeypatch.setattr(Probe, "results", flips)
    with pytest.raises(Wrong, match=r"thread \d, round \d, .*other bits"):
        scenarios.threads(soak)


# ---- damage


def test_damaged_bundles_are_what_they_should_be(tmp_path):
    good = fake_bundle.make(tmp_path / "good" / ARCH)
    held = manifest.read(good)
    kernel = catalog.shipped(ARCH)[0]
    size = held.find(*kernel)["code"]["size"]
    cut = damage.truncated(good, tmp_path / "cut")
    assert any("truncated or changed" in said for said in bundle.verify(cut, ARCH))
    zeros = damage.unloadable(good, tmp_path / "zeros", [kernel])
    library, entry = manifest.read(zeros).libraries["attention"], manifest.read(zeros).find(*kernel)
    assert bundle.verify(zeros, ARCH) == [] and device_code.read(zeros / library["file"], entry) == bytes(size)
    assert bundle.verify(good, ARCH) == [] and damage.linked(good, tmp_path / "links") == held


@pytest.mark.full  # test_robust.py provokes both in this process
@pytest.mark.kernels
def test_full_disks_and_read_only_caches(tmp_path):
    """The real command, in processes of their own."""
    given = ["--device", "cpu", "--scenario", "disk", "read-only-cache", "--out", str(tmp_path)]
    ended = subprocess.run([sys.executable, "-m", "tools.soak", *given], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = results.read(tmp_path / command.FILE, SoakRow)
    assert {(r.scenario, r.result) for r in rows} == {("disk", "held"), ("read-only-cache", "held")}


# ---- the command


def test_rows_and_status_of_the_command(tmp_path, capsys):
    given = ["--device", "cpu", "--scenario", "devices", "--out", str(tmp_path)]
    assert command.main(given) == 0
    (row,) = results.read(tmp_path / command.FILE, SoakRow)
    assert (row.scenario, row.result, row.detail) == ("devices", command.SKIPPED, "needs a GPU")
    assert "1 scenarios, 0 failed" in capsys.readouterr().out


def test_a_scenario_that_fails_or_dies_is_a_row(monkeypatch, tmp_path):
    args = command.argparse.Namespace(out=str(tmp_path), seed=0, minutes=0.0, steps=0, device="cpu")
    env = Environment("2026-01-02", "abc", "cpu", "", "2.11")

    def process(answer, status):
        def run(command_line, **given):
            if answer:
                Path(tmp_path, "threads.json").write_text(json.dumps(answer))
            return subprocess.CompletedProcess(command_line, status)

        return run

    for answer, status, want in (
        (["FAILED", "Wrong: bits"], 0, ("FAILED", "Wrong: bits")),
        (None, -11, ("FAILED", "ended with status -11")),
    ):
        monkeypatch.setattr(command.subprocess, "run", process(answer, status))
        row = command.apart("threads", args, env)
        assert (row.result, row.detail) == want
