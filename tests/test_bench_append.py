"""The benchmark of rows written to caches and of merged states, on the CPU: cases, checks of providers, floors."""

import pytest
import torch

from bench import append, merging
from tests.test_bench_topk import TOP, Costs, setup_of, small_l2  # noqa: F401

NAMES = [
    f"append-{kind}-n{n}-h4x2-d32-p16"
    for n in (5, 1100)
    for kind in ("bf16", "fp8", "nvfp4", "rope-bf16", "normrope-fp8", "normrope-nvfp4")
]


@pytest.mark.parametrize("name", NAMES)
def test_our_rows_pass_the_check_and_others_do_not(name):
    inputs = append.make(name, "cpu", 0)
    out = append.ours(inputs)
    assert append.check(inputs, out) is None
    inputs.caches[1].view(torch.uint8)[inputs.slots[0] // 16, inputs.slots[0] % 16] ^= 0x55
    if not inputs.transform:
        assert append.check(inputs, out) == "other rows than the reference"
    inputs.caches[0].view(torch.uint8).zero_()
    assert append.check(inputs, out) in ("other rows than the reference", "far from the reference")


@pytest.mark.parametrize("name", ["merge-states-n60-s3-h2-d40", "merge-state-n5-h2-d32"])
def test_our_merged_states_pass_the_check_and_others_do_not(name):
    inputs = merging.make(name, "cpu", 0)
    out, lse = merging.ours(inputs)
    assert merging.check(inputs, (out, lse)) is None and out.shape == (
        inputs.case.tokens,
        inputs.case.heads,
        inputs.case.dim,
    )
    assert merging.check(inputs, (out, lse + 0.01)) == "far from the reference"
    out[-1, -1, -1] += 0.1
    assert merging.check(inputs, (out, lse)) == "far from the reference"


def test_our_dequantised_values_pass_the_check_and_others_do_not():
    inputs = append.make_dequantize("nvfp4-dequantize-n5-h2-d32", "cpu", 0)
    got = append.DEQUANTIZERS["ours"](inputs)
    assert append.check_dequantize(inputs, got) is None
    assert append.check_dequantize(inputs, got * 2) == "other values than the reference"
