"""Promises of docs/promises.md against `data/promised.txt`, the record of version 0.1.0: names, arguments, the command.

python -m tests.project.test_promises    writes the record anew, for a version that may break promises
"""

import argparse
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wrappers
from cute_kernels import cli

RECORD = Path(__file__).resolve().parents[1] / "data" / "promised.txt"
KINDS = {"POSITIONAL_ONLY": "/", "POSITIONAL_OR_KEYWORD": "", "KEYWORD_ONLY": "*", "VAR_POSITIONAL": "..."}
NONE = inspect.Parameter.empty


def arguments(function: Callable[..., Any]) -> list[str]:
    """Return each argument but self: `name`, `name=default`, `*name=default` (keyword-only), `...args`, `**kwargs`."""
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        value = parameter.default
        default = "" if value is NONE else f"={value.__name__ if inspect.isfunction(value) else repr(value)}"
        found.append(f"{KINDS.get(parameter.kind.name, '**')}{name}{default}")
    return found


def promised() -> dict[str, list[str]]:
    """Return each public function, method and field, verb and option of the present code, with its arguments."""
    found: dict[str, list[str]] = {}
    for name in wrappers.__all__:
        value = getattr(wrappers, name)
        if not callable(value):
            continue
        if not inspect.isclass(value):
            found[name] = arguments(value)
            continue
        found[name] = arguments(value) if not hasattr(value, "__members__") else sorted(value.__members__)
        for method, function in inspect.getmembers(value, inspect.isfunction):
            if not method.startswith("_") and function.__module__.startswith("wrappers"):
                found[f"{name}.{method}"] = arguments(function)
    parser = cli.arguments()
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for verb, sub in verbs.choices.items():
        found[f"cute-kernels {verb}"] = sorted(
            " ".join(action.option_strings) or action.dest for action in sub._actions if action.dest != "help"
        )
    return found


def written(content: dict[str, list[str]]) -> str:
    return "".join(f"{name}: {'; '.join(values)}\n" for name, values in sorted(content.items()))


def read(text: str) -> dict[str, list[str]]:
    lines = (line.partition(": ") for line in text.splitlines())
    return {name.rstrip(":"): [value for value in values.split("; ") if value] for name, _, values in lines}


def broken(before: dict[str, list[str]], now: dict[str, list[str]]) -> list[str]:
    """Return the promises of `before` that `now` does not keep."""
    problems = [f"{name} is gone" for name in before.keys() - now.keys()]
    for name in before.keys() & now.keys():
        old, new = before[name], now[name]
        if name.startswith("cute-kernels ") or all(value.isupper() for value in old):  # options and members: any order
            problems += [f"{name}: {value} is gone" for value in old if value not in new]
            continue
        places = [value for value in old if not value.startswith(("*", "..."))]
        if [value for value in new if not value.startswith(("*", "..."))][: len(places)] != places:
            problems.append(f"{name}: positions {', '.join(places)} became {', '.join(new)}")
        problems += [f"{name}: {value} is gone" for value in old if value.startswith(("*", "...")) and value not in new]
        added = [value for value in new if value not in old and not value.startswith(("**", "..."))]
        problems += [f"{name}: the new argument {value} has no default" for value in added if "=" not in value]
    return sorted(problems)


def test_promises_are_kept():
    assert broken(read(RECORD.read_text()), promised()) == []


def test_every_public_name_is_promised():
    """A new name is promised by the version that first has it: write the record anew."""
    assert promised().keys() - read(RECORD.read_text()).keys() == set()


@pytest.mark.parametrize(
    ("now", "problem"),
    [
        ({"f": ["a", "b=1", "*c=2"]}, None),
        ({"f": ["a", "b=1", "d=3", "*c=2", "*e=4"], "g": []}, None),
        ({}, "f is gone"),
        ({"f": ["b=1", "a", "*c=2"]}, "positions"),
        ({"f": ["a", "d=3", "b=1", "*c=2"]}, "positions"),
        ({"f": ["a", "b=2", "*c=2"]}, "positions"),
        ({"f": ["a", "*b=1", "*c=2"]}, "positions"),
        ({"f": ["a", "b=1"]}, r"\*c=2 is gone"),
        ({"f": ["a", "b=1", "d", "*c=2"]}, "the new argument d has no default"),
    ],
)
def test_broken_promises_are_seen(now, problem):
    before = {"f": ["a", "b=1", "*c=2"]}
    found = broken(before, read(written(now)))
    assert found == [] if problem is None else any(re.search(problem, said) for said in found)


def test_gone_options_are_seen():
    assert broken({"cute-kernels x": ["--a", "--b"]}, {"cute-kernels x": ["--b", "--c"]}) == [
        "cute-kernels x: --a is gone"
    ]


if __name__ == "__main__":
    RECORD.write_text(written(promised()))
