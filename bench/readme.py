"""The generated sections of README and docs/: tables of the newest rows in bench/results, and pictures drawn from them.

A table is data: its rows, and its columns, each a head with the cell of a line.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from . import pages, peers, results
from .pages import made, of_each_gpu
from .results import FOLDER, ROOT, EngineRow, ResultRow, newest, read_all

PICTURES = {  # end of a file's name -> what the picture shows, for readers who do not see it
    "prefill-lengths": "Prefill, TFLOP/s against sequence length, causal and full, ours and peers",
    "prefill-roofline": "Roofline of prefill: TFLOP/s against FLOP per byte, under the measured matmul and copy rates",
    "prefill-share": "Prefill, share of the matmul rate that ours and peers reach in each case",
    "decode-share": "Decode, share of the copy rate at which K and V are read in each case, by type of cache",
    "serve-sweep": "Mixed batches, time against decode tokens; chunks, TFLOP/s against their size",
    "skip-softmax": "Skip-softmax, speed against the share of blocks that are skipped",
    "topk-lengths": "Top-k, time against row length, ours, torch.topk and the time to read the scores once",
}


def number(value: float, decimals: int) -> str:
    """Return a number with `decimals`; below 1 with two significant digits."""
    return f"{value:.{decimals}f}" if round(value, 2) >= 1 else f"{value:#.2g}"


def picture(alt: str, path: Path) -> str:
    """Return a picture with its alternative text, which leads to the file in its full size."""
    place = path.relative_to(ROOT).as_posix()
    return f"[![{alt}]({place})]({place})" if path.is_file() else ""


def image(gpu: str, path: Path) -> str:
    """Return a plot with the text that PICTURES has for it."""
    return picture(f"{PICTURES[path.stem.removeprefix(f'{gpu}-')]} ({gpu})", path)


# ---- tables of cases: a line has the rows of a case, by provider

Case = Mapping[str, ResultRow]
Column = Callable[[Case], str]


def time(by: Case, whole: bool = False) -> str:
    return f"{by['ours'].time_us:.0f}" if whole else number(by["ours"].time_us, 1)


def rate(by: Case, unit: str) -> str:
    """Return ours in a unit, the name of a field."""
    value = getattr(by["ours"], unit)
    return f"{value:.0f}" if value else ""


def share(by: Case) -> str:
    """Return ours as a share of the floor's rate."""
    mine, floor = by["ours"].tflops, by["floor"].tflops if "floor" in by else None
    return f"{mine / floor:.0%}" if mine and floor else ""


def ratio(by: Case, provider: str, beside: bool = False) -> str:
    """Return how many times ours the time of another provider is. provider: its name or the beginning of it. beside:
    the time itself, too."""
    row = by.get(provider) or next((r for name, r in by.items() if name.startswith(provider)), None)
    if row is None or not row.ratio_to_ours:
        return ""
    found = number(row.ratio_to_ours, 2)
    return f"{number(row.time_us, 1)} ({found})" if beside else found


OURS: dict[str, Column] = {"ours, us": time}
GBPS, FLOOR = partial(rate, unit="gbps"), partial(ratio, provider="floor")


def of_matmul(*others: str, head: str = "of matmul") -> dict[str, Column]:
    """Return the columns of prefill. head: of the share; the floor is a matmul of the MMAs' type, or a time."""
    columns: dict[str, Column] = {"us": partial(time, whole=True), "TFLOP/s": partial(rate, unit="tflops"), head: share}
    return columns | {f"{p} / ours": partial(ratio, provider=p) for p in others}


def timed(others: dict[str, str]) -> dict[str, Column]:
    """Return the columns of times of other providers, beside ours. others: provider, or its beginning -> head."""
    return {f"{head}, us (/ ours)": partial(ratio, provider=p, beside=True) for p, head in others.items()}


def newest_of_each(rows: list[ResultRow], prefix: str) -> list[ResultRow]:
    """Return the newest row of each case and provider: no run has all peers. A peer's ratio is that of its own run."""
    return list({(r.case, r.provider): r for r in rows if r.case.startswith(prefix)}.values())


# ---- sentences below a table


def times(start: str, found: Iterable[tuple[str, float]]) -> str:
    """Return a sentence with times in microseconds, or "" if there are none."""
    parts = ", ".join(f"{name} {us:.1f} us" for name, us in found)
    return f"{start}: {parts}." if parts else ""


HOST = "Host time per call, with the kernel loaded"
CACHE_HOSTS = """append_paged_kv_cache append_qkv append_qkv-bound merge_states merge_state
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping""".split()


