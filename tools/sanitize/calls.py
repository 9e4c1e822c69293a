"""Make the calls of a piece, as a tool of compute-sanitizer runs them, and judge their results on the CPU."""

import torch

from bench.cases.cache_write import copied
from tools.fuzz.call import Call
from tools.fuzz.families import FAMILIES
from tools.fuzz.machine import chosen

from .pieces import ON_DEMAND, PIECES

DONE = "calls, all right"
CPU = torch.device("cpu")


def check(call: Call, device: torch.device, compiles: bool) -> None:
    """Make a call and compare it with the plain implementation. Raise AssertionError with the first difference.

    Arguments are copied as whole storages, and results are compared on the CPU, so that few kernels other than ours
    run under the tool. compiles: kernels that no bundle holds are compiled.
    """
    builds = FAMILIES[call.family].builds
    here, there = builds.build(call, CPU), builds.build(call, device)
    tree = copied(there.variants[0], device)
    with chosen(call.choice, compiles, device.type == "cuda"):
        if there.prepare is not None:
            there.prepare(tree, 0)
        results = there.call(tree)
    back, found = copied((tree, results), CPU)
    wrong = here.judge(0, back, found)
    assert not wrong, f"{wrong}: {call}"


def run(piece: str, device: torch.device) -> int:
    """Make the calls of a piece and return their number."""
    torch.zeros(1, device=device)  # the tool gives up on a process that makes no CUDA context for 10 s
    for call in PIECES[piece]:
        check(call, device, piece in ON_DEMAND)
    return len(PIECES[piece])
