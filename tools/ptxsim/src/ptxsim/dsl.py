"""Compile a kernel of NVIDIA's CuTe DSL (nvidia-cutlass-dsl) for the simulator. No GPU is needed."""

import re
import tempfile
from typing import Any

from .kernel import CompiledKernel


def compile(function: Any, *args: Any, options: str = "") -> CompiledKernel:
    """Return the kernel that the host function `function`, a `cute.jit`, launches for `args`, as `cute.compile` takes
    them. `run` of the result takes those of them that are not constants.

    The DSL compiles for the architecture in CUTE_DSL_ARCH, which it reads at its import. options: more options of
    `cute.compile`. The PTX has line info, so that reports name source lines. Raise ImportError without the DSL, and
    ValueError if `function` launches nothing."""
    import cutlass.cute as cute
    from cutlass.cutlass_dsl import CuTeDSL

    dsl = CuTeDSL._get_dsl()
    hosts: list[str] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        dsl.trace_finalize_hooks(lambda _, module, name: hosts.append(host_function(module))),
    ):
        options = f"--keep-ptx --dump-dir {folder} --generate-line-info {options}"
        found = cute.compile(function, *args, options=options, no_jit_engine=True)
        if not hosts or not found.__ptx__:
            raise ValueError(f"{function!r} launches no kernel")
        return CompiledKernel(found.__ptx__, hosts[-1], dynamic_shared(str(found.ir_module)))


def host_function(module: Any) -> str:
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
        return str(clean.operation.get_asm(assume_verified=True))


def dynamic_shared(host: str) -> int:
    """Return the dynamic shared memory in bytes of the largest launch of compiled host code: the largest constant that
    it stores to field 2, dynamicSmemBytes, of a cudaLaunchConfig_t."""
    field = (
        r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] .*struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
    )
    sizes = []
    for found in re.finditer(field + r"\n\s*llvm\.store (%\w+), \1 ", host):
        definitions = re.findall(rf"{found[2]} = llvm\.mlir\.constant\((\d+) : i64\)", host[: found.start()])
        sizes += definitions[-1:]  # names are reused between functions: the last one belongs to this function
    return max(map(int, sizes), default=0)
