"""Each tensor of each public function in every other layout, alone, and strides of dimensions of size 1."""

import pytest
import torch

import wrappers
from tests.support.bad_values import Kernels, one_thread  # noqa: F401
from tests.support.layout_calls import CALLS, FUNCTION, UNREAD, UNREAD_BY, UNSERVED, strict, tensors_taken
from tests.support.layouts import (
    Bench,
    all_odd,
    faults_of_call,
    faults_of_sharing,
    odd,
    operands_of,
    other_strides,
    variations,
    with_odd_strides,
)
from tests.support.lone_calls import CALLS as LONE
from tests.support.lone_calls import DECODE, U8, packed, rows, table
from wrappers.host import machine
from wrappers.own.registry import ATTENTION, row_of

MACHINES = {"cpu": None, "kernels": Kernels}
FIRST = dict(reversed(CALLS))  # function -> its first call
NOT_COMPARED = {"src_page_table", "block_table", "cos_sin_cache"}  # with an output, once there is a plan
WRITING = [names for names in CALLS if names not in UNSERVED]


def on_machines():
    """Yield each call on each machine. With --all, the CPU makes all calls that kernels serve, else the first one of
    each function: it computes with torch, which knows strides."""
    for function, call in CALLS:
        for where in MACHINES:
            later = where == "cpu" and (function, call) not in UNSERVED and call != FIRST[function]
            name = f"{function}, {call}-{where}"
            marks = [pytest.mark.kernels, pytest.mark.full] if later else ()
            yield pytest.param(function, call, where, id=name, marks=marks)


@pytest.mark.parametrize("function, call, where", on_machines())
def test_one_tensor_differs(function, call, where):
    """On the CPU, a call that kernels serve is not made with equal values, too: emulated kernels use the reference."""
    served = (function, call) not in UNSERVED
    if where == "cpu" or served:
        bench = Bench(FUNCTION[function], CALLS[function, call](), new=MACHINES[where])
        forms = other_strides if where == "cpu" and served else variations
        faults = faults_of_call(bench, forms, strict(function, call))
        assert not faults, "\n".join(faults)


@pytest.mark.parametrize("function, call", WRITING, ids=[", ".join(names) for names in WRITING])
def test_a_row_in_the_memory_of_an_output_is_refused(function, call):
    """Attention compares an output with other tensors than the query when it makes its plan."""
    always = row_of(FUNCTION[function]).family != ATTENTION and not function.startswith("flash_attn")
    bench = Bench(FUNCTION[function], CALLS[function, call](), new=Kernels)
    faults = faults_of_sharing(bench, always, UNREAD | NOT_COMPARED)
    assert not faults, "\n".join(faults)


def test_every_tensor_is_given():
    """A tensor that no call gives could have any fault."""
    given = {(function, o.argument) for (function, _), make in CALLS.items() for o in operands_of(make())}
    taken = {(function, name) for function in FUNCTION for name in tensors_taken(function) if name not in UNREAD}
    assert taken - UNREAD_BY <= given


@pytest.mark.parametrize("name", LONE)
def test_strides_of_size_1(name):
    """They address nothing, so any value is right, whatever alignment the other strides need."""
    function, make = LONE[name]
    torch.manual_seed(0)
    bench = Bench(function, make(), new=Kernels)
    assert not faults_of_call(bench, with_odd_strides)
    assert bench.run(Kernels(), all_odd(bench.arguments)) == bench.want


def test_a_refusal_for_another_reason_is_told():
    """Though strides of dimensions of size 1 are odd, too."""
    given = table(**DECODE)
    given["kv_cache"] = tuple(odd(t) for t in given["kv_cache"])
    with machine.override(Kernels()):
        wrappers.trtllm_batch_decode_with_kv_cache(**given)
        with pytest.raises(TypeError, match="^seq_lens: dtype torch.int64, must be one of"):
            wrappers.trtllm_batch_decode_with_kv_cache(**given | {"seq_lens": given["seq_lens"].long()})


def test_what_tma_cannot_address_is_refused_with_the_reason():
    """Rows of 72 bytes: 64 of codes and 8 of scale factors of one parent. Strides of other dimensions are not odd."""
    parent = torch.zeros(3, 2, 16, 72, dtype=U8)
    cache, factors = (parent[..., :64],) * 2, (parent[..., 64:],) * 2
    given = packed(**DECODE) | {"query": rows(1, 2, 128), "kv_cache": cache, "kv_cache_sf": factors, "out": None}
    need = "all except the last must be multiples of 16, since kernels copy 16 aligned bytes at a time"
    with (
        machine.override(Kernels()),
        pytest.raises(ValueError, match=rf"^kv_cache \(K\): strides \(2304, 1152, 72, 1\) \(logical order\), {need}"),
    ):
        wrappers.trtllm_batch_decode_with_kv_cache(**given)
