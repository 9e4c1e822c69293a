"""tests/shards.py on a file of tests that pass, fail, end their process and never end."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow

LIMIT = 600  # seconds of a test, and of all: far more than a slow and busy machine needs
SUITE = f"""
LIMIT = {LIMIT}
import os, pytest, signal
@pytest.mark.parametrize("n", range(6))
def test_right(n): pass
def test_wrong(): assert 1 == 2
def test_dies(): os._exit(7)
def test_hangs():
    assert 0 < signal.alarm(0) <= LIMIT, "the limit is not set"
    signal.setitimer(signal.ITIMER_REAL, 0.01)  # the rest of it, which no test need wait for
    while True: signal.pause()
def test_behind(): pass
def test_further_behind(): pass
"""


def shards(tmp_path, *options, suite=SUITE):
    (tmp_path / "test_suite.py").write_text(suite)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # names of tests begin here, wherever the checkout is
    command = [sys.executable, "-m", "tests.shards", str(tmp_path / "test_suite.py"), "--out", str(tmp_path / "out")]
    command += ["--processes", "2", "--limit", str(LIMIT), "--seconds", "3600", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_hang_costs_one_test(tmp_path):
    *problems, last = shards(tmp_path)
    said = {problem.partition("::")[2] for problem in problems}
    assert said == {"test_wrong assert 1 == 2", "test_dies did not end", "test_hangs did not end"}
    assert last.startswith("9 tests ended in ")
    assert len(list((tmp_path / "out").glob("*.xml"))) >= 2


def test_a_run_is_resumed(tmp_path):
    """Tests that have begun are not begun again, and their failures are reported with the others."""
    (tmp_path / "out").mkdir()
    for number, tests in enumerate((["right[0]", "right[2]"], ["right[1]"])):
        lines = [f"{word} test_suite.py::test_{test}" for test in tests for word in ("begin", "end")]
        (tmp_path / "out" / f"{number}.log").write_text("\n".join([*lines, ""]))
    *problems, last = shards(tmp_path, "--resume")
    assert len(problems) == 3 and last.startswith("9 tests ended in ")
