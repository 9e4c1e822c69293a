"""Run small calls of attention and top-k under compute-sanitizer.

    python -m tools.sanitize [--tool racecheck ...] [--op decode-bf16 ...] [--timeout 240] [--logs FOLDER]
    python -m tools.sanitize --call OP [--device cuda]    the calls of one operator, as a tool runs them

There is one process per tool and operator (`OPS`), one after another. Inputs are made on the CPU and copied as whole
storages, so that few kernels other than ours run, and each result is compared with the reference. The calls cover each
feature, each combination of types and head dimensions, and batches that give a CTA several tiles, whole and split.
Build a bundle first. A line per process has the tool's summary; the exit status is the number of processes that failed
or reported anything, the output of which is printed.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch

from bench.cases import attention, topk
from bench.cases.attention import AttentionCase
from bench.cases.topk import DECODE, PAGE_TABLE, PREFILL, RAGGED, TOP_K, TopKCase
from wrappers import TopKTieBreak

ROOT = Path(__file__).resolve().parents[1]
BARRIERS = ["--num-cuda-barriers", "256"]  # mbarriers per CTA that the tools track; the compiler's count may be too low
ONLY_OURS = ["--kernel-name", "regex=attention_|topk_|cache_write_|merge_states_"]  # initcheck must see all that write
TOOLS = {
    "memcheck": ["--padding", "512"],  # the memory between two allocations belongs to none
    "racecheck": BARRIERS + ONLY_OURS,
    "synccheck": BARRIERS + ONLY_OURS,
    "initcheck": [],
}
DONE, NOTHING = "calls, all right", ("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards")
# Every tensor is its own allocation: the memory beside it belongs to no tensor, and new memory has no old contents.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
DIMS = {"64": (64, 64), "128": (128, 128), "192x128": (192, 128), "256": (256, 256)}
EQUAL_DIMS = {name: pair for name, pair in DIMS.items() if pair[0] == pair[1]}


def prefill_features() -> Iterator[AttentionCase]:
    """Yield page sizes with layouts and caches, rows and requests without keys, and scales on the device."""
    packed = AttentionCase("", q_lens=(5, 0, 2), kv_lens=(1190, 9, 83), heads_q=6, data="needles", sink=True)
    plain = replace(packed, q_lens=(3, 150), kv_lens=(61, 333), heads_q=2)
    changes: tuple[tuple[AttentionCase, dict[str, Any]], ...] = (
        (packed, {"page_size": 8, "layout": "NHD", "separate_tables": True}),
        (plain, {"page_size": 16, "cache": "stacked", "layout": "NHD", "strided_q": True}),
        (plain, {"page_size": 32, "head_dim_qk": 128, "head_dim_vo": 128}),
        (plain, {"page_size": 64, "causal": False, "window_left": 101}),
        (plain, {"page_size": 128, "window_left": 90, "soft_cap": 9.0}),
        (packed, {"page_size": 256, "cache": "shared", "device": ("scale", "out"), "out_scale": -1.7}),
        (plain, {"q_lens": (3, 200, 7), "kv_lens": (0, 9, 2)}),
        (packed, {"q_lens": (3, 40, 7), "kv_lens": (0, 9, 2), "sink": False}),
        (packed, {"window_left": 0, "heads_q": 5, "heads_kv": 1, "uint32_lens": True}),
        (packed, {"q_lens": (0, 1, 0, 2) * 18, "kv_lens": (5, 9, 0, 40) * 18}),
    )
    yield from (replace(case, name=str(fields), **fields) for case, fields in changes)


def decode_features() -> Iterator[AttentionCase]:
    """Yield the features of `prefill_features`, and output types."""
    few = AttentionCase(
        "", q_lens=(1, 1, 1), kv_lens=(1300, 0, 83), heads_q=6, data="needles", sink=True, function="decode"
    )
    changes: tuple[dict[str, Any], ...] = (
        {"page_size": 8, "layout": "NHD"},
        {"page_size": 16, "window_left": 600, "separate_tables": True, "q_lens": (4, 0, 3)},
        {"page_size": 32, "strided_q": True, "uint32_lens": True, "head_dim_qk": 128, "head_dim_vo": 128},
        {"page_size": 128, "cache": "stacked", "layout": "NHD", "q_lens": (4, 0, 3)},
        {"page_size": 256, "cache": "shared"},
        {"soft_cap": 5.0, "device": ("log2", "out"), "out_scale": -0.3, "o_scale": 7.0, "q_lens": (4, 0, 3)},
        {"kv_dtype": "fp8", "out_dtype": "fp8", "out_scale": 300.0, "o_scale": 3.0},
        {"kv_dtype": "nvfp4", "out_dtype": "fp8", "interleaved": True, "separate_tables": True},
        {"q_lens": (2, 9, 3), "kv_lens": (0, 4, 300), "sink": False},
        {"q_lens": (0, 1, 0, 2) * 18, "kv_lens": (5, 9, 0, 40) * 18},
        {"q_lens": (40, 3), "kv_lens": (256, 60), "heads_q": 2, "heads_kv": 1, "drafts": True},
    )
    yield from (replace(few, name=str(fields), **fields) for fields in changes)


def _xqa() -> Iterator[AttentionCase]:
    one = AttentionCase(
        "", q_lens=(1, 1, 1), kv_lens=(600, 0, 83), heads_q=6, data="needles", sink=True, lse=False, function="xqa",
        layout="NHD", uint32_lens=True,
    )  # fmt: skip
    changes: tuple[dict[str, Any], ...] = (
        {"cache": "flat", "window_left": 300, "out_scale": 0.7, "zero_page": True},
        {
            "q_lens": (5, 5),
            "kv_lens": (512, 83),
            "drafts": True,
            "kv_dtype": "fp8",
            "out_dtype": "fp8",
            "o_scale": 30.0,
        },
        {"q_lens": (3, 0, 5), "kv_lens": (140, 9, 83), "drafts": True, "layout": "HND", "page_size": 128},
        {"kv_dtype": "nvfp4", "interleaved": True, "page_size": 32, "dtype": "fp16"},
    )
    yield from (replace(one, name=str(fields), **fields) for fields in changes)


def _prefill() -> Iterator[AttentionCase]:
    base = AttentionCase("", q_lens=(37, 3, 130), kv_lens=(67, 40, 333), heads_q=2, data="needles", sink=True)
    masks: tuple[dict[str, Any], ...] = ({}, {"causal": False, "window_left": 50}, {"soft_cap": 9.0})
    ragged: dict[str, Any] = {"q_lens": (5, 0, 1), "kv_lens": (19, 7, 301), "heads_q": 6, "page_size": 8}
    for name, (qk, vo) in DIMS.items():
        case = replace(base, head_dim_qk=qk, head_dim_vo=vo)
        for changes in (*masks, ragged):
            yield replace(case, name=f"{name} {changes}", **changes)
    yield replace(base, name="many tiles", q_lens=(140,) * 10, kv_lens=(150,) * 10, heads_q=16, heads_kv=8)


def _decode(kv_dtype: str, dtype: str) -> Iterator[AttentionCase]:
    """Yield a few rows, enough rows for another kernel, drafts, and batches that reach every CTA."""
    base = AttentionCase(
        "", dtype, q_lens=(1, 1, 1), kv_lens=(1300, 0, 83), heads_q=6, data="needles", sink=True, function="decode",
        kv_dtype=kv_dtype,
    )  # fmt: skip
    many = {"q_lens": (1,) * 40, "kv_lens": (300, 9, 1, 60) * 10, "heads_kv": 4}
    calls: tuple[dict[str, Any], ...] = (
        {}, {"q_lens": (4, 1, 3), "fresh": True}, {"q_lens": (3, 3, 3), "kv_lens": (900, 3, 83), "drafts": True},
        many | {"heads_q": 8}, many | {"heads_q": 40, "window_left": 200, "skip": 1e-30},
        {"invariant": True, "kv_lens": (5000, 0, 83), "soft_cap": 9.0},
    )  # fmt: skip
    for name, (qk, vo) in EQUAL_DIMS.items():
        for changes in calls if qk == 64 else calls[:3]:
            yield replace(base, name=f"{name} {changes}", head_dim_qk=qk, head_dim_vo=vo, **changes)


def _top_k(rows: int, width: int, k: int) -> Iterator[TopKCase]:
    """Yield calls of all functions on rows of one width, with ties, for 32-bit and 16-bit keys."""
    for dtype in ("fp32", "bf16"):
        yield TopKCase(PAGE_TABLE, dtype, rows, width, k, ("shelf", "special"), "mixed", page_size=16, batch_map=True)
        yield TopKCase(RAGGED, dtype, rows, width, k, "normal", "mixed", starts=True, tie_break=TopKTieBreak.LARGE)
        yield TopKCase(TOP_K, dtype, rows, width, k, "257 ties")
        yield TopKCase(TOP_K, dtype, rows, width, k, ("special", "normal"), sorted=True)
        yield TopKCase(PREFILL, dtype, rows, width, k, "low bits", "mixed", starts=True)
        yield TopKCase(DECODE, dtype, rows, width, k, "normal", "mixed", next_n=rows)


def _few_top_k(rows: int, width: int, k: int) -> Iterator[TopKCase]:
    """Yield two of these calls, for long rows."""
    return (case for case in _top_k(rows, width, k) if (case.function, case.dtype) in SOME)


SOME = {(PAGE_TABLE, "fp32"), (RAGGED, "bf16")}
Case = AttentionCase | TopKCase
OPS: dict[str, Callable[[], Iterator[Case]]] = {
    "prefill-features": prefill_features,
    "prefill": _prefill,
    "decode-features": decode_features,
    "decode-bf16": lambda: _decode("", "bf16"),
    "decode-e4m3": lambda: _decode("fp8", "bf16"),
    "decode-nvfp4": lambda: _decode("nvfp4", "fp16"),
    "xqa": _xqa,
    "topk-cta": lambda: _top_k(5, 3000, 300),
    "topk-clusters": lambda: chain(_top_k(3, 30_001, 300), _top_k(3, 70_001, 300)),
    "topk-streamed": lambda: chain(_few_top_k(140, 50_003, 64), _few_top_k(1, 1_600_003, 64)),
}


def moved(value: Any, device: str) -> Any:
    """Copy tensors to another device with their strides, also inside tuples and dictionaries. Copies whole storages."""
    if isinstance(value, dict):
        return {name: moved(inner, device) for name, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(moved(inner, device) for inner in value)
    if not isinstance(value, torch.Tensor) or value.device == torch.device(device):
        return value
    whole = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).to(device)
    form = value.storage_offset(), value.shape, value.stride()
    return torch.empty(0, dtype=value.dtype, device=device).set_(whole.untyped_storage(), *form)


def attend(case: AttentionCase, device: str) -> None:
    """Compare an attention call with its reference."""
    function, arguments = attention.FUNCTIONS[case.function]
    problem = attention.make_call(case)
    want, want_lse = attention.expected(case, problem)
    inputs = moved(arguments(case, problem), device)
    result = function(**inputs)
    out, lse = result if case.lse and case.function != "xqa" else (result, None)
    out = (inputs["output"] if case.function == "xqa" else out).cpu().reshape(want.shape).float()
    assert ((out - want).abs() <= case.limit(want)).all(), case
    if lse is not None:
        torch.testing.assert_close(lse.cpu(), want_lse, rtol=case.lse_tolerance, atol=case.lse_tolerance)


def choose(case: TopKCase, device: str) -> None:
    """Compare the bits of a top-k call with the reference's."""
    inputs = topk.make_inputs(case)
    there = moved(inputs, device)
    with topk.on_reference():
        want = topk.call(case.function, inputs)
    topk.same({name: t.cpu() for name, t in topk.call(case.function, there).items()}, want, case)


