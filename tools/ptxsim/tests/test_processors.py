"""The simulator computes the same bits on every processor, whatever vector code numpy and BLAS have for it."""

import os
import subprocess
import sys

import numpy as np
import pytest
from ptxsim import functions, tensorcore


@pytest.mark.kernels
def test_an_h200s_results_without_the_processors_vector_code():
    """Without numpy's vector code, and with the BLAS kernels of another processor."""
    from numpy._core import _multiarray_umath as core

    features = [name for name in core.__cpu_dispatch__ if core.__cpu_features__[name]]
    path = os.pathsep.join(filter(None, sys.path))
    env = {"PYTHONPATH": path, "NPY_DISABLE_CPU_FEATURES": " ".join(features), "OPENBLAS_CORETYPE": "Prescott"}
    command = [sys.executable, "-m", "ptxsim.calibrate", "compare"]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["exp2", "log2", "tanh", "sin", "cos"])
def test_functions_round_correctly(name):
    """The nearest float32 of numpy's float64, or its neighbour where that is close to the middle of two."""
    random = np.random.RandomState(0)
    x = np.concatenate([random.randn(50_000) * 20, random.randn(50_000) / 1000, 1 + random.randn(10_000) / 1000])
    x = np.concatenate([x, random.rand(10_000) * 300 - 150]).astype(np.float32)
    with np.errstate(all="ignore"):
        want, found = getattr(np, name)(x.astype(np.float64)).astype(np.float32), getattr(functions, name)(x)
    apart = (want != found) & ~(np.isnan(want) & np.isnan(found))
    assert apart.sum() <= 2
    assert (np.abs(want - found)[apart] <= np.spacing(np.abs(want[apart]))).all()


@pytest.mark.parametrize("name", ["exp2", "log2", "tanh", "sin", "cos"])
def test_special_values(name):
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38, -3e38], np.float32)
    if name in ("sin", "cos"):
        x = x[:-2]  # numpy reduces huge arguments exactly
    with np.errstate(all="ignore"):
        want, found = getattr(np, name)(x.astype(np.float64)).astype(np.float32), getattr(functions, name)(x)
    assert np.array_equal(want, found, equal_nan=True)
    assert (np.signbit(want) == np.signbit(found))[~np.isnan(want)].all()


def test_products_are_exact():
    """Numbers of many magnitudes: several slices each. Against sums in exact integers."""
    random = np.random.RandomState(1)
    a, b = (np.ldexp(random.randint(-255, 256, (8, 16)), random.randint(-60, 60, (8, 16))) for _ in range(2))
    a, b = a.astype(np.float32), b.astype(np.float32)
    assert len(tensorcore.slices(a, 24)) > 2
    exact = [[sum(int(x * 2.0**60) * int(y * 2.0**60) for x, y in zip(p, q)) for q in b.tolist()] for p in a.tolist()]
    want = np.array([[float(x) for x in row] for row in exact]) * 2.0**-120
    np.testing.assert_allclose(tensorcore.product(a, b), want, rtol=2.0**-50)
    one = tensorcore.product(a[:, :1] * 0 + 3, b[:, :1])
    assert (one == 3.0 * b[:, 0]).all()


def test_products_of_infinity_and_nan():
    a, b = np.ones((3, 16), np.float32), np.ones((2, 16), np.float32)
    a[0, 3], a[1, 2], b[1, 2] = np.inf, np.nan, 0
    found = tensorcore.product(a, b)
    assert found[0].tolist() == [np.inf, np.inf] and np.isnan(found[1]).all() and found[2].tolist() == [16, 15]
