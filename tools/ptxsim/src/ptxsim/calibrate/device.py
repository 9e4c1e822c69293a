"""Run a case on the GPU through the CUDA driver."""

import ctypes
from ctypes import (
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_uint,
    c_uint32,
    c_uint64,
    c_ulonglong,
    c_void_p,
    create_string_buffer,
)
from pathlib import Path
from typing import Any

import numpy as np

from .case import CalibrationCase, TensorMapArg

MAX_DYNAMIC_SHARED, NON_PORTABLE_CLUSTER = 8, 14  # CUfunction_attribute
CLUSTER_DIMENSION, STREAM_SERIALIZATION = 4, 6  # CUlaunchAttributeID
PORTABLE_CLUSTER, STATIC_LIMIT = 8, 48 << 10
ERROR_LOG, ERROR_LOG_BYTES = 5, 6  # CUjit_option
FORMAT = {"u8": 0, "u16": 1, "u32": 2, "u64": 4, "f16": 6, "f32": 7, "bf16": 9, "tf32": 11}  # CUtensorMapDataType
SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}
FILL = {"zero": 0, "nan": 1}


class Value(ctypes.Union):
    """CUlaunchAttributeValue, 64 bytes."""

    _fields_ = [("pad", ctypes.c_char * 64), ("dim", c_uint * 3), ("flag", c_int)]


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", c_int), ("pad", ctypes.c_char * 4), ("value", Value)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", c_uint),
    ]


class CudaError(RuntimeError):
    """A driver call failed. The context may be lost with it."""


class Gpu:
    """The first GPU with its primary context."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self("cuInit", c_uint(0))
        device, context, version = c_int(), c_void_p(), c_int()
        self("cuDeviceGet", byref(device), c_int(0))
        self("cuDevicePrimaryCtxRetain", byref(context), device)
        self("cuCtxSetCurrent", context)
        name = create_string_buffer(100)
        self("cuDeviceGetName", name, c_int(100), device)
        self("cuDriverGetVersion", byref(version))
        self.name, self.cuda_version = name.value.decode(), f"{version.value // 1000}.{version.value % 1000 // 10}"

    def __call__(self, function: str, *arguments: Any) -> None:
        status = getattr(self.cuda, function)(*arguments)
        if status:
            text = c_char_p()
            self.cuda.cuGetErrorString(c_int(status), byref(text))
            raise CudaError(f"{function}: error {status} {(text.value or b'').decode()}")

    def driver(self) -> str:
        """Return the version of the kernel driver, if the system states it, and the newest CUDA that it supports."""
        file = Path("/sys/module/nvidia/version")
        return f"{file.read_text().strip() if file.exists() else 'driver'}, CUDA {self.cuda_version}"

    def module(self, ptx: str) -> c_void_p:
        """Assemble PTX; the assembler's messages are added to the error."""
        log, module = create_string_buffer(1 << 14), c_void_p()
        options = (c_int * 2)(ERROR_LOG, ERROR_LOG_BYTES)
        values = (c_void_p * 2)(ctypes.cast(log, c_void_p), c_void_p(len(log)))
        try:
            self("cuModuleLoadDataEx", byref(module), ptx.encode() + b"\0", c_uint(2), options, values)
        except CudaError as error:
            raise CudaError(f"{error}\n{log.value.decode(errors='replace')}") from None
        return module

    def upload(self, array: np.ndarray) -> c_ulonglong:
        address = c_ulonglong()
        data = np.ascontiguousarray(array)
        self("cuMemAlloc_v2", byref(address), c_size_t(max(data.nbytes, 1)))
        if data.nbytes:
            self("cuMemcpyHtoD_v2", address, c_void_p(data.ctypes.data), c_size_t(data.nbytes))
        return address

    def download(self, address: c_ulonglong, like: np.ndarray) -> np.ndarray:
        out = np.empty(like.shape, like.dtype)
        self("cuMemcpyDtoH_v2", c_void_p(out.ctypes.data), address, c_size_t(out.nbytes))
        return out

    def tensor_map(self, what: TensorMapArg, address: c_ulonglong) -> Any:
        """Return the 128 bytes of a tensor map, at an address that is a multiple of 64."""
        memory = create_string_buffer(128 + 64)
        start = -ctypes.addressof(memory) % 64
        rank = len(what.dims)
        self(
            "cuTensorMapEncodeTiled",
            byref(memory, start),
            c_int(FORMAT[what.format]),
            c_uint32(rank),
            c_void_p(address.value),
            (c_uint64 * rank)(*what.dims),
            (c_uint64 * max(rank - 1, 1))(*what.strides),
            (c_uint32 * rank)(*what.box),
            (c_uint32 * rank)(*[1] * rank),
            c_int(0),
            c_int(SWIZZLE[what.swizzle]),
            c_int(0),
            c_int(FILL[what.fill]),
        )
        encoded = (ctypes.c_char * 128).from_buffer(memory, start)
        return encoded

    def launch(self, case: CalibrationCase, function: c_void_p, values: list[Any]) -> None:
        if case.shared > STATIC_LIMIT:
            self("cuFuncSetAttribute", function, c_int(MAX_DYNAMIC_SHARED), c_int(case.shared))
        if int(np.prod(case.cluster)) > PORTABLE_CLUSTER:
            self("cuFuncSetAttribute", function, c_int(NON_PORTABLE_CLUSTER), c_int(1))
        attributes, count = (Attribute * 2)(), 0
        if case.cluster != (1, 1, 1):
            attributes[count].id, attributes[count].value.dim = CLUSTER_DIMENSION, (c_uint * 3)(*case.cluster)
            count += 1
        if "griddepcontrol" in case.ptx:
            attributes[count].id, attributes[count].value.flag = STREAM_SERIALIZATION, 1
            count += 1
        config = Config(
            (c_uint * 3)(*case.grid), (c_uint * 3)(case.threads, 1, 1), case.shared, None, attributes, count
        )
        pointers = (c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        self("cuLaunchKernelEx", byref(config), function, pointers, None)
        self("cuCtxSynchronize")


def run_on_device(gpu: Gpu, case: CalibrationCase) -> list[np.ndarray]:
    """Return the outputs of the case."""
    module, function = gpu.module(case.ptx), c_void_p()
    gpu("cuModuleGetFunction", byref(function), module, c_char_p(b"calibrate"))
    addresses = [None if isinstance(arg, TensorMapArg) else gpu.upload(arg) for arg in case.args]
    values = []
    for arg, address in zip(case.args, addresses):
        over = addresses[arg.array] if isinstance(arg, TensorMapArg) else address
        assert over is not None, "a map lies over an array"
        values.append(gpu.tensor_map(arg, over) if isinstance(arg, TensorMapArg) else over)
    gpu.launch(case, function, values)
    found = []
    for number in case.outputs:
        arg, address = case.args[number], addresses[number]
        assert isinstance(arg, np.ndarray) and address is not None, "outputs are arrays"
        found.append(gpu.download(address, arg))
    for address in addresses:
        if address is not None:
            gpu("cuMemFree_v2", address)
    gpu("cuModuleUnload", module)
    return found
