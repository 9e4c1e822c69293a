"""Fixtures shared by the tests."""

import gc
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.cases.choice import by_function
from cute_kernels import build, catalog, manifest
from tests.sim.pool import BEHIND
from tools import matrix

ROOT = Path(__file__).resolve().parents[1]
ARCH = "sm_90a"
BUNDLE = ROOT / "build" / "bundle" / ARCH
GPU = ROOT / "tests" / "gpu"  # whose conftest says what all tests on a GPU have in common
BUILDING = pytest.StashKey[subprocess.Popen[str]]()
OUTSIDE = os.environ.get("CUTE_DSL_ARCH")  # for processes that tests start
SIMULATOR = ROOT / "tools" / "ptxsim" / "src"  # as pyproject.toml tells pytest
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SIMULATOR), os.environ.get("PYTHONPATH")]))
if not torch.cuda.is_available():  # the DSL reads it when a test first imports it
    os.environ.setdefault("CUTE_DSL_ARCH", ARCH)
    torch.set_num_threads(1)  # tensors are small: two threads take 4 times the processor time of one
    os.environ["OMP_NUM_THREADS"] = "1"  # in processes that tests start
with suppress(ImportError):  # a GPU machine may lack Hypothesis, which no test on a GPU needs
    from hypothesis import HealthCheck, settings

    # A slow machine is no failure: by default, Hypothesis fails an example that takes 0.2 s, or data that take long.
    settings.register_profile("no_clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("quick", settings.get_profile("no_clock"), max_examples=20)
    settings.load_profile("no_clock")


def specs_of(op: str, arch: str) -> list[Any]:
    """Return the shipped specs of an op."""
    return [spec for other, spec in catalog.shipped(arch) if other == op]


def shard(text: str) -> slice:
    """Return which of all files belong to a shard: "2/4" is every fourth one from the second on."""
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(text)
    return slice(number - 1, None, count)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run all tests, and repeat simulations with remembered results")
    parser.addoption(
        "--quick", action="store_true", help="one in six cases of the tests that take no seconds and no kernels"
    )
    parser.addoption("--shard", type=shard, help="2/4: the second of four parts of the files of tests")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "feature(*names): features, by tools.matrix, that a GPU test uses")
    gc.disable()  # until collection ends, see `pytest_collection_finish`
    if config.getoption("--quick"):
        settings.load_profile("quick")
    if set(config.invocation_params.args) <= {"--all"}:  # all tests run, and some need the bundle: begin at once
        config.stash[BUILDING] = start_bundle(config)


def whole_bundle(config: pytest.Config) -> bool:
    """Return whether the tests compile all that is shipped, not only what they simulate: with --all, or on a GPU."""
    return config.getoption("--all") or torch.cuda.is_available()


def start_bundle(config: pytest.Config) -> subprocess.Popen[str]:
    from tests.support.kernels import LATER, SHIPPED

    chosen = () if whole_bundle(config) else SHIPPED.keys() - LATER
    # A glob, which must match the whole label: a label alone would also choose those that go on behind it.
    return start_build(ARCH, BUNDLE, *(argument for label in sorted(chosen) for argument in ("--only", f"*{label}")))


@pytest.fixture(autouse=True)
def kernels_by_function(request: pytest.FixtureRequest) -> Iterator[None]:
    """Choose kernels by the public function (`bench.cases.choice`), so that small cases reach every kernel.

    Tests marked `by_shape` see the choice that users see.
    """
    if request.node.get_closest_marker("by_shape"):
        yield
        return
    with by_function():
        yield


def features_of(item: pytest.Item) -> set[str]:
    """Return the names in a test's `feature` markers. Each must be a feature of tools.matrix."""
    names = {name for mark in item.iter_markers("feature") for name in mark.args}
    if names - matrix.NAMES:
        raise pytest.UsageError(f"{item.nodeid}: tools.matrix has no feature {', '.join(sorted(names - matrix.NAMES))}")
    if names and GPU not in item.path.parents:
        raise pytest.UsageError(f"{item.nodeid}: only tests on a GPU show a feature")
    return names


