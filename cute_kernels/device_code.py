"""The device code of a kernel in a library: compressed behind the library's end, and unpacked at its first use.

Device code is four fifths of what is compiled, and compresses to a quarter. So a library is linked from host code, in
which each kernel has as many zeroed bytes as its device code has, under the name `symbol`. `load` fills these before
the kernel is called for the first time, when the host code hands them to the driver. It takes 1 ms per kernel. No
torch, no DSL.
"""

import ctypes
import zlib
from pathlib import Path
from typing import Any

from . import manifest

LEVEL = 9  # of zlib; xz makes 0.7 times as many bytes, and takes four times as long to unpack them


def symbol(kernel: str) -> str:
    """Return the name of the memory for the device code of a kernel. kernel: the symbol of its function."""
    return f"{kernel}__code"


def pack(code: bytes) -> bytes:
    return zlib.compress(code, LEVEL)


def unpack(packed: bytes, size: int) -> bytes:
    """Return the device code, or its first `size` bytes. Raise ValueError if `pack` did not make `packed`."""
    try:
        return zlib.decompressobj().decompress(packed, size)
    except zlib.error as error:
        raise ValueError(str(error)) from None


def describe(packed: bytes, library: bytes) -> dict[str, Any]:
    """Return the entry "code" of a kernel in a manifest. library: the content of the library that holds `packed`."""
    code = zlib.decompress(packed)
    place = {"offset": library.index(packed), "packed": len(packed)}
    return place | {"size": len(code), "sha256": manifest.digest(code)}


def read(library: Path, entry: dict[str, Any]) -> bytes:
    """Return the device code of a kernel. entry: of a manifest. Raise OSError if it is not what the manifest names."""
    at = entry["code"]
    with open(library, "rb") as file:
        file.seek(at["offset"])
        packed = file.read(at["packed"])
    try:
        code = unpack(packed, at["size"])
    except ValueError as error:
        raise OSError(f"the device code of {entry['symbol']} cannot be unpacked: {error}") from None
    if manifest.digest(code) != at["sha256"]:
        raise OSError(f"the device code of {entry['symbol']} does not have the hash in the manifest")
    return code


def load(library: Path, entry: dict[str, Any]) -> None:
    """Copy the device code of a kernel into a library that this process has loaded."""
    code = read(library, entry)
    memory = (ctypes.c_char * len(code)).in_dll(ctypes.CDLL(str(library)), symbol(entry["symbol"]))
    ctypes.memmove(memory, code, len(code))
