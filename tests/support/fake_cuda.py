"""Tensors that claim to be on GPU 0 but have no memory, for the argument checks of compiled kernels.

No GPU is needed, because compiled code checks every argument before it calls CUDA.
"""

import ctypes
import math
from typing import Any

import tvm_ffi

CUDA = 2
ADDRESS = 1 << 40  # aligned, never read
KINDS = {"int": 0, "uint": 1, "float": 2, "bfloat": 4}


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_alive: list[Any] = []  # DLPack borrows shapes and strides


def tensor(shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None, offset: int = 0) -> Any:
    """Make a tensor. dtype: a kind and its bits, "bfloat16". offset: bytes of the first element past a 256-byte
    boundary."""
    kind = dtype.rstrip("0123456789")
    if strides is None:
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    dims = ctypes.c_int64 * len(shape)
    sizes, steps = dims(*shape), dims(*strides)
    managed = _DLManagedTensor(
        _DLTensor(ADDRESS + offset, CUDA, 0, len(shape), KINDS[kind], int(dtype[len(kind) :]), 1, sizes, steps, 0)
    )
    _alive.extend([managed, sizes, steps])
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return tvm_ffi.from_dlpack(_Holder(new(ctypes.addressof(managed), b"dltensor", None)))


class _Holder:
    def __init__(self, capsule: Any):
        self.capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0
