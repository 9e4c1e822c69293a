"""The machine that calls run on: all that the host asks of CUDA and of the runtime, and what it keeps between calls.

One object, `current`, represents it; tests and the simulator replace it with `override`. A launch asks torch's own
functions, which are attributes of the class, so a query costs what it costs in torch.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import runtime

# torch without CUDA lacks these
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)
_get_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # 1/3 of the time


class HostMachine:
    """Queries to CUDA and the runtime, and state that is kept between calls.

    plans: launch plans by the static properties of a call, for all public functions.
    offsets: offsets of queries of equal length, by device, batch and length. constants, counter_pools, split_scratch,
    captures: see `scratch`. The last holds the latest capture of each stream, with the counters that it has taken.
    """

    # At this size `plans` is emptied, `offsets` and `constants` stop growing: a caller may vary shapes for ever.
    max_plans = 4096
    # 16 MiB. Each stream of a graph takes one counter for good and, if it decodes, one for each MMA warp of each CTA.
    max_counters = 1 << 22
    is_capturing = staticmethod(torch.cuda.is_current_stream_capturing)  # of the current device's stream
    raw_stream = staticmethod(_raw_stream)  # device index -> handle of its current stream
    current_device = staticmethod(_get_device)
    device_count = staticmethod(torch.cuda.device_count)
    on = staticmethod(torch.cuda.device)  # a context in which the device is the current one

    def __init__(self) -> None:
        self.plans: dict[tuple[Any, ...], Any] = {}
        self.offsets: dict[tuple[torch.device, int, int], Any] = {}
        self.constants: dict[tuple[Any, ...], torch.Tensor] = {}
        self.counter_pools: dict[torch.device, Any] = {}
        self.split_scratch: dict[Any, tuple[Any, Any]] = {}
        self.captures: dict[Any, tuple[int, dict[int, tuple[Any, int]]]] = {}

    def device_info(self, device: torch.device) -> tuple[str, int] | None:
        """Return (architecture, SM count) of a device that compiled kernels serve, else None (the reference)."""
        if device.type != "cuda":
            return None
        return runtime.arch_of(device), torch.cuda.get_device_properties(device).multi_processor_count

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Return whether the host reads a value of the tensor without a wait for a device."""
        return tensor.is_cpu

    def uncaptured_stream(self, device: torch.device) -> int | None:
        """Return the handle of a device's current stream, None while a graph captures it; 0 for the host."""
        if device.type != "cuda":
            return 0
        if device.index != self.current_device():  # only the current device can be asked whether its stream captures
            with self.on(device):
                return self.uncaptured_stream(device)
        return None if self.is_capturing() else self.raw_stream(device.index)

    def capture_id(self, stream: int) -> int:
        """Return the id of the capture of a stream, by its handle. No other capture of the process has it."""
        return runtime.capture_id(stream)

    def may_keep(self, device: torch.device) -> bool:
        """Return whether the tensors of a call on a device's current stream may be kept after the call.

        In a capture, and in the run that torch.compile makes before its own capture, they may lie in the memory pool of
        the graph.
        """
        stream = self.uncaptured_stream(device)
        return stream is not None and not (device.type == "cuda" and _warms_up(device.index, stream))

    def current_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the current stream of a device, None for the host."""
        return torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def on_stream(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Make a stream and its device the current ones of this thread."""
        if stream is None:
            yield
        else:
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                yield

    def kernel(self, op: str, spec: Any, arch: str) -> Callable[..., None]:
        """Return the compiled function, see `runtime.kernel`."""
        return runtime.kernel(op, spec, arch)

    def argument(self, tensor: torch.Tensor) -> Any:
        """Return a tensor in the form that compiled functions convert fastest, for tensors that are passed often."""
        return runtime.argument(tensor)

    def empty(self, device: torch.device, dtype: torch.dtype, *shape: int) -> Any:
        """Return the argument for a tensor that a call lacks, of (0, *shape) elements on its device."""
        made = torch.empty(0, *shape, dtype=dtype, device=device)
        return made if self.device_info(device) is None else self.argument(made)

    def synchronize(self, device: torch.device) -> None:
        """Wait for the current stream of a device."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def keep(self, key: tuple[Any, ...], plan: Any) -> None:
        if len(self.plans) >= self.max_plans:
            self.plans.clear()
        self.plans[key] = plan


def _warms_up(index: int, stream: int) -> bool:
    """Return whether `stream` is the one on which torch.compile prepares and captures its CUDA graphs.

    torch has no public query for this. Another version of torch may name these attributes otherwise. In a thread that
    ran no such graph, `get_obj` fails an assertion.
    """
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    try:
        containers = {} if trees is None else trees.get_obj(trees.local, "tree_manager_containers")
        manager = containers[index].tree_manager if index in containers else None
        return manager is not None and manager.stream.cuda_stream == stream
    except (AssertionError, AttributeError):
        return False


current = HostMachine()


@contextmanager
def override(machine: HostMachine) -> Iterator[HostMachine]:
    """Replace the machine that calls inside the context run on."""
    global current
    before, current = current, machine
    try:
        yield machine
    finally:
        current = before