def hosts(rows: list[ResultRow], prefix: str) -> str:
    return times(HOST, ((r.provider, r.time_us) for r in newest(rows, prefix)))


def cache_hosts(rows: list[ResultRow]) -> str:
    """Return the host times of functions that write caches, quantise and merge states."""
    found = ((r.case.removeprefix("host-"), r.time_us) for r in newest_of_each(rows, "host-"))
    return times(HOST, ((f"`{name}`", us) for name, us in found if name in CACHE_HOSTS))


def outputs(rows: list[ResultRow]) -> str:
    """Return the time of each top-k function on one case."""
    found = [(*r.case.removeprefix("outputs-").partition("-topk-"), r.time_us) for r in newest(rows, "outputs-")]
    return times(f"All functions on `topk-{found[0][2]}`", ((f"`{f[0]}`", f[3]) for f in found)) if found else ""


class Section(NamedTuple):
    """A table of cases from the newest runs.

    prefixes: of the cases. columns: after that of the case. kept: whether a row counts. more: functions of all rows,
    each of which returns a sentence below the table. pictures: part of the plots' names.
    """

    prefixes: tuple[str, ...]
    columns: dict[str, Column]
    kept: Callable[[ResultRow], bool] = lambda row: True
    more: tuple[Callable[[list[ResultRow]], str], ...] = ()
    pictures: str = ""
    choose: Callable[[list[ResultRow], str], list[ResultRow]] = newest

    def paragraphs(self, gpu: str, rows: list[ResultRow]) -> Iterator[str]:
        """Yield the runs of one GPU, the table, sentences and plots."""
        own = [r for r in rows if self.kept(r)]
        chosen = [r for prefix in self.prefixes for r in self.choose(own, prefix)]
        if not chosen:
            return
        cases: dict[str, dict[str, ResultRow]] = {}
        for r in chosen:
            cases.setdefault(r.case, {})[r.provider] = r
        yield made(gpu, chosen)
        lines = ([f"`{case}`", *(cell(by) for cell in self.columns.values())] for case, by in cases.items())
        yield pages.table(["case", *self.columns], lines)
        yield from (sentence(rows) for sentence in self.more)
        if self.pictures:
            yield from (image(gpu, path) for path in sorted(FOLDER.glob(f"{gpu}-{self.pictures}-*.png")))


def low(row: ResultRow) -> bool:
    """Return whether a row is prefill in low precision or with skip-softmax."""
    return row.case.startswith("prefill-") and not row.case.startswith("prefill-bf16-")


SECTIONS = {  # marker -> what stands there
    "measured": Section(
        ("prefill-",), of_matmul("cudnn", "flash-attn-4", "flashinfer"), lambda row: not low(row),
        (partial(hosts, prefix="host-prefill"),), "prefill",
    ),
    "measured-precision": Section(("prefill-",), of_matmul("own-bf16", "own-fp8", "flashinfer"), low),
    "measured-serving": Section(
        ("serve-",), of_matmul("own-parts", "flash-attn-4", "flashinfer", head="of the floor"),
        more=(partial(hosts, prefix="host-serve"),), pictures="serve",
    ),
    "measured-decode": Section(
        ("decode-",),
        OURS | {"GB/s of K and V": GBPS, "floor / ours": FLOOR}
        | timed({"own-": "next wider type", "batch-invariant": "`batch_invariant`", "flashinfer": "flashinfer"}),
        more=(partial(hosts, prefix="host-decode"),), pictures="decode",
    ),
    "measured-mla": Section(
        ("mla-decode-",),
        OURS | {"GB/s": GBPS, "TFLOP/s": partial(rate, unit="tflops"), "floor / ours": FLOOR}
        | timed({"flashmla": "FlashMLA", "flash-attn-3": "FA3", "own-p64": "pages of 64"}),
    ),
    "measured-dsa": Section(
        ("dsa-decode-", "dsa-prefill-"),
        OURS | {"floor / ours": FLOOR}
        | timed({"flashmla": "FlashMLA", "flash-attn-3": "FA3", "own-shared": "`share_keys`", "own-bf16": "bf16"}),
    ),
    "measured-indexer": Section(
        ("indexer-prefill-", "indexer-decode-", "dsa-select-", "dsa-layer-"),
        OURS | {"TFLOP/s": partial(rate, unit="tflops"), "floor / ours": FLOOR}
        | timed({"deep-gemm": "DeepGEMM", "vllm": "vLLM", "own-logits": "logits alone"}),
    ),
    "measured-latent-caches": Section(
        ("mla-append-", "mla-gather-", "indexer-append-", "indexer-gather-"),
        OURS | {"GB/s": GBPS, "of copy": FLOOR} | timed({"vllm": "vLLM"}),
    ),
    "measured-topk": Section(
        ("topk-",),
        OURS | timed({name: name for name in ("torch", "flashinfer", "vllm", "floor")}),
        more=(outputs, partial(hosts, prefix="host-topk")), pictures="topk",
    ),
    "measured-caches": Section(
        ("append-", "nvfp4-", "merge-"),
        OURS | {"GB/s": GBPS, "of copy": FLOOR} | timed({"flashinfer": "flashinfer", "vllm": "vLLM"}),
        more=(cache_hosts,), choose=newest_of_each,
    ),
}  # fmt: skip


