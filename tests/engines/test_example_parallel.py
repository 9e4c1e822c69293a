"""examples/parallel.py on the CPU: two processes."""

import re

import pytest

from examples import parallel
from tests.conftest import run_python

pytestmark = pytest.mark.slow


def test_ranks_give_what_one_gives():
    done = run_python("-m", "examples.parallel", "--keys", "1024")
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(\d) ranks, (\w+) parallel +([\d.]+) us, error ([\d.e+-]+)", done.stdout)
    assert [(n, kind) for n, kind, *_ in found] == [(n, kind) for n in "12" for kind in ("tensor", "context")]
    errors = [float(error) for *_, error in found]
    assert errors[:3] == [0.0] * 3 and 0 < errors[3] < 2e-3  # a merge rounds to bf16 once more
    assert all(float(us) > 0 for _, _, us, _ in found)


@pytest.mark.parametrize("sizes", [("--keys", "100"), ("--ranks", "3"), ("--ranks", "8")], ids=" ".join)
def test_sizes_are_refused(sizes, capsys):
    with pytest.raises(SystemExit):
        parallel.main([*sizes])
    assert "--ranks must be" in capsys.readouterr().err
