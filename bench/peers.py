"""Ours beside the peers: the points of the pictures, README's table and sentences, and the tables of benchmarks.md that
hold the same figures with their cases. All come from bench/results."""

import textwrap
from collections.abc import Iterable
from typing import NamedTuple

from . import pages
from .results import EngineRow, ResultRow, complete_runs

PEERS = (
    "cudnn",
    "flash-attn-4",
    "flash-attn-3",
    "flashinfer",
    "flashmla",
    "deep-gemm",
    "torch",
    "vllm",
)  # a provider's name may also end in the form of the call: "flashinfer-paged"
OWN_FORMS = {"own-shared": "share_keys"}  # ours in another form, with the same result -> its name
FAMILIES = {  # prefix of the cases -> their description
    "serve-": "mixed batches and chunks, bf16",
    "prefill-bf16-": "prefill, bf16",
    "family-": "prefill by plan and run, bf16",
    "prefill-": "prefill, low precision",
    "decode-": "decode",
    "mla-decode-": "MLA, decode over all keys",
    "dsa-decode-": "DSA, decode over chosen keys",
    "dsa-prefill-": "DSA, prompts over chosen keys",
    "indexer-prefill-": "indexer, logits of prompts",
    "indexer-decode-": "indexer, logits of decode",
    "dsa-layer-": "DSA, a layer of decode",
    "mla-append-": "rows of MLA and indexer, written",
    "indexer-append-": "rows of MLA and indexer, written",
    "mla-gather-": "rows of MLA and indexer, gathered",
    "indexer-gather-": "rows of MLA and indexer, gathered",
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
SHOWN = {"flashmla": "FlashMLA", "deep-gemm": "DeepGEMM", "vllm": "vLLM"}  # provider -> displayed name, in all families
ENGINE_BACKENDS = "vllm-", "sglang-"  # beginnings of the providers that are an engine's own backends
HEADLINES = {  # case, and its form in parentheses -> the call, in words
    "prefill-bf16-causal-b2-s8192-h32x8-d128-p64": "prefill, 2 prompts of 8192 tokens, bf16",
    "prefill-fp8-causal-b2-s8192-h32x8-d128-p64": "the same prompts in e4m3",
    "serve-bf16-mixed-h32x8-d128-p16": "mixed batch, 4 chunks and 60 decode tokens, bf16",
    "decode-bf16-b64-s8192-h64x8-d128-p64": "decode, 64 requests of 8192 keys, bf16",
    "decode-bf16-ragged-b256-h64x8-d128-p16": "decode, 256 requests of 64 to 32k keys, bf16",
    "mla-decode-bf16-b128-s4096-h16-p64": "MLA decode, 128 requests of 4096 keys, 16 heads",
    "mla-decode-bf16-b64-s8192-h128-p64": "MLA decode, 64 requests of 8192 keys, 128 heads",
    "dsa-decode-kv656-b128-h16-k2048": "DSA decode, 128 requests, 16 heads, 2048 keys each",
    "dsa-decode-kv656-b64-h128-k2048": "DSA decode, 64 requests, 128 heads, 2048 keys each",
    "dsa-prefill-bf16-t4096-s32768-h16-k2048-a75 (share_keys)": "DSA prompts, 16 heads; neighbours share 75 % of keys",
    "dsa-prefill-bf16-t4096-s32768-h128-k2048": "DSA prompts, 4096 tokens, 128 heads, 2048 keys each",
    "indexer-prefill-t4096-s32768-h64": "indexer logits, 4096 tokens by 32768 keys",
    "indexer-decode-b64-s32768-h64": "indexer logits, 64 requests of 32768 keys",
    "mla-append-kv656-n65536": "write 65536 rows to a cache of 656 bytes each",
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

    @property
    def name(self) -> str:
        """Return the case, with its form in parentheses."""
        return f"{self.case} ({self.form})" if self.form else self.case


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
        forms = {form: f"ours-{form}"} if form else {"": "ours"} | {name: own for own, name in OWN_FORMS.items()}
        prefix = prefix_of(case)
        shown = NAMES.get((prefix, peer), SHOWN.get(peer, peer))
        for name, own in forms.items():
            mine = by.get(own)
            if mine and mine.ratio_to_ours and row.ratio_to_ours:
                ratio, times = row.ratio_to_ours / mine.ratio_to_ours, (mine.time_us, row.time_us)
                found.append(Point(prefix, case, name, shown, ratio, row.commit[:9], *times))
    return sorted(found, key=lambda p: list(FAMILIES).index(p.prefix))


def listed(words: Iterable[str]) -> str:
    """Join words as 'a, b and c'."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def best(found: Iterable[Point]) -> list[Point]:
    """Return the fastest peer of each case and form that computes the same; peers have no skip-softmax."""
    chosen: dict[tuple[str, str], Point] = {}
    for point in (point for point in found if not point.case.startswith("prefill-skip")):
        key = point.case, point.form
        if key not in chosen or point.ratio < chosen[key].ratio:
            chosen[key] = point
    return list(chosen.values())


def headlines(found: Iterable[Point]) -> list[tuple[str, Point]]:
    """Return the call in words and the fastest peer, per case of HEADLINES that was measured beside a peer."""
    by = {point.name: point for point in best(found)}
    return [(words, by[case]) for case, words in HEADLINES.items() if case in by]


def time(us: float) -> str:
    return f"{us:.0f} us" if us >= 100 else f"{us:.1f} us"


def cells(point: Point) -> list[str]:
    """Return the figures of a point as README and benchmarks.md show them."""
    return [time(point.ours_us), f"{point.peer} {time(point.peer_us)}", f"{point.ratio:.2f}"]


def headline_table(gpu: str, found: Iterable[Point]) -> str:
    """Return README's table."""
    lines = ([words, *cells(point)] for words, point in headlines(found))
    return pages.table([f"call, on {gpu}", "ours", "fastest peer", "peer / ours"], lines)


def full_table(gpu: str, found: Iterable[Point]) -> str:
    """Return the table of the fastest peer of each case."""
    names = [(f"`{p.case}`{f' ({p.form})' if p.form else ''}", p) for p in best(found)]
    lines = ([name, *cells(point), point.commit] for name, point in names)
    return pages.table([f"case, on {gpu}", "ours", "fastest peer", "peer / ours", "commit"], lines)


class Range(NamedTuple):
    """The ratios of a family. ratios: (ratio, case, peer) of each measured shape or load."""

    name: str
    of: str  # "shape" or "load"
    ratios: list[tuple[float, str, str]]

    @property
    def measured(self) -> str:
        return f"{len(self.ratios)} {self.of}{'s' if len(self.ratios) > 1 else ''}"

    @property
    def span(self) -> str:
        low, high = (f"{f(self.ratios)[0]:.2f}" for f in (min, max))
        return low if low == high else f"{low} to {high}"


def kernel_ranges(found: Iterable[Point]) -> list[Range]:
    """Return the time of the fastest peer over ours, per family."""
    by: dict[str, list[tuple[float, str, str]]] = {}
    for point in best(found):
        by.setdefault(FAMILIES[point.prefix], []).append((point.ratio, point.case, point.peer))
    return [Range(name, "shape", ratios) for name, ratios in by.items()]


def engine_ranges(rows: list[EngineRow]) -> list[Range]:
    """Return the tokens per second of an engine's loads with our backend, over those with the engine's fastest own one,
    per engine, from the newest run of each load."""
    by: dict[str, list[tuple[float, str, str]]] = {}
    for case in dict.fromkeys(r.case for r in rows):
        run = [r for r in rows if r.case == case and r.date == max(r.date for r in rows if r.case == case)]
        ours = [r.tokens_per_s for r in run if r.provider == "ours"]
        own = [r for r in run if r.provider.startswith(ENGINE_BACKENDS)]  # not "own-fp8", ours over another cache
        if ours and own:
            peer = max(own, key=lambda r: r.tokens_per_s)
            engine = {"vllm": "vLLM", "sglang": "SGLang"}[case.split("-")[1]]
            by.setdefault(engine, []).append((ours[0] / peer.tokens_per_s, case, peer.provider))
    return [Range(name, "load", ratios) for name, ratios in by.items()]


def range_table(head: str, found: list[Range]) -> str:
    """Return a table with the lowest and the highest ratio of each family, their cases and their peers."""

    def end(ratio: float, case: str, peer: str) -> str:
        return f"{ratio:.2f} (`{case}`, {peer})"

    lines = ([r.name, r.measured, r.span, end(*min(r.ratios)), end(*max(r.ratios))] for r in found)
    return pages.table([head, "measured", "range", "lowest", "highest"], lines, 5)


def range_sentence(text: str, found: list[Range]) -> str:
    """Return a sentence that ends in the range of each family."""
    parts = listed(f"{r.span} ({r.name}; {r.measured})" for r in found)
    return textwrap.fill(f"{text}: {parts}.", 144, break_on_hyphens=False, break_long_words=False)
