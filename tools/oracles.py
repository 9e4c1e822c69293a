"""Kernels of others that run on Blackwell, executed by our simulator: it says of tcgen05 what a device does.

    pip install --no-deps flash-attn-4==4.0.0b36 quack-kernels==0.6.5 triton einops nvidia-cudnn-frontend==1.32.0
    python -m tools.oracles [CASE ...]           compile and run the cases of `CASES`, print their errors
    python -m tools.oracles record [CASE ...]    the same, and write their rows to tests/data/oracles.csv
    python -m tools.oracles readme               write a table of them into docs/blackwell.md

FlashAttention 4's and cuDNN's open forward kernels are compiled from tensors without memory, for a device that need not
be there. Their PTX runs as it is, on random data, and results are held against fp32. What they rely on beyond the text
of the ISA, `BEYOND` says.
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
FLASH, CUDNN = "flash-attn-4 4.0.0b36", "cudnn-frontend 1.32.0"
SMS, SHARED = 2, 227 << 10  # SMs, bytes of shared memory
TOLERANCE = {"bf16": 1e-2, "fp16": 2e-3, "e4m3": 6e-2}  # of N(0, 1) data; P is rounded to the type, too
LSE_TOLERANCE = 1e-3
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Case:
    """A call of the forward kernel: one request of `tokens` queries and `keys` keys, heads_q query heads."""

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
        Case("sm_100a"),
        Case("sm_100a", "fp16", dims=(64, 64)),
        Case("sm_100a", tokens=300, keys=500, causal=False),
        Case("sm_100a", tokens=1024, keys=1024, heads=(2, 2), causal=False),
        Case("sm_100a", sink=True),
        Case("sm_100a", soft_cap=20.0),
        Case("sm_100a", tokens=400, keys=400, causal=False, window=(100, 0)),
        Case("sm_100a", dims=(192, 128), heads=(2, 2)),
        Case("sm_100a", dims=(256, 256), heads=(2, 2), tokens=256, keys=256),
        Case("sm_100a", "e4m3"),
        Case("sm_103a"),
        Case("sm_103a", "e4m3"),
        Case("sm_100a", kernel=CUDNN),
        Case("sm_100a", "fp16", kernel=CUDNN),
        Case("sm_100a", tokens=300, keys=500, kernel=CUDNN),
        Case("sm_100a", tokens=300, keys=500, causal=False, kernel=CUDNN),
        Case("sm_100a", tokens=1024, keys=1024, heads=(4, 1), causal=False, kernel=CUDNN),
        Case("sm_100a", sink=True, kernel=CUDNN),
        Case("sm_100a", tokens=400, keys=400, causal=False, window=(100, 0), kernel=CUDNN),
        Case("sm_103a", kernel=CUDNN),
        Case("sm_103a", tokens=300, keys=500, causal=False, kernel=CUDNN),
    )
}


class Data:
    """Tensors of a case."""

    def __init__(self, case: Case):
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

    def expected(self, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        """(o, lse in natural units) in fp32."""
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


def flash_attention(case: Case, data: Data) -> list[Any]:
    """The launches (ptxsim.call.Call) of flash-attn-4, by its host function."""
    os.environ.update(FLASH_ATTENTION_ARCH=case.arch, FLASH_ATTENTION_NUM_SMS=str(SMS))
    import cutlass.utils
    from flash_attn.cute import interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    from cute_kernels import build

    from .ptxsim import host

    class Hardware:
        get_max_active_clusters = staticmethod(lambda size=1, *_, **__: SMS // size)
        get_device_multiprocessor_count = staticmethod(lambda *_, **__: SMS)
        get_l2_cache_size_in_bytes = staticmethod(lambda *_, **__: 126 << 20)

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


def arguments(case: Case, data: Data, mlir: str) -> list[Any]:
    """Those of the host function: q, k, v, o, lse, the scale; sizes of a window, a sink; the number of queries."""
    from .ptxsim.host_ir import host_function

    types = [type_ for _, type_ in host_function(mlir)[0] if type_ != "!cuda.stream"]
    given = [*map(as_numpy, (data.q, data.k, data.v, data.o, data.lse)), case.dims[0] ** -0.5]
    numbers = iter([*(case.window or ()), case.tokens])
    for type_ in types[len(given) :]:
        given.append(as_numpy(data.sink) if "memref" in type_ and data.sink is not None else next(numbers))
    return given


def cudnn_module(params: dict[str, Any]) -> Any:
    """cuDNN's kernel for head_dim 128 in 16 bits, imported past the package's compiled part. params: fields of its
    TemplateParams."""
    found = find_spec("cudnn")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("nvidia-cudnn-frontend is not installed")
    root = Path(next(iter(found.submodule_search_locations)))
    package: Any = ModuleType("cudnn")
    package.__path__, package.__version__, package._pybind_module = [str(root)], "", SimpleNamespace()
    package.data_type = type("Names", (), {"__getattr__": lambda self, name: name})()
    sys.modules["cudnn"] = package
    from cudnn.sdpa.fwd.config_sm100 import TemplateParams

    name = "cudnn.sdpa.fwd.kernels.sm100.prefill_d128_f16"
    spec: Any = spec_from_file_location(name, root / "sdpa/fwd/kernels/sm100/prefill_d128_f16.py")
    module: Any = module_from_spec(spec)
    module.FROST_TEMPLATE_PARAMS = TemplateParams(**params)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def cudnn(case: Case, data: Data) -> list[Any]:
    """The launch of cuDNN's kernel. Its host function encodes tensor maps in operations of its own: they are made here.

    Parameters: maps of q, k, v and o; LSE with shape and strides; sinks, key counts and descriptors of ragged calls;
    then numbers of query tokens, keys, CTAs of a head, heads, requests, query heads of a KV head; scale; no row counts.
    """
    import cutlass.cute as cute

    from .ptxsim.call import Call, Global, TensorMap

    full = not (case.causal or case.window)
    right = 0 if case.causal else case.window[1] if case.window else None
    module = cudnn_module(
        {
            "dtype_qkv": {"bf16": 2, "fp16": 3}[case.dtype],
            "window_left": case.window[0] if case.window else None,
            "window_right": right,
            "bottom_right": right is not None,
            "has_sink": case.sink,
            "qh_per_kh": case.heads[0] // case.heads[1],
            "kv_tail_mask": full and case.keys % 128 > 0,
            "exp2_fma_split": full and case.arch == "sm_100a",
            "fused_ldtm_stat": case.arch == "sm_103a",
        }
    )
    kernels = []

    def compile_now(function: Any, *args: Any, cache_key: Any = None, symbol: Any = None, **options: Any) -> Any:
        kernels.append(cute.compile(function, *args, **options))
        return kernels[-1]

    module._compile_cached = compile_now
    module.compile()

    config, memory, none = module.CFG, Global(), np.zeros(16, np.uint8)

    def mapped(t: torch.Tensor, name: str, rows: int, swizzle: int) -> TensorMap:
        _, length, heads, dim = t.shape
        strides = dim * 2, heads * dim * 2, length * heads * dim * 2
        address, box = memory.add(as_numpy(t), name), (swizzle // 2, 1, rows, 1)
        return TensorMap(address, (dim, heads, length, 1), strides, box, case.dtype.replace("fp", "f"), swizzle)

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
        struct.pack("<Q", 0),
    ]
    return [Call(kernels[0].__ptx__, params, (ctas, heads, 1), (config.CTA_MMA, 1, 1), SHARED, None, memory)]


PEERS = {FLASH: flash_attention, CUDNN: cudnn}
BEYOND = {FLASH: ("exit",), CUDNN: ("lanes", "relaxed")}  # what each relies on: ptxsim.call.BEYOND


def run(case: Case, folder: str) -> dict[str, Any]:
    """A row of the record, in a process whose DSL is imported for the architecture."""
    os.environ.update(CUTE_DSL_DUMP_DIR=folder, CUTE_DSL_KEEP_PTX="1")
    from .ptxsim.run import Result
    from .ptxsim.run import run as simulate

    data, whole = Data(case), Result()
    for call in PEERS[case.kernel](case, data):  # one cluster at a time: it may take the place of others
        whole.add(simulate(replace(call, beyond=BEYOND[case.kernel]), resident=1))
    o, lse = data.expected(case)
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
    """`run` in a process of its own."""
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
    parser.add_argument("what", nargs="*", help="`record` or not, and parts of the names of cases; `readme`")
    parser.add_argument("--row", help="run one case here, and print its row")
    args = parser.parse_args()
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
