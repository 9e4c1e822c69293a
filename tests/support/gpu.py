"""Shared parts of the GPU tests of both operator families: cases with the features they use, calls, graphs, threads."""

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.cases import attention as cases
from bench.cases import outputs
from bench.cases.attention import AttentionCase
from cute_kernels.attention.request import KernelRequest
from cute_kernels.attention.spec import PACK_GQA_MAX_Q
from tools import matrix
from wrappers import fp4
from wrappers.attention.op import serve

HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 device"
)
CUDA = torch.device("cuda", 0)
OPS = {"context": "prefill", "decode": "decode", "xqa": "xqa"}  # AttentionCase.function -> Feature.op


# ---- features that a test uses


def feature(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.feature(*names)


def problem_of(case: AttentionCase) -> KernelRequest:
    """Return the kernel request of the case."""
    q, kv, out = (t.replace("fp8", "e4m3") for t in (case.dtype, case.kv_dtype or case.dtype, case.out_dtype))
    return KernelRequest(
        q, kv, out or q, case.head_dim_qk, case.head_dim_vo, case.page_size, case.heads_q // case.heads_kv,
        max(case.q_lens), causal=case.causal, window=case.window_left >= 0, drafts=case.drafts,
        soft_cap=bool(case.soft_cap), skip=bool(case.skip), interleaved=case.interleaved,
        split_kv="never" if case.function == "context" else "fixed" if case.invariant else "always",
    )  # fmt: skip


def features(case: AttentionCase) -> tuple[str, ...]:
    """Return the names of the features that a call of the case uses."""
    op, problem = OPS[case.function], problem_of(case)
    others = {  # features that are not static facts of a kernel
        "sinks": case.sink,
        "LSE": case.lse,
        "scales on the device": bool(case.device),
        "separate K and V page tables": case.separate_tables,
        "few query tokens": problem.qhead_per_kvhead > 1 and problem.rows <= PACK_GQA_MAX_Q,
        "several query tokens": problem.rows > 1,
    }
    names = {f"{op} requests block table"} | {f"{op} with {name}" for name, has in others.items() if has}
    names &= matrix.NAMES
    return (*sorted(names), *(f.name for f in matrix.FEATURES if f.op == op and f.used_by(problem)))


def marked(case: AttentionCase, name: str = "") -> Any:
    """Return the case as a test parameter with the case's features as marks."""
    return pytest.param(case, id=name or case.name, marks=feature(*features(case)))


def grid(base: AttentionCase, *axes: dict[str, dict[str, Any]]) -> list[Any]:
    """Return test parameters: `base` with every combination of changes. An axis is a dict: name -> fields of the
    case."""
    found = []
    for combination in itertools.product(*(axis.items() for axis in axes)):
        changes = {field: value for _, change in combination for field, value in change.items()}
        found.append(marked(replace(base, **changes), "-".join(name for name, _ in combination if name) or "plain"))
    return found


def values(field: str, *found: Any) -> dict[str, dict[str, Any]]:
    """Return an axis of one field."""
    return {f"{field}={str(value).replace(' ', '')}": {field: value} for value in found}


def dims(*pairs: tuple[int, int]) -> dict[str, dict[str, Any]]:
    return {f"d{qk}x{vo}": {"head_dim_qk": qk, "head_dim_vo": vo} for qk, vo in pairs}


# ---- calls and their results


Inputs = dict[str, Any]  # keyword arguments of a public function


def call_of(case: AttentionCase, device: Any, seed: int = 0) -> tuple[Inputs, tuple[torch.Tensor, torch.Tensor]]:
    """Return (arguments of the case's function, the reference's (o, lse) in fp32)."""
    problem = cases.make_call(case, device, seed)
    return cases.FUNCTIONS[case.function][1](case, problem), cases.expected(case, problem)


def run(function: str, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a call and return (o (T, Hq, Dvo), lse or None) as copies. The outputs are poisoned first, so that a second
    run cannot pass with the results of the first."""
    for t in (inputs.get(name) for name in ("out", "output", "lse")):
        if isinstance(t, fp4.FP4Tensor):
            t.data.fill_(0x7F)
            t.scale.view(torch.uint8).fill_(0x7F)
        elif t is not None and t.element_size() == 1:
            t.view(torch.uint8).fill_(0x7F)  # e4m3's NaN
        elif t is not None:
            t.fill_(math.nan)
    result = cases.FUNCTIONS[function][0](**inputs)
    if function == "xqa":
        result = inputs["output"]
    o, lse = result if inputs.get("return_lse") else (result, None)
    if isinstance(o, fp4.FP4Tensor):
        o = fp4.load(o, inputs["o_sf_scale"])
    return o.flatten(0, -3).clone(), None if lse is None else lse.clone()


def close(
    got: Sequence[Any], want: Sequence[Any], rtol: float, atol: Any, what: object = "",
    limit_lse: float = cases.LSE_TOLERANCE,
) -> None:  # fmt: skip
    """Compare (o, lse or None) with fp32. atol: of o, a number or a tensor that broadcasts with o."""
    limit = torch.as_tensor(atol, device=want[0].device) + rtol * want[0].abs()
    off = ~((got[0].float() - want[0]).abs() <= limit)  # NaN is off
    if off.any():
        where = off.nonzero()[0].tolist()
        pair = f"{float(got[0][tuple(where)])}, must be {float(want[0][tuple(where)])}"
        raise AssertionError(f"{what}: {int(off.sum())} of {off.numel()} outputs are off, first {where}: {pair}")
    if got[1] is not None:
        torch.testing.assert_close(got[1], want[1], rtol=limit_lse, atol=limit_lse, msg=lambda text: f"{what}: {text}")


def as_expected(case: AttentionCase, got: Sequence[Any], want: Sequence[Any]) -> None:
    """Compare the result of a case with its reference."""
    close(got, want, 0.0, case.limit(want[0]), case.name, case.lse_tolerance)


def same(a: Sequence[Any], b: Sequence[Any], what: object = "") -> None:
    """Assert that results are equal. An lse that either side lacks is not compared."""
    for x, y in zip(a, b, strict=True):
        if x is not None and y is not None:
            x, y = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (x, y))
            assert torch.equal(x, y), what


def matches_reference(case: AttentionCase, device: Any, seed: int = 0) -> None:
    """Assert that a call is close to the reference, and has the same bits when it is repeated."""
    inputs, want = call_of(case, device, seed)
    first = run(case.function, inputs)
    as_expected(case, first, want)
    same(run(case.function, inputs), first, case.name)


def writes_bytes(known: outputs.KnownOutput, start: int) -> None:
    """Compare an NVFP4 output, and the memory around it, byte by byte."""
    got, want = outputs.poisoned(known.o.shape, start, known.o.device), outputs.quantised(known.o, start)
    serve(known.problem._replace(out=got, out_sf_scale=outputs.SCALE))
    assert all(map(torch.equal, outputs.bytes_of(got), outputs.bytes_of(want)))


# ---- graphs and threads


def captured(function: Callable[..., Any], inputs: dict[str, Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a CUDA graph of one call, and the result that a replay overwrites."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(**inputs)
    return graph, result


def repeated(device: torch.device, work: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that does `work` again: on a GPU it replays a graph and returns the result of the capture,
    overwritten; on the CPU it calls `work`."""
    if device.type == "cpu":
        return work
    work()  # loads or compiles the kernels
    graph, result = captured(work, {})

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def without_values(device: torch.device, work: Callable[[torch.device], None]) -> None:
    """Run work on a device without reading tensor values: on the meta device instead of the CPU. On a GPU nothing may
    wait for the device, except in a first call, which prepares memory."""
    if device.type == "cpu":
        return work(torch.device("meta"))
    work(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        work(device)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Run work(0) ... work(count - 1) concurrently, each on its own stream. Raise the first error."""
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                work(index)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
