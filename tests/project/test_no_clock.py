"""No test reads a clock: one that asserts a time fails on a slower or busier machine. Tests of the host's work count it
(`tests/support/host_work.py`); `python -m bench` measures times."""

import ast

import pytest

from tests.conftest import ROOT

MODULES = {"time", "timeit"}
CLOCKS = {"perf_counter", "monotonic", "process_time", "thread_time", "clock_gettime", "timeit", "elapsed_time"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS}
TOOL = "shards.py"  # runs tests with a limit of time; it is no test
FOLDERS = ("tests", "tools/ptxsim/tests")
BESIDE = ROOT / "tests" / "sim"  # its commands run kernels and say how long they took
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if path.name != TOOL and (path.name.startswith("test_") or not path.is_relative_to(BESIDE))
)


def clocks(code: str, file: str) -> list[str]:
    """Return "file:line: name" for every clock that Python code imports or names, and for a deadline of Hypothesis."""
    found = []
    for node in ast.walk(ast.parse(code, file)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name in MODULES]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names if node.module in MODULES and not node.level]
        elif isinstance(node, ast.Name):
            names = [node.id] if node.id in CLOCKS else []
        elif isinstance(node, ast.Attribute):
            whole = ast.unparse(node)
            known = node.attr in CLOCKS or f".{whole}".endswith((".time.time", ".time.time_ns"))
            names = [whole] if known else []
        elif isinstance(node, ast.keyword):
            names = ["deadline"] if node.arg == "deadline" and ast.unparse(node.value) != "None" else []
        found += [f"{file}:{node.lineno}: {name}" for name in names]
    return found


def test_no_test_reads_a_clock():
    found = [line for path in FILES for line in clocks(path.read_text(), path.relative_to(ROOT).as_posix())]
    assert not found, "these read a clock: " + ", ".join(found)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import time", ["x.py:1: time"]),
        ("import os, timeit as t", ["x.py:1: timeit"]),
        ("from time import sleep as s, perf_counter", ["x.py:1: time.sleep", "x.py:1: time.perf_counter"]),
        ("def test():\n    assert bench.timing.time.time() < 1", ["x.py:2: bench.timing.time.time"]),
        ("def test():\n    assert time.time() - start < 1", ["x.py:2: time.time"]),
        ("def test():\n\n    assert runtime.time.perf_counter_ns() < 1", ["x.py:3: runtime.time.perf_counter_ns"]),
        ("assert monotonic() < 1", ["x.py:1: monotonic"]),
        ("assert begin.elapsed_time(end) < 1", ["x.py:1: begin.elapsed_time"]),
        ("@settings(max_examples=9, deadline=200)\ndef test(): pass", ["x.py:1: deadline"]),
        ("from .time import x\nfrom bench import timing\ntimed = case.time_us\nsettings(deadline=None)", []),
    ],
)  # fmt: skip
def test_clocks_are_seen(code, found):
    assert clocks(code, "x.py") == found


def test_properties_have_no_deadline():
    """The profile that conftest.py loads holds for every property, whichever files are selected."""
    hypothesis = pytest.importorskip("hypothesis")
    assert hypothesis.settings().deadline is None
    assert hypothesis.HealthCheck.too_slow in hypothesis.settings().suppress_health_check
