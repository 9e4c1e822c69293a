"""Run all operators under compute-sanitizer and print what each tool reports.

    python -m tools.sanitize [--tool racecheck ...] [--op decode-bf16 ...] [--jobs 8] [--timeout 240] [--logs FOLDER]

There is one process per tool and operator (`calls.OPS`); several run side by side, on all GPUs in turn. The output is a
table, then the findings: kind, kernel, the accesses with their SASS addresses (and source lines, if the kernels have
line info), and the count. Calls use the usual kernels, so build a bundle first. The exit status is 1 if a process
failed or a tool reported anything.
"""

import argparse
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from . import under
from .report import SanitizerReport, lines, parse

ROOT = Path(__file__).resolve().parents[2]
# Every tensor is its own allocation: the memory beside it belongs to no tensor, and new memory has no old contents.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
# racecheck checks only shared memory, so it runs only on our kernels; initcheck must see every kernel that writes.
ONLY_OURS = ["--kernel-name", "regex=attention_|topk_|cache_write_|merge_states_"]
FILTERED = ("racecheck", "synccheck")
DONE = re.compile(r"^(\d+) calls, (\d+) launches, all right$", re.MULTILINE)


class SanitizerRun(NamedTuple):
    """The result of one process. done: (calls, launches) from its last line, None if it failed. text: everything it
    printed."""

    tool: str
    op: str
    seconds: float
    done: tuple[int, int] | None
    report: SanitizerReport
    text: str

    @property
    def clean(self) -> bool:
        return self.done is not None and bool(self.report.summary) and not self.report.found


def check(tool: str, op: str, gpu: int, args: argparse.Namespace) -> SanitizerRun:
    """Run one process under one tool, on one GPU."""
    start = time.monotonic()
    options = under.command(args.sanitizer, tool, args.option) + (ONLY_OURS if tool in FILTERED else [])
    text = under.run([*options, sys.executable, "-m", "tools.sanitize.calls", op], args.timeout, gpu)
    if args.logs:
        Path(args.logs).mkdir(parents=True, exist_ok=True)
        Path(args.logs, f"{tool}-{op}.txt").write_text(text)
    found = DONE.search(text)
    done = (int(found[1]), int(found[2])) if found else None
    return SanitizerRun(tool, op, time.monotonic() - start, done, parse(text), text)


def row(e: SanitizerRun) -> str:
    calls, launches = e.done or ("-", "FAILED")
    summary = e.report.summary or "the tool did not finish"
    return f"| {e.tool} | {e.op} | {calls} | {launches} | {e.report.count} | {summary} | {e.seconds:.0f} |"


def details(e: SanitizerRun) -> list[str]:
    """Return the details that a row of the table leaves out."""
    if e.clean:
        return []
    tail = [] if e.done and e.report.summary else [line for line in e.text.splitlines() if line.strip()][-6:]
    return [f"{e.tool} {e.op}:", *lines(e.report), *(f"         {line}" for line in tail)]


def main() -> None:
    from .calls import OPS

    parser = argparse.ArgumentParser(prog="python -m tools.sanitize", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tool", nargs="+", choices=under.OPTIONS, default=list(under.OPTIONS))
    parser.add_argument("--op", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--logs", help="folder for the output of each process")
    under.arguments(parser)
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    os.chdir(ROOT)
    print(under.version(args.sanitizer))
    print("| tool | op | calls | launches | reported | the tool's summary | s |")
    print("| --- | --- | ---: | ---: | ---: | --- | ---: |")
    ended = []
    with ThreadPoolExecutor(args.jobs) as pool:
        pairs, gpus = product(args.tool, args.op), max(1, torch.cuda.device_count())
        for future in [pool.submit(check, *pair, n % gpus, args) for n, pair in enumerate(pairs)]:
            ended.append(future.result())
            print(row(ended[-1]), flush=True)
    for e in ended:
        for line in details(e):
            print(line, flush=True)
    raise SystemExit(0 if all(e.clean for e in ended) else 1)


if __name__ == "__main__":
    main()
