"""Run other projects' Blackwell kernels in our simulator, to check its model of tcgen05 against code that devices run.

    pip install --no-deps flash-attn-4==4.0.0b36 quack-kernels==0.6.5 triton einops nvidia-cudnn-frontend==1.32.0
    python -m tools.oracles [CASE ...]           compile and run the cases of `CASES`, print their errors
    python -m tools.oracles record [CASE ...]    the same, and write their rows to tests/data/oracles.csv
    python -m tools.oracles readme               write a table of the rows into docs/blackwell.md

The forward kernels of FlashAttention 4, of cuDNN's open source and of CUTLASS are compiled from tensors without memory,
so no device is needed. Their PTX runs unchanged, on random data, and the results are compared with fp32. `BEYOND` lists
the behaviour that each kernel relies on beyond the text of the ISA. CUTLASS's kernel is an example of its repository
(NVIDIA/cutlass, 7107b05) and in no package: --cutlass, or the variable CUTLASS_SOURCE, must name a checkout.
"""

import argparse
import csv
import math
import os
import struct
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench.pages import fill

RECORD = Path(__file__).resolve().parents[1] / "tests" / "data" / "oracles.csv"
COLUMNS = ("kernel", "arch", "case", "error", "lse_error", "mmas")
FLASH, CUDNN, CUTLASS = "flash-attn-4 4.0.0b36", "cudnn-frontend 1.32.0", "CUTLASS 4.7.0 fmha"
SOURCE = "CUTLASS_SOURCE"  # environment variable: path of a checkout of NVIDIA/cutlass
SMS, SHARED = 2, 227 << 10  # SMs, bytes of shared memory
TOLERANCE = {"bf16": 1e-2, "fp16": 2e-3, "e4m3": 6e-2}  # for N(0, 1) data; P is rounded to the dtype too
LSE_TOLERANCE = 1e-3
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
CUDNN_DTYPES = {"e4m3": 0, "bf16": 2, "fp16": 3}


@dataclass(frozen=True)
class OracleCase:
    """A call of a forward kernel: one request of `tokens` queries and `keys` keys. heads: (query heads, KV heads)."""

    arch: str
    dtype: str = "bf16"
    tokens: int = 300
    keys: int = 300
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (128, 128)
    causal: bool = True
    window: tuple[int, int] | None = None
    soft_cap: float = 0.0
    sink: bool = False
    kernel: str = FLASH

    @property
    def key(self) -> str:
        return f"{self.kernel} {self.name}"

    @property
    def name(self) -> str:
        dims = f"d{self.dims[0]}" + (f"x{self.dims[1]}" if self.dims[0] != self.dims[1] else "")
        kind = "causal" if self.causal else f"window {self.window[0]}" if self.window else "full"
        more = (", cap" if self.soft_cap else "") + (", sink" if self.sink else "")
        shape = f"{self.tokens} x {self.keys}, {self.heads[0]}:{self.heads[1]}"
        return f"{self.arch} {self.dtype} {dims} {kind}{more}, {shape}"


