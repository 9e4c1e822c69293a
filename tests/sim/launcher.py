"""Run a kernel from its spec and its Args: compile it, evaluate the host function, simulate."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ptxsim.kernel import CompiledKernel, program
from ptxsim.runner import RunResult

from cute_kernels import build, catalog, manifest

from . import memo

__all__ = ["CompiledKernel", "function", "load", "program", "simulate"]

OBJECTS = Path(__file__).resolve().parents[2] / "build" / "obj"  # where builds of a checkout keep them


@cache
def load(op: str, spec: Any, arch: str, lines: bool = False) -> CompiledKernel:
    """Return the kernel of a spec from the build's objects, compiling it if it is missing. lines: compile anew with
    line info."""
    if lines:
        found = build.build(op, spec, arch, "--generate-line-info")
        return CompiledKernel(found.ptx, found.host, found.shared or 0)
    part: build.Part = ".host" if (op, spec) in catalog.shipped(arch) else ".ptx"  # a bundle needs the former
    path = build.object_file(op, spec, arch, OBJECTS, part)
    text = {suffix: path.with_suffix(suffix).read_text() for suffix in (".ptx", ".mlir", ".shared")}
    shared = int(text[".shared"]) if text[".shared"] != manifest.canonical(None) else 0
    return CompiledKernel(text[".ptx"], text[".mlir"], shared)


def simulate(op: str, spec: Any, args: Sequence[Any], arch: str = "sm_90a", **how: Any) -> RunResult:
    """Run a kernel on `args` in place, its launches one after the other.

    how: `lines` is passed to `load`, the rest to `CompiledKernel.run`; memory: a folder of results of equal runs
    (memo.py), which are not repeated."""
    folder, lines = how.pop("memory", None), how.pop("lines", False)
    kernel = load(op, spec, arch, lines)
    if folder is None:
        return kernel.run(*args, **how)
    return memo.recall(folder, (kernel, sorted(how.items())), args, lambda: kernel.run(*args, **how))


def function(op: str, spec: Any, arch: str, results: list[RunResult], **how: Any) -> Callable[..., None]:
    """Return the simulated counterpart of wrappers.host.runtime.kernel; each launch appends to `results`."""

    def launch(*args: Any) -> None:
        results.append(simulate(op, spec, args, arch, **how))

    return launch
