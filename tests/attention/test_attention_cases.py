"""The covering set of attention features: its data are what they are said to be, the reference agrees with it through
the public functions, and what the scenarios watch is noticed."""

import pytest
import torch
from ptxsim.faults import Fault

from cute_kernels import catalog
from cute_kernels.attention.args import fields
from tests.conftest import ARCH
from tests.sim.workloads import FEATURES, STRUCTURES, common
from tests.sim.workloads.attention import call, traits_of

SCENARIOS = FEATURES["attention"]()
CALLS = {f"{s.name}: {case.name}": case for s in SCENARIOS for case in s.calls}


def skips(case):
    """Whether the result without the keys that a kernel leaves out is what the case expects."""
    return case.kept or case.skip and case.function == "context"


@pytest.mark.parametrize("name", [name for name, case in CALLS.items() if not skips(case)])
def test_public_functions_give_what_a_case_expects(name):
    """On CPU tensors they run the reference, which leaves out nothing where softmax may skip."""
    assert call(CALLS[name])[1] <= 1


def test_counters_and_types_of_a_launch_are_looked_at():
    with pytest.raises(Fault, match="after the launch counter 1 is 3"):
        common.check_zero([torch.tensor([0, 3])], "after")
    op, spec = next(kernel for kernel in catalog.shipped(ARCH) if kernel[0] == "attention.decode")
    named = {name: torch.zeros(1, dtype=torch.int32) for name in fields(spec)}
    counters, scratch = common.scratch_of(op, spec, list(named.values()))
    assert counters[0] is named["counters"] and scratch[0] is named["o_partial"]
    with pytest.raises(Fault, match="kv_lens: torch.uint32"):
        common.scratch_of(op, spec, list((named | {"kv_lens": torch.zeros(1, dtype=torch.uint32)}).values()))


def test_structures_are_few_and_have_every_type_and_head_dim():
    shipped = [spec for op, spec in catalog.shipped(ARCH) if op.startswith("attention")]
    found = STRUCTURES["attention"](shipped)
    assert len(found) <= 33
    for facts in (
        lambda spec: traits_of(spec).same["kv_dtype"],
        lambda spec: (traits_of(spec).decodes, spec.head_dim_qk, spec.head_dim_vo),
        lambda spec: (traits_of(spec).decodes, traits_of(spec).general, traits_of(spec).few_rows),
    ):
        assert {facts(spec) for spec in found} == {facts(spec) for spec in shipped}
