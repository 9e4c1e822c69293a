"""Launches evaluated from the MLIR of a host function that was written by hand."""

import struct

import ml_dtypes
import numpy as np
import pytest
from ptxsim import host
from ptxsim.call import TensorMap
from ptxsim.faults import NotModelled

MLIR = """\
!tensor = !cute.memref<bf16, gmem, align<16>, "(?,?,64):(?{i64 div=8},?{i64 div=8},1)">
!view = !cute.memref<bf16, gmem, align<16>, "(?,64,?):(?{i64 div=8},1,?{i64 div=8})">
!load = !cute_nvgpu.atom.non_exec_tiled_tma_load<sm_90_multicast, bf16, copy_bits = 65536, \
tma_gbasis = <"(32,128,1):(1@1,1@0,1@2)">, tma_format = BF16_RN>
module attributes {gpu.container_module} {
  func.func @host(%arg0: !cuda.stream, %arg1: !tensor, %arg2: f32, %arg3: i32) -> i32 attributes {a} {
    %c1_i32 = arith.constant 1 : i32
    %c2_i32 = arith.constant 2 : i32
    %false = arith.constant false
    %iter = cute.get_iter(%arg1) : !tensor
    %lay = cute.get_layout(%arg1) : !tensor
    %0 = cute.select<[0, 2, 1]> (%lay) : (!cute.layout<"(?,?,64):(?{i64 div=8},?{i64 div=8},1)">) -> \
!cute.layout<"(?,64,?):(?{i64 div=8},1,?{i64 div=8})">
    %v = cute.make_view(%iter, %0) : !view
    %1 = cute.static : !cute.composed_layout<"S<2,4,3> o 0 o (128,32):(32,1)">
    %2 = cute.static : !cute.layout<"(128,32):(1@0,1@1)">
    %atom, %coords = cute_nvgpu.atom.make_non_exec_tiled_tma_load(%v, %1, %2) <{kind = <sm_90_multicast> \
num_multicast = 2}> : (!view, !cute.composed_layout<"S<2,4,3> o 0 o (128,32):(32,1)">, \
!cute.layout<"(128,32):(1@0,1@1)">) -> (!load, !cute.coord_tensor<"(0,0,0)", "(?,64,?):(1@1,1@0,1@2)">)
    %odd = cute.mystery(%arg3) : (i32) -> i32
    %3 = cute.kernel_smem_size @kernels::@k_0 : i64
    %4 = arith.cmpi sgt, %3, %3 : i64
    scf.if %4 {
      cute.print("too {} much", %3) : i64
    }
    %mma = cute.make_atom(%false) : (i1) -> !cute_nvgpu.sm90.mma<64x128x16>
    %5:2 = scf.if %false -> (i32, i32) {
      scf.yield %c1_i32, %c1_i32 : i32, i32
    } else {
      %6 = arith.muli %arg3, %c2_i32 : i32
      scf.yield %6, %c1_i32 : i32, i32
    }
    %7 = cuda.launch_cfg.create<max_attrs = 17 : i32> (blockDim = (%c2_i32, %c1_i32, %c1_i32), \
dynamicSmemBytes = %3, gridDim = (%5#0, %5#1, GRID), stream = %arg0) : i32, i32, i32, i64, i32, i32, i32, \
!cuda.stream -> !cuda.launch_cfg<max_attrs = 17>
    cuda.launch_cfg.cluster_dim[%7] (%c2_i32, %c1_i32, %c1_i32) : !cuda.launch_cfg<max_attrs = 17>, i32, i32, i32
    %8 = cuda.launch_ex @kernels::@k_0<%7> (%mma, %atom, %coords, %1, %arg1, %arg2) {a = #cuda.b<true>} : \
!cuda.launch_cfg<max_attrs = 17>, (!cute_nvgpu.sm90.mma<64x128x16>, !load, \
!cute.coord_tensor<"(0,0,0)", "(?,64,?):(1@1,1@0,1@2)">, \
!cute.composed_layout<"S<2,4,3> o 0 o (128,32):(32,1)">, !tensor, f32) -> !cuda.result
    return %c1_i32 : i32
  }
}
"""
PTX = """\
.visible .entry other(
	.param .u32 other_param_0
)
{
	ret;
}
.visible .entry k_0(
	.param .align 1 .b8 k_0_param_0[1],
	.param .align 64 .b8 k_0_param_1[128],
	.param .align 4 .b8 k_0_param_2[8],
	.param .align 8 .b8 k_0_param_3[32],
	.param .f32 k_0_param_4
)
.reqntid 2, 1, 1
{
	ret;
}
"""


def evaluate(array, *, grid="%c1_i32", ptx=PTX):
    return host.evaluate(MLIR.replace("GRID", grid), ptx, [array, 0.5, 3], {"k_0": 1000})


def test_a_launch_of_a_strided_view():
    buffer = np.arange(10 * 6 * 128, dtype=np.uint16).reshape(10, 6, 128)
    (call,) = evaluate(buffer[2:9, 1:5, 64:])
    start = call.memory.bases[0] + (2 * 6 * 128 + 128 + 64) * 2
    assert call.memory.buffers[0].size == buffer.nbytes, "the whole buffer is registered"
    assert (call.grid, call.cluster, call.block, call.shared) == ((6, 1, 1), (2, 1, 1), (2, 1, 1), 1000)
    assert call.params == [
        b"\0",
        TensorMap(int(start), (64, 7, 4), (1536, 256), (32, 64, 1), "bf16", swizzle=64),
        struct.pack("<2i", 7, 4),
        struct.pack("<Q2i2q", start, 7, 4, 768, 128),
        struct.pack("<f", 0.5),
    ]
    assert "other" not in call.ptx and "k_0" in call.ptx


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (np.zeros((2, 64), np.uint16), "must have 3 modes"),
        (np.zeros((2, 2, 64), np.float32), "must have 16 bits"),
        (np.zeros((2, 2, 32), np.uint16), r"shape \(2, 2, 32\)"),
        (np.zeros((2, 2, 128), np.uint16)[:, :, ::2], r"strides \(256, 128, 2\)"),
        (np.zeros((2, 2, 68), np.uint16)[:, :, :64], r"strides \(136, 68, 1\)"),
        (np.zeros((2, 2, 72), np.uint16)[:, :, 4:68], "must be one of 16 B"),
        ([1], "must be a numpy array"),
    ],
)
def test_arguments_are_checked(array, problem):
    with pytest.raises(ValueError, match=f"argument 0.*{problem}"):
        evaluate(array)


def test_an_unknown_operation_matters_only_where_it_is_used():
    array = np.zeros((2, 2, 64), ml_dtypes.bfloat16)
    assert evaluate(array)
    with pytest.raises(NotModelled, match=r"line \d+: operation cute\.mystery"):
        evaluate(array, grid="%odd")


def test_parameters_must_be_those_of_the_ptx():
    with pytest.raises(ValueError, match="parameters of kernel k_0"):
        evaluate(np.zeros((2, 2, 64), np.uint16), ptx=PTX.replace("[32]", "[40]"))
    with pytest.raises(ValueError, match="kernel k_0: the PTX has other"):
        evaluate(np.zeros((2, 2, 64), np.uint16), ptx=PTX.partition(".visible .entry k_0")[0])