CASES = {
    case.key: case
    for case in (
        OracleCase("sm_100a"),
        OracleCase("sm_100a", "fp16", dims=(64, 64)),
        OracleCase("sm_100a", tokens=300, keys=500, causal=False),
        OracleCase("sm_100a", tokens=1024, keys=1024, heads=(2, 2), causal=False),
        OracleCase("sm_100a", sink=True),
        OracleCase("sm_100a", soft_cap=20.0),
        OracleCase("sm_100a", tokens=400, keys=400, causal=False, window=(100, 0)),
        OracleCase("sm_100a", dims=(192, 128), heads=(2, 2)),
        OracleCase("sm_100a", dims=(256, 256), heads=(2, 2), tokens=256, keys=256),
        OracleCase("sm_100a", "e4m3"),
        OracleCase("sm_103a"),
        OracleCase("sm_103a", "e4m3"),
        OracleCase("sm_100a", kernel=CUDNN),
        OracleCase("sm_100a", "fp16", kernel=CUDNN),
        OracleCase("sm_100a", tokens=300, keys=500, kernel=CUDNN),
        OracleCase("sm_100a", tokens=300, keys=500, causal=False, kernel=CUDNN),
        OracleCase("sm_100a", tokens=1024, keys=1024, heads=(4, 1), causal=False, kernel=CUDNN),
        OracleCase("sm_100a", sink=True, kernel=CUDNN),
        OracleCase("sm_100a", tokens=400, keys=400, causal=False, window=(100, 0), kernel=CUDNN),
        OracleCase("sm_103a", kernel=CUDNN),
        OracleCase("sm_103a", tokens=300, keys=500, causal=False, kernel=CUDNN),
        OracleCase("sm_100a", dims=(192, 128), kernel=CUDNN),
        OracleCase("sm_100a", dims=(192, 128), tokens=300, keys=500, causal=False, kernel=CUDNN),
        OracleCase("sm_100a", "e4m3", kernel=CUDNN),
        OracleCase("sm_100a", "e4m3", tokens=300, keys=500, causal=False, kernel=CUDNN),
        OracleCase("sm_100a", "e4m3", tokens=1024, keys=1024, heads=(4, 1), causal=False, kernel=CUDNN),
        OracleCase("sm_103a", "e4m3", kernel=CUDNN),
        OracleCase("sm_100a", kernel=CUTLASS),
        OracleCase("sm_100a", "fp16", dims=(64, 64), kernel=CUTLASS),
        OracleCase("sm_100a", tokens=300, keys=500, causal=False, kernel=CUTLASS),
        OracleCase("sm_100a", tokens=1024, keys=1024, heads=(2, 2), causal=False, kernel=CUTLASS),
        OracleCase("sm_100a", sink=True, kernel=CUTLASS),
        OracleCase("sm_100a", tokens=400, keys=400, causal=False, window=(100, 0), kernel=CUTLASS),
        OracleCase("sm_100a", "e4m3", kernel=CUTLASS),
        OracleCase("sm_100a", "e4m3", dims=(192, 128), heads=(2, 2), kernel=CUTLASS),
        OracleCase("sm_103a", kernel=CUTLASS),
    )
}


