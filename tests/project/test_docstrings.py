"""Every public name has a docstring with an example, which runs on the CPU after `from wrappers import *`, and explains
each of its parameters."""

import doctest
import enum
import inspect
import re
import sys

import pytest
import torch

import wrappers
from tools import reference

pytestmark = pytest.mark.by_shape
PUBLIC = {name: getattr(wrappers, name) for name in wrappers.__all__}


@pytest.mark.parametrize("name", wrappers.__all__)
def test_example_runs(name):
    found = doctest.DocTestFinder(recurse=True).find(PUBLIC[name], name, globs=PUBLIC | {"torch": torch})
    assert found[0].examples, "no example"
    runner = doctest.DocTestRunner()
    for test in found:
        runner.run(test)
    assert not runner.failures


def callables() -> dict[str, object]:
    """Return the public functions, classes and methods by name: those that have a signature of ours."""
    found = {}
    for name, thing in PUBLIC.items():
        if not isinstance(thing, enum.EnumMeta):
            found[name] = thing
            if isinstance(thing, type):
                found |= {f"{name}.{method}": function for method, function in reference.methods(thing)}
    return found


CALLABLES = callables()


def explanation(name: str, seen: frozenset[str] = frozenset()) -> str:
    """Return the docstring of a name, and those of the names to which it refers with "as in `NAME`"."""
    text = " ".join((inspect.getdoc(CALLABLES[name]) or "").split(">>>")[0].split())
    others = [other for other in re.findall(r"\bas in `([\w.]+)`", text) if other not in seen | {name}]
    return " ".join([text, *(explanation(other, seen | {name}) for other in others)])


def unexplained(name: str) -> list[str]:
    parameters = [p for p in inspect.signature(CALLABLES[name]).parameters if p != "self"]
    text = explanation(name)
    return [p for p in parameters if not re.search(rf"\b{p}\b", text)]


@pytest.mark.parametrize("name", CALLABLES)
def test_each_parameter_is_explained(name):
    assert unexplained(name) == []


def test_a_parameter_without_an_explanation_is_found(monkeypatch):
    def first(q, lens):
        """Do this. q: a tensor.

        >>> first(q, lens)
        """

    def second(q, out):
        """Do that. Other arguments are as in
        `first`."""

    def third(q, out):
        """Do it as `first` does."""

    monkeypatch.setattr(sys.modules[__name__], "CALLABLES", {f.__name__: f for f in (first, second, third)})
    assert [unexplained(name) for name in ("first", "second", "third")] == [["lens"], ["out"], ["q", "out"]]
