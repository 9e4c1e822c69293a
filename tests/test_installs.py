"""`tools.installs`: its environments cover the ends of the ranges, and with --all they are made and used."""

import pytest

from cute_kernels import catalog, env, manifest
from tests.conftest import ROOT
from tools import installs


def test_the_oldest_versions_of_the_ranges_are_tried():
    tried = {(row.dsl, row.ffi) for row in installs.ENVIRONMENTS}
    assert (env.VERSIONS[env.DSL][0], env.VERSIONS[env.FFI][0]) in tried
    assert {row.python for row in installs.ENVIRONMENTS} >= {"3.10", "3.11", "3.12", "3.13", "3.14"}
    assert {row.source for row in installs.ENVIRONMENTS} == {"wheel", "sdist"}
    assert installs.ONLY in {manifest.label(*kernel) for kernel in catalog.shipped(installs.ARCH)}


def test_the_page_lists_every_environment():
    """Its table is what `python -m tools.installs` printed."""
    text = (ROOT / "docs" / "installs.md").read_text()
    for row in installs.ENVIRONMENTS:
        cells = (row.python, row.source, row.torch or "-", row.dsl or "-", row.ffi)
        assert f"| {' | '.join(cells)} | " in text


def test_a_python_that_is_not_here_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(installs, "interpreter", lambda version: None)
    row = installs.tried(installs.ENVIRONMENTS[0], tmp_path, {}, tmp_path)
    assert row[-1] == "not run: no Python 3.10 on this machine"
    assert installs.markdown([row]).splitlines()[-1] == f"| {' | '.join(row)} |"


@pytest.mark.kernels
@pytest.mark.full
def test_a_stranger_can_install_and_use_it():
    """Needs a package index, 1 GB of downloads and 20 minutes."""
    rows = installs.table(ROOT / "build" / "installs of strangers")
    assert not [row for row in rows if "FAILED" in row[-1]] and any("passed" in row[-1] for row in rows)
