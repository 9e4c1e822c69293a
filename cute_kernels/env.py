"""`cute-kernels env`: the versions, GPUs and bundles that a process finds here, and for each problem its cause and its
remedy. It needs neither torch nor the DSL nor a GPU, and it changes nothing."""

import ctypes
import errno
import os
import platform
import re
import shutil
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from . import __version__, bundle, catalog, manifest, paths
from .paths import FoundBundle

TORCH, FFI, DSL = "torch", "apache-tvm-ffi", "nvidia-cutlass-dsl"
# distribution -> the lowest version, and the first one that is too new, as pyproject.toml has them
VERSIONS = {TORCH: ("2.11", None), FFI: ("0.1.11", "0.2"), DSL: paths.DSL_VERSIONS}
USE = {TORCH: "no function of wrappers runs", FFI: "no bundle loads", DSL: "nothing can be compiled"}
FREE = 400 << 20  # bytes that a build takes, of objects and bundle
DRIVER = "580"  # the oldest driver of CUDA 13
BUILD_OR_UNPACK = "run cute-kernels build --arch {arch}, or cute-kernels unpack FILE --arch {arch}"


class Diagnosis(NamedTuple):
    cause: str
    remedy: str


def report() -> list[str]:
    """Return the lines that the command prints."""
    lines = [
        f"cute-kernels {__version__} in {manifest.PACKAGE}",
        f"Python {platform.python_version()}, {manifest.HOST}",
    ]
    lines += [f"{name} {installed(name) or 'is not installed'}" for name in VERSIONS]
    problems = [problem for name in (TORCH, FFI) for problem in (missing(name) or version_problem(name),) if problem]
    archs, said, found = gpus()
    lines += said
    problems += found
    held = bundles()
    lines += [f"bundle {item.folder}: {usable(item)}" for item in held]
    if not held:
        lines.append(f"no bundle in {os.pathsep.join(map(str, paths.bundle_roots()))}")
    problems += bundle_problems(held, archs)
    try:
        reason = paths.why_no_jit()
        lines.append(f"JIT: {reason or 'allowed'}")
    except ValueError as error:
        reason = str(error)
        lines.append(f"JIT: {reason}")
        problems.append(Diagnosis(reason, "unset CUTE_KERNELS_JIT, or set it to 0 or 1"))
    problems += compiler_problems(any(item.valid for item in held))
    lines.append(f"cache {paths.user_cache() or 'none'}")
    problems += cache_problems(needed=reason is None)
    if not problems:
        return [*lines, "", "no problem found"]
    lines += ["", "1 problem:" if len(problems) == 1 else f"{len(problems)} problems:"]
    return lines + [line for cause, remedy in problems for line in (f"- {cause}", f"  -> {remedy}")]


# ---- distributions


def installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def requirement(distribution: str) -> str:
    """Return what to install, as pip takes it."""
    low, high = VERSIONS[distribution]
    extra = "[cu13]" if distribution == DSL else ""
    return f"'{distribution}{extra}>={low}{f',<{high}' if high else ''}'"


def missing(distribution: str) -> Diagnosis | None:
    if installed(distribution):
        return None
    return Diagnosis(
        f"{distribution} is not installed: {USE[distribution]}", f"run pip install {requirement(distribution)}"
    )


