"""Find or build the kernel of a spec: this process -> a bundle -> JIT -> an error that says which command builds it.

CUTE_KERNELS_BUNDLE  folders to look for bundles in, separated by os.pathsep. Each is a bundle, or holds one per
                     architecture. Default: build/bundle of the checkout, then bundle in the user's cache folder.
CUTE_KERNELS_JIT     0 forbids compiling. Default 1: compile where the DSL is installed; objects are kept in the user's
                     cache folder ($XDG_CACHE_HOME or ~/.cache, cute_kernels/) and shared by processes.

A bundle needs torch, apache-tvm-ffi and a driver; the DSL is imported only to compile. What an entry of a bundle must
match is said in cute_kernels/manifest.py.
"""

import os
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from cute_kernels import manifest
from cute_kernels.manifest import Manifest

Function = Callable[..., None]

HOT_LIMIT = 4096  # spec objects remembered by identity
_LOCK = threading.Lock()  # held while a kernel is loaded or compiled
_KERNELS: dict[tuple[str, Any, str], Function] = {}
_HOT: dict[tuple[str, int, str], tuple[Function, Any]] = {}  # by id(spec); holds the spec, so that its id stays taken
_MODULES: dict[Path, Any] = {}  # loaded libraries; never unloaded, their code may be in flight


class KernelNotFound(RuntimeError):
    """No bundle holds the kernel and it may not or cannot be compiled here."""


def kernel(op: str, spec: Any, arch: str) -> Function:
    """The compiled function of `op` for `spec`: positional arguments as the kernel's Args, runs on the current stream.

    0.13 us for a spec object seen before (hashing a nested spec costs over 1 us, so identity is tried first), 0.7 ms to
    load from a bundle, seconds to compile. KernelNotFound names the kernel and the command that builds it.
    """
    hit = _HOT.get((op, id(spec), arch))
    if hit is not None:
        return hit[0]
    return _find(op, spec, arch)


def _find(op: str, spec: Any, arch: str) -> Function:
    with _LOCK:
        function = _KERNELS.get((op, spec, arch)) or _from_bundles(op, spec, arch) or _compile(op, spec, arch)
        if function is None:
            raise KernelNotFound(_missing(op, spec, arch))
        _KERNELS[op, spec, arch] = function
        if len(_HOT) >= HOT_LIMIT:
            _HOT.clear()
        _HOT[op, id(spec), arch] = function, spec
        return function


def bundle_folders(arch: str) -> list[Path]:
    """Folders that may hold a bundle of `arch`, in the order they are tried."""
    chosen = os.environ.get("CUTE_KERNELS_BUNDLE")
    default = dict.fromkeys(folder / "bundle" for folder in (manifest.build_folder(), manifest.user_cache()))
    roots = [Path(p) for p in chosen.split(os.pathsep) if p] if chosen else default
    return [folder for root in roots for folder in (root / arch, root)]


def bundles(arch: str) -> list[tuple[Path, Manifest | None, str | None]]:
    """(folder, manifest, why it is refused) of every bundle found. Read anew each time: another process may build."""
    found: list[tuple[Path, Manifest | None, str | None]] = []
    for folder in bundle_folders(arch):
        try:
            held = manifest.read(folder)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            found.append((folder, None, f"cannot be read: {error}"))
        else:
            lost = [lib["file"] for lib in held.libraries.values() if not (folder / lib["file"]).exists()]
            found.append((folder, held, f"lacks {', '.join(lost)}" if lost else held.problem(arch)))
    return found


def where(op: str, spec: Any, arch: str) -> str:
    """Where `kernel` finds a kernel: a bundle, the compiler, or nowhere and which command builds it. Loads nothing."""
    for folder, held, problem in bundles(arch):
        if held and not problem and held.find(op, spec):
            return f"bundle {folder}"
    return _missing(op, spec, arch) if _why_no_jit() else "to be compiled at its first call"


def _from_bundles(op: str, spec: Any, arch: str) -> Function | None:
    for _ in range(2):  # a build may replace a library between reading the manifest and loading: then read it again
        for folder, held, problem in bundles(arch):
            entry = held.find(op, spec) if held and not problem else None
            if held and entry:
                path = folder / held.libraries[entry["library"]]["file"]
                return _module(path).get_function(entry["symbol"])
    return None


def _module(path: Path) -> Any:
    if path not in _MODULES:
        import tvm_ffi  # before the library, which takes its symbols from it

        _MODULES[path] = tvm_ffi.load_module(path)
    return _MODULES[path]


def argument(tensor: torch.Tensor) -> Any:
    """A tensor as compiled functions see it: 50 ns less a call than the tensor itself, where it is passed often."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(tensor)


def _why_no_jit() -> str | None:
    """Why nothing may be compiled here, or None."""
    if os.environ.get("CUTE_KERNELS_JIT", "1") == "0":
        return "forbidden by CUTE_KERNELS_JIT=0"
    try:
        installed = find_spec("cutlass") is not None
    except ImportError:  # an import hook refuses it
        installed = False
    return None if installed else "nvidia-cutlass-dsl is not installed"


def _compile(op: str, spec: Any, arch: str) -> Function | None:
    if _why_no_jit():
        return None
    from cute_kernels import build

    folder = manifest.user_cache() / "obj"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:  # no home, or a read-only one: this process compiles for itself
        folder = Path(_scratch().name)
    path = build.object_file(op, spec, arch, folder)
    return build.load_object(path, manifest.symbol(op, spec, path.stem))


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="cute_kernels-")


def _missing(op: str, spec: Any, arch: str) -> str:
    lines = [f"no compiled kernel {manifest.label(op, spec)} for {arch}"]
    lines += [f"  {line}" for line in report(arch, (op, spec))]
    shipped = import_module(f"cute_kernels.{op.split('.')[0]}.dispatch").shipped(arch)
    if (op, spec) in shipped:
        which = f"--only {manifest.label(op, spec)}"
    else:
        which = f"--spec '{op}={manifest.canonical(manifest.to_json(spec))}'"
    command = f"python -m tools.aot build --arch {arch} {which}"
    return "\n".join([*lines, f"  build it, where nvidia-cutlass-dsl is installed: {command}"])


def report(arch: str, wanted: tuple[str, Any] | None = None) -> list[str]:
    """Lines that say which bundles of `arch` were found, why one cannot serve (op, spec) `wanted`, and if JIT is on."""
    lines = []
    for folder, held, problem in bundles(arch):
        if held is None or problem:
            lines.append(f"bundle {folder}: {problem}")
        elif wanted is None:
            tools = held.toolchain
            lines.append(f"bundle {folder}: {len(held.kernels)} kernels, DSL {tools['dsl']}, CUDA {tools['cuda']}")
        else:
            serves = held.find(*wanted) is not None
            lines.append(f"bundle {folder}: {'serves it' if serves else held.refusal(*wanted)}")
    if not lines:
        lines.append(f"no bundle in {os.pathsep.join(map(str, bundle_folders(arch)))}")
    reason = _why_no_jit()
    return [*lines, f"JIT: {reason}" if reason else "JIT: allowed"]


@cache
def _arch_of_index(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}a" if major >= 9 else f"sm_{major}{minor}"


def arch_of(device: torch.device | int | None = None) -> str:
    """`sm_90a` for a CUDA device (None or no index: the current one). ValueError for another kind of device."""
    if isinstance(device, torch.device):
        if device.type != "cuda":
            raise ValueError(f"needs a CUDA device, got {device}")
        device = device.index
    return _arch_of_index(torch.cuda.current_device() if device is None else device)
