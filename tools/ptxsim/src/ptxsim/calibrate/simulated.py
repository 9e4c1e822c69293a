"""Run a case in the simulator."""

import numpy as np

from ..call import Global, KernelLaunch, TensorMap
from ..runner import run
from .case import CalibrationCase, TensorMapArg


def simulate(case: CalibrationCase, mode: str = "eager", seed: int = 0) -> list[np.ndarray]:
    """Return the outputs of the case."""
    memory, arrays, addresses = Global(), {}, {}
    for number, arg in enumerate(case.args):
        if not isinstance(arg, TensorMapArg):
            arrays[number] = np.array(arg, order="C")
            addresses[number] = memory.add(arrays[number], f"arg{number}")
    params: list[bytes | TensorMap] = [
        TensorMap(addresses[arg.array], arg.dims, arg.strides, arg.box, arg.format, arg.swizzle, arg.fill)
        if isinstance(arg, TensorMapArg)
        else np.uint64(addresses[number]).tobytes()
        for number, arg in enumerate(case.args)
    ]
    call = KernelLaunch(case.ptx, params, case.grid, case.cluster, case.shared, memory=memory)
    run(call, mode=mode, seed=seed, exact=True)
    return [arrays[number] for number in case.outputs]
