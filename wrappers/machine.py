"""The machine that calls run on: all that the host asks of CUDA and the runtime, and what it keeps from call to call.

One object, `current`, stands for it; tests and the simulator put another in its place with `override`. What a launch
asks are torch's own functions, as attributes of the class, so asking costs what torch does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import runtime

# torch without CUDA lacks these
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)
_get_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # a third of its time


class Machine:
    """What is kept: `plans` by the static facts of a call, of all public functions; `offsets` of queries of equal
    length, by device, batch and length; `tickets` and `parts`, counters and scratch memory, see `scratch`."""

    max_plans = 4096  # `plans` is emptied at this size, `offsets` kept no longer: a caller may vary shapes for ever
    is_capturing = staticmethod(torch.cuda.is_current_stream_capturing)  # asked of the current device's stream
    raw_stream = staticmethod(_raw_stream)  # of a device, by its index: a handle
    current_device = staticmethod(_get_device)
    device_count = staticmethod(torch.cuda.device_count)
    on = staticmethod(torch.cuda.device)  # a context in which a device is the current one

    def __init__(self) -> None:
        self.plans: dict[tuple[Any, ...], Any] = {}
        self.offsets: dict[tuple[torch.device, int, int], Any] = {}
        self.tickets: dict[torch.device, Any] = {}
        self.parts: dict[Any, tuple[Any, Any]] = {}

    def facts(self, device: torch.device) -> tuple[str, int] | None:
        """(architecture, SM count) of a device that compiled kernels serve, None for the reference."""
        if device.type != "cuda":
            return None
        return runtime.arch_of(device), torch.cuda.get_device_properties(device).multi_processor_count

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Return whether the host reads a value of the tensor without a wait for a device."""
        return tensor.is_cpu

    def kernel(self, op: str, spec: Any, arch: str) -> Callable[..., None]:
        """The compiled function, see `runtime.kernel`."""
        return runtime.kernel(op, spec, arch)

    def argument(self, tensor: torch.Tensor) -> Any:
        """A tensor in the form that compiled functions convert fastest, for those that are passed often."""
        return runtime.argument(tensor)

    def synchronize(self, device: torch.device) -> None:
        """Wait for the current stream of a device."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def keep(self, key: tuple[Any, ...], plan: Any) -> None:
        if len(self.plans) >= self.max_plans:
            self.plans.clear()
        self.plans[key] = plan


current = Machine()


@contextmanager
def override(machine: Machine) -> Iterator[Machine]:
    """Calls inside run on `machine`."""
    global current
    before, current = current, machine
    try:
        yield machine
    finally:
        current = before
