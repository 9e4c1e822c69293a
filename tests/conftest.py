"""Fixtures shared by the tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
ARCH = "sm_90a"
OUTSIDE = os.environ.get("CUTE_DSL_ARCH")  # what processes get that tests start
if not torch.cuda.is_available():  # read when the DSL is imported, which some test or other does first
    os.environ.setdefault("CUTE_DSL_ARCH", ARCH)


def start_python(*arguments: str, cwd: Path = ROOT, **env: str) -> subprocess.Popen[str]:
    """Start the tests' Python; `env` is added to the environment."""
    pipe = subprocess.PIPE
    outside = {name: value for name, value in os.environ.items() if name != "CUTE_DSL_ARCH" or OUTSIDE}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=cwd, env=outside | env, stdout=pipe, stderr=pipe, text=True
    )


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_python(*arguments: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return finish(start_python(*arguments, cwd=cwd, **env))


def build_bundle(arch: str, out: Path, *only: str) -> Path:
    """A bundle of shipped kernels at `out`. The tool builds what its cache (build/obj) lacks, 3 to 5 s a kernel."""
    command = ("-m", "tools.aot", "build", "--arch", arch, "--jobs", "2", "--out", str(out), *only)
    done = run_python(*command, CUTE_DSL_ARCH=arch)
    if done.returncode:
        pytest.fail(f"tools.aot build failed:\n{done.stderr}", pytrace=False)
    return out


@pytest.fixture(scope="session")
def bundle() -> Path:
    """The bundle of every shipped kernel of ARCH."""
    return build_bundle(ARCH, ROOT / "build" / "bundle" / ARCH)
