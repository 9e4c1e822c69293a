"""examples/sparse.py on the CPU."""

import pytest
import torch

from examples import sparse

SMALL = ["--keys", "512", "--batch", "2"]


def test_few_keys_stand_for_all(capsys):
    found = sparse.main([*SMALL, "--kept", "64"])
    assert found["error to exact attention over the kept"] < 3e-3  # bf16 output
    assert 1e-4 < found["error to dense attention"] < 3e-2
    assert 0.97 < found["probability of the kept, least"] <= found["probability of the kept, mean"] < 1
    assert all(value > 0 for name, value in found.items() if name.endswith("us"))
    assert "selection and decode" in capsys.readouterr().out


def test_all_keys_are_dense_attention():
    found = sparse.main([*SMALL, "--kept", "512"])
    assert found["error to dense attention"] < 3e-3 and abs(found["probability of the kept, least"] - 1) < 1e-4


def test_the_kept_have_the_highest_scores():
    s = sparse.make_step(256, 2, (4, 2), 64, "cpu")
    best = s.scores.topk(20).indices.sort().values
    page = s.pages.gather(1, best // sparse.PAGE)
    assert torch.equal(sparse.select(s, 20), (page * sparse.PAGE + best % sparse.PAGE).int())


@pytest.mark.parametrize("sizes", [("--keys", "100"), ("--keys", "64", "--kept", "65"), ("--batch", "0")], ids=" ".join)
def test_sizes_are_refused(sizes, capsys):
    with pytest.raises(SystemExit):
        sparse.main([*sizes])
    assert "--keys must be a multiple" in capsys.readouterr().err