TRACE = {  # last words of a case -> what they are
    "step-mean": "step, mean", "step-p50": "p50", "step-p90": "p90", "step-p99": "p99",
    "first-p50": "first token, p50", "first-p90": "p90", "first-p99": "p99",
}  # fmt: skip


def trace(gpu: str, rows: list[ResultRow]) -> Iterator[str]:
    """Yield attention of a trace: a line per provider."""
    if chosen := newest(rows, "trace-"):
        times = {("-".join(r.case.split("-")[-2:]), r.provider): f"{r.time_us:.0f}" for r in chosen}
        lines = ([p, *(times.get((part, p), "") for part in TRACE)] for p in dict.fromkeys(r.provider for r in chosen))
        yield from (made(gpu, chosen, "; microseconds"), pages.table(["", *TRACE.values()], lines))


def parallel(gpu: str, rows: list[ResultRow]) -> Iterator[str]:
    """Yield the steps of `examples.parallel`: a line per number of GPUs."""
    found = [r for r in rows if r.case.startswith("parallel-")]
    if chosen := [r for r in found if r.run == max(found, key=lambda row: row.date).run]:
        times = {(r.case, r.provider): f"{r.time_us:.0f} us" for r in chosen}
        cases = dict.fromkeys(r.case for r in chosen)
        lines = ([c.rpartition("-x")[2], *(times.get((c, form), "") for form in ("heads", "keys"))] for c in cases)
        yield from (made(gpu, chosen), pages.table(["GPUs", "heads per rank", "keys per rank"], lines, 0))


def family(gpu: str, rows: list[ResultRow]) -> Iterator[str]:
    """Yield the forms of the prefill family beside the context function: one line each, then host times. Older runs
    also have forms that now have a case of their own, in another table."""
    from .family import FORMS, OWN_CASE

    forms = FORMS.keys() - OWN_CASE | {"ours-p1"}
    if chosen := [r for r in newest(rows, "family-") if r.provider in forms]:
        lines = [[f"`{r.case}`", r.provider, f"{r.time_us:.1f}", number(r.ratio_to_ours or 0.0, 3)] for r in chosen]
        yield from pages.dated_table(gpu, chosen, ["case", "provider", "us", "/ ours"], lines)
        yield hosts(rows, "host-family")


# ---- beside the peers


def headline_picture(gpu: str, rows: list[ResultRow]) -> Iterator[str]:
    """Yield README's picture."""
    if peers.points(rows):
        text = (
            "Bars: the time of the fastest peer over ours, for the calls of the table below; right of 1 ours is faster"
        )
        yield picture(text, FOLDER / f"{gpu}-headlines.png")


def headlines(gpu: str, rows: list[ResultRow]) -> Iterator[str]:
    """Yield README's table, and the range of the ratios of each family and engine."""
    if found := peers.points(rows):
        yield peers.headline_table(gpu, found)
        text = "The fastest peer's time over ours, over all measured shapes"
        yield peers.range_sentence(text, peers.kernel_ranges(found))
    if ranges := peers.engine_ranges(read_all(EngineRow).get(gpu, [])):
        text = (
            "Tokens per second of [whole engines](docs/engines.md#whole-engines-measured) with our backend over those"
        )
        yield peers.range_sentence(f"{text} with the engine's fastest own", ranges)