def imports_engine(item: pytest.Item) -> bool:
    """Return whether a test imports an engine. Such tests stay together: torch refuses to define their operators
    twice."""
    return "engine" in item.fixturenames  # type: ignore[attr-defined]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests by their markers and the options, and store the features of GPU tests for junit reports.

    Tests that need kernels come last, because the kernels are compiled meanwhile.
    """
    for item in items:
        item.user_properties += [("feature", name) for name in sorted(features_of(item))]
    if config.getoption("--quick"):
        kept = quick(items)
    else:
        kept = [item for item in items if config.getoption("--all") or not item.get_closest_marker("full")]
    if (part := config.getoption("--shard")) is not None:
        files = set(sorted({item.path for item in kept})[part])
        kept = [item for item in kept if item.path in files]
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = sorted(kept, key=order)


def quick(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return one in six cases of each test that no marker leaves out, the first one included."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not any(item.get_closest_marker(mark) for mark in ("kernels", "slow", "full")):
            cases[item.path, getattr(item, "originalname", item.name)].append(item)
    return [item for own in cases.values() for item in own[::6]]


def order(item: pytest.Item) -> tuple[bool, int]:
    """Sort tests that need kernels later, then those that wait for Blackwell's bundles, and those that wait for
    simulations last; tests of an engine stay together. Among tests that need kernels, those that wait for the bundle
    come first, because all other long work begins when it is built."""
    kernels = item.get_closest_marker("kernels") is not None and not imports_engine(item)
    bundle, *waits = (name in getattr(item, "fixturenames", ()) for name in ("bundle", "blackwell", "problems"))
    return kernels, 2 * waits[1] + waits[0] or -bundle


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start building the bundle if a test needs it, in parallel to the tests that do not.

    The collected tests stay until the end, so the garbage collector need not traverse them: that takes 0.8 s each time.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # few objects of a test are part of a cycle
    gc.enable()
    stash, option = session.config.stash, session.config.option
    if BUILDING not in stash and not option.collectonly and any("bundle" in x.fixturenames for x in session.items):
        stash[BUILDING] = start_bundle(session.config)


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.enable()  # also if nothing was collected
    if BUILDING in config.stash:
        config.stash[BUILDING].kill()  # harmless if it has ended


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print where the time went: seconds by file, as tests/README.md lists them."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    parts = [f"{file.removeprefix('tests/')} {spent:.0f} s" for file, spent in seconds.most_common() if spent >= 1]
    if parts:
        terminalreporter.write_line("time: " + ", ".join(parts))


# A process that runs this first cannot import the DSL, as if it were not installed.
BLOCK_DSL = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cutlass", "nvidia_cutlass_dsl"):
            raise ModuleNotFoundError(f"blocked: {name}", name=name)
sys.meta_path.insert(0, Blocker())
"""


ON_CUDA = pytest.param("cuda", marks=pytest.mark.kernels)


