"""Each tensor of each public function in every other layout, alone, on a Hopper GPU: what compiled code makes of it."""

import pytest
import torch

from tests.support.gpu import CUDA
from tests.support.layout_calls import CALLS, FUNCTION, UNSERVED, strict
from tests.support.layouts import Bench, all_odd, faults_of_call, with_odd_strides
from tests.support.lone_calls import CALLS as LONE
from wrappers.host.machine import HostMachine

SERVED = [names for names in CALLS if names not in UNSERVED]


@pytest.mark.parametrize("function, call", SERVED, ids=[", ".join(names) for names in SERVED])
def test_one_tensor_differs(function, call):
    bench = Bench(FUNCTION[function], CALLS[function, call](), CUDA, HostMachine)
    faults = faults_of_call(bench, strict=strict(function, call))
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", LONE)
def test_strides_of_size_1(name):
    function, make = LONE[name]
    torch.manual_seed(0)
    bench = Bench(function, make(), CUDA, HostMachine)
    assert not faults_of_call(bench, with_odd_strides)
    assert bench.run(HostMachine(), all_odd(bench.arguments)) == bench.want
