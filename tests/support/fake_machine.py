"""A machine for tests: calls on CPU tensors take the compiled kernel's path, to kernels written in torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.support.declared import check_launch
from wrappers.host.machine import HostMachine
from wrappers.host.overlap import folded


class Broken(BaseException):
    """A broken promise of a kernel's caller. Compiled code would not notice it, and the host must not mistake it for a
    refusal, as it would an Exception."""


def promised(condition: Any, what: str = "") -> None:
    if not condition:
        raise Broken(what)


def promised_apart(arguments: dict[str, Any], *written: str) -> None:
    """Check that no output has two elements at one address. written: the names of outputs, which may be absent."""
    for name in written:
        promised(name not in arguments or not folded(arguments[name]), name)


class FakeMachine(HostMachine):
    """GPUs of `sms` SMs for CPU tensors, which are on device None.

    kernel: (op, spec) -> a function that takes a launch's arguments, each of which has been checked as compiled code
    does (`declared`). Tests may set between calls: `devices` (their
    number), `device` (the current one), its `stream`, and whether that is `capturing`, or `warming` up for a capture of
    torch.compile. While another device is current, a launch or a query for the stream is an error. host_scales: whether
    scales of one element lie in host memory, beside data of the GPU.
    """

    checks_launches = True  # False: the kernels are none of this project
    max_counters = 1 << 14  # a test takes few, and the bytes of all are compared or hashed at each launch

    def __init__(self, kernel: Callable[[str, Any], Callable[..., Any]], arch: str = "sm_90a", sms: int = 132):
        super().__init__()
        self.of = kernel
        self.known = arch, sms
        self.devices = 1
        self.device: int | None = None
        self.stream = 0
        self.capturing = self.warming = False
        self.capture = 0  # its id
        self.host_scales = False
        self.waits: list[torch.device] = []  # devices that were waited for

    def device_info(self, device: torch.device) -> tuple[str, int]:
        promised(device == torch.device("cpu"))
        return self.known

    def is_host(self, tensor: torch.Tensor) -> bool:
        return self.host_scales and tensor.is_cpu

    def kernel(self, op: str, spec: Any, arch: str) -> Callable[..., Any]:
        promised(arch == self.known[0])
        fn = self.of(op, spec)

        def launch(*flat: Any) -> None:
            promised(self.device is None, "launched on the current device, which is not the tensors'")
            if self.checks_launches:
                check_launch(op, spec, flat)
            fn(*flat)

        return launch

    def argument(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def is_capturing(self) -> bool:  # type: ignore[override]
        promised(self.device is None, "asked of another device")
        return self.capturing

    def raw_stream(self, index: int | None) -> int:  # type: ignore[override]
        promised(index is None, "the stream of another device")
        return self.stream

    def uncaptured_stream(self, device: torch.device) -> int | None:
        return None if self.capturing else self.stream

    def capture_id(self, stream: int) -> int:
        promised(self.capturing, "asked outside a capture")
        return self.capture

    def may_keep(self, device: torch.device) -> bool:
        return not self.capturing and not self.warming

    def current_device(self) -> int | None:  # type: ignore[override]
        return self.device

    def device_count(self) -> int:  # type: ignore[override]
        return self.devices

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:  # type: ignore[override]
        before, self.device = self.device, device.index
        try:
            yield
        finally:
            self.device = before

    def synchronize(self, device: torch.device) -> None:
        self.waits.append(device)
