"""Paths of bundles and compiled objects on this machine, and whether a process may compile. No torch, no DSL.

CUTE_KERNELS_BUNDLE  Folders that hold bundles, one per architecture, separated by os.pathsep; a folder may itself be a
                     bundle. Default: bundle/ of each of `homes()`. Builds go to the first one, lookups try all.
CUTE_KERNELS_JIT     0 forbids compiling at run time. Default 1: compile if the DSL is installed; objects are kept in
                     obj/ of `user_cache()`, and processes share them.
"""

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from . import manifest
from .manifest import Manifest

DSL_VERSIONS = "4.8.0", "4.9"  # the lowest, and the first one that is too new, as pyproject.toml has them


class FoundBundle(NamedTuple):
    """A bundle: its folder, its manifest (None if it cannot be read), and the reason why nothing in it can be used,
    or None."""

    folder: Path
    manifest: Manifest | None
    problem: str | None


def user_cache() -> Path | None:
    """Return this project's folder in the user's cache, $XDG_CACHE_HOME or ~/.cache, or None for a user without a
    home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cute_kernels"
    except RuntimeError:
        return None


def homes() -> list[Path]:
    """Return the folders for bundles (bundle/ARCH) and objects (obj): build/ of a checkout, if the package is part
    of one, and the user's cache, if there is one. Builds go to the first one, lookups try all."""
    project = manifest.PACKAGE.parent / "pyproject.toml"
    try:
        ours = re.search(rb'^name = "cute-kernels"\r?$', project.read_bytes(), re.MULTILINE)
    except OSError:  # no such file, or no permission
        ours = None
    cache = user_cache()
    return [*([project.parent / "build"] if ours else []), *([cache] if cache else [])]


def bundle_roots() -> list[Path]:
    """Return the folders of CUTE_KERNELS_BUNDLE, or its default if that names none."""
    chosen = os.environ.get("CUTE_KERNELS_BUNDLE", "").split(os.pathsep)
    return [Path(p) for p in chosen if p] or [home / "bundle" for home in homes()]


def bundle_folders(arch: str) -> list[Path]:
    """Return the folders that may hold a bundle of `arch`, in the order of lookup. A build goes to the first one."""
    return [folder for root in bundle_roots() for folder in (root / arch, root)]


def bundles(arch: str) -> list[FoundBundle]:
    """Return every bundle in `bundle_folders(arch)`. They are read anew each time, because another process may
    build."""
    found: list[FoundBundle] = []
    for folder in bundle_folders(arch):
        try:
            held = manifest.read(folder)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            found.append(FoundBundle(folder, None, f"cannot be read: {error}"))
        else:
            lost = [lib["file"] for lib in held.libraries.values() if not (folder / lib["file"]).exists()]
            found.append(FoundBundle(folder, held, f"lacks {', '.join(lost)}" if lost else held.problem(arch)))
    return found


def get_compiler() -> str:
    """Return the remedy for a missing compiler. No index has cute-kernels, so it names the compiler's distribution."""
    low, high = DSL_VERSIONS
    return f"run pip install 'nvidia-cutlass-dsl[cu13]>={low},<{high}'"


def has_dsl() -> bool:
    """Return whether CuTe DSL, the compiler, is installed."""
    try:
        return find_spec("cutlass") is not None
    except ImportError:  # an import hook refuses it
        return False


def why_no_jit() -> str | None:
    """Return why nothing may be compiled at run time, or None. Raise ValueError if CUTE_KERNELS_JIT is neither 0 nor
    1."""
    setting = os.environ.get("CUTE_KERNELS_JIT") or "1"
    if setting not in ("0", "1"):
        raise ValueError(f"CUTE_KERNELS_JIT: {setting!r}, must be 0 (compile nothing) or 1 (the default)")
    if setting == "0":
        return "forbidden by CUTE_KERNELS_JIT=0"
    return None if has_dsl() else "nvidia-cutlass-dsl is not installed"
