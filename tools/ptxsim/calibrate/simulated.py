"""Runs a case in the simulator."""

import numpy as np

from ..call import Call, Global, TensorMap
from ..run import run
from .case import Case, Map


def simulate(case: Case, mode: str = "eager", seed: int = 0) -> list[np.ndarray]:
    """The outputs of the case."""
    memory, arrays, addresses = Global(), {}, {}
    for number, arg in enumerate(case.args):
        if not isinstance(arg, Map):
            arrays[number] = np.array(arg, order="C")
            addresses[number] = memory.add(arrays[number], f"arg{number}")
    params: list[bytes | TensorMap] = [
        TensorMap(addresses[arg.array], arg.dims, arg.strides, arg.box, arg.format, arg.swizzle, arg.fill)
        if isinstance(arg, Map)
        else np.uint64(addresses[number]).tobytes()
        for number, arg in enumerate(case.args)
    ]
    call = Call(case.ptx, params, case.grid, case.cluster, case.shared, memory=memory)
    run(call, mode=mode, seed=seed, exact=True)
    return [arrays[number] for number in case.outputs]
