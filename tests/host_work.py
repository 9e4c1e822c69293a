"""Count the host's work in a call. Counts do not depend on how fast or how busy the machine is; times do."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode

import cute_kernels
import wrappers
from wrappers import plain

FOLDERS = tuple(f"{Path(package.__file__).parent}/" for package in (wrappers, cute_kernels))
# Python 3.12 runs comprehensions inside their caller, older versions as functions; and versions differ in how often
# they enter a generator expression.
INNER = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


class Work(NamedTuple):
    """The host work of a call.

    functions: Python calls of functions in this project's files. Calls inside torch and the standard library are not
    counted, because they vary between versions. operators: torch operators, including allocations and views.
    """

    functions: int
    operators: int

    def within(self, bound: "Work") -> bool:
        """Return whether neither count exceeds its bound."""
        return self.functions <= bound.functions and self.operators <= bound.operators


class OperatorCounter(TorchDispatchMode):
    """Count the torch operators that run while this mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class KernelLister(OperatorCounter):
    """List the torch operators that launch a kernel: all but views and allocations."""

    FREE = ("empty", "empty_like", "new_empty", "view", "as_strided", "transpose", "select", "slice", "unsqueeze",
            "_unsafe_view", "expand", "alias", "detach", "unflatten", "permute")  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in self.FREE:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def torch_kernels(call: Callable[[], Any]) -> list[str]:
    """Return the torch operators of a warm call that launch a kernel. The mode is hidden, as in `host_work`."""
    call()
    with patch.object(plain, "_modes", lambda: 0), KernelLister() as seen:
        call()
    return seen.found


def count_functions(call: Callable[[], Any]) -> int:
    """Run `call` and count the Python calls of functions in this project's files."""
    count = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(FOLDERS) and code.co_name not in INNER:
            count += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count


def host_work(call: Callable[[], Any]) -> Work:
    """Count the work of `call` when it is warm: run it once to warm it up, once to count functions and once to count
    operators.

    A public function takes its traced path while a dispatch mode is active. The counting mode is hidden from it, so
    that the path of a plain call is counted.
    """
    call()
    functions = count_functions(call)
    with patch.object(plain, "_modes", lambda: 0), OperatorCounter() as operators:
        call()
    return Work(functions, operators.count)
