"""Compile a kernel: the only caller of cute.compile, shared by JIT, bundle.py and the tests.

Nothing here needs a GPU, touches a tensor or launches a kernel. A kernel module `cute_kernels.<op>.forward` states its
launch ABI with fake tensors (`fake_args(spec)`: name -> fake, in the order of a launch), and its host part is
`forward(spec, stream, *args)`.

cutlass is imported inside functions, because the DSL reads CUTE_DSL_ARCH when it is imported."""

import inspect
import json
import os
import platform
import re
import shlex
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from . import archs, device_code, manifest

# Without fmad=false ptxas fuses products and sums into FMAs as it likes. The bits of a result would then depend on the
# code around it, and differ between kernels that compute the same, and from the PTX, which the simulator runs.
OPTIONS = "--enable-tvm-ffi --keep-cubin --keep-ptx --ptxas-options='--fmad=false'"
# The default, 3, makes large kernels with tensor memory spill: 992 bytes of stack against 16 for NVIDIA's FMHA example.
ARCH_OPTIONS = dict.fromkeys(archs.having(archs.TCGEN05), "--opt-level 2")
# Settings that move files or messages, not code.
HARMLESS = ("ARCH", "DUMP_DIR", "CACHE_DIR", "NO_CACHE", "DISABLE_FILE_CACHING", "LIBS", "LOG_TO_CONSOLE", "LOG_LEVEL")
# The target of host code. By default it is the processor that compiles it, and the code may run on no other.
HOST_CPUS = {"x86_64": ("x86-64-v2", "+sse4.2")}  # processor, and features in place of the detected ones
HOST_ATTRIBUTES = ("minsize", "optsize")
Part = Literal[".o", ".host", ".ptx"]  # what `object_file` makes of a kernel
DEVICE_CODE = "kernels_binary"  # the DSL's name for the device code in a compiled module
PROTECTED = 2  # LLVM's number for symbols that other libraries see and cannot replace
_LOCK = threading.Lock()  # cute.compile from several threads aborts the process


