"""Bugs planted in the sources are noticed (`tests/bugs`). Each takes a copy of the tree and up to a minute."""

import pytest

from tests import bugs
from tests.support.kernels import CALLED, COVERING, LATER

FULL = [pytest.mark.full, pytest.mark.kernels]


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=FULL, id=bug.name) for bug in bugs.BUGS])
def test_bug_is_noticed(bug):
    seen, text = bugs.noticed(bug)
    assert seen, text


def test_checks_are_run_by_ci():
    """A check that only --all runs would notice nothing for months."""
    names = {f"{arch} {spec.name}" for arch, _, spec in COVERING}
    assert {bug.check for bug in bugs.BUGS if bug.check.startswith("sm_")} <= names
    assert not {bug.check for bug in bugs.BUGS} & {bugs.shipped(label) for label in LATER | CALLED}
    assert len({bug.name for bug in bugs.BUGS}) == len(bugs.BUGS) >= 30


def test_every_bug_has_its_place():
    """Else a change of the sources leaves a bug behind that cannot be planted."""
    assert {bug.name: bugs.places(bug) for bug in bugs.BUGS if bugs.places(bug) != 1} == {}


def test_a_check_that_passes_is_told(tmp_path):
    bug = bugs.Bug("none", "LICENSE", "Apache", "Apache", "project/test_no_clock.py")
    text = (bugs.ROOT / bug.file).read_text()
    with pytest.raises(ValueError, match=f"none: LICENSE has {text.count('Apache')} places to change, must have 1"):
        bugs.noticed(bug)
