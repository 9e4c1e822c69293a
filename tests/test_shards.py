"""tests/shards.py on a file of tests that pass, fail, end their process and never end."""

import subprocess
import sys

from tests.conftest import ROOT

SUITE = """
import os, pytest, time
@pytest.mark.parametrize("n", range(6))
def test_right(n): pass
def test_wrong(): assert 1 == 2
def test_dies(): os._exit(7)
def test_hangs(): time.sleep(60)
def test_behind(): pass
def test_further_behind(): pass
"""


def shards(tmp_path, *options, suite=SUITE):
    (tmp_path / "test_suite.py").write_text(suite)
    command = [sys.executable, "-m", "tests.shards", str(tmp_path / "test_suite.py"), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--processes", "2", "--limit", "1", *options], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_hang_costs_one_test(tmp_path):
    *problems, last = shards(tmp_path)
    said = {problem.partition("::")[2] for problem in problems}
    assert said == {"test_wrong assert 1 == 2", "test_dies did not end", "test_hangs did not end"}
    assert last.startswith("9 tests ended in ")
    assert len(list((tmp_path / "out").glob("*.xml"))) >= 2


def test_no_test_begins_too_late(tmp_path):
    assert shards(tmp_path, "--seconds", "0", "--limit", "30")[-1].startswith("0 tests ended")
    assert len(list((tmp_path / "out").glob("*.xml"))) == 2, "what ended before has a report"


def test_a_suite_that_cannot_be_collected_says_why(tmp_path):
    said = shards(tmp_path, suite="import nothing_of_this_name")
    assert sum("nothing_of_this_name" in line for line in said) >= 2 and said[-1].startswith("0 tests ended")