class Data:
    """Tensors of a case."""

    def __init__(self, case: OracleCase):
        gen, dtype = torch.Generator().manual_seed(0), DTYPES[case.dtype]
        (heads, kv_heads), (dim, dim_v) = case.heads, case.dims

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(1, *shape, generator=gen).to(dtype)

        self.q, self.k = made(case.tokens, heads, dim), made(case.keys, kv_heads, dim)
        self.v = made(case.keys, kv_heads, dim_v)
        out = dtype if dtype.itemsize == 2 else torch.bfloat16
        self.o = torch.full((1, case.tokens, heads, dim_v), torch.nan).to(out)
        self.lse = torch.full((1, heads, case.tokens), torch.nan)
        self.sink = torch.randn(heads, generator=gen).to(torch.bfloat16) if case.sink else None

    def expected(self, case: OracleCase) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (o, lse in natural units) in fp32."""
        group, scale = case.heads[0] // case.heads[1], case.dims[0] ** -0.5
        k, v = (t.float().repeat_interleave(group, 2) for t in (self.k, self.v))
        s = torch.einsum("bihd,bjhd->bhij", self.q.float(), k) * scale
        if case.soft_cap:
            s = case.soft_cap * torch.tanh(s / case.soft_cap)
        back = torch.arange(case.tokens)[:, None] + case.keys - case.tokens - torch.arange(case.keys)
        left, right = case.window or (case.keys, 0 if case.causal else case.keys)
        s = s.masked_fill((back > left) | (back < -right), -torch.inf)
        if self.sink is not None:
            s = torch.cat([s, self.sink.float()[None, :, None, None].expand(*s.shape[:3], 1)], 3)
        o = torch.einsum("bhij,bjhd->bihd", s.softmax(3)[..., : case.keys], v)
        return o, s.logsumexp(3)


def as_numpy(t: torch.Tensor) -> np.ndarray:
    return t.numpy() if t.dtype == torch.float32 else t.view((torch.uint8, torch.int16)[t.itemsize - 1]).numpy()


class Hardware:
    """Replacement for the DSL's class that queries the driver."""

    get_max_active_clusters = staticmethod(lambda size=1, *_, **__: SMS // size)
    get_device_multiprocessor_count = staticmethod(lambda *_, **__: SMS)
    get_l2_cache_size_in_bytes = staticmethod(lambda *_, **__: 126 << 20)


def flash_attention(case: OracleCase, data: Data) -> list[Any]:
    """Return the launches (ptxsim.call.Call) of flash-attn-4, from its host function."""
    os.environ.update(FLASH_ATTENTION_ARCH=case.arch, FLASH_ATTENTION_NUM_SMS=str(SMS))
    import cutlass.utils
    from flash_attn.cute import interface
    from ptxsim import host
    from torch._subclasses.fake_tensor import FakeTensorMode

    from cute_kernels import build

    for module in [m for name, m in sys.modules.items() if "flash_attn" in name] + [cutlass.utils]:
        if hasattr(module, "HardwareInfo"):
            module.HardwareInfo = Hardware
    with build.host_functions() as hosts, FakeTensorMode(allow_non_fake_inputs=True):
        on = lambda t: torch.empty(t.shape, dtype=t.dtype, device="cuda")  # noqa: E731
        options: dict[str, Any] = {"causal": case.causal, "softcap": case.soft_cap or None}
        if case.window:
            options |= dict(zip(("window_size_left", "window_size_right"), case.window))
        if data.sink is not None:
            options["learnable_sink"] = on(data.sink)
        interface._flash_attn_fwd(*map(on, (data.q, data.k, data.v)), num_splits=1, return_lse=True, **options)
    known = interface._flash_attn_fwd.compile_cache
    kernel = next(iter(getattr(known, "cache", known).values()))
    return host.evaluate(hosts[-1], kernel.__ptx__, arguments(case, data, hosts[-1]), SHARED)


def arguments(case: OracleCase, data: Data, mlir: str) -> list[Any]:
    """Return the host function's arguments: q, k, v, o, lse, the scale; window sizes, a sink; the number of queries."""
    from ptxsim.host_ir import host_function

    types = [type_ for _, type_ in host_function(mlir)[0] if type_ != "!cuda.stream"]
    given = [*map(as_numpy, (data.q, data.k, data.v, data.o, data.lse)), case.dims[0] ** -0.5]
    numbers = iter([*(case.window or ()), case.tokens])
    for type_ in types[len(given) :]:
        given.append(as_numpy(data.sink) if "memref" in type_ and data.sink is not None else next(numbers))
    return given


def loaded(name: str, path: Path, **names: Any) -> Any:
    """Load the module in a file, with `names` defined in it before it runs."""
    spec: Any = spec_from_file_location(name, path)
    module: Any = module_from_spec(spec)
    vars(module).update(names)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def cutlass_fmha(case: OracleCase, data: Data) -> list[Any]:
    """Return the launch of CUTLASS's example, persistent, compiled as its `run` does, with emulated exponentials if
    MUFU is the limit (sm_100a in 16 bits).

    Heads are two modes: KV head, and query head of the KV head. LSE is (tokens, heads), in powers of 2.
    """
    import cutlass.cute as cute
    from cutlass import Float32, Int32
    from ptxsim import host

    from cute_kernels import abi, build

    if SOURCE not in os.environ:
        raise RuntimeError(f"{SOURCE} is not set: it names a checkout of NVIDIA/cutlass")
    root = Path(os.environ[SOURCE]) / "examples/python/CuTeDSL"
    sys.path.insert(0, str(root))
    module = loaded("cutlass_fmha", root / "cute/blackwell/kernel/attention/fmha/fmha.py")
    masks, emulates = module.fmha_utils.MaskEnum, case.arch == "sm_100a" and case.dtype != "e4m3"
    module.fmha_utils.HardwareInfo = Hardware
    left, right = case.window or (None, 0 if case.causal else None)
    mask = masks.RESIDUAL_MASK if left is right is None else masks.WINDOW_MASK_INFERENCE
    dims = case.dims[0] if case.dims[0] == case.dims[1] else case.dims
    tile = (128, 128)
    kernel = module.BlackwellFusedMultiHeadAttentionForward(Float32, Float32, tile, dims, True, mask, emulates, True)

    (heads, kv_heads), group = case.heads, case.heads[0] // case.heads[1]
    lse = torch.full((1, case.tokens, heads), torch.nan)
    data.lse = lse.transpose(1, 2)
    inputs = (data.q, group), (data.k, 1), (data.v, 1), (data.o, group)
    size = 1, case.tokens, case.tokens, case.keys, heads, kv_heads, *case.dims
    scale, sink = case.dims[0] ** -0.5, None if data.sink is None else data.sink.float()
    window = [side for side in (left, right) if side is not None]
    given: list[Any] = [as_numpy(t.view(1, t.shape[1], kv_heads, each, t.shape[3])) for t, each in inputs]
    given += [*size, lse.view(1, -1, kv_heads, group).numpy(), *([] if sink is None else [sink.numpy()])]
    given += [scale * math.log2(math.e), scale, 1.0, *window, 0]

    def fake(dtype: torch.dtype, rank: int) -> Any:
        return abi.tensor(abi.DTYPES[NAMES[dtype]], (None,) * rank, align=16, stride_divisibility=8)

    number = [None if side is None else Int32(side) for side in (left, right)]
    with build.host_functions() as hosts:
        compiled = cute.compile(
            *(kernel, *(fake(t.dtype, 5) for t, _ in inputs), tuple(map(Int32, size)), None, None),
            abi.tensor(Float32, (None,) * 4, align=4), None if sink is None else abi.tensor(Float32, (None,), align=4),
            *(Float32(1), Float32(1), Float32(1), None, *number, None, None),
            *(cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=False), False), options="--opt-level=2",
        )  # fmt: skip
    return host.evaluate(hosts[-1], compiled.__ptx__, given, SHARED)


