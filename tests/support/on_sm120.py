"""Run by test_sm120.py for an architecture that has mma.sync only: compile and simulate some of its kernels.

    python -m tests.support.on_sm120 ARCH NAME...

Prints, for each case, the kernel that ran, its largest error over the tolerance, bytes of shared memory, and the spills
that its code has (-1 without a disassembler).
"""

import sys
from contextlib import suppress
from typing import Any

from bench.cases.attention import AttentionCase
from cute_kernels import build, catalog, cubin, manifest
from cute_kernels.topk import dispatch as topk
from tests.sim import launcher
from tests.sim.workloads import CASES, RUN, common
from tests.sim.workloads.attention import call
from wrappers.host.machine import override

SMS = 5
# several tiles of 128 rows per sequence, beside one row, and rows that see no key; the diagonal crosses blocks
PROMPTS = AttentionCase(
    "", q_lens=(150, 1, 70), kv_lens=(260, 330, 40), heads_q=4, heads_kv=2, sink=True, window_left=140, data="needles"
)
FULL = AttentionCase("", q_lens=(150, 9), kv_lens=(200, 330), heads_q=4, heads_kv=2, causal=False)


def report(name: str, op: str, spec: Any, arch: str, error: float) -> None:
    path = build.object_file(op, spec, arch, launcher.OBJECTS, ".ptx")
    blob, shared, spills = path.with_suffix(".cubin").read_bytes(), int(path.with_suffix(".shared").read_text()), -1
    if cubin.disassembler():
        (counts,), used = cubin.counts([blob], arch), cubin.usage(blob)
        spills = counts.get("LDL", 0) + counts.get("STL", 0) + used["stack"]
    print(name, manifest.label(op, spec), f"{error:.3f}", shared, spills, flush=True)


def prefill(name: str, case: AttentionCase, arch: str) -> None:
    """Serve a call as users' calls are: CTAs may share keys."""
    machine = common.SimulatedMachine(arch, [], SMS, None, {})
    launched: list[tuple[str, Any]] = []
    machine.kernel = lambda op, spec, arch, find=machine.kernel: (launched.append((op, spec)), find(op, spec, arch))[1]
    with override(machine):
        error = call(case)[1]
    report(name, *launched[0], arch, error)


def shipped(name: str, arch: str) -> None:
    op, spec = next(kernel for kernel in catalog.shipped(arch) if name in manifest.label(*kernel))
    family = op.split(".")[0]
    case = CASES[family](spec)[0]
    report(name, op, spec, arch, RUN[family](spec, case, arch).error)


def main(arch: str, *names: str) -> None:
    for name in names:
        if name == "large":  # a kernel of sm_90a that needs 200 KiB
            with suppress(NotImplementedError):
                raise SystemExit(build.build("topk.radix", topk.specs("fp32")[3], arch))
            print(name, "is refused", flush=True)
        elif name in ("prompts", "full"):
            prefill(name, PROMPTS if name == "prompts" else FULL, arch)
        else:
            shipped(name, arch)


if __name__ == "__main__":
    main(*sys.argv[1:])