class ArchMismatch(RuntimeError):
    """The DSL of this process compiles for another architecture, which cannot be changed after its import."""


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel that is not loaded into this process, only exported."""

    op: str
    spec: Any
    arch: str
    fn: Any  # the compiled function of the DSL
    ptx: str
    cubin: bytes
    shared: int | None  # bytes of dynamic shared memory of the largest launch; None if the host code does not show it
    host: str  # the host function in the DSL's MLIR: tensor maps, grid and kernel parameters as functions of Args

    def export(self, path: Path, symbol: str) -> None:
        """Write an object file with one visible symbol, the TVM FFI function `symbol`."""
        _make_portable(self.fn.ir_module)
        self.fn.export_to_c(str(path), function_name=symbol, export_only_tvm_ffi_symbols=True)

    def export_host(self, path: Path, symbol: str) -> bytes:
        """Write the same object file without the device code, and return that: see `device_code`. A later `export`
        would lack it, too."""
        code = _take_device_code(self.fn.ir_module, device_code.symbol(symbol))
        self.export(path, symbol)
        return code


def use_arch(arch: str) -> None:
    """Make the DSL of this process compile for `arch`. Raise ArchMismatch if it is already set to another one."""
    current = os.environ.get("CUTE_DSL_ARCH")
    if "cutlass" not in sys.modules:
        current = os.environ.setdefault("CUTE_DSL_ARCH", arch)
    elif current is None:  # the DSL took the architecture of the GPU it found
        from cutlass.cutlass_dsl import CuTeDSL

        current = CuTeDSL._get_dsl().envar.arch
    if current != arch:
        raise ArchMismatch(
            f"cannot compile for {arch}: CUTE_DSL_ARCH is {current}, must be set to {arch} before cutlass is imported"
        )


@cache
def toolchain() -> dict[str, Any]:
    """Return the facts of the toolchain that decide the code, a part of the artifact key. Imports the DSL."""
    import cutlass

    cuda = cutlass.CUDA_VERSION  # the flavour in use: 12 and 13 may be installed side by side
    prefix = "CUTE_DSL_"
    settings = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(prefix) and name.removeprefix(prefix) not in HARMLESS
    }
    return {"dsl": version("nvidia-cutlass-dsl"), "cuda": f"{cuda.major}.{cuda.minor}", "settings": settings}


def build(op: str, spec: Any, arch: str, more: str = "") -> Compiled:
    """Compile kernel `op` for `spec`, in 1 to 15 s.

    more: options of cute.compile that do not change the code, such as --generate-line-info. Raise
    NotImplementedError if `supports` refuses the spec or its shared memory exceeds the architecture's; or
    ArchMismatch."""
    package = import_module(f"cute_kernels.{op}")
    reason = (
        package.supports(spec)
        if arch in package.ARCHS
        else f"architecture {arch}, must be {' or '.join(package.ARCHS)}"
    )
    if reason:
        raise NotImplementedError(f"{manifest.label(op, spec)}: {reason}")
    use_arch(arch)
    with _LOCK, tempfile.TemporaryDirectory() as folder:
        import cutlass.cute as cute

        from . import abi

        module = import_module(f"cute_kernels.{op}.forward")
        args = module.fake_args(spec)
        _name(module, f"{op}__{spec.name}".replace(".", "_"), tuple(args))
        options = f"{OPTIONS} {ARCH_OPTIONS.get(arch, '')} --dump-dir {shlex.quote(folder)} {more}"
        with host_functions() as hosts:
            # An engine would compile the host function twice more, in 0.3 s, for calls from this process.
            fn = cute.compile(module.forward, spec, abi.stream(), *args.values(), options=options, no_jit_engine=True)
        shared, most = _dynamic_shared(str(fn.ir_module)), archs.of(arch).smem_per_cta
        if shared is not None and shared > most:
            raise NotImplementedError(f"{manifest.label(op, spec)}: {shared} bytes of shared memory, {arch} has {most}")
        return Compiled(op, spec, arch, fn, fn.__ptx__, fn.__cubin__, shared, *hosts)


@contextmanager
def host_functions() -> Iterator[list[str]]:
    """Yield a list to which each compilation inside the block appends its host function."""
    from cutlass.cutlass_dsl import CuTeDSL

    found: list[str] = []
    with CuTeDSL._get_dsl().trace_finalize_hooks(lambda dsl, module, name: found.append(_host_function(module))):
        yield found


def _host_function(module: Any) -> str:
    """Return the host function of a traced module, cleaned: a twentieth of the module, the rest of which is the
    kernel."""
    from cutlass._mlir import ir
    from cutlass._mlir.passmanager import PassManager

    with module.context, ir.Location.unknown():
        clean = ir.Module.create()
        for op in module.body.operations:
            if op.operation.name == "func.func":
                clean.body.append(op.operation.clone())
        passes = PassManager.parse("builtin.module(canonicalize,cse)")
        passes.enable_verifier(False)  # it would miss the kernel
        passes.run(clean.operation)
        return clean.operation.get_asm(assume_verified=True)


def _make_portable(module: Any) -> None:
    """Make the host code of a module short, and on x86 independent of the processor that compiles it."""
    from cutlass._mlir import ir

    with module.context:
        attributes = {"passthrough": ir.Attribute.parse(json.dumps(HOST_ATTRIBUTES))}
        if platform.machine() in HOST_CPUS:
            cpu, features = HOST_CPUS[platform.machine()]
            attributes["target_cpu"] = ir.StringAttr.get(cpu)
            attributes["target_features"] = ir.Attribute.parse(f'#llvm.target_features<["{features}"]>')
        for op in module.body.operations:
            for name, value in attributes.items() if op.operation.name == "llvm.func" else ():
                op.attributes[name] = value


def _take_device_code(module: Any, symbol: str) -> bytes:
    """Replace the device code in a module by as many zeros, a variable that a library shows as `symbol`. Return the
    code, as it is handed to the driver."""
    from cutlass._mlir import ir

    def refer(op: Any) -> Any:
        if op.name == "llvm.mlir.addressof" and op.attributes["global_name"].value == DEVICE_CODE:
            op.attributes["global_name"] = ir.FlatSymbolRefAttr.get(symbol)
        return ir.WalkResult.ADVANCE

    names = {str(op.attributes["sym_name"]): op for op in module.body.operations if "sym_name" in op.attributes}
    attributes = names[f'"{DEVICE_CODE}"'].attributes
    with module.context:
        code = ir.StringAttr(attributes["value"]).value_bytes
        del attributes["constant"]
        attributes["value"] = ir.Attribute.parse(f"dense<0> : tensor<{len(code)}xi8>")
        attributes["sym_name"] = ir.StringAttr.get(symbol)
        attributes["linkage"] = ir.Attribute.parse("#llvm.linkage<external>")
        attributes["visibility_"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), PROTECTED)
        module.operation.walk(refer)
    return code


def _dynamic_shared(host: str) -> int | None:
    """Return the largest constant that the host code stores to field 2, dynamicSmemBytes, of a cudaLaunchConfig_t."""
    field = (
        r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] .*struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
    )
    sizes = []
    for found in re.finditer(field + r"\n\s*llvm\.store (%\w+), \1 ", host):
        definitions = re.findall(rf"{found[2]} = llvm\.mlir\.constant\((\d+) : i64\)", host[: found.start()])
        sizes += definitions[-1:]  # names are reused between functions: the last one belongs to this function
    return max(map(int, sizes), default=None)


def _name(module: Any, name: str, fields: tuple[str, ...]) -> None:
    """Name the kernel (`name`, shown by profilers) and its arguments (`fields`, shown in launch errors)."""
    for function in (module.forward, module.kernel):
        function.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    inner = inspect.unwrap(module.forward)
    head = [p for p in inspect.signature(inner).parameters.values() if p.kind == kind][:2]  # spec, stream
    inner.__signature__ = inspect.Signature([*head, *(inspect.Parameter(field, kind) for field in fields)])  # type: ignore[attr-defined]


def object_file(op: str, spec: Any, arch: str, folder: Path, part: Part = ".o") -> Path:
    """Return `folder/<key>` with the suffix `part`, compiled now unless it exists.

    part: `.o`, an object that `load_object` takes; `.host`, that object without its device code, which lies in `.code`,
    packed, for a bundle; or `.ptx` alone. `.cubin`, `.mlir` (of the host function) and `.shared` (bytes) lie beside
    each. The part appears last and in one step. Processes that want the same key wait for the first one. An existing
    part is found whatever architecture the DSL of this process compiles for."""
    if "cutlass" not in sys.modules:
        os.environ.setdefault("CUTE_DSL_ARCH", arch)
    key = manifest.key(op, spec, arch, toolchain())
    path = folder / f"{key}{part}"
    with manifest.locked(folder / f"{key}.lock"):
        if path.exists():
            os.utime(path.with_suffix(".ptx"))  # used: see prune() of bundle.py
            return path
        compiled = build(op, spec, arch)
        manifest.write_atomic(path.with_suffix(".cubin"), compiled.cubin)
        manifest.write_atomic(path.with_suffix(".mlir"), compiled.host.encode())
        manifest.write_atomic(path.with_suffix(".shared"), manifest.canonical(compiled.shared).encode())
        manifest.write_atomic(path.with_suffix(".ptx"), compiled.ptx.encode())
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as scratch:
            exported, symbol = Path(scratch) / "kernel.o", manifest.symbol(op, spec, key)
            if part == ".o":
                compiled.export(exported, symbol)
            elif part == ".host":
                code = compiled.export_host(exported, symbol)
                manifest.write_atomic(path.with_suffix(".code"), device_code.pack(code))
            if part != ".ptx":
                manifest.write_atomic(path, exported.read_bytes())
    return path


def load_object(path: Path, symbol: str) -> Callable[..., None]:
    """Return the function of an object file of `object_file`. Needs the DSL, but no linker."""
    from cutlass.cute.runtime import load_module

    return getattr(load_module(str(path), enable_tvm_ffi=True), symbol)


def runtime_libraries() -> list[str]:
    """Return the libraries to link object files with, as NVIDIA documents it: the DSL's runtime library and
    libtvm_ffi."""
    from cutlass.cute.runtime import find_runtime_libraries

    return find_runtime_libraries()
