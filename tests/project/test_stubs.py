"""The stub of the public names is current. mypy holds its types by `tests/support/typed_calls.py`."""

from tests.conftest import ROOT
from tools import stubs


def test_the_stub_is_current():
    assert stubs.TARGET.read_text() == stubs.text(), "run: python -m tools.stubs"


def test_the_type_checker_reads_the_calls():
    assert '"tests/support/typed_calls.py"' in (ROOT / "pyproject.toml").read_text()
