"""Kernels of others that run on Blackwell, executed by our simulator: it says of tcgen05 what a device does.

    pip install --no-deps flash-attn-4==4.0.0b36 quack-kernels==0.6.5 triton einops
    python -m tools.oracles [CASE ...]       compile and run the cases of `CASES`, print their errors
    python -m tools.oracles record           all, and write them to tests/data/oracles.csv
    python -m tools.oracles readme           write a table of them into docs/blackwell.md

FlashAttention 4's forward kernels are compiled from tensors without memory, for a device that need not be there. Their
PTX runs as it is, on random data, and results are held against fp32. Only how they end is not looked at (`Call.tidy`):
they leave a barrier behind that waits for bytes.
"""

import argparse
import csv
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.pages import fill

RECORD = Path(__file__).resolve().parents[1] / "tests" / "data" / "oracles.csv"
COLUMNS = ("kernel", "arch", "case", "error", "lse_error", "mmas")
SMS = 2
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

    @property
    def name(self) -> str:
        dims = f"d{self.dims[0]}" + (f"x{self.dims[1]}" if self.dims[0] != self.dims[1] else "")
        kind = "causal" if self.causal else f"window {self.window[0]}" if self.window else "full"
        more = (", cap" if self.soft_cap else "") + (", sink" if self.sink else "")
        shape = f"{self.tokens} x {self.keys}, {self.heads[0]}:{self.heads[1]}"
        return f"{self.arch} {self.dtype} {dims} {kind}{more}, {shape}"


CASES = {
    case.name: case
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


def compiled(case: Case, data: Data, folder: str) -> tuple[Any, list[str]]:
    """(the compiled kernel, its host function in MLIR), in a process whose DSL is imported for the architecture."""
    keep = {"CUTE_DSL_DUMP_DIR": folder, "CUTE_DSL_KEEP_PTX": "1"}
    os.environ.update(keep, FLASH_ATTENTION_ARCH=case.arch, FLASH_ATTENTION_NUM_SMS=str(SMS))
    import cutlass.utils
    from flash_attn.cute import interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    from cute_kernels import build

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
    return next(iter(getattr(known, "cache", known).values())), hosts


def as_numpy(t: torch.Tensor) -> np.ndarray:
    return t.numpy() if t.dtype == torch.float32 else t.view((torch.uint8, torch.int16)[t.itemsize - 1]).numpy()


def arguments(case: Case, data: Data, mlir: str) -> list[Any]:
    """Those of the host function: q, k, v, o, lse, the scale; sizes of a window, a sink; the number of queries."""
    from .ptxsim.host_ir import host_function

    types = [type_ for _, type_ in host_function(mlir)[0] if type_ != "!cuda.stream"]
    given = [*map(as_numpy, (data.q, data.k, data.v, data.o, data.lse)), case.dims[0] ** -0.5]
    numbers = iter([*(case.window or ()), case.tokens])
    for type_ in types[len(given) :]:
        given.append(as_numpy(data.sink) if "memref" in type_ and data.sink is not None else next(numbers))
    return given


def run(case: Case, folder: str) -> dict[str, Any]:
    """A row of the record."""
    from .ptxsim import host
    from .ptxsim.run import Result
    from .ptxsim.run import run as simulate

    data, whole = Data(case), Result()
    kernel, hosts = compiled(case, data, folder)
    for call in host.evaluate(hosts[-1], kernel.__ptx__, arguments(case, data, hosts[-1]), 227 << 10):
        whole.add(simulate(replace(call, tidy=False)))
    o, lse = data.expected(case)
    mmas = sum(count for name, count in whole.counts.items() if name.startswith("tcgen05.mma"))
    error, lse_error = float((data.o.float() - o).abs().max()), float((data.lse - lse).abs().max())
    found = dict(error=f"{error:.2g}", lse_error=f"{lse_error:.2g}", mmas=mmas)
    return {"kernel": "flash-attn-4 4.0.0b36", "arch": case.arch, "case": case.name, **found}


def right(row: dict[str, Any]) -> bool:
    case = CASES[row["case"]]
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
    lines = ["| flash-attn-4, queries x keys, heads | MMAs | largest error of O | of LSE |", "| --- |" + " --- |" * 3]
    lines += [f"| {r['case']} | {r['mmas']} | {r['error']} | {r['lse_error']} |" for r in recorded()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.oracles", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="*", help="names of cases, or parts of them; `record`; `readme`")
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
    record = args.what == ["record"]
    names = [name for name in CASES if record or not args.what or any(part in name for part in args.what)]
    rows = []
    for name in names:
        rows.append(apart(name))
        print(f"{'right' if right(rows[-1]) else 'WRONG'}  {name}: error {rows[-1]['error']}", flush=True)
    if record:
        with RECORD.open("w", newline="") as out:
            write(rows, out)


if __name__ == "__main__":
    main()