def release(text: str) -> tuple[int, ...]:
    """Return the numbers with which a version begins."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def version_problem(distribution: str) -> Diagnosis | None:
    """Return the problem of an installed version that is outside the tested range, or None."""
    here = installed(distribution)
    low, high = VERSIONS[distribution]
    if here is None or (release(low) <= release(here) and (high is None or release(here) < release(high))):
        return None
    wanted = requirement(distribution)
    return Diagnosis(f"{distribution} {here} is outside the supported range {wanted}", f"run pip install {wanted}")


def compiler_problems(served: bool) -> list[Diagnosis]:
    """Return the problems of the DSL and the linker. served: whether a bundle can be used, so that no DSL is needed."""
    if not paths.has_dsl():
        found = Diagnosis(
            f"{DSL}, the compiler, is not installed: {USE[DSL]}",
            f"{paths.get_compiler()}, or unpack a bundle that another machine built",
        )
        return [] if served else [found]
    problems = [wrong] if (wrong := version_problem(DSL)) else []
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        problems.append(
            Diagnosis("no C compiler on PATH: cute-kernels build cannot link a bundle", "install gcc or clang")
        )
    return problems


# ---- GPUs


def gpus() -> tuple[list[str], list[str], list[Diagnosis]]:
    """Return (the architectures of the GPUs that torch sees, a line for each GPU, problems)."""
    try:
        import_module("cute_kernels.ops")  # it raises if another module is called wrappers
        import torch

        from wrappers.host import runtime

        archs = [runtime.arch_of(i) for i in range(torch.cuda.device_count())]
        names = [torch.cuda.get_device_name(i) for i in range(len(archs))]
        without = torch.version.cuda is None
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # from a library, a driver or torch
        said = [f"GPUs: unknown, {error}"]
        if not installed(TORCH):
            return [], said, driver_problems()
        if isinstance(error, (ImportError, OSError)):
            remedy = f"mend that installation: pip install --force-reinstall {requirement(TORCH)}"
            return [], said, [Diagnosis(f"torch or wrappers cannot be imported: {error}", remedy)]
        cannot = Diagnosis(f"torch cannot use the GPUs: {error}", "run nvidia-smi, which must list them")
        return [], said, driver_problems() or [cannot]
    lines, problems = [], []
    for i, (name, arch) in enumerate(zip(names, archs)):
        lines.append(f"GPU {i}: {name}, {arch}{'' if arch in catalog.ARCHS else ': no kernels for it'}")
        if arch not in catalog.ARCHS:
            cause = f"GPU {i} ({name}, {arch}) is not supported: calls on it raise NotImplementedError"
            problems.append(Diagnosis(cause, f"use a GPU of {', '.join(catalog.ARCHS)}, or tensors on the CPU"))
    if not archs:
        problems = driver_problems()
        if without:
            cause = f"torch {torch.__version__} is built without CUDA: calls run the reference on CPU tensors"
            problems.append(Diagnosis(cause, "to run kernels, install a torch of CUDA 13"))
        if not problems:
            hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
            cause = "torch sees no GPU" + (f": CUDA_VISIBLE_DEVICES is {hidden!r}" if hidden is not None else "")
            problems.append(
                Diagnosis(cause, "unset CUDA_VISIBLE_DEVICES, or pass a GPU to this container or virtual machine")
            )
    return archs, lines or ["GPUs: torch sees none"], problems


def driver() -> ctypes.CDLL:
    """Return NVIDIA's driver. Raise OSError if there is none."""
    return ctypes.CDLL("libcuda.so.1")


def driver_problems() -> list[Diagnosis]:
    """Return the problem of the CUDA driver: none is installed, or it is too old for CUDA 13."""
    update = f"install NVIDIA driver {DRIVER} or newer"
    try:
        library = driver()
    except OSError as error:
        cause = f"no CUDA driver, {error}: kernels cannot run here, calls on CPU tensors can"
        return [Diagnosis(cause, f"{update}; in a container, pass the GPU to it (docker run --gpus all)")]
    number = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(number))
    if number.value >= 13000:
        return []
    serves = f"{number.value // 1000}.{number.value % 1000 // 10}"
    return [Diagnosis(f"the CUDA driver serves CUDA {serves}, the kernels need CUDA 13", update)]


# ---- bundles


class Checked(NamedTuple):
    """A bundle, the reason why nothing in it can be used, or None, and how many of its kernels the installed sources
    can use."""

    folder: Path
    manifest: manifest.Manifest | None
    reason: str | None
    valid: int


def checked(found: FoundBundle) -> Checked:
    """Check a bundle, the hashes of its files too."""
    folder, held, reason = found
    if held and reason is None:
        files = [held.runtime, *held.libraries.values()]
        reason = next((said for file in files if (said := manifest.file_problem(folder, file))), None)
    usable = held is not None and reason is None
    return Checked(folder, held, reason, valid(folder, held) if held and usable else 0)


def valid(folder: Path, held: manifest.Manifest) -> int:
    return len(bundle.still_valid(folder, held.arch, catalog.spec_type, held.toolchain))


def bundles() -> list[Checked]:
    """Return the bundles of all architectures. A folder that is itself a bundle is found for every architecture, of
    which the one that it serves counts."""
    found: dict[Path, FoundBundle] = {}
    for arch in catalog.ARCHS:
        for item in paths.bundles(arch):
            if item.folder not in found or item.problem is None:
                found[item.folder] = item
    for root in paths.bundle_roots():
        try:
            os.stat(root / manifest.FILE)
        except PermissionError as error:  # which is said once, not for each architecture
            found = {folder: item for folder, item in found.items() if root not in (folder, folder.parent)}
            found[root] = FoundBundle(root, None, f"cannot be read: {error.strerror}")
        except OSError:
            continue
    return [checked(item) for item in found.values()]


