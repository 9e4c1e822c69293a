"""Ours beside the peers: the points of README's picture and the rows of its table. All come from bench/results."""

import textwrap
from collections.abc import Iterable
from typing import NamedTuple

from .results import ResultRow, complete_runs

PEERS = (
    "cudnn",
    "flash-attn-4",
    "flashinfer",
    "torch",
    "vllm",
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
    ("topk-", "vllm"): "vLLM",
}
HEADLINES = {  # case -> the call, in words
    "prefill-bf16-causal-b2-s8192-h32x8-d128-p64": "prefill, 2 prompts of 8192 tokens, bf16",
    "prefill-fp8-causal-b2-s8192-h32x8-d128-p64": "the same prompts in e4m3",
    "prefill-bf16-one-s512-h32x8-d128-p16": "prefill, 1 prompt of 512 tokens, bf16",
    "serve-bf16-mixed-h32x8-d128-p16": "mixed batch, 4 chunks of 1024 tokens and 60 decode tokens, bf16",
    "decode-bf16-b64-s8192-h64x8-d128-p64": "decode, 64 requests of 8192 keys, bf16",
    "decode-bf16-b64-s8192-h64x8-d64-p64": "the same at head_dim 64",
    "decode-bf16-ragged-b256-h64x8-d128-p16": "decode, 256 requests of 64 to 32k keys, bf16",
    "topk-fp32-64x65536-k2048": "top 2048 of 64 rows of 65536 fp32 scores",
}


class Point(NamedTuple):
    """A peer beside ours, in the same form and the same run; ratio: the time of the peer over ours."""

    prefix: str
    case: str
    form: str  # such as "paged-p1"; usually empty
    peer: str
    ratio: float
    commit: str
    ours_us: float
    peer_us: float

    @property
    def label(self) -> str:
        words = self.case.removeprefix(self.prefix).replace("-", " ")
        return f"{words}, {self.form}" if self.form else words


def prefix_of(case: str) -> str:
    return next((prefix for prefix in FAMILIES if case.startswith(prefix)), "")


def points(rows: Iterable[ResultRow]) -> list[Point]:
    """Return each peer of each case of one GPU, from the newest run that has both, in the order of FAMILIES."""
    rows, chosen = list(rows), {}
    for prefix in FAMILIES:
        for case, runs in complete_runs(rows, prefix).items():
            for members in runs.values():
                by = {row.provider: row for row in members}
                chosen.update({(case, provider): (row, by) for provider, row in by.items()})
    found = []
    for (case, provider), (row, by) in chosen.items():
        peer = next((p for p in PEERS if provider == p or provider.startswith(f"{p}-")), None)
        if peer is None or (peer == "torch" and prefix_of(case) != "topk-"):  # SDPA stands in where no peer runs
            continue
        form = provider.removeprefix(peer).removeprefix("-")
        mine = by.get(f"ours-{form}" if form else "ours")
        if mine and mine.ratio_to_ours and row.ratio_to_ours:
            prefix, ratio = prefix_of(case), row.ratio_to_ours / mine.ratio_to_ours
            name, times = NAMES.get((prefix, peer), peer), (mine.time_us, row.time_us)
            found.append(Point(prefix, case, form, name, ratio, row.commit[:9], *times))
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


def best(found: Iterable[Point]) -> list[Point]:
    """Return the fastest peer of each case and form that computes the same; peers have no skip-softmax."""
    chosen: dict[tuple[str, str], Point] = {}
    for point in (point for point in found if not point.case.startswith("prefill-skip")):
        key = point.case, point.form
        if key not in chosen or point.ratio < chosen[key].ratio:
            chosen[key] = point
    return list(chosen.values())


def time(us: float) -> str:
    return f"{us:.0f} us" if us >= 100 else f"{us:.1f} us"


def table(gpu: str, fastest: list[Point]) -> str:
    """Return the table of one GPU: a line per case of HEADLINES that was measured beside a peer."""
    by = {point.case: point for point in fastest if not point.form}
    lines = [[f"call, on {gpu}", "ours", "best peer", "peer / ours", "commit"], ["---", "---:", "---:", "---:", "---"]]
    for case, words in HEADLINES.items():
        if p := by.get(case):
            lines.append([words, time(p.ours_us), f"{p.peer} {time(p.peer_us)}", f"{p.ratio:.2f}", p.commit])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ranges(gpu: str, fastest: list[Point]) -> str:
    """Return the sentence that gives the range of the ratio over all measured shapes of each family."""
    by: dict[str, list[float]] = {}
    for point in fastest:
        by.setdefault(FAMILIES[point.prefix], []).append(point.ratio)
    parts = listed(f"{span(ratios)} ({name}; {shapes(len(ratios))})" for name, ratios in by.items())
    where = ran(gpu, (p.commit for p in fastest))
    return f"The best peer's time over ours, over all measured shapes: {parts}; {where}."


def headlines(results: dict[str, list[ResultRow]]) -> str:
    """Return the table and the ranges of each GPU that has rows of peers."""
    parts = []
    for gpu, rows in results.items():
        fastest = best(points(rows))
        if fastest:
            parts += [table(gpu, fastest), textwrap.fill(ranges(gpu, fastest), 144, break_on_hyphens=False)]
    return "\n\n".join(parts) or "Not measured yet."
