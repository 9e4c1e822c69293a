"""`support.declared` refuses the arguments of a launch that compiled code refuses, and no others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels import build, catalog, manifest
from tests.conftest import ARCH
from tests.sim.launcher import OBJECTS
from tests.support.declared import DeclaredTensor, check_launch, declared
from tests.support.fake_cuda import tensor
from tests.support.layouts import laid_out

OP, NAME = "cache_write.rows", "bf16_bf16_transform"
SPEC = next(spec for op, spec in catalog.shipped(ARCH) if (op, spec.name) == (OP, NAME))
Form = tuple[tuple[int, ...], str, tuple[int, ...], int]  # shape, dtype, strides, bytes behind an aligned address


def form(one: DeclaredTensor) -> Form:
    """Return a form of a tensor that fits its declaration."""
    shape = tuple(16 if extent is None else extent for extent in one.shape)
    return shape, str(one.dtype)[6:], tuple(16 ** (len(shape) - 1 - i) for i in range(len(shape))), 0


GOOD = {one.name: form(one) if isinstance(one, DeclaredTensor) else int(one.integer) for one in declared(OP, SPEC)}
K, SLOTS, TABLE, CACHE = (GOOD[name] for name in ("k", "slots", "rope_table", "k_cache"))
CASES = {  # changes of arguments: a form, or a value
    "good": {}, "integer for a float": {"norm_eps": 1}, "flag": {"rope": True},
    "float for an integer": {"rope": 1.0}, "large integer": {"rope": 1 << 31}, "None": {"slots": None},
    "dtype": {"k": (K[0], "float16", *K[2:])}, "unsigned": {"slots": (SLOTS[0], "uint32", *SLOTS[2:])},
    "wide": {"slots": (SLOTS[0], "int64", *SLOTS[2:])}, "rank": {"slots": ((16, 16), "int32", (16, 1), 0)},
    "no dimension": {"slots": ((), "int32", (), 0)},
    "last stride": {"k": (*K[:2], (512, 32, 2), 0)}, "any other stride": {"k": (*K[:2], (515, 17, 1), 0)},
    "last stride of one": {"slots": ((1,), "int32", (5,), 0)},
    "last stride of none": {"slots": ((0,), "int32", (5,), 0)},
    "stride of rows": {"rope_table": (*TABLE[:2], (18, 1), 0)},
    "stride of one row": {"rope_table": ((1, 16), "float32", (18, 1), 0)},
    "stride of no row": {"rope_table": ((0, 16), "float32", (18, 1), 0)},
    "address": {"rope_table": (*TABLE[:3], 8)}, "address of the dtype": {"k": (*K[:3], 2)},
    "cache's strides": {"k_cache": (*CACHE[:2], (4096, 16, 256, 1), 0)},
}  # fmt: skip


def on_cpu(value: object) -> object:
    """Return what a test's machine passes for a form."""
    if not isinstance(value, tuple):
        return value
    shape, dtype, strides, offset = value
    kind = getattr(torch, dtype)
    return laid_out(torch.zeros(shape, dtype=kind), strides, offset // kind.itemsize)


def said_of(launch: Callable[..., None], flat: list[Any]) -> str:
    """Return the type of the error of a launch, or that its arguments have passed."""
    try:
        launch(*flat)
    except (TypeError, ValueError) as error:
        return type(error).__name__
    except RuntimeError as error:
        assert "Cuda Runtime Error" in str(error), error  # compiled code has got as far as CUDA
    return "passed"


@pytest.mark.kernels
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel would be launched on tensors without memory")
def test_compiled_code_refuses_the_same():
    path = build.object_file(OP, SPEC, ARCH, OBJECTS)
    kernel, wrong = build.load_object(path, manifest.symbol(OP, SPEC, path.stem)), {}
    for name, change in CASES.items():
        given = (GOOD | change).values()
        compiled = said_of(kernel, [tensor(*value) if isinstance(value, tuple) else value for value in given])
        ours = said_of(lambda *flat: check_launch(OP, SPEC, flat), [on_cpu(value) for value in given])
        if (compiled == "passed") != (ours == "passed"):
            wrong[name] = compiled, ours
    assert not wrong
