"""Run small calls of every kernel structure under compute-sanitizer, in pieces that end.

    python -m tools.sanitize [--tool racecheck ...] [--piece decode ...] [--jobs 14] [--minutes 9] [--out FOLDER]
    python -m tools.sanitize --call PIECE [--device cuda]    the calls of one piece, as a tool runs them
    python -m tools.sanitize --keep FOLDER/sanitizers.csv    add the rows of a run to bench/results/sanitizers

There is one process for each tool and piece (`pieces.PIECES`), `--jobs` of them side by side. Build a bundle first. A
line per process has its result, and the file sanitizers.csv of the folder its row; outputs lie beside it. The exit
status is the number of processes that failed, did not end or reported anything that `report.EXPECTED` does not excuse.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from bench import results
from bench.results import Environment, SanitizerRow

from . import calls, report
from .pieces import ON_DEMAND, PIECES

ROOT = Path(__file__).resolve().parents[2]
BARRIERS = ["--num-cuda-barriers", "256"]  # mbarriers per CTA that the tools track; the compiler's count may be too low
OURS = "regex=attention_|topk_|cache_write_|latent_|merge_states_|indexer_"
ONLY_OURS = ["--kernel-name", OURS]  # initcheck must see all that write
TOOLS = {  # the slow ones first
    "racecheck": BARRIERS + ONLY_OURS,
    "initcheck": [],
    "memcheck": ["--padding", "512"],  # the memory between two allocations belongs to none
    "synccheck": BARRIERS + ONLY_OURS,
}
# Every tensor is its own allocation: the memory beside it belongs to no tensor, and new memory has no old contents.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
FILE = "sanitizers.csv"


def sanitizer_path() -> str:
    """Return the path of compute-sanitizer on this machine, or its name."""
    toolkits = sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))
    return shutil.which("compute-sanitizer") or (str(toolkits[0]) if toolkits else "compute-sanitizer")


def command_of(tool: str, piece: str, args: argparse.Namespace, seconds: float) -> list[str]:
    tooled = [args.sanitizer, "--tool", tool, "--print-limit", "1000", "--show-backtrace", "no", *TOOLS[tool]]
    python = [sys.executable, "-m", "tools.sanitize", "--call", piece]
    return ["timeout", "--kill-after=10", f"{seconds:.0f}", *tooled, *python]


def check(tool: str, piece: str, args: argparse.Namespace, env: Environment, end: float) -> SanitizerRow:
    """Run a piece under a tool until `end` at most, and return its row. Its output goes to a file of the folder."""
    start = time.monotonic()
    seconds = min(args.timeout, end - start)
    if seconds < 1:
        found, text = report.Findings("not begun", None, []), ""
    else:
        compiles = {"CUTE_KERNELS_JIT": str(int(piece in ON_DEMAND))}
        ended = subprocess.run(
            command_of(tool, piece, args, seconds), cwd=ROOT, env=os.environ | ENVIRONMENT | compiles, text=True,
            errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        text = ended.stdout
        found = report.read(tool, text)
        Path(args.out, f"{tool}-{piece}.txt").write_text(text)
    spent = time.monotonic() - start
    row = env.make(
        SanitizerRow, tool=tool, piece=piece, calls=float(len(PIECES[piece])), seconds=spent, status=found.status,
        errors=None if found.errors is None else float(found.errors), reason=found.reason,
    )  # fmt: skip
    last = "" if found.status != report.UNFINISHED else " ".join(text.strip().splitlines()[-1:])[:200]
    print(f"{found.status:11} {tool:9} {piece}: {found.errors} errors, {spent:.0f} s {last}", flush=True)
    for block in found.unexpected[:3]:
        print(f"  {block}", flush=True)
    return row


def sanitize(args: argparse.Namespace, env: Environment) -> int:
    """Run the chosen pieces under the chosen tools, and return how many are not clean."""
    end = time.monotonic() + 60 * args.minutes
    out, bad = Path(args.out), 0
    out.mkdir(parents=True, exist_ok=True)
    pieces = [piece for piece in PIECES if piece.startswith(tuple(args.piece))]
    with ThreadPoolExecutor(args.jobs) as pool:
        tasks = [pool.submit(check, tool, piece, args, env, end) for tool, piece in product(args.tool, pieces)]
        for task in as_completed(tasks):
            row = task.result()
            results.append(out / FILE, [row])
            bad += row.status not in (report.CLEAN, report.EXPECTED_ONLY)
    print(f"{len(tasks)} processes, {bad} not clean -> {out / FILE}", flush=True)
    return bad


def keep(path: Path) -> int:
    """Add the rows of a run to those of its GPU. Outputs beside the csv are read again, with the excuses of today."""
    rows = []
    for row in results.read(path, SanitizerRow):
        output = path.with_name(f"{row.tool}-{row.piece}.txt")
        if output.exists():
            found = report.read(row.tool, output.read_text())
            errors = None if found.errors is None else float(found.errors)
            row = replace(row, status=found.status, errors=errors, reason=found.reason)
        rows.append(row)
    results.append(results.file_of(SanitizerRow, rows[0].gpu), rows)
    return sum(row.status not in (report.CLEAN, report.EXPECTED_ONLY) for row in rows)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.sanitize", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--piece", nargs="+", default=[""], help="pieces that begin so")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--timeout", type=float, default=240, help="time limit of a process, in seconds")
    parser.add_argument("--minutes", type=float, default=60, help="time limit of all; the rest does not begin")
    parser.add_argument("--out", default=str(ROOT / "build" / "sanitize"), help="folder of the csv and the outputs")
    parser.add_argument("--sanitizer", default=sanitizer_path(), help="path of compute-sanitizer")
    parser.add_argument("--call", choices=PIECES, help="make the calls of this piece")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--keep", type=Path, help="add the rows of this csv to bench/results")
    args = parser.parse_args(given)
    if args.keep:
        return keep(args.keep)
    if args.call:
        print(calls.run(args.call, torch.device(args.device)), calls.DONE)
        return 0
    return sanitize(args, results.environment())


if __name__ == "__main__":
    sys.exit(main())
