"""The sanitizer's runner without a GPU: what it reads in the tools' output, its calls on the reference, and its minimal
kernels in the simulator, which sees their order as it is."""

import argparse
import re
from collections import Counter

import numpy as np
import pytest
import torch
from ptxsim import host
from ptxsim.faults import Fault
from ptxsim.runner import run

from cute_kernels import build
from cute_kernels.topk import dispatch
from cute_kernels.topk.request import TopKKernelRequest
from tests.conftest import ARCH
from tools.sanitize import __main__ as runner
from tools.sanitize import calls, under
from tools.sanitize.report import Finding, lines, parse

KERNEL = "attention_decode__bf16_d64_m64n128s6g2r8_0"
RACE = f"""\
========= COMPUTE-SANITIZER
18 calls, 36 launches, all right
========= Error: Race reported between Write access at {KERNEL}+0xbff0 in reduce.py:70
=========     and Read access at {KERNEL}+0xca30 in reduce.py:92 [1088 hazards]
=========     and Write access at {KERNEL}+0xc0a0 in reduce.py:70 [64 hazards]
=========
========= Warning: Race reported between Read access at {KERNEL}+0x1fe0
=========     and Write access at {KERNEL}+0x6360 [4 hazards]
=========
========= Error: Race reported between Write access at {KERNEL}+0xbff0 in reduce.py:70
=========     and Read access at {KERNEL}+0xca30 in reduce.py:92 [12 hazards]
=========
========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)
"""
HAZARD = """\
========= Error: Potential WAW hazard detected at __shared__ 0x0 in block (0,0,0) :
=========     Write Thread (0,0,0) at WAW(int *)+0x2f0 in raceWAW.cu:20
=========     Write Thread (1,0,0) at WAW(int *)+0x300 in raceWAW.cu:21
=========     Current Value : 1, Incoming Value : 2
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at void unaligned_kernel<float>(float *)+0x160 in memcheck_demo.cu:6
=========     by thread (0,0,0) in block (0,0,0)
=========     Access at 0x7f6510c00001 is misaligned
=========     and is inside the nearest allocation at 0x7f6510c00000 of size 4 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: main in demo.cu:9 [0x1]
=========
========= Invalid __global__ write of size 4 bytes
=========     at void unaligned_kernel<float>(float *)+0x160 in memcheck_demo.cu:6
=========     by thread (1,0,0) in block (0,0,0)
=========     Address 0x7f6510c00005 is out of bounds
=========
========= Program hit cudaErrorLaunchFailure (error 719) due to "launch failure" on CUDA API call to cudaFree.
=========     Saved host backtrace up to driver entry point at error
=========
========= ERROR SUMMARY: 3 errors
"""
INITCHECK = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 16 bytes
=========     at topk_radix__fp32_0+0x70
=========     by thread (31,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec000fc
=========
========= Host API uninitialized memory access
=========     Uninitialized access at 0x7f94f1e00020 on access by cudaMemcpy source.
=========
========= ERROR SUMMARY: 2 errors
"""
SYNCCHECK = """\
========= COMPUTE-SANITIZER
========= Warning: Detected overflow of tracked cuda::barrier structures. Results might be incorrect.
========= Barrier error detected. Divergent thread(s) in warp
=========     at Divergence(int *, int)+0xf0 in divergence.cu:79
=========     by thread (37,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""
UNALIGNED = ("unaligned_kernel<float>", ("+0x160 memcheck_demo.cu:6",))
FOUND = {
    RACE: {
        Finding("error race", KERNEL, ("write +0xbff0 reduce.py:70", "read +0xca30 reduce.py:92")): 1100,
        Finding("error race", KERNEL, ("write +0xbff0 reduce.py:70", "write +0xc0a0 reduce.py:70")): 64,
        Finding("warning race", KERNEL, ("read +0x1fe0", "write +0x6360")): 4,
    },
    HAZARD: {
        Finding("Error: Potential WAW hazard detected", "WAW", ("+0x2f0 raceWAW.cu:20", "+0x300 raceWAW.cu:21")): 1
    },
    MEMCHECK: {
        Finding("Invalid __global__ write of size 4 bytes", *UNALIGNED): 2,
        Finding(
            'Program hit cudaErrorLaunchFailure (error 719) due to "launch failure" on CUDA API call to cudaFree.'
        ): 1,
    },
    INITCHECK: {
        Finding("Uninitialized __global__ memory read of size 16 bytes", "topk_radix__fp32_0", ("+0x70",)): 1,
        Finding("Host API uninitialized memory access"): 1,
    },
    SYNCCHECK: {
        Finding("Barrier error detected. Divergent thread(s) in warp", "Divergence", ("+0xf0 divergence.cu:79",)): 1,
        Finding("Warning: Detected overflow of tracked cuda::barrier structures. Results might be incorrect."): 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("text", FOUND, ids=["race", "hazard", "memcheck", "initcheck", "synccheck"])
def test_findings(text):
    report = parse(text)
    assert report.found == Counter(FOUND[text])
    assert report.summary == text.splitlines()[-1].removeprefix("========= ")


def test_nothing_found():
    report = parse("18 calls\n========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n")
    assert not report.found and report.count == 0 and report.summary == "ERROR SUMMARY: 0 errors"


def test_lines_begin_with_the_most_frequent():
    shown = lines(parse(RACE), most=2)
    assert shown[0] == f"    1100 x error race {KERNEL} [write +0xbff0 reduce.py:70] [read +0xca30 reduce.py:92]"
    assert len(shown) == 3 and "1 other" in shown[2]


@pytest.mark.parametrize("text", ["", "3 calls, 3 launches, all right", "========= ERROR SUMMARY: 0 errors\n"])
def test_a_process_that_failed_is_not_clean(tmp_path, text):
    """Clean is: the calls are right, and the tool ended and reported nothing."""
    assert not ended(tmp_path, text).clean
    assert ended(tmp_path, "3 calls, 3 launches, all right\n========= ERROR SUMMARY: 0 errors\n").clean


def ended(tmp_path, text):
    """What becomes of a tool that prints so."""
    tool = tmp_path / "sanitizer"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    tool.chmod(0o755)
    args = argparse.Namespace(sanitizer=str(tool), option=[], timeout=600.0, logs=str(tmp_path / "logs"))
    return runner.check("racecheck", "xqa", 0, args)


def test_a_process_that_hangs_is_ended(tmp_path):
    text = under.run(["sh", "-c", "echo before; sleep 600"], 2.0)  # the shell begins in milliseconds
    assert text.startswith("before\n") and "timed out after 2 s" in text


def test_options():
    """As compute-sanitizer takes them."""
    words = under.command("x", "racecheck", ["racecheck-report=all", "print-level=info"])
    assert words[-4:] == ["--racecheck-report", "all", "--print-level", "info"]


def test_moved_keeps_strides():
    wide = torch.arange(24.0).view(4, 6)
    inner = wide[1:, ::2]
    again = calls.moved({"a": (inner, 3)}, "meta")["a"][0]
    assert again.stride() == inner.stride() and again.storage_offset() == inner.storage_offset()
    assert again.untyped_storage().nbytes() == wide.untyped_storage().nbytes()


@pytest.mark.parametrize("op", ["prefill-features", "decode-features", "xqa", "topk-cta"])
def test_calls(op):
    """They are accepted and right; on a GPU the same calls run kernels."""
    assert calls.run(op, "cpu") == (len(list(calls.OPS[op]())), 0)


def test_all_structures_of_top_k_are_called():
    found = set()
    for op in ("topk-cta", "topk-clusters", "topk-streamed"):
        for case in calls.OPS[op]():
            _, spec = dispatch.select(TopKKernelRequest(case.dtype, case.rows, case.width, case.k, 132), ARCH)
            found.add((case.dtype, spec.stream, min(spec.cluster, 2)))
    structures = ((False, 1), (False, 2), (True, 1), (True, 2))
    assert found == {(dtype, *how) for dtype in ("fp32", "bf16") for how in structures}


@pytest.mark.kernels
def test_minimal_kernels(tmp_path):
    """The result of each variant, and a race where it lacks order. Lanes are not told apart, so the missing syncwarp is
    not seen."""
    build.use_arch(ARCH)
    from tools.sanitize import handover, kernels

    given = [7 * i + 1 for i in range(kernels.THREADS)]
    for variant, facts in kernels.VARIANTS.items():
        with build.host_functions() as hosts:
            compiled = handover.compiled(variant, str(tmp_path))
        out = np.zeros(kernels.THREADS, np.int32)
        arguments = [np.array(given, np.int32), out, 4]
        shared = build._dynamic_shared(str(compiled.ir_module))
        (call,) = host.evaluate(*hosts, compiled.__ptx__, arguments, shared)
        if facts.races and variant != "unsynced":
            with pytest.raises(Fault, match="without synchronisation"):
                run(call)
        else:
            run(call)
            assert out.tolist() == handover.expected(variant, given, 4), variant


def test_every_kernel_name_passes_the_filter():
    pattern = runner.ONLY_OURS[1].removeprefix("regex=")
    assert all(re.search(pattern, name) for name in ("attention_decode__bf16", "attention_sm90__x", "topk_radix__fp32"))
