"""Count the host's work in a call. Counts do not depend on how fast or how busy the machine is; times do."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode

import cute_kernels
import wrappers
from wrappers.host import plain

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


# Operators that launch no kernel: views and allocations.
FREE = ("empty", "empty_like", "new_empty", "view", "as_strided", "transpose", "select", "slice", "unsqueeze",
        "_unsafe_view", "expand", "alias", "detach", "unflatten", "permute")  # fmt: skip
# Operators for which the host reads a value of a tensor or copies one of its own to a device: they wait for a GPU, and
# no CUDA graph takes them.
WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "lift_fresh", "lift", "masked_select", "_unique2",
         "unique_dim", "unique_consecutive"}  # fmt: skip


class Seen(TorchDispatchMode):
    """A record of calls of operators: `calls` holds (operator, positional arguments, others)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))

    def names(self) -> list[str]:
        return [function.overloadpacket.__name__ for function, _, _ in self.calls]


def operators_of(call: Callable[[], Any]) -> list[str]:
    """Return the torch operators of a warm call.

    A public function takes its traced path while a dispatch mode is active. The mode is hidden from it here, so that
    the path of a plain call is seen.
    """
    call()
    with patch.object(plain, "_modes", lambda: 0), Seen() as seen:
        call()
    return seen.names()


def torch_kernels(call: Callable[[], Any]) -> list[str]:
    """Return the torch operators of a warm call that launch a kernel."""
    return [name for name in operators_of(call) if name not in FREE]


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
    """Count the work of `call` when it is warm."""
    operators = operators_of(call)
    return Work(count_functions(call), len(operators))