def beside_peers(gpu: str, rows: list[ResultRow]) -> Iterator[str]:
    """Yield the picture of all peers, the ranges of the ratios, and the fastest peer of each case."""
    if not (found := peers.points(rows)):
        return
    yield peers.range_table(f"fastest peer's time / ours, on {gpu}", peers.kernel_ranges(found))
    if ranges := peers.engine_ranges(read_all(EngineRow).get(gpu, [])):
        yield peers.range_table(f"tokens per second with our backend / with the engine's fastest own, on {gpu}", ranges)
    names = peers.listed(dict.fromkeys(p.peer for p in found))
    text = f"Bars: the time of {names} over ours, case by case ({gpu}); right of 1 ours is faster"
    yield picture(text, FOLDER / f"{gpu}-peers.png")
    yield peers.full_table(gpu, found)


# ---- two roofs: the bytes at the copy rate, and the operations at the matmul rate

ROOFS = {  # marker -> the cases of a table, by prefixes
    "deep-mla": (
        "mla-decode-",
        "dsa-decode-kv656-b128-h",
        "dsa-decode-bf16-b128",
        "dsa-prefill-bf16-t4096-s32768-h128-k2048",
    ),
    "deep-indexer": ("indexer-prefill-", "indexer-decode-", "dsa-select-b64-", "dsa-select-b1-"),
}


def roofs(gpu: str, rows: list[ResultRow], prefixes: Iterable[str]) -> Iterator[str]:
    """Yield a line per case: the time of its bytes and that of its operations at the rates of its own run, and ours."""
    tops = {(r.run, r.case): r for r in rows if r.case.startswith("ceiling-")}
    lines, chosen = [], []
    for row in (r for prefix in prefixes for r in newest(rows, prefix) if r.provider == "ours"):
        matmul = "fp8" if row.case.startswith(("indexer-", "dsa-select-")) else "bf16"  # of the MMAs
        copy, top = (tops.get((row.run, f"ceiling-{name}")) for name in ("copy", f"matmul-{matmul}"))
        if copy is None or top is None or not (row.gbps and row.tflops and copy.gbps and top.tflops):
            continue
        parts = row.gbps / copy.gbps, row.tflops / top.tflops  # of our time
        chosen.append(row)
        us = [number(part * row.time_us, 1) for part in parts] + [number(row.time_us, 1)]
        lines.append([f"`{row.case}`", *us, "bytes" if parts[0] > parts[1] else "operations", f"{max(parts):.2f}"])
    if lines:
        head = ["case", "bytes, us", "operations, us", "ours, us", "longer one", "/ ours"]
        yield from (made(gpu, chosen), pages.table(head, lines))


# ---- rows of other kinds: a line per row

Columns = dict[str, str | Callable[[Any], str]]  # head -> format of the row `r`, or a function of it


def listed(gpu: str, rows: list[Any], columns: Columns, words: int = 2, more: str = "") -> list[str]:
    """Return the runs that made the rows, and their table. `{name}` in a column is the case without its family."""
    lines = (
        [
            cell(r) if callable(cell) else cell.format(r=r, name=f"`{r.case.partition('-')[2]}`")
            for cell in columns.values()
        ]
        for r in rows
    )
    return [made(gpu, rows, more), pages.table(list(columns), lines, words)]


def newest_rows(gpu: str, rows: list[Any], columns: Columns) -> list[str]:
    """Return `listed` of the newest row of each case and provider."""
    return listed(gpu, list({(r.case, r.provider): r for r in rows}.values()), columns)


NAMED: Columns = {"load": "{name}", "attention": "{r.provider}"}
TOKENS: Columns = {
    "first token, ms": "{r.ttft_p50_ms:.0f} ({r.ttft_p99_ms:.0f})",
    "each token, ms": "{r.tpot_p50_ms:.2f} ({r.tpot_p99_ms:.2f})",
}
ERRORS: Columns = {
    "model": "{name}", "attention": "{r.provider}", "tokens": "{r.tokens:.0f}", "mean": "{r.mean:.4f}",
    "90 %": "{r.p90:.3f}", "largest": "{r.largest:.3f}",
}  # fmt: skip
ANSWERS: Columns = {
    "model": "{name}", "attention": "{r.provider}", "answers": "{r.count:.0f}",
    "again, alone, mixed, resumed": "{r.again:.0f}, {r.alone:.0f}, {r.mixed:.0f}, {r.resumed:.0f}",
    "preempted": lambda r: "" if r.preempted is None else f"{r.preempted:.0f}",
    "in common": lambda r: "" if r.provider == r.reference else f"{r.common:.0%}",
    "difference": lambda r: "" if r.provider == r.reference else f"{r.difference:.3f}",
}  # fmt: skip
LOADS: Columns = (
    NAMED
    | {"requests": "{r.completed:.0f}", "abandoned": "{r.abandoned:.0f}", "tokens/s": "{r.tokens_per_s:.0f}"}
    | TOKENS
    | {
        "host memory, MiB": "{r.host_mib:.0f} ({r.host_growth_mib:+.0f})",
        "GPU memory, MiB": "{r.device_mib:.0f} ({r.device_growth_mib:+.0f})",
    }
)
SKIPPED: Columns = {
    "data": "{r.data}", "factor": "{r.factor:g}", "blocks left out": "{r.left_out:.0%}", "us": "{r.time_us:.0f}",
    "dense / ours": lambda r: f"{r.dense_us / r.time_us:.2f}", "largest error": "{r.max_error:.2g}",
    "RMS error": "{r.rms_error:.2g}",
}  # fmt: skip


