"""Rows of bench/results/<gpu>.csv: one per case and provider. All rows of a run share their date and commit.

The file sparsity/<gpu>.csv beside it has one row per data set and skip-softmax factor, engines/<gpu>.csv has one per
load and backend of an engine, engine_errors/<gpu>.csv and engine_answers/<gpu>.csv one per model and backend,
engine_profiles/<gpu>.csv one per kernel, and servers/<gpu>.csv one per load and backend of a server. Those in
sanitizers/ and soaks/ have one per piece of calls and per scenario, those in accuracy/ and determinism/ one per case
and provider.
"""

import csv
import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar, TypeVar

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "bench" / "results"


@dataclass(frozen=True)
class Run:
    """Columns that all rows of a run have in common. folder: of the csv files of a kind of rows, in bench/results."""

    folder: ClassVar[str] = ""
    date: str
    commit: str
    gpu: str
    driver: str
    torch: str


@dataclass(frozen=True)
class ResultRow(Run):
    """One provider on one case. ratio_to_ours: this provider's time over ours in the same run; above 1, ours is
    faster."""

    case: str
    provider: str
    time_us: float
    tflops: float | None = None
    gbps: float | None = None
    ratio_to_ours: float | None = None

    @property
    def run(self) -> tuple[str, str]:
        return self.date, self.commit


@dataclass(frozen=True)
class SkipRow(Run):
    """Skip-softmax with one factor on one data set.

    left_out: share of KV blocks left out, by the rule. The errors are relative to the dense output, in units of its
    RMS.
    """

    folder = "sparsity"
    case: str
    data: str
    factor: float
    left_out: float
    time_us: float
    dense_us: float
    max_error: float
    rms_error: float


@dataclass(frozen=True)
class EngineRow(Run):
    """A whole engine under a load.

    tokens_per_s: tokens that are generated, in the timed passes; cold_tokens_per_s: in the first pass, which computes
    all prompts. ttft: time from a request's arrival to its first token. tpot: time per token after that. cache_tokens:
    tokens that the cache holds. noise: spread of the timed passes over their median. common, difference: share of
    checked tokens before the answers part from those of `reference`, and the mean difference of their log
    probabilities.
    """

    folder = "engines"
    case: str
    provider: str
    tokens_per_s: float
    cold_tokens_per_s: float | None
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    cache_tokens: float
    passes: float
    noise: float
    common: float
    difference: float
    reference: str


@dataclass(frozen=True)
class ErrorRow(Run):
    """The log probabilities of an engine's answers against those of the same model in fp32.

    tokens: that were compared; distinct: different ones among them, few if the model repeats itself and shows nothing.
    mean, p90, largest: absolute differences.
    """

    folder = "engine_errors"
    case: str
    provider: str
    tokens: float
    distinct: float
    mean: float
    p90: float
    largest: float


@dataclass(frozen=True)
class AnswerRow(Run):
    """How many of an engine's `count` answers have the same tokens and log probabilities when they are asked for again:
    the same prompts (again), each alone, between other prompts (mixed), and with half of the answer as part of the
    prompt (resumed).

    preempted: preemptions in the first pass, if the cache was too small for all requests. common, difference,
    reference: as `EngineRow` has them.
    """

    folder = "engine_answers"
    case: str
    provider: str
    count: float
    again: float
    alone: float
    mixed: float
    resumed: float
    preempted: float | None
    common: float
    difference: float
    reference: str


@dataclass(frozen=True)
class ProfileRow(Run):
    """A kernel in the steps of an engine.

    phase: "prompts", all steps until the first token of each request; "decode", a step that adds one token to each.
    ours: 1 for a kernel of this package. launches, time_us: of the phase.
    """

    folder = "engine_profiles"
    case: str
    provider: str
    phase: str
    kernel: str
    ours: float
    launches: float
    time_us: float


@dataclass(frozen=True)
class ServerRow(Run):
    """A server under a load of requests, while other clients abandon theirs.

    completed: requests that were answered; abandoned: those that their clients abandoned. changed: answers to the
    prompts of the check that the load changed; always 0 for ours, which else gets no row. host_mib: memory of the
    server's processes after a first load; device_mib: of the GPU. The growths are those of the second load.
    """

    folder = "servers"
    case: str
    provider: str
    completed: float
    abandoned: float
    changed: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    host_mib: float
    host_growth_mib: float
    device_mib: float
    device_growth_mib: float


AND = " / "  # between reasons


@dataclass(frozen=True)
class SanitizerRow(Run):
    """A piece of calls under a tool of compute-sanitizer.

    errors: those of its summary, None if it did not end. status: "clean", "expected" (the tool reports what
    `tools.sanitize.report` excuses, for these reasons), "FOUND", "did not end" or "not begun".
    """

    folder = "sanitizers"
    tool: str
    piece: str
    calls: float
    errors: float | None
    seconds: float
    status: str
    reason: str


@dataclass(frozen=True)
class SoakRow(Run):
    """A scenario of `tools.soak`. result: "held", "FAILED" or "skipped". detail: its figures, or what failed."""

    folder = "soaks"
    scenario: str
    result: str
    seconds: float
    seed: float
    detail: str


