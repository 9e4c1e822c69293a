"""Serve random requests for minutes, and provoke shortage and damage, in named scenarios.

    python -m tools.soak --minutes 3 --seed 1 --out FOLDER          on a GPU, all scenarios
    python -m tools.soak --device cpu --steps 60 --scenario serving disk    the CPU reference
    python -m tools.soak --keep FOLDER/soak.csv                     add the rows of a run to bench/results/soaks

Each scenario runs in a process of its own, one after another. A line per scenario has its result, and the file soak.csv
of the folder its row. The exit status is the number of scenarios that failed.
"""

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import torch

from bench import results
from bench.results import Environment, SoakRow
from tools.fuzz.run import device_of
from tools.fuzz.tally import commit

from . import damage, scenarios
from .scenarios import CannotRun, Soak

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS: dict[str, Callable[[Soak], str]] = {
    "serving": scenarios.serving,
    "plans": scenarios.plans,
    "threads": scenarios.threads,
    "devices": scenarios.devices,
    "processes": scenarios.processes,
    "shortage": scenarios.shortage,
    "capture-shortage": scenarios.capture_shortage,
    "unloadable-kernel": damage.unloadable_kernel,
    "bundles": damage.bundles,
    "disk": damage.disk,
    "read-only-cache": damage.read_only_cache,
}
HELD, SKIPPED, FAILED = "held", "skipped", "FAILED"
LIMIT = 200.0  # seconds of a scenario beyond those of serving
FILE = "soak.csv"


def run(name: str, s: Soak) -> tuple[str, str]:
    """Return the result of a scenario, and its figures or the reason."""
    try:
        return HELD, SCENARIOS[name](s)
    except CannotRun as reason:
        return SKIPPED, str(reason)
    except Exception as error:
        traceback.print_exc()
        return FAILED, f"{type(error).__name__}: {error}"[:1000].replace("\n", " ")


def apart(name: str, args: argparse.Namespace, env: Environment) -> SoakRow:
    """Run a scenario in a process of its own, and return its row."""
    start, out = time.monotonic(), Path(args.out)
    answer = out / f"{name}.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tools.soak", "--inside", "--scenario", name, "--seed", str(args.seed)]
    command += ["--minutes", str(args.minutes), "--steps", str(args.steps), "--out", str(out), "--device", args.device]
    with open(out / f"{name}.txt", "w") as said:
        try:
            limit = LIMIT + (60 * args.minutes if name == "serving" else 0)
            status = subprocess.run(command, cwd=ROOT, stdout=said, stderr=said, timeout=limit).returncode
            end = f"ended with status {status}"
        except subprocess.TimeoutExpired:
            end = f"did not end in {limit:.0f} s"
    result, detail = json.loads(answer.read_text()) if answer.exists() else (FAILED, end)
    row = env.make(
        SoakRow, scenario=name, result=result, seconds=time.monotonic() - start, seed=float(args.seed), detail=detail
    )
    print(f"{result:7} {name} ({row.seconds:.0f} s): {detail}", flush=True)
    return row


def environment(device: str) -> Environment:
    """Return the environment of a run; on the CPU one that names it."""
    if device_of(device).type == "cuda":
        return results.environment()
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Environment(date, commit(), "cpu", "", torch.__version__)


def soak(args: argparse.Namespace) -> int:
    """Run the chosen scenarios and return how many failed."""
    out, env, failed = Path(args.out), environment(args.device), 0
    out.mkdir(parents=True, exist_ok=True)
    for name in args.scenario:
        row = apart(name, args, env)
        results.append(out / FILE, [row])
        failed += row.result == FAILED
    print(f"{len(args.scenario)} scenarios, {failed} failed -> {out / FILE}", flush=True)
    return failed


def keep(path: Path) -> int:
    """Add the rows of a run to those of its device."""
    rows = results.read(path, SoakRow)
    results.append(results.file_of(SoakRow, rows[0].gpu), rows)
    return 0


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=3.0, help="of serving; all others take four more")
    parser.add_argument("--steps", type=int, default=0, help="of serving, in place of minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(ROOT / "build" / "soak"), help="folder of the csv and the outputs")
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--keep", type=Path, help="add the rows of this csv to bench/results")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # this process runs the scenario
    args = parser.parse_args(given)
    if args.keep:
        return keep(args.keep)
    if not args.inside:
        return soak(args)
    torch.set_num_threads(1)  # a forked process has no threads of its parent
    torch.backends.cuda.matmul.allow_tf32 = False  # expected results are computed in fp32
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    name = args.scenario[0]
    answer = run(name, Soak(device, args.seed, 60 * args.minutes, args.steps))
    Path(args.out, f"{name}.json").write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
