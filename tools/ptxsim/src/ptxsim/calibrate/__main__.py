"""Run micro-kernels, with the same PTX, on an H200 and in the simulator.

python -m ptxsim.calibrate device --out FILE     on a GPU: record the outputs of every case
python -m ptxsim.calibrate compare [FILE]        here: simulate every case, print those without equal bits
python -m ptxsim.calibrate readme                write the summary in the simulator's README
python -m ptxsim.calibrate list | ptx --only X   names, forms and PTX of cases"""

import argparse
import fnmatch
import json
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

from .case import CalibrationCase
from .cases import CASES, TEXT_ALONE
from .record import EQUAL, GOOD, UNSUPPORTED, CaseVerdict, between, digest, judge, merge, pack, sections, summary

PATIENCE = 60.0  # seconds without a result after which a worker counts as hung
HERE = Path(__file__).parent
ROOT = HERE.parents[1]  # the folder that holds the package


def chosen(patterns: list[str]) -> list[CalibrationCase]:
    """Return the cases with a name or form that matches one of the patterns; all if there are no patterns."""
    names = [p if "*" in p else f"*{p}*" for p in patterns]
    return [c for c in CASES if not names or any(fnmatch.fnmatch(t, n) for n in names for t in (c.name, c.form))]


def worker(cases: list[CalibrationCase]) -> None:
    """Run cases on the GPU and print one line of JSON per case; end at the first error, because the context may be
    lost."""
    from .device import CudaError, Gpu, run_on_device

    gpu = Gpu()
    print(json.dumps({"gpu": gpu.name, "driver": gpu.driver()}), flush=True)
    for case in cases:
        line = {"name": case.name, "sha": digest(case)}
        try:
            line["out"] = pack(run_on_device(gpu, case))
        except CudaError as error:
            print(json.dumps({**line, "error": str(error)}), flush=True)
            return
        print(json.dumps(line), flush=True)


def lines_of(process: subprocess.Popen) -> queue.Queue:
    """Return a queue of the process's lines as they arrive; None after the last one."""
    found: queue.Queue = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            found.put(line)
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    return found


def attempt(cases: list[CalibrationCase]) -> list[str]:
    """Return the lines of one worker, which may not get through all the cases."""
    command = [sys.executable, "-m", "ptxsim.calibrate", "worker"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdin is not None
        process.stdin.write("\n".join(case.name for case in cases))
        process.stdin.close()
        found, incoming = [], lines_of(process)
        try:
            while (line := incoming.get(timeout=PATIENCE)) is not None:
                found.append(line)
        except queue.Empty:
            process.kill()
    return found


def device(patterns: list[str], out: Path) -> int:
    """Record every case; one that hangs or kills its worker is recorded as such and the others continue."""
    left, lines, problems = chosen(patterns), [], 0
    old = json.loads(out.read_text())["cases"] if patterns and out.exists() else {}
    kept = {case.name: old[case.name] for case in CASES if case.name in old}
    while left:
        new = attempt(left)
        if not new:
            print("no GPU, or the worker does not start", file=sys.stderr)
            return 1
        done = {json.loads(line).get("name") for line in new}
        lines += new
        rest = [case for case in left if case.name not in done]
        last = json.loads(new[-1])
        if rest and "error" not in last:
            lost = rest.pop(0)
            lines.append(json.dumps({"name": lost.name, "sha": digest(lost), "error": "hangs, or ends its process"}))
        left = rest
        merge(lines, out, kept)
    for part in map(json.loads, lines):
        if "error" in part:
            problems += 1
            print(f"{part['name']}: {part['error'].strip()}")
    print(f"{len(chosen(patterns))} cases, {problems} with errors, {out.stat().st_size >> 10} KiB in {out}")
    return 0


def compare(patterns: list[str], file: Path, mode: str) -> int:
    """Print a line per case without equal bits. Return 1 if a case is wrong or not recorded; "not modelled" is
    neither."""
    record, counts, start, bad = json.loads(file.read_text()), {}, time.time(), 0  # type: ignore[var-annotated]
    for case in chosen(patterns):
        verdict = judge(case, record, mode)
        counts[verdict.result] = counts.get(verdict.result, 0) + 1
        bad += verdict.result not in (*GOOD, UNSUPPORTED)
        if verdict.result != EQUAL:
            print(f"{case.name} | {case.isa} | {summary(verdict)} | {verdict.detail}")
    print(", ".join(f"{count} {result}" for result, count in counts.items()), f"in {time.time() - start:.0f} s")
    return int(bad > 0)


def readme_with(verdicts: list[CaseVerdict], root: Path = HERE.parents[2]) -> str:
    """Return the simulator's README with the summary of these verdicts. root: its folder."""
    return between((root / "README.md").read_text(), sections(verdicts, TEXT_ALONE))


def main() -> int:
    parser = argparse.ArgumentParser(prog="ptxsim.calibrate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("action", choices=("device", "compare", "readme", "list", "ptx", "worker"))
    parser.add_argument("file", nargs="?", type=Path, default=HERE / "h200.json", help="record to compare with")
    parser.add_argument("--out", type=Path, default=HERE / "h200.json", help="where `device` puts the record")
    parser.add_argument("--only", action="append", default=[], help="part of a case's name, or a pattern")
    parser.add_argument("--mode", default="eager", help="delivery of asynchronous operations in the simulator")
    options = parser.parse_args()
    if options.action == "device":
        return device(options.only, options.out)
    if options.action == "worker":
        names = set(sys.stdin.read().splitlines())
        worker([case for case in CASES if case.name in names])
    elif options.action == "compare":
        return compare(options.only, options.file, options.mode)
    elif options.action == "readme":
        if not (HERE.parents[2] / "pyproject.toml").exists():
            parser.error("readme: the package is installed, must be that of a checkout (pip install -e)")
        record = json.loads(options.file.read_text())
        (HERE.parents[2] / "README.md").write_text(readme_with([judge(case, record) for case in CASES]))
    else:
        for case in chosen(options.only):
            print(case.ptx if options.action == "ptx" else f"{case.name} | {case.form} | {case.isa}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
