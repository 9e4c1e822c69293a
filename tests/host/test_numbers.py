"""A call must not get the plan of an earlier one that has another number or flag.

Each number and flag changes alone. The changed call follows a plain one on the same machine, and gives what it gives
on a machine that has seen no call. `test_plans.py` has attention with K and V per head.
"""

import inspect
from typing import Any

import pytest
import torch

from tests.support import good_calls
from tests.support.bad_values import Kernels, one_thread  # noqa: F401
from tests.support.layout_calls import CALLS, FUNCTION, UNSERVED
from tests.support.layouts import Bench
from wrappers.own.registry import ATTENTION, row_of

OVER_LATENTS = *good_calls.MLA, good_calls.SPARSE_FWD, *good_calls.DSA
VARIED = [
    names for names in CALLS
    if names not in UNSERVED and (names[0] in OVER_LATENTS or row_of(FUNCTION[names[0]]).family != ATTENTION)
]  # fmt: skip
ABSENT = {"bool": True, "int": 3, "float": 0.5}  # by a word of the annotation of an argument that is None


@pytest.fixture
def filled():
    """Fill new memory, so that what a call leaves unwritten is the same in two calls."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def others(value: Any) -> list[Any]:
    """Return other numbers, or the other flag."""
    if isinstance(value, bool):
        return [not value]
    return [value + 1, value - 1] if isinstance(value, int) else [value / 2 + 0.25] if isinstance(value, float) else []


def changes(function: Any, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments with other values, one or, of a named tuple, one of its fields at a time."""
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        value = given.get(name, parameter.default)
        if value is None:
            found += [{name: absent} for word, absent in ABSENT.items() if word in str(parameter.annotation)][:1]
        fields = value._asdict() if hasattr(value, "_fields") else {}
        found += [{name: value._replace(**{field: x})} for field, own in fields.items() for x in others(own)]
        found += [{name: x} for x in others(value)]
    return found


@pytest.mark.parametrize("function, call", VARIED, ids=[", ".join(names) for names in VARIED])
def test_one_number_differs(function, call, filled):
    bench = Bench(FUNCTION[function], CALLS[function, call](), new=Kernels)
    assert not bench.want.refused
    for change in changes(FUNCTION[function], bench.arguments):
        given = bench.arguments | change
        assert bench.run(bench.known, given) == bench.run(Kernels(), given), change
    assert bench.run(bench.known, bench.arguments) == bench.want
