"""Execute PTX on the CPU: kernels for NVIDIA GPUs run without one, and races, deadlocks and stray accesses are faults
that name the instruction."""

from .call import BEYOND, Global, KernelLaunch, TensorMap
from .faults import Deadlock, Fault, Livelock, NotModelled
from .kernel import CompiledKernel, TiledArray, launch, run_all
from .machine import MODES
from .runner import RunResult, run

__all__ = [
    "BEYOND", "MODES", "CompiledKernel", "Deadlock", "Fault", "Global", "KernelLaunch", "Livelock", "NotModelled",
    "RunResult", "TensorMap", "TiledArray", "launch", "run", "run_all",
]  # fmt: skip
__version__ = "0.1.0"
