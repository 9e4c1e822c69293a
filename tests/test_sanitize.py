"""The sanitizer's runner without a GPU: its calls on the reference, and which output of a tool counts as clean."""

import argparse
import re

import pytest
import torch

from cute_kernels import catalog
from cute_kernels.topk import dispatch
from cute_kernels.topk.request import TopKKernelRequest
from tests.conftest import ARCH
from tools import sanitize


def ended(tmp_path, text):
    """Return whether a tool that prints so is clean."""
    tool = tmp_path / "sanitizer"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    tool.chmod(0o755)
    return sanitize.check("racecheck", "xqa", argparse.Namespace(sanitizer=str(tool), timeout=600.0, logs=None))


def test_a_process_that_failed_is_not_clean(tmp_path):
    done = "3 calls, all right\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
    assert ended(tmp_path, done)
    for text in ("", "3 calls, all right", done.replace("0 hazards", "10 hazards"), done.split("\n")[1]):
        assert not ended(tmp_path, text)


def test_moved_keeps_strides():
    wide = torch.arange(24.0).view(4, 6)
    inner = wide[1:, ::2]
    again = sanitize.moved({"a": (inner, 3)}, "meta")["a"][0]
    assert again.stride() == inner.stride() and again.storage_offset() == inner.storage_offset()
    assert again.untyped_storage().nbytes() == wide.untyped_storage().nbytes()


@pytest.mark.parametrize("op", ["prefill-features", "decode-features", "xqa", "topk-cta"])
def test_calls(op):
    """They are accepted and right; on a GPU the same calls run kernels."""
    assert sanitize.run(op, "cpu") == len(list(sanitize.OPS[op]()))


def test_all_structures_of_top_k_are_called():
    found = set()
    for op in ("topk-cta", "topk-clusters", "topk-streamed"):
        for case in sanitize.OPS[op]():
            _, spec = dispatch.select(TopKKernelRequest(case.dtype, case.rows, case.width, case.k, 132), ARCH)
            found.add((case.dtype, spec.stream, min(spec.cluster, 2)))
    structures = ((False, 1), (False, 2), (True, 1), (True, 2))
    assert found == {(dtype, *how) for dtype in ("fp32", "bf16") for how in structures}


def test_every_kernel_passes_the_filter():
    pattern = sanitize.ONLY_OURS[1].removeprefix("regex=")
    assert all(re.match(pattern, op.replace(".", "_")) for op, _ in catalog.shipped(ARCH))
