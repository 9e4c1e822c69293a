"""The simulator gives what an H200 gave: every recorded micro-kernel, bits or the stated tolerance."""

import json
from functools import cache
from pathlib import Path

import pytest
from ptxsim.calibrate import cases, record
from ptxsim.calibrate.__main__ import readme_with

pytestmark = pytest.mark.kernels  # it simulates: 10 s
RECORD = json.loads((Path(record.__file__).parent / "h200.json").read_text())
FORMS = {case.name: case for case in cases.CASES}


def test_every_case_was_recorded_as_it_is_now():
    stale = [name for name, case in FORMS.items() if RECORD["cases"].get(name, {}).get("sha") != record.digest(case)]
    assert not stale
    assert set(RECORD["cases"]) == set(FORMS)


@cache
def verdict_of(name):
    return record.judge(FORMS[name], RECORD)


@pytest.mark.parametrize("name", FORMS)
def test_case(name):
    verdict = verdict_of(name)
    if verdict.result == record.UNSUPPORTED:
        pytest.skip(verdict.detail)
    assert verdict.result in record.GOOD, f"{verdict.result}: {verdict.detail}"


@pytest.mark.parametrize(("turn", "mode"), enumerate(("late", "newest", "random")))
def test_modes(turn, mode):
    """Asynchronous forms give the same whenever they complete. Neighbouring cases, which resemble each other, take the
    modes in turn."""
    chosen = [case for case in cases.CASES if "async" in case.ptx or "mbarrier" in case.ptx]
    assert len(chosen) > 100
    verdicts = [record.judge(case, RECORD, mode) for case in chosen[turn::3]]
    bad = [
        f"{v.case.name}: {v.result} {v.detail}" for v in verdicts if v.result not in (*record.GOOD, record.UNSUPPORTED)
    ]
    assert not bad, "\n".join(bad)


def test_the_readme_has_their_summary():
    root = Path(__file__).parents[1]
    assert (root / "README.md").read_text() == readme_with([*map(verdict_of, FORMS)], root)
