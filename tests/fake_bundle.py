"""A bundle of empty C functions: it packs, unpacks, verifies and loads as a real one does."""

import io
import lzma
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from cute_kernels import archive, bundle, catalog, manifest
from tests.conftest import ARCH

TOOLCHAIN = {"dsl": "4.8.1", "cuda": "13.0", "settings": {}}
FUNCTION = "int __tvm_ffi_{}(void *self, const void *args, int count, void *out) {{ return 0; }}\n"


@cache
def compiled(code: str) -> bytes:
    """Return the shared library of C code."""
    with tempfile.NamedTemporaryFile(suffix=".so") as out:
        command = ["cc", "-w", "-shared", "-fPIC", "-nostartfiles", "-x", "c", "-o", out.name, "-"]
        subprocess.run(command, input=code, text=True, check=True)
        return Path(out.name).read_bytes()


def library(path: Path, code: str = "") -> dict[str, str]:
    """Write the shared library of C code. Return {file, sha256}, as manifests have it."""
    path.write_bytes(compiled(code))
    return {"file": path.name, "sha256": manifest.digest(path.read_bytes())}


def make(folder: Path, arch: str = ARCH, kernels: Iterable[manifest.Kernel] | None = None, more: str = "") -> Path:
    """Write a bundle of `kernels`, by default the first two of `arch`, into a new folder. more: C code beside them."""
    folder.mkdir(parents=True)
    entries: list[dict[str, Any]] = []
    for op, spec in kernels or catalog.shipped(arch)[:2]:
        key = manifest.key(op, spec, arch, TOOLCHAIN)
        entry = {"op": op, "spec": manifest.to_json(spec), "key": key, "symbol": manifest.symbol(op, spec, key)}
        entries.append(entry | {"library": "attention"})
    code = "".join(FUNCTION.format(entry["symbol"]) for entry in entries) + more
    libraries = {"attention": library(folder / "attention-0123456789ab.so", code)}
    runtime = library(folder / bundle.RUNTIME)
    manifest.write(folder, manifest.Manifest(arch, TOOLCHAIN, libraries, runtime, entries))
    return folder


def members(folder: Path) -> dict[str, bytes]:
    """Return name -> content of the files of a bundle, in the order in which they are packed."""
    return {name: (folder / name).read_bytes() for name in archive.names(manifest.read(folder))}


def pack(file: Path, content: dict[str, bytes], **changed: tarfile.TarInfo) -> Path:
    """Write a packed bundle of any content. changed: the entries of the tar that replace those of some names."""
    with lzma.open(file, "wb", preset=0) as out, tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in content.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info = changed.get(name, info)
            tar.addfile(info, io.BytesIO(data) if info.size else None)
    return file
