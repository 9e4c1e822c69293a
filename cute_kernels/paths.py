"""Where bundles and compiled objects lie on this machine, and whether a process may compile. No torch, no DSL.

CUTE_KERNELS_BUNDLE  folders that hold bundles, one per architecture, separated by os.pathsep; a folder may be a bundle
                     itself. Default: bundle/ of each of `homes()`. Builds go to the first of them, lookups try all.
CUTE_KERNELS_JIT     0 forbids compiling at run time. Default 1: compile where the DSL is installed; objects are kept in
                     obj/ of `user_cache()` and shared by processes.
"""

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from . import manifest
from .manifest import Manifest


class FoundBundle(NamedTuple):
    """A bundle: its folder, its manifest (None where it cannot be read), and why nothing of it can be used, or None."""

    folder: Path
    manifest: Manifest | None
    problem: str | None


def user_cache() -> Path | None:
    """This project's folder in the user's cache, $XDG_CACHE_HOME or ~/.cache; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cute_kernels"
    except RuntimeError:
        return None


def homes() -> list[Path]:
    """Where bundles (bundle/ARCH) and objects (obj) lie: build/ of a checkout, if the package is part of one, and the
    user's cache, if there is one. They are built in the first and found in all."""
    project = manifest.PACKAGE.parent / "pyproject.toml"
    try:
        ours = re.search(rb'^name = "cute-kernels"\r?$', project.read_bytes(), re.MULTILINE)
    except OSError:  # none, or one that is not for us to read
        ours = None
    cache = user_cache()
    return [*([project.parent / "build"] if ours else []), *([cache] if cache else [])]


def bundle_roots() -> list[Path]:
    """CUTE_KERNELS_BUNDLE, or its default where that names no folder."""
    chosen = os.environ.get("CUTE_KERNELS_BUNDLE", "").split(os.pathsep)
    return [Path(p) for p in chosen if p] or [home / "bundle" for home in homes()]


def bundle_folders(arch: str) -> list[Path]:
    """Folders that may hold a bundle of `arch`, in the order they are tried; a build goes to the first."""
    return [folder for root in bundle_roots() for folder in (root / arch, root)]


def bundles(arch: str) -> list[FoundBundle]:
    """Every bundle in `bundle_folders(arch)`. Read anew each time: another process may build."""
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


def has_dsl() -> bool:
    """Whether CuTe DSL, the compiler, is installed here."""
    try:
        return find_spec("cutlass") is not None
    except ImportError:  # an import hook refuses it
        return False


def why_no_jit() -> str | None:
    """Why nothing may be compiled at run time, or None. ValueError where CUTE_KERNELS_JIT is neither 0 nor 1."""
    setting = os.environ.get("CUTE_KERNELS_JIT") or "1"
    if setting not in ("0", "1"):
        raise ValueError(f"CUTE_KERNELS_JIT is {setting!r}; it can be 0 (compile nothing) or 1 (the default)")
    if setting == "0":
        return "forbidden by CUTE_KERNELS_JIT=0"
    return None if has_dsl() else "nvidia-cutlass-dsl is not installed"
