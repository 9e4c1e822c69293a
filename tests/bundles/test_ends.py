"""The lower ends of the ranges in pyproject.toml: kernels compile with the oldest DSL that it allows, to the same PTX,
and bundles of either end load and check their arguments under either apache-tvm-ffi. Other tests run the newest.

Both are taken from the package index, 100 MB, into build/lowest; without an index these tests are skipped. A release
promises the ranges, so they run with --all.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from cute_kernels import build, catalog, manifest
from tests.bundles.test_bundle import CHECKS
from tests.conftest import ARCH, ROOT, run_python
from tests.support.kernels import SPILLED

pytestmark = pytest.mark.kernels
OBJECTS = ROOT / "build" / "obj"
OPS = sorted({op for op, _ in catalog.shipped(ARCH)})
KERNELS = [next(kernel for kernel in catalog.shipped(ARCH) if kernel[0] == op) for op in OPS]
ONLY = [argument for kernel in KERNELS for argument in ("--only", manifest.label(*kernel))]
LIBRARIES = ("libs-base", "libs-core", "libs-cu13")  # of the DSL; without cu12, which it asks for as well
SECONDS = 600  # that pip may take


def lower(distribution: str) -> str:
    """The oldest version that pyproject.toml allows."""
    found = re.search(rf'"{re.escape(distribution)}>=([\d.]+),<', (ROOT / "pyproject.toml").read_text())
    assert found, distribution
    return found[1]


DSL, FFI = lower("nvidia-cutlass-dsl[cu13]"), lower("apache-tvm-ffi")


def install(folder: Path) -> None:
    """Put the oldest versions into `folder`, in one step; skip where they cannot be had."""
    if not find_spec("pip"):
        pytest.skip("needs pip")
    names = [f"nvidia-cutlass-dsl=={DSL}", *(f"nvidia-cutlass-dsl-{name}=={DSL}" for name in LIBRARIES)]
    part = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(part, ignore_errors=True)
    options = ["--target", str(part), "--no-deps", "--only-binary", ":all:", "--retries", "0", "--timeout", "60"]
    command = [sys.executable, "-m", "pip", "install", "-q", *options, *names, f"apache-tvm-ffi=={FFI}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip had no answer within {SECONDS} s")
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        (pytest.skip if unreachable(done.stderr) else pytest.fail)(f"not to be had: {' '.join(last)}")
    os.replace(part, folder)


def unreachable(said: str) -> bool:
    """Whether pip failed because it had no answer from the index; one that has other versions did answer."""
    if re.search(r"\(from versions: (?!none\))", said):
        return False
    return bool(re.search(r"from versions: none|Max retries|Connection|Could not fetch|timed out|HTTP error", said))


@pytest.mark.parametrize(
    ("said", "unreached"),
    [
        ("ERROR: Could not find a version that satisfies x==1 (from versions: none)\nERROR: No matching ...", True),
        ("WARNING: Retrying after NewConnectionError\nERROR: no x==1 (from versions: 2, 3)", False),
        ("ReadTimeoutError: HTTPSConnectionPool(host='files'): Read timed out.", True),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", False),
    ],
)
def test_only_an_index_out_of_reach_is_an_excuse(said, unreached):
    assert unreachable(said) is unreached


@pytest.fixture(scope="module")
def lowest() -> dict[str, str]:
    """The environment of a process that runs with the oldest versions."""
    folder = ROOT / "build" / "lowest" / f"dsl-{DSL}-ffi-{FFI}-{sys.implementation.cache_tag}"
    with manifest.locked(folder.with_name(".lock")):
        if not folder.exists():
            install(folder)
    return {"PYTHONPATH": os.pathsep.join([str(folder / "nvidia_cutlass_dsl" / "dsl_packages"), str(folder)])}


def bundle(out: Path, **env: str) -> Path:
    command = ["-m", "cute_kernels", "build", "--arch", ARCH, "--out", str(out), "--objects", str(OBJECTS), *ONLY]
    done = run_python(*command, **env)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def old(lowest, tmp_path_factory) -> Path:
    """A kernel of each op, compiled and linked with the oldest versions."""
    return bundle(tmp_path_factory.mktemp("old") / ARCH, **lowest)


@pytest.fixture(scope="module")
def new(tmp_path_factory) -> Path:
    return bundle(tmp_path_factory.mktemp("new") / ARCH)


@pytest.mark.full
def test_the_oldest_compiler_gives_the_same_code(old):
    held = manifest.read(old)
    assert held.toolchain["dsl"] == DSL and len(held.kernels) == len(KERNELS)
    for op, spec in KERNELS:
        entry = held.find(op, spec)
        assert entry and entry["stack"] <= SPILLED, "spills, see test_compile.py"
        before = (OBJECTS / f"{entry['key']}.ptx").read_text()
        assert build.object_file(op, spec, ARCH, OBJECTS, ".ptx").read_text() == before, op


# Every library of a bundle loads, and a call passes all checks until the launch finds no GPU.
LOAD = """
import sys
from pathlib import Path
import torch, tvm_ffi
from cute_kernels import bundle
from cute_kernels.attention import dispatch
from wrappers import runtime
print(tvm_ffi.__version__)
assert not (problems := bundle.verify(Path(sys.argv[1]), "sm_90a")), problems
runtime.argument(torch.zeros(8))
op, spec = dispatch.shipped("sm_90a")[0]
"""


@pytest.mark.full
@pytest.mark.parametrize(("built", "run"), [("old", "old"), ("old", "new"), ("new", "old")])
def test_either_end_runs_bundles_of_either(request, lowest, built, run):
    folder = str(request.getfixturevalue(built))
    env = {"CUTE_KERNELS_BUNDLE": folder, "CUTE_KERNELS_JIT": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = run_python("-c", LOAD + CHECKS, folder, **env, **(lowest if run == "old" else {}))
    assert done.returncode == 0, done.stderr
    version, *lines = done.stdout.splitlines()
    said = dict(line.split(" | ", 1) for line in lines)
    assert version == FFI or run == "new"
    assert "Got Cuda Runtime Error" in said["good"] and "expected dtype=" in said["dtype"]
