"""A bug to plant: a replacement in a source, and the check that must notice it."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Bug(NamedTuple):
    """A replacement in a file. check: a test's id below tests/, or an architecture and the name of a kernel."""

    name: str
    file: str
    old: str
    new: str
    check: str

    @property
    def command(self) -> list[str]:
        """Return the command that fails when the bug is planted."""
        arch, _, kernel = self.check.partition(" ")
        if arch.startswith("sm_"):
            return [sys.executable, "-m", "tests.sim", kernel, "--arch", arch, "--mode", "eager"]
        options = ("-q", "-x", "--no-header", "-p", "no:cacheprovider")
        return [sys.executable, "-m", "pytest", *options, f"tests/{self.check}"]


def shipped(kernel: str) -> str:
    return f"sim/test_ptxsim_kernels.py::test_shipped_kernel[{kernel}]"


def feature(name: str) -> str:
    return f"sim/test_ptxsim_kernels.py::test_feature[{name}]"


def union(case: str) -> str:
    return f"sim/test_ptxsim_key_union.py::test_every_entry[{case}]"


def exactly(kernel: str) -> str:
    return f"sim/test_ptxsim_records.py::test_every_code_is_converted_exactly[{kernel}]"


def index_math(test: str) -> str:
    return f"attention/test_index_math.py::{test}"


def layout(call: str) -> str:
    return f"host/test_layouts.py::test_one_tensor_differs[{call}]"


def places(bug: Bug, tree: Path = ROOT) -> int:
    """Return in how many places of a tree the text stands that a bug replaces."""
    return (tree / bug.file).read_text().count(bug.old)


def copy_of(tree: Path, folder: Path) -> None:
    """Copy the tracked and the new files of a tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=tree, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (tree / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / name, folder / name)


def noticed(bug: Bug, tree: Path = ROOT) -> tuple[bool, str]:
    """Plant a bug in a copy of the tree; return whether its check fails, and the last lines that the check printed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_of(tree, folder)
        if (count := places(bug, folder)) != 1:
            raise ValueError(f"{bug.name}: {bug.file} has {count} places to change, must have 1")
        text = (folder / bug.file).read_text()
        (folder / bug.file).write_text(text.replace(bug.old, bug.new))
        path = os.pathsep.join([str(folder), str(folder / "tools/ptxsim/src")])
        hidden = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CUTE_DSL_ARCH")}
        run = subprocess.run(
            bug.command, cwd=folder, env=hidden | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(folder / "build")},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    return run.returncode == 1, "\n".join(run.stdout.splitlines()[-12:])  # 1: pytest ran and a test failed
