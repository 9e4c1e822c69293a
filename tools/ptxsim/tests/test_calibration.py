"""The simulator gives what an H200 gave: every recorded micro-kernel, bits or the stated tolerance."""

import json
from pathlib import Path

import pytest
from ptxsim.calibrate import cases, record

pytestmark = pytest.mark.kernels  # it simulates: 14 s
RECORD = json.loads((Path(record.__file__).parent / "h200.json").read_text())
FORMS = {case.name: case for case in cases.CASES}


def test_every_case_was_recorded_as_it_is_now():
    stale = [name for name, case in FORMS.items() if RECORD["cases"].get(name, {}).get("sha") != record.digest(case)]
    assert not stale
    assert set(RECORD["cases"]) == set(FORMS)


@pytest.mark.parametrize("name", FORMS)
def test_case(name):
    verdict = record.judge(FORMS[name], RECORD)
    if verdict.result == record.UNSUPPORTED:
        pytest.skip(verdict.detail)
    assert verdict.result in record.GOOD, f"{verdict.result}: {verdict.detail}"


@pytest.mark.parametrize("mode", ["late", "newest", "random"])
def test_modes(mode):
    """Asynchronous forms give the same whenever they complete."""
    chosen = [case for case in cases.CASES if "async" in case.ptx or "mbarrier" in case.ptx]
    verdicts = [record.judge(case, RECORD, mode) for case in chosen]
    bad = [
        f"{v.case.name}: {v.result} {v.detail}" for v in verdicts if v.result not in (*record.GOOD, record.UNSUPPORTED)
    ]
    assert not bad, "\n".join(bad)


def test_documents_are_current():
    from ptxsim.calibrate.__main__ import documents

    stale = [str(path) for path, text in documents(Path(__file__).parents[1]).items() if path.read_text() != text]
    assert not stale, "python -m ptxsim.calibrate readme"
