"""Resources of a compiled kernel, read from its cubin: registers, stack, shared memory, instruction counts.

The disassemblers come from PyPI (nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm, in the extra `dev`) or from a
CUDA toolkit on PATH. Without them, everything but the dynamic shared memory is None."""

import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

INSTALL = "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
COUNTED = (
    *("HMMA", "HGMMA", "QGMMA", "WARPGROUP"),  # tensor-core MMAs, and Hopper's fences and waits around them
    *("UTCHMMA", "UTCQMMA", "UTCOMMA"),
    *("UTMALDG", "UTMASTG", "LDGSTS"),  # TMA copies, and cp.async
    *("LDL", "STL"),  # spills
    "FFMA",
)
STEP = 16  # bytes per instruction


@cache
def disassembler() -> str | None:
    """Return the path of a cuobjdump that has nvdisasm beside it, or None."""
    spec = find_spec("nvidia")
    wheels = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    for folder in (folder for wheel in wheels for folder in sorted(wheel.glob("*/bin"), reverse=True)):
        if (folder / "cuobjdump").exists() and (folder / "nvdisasm").exists():
            return str(folder / "cuobjdump")
    return shutil.which("cuobjdump") if shutil.which("nvdisasm") else None


def _read(cubin: bytes, *options: str, by: str = "cuobjdump") -> str:
    tool = disassembler()
    if tool is None:
        raise FileNotFoundError(f"cuobjdump and nvdisasm are not installed: {INSTALL}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        path = f"{Path(tool).parent}:{os.environ.get('PATH', '')}"  # cuobjdump finds nvdisasm on PATH
        command = [shutil.which(by, path=path) or by, *options, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True, env={"PATH": path}).stdout


def sass(cubin: bytes, encodings: bool = False) -> str:
    """Return the disassembly. Raise FileNotFoundError, which names the packages to install, if there is no
    disassembler."""
    text = _read(cubin, "-sass")
    if encodings:
        return text
    return re.sub(r"[ \t]*/\* 0x[0-9a-f]{16} \*/[ \t]*\n(?:[ \t]*/\* 0x[0-9a-f]{16} \*/[ \t]*\n)?", "\n", text)


def instructions(text: str) -> dict[str, int]:
    """Count each opcode of COUNTED in SASS, by its first word: `HGMMA.64x128x16.F32.BF16` is HGMMA."""
    return counted(opcodes(text))


def opcodes(text: str) -> list[str]:
    return re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ +)?([A-Z0-9_]+)", text, re.MULTILINE)


def counted(names: Iterable[str]) -> dict[str, int]:
    found = Counter(names)
    return {name: found[name] for name in COUNTED if found[name]} | {"total": sum(found.values())}


def code(cubin: bytes) -> bytes:
    """Return the instructions of all kernels: the sections .text.<kernel> of the ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]  # name, ..., offset, size
    texts = [s for s in sections if cubin.startswith(b".text.", sections[names][4] + s[0])]
    return b"".join(cubin[s[4] : s[4] + s[5]] for s in texts)


def counts(cubins: list[bytes], arch: str) -> list[dict[str, int]]:
    """Return `instructions` of each cubin, from one run of the disassembler: its start takes 0.3 s, a kernel 0.1 s."""
    codes = [code(cubin) for cubin in cubins]
    names = opcodes(_read(b"".join(codes), "-ndf", "-b", arch.replace("sm_", "SM"), by="nvdisasm"))
    if STEP * len(names) != sum(map(len, codes)):
        raise ValueError(f"{len(names)} instructions disassembled, there are {sum(map(len, codes)) // STEP}")
    rest = iter(names)
    return [counted(islice(rest, len(one) // STEP)) for one in codes]


def usage(cubin: bytes) -> dict[str, int]:
    """Return the largest values of the kernels in a cubin: registers per thread, bytes of stack and local memory per
    thread, bytes of static shared memory."""
    text = _read(cubin, "--dump-resource-usage")
    largest = {
        name: max((int(n) for n in re.findall(rf"\b{name}:(\d+)", text)), default=0)
        for name in ("REG", "STACK", "LOCAL", "SHARED")
    }
    return {
        "registers": largest["REG"],
        "stack": largest["STACK"] + largest["LOCAL"],
        "static_shared": largest["SHARED"],
    }


def resources(cubins: list[bytes], dynamic_shared: list[int | None], arch: str) -> list[dict[str, Any]]:
    """Return the resources of each cubin: registers and stack (bytes, with spills) per thread, shared memory (bytes)
    per CTA, and instructions (by opcode)."""
    if disassembler() is None:
        unknown = {"registers": None, "stack": None, "instructions": None}
        return [unknown | {"shared": shared} for shared in dynamic_shared]
    found: list[dict[str, Any]] = []
    for cubin, shared, instructions in zip(cubins, dynamic_shared, counts(cubins, arch), strict=True):
        used = usage(cubin)
        static = used.pop("static_shared")
        shared = None if shared is None else shared + static
        found.append({**used, "shared": shared, "instructions": instructions})
    return found