def run(op: str, device: str) -> int:
    """Make the calls of an operator and return their number."""
    torch.zeros(1, device=device)  # the tool gives up on a process that makes no CUDA context for 10 s
    cases = list(OPS[op]())
    for case in cases:
        attend(case, device) if isinstance(case, AttentionCase) else choose(case, device)
    return len(cases)


def is_clean(text: str) -> bool:
    """Return whether the calls were right, and the tool ended and reported nothing."""
    return DONE in text and any(line in text for line in NOTHING)


def check(tool: str, op: str, args: argparse.Namespace) -> bool:
    """Run the calls of an operator under a tool, and return whether they are clean."""
    command = [args.sanitizer, "--tool", tool, "--print-limit", "100", "--show-backtrace", "no", *TOOLS[tool]]
    command = ["timeout", "--kill-after=10", str(args.timeout), *command, sys.executable, "-m", "tools.sanitize"]
    ended = subprocess.run(
        [*command, "--call", op], cwd=ROOT, env=os.environ | ENVIRONMENT, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    text, clean = ended.stdout, is_clean(ended.stdout)
    if args.logs:
        Path(args.logs).mkdir(parents=True, exist_ok=True)
        Path(args.logs, f"{tool}-{op}.txt").write_text(text)
    summary = [line for line in text.splitlines() if "SUMMARY" in line] or [f"did not end: status {ended.returncode}"]
    print(f"{'clean' if clean else 'FOUND'} {tool} {op}: {summary[-1]}", flush=True)
    print("" if clean else text, end="", flush=True)
    return clean


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.sanitize", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--op", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--timeout", type=float, default=240, help="time limit of a process, in seconds")
    parser.add_argument("--logs", help="folder for the output of each process")
    toolkits = sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))
    found = shutil.which("compute-sanitizer") or (str(toolkits[0]) if toolkits else "compute-sanitizer")
    parser.add_argument("--sanitizer", default=found, help="path of compute-sanitizer")
    parser.add_argument("--call", choices=OPS, help="make the calls of this operator")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if args.call:
        print(run(args.call, args.device), DONE)
        return 0
    return sum(not check(tool, op, args) for tool, op in product(args.tool, args.op))


if __name__ == "__main__":
    sys.exit(main())
