"""Draw random calls of all public functions and compare them with plain implementations.

    python -m tools.fuzz --minutes 8 --jobs 12 --seed 1             on a GPU, twelve processes with seeds 1 to 12
    python -m tools.fuzz --device cpu --calls 200                   the CPU path
    python -m tools.fuzz --replay build/fuzz/failed-1-17.json       a kept call again

docs/fuzzing.md says what is drawn and what is checked. The exit status is 1 if a call failed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .families import FAMILIES
from .run import SHRINKING, device_of, fuzz, replay
from .tally import ROOT, Tally, commit, read

GRACE = 45.0  # seconds that a process may take longer than its time before it is ended


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit of drawing")
    parser.add_argument("--calls", type=int, default=0, help="number of calls of each process; 0: until the time ends")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first process; the others count on from it")
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--family", type=lambda text: text.split(","), default=[], help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--compile", action="store_true", help="also draw calls whose kernels no bundle holds")
    parser.add_argument("--small", action="store_true", help="small sizes, as always with --device cpu")
    parser.add_argument("--keep", default=str(ROOT / "build" / "fuzz"), help="folder for failing calls")
    parser.add_argument("--shrink", type=float, default=SHRINKING, help="seconds to shrink a failing call")
    parser.add_argument("--replay", nargs="+", default=[], help="check the calls of these files")
    parser.add_argument("--tally", default="", help=argparse.SUPPRESS)
    return parser


def side_by_side(args: argparse.Namespace, given: list[str]) -> tuple[Tally, bool]:
    """Run the processes and return their tally, and whether all of them ended well.

    A process that does not end in time is ended; the file of its call stays.
    """
    total, well = Tally(), True
    end = time.monotonic() + 60 * args.minutes + GRACE + args.shrink
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for number in range(args.jobs):
            seed, path = args.seed + number, Path(folder, f"{number}.json")
            command = [sys.executable, "-m", "tools.fuzz", *given, "--jobs", "1", "--seed", str(seed)]
            environ = os.environ | {"OMP_NUM_THREADS": "1"}
            running[seed] = subprocess.Popen([*command, "--tally", str(path)], cwd=ROOT, env=environ), path
        for seed, (process, path) in running.items():
            try:
                status = process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                status = -9
                print(f"seed {seed}: did not end in time; its call is in {args.keep}/current-{seed}.json", flush=True)
            if status not in (0, 1):
                print(f"seed {seed}: ended with status {status}; {args.keep}/current-{seed}.json", flush=True)
            well = well and status == 0
            total.merge(read(path))
    return total, well


def main(given: list[str] | None = None) -> int:
    given = sys.argv[1:] if given is None else given
    args = arguments().parse_args(given)
    if unknown := set(args.family) - FAMILIES.keys():
        raise SystemExit(f"--family: {', '.join(sorted(unknown))}, must be of {', '.join(FAMILIES)}")
    if args.replay:
        return replay(args)
    start = time.monotonic()
    if args.jobs > 1:
        device_of(args.device)
        tally, well = side_by_side(args, given)
    else:
        tally = fuzz(args)
        well = not tally.files
    if not args.tally:
        print(tally.table())
        print(tally.why())
        seeds = f"{args.seed} to {args.seed + args.jobs - 1}" if args.jobs > 1 else f"{args.seed}"
        print(f"{tally.line()}; seeds {seeds}, commit {commit()}, {time.monotonic() - start:.0f} s")
        print("\n".join(tally.files))
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())