def sparsity(gpu: str, rows: list[results.SkipRow]) -> Iterator[str]:
    """Yield skip-softmax over factors: a line per data set and factor, and the plot."""
    yield from listed(gpu, rows, SKIPPED, 1, f", `{rows[0].case}`")
    yield image(gpu, FOLDER / f"{gpu}-skip-softmax.png")


def engines(gpu: str, rows: list[EngineRow]) -> Iterator[str]:
    """Yield two tables of whole engines, narrow enough for a window: one line per load and backend, from the newest run
    of each load. The first has the rates and times of the timed passes, the second the rest."""
    newest_date = {r.case: r.date for r in rows}
    chosen = [r for r in rows if r.date == newest_date[r.case]]
    ours = {r.case: r.tokens_per_s for r in chosen if r.provider == "ours"}
    rates: Columns = {
        "tokens/s": lambda r: f"{r.tokens_per_s:.{0 if r.tokens_per_s > 99 else 2}f}",
        "/ ours": lambda r: f"{r.tokens_per_s / ours[r.case]:.3f}" if r.case in ours else "",
    }
    rest: Columns = {
        "first pass, tokens/s": lambda r: "" if r.cold_tokens_per_s is None else f"{r.cold_tokens_per_s:.0f}",
        "cache, tokens": "{r.cache_tokens:.0f}",
        "difference": lambda r: "" if r.provider == r.reference else number(r.difference, 3),
    }
    yield from listed(gpu, chosen, NAMED | rates | TOKENS)
    yield listed(gpu, chosen, NAMED | rest)[1]


# ---- what was held on a GPU: sanitizers, long use, errors against fp64, equal bits

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


def sanitizers(gpu: str, rows: list[results.SanitizerRow]) -> list[str]:
    """Return a line per piece with what each tool reported, from the newest run of each, and the excused reports."""
    chosen = {(r.tool, r.piece): r for r in rows if r.status != "not begun"}
    reasons = list(dict.fromkeys(reason for r in chosen.values() if r.reason for reason in r.reason.split(results.AND)))

    def cell(row: results.SanitizerRow | None) -> str:
        if row is None:
            return ""
        if row.errors is None:
            return f"did not end in {row.seconds:.0f} s"
        notes = [str(reasons.index(reason) + 1) for reason in row.reason.split(results.AND)] if row.reason else []
        note = f" ({', '.join(notes)})" if notes else ""
        return f"{row.errors:,.0f}{note}" if row.status != "FOUND" else f"**{row.errors:,.0f}**"

    lines = []
    for piece, calls in sorted({r.piece: r.calls for r in reversed(chosen.values())}.items()):
        lines.append([f"`{piece}`", f"{calls:.0f}", *(cell(chosen.get((tool, piece))) for tool in TOOLS)])
    notes = "\n".join(f"{number}. {reason[0].upper()}{reason[1:]}." for number, reason in enumerate(reasons, 1))
    return [*pages.dated_table(gpu, list(chosen.values()), ["piece", "calls", *TOOLS], lines), notes]


def soaks(gpu: str, rows: list[results.SoakRow]) -> list[str]:
    """Return a line per scenario: its newest run, and how many runs held for how many seconds in all."""
    ended = [r for r in rows if r.result != "skipped"]
    chosen, lines = list({r.scenario: r for r in ended}.values()), []
    for last in chosen:
        own = [r for r in ended if r.scenario == last.scenario]
        held = [r.seconds for r in own if r.result == "held"]
        said = f"{last.result}: {last.detail}", f"{len(held)} of {len(own)}", f"{sum(held):,.0f}"
        lines.append([f"`{last.scenario}`", *said])
    return pages.dated_table(gpu, chosen, ["scenario", "newest run", "runs that held", "seconds of these"], lines)


