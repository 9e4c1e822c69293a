"""Run compute-sanitizer: find it, set its options, limit the time."""

import argparse
import os
import shutil
import subprocess
from pathlib import Path

BARRIERS = 256  # mbarriers per CTA that the tools track; the compiler's own count may be too low
OPTIONS = {
    "memcheck": ["--padding", "512"],  # the memory between two allocations belongs to none
    "racecheck": ["--num-cuda-barriers", str(BARRIERS)],
    "synccheck": ["--num-cuda-barriers", str(BARRIERS)],
    "initcheck": [],
}
LIMIT = "100"  # reports printed per process; the tools count all


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments that every use of the tools has."""
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--sanitizer", default=find(), help="path of compute-sanitizer")
    parser.add_argument(
        "--option", nargs="+", action="extend", default=[], help="further options of compute-sanitizer, without --"
    )
    parser.add_argument("--timeout", type=float, default=240, help="time limit of a process, in seconds")
    parser.add_argument("--jobs", type=int, default=max(1, cores // 2), help="number of concurrent processes")


def find() -> str:
    """Return the path of compute-sanitizer: on PATH, or in a CUDA toolkit."""
    toolkits = sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"), key=lambda p: (p.parts[3] != "cuda", p))
    return shutil.which("compute-sanitizer") or (str(toolkits[0]) if toolkits else "compute-sanitizer")


def version(sanitizer: str) -> str:
    """Return the tool's version line."""
    try:
        text = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"no compute-sanitizer: {error}") from None
    return " ".join(text.split())


def command(sanitizer: str, tool: str, options: list[str]) -> list[str]:
    """Return the words that precede the checked command. options: as on the command line, without their dashes."""
    more = [f"--{word}" if i == 0 else word for option in options for i, word in enumerate(option.split("="))]
    return [sanitizer, "--tool", tool, "--print-limit", LIMIT, "--show-backtrace", "no", *OPTIONS[tool], *more]


def run(words: list[str], timeout: float, gpu: int = 0) -> str:
    """Run a command on one GPU and return its output and errors. It is killed after `timeout` seconds."""
    limited = ["timeout", "--kill-after=10", str(timeout), *words]
    ended = subprocess.run(
        limited, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)},
    )  # fmt: skip
    note = {124: f"timed out after {timeout:.0f} s", 137: f"killed after {timeout:.0f} s"}.get(ended.returncode)
    return ended.stdout + (f"\n{note}\n" if note else "")
