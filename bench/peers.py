"""Compare our times with the peers': the points of README's plot and its sentences, all from rows of bench/results."""

import textwrap
from collections.abc import Iterable
from typing import NamedTuple

from .results import ResultRow, complete_runs, newest

PEERS = (
    "cudnn",
    "flash-attn-4",
    "flashinfer",
    "torch",
)  # a provider's name may also end in the form of the call: "flashinfer-paged"
FAMILIES = {  # prefix of the cases -> their description
    "serve-": "mixed batches and chunks, bf16",
    "prefill-bf16-": "prefill, bf16",
    "family-": "prefill by plan and run, bf16",
    "prefill-": "prefill, low precision",
    "decode-": "decode",
    "topk-": "top-k",
}
NAMES = {  # (prefix, provider) -> displayed name of the peer
    ("serve-", "flashinfer"): "flashinfer fa3",
    ("prefill-bf16-", "flashinfer"): "flashinfer fa3",
    ("prefill-", "flashinfer"): "flashinfer fa3",
    ("family-", "flashinfer"): "flashinfer fa3",
    ("decode-", "flashinfer"): "XQA",
    ("topk-", "torch"): "torch.topk",
}
CACHES = {"bf16": "bf16", "fp8": "e4m3", "nvfp4": "NVFP4"}  # decode caches: name in a case -> name in a sentence


class Point(NamedTuple):
    """A peer's time over ours (`ratio`) on the same case and form, in one run."""

    prefix: str
    case: str
    form: str  # such as "paged-p1"; usually empty
    peer: str
    ratio: float
    commit: str

    @property
    def label(self) -> str:
        words = self.case.removeprefix(self.prefix).replace("-", " ")
        return f"{words}, {self.form}" if self.form else words


def prefix_of(case: str) -> str:
    return next((prefix for prefix in FAMILIES if case.startswith(prefix)), "")


def points(rows: Iterable[ResultRow]) -> list[Point]:
    """Return one GPU's points: each peer on each case, from the newest run that has both, in the order of FAMILIES."""
    rows, chosen = list(rows), {}
    for prefix in FAMILIES:
        for case, runs in complete_runs(rows, prefix).items():
            for members in runs.values():
                by = {row.provider: row for row in members}
                chosen.update({(case, provider): (row, by) for provider, row in by.items()})
    found = []
    for (case, provider), (row, by) in chosen.items():
        peer = next((p for p in PEERS if provider == p or provider.startswith(f"{p}-")), None)
        if peer is None:
            continue
        form = provider.removeprefix(peer).removeprefix("-")
        mine = by.get(f"ours-{form}" if form else "ours")
        if mine and mine.ratio_to_ours and row.ratio_to_ours:
            prefix, ratio = prefix_of(case), row.ratio_to_ours / mine.ratio_to_ours
            found.append(Point(prefix, case, form, NAMES.get((prefix, peer), peer), ratio, row.commit[:9]))
    return sorted(found, key=lambda p: list(FAMILIES).index(p.prefix))


def listed(words: Iterable[str]) -> str:
    """Join words as 'a, b and c'."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def ran(gpu: str, commits: Iterable[str]) -> str:
    found = sorted(set(commits))
    return f"{gpu}, commit{'s' if len(found) > 1 else ''} {listed(found)}"


def span(ratios: list[float]) -> str:
    low, high = (f"{f(ratios):.2f}" for f in (min, max))
    return low if low == high else f"{low} to {high}"


def shapes(count: int) -> str:
    return f"{count} shape{'s' if count > 1 else ''}"


def speeds(found: list[Point]) -> str:
    """Return '1.09 to 1.18 times as fast as cudnn (7 shapes), ...'."""
    by: dict[str, list[float]] = {}
    for point in found:
        by.setdefault(point.peer, []).append(point.ratio)
    return listed(f"{span(v)} times as fast as {peer} ({shapes(len(v))})" for peer, v in by.items())


def one_token(case: str) -> bool:
    """Return whether each request of a decode case has one query token."""
    return not case.rpartition("-")[2].startswith("q")


def copied(rows: Iterable[ResultRow]) -> tuple[str, list[str]]:
    """Return the share of the copy rate at which decode of one query token reads K and V, as text, and the commits."""
    parts, commits = list[str](), list[str]()
    for cache, name in CACHES.items():
        cases = [r for r in newest(rows, f"decode-{cache}-") if one_token(r.case)]
        floors = [r for r in cases if r.provider == "floor" and r.ratio_to_ours]
        if floors:
            of = " of the rate of a device copy" if not parts else ""
            parts.append(f"{span([r.ratio_to_ours or 0.0 for r in floors])}{of} in {name} ({shapes(len(floors))})")
            commits += [r.commit[:9] for r in floors]
    return listed(parts) if parts else "", commits


def sentences(results: dict[str, list[ResultRow]]) -> str:
    """Return a Markdown list about prefill, decode and top-k for each GPU that has rows."""
    lines = []
    for gpu, rows in results.items():
        found = points(rows)
        prefill = [p for p in found if p.prefix in ("serve-", "prefill-bf16-", "family-")]
        decode = [p for p in found if p.prefix == "decode-" and one_token(p.case)]
        topk = [p for p in found if p.prefix == "topk-"]
        share, commits = copied(rows)
        if prefill:
            mixed = any(p.prefix == "serve-" for p in prefill)
            what = "Prefill, chunks and mixed batches in bf16 are" if mixed else "Prefill in bf16 is"
            lines.append(f"{what} {speeds(prefill)}: {ran(gpu, (p.commit for p in prefill))}.")
        if share:
            beside = f"; it is {speeds(decode)}" if decode else ""
            where = ran(gpu, [*commits, *(p.commit for p in decode)])
            lines.append(f"Decode of one query token reads K and V at {share}{beside}: {where}.")
        if topk:
            lines.append(f"Exact top-k is {speeds(topk)}: {ran(gpu, (p.commit for p in topk))}.")
    return "\n".join(textwrap.fill(f"- {line}", 128, subsequent_indent="  ") for line in lines) or "Not measured yet."