def content(held: manifest.Manifest) -> str:
    return f"{len(held.kernels)} kernels of {held.arch}, DSL {held.toolchain['dsl']}, CUDA {held.toolchain['cuda']}"


def usable(item: Checked) -> str:
    """Return how much of a bundle the installed sources can use."""
    held = item.manifest
    if held is None or item.reason:
        return f"not usable, {item.reason}"
    if item.valid == len(held.kernels):
        return f"usable, {content(held)}"
    which = f"{item.valid} of its kernels usable" if item.valid else "not usable"
    return f"{which}, {content(held)}: compiled from other sources of cute_kernels; build it again"


def bundle_problems(held: list[Checked], archs: list[str]) -> list[Diagnosis]:
    """Return the problems of bundles, and those of the GPUs' architectures that no bundle serves."""
    problems = [problem for item in held if (problem := bundle_problem(item))]
    served = {item.manifest.arch for item in held if item.manifest and item.valid}
    roots = os.pathsep.join(map(str, paths.bundle_roots())) or "any folder (this user has no home directory)"
    wanted = [arch for arch in dict.fromkeys(archs) if arch in catalog.ARCHS] or ([] if served else [catalog.ARCHS[0]])
    for arch in wanted:
        if arch not in served:
            others = f"; there are bundles of {', '.join(sorted(served))}" if served else ""
            remedy = BUILD_OR_UNPACK.format(arch=arch)
            problems.append(Diagnosis(f"no usable bundle of {arch} in {roots}{others}", remedy))
    return problems


def bundle_problem(item: Checked) -> Diagnosis | None:
    """Return the problem of one bundle, or None."""
    folder, held, reason, count = item
    if os.strerror(errno.EACCES) in (reason or ""):
        remedy = f"let this user read it (chmod -R a+rX {folder}), or set CUTE_KERNELS_BUNDLE to a folder of this user"
        return Diagnosis(f"bundle {folder}: {reason}", remedy)
    if held is None:
        again = BUILD_OR_UNPACK.format(arch="ARCH")
        return Diagnosis(f"bundle {folder} {reason}", f"it is truncated, or of another version: {again}")
    if held.host != manifest.HOST:
        return Diagnosis(f"bundle {folder} {held.problem(held.arch)}", f"build it on a {manifest.HOST} machine")
    if held.arch not in catalog.ARCHS:
        cause = f"bundle {folder} is for {held.arch}, which this version does not have"
        return Diagnosis(cause, "install the version of cute-kernels that built it")
    again = BUILD_OR_UNPACK.format(arch=held.arch)
    if reason:
        return Diagnosis(f"bundle {folder}: {reason}", f"it is truncated or changed: {again}")
    if count == len(held.kernels):
        return None
    stale = len(held.kernels) - count
    cause = f"bundle {folder}: {stale} of {len(held.kernels)} kernels come from another version of cute_kernels"
    return Diagnosis(cause, f"{again}; or install the version that built it")


# ---- the cache


def existing_parent(folder: Path) -> Path:
    """Return the first folder, from `folder` upwards, that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))


def cache_problems(needed: bool) -> list[Diagnosis]:
    """Return the problems of the folders that compiled kernels go to. needed: whether a call may compile."""
    home, problems = paths.user_cache(), []
    remedy = "set XDG_CACHE_HOME to a folder that this user can write"
    if home is None:
        cause = "this user has no home directory: no cache holds bundles or compiled kernels"
        problems.append(Diagnosis(cause, remedy))
    elif needed and (why := unwritable(home)):
        cause = f"the cache {home} cannot be written, {why}: each process compiles its kernels anew"
        problems.append(Diagnosis(cause, remedy))
    folders = [*([home] if home else []), Path(os.environ.get("TMPDIR") or "/tmp")]
    free = {folder: shutil.disk_usage(existing_parent(folder)).free for folder in folders}
    full = [f"{folder} ({left >> 20} MB are free)" for folder, left in free.items() if left < FREE]
    if full:
        cause = f"the disk is full at {' and '.join(full)}: a build needs {FREE >> 20} MB"
        problems.append(Diagnosis(cause, "free space, or set XDG_CACHE_HOME and TMPDIR to folders on another disk"))
    return problems


def unwritable(folder: Path) -> str | None:
    """Return why a folder cannot be made or written, or None."""
    place = existing_parent(folder)
    if not place.is_dir():
        return f"{place} is no folder"
    return None if os.access(place, os.W_OK | os.X_OK) else f"{place} is not writable for this user"
