"""Find the kernel of a spec in this process or in a bundle, or compile it; else raise an error with the build command.

cute_kernels/paths.py says where bundles are searched, where compiled objects are kept, and what forbids compiling. Each
kernel that is loaded or compiled gives one INFO line of the logger `cute_kernels`, each bundle that does not load one
WARNING.

A bundle needs torch, apache-tvm-ffi and a driver; the DSL is imported only to compile. cute_kernels/manifest.py says
what an entry of a bundle must match.
"""

import ctypes
import errno
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from cute_kernels import catalog, device_code, manifest, paths

Function = Callable[..., None]

LOG = logging.getLogger("cute_kernels")
HOT_LIMIT = 4096  # spec objects remembered by identity
_LOCK = threading.Lock()  # held while a kernel is loaded or compiled; see `_after_fork`
_KERNELS: dict[tuple[str, Any, str], Function] = {}
_HOT: dict[tuple[str, int, str], tuple[Function, Any]] = {}  # by id(spec); keeps the spec, so its id is not reused
_MODULES: dict[Path, Any] = {}  # loaded libraries; never unloaded, since their code may be in flight
_BROKEN: dict[Path, str] = {}  # bundle folder -> why a library in it did not load


class KernelNotFound(RuntimeError):
    """No bundle holds the kernel, and it may not or cannot be compiled here."""


def kernel(op: str, spec: Any, arch: str) -> Function:
    """Return the compiled function of `op` for `spec`.

    It takes the kernel's Args by position and runs on the current stream.

    Takes 0.13 us for a spec object that was seen before (hashing a nested spec costs over 1 us, so identity is tried
    first), 2 ms to load from a bundle, and seconds to compile. The first kernel of a bundle takes about 30 ms more:
    the hashes of its library and of the runtime library are checked. Raises KernelNotFound, which names the kernel and
    the command that builds it, or ValueError if CUTE_KERNELS_JIT is needed and is neither 0 nor 1.
    """
    hit = _HOT.get((op, id(spec), arch))
    if hit is not None:
        return hit[0]
    return _find(op, spec, arch)


def _find(op: str, spec: Any, arch: str) -> Function:
    with _LOCK:
        function = _KERNELS.get((op, spec, arch)) or _obtain(op, spec, arch)
        _KERNELS[op, spec, arch] = function
        if len(_HOT) >= HOT_LIMIT:
            _HOT.clear()
        _HOT[op, id(spec), arch] = function, spec
        return function


def _obtain(op: str, spec: Any, arch: str) -> Function:
    """Load or compile a kernel, and log where it came from."""
    start = time.perf_counter()
    found = _from_bundles(op, spec, arch) or _compile(op, spec, arch)
    if found is None:
        raise KernelNotFound(_missing(op, spec, arch))
    function, how = found
    LOG.info("%s for %s: %s, %.4f s", manifest.label(op, spec), arch, how, time.perf_counter() - start)
    return function


def where(op: str, spec: Any, arch: str) -> str:
    """Return where `kernel` would find a kernel: a bundle, the compiler, or nowhere, with the command that builds it.

    Loads nothing.
    """
    for folder, held, problem in paths.bundles(arch):
        if held and not problem and held.find(op, spec):
            return f"bundle {folder}"
    return _missing(op, spec, arch) if paths.why_no_jit() else "to be compiled at its first call"


def _from_bundles(op: str, spec: Any, arch: str) -> tuple[Function, str] | None:
    for _ in range(2):  # retry: a build may replace a library between reading the manifest and loading
        for folder, held, problem in paths.bundles(arch):
            entry = held.find(op, spec) if held and not problem else None
            if held and entry:
                library = held.libraries[entry["library"]]
                try:
                    function = _module(folder, held.runtime, library).get_function(entry["symbol"])
                    device_code.load(folder / library["file"], entry)
                except Exception as error:  # of any type: another bundle or the compiler may serve the call
                    said = f"{library['file']} does not load: {error}"
                    if _BROKEN.get(folder) != said:
                        LOG.warning("bundle %s: %s", folder, said)
                    _BROKEN[folder] = said
                    continue
                _BROKEN.pop(folder, None)
                return function, f"loaded from the bundle {folder}"
    return None


