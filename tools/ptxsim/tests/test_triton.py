"""Kernels of Triton 3.8.0 (from_triton/kernels.py) give the right results in every mode; a lost barrier is a fault."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ptxsim import MODES, Fault, TiledArray, launch, run

FOLDER = Path(__file__).parent / "from_triton"
M, N, K = 100, 72, 96


def text(name: str) -> str:
    return (FOLDER / f"{name}.ptx").read_text()


def shared(ptx: str) -> int:
    """Return the bytes of shared memory, which the first line says."""
    return int(ptx.split()[3])


def rows() -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(0).standard_normal((5, 400)).astype(np.float32), np.full((5, 400), np.nan, np.float32)


@pytest.mark.parametrize("mode", MODES)
def test_softmax(mode: str) -> None:
    x, y = rows()
    ptx = text("softmax")
    run(launch(ptx, [x, y, 400, 400, None, None], grid=5, shared=shared(ptx)), mode=mode)
    powers = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    np.testing.assert_allclose(y, powers / powers.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_lost_barrier_names_both_instructions(which: int) -> None:
    ptx = text("softmax")
    parts = ptx.split("bar.sync")
    assert len(parts) == 4
    lost = "bar.sync".join(parts[: which + 1]) + "//" + "bar.sync".join(parts[which + 1 :])
    x, y = rows()
    store, load = (
        r"line \d+ \(standard.py:\d+\).*: st.shared::cta.b32",
        r"line \d+ \(standard.py:\d+\).*: ld.shared.b32",
    )
    first, second = (store, load) if which == 1 else (load, store)
    with pytest.raises(Fault, match=rf"^{first}: (.|\n)*\n  the last (read|write): {second}$"):
        run(launch(lost, [x, y, 400, 400, None, None], grid=5, shared=shared(ptx)))


def factors() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a, b and a place for their product."""
    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal(shape).astype(np.float16) for shape in ((M, K), (K, N)))
    return a, b, np.full((M, N), np.nan, np.float16)


def check(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    np.testing.assert_allclose(c.astype(np.float32), a.astype(np.float32) @ b.astype(np.float32), rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("arch", "used"), [("sm80", ""), ("sm90", "wgmma"), ("sm100", "tcgen05.mma f16")])
def test_matmul(arch: str, used: str, mode: str) -> None:
    """The tiles hang over the edges of c."""
    a, b, c = factors()
    ptx = text(f"matmul_{arch}")
    result = run(launch(ptx, [a, b, c, M, N, K, K, N, N, None, None], grid=(2, 2), shared=shared(ptx)), mode=mode)
    check(a, b, c)
    assert not used or result.counts[used]


def described(array: np.ndarray, box: tuple[int, int], swizzle: int) -> list[Any]:
    """Return the parameters of a tensor descriptor: the map, shape and strides."""
    return [TiledArray(array, box, swizzle), *array.shape, array.shape[1], 1]


@pytest.mark.parametrize("mode", MODES)
def test_matmul_by_tma(mode: str) -> None:
    a, b, c = factors()
    ptx = text("tma_matmul_sm90")
    tensors = [*described(a, (64, 32), 64), *described(b, (32, 64), 128), *described(c, (64, 64), 128)]
    how = {"grid": (2, 2), "shared": shared(ptx)}
    with pytest.raises(Fault, match="was initialised, but not fenced for async use"):
        run(launch(ptx, [*tensors, K, None, None], **how), mode=mode)
    result = run(launch(ptx, [*tensors, K, None, None], **how, beyond=("init",)), mode=mode)
    check(a, b, c)
    assert result.counts["tma load"] == 24 and result.counts["tma store"] == 4