@dataclass(frozen=True)
class AccuracyRow(Run):
    """The error of an output against fp64, in units of the right output's RMS (`bench.accuracy`), or of logits, in
    units of the sums of their magnitudes (`bench.latent_accuracy`).

    format_error: RMS of the difference that a quantised cache or query makes. digest: of the output's bits.
    """

    folder = "accuracy"
    case: str
    provider: str
    max_error: float
    rms_error: float
    format_error: float | None
    digest: str


@dataclass(frozen=True)
class DeterminismRow(Run):
    """How many of `count` comparisons found equal bits. kind: "runs" of one call; "batch": a request alone and in a
    batch, also with `batch_invariant`; "devices": two GPUs of the type."""

    folder = "determinism"
    case: str
    provider: str
    kind: str
    equal: float
    count: float


AnyRow = TypeVar("AnyRow", bound=Run)


@dataclass(frozen=True)
class Environment(Run):
    """A run that makes rows."""

    def make(self, kind: type[AnyRow], /, **figures: Any) -> AnyRow:
        """Return a row of a kind."""
        return kind(**asdict(self), **figures)

    def row(
        self, case: str, provider: str, time_us: float, tflops: float | None = None, gbps: float | None = None
    ) -> ResultRow:
        return self.make(ResultRow, case=case, provider=provider, time_us=time_us, tflops=tflops, gbps=gbps)


def slug(name: str) -> str:
    """Return 'nvidia-h200' for 'NVIDIA H200'."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def commit() -> str:
    """Return CUTE_KERNELS_COMMIT if it is set (on a machine that has a copy of the tree without git), else HEAD."""
    given = os.environ.get("CUTE_KERNELS_COMMIT")
    if given:
        return given
    git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    if git.returncode:
        raise RuntimeError("no git here: set CUTE_KERNELS_COMMIT to the commit that is measured")
    return git.stdout.strip()


def driver_version() -> str:
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()[0]


def environment() -> Environment:
    """Return the current GPU, commit, driver, torch version and time."""
    import torch

    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Environment(date, commit(), slug(torch.cuda.get_device_name()), driver_version(), torch.__version__)


def with_ratios(rows: Iterable[ResultRow]) -> list[ResultRow]:
    """Return the rows of one run, with ratio_to_ours filled in on the cases on which `ours` was measured."""
    rows = list(rows)
    ours = {r.case: r.time_us for r in rows if r.provider == "ours"}
    return [replace(r, ratio_to_ours=r.time_us / ours[r.case]) if r.case in ours else r for r in rows]


def text(value: object) -> str:
    """Return a csv field. Floats get five significant digits, because medians vary by more than 1e-3."""
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def append(path: Path, rows: Iterable[Run]) -> None:
    """Append rows of one kind to `path`. A new file gets the header first."""
    rows = list(rows)
    if not rows:
        return  # a file without a header would get none later
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with open(path, "a", newline="") as f:
        out = csv.writer(f, lineterminator="\n")
        for row in rows:
            if new:
                out.writerow(columns(type(row)))
                new = False
            out.writerow([text(getattr(row, c)) for c in columns(type(row))])


def columns(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))


def read(path: Path, kind: Any = ResultRow) -> list[Any]:
    """Read all rows of one file, oldest first. kind: the class of the rows."""
    with open(path, newline="") as f:
        raw = list(csv.DictReader(f))
    texts = {f.name for f in fields(kind) if f.type is str}
    return [kind(**{c: r[c] if c in texts else float(r[c]) if r[c] else None for c in columns(kind)}) for r in raw]


def file_of(kind: type[Run], gpu: str) -> Path:
    """Return the file with the rows of a kind that were measured on a GPU."""
    return FOLDER / kind.folder / f"{gpu}.csv"


def read_all(kind: Any = ResultRow) -> dict[str, list[Any]]:
    """Return the rows of a kind, by GPU."""
    return {path.stem: read(path, kind) for path in sorted((FOLDER / kind.folder).glob("*.csv"))}


def read_sparsity() -> dict[str, list[SkipRow]]:
    """Return the rows of each GPU's newest run of skip-softmax."""
    every = read_all(SkipRow).items()
    return {gpu: [r for r in rows if r.date == max(r.date for r in rows)] for gpu, rows in every}


def complete_runs(rows: Iterable[ResultRow], prefix: str) -> dict[str, dict[tuple[str, str], list[ResultRow]]]:
    """Return, per case that begins with `prefix`, the rows of each run that measured `ours` on it, oldest run first."""
    runs: dict[str, dict[tuple[str, str], list[ResultRow]]] = {}
    for row in rows:
        if row.case.startswith(prefix):
            runs.setdefault(row.case, {}).setdefault(row.run, []).append(row)
    return {
        case: {run: of[run] for run in sorted(of) if any(r.provider == "ours" for r in of[run])}
        for case, of in runs.items()
    }


def newest(rows: Iterable[ResultRow], prefix: str) -> list[ResultRow]:
    """Return, per case that begins with `prefix`, the rows of the newest run that measured `ours` on it."""
    return [row for runs in complete_runs(rows, prefix).values() if runs for row in list(runs.values())[-1]]
