"""Facts of a compiled kernel, read from its cubin: registers, stack, shared memory, instruction counts.

The disassemblers come from PyPI (nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm, in the extra `dev`) or from
a CUDA toolkit on PATH. Without them every fact is None.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

INSTALL = "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
COUNTED = (
    *("HMMA", "HGMMA", "QGMMA", "WARPGROUP"),  # tensor-core MMAs, Hopper's fences and waits around them
    *("UTCHMMA", "UTCQMMA", "UTCOMMA"),
    *("UTMALDG", "UTMASTG", "LDGSTS"),  # copies of TMA, and cp.async
    *("LDL", "STL"),  # what a spill would show as
    "FFMA",
)


@cache
def disassembler() -> str | None:
    """Path of cuobjdump with nvdisasm beside it, or None."""
    spec = find_spec("nvidia")
    wheels = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    for folder in (folder for wheel in wheels for folder in sorted(wheel.glob("*/bin"), reverse=True)):
        if (folder / "cuobjdump").exists() and (folder / "nvdisasm").exists():
            return str(folder / "cuobjdump")
    return shutil.which("cuobjdump") if shutil.which("nvdisasm") else None


def _read(cubin: bytes, *options: str, by: str = "cuobjdump") -> str:
    tool = disassembler()
    if tool is None:
        raise FileNotFoundError(f"no cuobjdump and nvdisasm: {INSTALL}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        path = f"{Path(tool).parent}:{os.environ.get('PATH', '')}"  # cuobjdump finds nvdisasm on PATH
        command = [shutil.which(by, path=path) or by, *options, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True, env={"PATH": path}).stdout


def sass(cubin: bytes, encodings: bool = False) -> str:
    """Disassembly. FileNotFoundError, saying what to install, where there is no disassembler."""
    text = _read(cubin, "-sass")
    if encodings:
        return text
    return re.sub(r"[ \t]*/\* 0x[0-9a-f]{16} \*/[ \t]*\n(?:[ \t]*/\* 0x[0-9a-f]{16} \*/[ \t]*\n)?", "\n", text)


def instructions(text: str) -> dict[str, int]:
    """How often each opcode of COUNTED occurs in SASS, by its first word: `HGMMA.64x128x16.F32.BF16` is HGMMA."""
    found = Counter(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ +)?([A-Z0-9_]+)", text, re.MULTILINE))
    return {name: found[name] for name in COUNTED if found[name]} | {"total": sum(found.values())}


def usage(cubin: bytes) -> dict[str, int]:
    """Largest of the kernels in a cubin: registers a thread, stack and local bytes a thread, static shared bytes."""
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


def facts(cubin: bytes, dynamic_shared: int | None) -> dict[str, Any]:
    """registers, stack (bytes a thread; spills lie there), shared (bytes a CTA), instructions (opcode -> count)."""
    if disassembler() is None:
        return {"registers": None, "stack": None, "shared": dynamic_shared, "instructions": None}
    used = usage(cubin)
    shared = None if dynamic_shared is None else dynamic_shared + used["static_shared"]
    return {
        "registers": used["registers"],
        "stack": used["stack"],
        "shared": shared,
        "instructions": instructions(_read(cubin, "-c", "-ndf", by="nvdisasm")),  # a quarter faster than `sass`
    }
