"""Run a kernel from its spec and its Args: compile it, evaluate the host function, simulate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cute_kernels import build, manifest

from . import host
from .call import KernelLaunch
from .program import Program
from .run import RunResult, run

OBJECTS = Path(__file__).resolve().parents[2] / "build" / "obj"  # where builds of a checkout keep them


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel. ptx: text; host: the host function's MLIR; shared: dynamic bytes per CTA."""

    ptx: str
    host: str
    shared: int

    def calls(self, args: Sequence[Any]) -> list[KernelLaunch]:
        """Return the launches of `args`, the fields of the kernel's Args: torch tensors or numpy arrays, and
        numbers."""
        return host.evaluate(self.host, self.ptx, [as_numpy(value) for value in args], self.shared)


@cache
def program(ptx: str) -> Program:
    """Return the translated kernel of a PTX text; its runs share it."""
    return Program(ptx)


@cache
def load(op: str, spec: Any, arch: str, lines: bool = False) -> CompiledKernel:
    """Return the kernel of a spec from the build's objects, compiling it if it is missing. lines: compile anew with
    line info."""
    if lines:
        found = build.build(op, spec, arch, "--generate-line-info")
        return CompiledKernel(found.ptx, found.host, found.shared or 0)
    path = build.object_file(op, spec, arch, OBJECTS)
    text = {suffix: path.with_suffix(suffix).read_text() for suffix in (".ptx", ".mlir", ".shared")}
    shared = int(text[".shared"]) if text[".shared"] != manifest.canonical(None) else 0
    return CompiledKernel(text[".ptx"], text[".mlir"], shared)


def simulate(op: str, spec: Any, args: Sequence[Any], arch: str = "sm_90a", **how: Any) -> RunResult:
    """Run a kernel on `args` in place, its launches one after the other.

    how: `lines` is passed to `load`; mode, seed, blocks, resident and so on to `run.run`, where `program` is that
    of the first launch; before: of each `KernelLaunch`; memory: a folder of results of equal runs (memo.py),
    which are not repeated."""
    folder, lines = how.pop("memory", None), how.pop("lines", False)
    kernel = load(op, spec, arch, lines)
    if folder is None:
        return _run(kernel, args, how)
    from . import memo

    return memo.recall(folder, (kernel, sorted(how.items())), args, lambda: _run(kernel, args, how))


def _run(kernel: CompiledKernel, args: Sequence[Any], how: dict[str, Any]) -> RunResult:
    total, before = RunResult(), how.pop("before", None)
    for call in kernel.calls(args):
        call.before = before
        result = run(call, **{"program": program(call.ptx)} | how)
        how.pop("program", None)
        total.add(result)
    return total


def function(op: str, spec: Any, arch: str, results: list[RunResult], **how: Any) -> Callable[..., None]:
    """Return the simulated counterpart of wrappers.runtime.kernel; each launch appends to `results`."""

    def launch(*args: Any) -> None:
        results.append(simulate(op, spec, args, arch, **how))

    return launch


def as_numpy(value: Any) -> Any:
    """Return a view of a torch tensor's memory, its elements as float32 or as integers of their width; other values
    unchanged."""
    if not hasattr(value, "untyped_storage"):
        return value
    import torch

    flat = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).numpy()  # type: ignore[arg-type]
    size = value.element_size()
    strides = [stride * size for stride in value.stride()]
    dtype = np.dtype(np.float32 if value.dtype == torch.float32 else f"u{size}")
    return np.ndarray(tuple(value.shape), dtype, flat, value.storage_offset() * size, strides)