def cudnn_module(name: str, params: dict[str, Any]) -> Any:
    """Import one of cuDNN's kernels without the package's compiled part. params: fields of its TemplateParams."""
    found = find_spec("cudnn")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("nvidia-cudnn-frontend is not installed")
    root = Path(next(iter(found.submodule_search_locations)))
    package: Any = ModuleType("cudnn")
    package.__path__, package.__version__, package._pybind_module = [str(root)], "", SimpleNamespace()
    package.data_type = type("Names", (), {"__getattr__": lambda self, name: name})()
    sys.modules["cudnn"] = package
    from cudnn.sdpa.fwd.config_sm100 import TemplateParams

    path = root / f"sdpa/fwd/kernels/sm100/{name}.py"
    return loaded(f"cudnn.sdpa.fwd.kernels.sm100.{name}", path, FROST_TEMPLATE_PARAMS=TemplateParams(**params))


def cudnn_compiled(case: OracleCase) -> tuple[Any, str]:
    """Return (module, PTX) of cuDNN's kernel."""
    import cutlass.cute as cute

    full, fp8 = not (case.causal or case.window), case.dtype == "e4m3"
    right = 0 if case.causal else case.window[1] if case.window else None
    module = cudnn_module(
        {(128, 128): "prefill_d128", (192, 128): "prefill_d192_d128"}[case.dims] + ("_fp8" if fp8 else "_f16"),
        {
            "dtype_qkv": CUDNN_DTYPES[case.dtype],
            "dtype_o": CUDNN_DTYPES["bf16"] if fp8 else -1,
            "window_left": case.window[0] if case.window else None,
            "window_right": right,
            "bottom_right": right is not None,
            "has_sink": case.sink,
            "qh_per_kh": case.heads[0] // case.heads[1],
            "kv_tail_mask": full and case.keys % 128 > 0,
            "exp2_fma_split": (full or fp8 or case.dims[0] == 192) and case.arch == "sm_100a",
            "fused_ldtm_stat": case.arch == "sm_103a" and not fp8,
        },
    )
    kernels = []

    def compile_now(function: Any, *args: Any, cache_key: Any = None, symbol: Any = None, **options: Any) -> Any:
        kernels.append(cute.compile(function, *args, **options))
        return kernels[-1]

    if fp8:
        from cudnn.sdpa.fwd.kernels import _fp8_host

        _fp8_host._compile_cached = compile_now
        module.compile_prepared(has_amax=False)
    else:
        module._compile_cached = compile_now
        module.compile()
    return module, kernels[0].__ptx__


