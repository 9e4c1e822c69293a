"""Fixtures shared by the tests."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels import build

ROOT = Path(__file__).resolve().parents[1]
ARCH = "sm_90a"
OUTSIDE = os.environ.get("CUTE_DSL_ARCH")  # what processes get that tests start
if not torch.cuda.is_available():  # read when the DSL is imported, which some test or other does first
    os.environ.setdefault("CUTE_DSL_ARCH", ARCH)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run everything, and simulate what was simulated before too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --all, tests marked `full` are left out. Tests on a GPU compile what they run."""
    for item in items:
        if item.path.name.startswith("test_gpu_"):
            item.add_marker(pytest.mark.kernels)
    if not config.getoption("--all"):
        full = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=full)


@pytest.fixture(autouse=True)
def compile_in_marked_tests_only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make quick` runs the tests without the marker `kernels`: they must not compile, or it is not quick."""
    if not request.node.get_closest_marker("kernels"):

        def refuse(op: str, spec: Any, *_: Any) -> None:
            pytest.fail(f"this test compiles {op}: mark it with pytest.mark.kernels")

        monkeypatch.setattr(build, "build", refuse)
        monkeypatch.setattr(build, "object_file", refuse)


def start_python(*arguments: str, cwd: Path = ROOT, **env: str) -> subprocess.Popen[str]:
    """Start the tests' Python; `env` is added to the environment."""
    pipe = subprocess.PIPE
    outside = {name: value for name, value in os.environ.items() if name != "CUTE_DSL_ARCH" or OUTSIDE}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=cwd, env=outside | env, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_python(*arguments: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return finish(start_python(*arguments, cwd=cwd, **env))


def build_bundle(arch: str, out: Path, *only: str) -> Path:
    """A bundle of shipped kernels at `out`. The tool builds what its cache (build/obj) lacks, 3 to 5 s a kernel."""
    jobs = str(len(os.sched_getaffinity(0)))
    command = ("-m", "tools.aot", "build", "--arch", arch, "--jobs", jobs, "--out", str(out), *only)
    done = run_python(*command, CUTE_DSL_ARCH=arch)
    if done.returncode:
        pytest.fail(f"tools.aot build failed:\n{done.stderr}", pytrace=False)
    return out


@pytest.fixture(scope="session")
def bundle() -> Path:
    """The bundle of every shipped kernel of ARCH."""
    return build_bundle(ARCH, ROOT / "build" / "bundle" / ARCH)
