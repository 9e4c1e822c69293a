"""A bundle of empty C functions, with a few bytes of device code: it packs, unpacks, verifies and loads as a real one
does."""

import io
import lzma
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from cute_kernels import archive, bundle, catalog, device_code, manifest
from tests.conftest import ARCH

TOOLCHAIN = {"dsl": "4.8.1", "cuda": "13.0", "settings": {}}
FUNCTION = (
    "int __tvm_ffi_{0}(void *self, const void *args, int count, void *out) {{ return 0; }}\nchar {0}__code[%d];\n"
)
CODE_BYTES = 100  # of the device code of a kernel
FUNCTION = FUNCTION % CODE_BYTES


@cache
def compiled(code: str) -> bytes:
    """Return the shared library of C code."""
    with tempfile.NamedTemporaryFile(suffix=".so") as out:
        command = ["cc", "-w", "-shared", "-fPIC", "-nostartfiles", "-x", "c", "-o", out.name, "-"]
        subprocess.run(command, input=code, text=True, check=True)
        return Path(out.name).read_bytes()


def packed_code(symbol: str) -> bytes:
    """Return the packed device code of a kernel. It begins with the symbol of the kernel."""
    return device_code.pack(symbol.encode().ljust(CODE_BYTES, b".")[:CODE_BYTES])


def library(path: Path, code: str = "", more: bytes = b"") -> dict[str, str]:
    """Write the shared library of C code, with `more` behind it. Return {file, sha256}, as manifests have it."""
    path.write_bytes(compiled(code) + more)
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
    packed = [packed_code(entry["symbol"]) for entry in entries]
    libraries = {"attention": library(folder / "attention-0123456789ab.so", code, b"".join(packed))}
    content = (folder / "attention-0123456789ab.so").read_bytes()
    for entry, one in zip(entries, packed):
        entry["code"] = device_code.describe(one, content)
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
