"""All cases, the risky ones last, and the forms without a case."""

from . import cases_barrier, cases_convert, cases_float, cases_int, cases_memory, cases_tma, cases_warp, cases_wgmma
from .case import CalibrationCase, build

MODULES = (cases_int, cases_float, cases_convert, cases_warp, cases_wgmma, cases_memory, cases_tma, cases_barrier)
CASES: tuple[CalibrationCase, ...] = tuple(build(sketch) for module in MODULES for sketch in module.sketches())
CONVERT = "Data Movement and Conversion Instructions: cvt"
TEXT_ALONE = (  # (form, section): forms that no sm_90a kernel can contain
    ("cvt.rn.satfinite.e2m1x2.f32, cvt.rn.f16x2.e2m1x2", CONVERT),
    ("cvt.rn.satfinite.{e2m3x2, e3m2x2}.f32 and back", CONVERT),
    ("cvt.{rz, rp}.satfinite.ue8m0x2.{f32, bf16x2}, cvt.rn.bf16x2.ue8m0x2", CONVERT),
    ("cvt.rs (stochastic rounding)", CONVERT),
    ("add, sub, mul, fma .f32x2", "Floating-Point Instructions"),
    ("min, max with three inputs, .f32", "Floating-Point Instructions"),
    ("redux.sync.{min, max}.f32", "Parallel Synchronization Instructions: redux.sync"),
    ("ldmatrix.m16n16, m8n16 .b8, stmatrix.m16n8 .b8", "Warp-Level Matrix Instructions: ldmatrix, stmatrix"),
    ("cp.async.bulk.tensor .tile::gather4, .tile::scatter4", "Asynchronous Copy Instructions: cp.async.bulk.tensor"),
    ("cp.async.bulk.tensor .cta_group", "Asynchronous Copy Instructions: cp.async.bulk.tensor"),
    ("tcgen05.*", "TensorCore 5th Generation Instructions"),
    ("clusterlaunchcontrol.*", "Parallel Synchronization Instructions: clusterlaunchcontrol"),
)