def cudnn(case: OracleCase, data: Data) -> list[Any]:
    """Return the launch of cuDNN's kernel. Its host function encodes tensor maps in its own operations, so they are
    made here.

    Parameters: maps of q, k, v and o; LSE with shape and strides; sinks, key counts and descriptors of ragged calls;
    the numbers of query tokens, keys, CTAs per head, heads, requests, query heads per KV head; the scale; in e4m3 a
    factor of O and scales of q, k, v and O; no row counts; in e4m3 the addresses of output scales that O does not have.
    """
    from ptxsim.call import Global, KernelLaunch, TensorMap

    module, ptx = cudnn_compiled(case)
    config, memory, none = module.CFG, Global(), np.zeros(16, np.uint8)

    def mapped(t: torch.Tensor, name: str, rows: int, swizzle: int) -> TensorMap:
        _, length, heads, dim = t.shape
        size = t.itemsize
        strides = dim * size, heads * dim * size, length * heads * dim * size
        address, box = memory.add(as_numpy(t), name), (swizzle // size, 1, rows, 1)
        format_ = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "u8"}[t.dtype]
        return TensorMap(address, (dim, heads, length, 1), strides, box, format_, swizzle)

    params: list[bytes | TensorMap] = [
        mapped(data.q, "q", config.TILE_M, config.Q_SWZ_BYTES),
        mapped(data.k, "k", module.K_BOX_ROWS, config.K_SWZ_BYTES),
        mapped(data.v, "v", module.V_BOX_ROWS, config.V_SWZ_BYTES),
        mapped(data.o, "o", config.TILE_M, config.O_SWZ_BYTES),
    ]
    (heads, kv_heads), rows = case.heads, config.TILES_Q * config.TILE_M * config.CTA_MMA
    ctas = -(-case.tokens // rows) * config.CTA_MMA
    sink = none if data.sink is None else data.sink.float().numpy()
    lse, sinks, other = (memory.add(t, name) for t, name in ((data.lse.numpy(), "lse"), (sink, "sink"), (none, "none")))
    numbers = case.tokens, case.keys, ctas, heads, 1, heads // kv_heads
    params += [
        struct.pack("<Q3i4x3q", lse, 1, heads, case.tokens, heads * case.tokens, case.tokens, 1),
        struct.pack("<Qi4x", sinks, heads),
        struct.pack("<Qi4x", other, 1),
        struct.pack("<Q", other),
        *(struct.pack("<i", number) for number in numbers),
        struct.pack("<f", case.dims[0] ** -0.5 * math.log2(math.e)),
    ]
    if case.dtype == "e4m3":
        one = memory.add(np.ones(4, np.float32), "scales")
        params += [struct.pack("<f", 1.0), *[struct.pack("<Q", one)] * 4]
    params += [struct.pack("<Q", 0)] * (5 if case.dtype == "e4m3" else 1)
    return [KernelLaunch(ptx, params, (ctas, heads, 1), (config.CTA_MMA, 1, 1), SHARED, None, memory)]


PEERS = {FLASH: flash_attention, CUDNN: cudnn, CUTLASS: cutlass_fmha}
BEYOND = {FLASH: ("exit",), CUDNN: ("lanes", "relaxed"), CUTLASS: ()}  # see ptxsim.call.BEYOND


def run(case: OracleCase, folder: str) -> dict[str, Any]:
    """Run a case and return its row of the record. The process must import the DSL for the case's architecture."""
    os.environ.update(CUTE_DSL_DUMP_DIR=folder, CUTE_DSL_KEEP_PTX="1")
    from ptxsim.runner import RunResult
    from ptxsim.runner import run as simulate

    data, whole = Data(case), RunResult()
    for call in PEERS[case.kernel](case, data):  # one cluster at a time: a cluster may reuse the place of others
        whole.add(simulate(replace(call, beyond=BEYOND[case.kernel]), resident=1))
    o, lse = data.expected(case)
    if case.kernel == CUTLASS:
        lse *= math.log2(math.e)
    mmas = sum(count for name, count in whole.counts.items() if name.startswith("tcgen05.mma"))
    error, lse_error = float((data.o.float() - o).abs().max()), float((data.lse - lse).abs().max())
    found = dict(error=f"{error:.2g}", lse_error=f"{lse_error:.2g}", mmas=mmas)
    return {"kernel": case.kernel, "arch": case.arch, "case": case.name, **found}


def key(row: dict[str, Any]) -> str:
    return f"{row['kernel']} {row['case']}"


def right(row: dict[str, Any]) -> bool:
    case = CASES[key(row)]
    return float(row["error"]) <= TOLERANCE[case.dtype] and float(row["lse_error"]) <= LSE_TOLERANCE


def apart(name: str) -> dict[str, Any]:
    """Execute `run` in its own process."""
    command = [sys.executable, "-m", "tools.oracles", "--row", name]
    environ = os.environ | {"CUTE_DSL_ARCH": CASES[name].arch}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.splitlines()[-1] if done.stderr else done.returncode}")
    return next(csv.DictReader(done.stdout.splitlines()[-1:], COLUMNS))


