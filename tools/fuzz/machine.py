"""Machines that run only kernels of a bundle."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from bench.cases.choice import by_function
from cute_kernels import catalog, manifest
from wrappers.host import machine


class OnDemand(BaseException):
    """A kernel that no bundle holds. It is no Exception, so that the host does not take it for a refusal."""


@cache
def held(arch: str) -> frozenset[str]:
    """Return the names of the kernels of a bundle."""
    return frozenset(f"{op} {manifest.canonical(manifest.to_json(spec))}" for op, spec in catalog.shipped(arch))


class Shipped(machine.HostMachine):
    """The real machine, without kernels that would have to be compiled."""

    def kernel(self, op: str, spec: Any, arch: str) -> Callable[..., None]:
        if f"{op} {manifest.canonical(manifest.to_json(spec))}" not in held(arch):
            raise OnDemand(manifest.label(op, spec))
        return super().kernel(op, spec, arch)


@cache
def _machine(choice: str, compiles: bool) -> machine.HostMachine:
    """Return the machine of a choice of kernels: each has plans of its own."""
    return machine.HostMachine() if compiles else Shipped()


@contextmanager
def chosen(choice: str, compiles: bool, real: bool) -> Iterator[None]:
    """Choose kernels by shapes or by functions, in the block. real: whether calls run on a GPU."""
    if not real:
        yield
        return
    with machine.override(_machine(choice, compiles)):
        if choice != "function":
            yield
            return
        with by_function():
            yield