@pytest.fixture(params=["cpu", ON_CUDA] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Run a test that uses this fixture on the CPU and, if there is one, on a GPU."""
    if request.param == "cpu":
        return torch.device("cpu")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90 device")
    return torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def compile_in_marked_tests_only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that compiles without the marker `kernels`: `make quick` runs the unmarked tests, and must be
    quick."""
    if not request.node.get_closest_marker("kernels"):

        def refuse(op: str, spec: Any, *_: Any) -> None:
            pytest.fail(f"this test compiles {op}: mark it with pytest.mark.kernels")

        monkeypatch.setattr(build, "build", refuse)
        monkeypatch.setattr(build, "object_file", refuse)


def start_python(*arguments: str, cwd: Path = ROOT, behind: int = 0, **env: str) -> subprocess.Popen[str]:
    """Start the tests' Python; `env` is added to the environment. behind: by how much it is nicer than this process."""
    pipe = subprocess.PIPE
    outside = {name: value for name, value in os.environ.items() if name != "CUTE_DSL_ARCH" or OUTSIDE}
    command = ["nice", "-n", str(behind), sys.executable, *arguments] if behind else [sys.executable, *arguments]
    return subprocess.Popen(command, cwd=cwd, env=outside | env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_python(*arguments: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return finish(start_python(*arguments, cwd=cwd, **env))


def start_build(arch: str, out: Path, *only: str, jobs: int = 0) -> subprocess.Popen[str]:
    """Start the build of a bundle of shipped kernels; 3 to 5 s for each kernel that the cache (build/obj) lacks.

    jobs: 0 means one per core.
    """
    jobs = jobs or len(os.sched_getaffinity(0))
    return start_python(
        *("-m", "cute_kernels", "build", "--arch", arch, "--jobs", str(jobs), "--out", str(out), *only),
        behind=BEHIND,
        CUTE_DSL_ARCH=arch,
    )


def built(process: subprocess.Popen[str], out: Path) -> Path:
    """Wait for a process that builds the bundle `out`, and return `out`."""
    done = finish(process)
    if done.returncode:
        pytest.fail(f"cute_kernels build failed:\n{done.stderr}", pytrace=False)
    return out


def build_bundle(arch: str, out: Path, *only: str) -> Path:
    return built(start_build(arch, out, *only), out)


@pytest.fixture
def here() -> Iterator[Any]:
    """A machine with kernels that compute in torch; it lists `launches` and kernel `specs` of this test's calls."""
    from tests.support.emulated import emulation

    with emulation() as fake:
        yield fake


class Foreign(torch.Tensor):
    """A tensor as compiled functions see it, which can be neither copied nor pickled."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("ffi.Tensor does not support ToJSONGraph")

    __deepcopy__ = __reduce_ex__


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launches keep tensors as on a GPU, in a form that can be neither copied nor pickled."""
    from tests.support.fake_machine import FakeMachine

    monkeypatch.setattr(FakeMachine, "argument", lambda self, tensor: tensor.as_subclass(Foreign))


@pytest.fixture
def quiet() -> Iterator[Any]:
    """A machine with kernels that do nothing but `count`, so that only host work remains."""
    from tests.support.fake_machine import FakeMachine
    from wrappers.host import machine

    def launch(*flat: Any) -> None:
        fake.count += 1

    with machine.override(FakeMachine(lambda op, spec: launch)) as fake:
        fake.count = 0
        yield fake


@pytest.fixture
def launches(here: Any) -> list[Any]:
    return here.launches


@pytest.fixture(params=["cpu", "launched"])
def launched(request: pytest.FixtureRequest) -> list[Any] | None:
    """Run a test on the CPU, where this is None, and on a machine with kernels, of which this lists the launches."""
    return None if request.param == "cpu" else request.getfixturevalue("launches")


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The attention calls of this test that look for their plan."""
    from wrappers.attention import plan

    found, plan_of = [], plan.plan_of
    monkeypatch.setattr(plan, "plan_of", lambda call: (found.append(call), plan_of(call))[1])
    return found


@pytest.fixture
def fresh_compiler() -> None:
    torch.compiler.reset()  # otherwise one test's variants count towards the next one's recompile limit


@pytest.fixture(scope="session")
def bundle(request: pytest.FixtureRequest) -> Path:
    """The bundle of ARCH, see `whole_bundle`. When it is built, other long work starts in parallel to the tests."""
    out = built(request.config.stash[BUILDING], BUNDLE)
    for name in ("blackwell", "problems"):
        if any(name in item.fixturenames for item in request.session.items):
            request.getfixturevalue(name)
    return out


@pytest.fixture(scope="session")
def blackwell(request, tmp_path_factory) -> Callable[[str], manifest.Manifest]:
    """The bundle of an architecture: one kernel of each structure; with --all every shipped kernel."""
    from tests.support import kernels

    chosen = kernels.BLACKWELL if request.config.getoption("--all") else kernels.COVERING
    folder, only = tmp_path_factory.mktemp("bundle"), defaultdict(list)
    for arch, op, spec in chosen:
        only[arch] += ["--spec", f"{op}={manifest.canonical(manifest.to_json(spec))}"]  # --only takes parts of names
    building = {arch: start_build(arch, folder / arch, *arguments, jobs=1) for arch, arguments in only.items()}
    request.addfinalizer(lambda: [process.kill() for process in building.values()])
    return cache(lambda arch: manifest.read(built(building[arch], folder / arch)))


@pytest.fixture(scope="session")
def problems(request) -> Iterator[Callable[[str], list[str]]]:
    """Label of tests.support.simulated -> errors of a kernel or a feature, for the labels of the selected tests."""
    from tests.support.simulated import Simulations

    items = [item for item in request.session.items if "problems" in item.fixturenames]
    work = Simulations([item.callspec.params["label"] for item in items], request.config.getoption("--all"))
    yield partial(work.problems, blackwell=request.getfixturevalue("blackwell") if work.elsewhere else None)
    work.close()