OTHERS = ("rounded", "ours", "flash-attn-4", "cudnn")
TYPES = {  # of Q, and of K and V, by the word in a case's name
    "bf16": "bf16; bf16",
    "fp16": "fp16; fp16",
    "kve4m3": "bf16; e4m3",
    "kve5m2": "bf16; e5m2",
    "kvnvfp4": "bf16; NVFP4",
    "qe4m3": "e4m3; e4m3",
    "qe4m3kvnvfp4": "e4m3; NVFP4",
}


LATENT = {
    "mla": "Latent attention over all keys",
    "dsa": "Latent attention over chosen keys",
    "indexer": "Logits of the indexer",
}


def accuracy(gpu: str, rows: list[results.AccuracyRow]) -> list[str]:
    """Return a table per form of calls: a line per types, data and number of keys, or per case of latent attention and
    of the indexer, from the newest run of each."""
    newest, parts = {(r.case, r.provider): r for r in rows}, []
    for form in ("prefill", "extend", "decode", *LATENT):
        own = {key: r for key, r in newest.items() if key[0].startswith(f"accuracy-{form}-")}
        others = OTHERS if form not in LATENT else tuple(dict.fromkeys(provider for _, provider in own))
        lines = []
        for case in dict.fromkeys(name for name, _ in own):
            errors = [own.get((case, provider)) for provider in others]
            stored = next((f"{100 * r.format_error:.2g}" for r in errors if r and r.format_error is not None), "")
            cells = [f"{100 * r.rms_error:.2g} ({100 * r.max_error:.2g})" if r else "" for r in errors]
            lines.append([*(words_of(case) if form not in LATENT else [f"`{case}`"]), *cells, stored])
        if lines:
            first = ["case"] if form in LATENT else ["Q; K and V", "data", "keys"]
            table = pages.table([*first, *others, "storing"], lines, min(len(first), 2))
            parts += [f"{LATENT.get(form, form.capitalize())}. {pages.made(gpu, own.values())}", table]
    return parts


def words_of(case: str) -> list[str]:
    """Return the types, the data and the number of keys of a case of attention with K and V."""
    _, _, types, data, keys = case.split("-")
    return [TYPES[types], data, f"{int(keys[1:]):,}"]


def determinism(gpu: str, rows: list[results.DeterminismRow]) -> list[str]:
    """Return a line per provider, form of calls and kind of comparison: how many found equal bits."""
    newest = {(r.case, r.provider, r.kind): r for r in rows}
    groups: dict[tuple[str, str, str], list[results.DeterminismRow]] = {}
    for r in newest.values():
        groups.setdefault((r.provider, r.case.split("-")[1], r.kind), []).append(r)
    lines = [
        [provider, f"{form}: {kind}", f"{sum(r.equal for r in own):,.0f} of {sum(r.count for r in own):,.0f}"]
        for (provider, form, kind), own in sorted(groups.items())
    ]
    return pages.dated_table(gpu, list(newest.values()), ["provider", "comparison", "equal bits"], lines)


# ---- all sections

RESULTS: dict[str, Callable[..., Iterable[str]]] = {
    **{name: one.paragraphs for name, one in SECTIONS.items()},
    "headline-picture": headline_picture,
    "headlines": headlines,
    "peers": beside_peers,
    **{name: partial(roofs, prefixes=prefixes) for name, prefixes in ROOFS.items()},
    "measured-trace": trace,
    "measured-family": family,
    "measured-parallel": parallel,
}
OTHER_ROWS: dict[type[results.Run], Callable[..., Iterable[str]]] = {
    EngineRow: engines,
    results.ErrorRow: partial(newest_rows, columns=ERRORS),
    results.AnswerRow: partial(newest_rows, columns=ANSWERS),
    results.ServerRow: partial(newest_rows, columns=LOADS),
    results.SanitizerRow: sanitizers,
    results.SoakRow: soaks,
    results.AccuracyRow: accuracy,
    results.DeterminismRow: determinism,
}


def sections() -> dict[str, str]:
    """Return marker -> what stands there."""
    found, other = read_all(), {f"measured-{kind.folder.replace('_', '-')}": kind for kind in OTHER_ROWS}
    return (
        {name: of_each_gpu(found, make) for name, make in RESULTS.items()}
        | {name: of_each_gpu(read_all(kind), OTHER_ROWS[kind]) for name, kind in other.items()}
        | {"measured-sparsity": of_each_gpu(results.read_sparsity(), sparsity)}
    )