def _module(folder: Path, needed: dict[str, str], library: dict[str, str]) -> Any:
    """Load a library of a bundle once, after a check of its hash and of that of the runtime library that it needs."""
    path = folder / library["file"]
    if path not in _MODULES:
        loaded = any(other.parent == folder for other in _MODULES)  # with the runtime library
        for file in (library,) if loaded else (needed, library):
            if problem := manifest.file_problem(folder, file):
                raise OSError(problem)
        import tvm_ffi  # before the library, which takes its symbols from it

        _MODULES[path] = tvm_ffi.load_module(path)
    return _MODULES[path]


def argument(tensor: torch.Tensor) -> Any:
    """Return a tensor as compiled functions see it; saves 50 ns per call for a tensor that is passed often."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(tensor)


def capture_id(stream: int) -> int:
    """Return the driver's id of the capture that a stream takes part in. stream: its handle."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    where: Any = ctypes.byref(status), ctypes.byref(number), None, None, None
    code = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *where)
    if code:
        raise RuntimeError(f"cuStreamGetCaptureInfo: CUDA error {code}")
    return number.value


def _compile(op: str, spec: Any, arch: str) -> tuple[Function, str] | None:
    if paths.why_no_jit():
        return None
    from cute_kernels import build

    home = paths.user_cache()
    folder = _writable(home / "obj") if home else None
    if folder is None:  # no home folder, or a read-only one: compile for this process only
        folder = Path(_scratch().name)
    kept = set(os.listdir(folder))
    try:
        path = build.object_file(op, spec, arch, folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        raise KernelNotFound(
            f"{manifest.label(op, spec)} for {arch} cannot be compiled into {folder}: {error.strerror}: free space "
            "there and in the folder of temporary files, or set XDG_CACHE_HOME and TMPDIR to folders on another disk"
        ) from error
    how = f"loaded from {path}" if path.name in kept else f"compiled into {path}"
    return build.load_object(path, manifest.symbol(op, spec, path.stem)), how


def _writable(folder: Path) -> Path | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def _after_fork() -> None:
    """Free the lock in a forked process: the thread that held it exists in the parent alone."""
    global _LOCK
    _LOCK = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="cute_kernels-")


def _missing(op: str, spec: Any, arch: str) -> str:
    lines = [f"no compiled kernel {manifest.label(op, spec)} for {arch}"]
    lines += [f"  {line}" for line in report(arch, (op, spec))]
    if (op, spec) in catalog.shipped(arch):
        which = f"--only {manifest.label(op, spec)}"
    else:
        which = f"--spec '{op}={manifest.canonical(manifest.to_json(spec))}'"
    command = f"python -m cute_kernels build --arch {arch}"
    lines += [f"  to build all kernels that are shipped: {command}", f"  to build this one: {command} {which}"]
    if not paths.has_dsl():
        lines.append(f"  nvidia-cutlass-dsl, the compiler, is not installed: {paths.get_compiler()}")
    return "\n".join(lines)


def report(arch: str, wanted: tuple[str, Any] | None = None) -> list[str]:
    """Return lines on the bundles of `arch`, why each cannot serve `wanted` (op, spec), and whether JIT is allowed."""
    lines = []
    for folder, held, problem in paths.bundles(arch):
        if held is None or problem:
            lines.append(f"bundle {folder}: {problem}")
        elif wanted is None:
            tools = held.toolchain
            lines.append(f"bundle {folder}: {len(held.kernels)} kernels, DSL {tools['dsl']}, CUDA {tools['cuda']}")
        else:
            serves = held.find(*wanted) is not None
            said = _BROKEN.get(folder, "serves it") if serves else held.refusal(*wanted)
            lines.append(f"bundle {folder}: {said}")
    if not lines:
        lines.append(f"no bundle in {os.pathsep.join(map(str, paths.bundle_folders(arch)))}")
    reason = paths.why_no_jit()
    return [*lines, f"JIT: {reason}" if reason else "JIT: allowed"]


@cache
def _arch_of_index(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}a" if major >= 9 else f"sm_{major}{minor}"


def arch_of(device: torch.device | int | None = None) -> str:
    """Return the architecture of a CUDA device, such as `sm_90a`; ValueError for another kind of device.

    device: None, or one without an index, is the current one.
    """
    if isinstance(device, torch.device):
        if device.type != "cuda":
            raise ValueError(f"device: {device}, must be a CUDA device")
        device = device.index
    return _arch_of_index(torch.cuda.current_device() if device is None else device)