def recorded(path: Path = RECORD) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(rows: list[dict[str, Any]], out: Any, header: bool = True) -> None:
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)


def markdown() -> str:
    lines = ["| kernel, queries x keys, heads | MMAs | largest error of O | of LSE |", "| --- |" + " --- |" * 3]
    lines += [f"| {key(r)} | {r['mmas']} | {r['error']} | {r['lse_error']} |" for r in recorded()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.oracles", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="*", help="optional `record`, then parts of case names; or `readme`")
    parser.add_argument("--row", help="run one case in this process and print its row")
    parser.add_argument(
        "--cutlass", default=os.environ.get(SOURCE), help=f"a checkout of NVIDIA/cutlass; default: {SOURCE}"
    )
    args = parser.parse_args()
    if args.cutlass:
        os.environ[SOURCE] = args.cutlass
    if args.row:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            row = run(CASES[args.row], folder)
        write([row], sys.stdout, header=False)
        return
    if args.what == ["readme"]:
        fill({"oracles": markdown()})
        return
    record = args.what[:1] == ["record"]
    parts = args.what[record:]
    rows = {key(row): row for row in recorded()}
    for name in CASES:
        if not parts or any(part in name for part in parts):
            rows[name] = row = apart(name)
            print(f"{'right' if right(row) else 'WRONG'}  {name}: error {row['error']}", flush=True)
    if record:
        with RECORD.open("w", newline="") as out:
            write([rows[name] for name in CASES if name in rows], out)


if __name__ == "__main__":
    main()
