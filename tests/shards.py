"""Run GPU tests in several processes on one GPU, so that a test that hangs or ends its process does not stop the
others.

    python -m tests.shards tests/gpu [--processes 12] [--limit 60] [--seconds 250] [--resume]

Process n of N takes every N-th test. A test that runs longer than `limit` seconds is killed with its process, and the
process is restarted after it. After `seconds` no test begins; `--resume` then runs the rest, with as many processes.
The program prints the tests that failed and those that did not end; `--out` (build/shards) holds pytest's output and
its junit reports, for `python -m tools.matrix record`. Build the bundle first. The processes compile what it lacks,
and share it through the user's cache.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENDED, KILLED = (0, 1, 5), "did not end"  # exit codes of pytest after all its tests
LAST = 12  # lines shown of a process that begins no test
NUMBER, COUNT, LOG, LIMIT, UNTIL = (f"SHARD_{name}" for name in ("NUMBER", "COUNT", "LOG", "LIMIT", "UNTIL"))


def words(log: Path, word: str) -> list[str]:
    """Return the rest of a log's lines that begin with a word."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [line.removeprefix(f"{word} ") for line in lines if line.startswith(f"{word} ")]


class Shard:
    """The pytest plugin of one process."""

    def __init__(self, environ: Any = os.environ):
        self.number, self.count, self.limit = (int(environ[name]) for name in (NUMBER, COUNT, LIMIT))
        self.log, self.until = Path(environ[LOG]), float(environ[UNTIL])

    def say(self, *what: object) -> None:
        with self.log.open("a") as file:
            print(*what, file=file, flush=True)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        begun = set(words(self.log, "begin"))
        items[:] = [item for item in items[self.number :: self.count] if item.nodeid not in begun]

    def pytest_runtest_protocol(self, item: Any) -> bool | None:
        """Stop the session when the time is over. Tests that have ended are still reported."""
        if time.time() <= self.until:
            return None
        item.session.shouldstop = "the time is over"
        return True

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.say("begin", nodeid)
        signal.alarm(self.limit)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            lines = [line[1:].strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            self.say("fail", report.nodeid, " | ".join(lines[:4])[:600])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        signal.alarm(0)
        self.say("end", nodeid)


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Shard())


def start(number: int, turn: int, args: argparse.Namespace, until: float) -> "subprocess.Popen[bytes]":
    """Start process `number` for the `turn`-th time."""
    name = args.out / f"{number}.{turn}"
    environ = {NUMBER: number, COUNT: args.processes, LOG: log_of(args, number), LIMIT: args.limit, UNTIL: until}
    environ["OMP_NUM_THREADS"] = 1  # the references run on the CPU, which all processes share
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = 1  # no GPU test needs one, and Hypothesis takes a second to import
    command = [sys.executable, "-m", "pytest", "-q", "-p", __spec__.name, "-p", "no:cacheprovider", "--tb=short"]
    with open(f"{name}.out", "wb") as out:
        return subprocess.Popen(
            [*command, f"--junitxml={name}.xml", *args.tests], stdout=out, stderr=out,
            env=os.environ | {key: str(value) for key, value in environ.items()},
        )  # fmt: skip


def log_of(args: argparse.Namespace, number: int) -> Path:
    return args.out / f"{number}.log"


def run(args: argparse.Namespace) -> Iterator[str]:
    """Run all tests and yield the lines of the report."""
    until = time.time() + args.seconds
    alive = {}
    for number in range(args.processes):
        turn = len(list(args.out.glob(f"{number}.*.out")))  # more than 0 if the run is resumed
        alive[number] = turn, len(words(log_of(args, number), "begin")), start(number, turn, args, until)
    while alive:
        for number, (turn, before, process) in list(alive.items()):
            if process.poll() is None:
                if time.time() > until + args.limit:  # outside of a test, for example during collection
                    process.kill()
                continue
            del alive[number]
            begun = len(words(log_of(args, number), "begin"))
            if process.returncode in ENDED or time.time() > until:
                continue
            if begun > before:
                alive[number] = turn + 1, begun, start(number, turn + 1, args, until)
            else:
                yield from (args.out / f"{number}.{turn}.out").read_text().splitlines()[-LAST:]
    ended = 0
    for number in range(args.processes):
        log = log_of(args, number)
        done, failed = words(log, "end"), words(log, "fail")
        ended += len(done)
        yield from failed
        yield from (f"{test} {KILLED}" for test in words(log, "begin") if test not in done)
    yield f"{ended} tests ended in {args.seconds - (until - time.time()):.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.shards", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tests", nargs="+", help="folders and files of tests, or other arguments of pytest")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--limit", type=int, default=60, help="time limit of a test, in seconds")
    parser.add_argument("--seconds", type=int, default=250, help="no test begins after this many seconds")
    parser.add_argument("--resume", action="store_true", help="run the tests that the run before did not begin")
    parser.add_argument("--out", type=Path, default=Path("build/shards"))
    args, rest = parser.parse_known_args()
    args.tests += rest
    args.out.mkdir(parents=True, exist_ok=True)
    for old in () if args.resume else args.out.glob("*.*"):
        old.unlink()
    for line in run(args):
        print(line, flush=True)


if __name__ == "__main__":
    main()
