"""Draw and check calls in one process, and replay kept files."""

import argparse
import json
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch

from . import call as calls
from .call import Call
from .check import FAILED, Checker, DeviceLost, Verdict
from .draw import draw
from .shrink import shrink
from .tally import Tally, commit

PROGRESS = 10.0  # seconds between two lines
MOST_FAILURES = 20  # a process ends after this many
SHRINKING = 20.0  # seconds for each failing call


def device_of(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: no CUDA device is available; --device cpu tests the CPU path")
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def keep(folder: Path, call: Call, verdict: Verdict, seed: int, index: int, name: str) -> Path:
    """Write a failing call to a file that replays."""
    facts = {"problem": verdict.reason, "drawn": [seed, index], "commit": commit()}
    return calls.save(folder / name, call, **facts)


def fuzz(args: argparse.Namespace, check: Callable[[Call], Verdict] | None = None) -> Tally:
    """Draw and check calls until time or number is reached, and return their tally.

    The file of the call at hand lies in the folder while the call runs, so that it is there if the process dies.
    """
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False  # expected results are computed in fp32
    check = check or Checker(device_of(args.device), args.compile).check
    tally, folder = Tally(), Path(args.keep)
    start = shown = time.monotonic()
    current = folder / f"current-{args.seed}.json"
    for index in count(args.first):
        now = time.monotonic()
        if now - start > 60 * args.minutes or args.calls and index - args.first >= args.calls:
            break
        if now - shown > PROGRESS:
            print(f"seed {args.seed}: {tally.line()}, {tally.count() / (now - start):.1f} calls/s", flush=True)
            shown = now
            if args.tally:
                tally.write(Path(args.tally))
        call = draw(args.seed, index, tuple(args.family), args.compile, args.small or args.device == "cpu")
        calls.save(current, call, drawn=[args.seed, index])
        try:
            verdict = check(call)
            if verdict.word == FAILED:
                report(args, tally, call, verdict, index, check)
        except DeviceLost as lost:
            verdict = Verdict(FAILED, f"the device is lost: {lost}")
            path = keep(folder, call, verdict, args.seed, index, f"lost-{args.seed}-{index}.json")
            tally.files.append(str(path))
            print(f"DEVICE LOST at call {index} of seed {args.seed}: {path}\n  {lost}\n  {call}", flush=True)
            tally.add(call.family, verdict.word, verdict.reason)
            break
        tally.add(call.family, verdict.word, verdict.reason)
        if tally.count(FAILED) >= MOST_FAILURES:
            print(f"seed {args.seed}: {MOST_FAILURES} calls failed, so this process ends", flush=True)
            break
    current.unlink(missing_ok=True)
    if args.tally:
        tally.write(Path(args.tally))
    return tally


def report(
    args: argparse.Namespace, tally: Tally, call: Call, verdict: Verdict, index: int, check: Callable[[Call], Verdict]
) -> None:
    """Print a failing call, keep it, and keep the smallest failing call that shrinking finds."""
    folder = Path(args.keep)
    path = keep(folder, call, verdict, args.seed, index, f"failed-{args.seed}-{index}.json")
    tally.files.append(str(path))
    print(f"FAILED call {index} of seed {args.seed}: {verdict.reason}\n  {path}\n  {call}", flush=True)
    small, found = shrink(call, verdict, check, args.shrink)
    if str(small) != str(call):
        path = keep(folder, small, found, args.seed, index, f"failed-{args.seed}-{index}-small.json")
        tally.files.append(str(path))
        print(f"  smaller: {found.reason}\n  {path}\n  {small}", flush=True)


def replay(args: argparse.Namespace) -> int:
    """Check the calls of kept files again, and return the exit status."""
    check, status = Checker(device_of(args.device), compiles=True).check, 0
    for name in args.replay:
        drawn = json.loads(Path(name).read_text()).get("drawn")
        try:
            verdict = check(calls.load(Path(name)))
        except DeviceLost as lost:
            verdict = Verdict(FAILED, f"the device is lost: {lost}")
        print(f"{verdict.word}: {name} (drawn {drawn}) {verdict.reason}", flush=True)
        if verdict.word == FAILED:
            status = 1
        if "device is lost" in verdict.reason:
            break
    return status
