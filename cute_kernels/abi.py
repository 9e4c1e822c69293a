"""Fake tensors and scalars that state a kernel's launch ABI at compile time.

The compiled function checks these facts at each launch: dtype, rank, static dims, divisibility of strides, and
alignment. Each dim and stride that may differ has a fresh symbol, because two uses of one symbol are checked to
be equal."""

from collections.abc import Mapping, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from . import dtypes

DTYPES: dict[str, Any] = {name: getattr(cutlass, kind) for name, kind in dtypes.CUTE.items()}  # stored types


def tensor(
    dtype: Any,
    shape: Sequence[int | None],
    *,
    align: int,
    stride_divisibility: int = 1,
    last_stride_one: bool = True,
    strides: Mapping[int, int | None] | None = None,
) -> Any:
    """Return a fake tensor argument with len(shape) modes. An int is a static extent, None a dynamic one (int32,
    fresh symbol).

    align: of the first element, in bytes. stride_divisibility: of every dynamic stride, in elements (int64, fresh
    symbol). last_stride_one: the last mode is contiguous, statically. strides: mode -> its stride, if that is
    static, or None, if it may be any number."""
    extents = tuple(cute.sym_int32() if extent is None else extent for extent in shape)
    all_strides: list[Any] = [cute.sym_int64(divisibility=stride_divisibility) for _ in shape]
    if last_stride_one:
        all_strides[-1] = 1
    for mode, stride in (strides or {}).items():
        all_strides[mode] = cute.sym_int64() if stride is None else stride
    return make_fake_tensor(dtype, extents, tuple(all_strides), assumed_align=align)


def stream() -> Any:
    """Return the fake stream argument: TVM FFI passes the current torch stream of the tensors' device."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)
