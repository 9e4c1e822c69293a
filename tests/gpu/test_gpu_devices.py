"""Several GPUs in one process: every public function on the second one while the first is current, from two threads at
once, and captured. A call gives the same bits on equal devices, and those of its reference within its tolerance."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from bench.cases import attention as cases
from bench.cases import topk
from bench.cases.cache_write import copied
from bench.cases.topk import TopKCase
from tests.support import gpu
from tests.support.gpu import in_threads
from wrappers.host import machine


def _hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index) == (9, 0)


pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2 or not (_hopper(0) and _hopper(1)),
    reason="needs two sm_90 devices",
)

FIRST, SECOND = "cuda:0", "cuda:1"
DECODING = cases.AttentionCase(
    "", q_lens=(1, 1, 1, 1), kv_lens=(2000, 1, 0, 300), heads_q=8, heads_kv=2, page_size=64, sink=True,
    function="decode",
)  # fmt: skip
ATTENTION = {
    "context": replace(cases.EDGE["odd"], kv_lens=(1, 67, 1310, 257)),
    "context, head_dim 128": replace(cases.EDGE["plain"], head_dim_qk=128, head_dim_vo=128, kv_lens=(190, 370)),
    "decode": DECODING,
    "decode, offsets": replace(DECODING, q_lens=(3, 1, 0, 2), head_dim_qk=128, head_dim_vo=128),
    "decode, e4m3": replace(DECODING, kv_dtype="fp8"),
    "decode, nvfp4": replace(DECODING, kv_dtype="nvfp4", heads_q=32),
    "decode, invariant": replace(DECODING, invariant=True, kv_lens=(9000, 1, 0, 300)),
    "xqa": replace(DECODING, function="xqa", lse=False),
}
TOP_K = {
    f"{function}, {width}": TopKCase(function, rows=6, width=width, k=100, data="coarse", lengths="mixed", next_n=3)
    for function in topk.FUNCTIONS
    for width in (700, 70_000)  # in a CTA, over several
}
NAMES = [*ATTENTION, *TOP_K]


class Call(NamedTuple):
    """inputs: on the CPU. run: of inputs on a device, the results by name, copies. check: of these, on any device,
    that they are right."""

    inputs: dict[str, Any]
    run: Callable[[dict[str, Any]], dict[str, Any]]
    check: Callable[[dict[str, Any]], None]

    @staticmethod
    def of(name: str) -> "Call":
        if name in TOP_K:
            top_k = TOP_K[name]
            given = topk.make_inputs(top_k)
            with topk.on_reference():
                wanted = topk.call(top_k.function, given)
            there = partial(topk.call, top_k.function)
            return Call(given, there, lambda got: topk.same(on_cpu(got), wanted))
        case = ATTENTION[name]
        inputs, want = gpu.call_of(case, "cpu")
        return Call(
            inputs,
            lambda there: dict(zip(("o", "lse"), gpu.run(case.function, there), strict=True)),
            lambda got: gpu.as_expected(case, [*on_cpu(got).values()], want),
        )


def on_cpu(results: dict[str, Any]) -> dict[str, Any]:
    return {name: None if t is None else t.cpu() for name, t in results.items()}


def same(a: dict[str, Any], b: dict[str, Any], what: object = "") -> None:
    gpu.same(list(on_cpu(a).values()), list(on_cpu(b).values()), what)


@pytest.fixture(autouse=True)
def first_is_current():
    """Nothing leaves another device current; every test has plans, scratch and counters of its own."""
    with torch.cuda.device(0), machine.override(machine.HostMachine()):
        yield
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_current_device_does_not_matter(name):
    """The first call of a process, too, is on the device that is not current."""
    call = Call.of(name)
    results = []
    for device, current in ((SECOND, 0), (FIRST, 0), (FIRST, 1), (SECOND, 1), (SECOND, 0)):
        inputs = copied(call.inputs, device)
        with torch.cuda.device(current):
            results.append(call.run(inputs))
            assert torch.cuda.current_device() == current
        assert all(t is None or t.device == torch.device(device) for t in results[-1].values())
        call.check(results[-1])
    for other in results[1:]:
        same(other, results[0], name)


def test_devices_in_turn():
    """Calls on both devices under way at a time, each with plans and scratch of its own."""
    calls = {(name, device): Call.of(name) for name in NAMES for device in (FIRST, SECOND)}
    inputs = {key: copied(call.inputs, key[1]) for key, call in calls.items()}
    found: dict[Any, list[Any]] = {key: [] for key in calls}
    for _ in range(3):
        for key, call in calls.items():
            found[key].append(call.run(inputs[key]))
    for (name, device), results in found.items():
        calls[name, device].check(results[0])
        for other in (*results[1:], *found[name, FIRST]):
            same(other, results[0], (name, device))


@pytest.mark.parametrize("own", [True, False], ids=["device of the thread", "first device current"])
def test_threads(own):
    """Two threads, each on a device of its own, meet every function for the first time at once, then again."""
    calls = {name: Call.of(name) for name in NAMES}
    devices = (FIRST, SECOND)
    inputs = [{name: copied(call.inputs, device) for name, call in calls.items()} for device in devices]
    results: list[dict[str, list[Any]]] = [{name: [] for name in NAMES} for _ in devices]
    torch.cuda.synchronize(0), torch.cuda.synchronize(1)

    def work(index: int) -> None:
        stream = torch.cuda.Stream(index)  # which makes its device current
        with torch.cuda.stream(stream), torch.cuda.device(index if own else 0):
            for _ in range(10):
                for name, call in calls.items():
                    results[index][name].append(call.run(inputs[index][name]))
        torch.cuda.synchronize(index)

    in_threads(work, 2)
    for name, call in calls.items():
        call.check(results[0][name][0])
        for got in (*results[0][name], *results[1][name]):
            same(got, results[0][name][0], name)


LENGTHS = {"context": "seq_lens", "decode": "seq_lens", "xqa": "seq_lens", topk.PAGE_TABLE: "lengths",
           topk.RAGGED: "lengths", topk.PREFILL: "row_ends", topk.DECODE: "seq_lens"}  # fmt: skip
CAPTURED = [name for name in NAMES if name.split(",")[0] in LENGTHS]


@pytest.mark.parametrize("known", [False, True], ids=["first call", "known call"])
@pytest.mark.parametrize("name", CAPTURED)
def test_graph_on_the_second_device(name, known):
    """Captured on a stream of the second device while the first is current, at lengths of 1; replayed at others, from
    either device. The first call of a plan may be the captured one, once the kernel is loaded."""
    call, field = Call.of(name), LENGTHS[name.split(",")[0]]
    inputs = copied(call.inputs, SECOND)
    want = call.run(inputs)
    if not known:
        machine.current.plans.clear(), machine.current.counter_pools.clear(), machine.current.split_scratch.clear()
    lengths = inputs[field].clone()
    inputs[field].fill_(1)
    torch.cuda.synchronize(1)
    graph, results = torch.cuda.CUDAGraph(), {}
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(1)):
        results |= call.run(inputs)
    for current in (0, 1, 0):
        for lens in (torch.ones_like(lengths), lengths):
            with torch.cuda.device(current):
                inputs[field].copy_(lens)
                torch.cuda.synchronize(1)
                with torch.cuda.device(1):
                    graph.replay()
                    torch.cuda.synchronize()
        same(results, want, name)


@pytest.mark.parametrize("name", ["context", "decode", f"{topk.PAGE_TABLE}, 700"])
def test_tensors_of_two_devices_are_refused(name):
    """Before any launch, by a name: a known plan or not."""
    call = Call.of(name)
    inputs = copied(call.inputs, SECOND)
    field = LENGTHS[name.split(",")[0]]
    for _ in range(2):
        with pytest.raises(ValueError, match=field):
            call.run(inputs | {field: inputs[field].to(FIRST)})
        call.check(call.run(inputs))
