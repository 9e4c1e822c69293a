"""The measured sections of README and docs/: the newest runs in bench/results, between markers."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from . import pages, peers, trust
from .pages import of_each_gpu
from .results import (
    ENGINE_ERRORS,
    ENGINES,
    FOLDER,
    ROOT,
    SERVERS,
    EngineRow,
    ErrorRow,
    ResultRow,
    ServerRow,
    SkipRow,
    newest,
    read_all,
    read_sparsity,
)

PEERS = ("cudnn", "flash-attn-4", "flashinfer")
PRECISION_PEERS = ("own-bf16", "own-fp8", "flashinfer")
SERVE_PEERS = ("own-parts", "flash-attn-4", "flashinfer")
TOPK_PEERS = ("torch", "flashinfer", "vllm", "floor")
CACHE_CASES = ("append-", "nvfp4-", "merge-")
CACHE_HOSTS = [
    f"host-{name}"
    for name in ("append_paged_kv_cache", "append_qkv", "append_qkv-bound",
                 "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", "merge_states", "merge_state")
]  # fmt: skip
PICTURES = {  # end of a file's name -> what the picture shows, for readers who do not see it
    "prefill-lengths": "Prefill, TFLOP/s against sequence length, causal and full, ours and peers",
    "prefill-roofline": "Roofline of prefill: TFLOP/s against FLOP per byte, under the measured matmul and copy rates",
    "prefill-share": "Prefill, share of the matmul rate that ours and peers reach in each case",
    "decode-share": "Decode, share of the copy rate at which K and V are read in each case, by type of cache",
    "decode-lengths": "Decode, share of the copy rate against length, a line per batch size",
    "serve-sweep": "Mixed batches, time against decode tokens; chunks, TFLOP/s against their size",
    "skip-softmax": "Skip-softmax, speed against the share of blocks that are skipped",
    "topk-lengths": "Top-k, time against row length, ours, torch.topk and the time to read the scores once",
}


def low(row: ResultRow) -> bool:
    """Return whether a row is prefill in low precision or with skip-softmax."""
    return row.case.startswith("prefill-") and not row.case.startswith("prefill-bf16-")


def cells(rows: list[ResultRow], peers: tuple[str, ...] = PEERS) -> list[str]:
    """One line of the table: a case with its providers."""
    by = {r.provider: r for r in rows}
    mine, floor = by["ours"], by.get("floor")
    line = [f"`{mine.case}`", f"{mine.time_us:.0f}", f"{mine.tflops:.0f}" if mine.tflops else ""]
    line.append(f"{mine.tflops / floor.tflops:.0%}" if mine.tflops and floor and floor.tflops else "")
    line += [f"{by[p].ratio_to_ours:.2f}" if p in by and by[p].ratio_to_ours else "" for p in peers]
    return line


def number(value: float, decimals: int) -> str:
    """With `decimals`; below 1 with two significant digits."""
    return f"{value:.{decimals}f}" if round(value, 2) >= 1 else f"{value:#.2g}"


def beside(row: ResultRow | None) -> str:
    """Time of another provider, and how many times ours it is."""
    return f"{number(row.time_us, 1)} ({number(row.ratio_to_ours, 2)})" if row and row.ratio_to_ours else ""


def topk_cells(rows: list[ResultRow]) -> list[str]:
    """One line of the top-k table."""
    by = {r.provider: r for r in rows}
    return [f"`{by['ours'].case}`", number(by["ours"].time_us, 1), *(beside(by.get(p)) for p in TOPK_PEERS)]


def host_line(rows: list[ResultRow], prefix: str) -> str:
    """Host time of a call, where it was measured."""
    times = [f"{r.provider} {r.time_us:.1f} us" for r in newest(rows, prefix)]
    return f"Host time per call, with the kernel loaded: {', '.join(times)}." if times else ""


def picture(alt: str, path: Path) -> str:
    """Return a picture with its alternative text, which leads to the file in its full size."""
    place = path.relative_to(ROOT).as_posix()
    return f"[![{alt}]({place})]({place})"


def image(gpu: str, path: Path) -> str:
    """Return a plot with the text that PICTURES has for it."""
    name = path.stem.removeprefix(f"{gpu}-")
    return picture(f"{PICTURES.get(name, name)} ({gpu})", path)


def outputs(rows: list[ResultRow]) -> str:
    """Return a sentence with the time of each top-k function on one case, or "" if none was measured."""
    found = newest(rows, "outputs-")
    times = [f"`{r.case.removeprefix('outputs-').partition('-topk-')[0]}` {r.time_us:.1f} us" for r in found]
    case = found[0].case.partition("-topk-")[2] if found else ""
    return f"All functions on `topk-{case}`: {', '.join(times)}." if found else ""


def cache_cells(rows: list[ResultRow]) -> list[str]:
    """Return one line of the table of caches and merged states."""
    by = {r.provider: r for r in rows}
    mine, floor = by["ours"], by["floor"]
    return [
        f"`{mine.case}`", number(mine.time_us, 1), f"{mine.gbps or 0:.0f}", number(floor.ratio_to_ours or 0.0, 2),
        beside(by.get("flashinfer")), beside(by.get("vllm")),
    ]  # fmt: skip


def newest_of_each(rows: list[ResultRow], prefix: str) -> list[ResultRow]:
    """Return the newest row of each case and provider: no run has all peers. A peer's ratio is that of its own run."""
    return list({(r.case, r.provider): r for r in rows if r.case.startswith(prefix)}.values())


def cache_hosts(rows: list[ResultRow]) -> str:
    """Return a sentence with the host times of functions that write caches, quantise and merge states."""
    hosts = [r for r in newest_of_each(rows, "host-") if r.case in CACHE_HOSTS]
    times = [f"`{r.case.removeprefix('host-')}` {r.time_us:.1f} us" for r in hosts]
    return f"Host time per call, with the kernel loaded: {', '.join(times)}." if times else ""


def decode_cells(rows: list[ResultRow]) -> list[str]:
    """Return one line of the decode table."""
    by = {r.provider: r for r in rows}
    mine, floor = by["ours"], by.get("floor")
    line = [f"`{mine.case}`", f"{mine.time_us:.1f}", f"{mine.gbps:.0f}" if mine.gbps else ""]
    line.append(number(floor.ratio_to_ours, 2) if floor and floor.ratio_to_ours else "")
    own = next((r for name, r in by.items() if name.startswith("own-")), None)
    return [*line, beside(own), beside(by.get("batch-invariant")), beside(by.get("flashinfer"))]


class Section(NamedTuple):
    """A table of cases, one line each, from the newest runs.

    prefixes: of the cases. head, line: of the table; line gets the rows of a case. kept: whether a row counts. host:
    prefix of the cases with host times. more: returns a sentence below the table. pictures: part of the plots' names.
    """

    prefixes: tuple[str, ...]
    head: tuple[str, ...]
    line: Callable[[list[ResultRow]], list[str]]
    kept: Callable[[ResultRow], bool] = lambda row: True
    host: str = ""
    more: Callable[[list[ResultRow]], str] = lambda rows: ""
    pictures: str = ""
    choose: Callable[[list[ResultRow], str], list[ResultRow]] = newest

    def paragraphs(self, gpu: str, rows: list[ResultRow]) -> Iterator[str]:
        """Yield the runs of one GPU, the table, host times, sentences and plots."""
        own = [r for r in rows if self.kept(r)]
        chosen = [r for prefix in self.prefixes for r in self.choose(own, prefix)]
        if not chosen:
            return
        cases = dict.fromkeys(r.case for r in chosen)
        yield pages.made(gpu, chosen)
        yield pages.table(self.head, (self.line([r for r in chosen if r.case == case]) for case in cases))
        yield self.more(rows)
        yield host_line(rows, self.host) if self.host else ""
        if self.pictures:
            yield from (image(gpu, path) for path in sorted(FOLDER.glob(f"{gpu}-{self.pictures}-*.png")))


SECTIONS = {  # marker -> what stands there
    "measured": Section(
        ("prefill-",), ("case", "us", "TFLOP/s", "of matmul", *(f"{p} / ours" for p in PEERS)), cells,
        lambda row: not low(row), "host-prefill", pictures="prefill",
    ),
    "measured-precision": Section(  # `of matmul`: of the matmul of the MMAs' type
        ("prefill-",), ("case", "us", "TFLOP/s", "of matmul", *(f"{p} / ours" for p in PRECISION_PEERS)),
        partial(cells, peers=PRECISION_PEERS), low,
    ),
    "measured-serving": Section(  # `of the floor`: its time over ours
        ("serve-",), ("case", "us", "TFLOP/s", "of the floor", *(f"{p} / ours" for p in SERVE_PEERS)),
        partial(cells, peers=SERVE_PEERS), host="host-serve", pictures="serve",
    ),
    "measured-decode": Section(
        ("decode-",),
        ("case", "ours, us", "GB/s of K and V", "floor / ours", "next wider type, us (/ ours)",
         "`batch_invariant`, us (/ ours)", "flashinfer, us (/ ours)"),
        decode_cells, host="host-decode", pictures="decode",
    ),
    "measured-topk": Section(
        ("topk-",), ("case", "ours, us", *(f"{p}, us (/ ours)" for p in TOPK_PEERS)), topk_cells,
        host="host-topk", more=outputs, pictures="topk",
    ),
    "measured-caches": Section(
        CACHE_CASES, ("case", "ours, us", "GB/s", "of copy", "flashinfer, us (/ ours)", "vLLM, us (/ ours)"),
        cache_cells, more=cache_hosts, choose=newest_of_each,
    ),
}  # fmt: skip
TRACE = {  # last words of a case -> what they are
    "step-mean": "step, mean",
    "step-p50": "p50",
    "step-p90": "p90",
    "step-p99": "p99",
    "first-p50": "first token, p50",
    "first-p90": "p90",
    "first-p99": "p99",
}


def trace(gpu: str, rows: list[ResultRow]) -> Iterator[str]:
    """Yield attention of a trace: a line per provider."""
    if chosen := newest(rows, "trace-"):
        times = {("-".join(row.case.split("-")[-2:]), row.provider): f"{row.time_us:.0f}" for row in chosen}
        providers = dict.fromkeys(row.provider for row in chosen)
        yield pages.made(gpu, chosen, "; microseconds")
        lines = ([p, *(times.get((part, p), "") for part in TRACE)] for p in providers)
        yield pages.table(["", *TRACE.values()], lines)


def sparsity(gpu: str, rows: list[SkipRow]) -> Iterator[str]:
    """Yield skip-softmax over factors: a line per data set and factor, and the plot."""
    yield pages.made(gpu, rows, f", `{rows[0].case}`")
    head = ["data", "factor", "blocks left out", "us", "dense / ours", "largest error", "RMS error"]
    yield pages.table(head, (
        [r.data, f"{r.factor:g}", f"{r.left_out:.0%}", f"{r.time_us:.0f}", f"{r.dense_us / r.time_us:.2f}",
         f"{r.max_error:.2g}", f"{r.rms_error:.2g}"]
        for r in rows
    ))  # fmt: skip
    path = FOLDER / f"{gpu}-skip-softmax.png"
    yield image(gpu, path) if path.is_file() else ""


def parallel(gpu: str, rows: list[ResultRow]) -> Iterator[str]:
    """Yield the steps of `examples.parallel`: a line per number of GPUs."""
    found = [r for r in rows if r.case.startswith("parallel-")]
    chosen = [r for r in found if r.run == max(found, key=lambda row: row.date).run]
    if chosen:
        times = {(r.case, r.provider): f"{r.time_us:.0f} us" for r in chosen}
        cases = dict.fromkeys(r.case for r in chosen)
        yield pages.made(gpu, chosen)
        lines = ([c.rpartition("-x")[2], *(times.get((c, form), "") for form in ("heads", "keys"))] for c in cases)
        yield pages.table(["GPUs", "heads per rank", "keys per rank"], lines, 0)


def family(gpu: str, rows: list[ResultRow]) -> Iterator[str]:
    """Yield the forms of the prefill family beside the context function: one line each, then host times. Older runs
    also have forms that now have a case of their own, in another table."""
    from .family import FORMS, OWN_CASE

    forms = FORMS.keys() - OWN_CASE | {"ours-p1"}
    if chosen := [r for r in newest(rows, "family-") if r.provider in forms]:
        lines = [[f"`{r.case}`", r.provider, f"{r.time_us:.1f}", number(r.ratio_to_ours or 0.0, 3)] for r in chosen]
        yield from pages.dated_table(gpu, chosen, ["case", "provider", "us", "/ ours"], lines)
        yield host_line(rows, "host-family")


def headline_picture(gpu: str, rows: list[ResultRow]) -> Iterator[str]:
    """Yield README's picture."""
    path = FOLDER / f"{gpu}-headlines.png"
    if peers.points(rows) and path.is_file():
        yield picture(
            "Bars: the time of the fastest peer over ours, for the calls of the table below; right of 1 ours is faster",
            path,
        )


def headlines(gpu: str, rows: list[ResultRow], engines: list[EngineRow]) -> Iterator[str]:
    """Yield README's table, and the range of the ratios of each family and engine."""
    if found := peers.points(rows):
        yield peers.headline_table(gpu, found)
        text = "The fastest peer's time over ours, over all measured shapes"
        yield peers.range_sentence(text, peers.kernel_ranges(found))
    if ranges := peers.engine_ranges(engines):
        text = (
            "Tokens per second of [whole engines](docs/engines.md#whole-engines-measured) with our backend over those "
        )
        yield peers.range_sentence(f"{text}with the engine's fastest own", ranges)


def beside_peers(gpu: str, rows: list[ResultRow], engines: list[EngineRow]) -> Iterator[str]:
    """Yield the picture of all peers, the ranges of the ratios, and the fastest peer of each case."""
    found, path = peers.points(rows), FOLDER / f"{gpu}-peers.png"
    if not found:
        return
    yield peers.range_table(f"fastest peer's time / ours, on {gpu}", peers.kernel_ranges(found))
    if ranges := peers.engine_ranges(engines):
        yield peers.range_table(f"tokens per second with our backend / with the engine's fastest own, on {gpu}", ranges)
    if path.is_file():
        names = peers.listed(dict.fromkeys(p.peer for p in found))
        yield picture(f"Bars: the time of {names} over ours, case by case ({gpu}); right of 1 ours is faster", path)
    yield peers.full_table(gpu, found)


def engines(gpu: str, rows: list[EngineRow]) -> Iterator[str]:
    """Yield two tables of whole engines, narrow enough for a window: one line per load and backend, from the newest run
    of each load. The first has the rates and times of the timed passes, the second the rest."""
    newest_date = {r.case: r.date for r in rows}
    chosen = [r for r in rows if r.date == newest_date[r.case]]
    ours = {r.case: r.tokens_per_s for r in chosen if r.provider == "ours"}
    names = [(f"`{r.case.removeprefix('engine-')}`", r.provider) for r in chosen]
    head = ["load", "attention", "tokens/s", "/ ours", "first token, ms", "each token, ms"]
    yield from pages.dated_table(gpu, chosen, head, (
        [
            *name, f"{r.tokens_per_s:.{0 if r.tokens_per_s > 99 else 2}f}",
            f"{r.tokens_per_s / ours[r.case]:.3f}" if r.case in ours else "",
            f"{r.ttft_p50_ms:.0f} ({r.ttft_p99_ms:.0f})", f"{r.tpot_p50_ms:.2f} ({r.tpot_p99_ms:.2f})",
        ]
        for name, r in zip(names, chosen)
    ))  # fmt: skip
    yield pages.table(["load", "attention", "first pass, tokens/s", "cache, tokens", "difference"], (
        [
            *name, "" if r.cold_tokens_per_s is None else f"{r.cold_tokens_per_s:.0f}",
            f"{r.cache_tokens:.0f}", "" if r.provider == r.reference else number(r.difference, 3),
        ]
        for name, r in zip(names, chosen)
    ), 2)  # fmt: skip


def errors(gpu: str, rows: list[ErrorRow]) -> list[str]:
    """Return engines against fp32: one line per model and backend, from the newest run of each."""
    chosen = list({(r.case, r.provider): r for r in rows}.values())
    return pages.dated_table(gpu, chosen, ["model", "attention", "tokens", "mean", "90 %", "largest"], [
        [f"`{r.case.removeprefix('engine-')}`", r.provider, f"{r.tokens:.0f}", f"{r.mean:.4f}", f"{r.p90:.3f}",
         f"{r.largest:.3f}"]
        for r in chosen
    ])  # fmt: skip


def servers(gpu: str, rows: list[ServerRow]) -> list[str]:
    """Return servers: one line per load and backend, from the newest run of each."""
    head = ["load", "attention", "requests", "abandoned", "tokens/s", "first token, ms", "each token, ms",
            "host memory, MiB", "GPU memory, MiB"]  # fmt: skip
    chosen = list({(r.case, r.provider): r for r in rows}.values())
    return pages.dated_table(gpu, chosen, head, [
        [
            f"`{r.case.removeprefix('server-')}`", r.provider, f"{r.completed:.0f}", f"{r.abandoned:.0f}",
            f"{r.tokens_per_s:.0f}", f"{r.ttft_p50_ms:.0f} ({r.ttft_p99_ms:.0f})",
            f"{r.tpot_p50_ms:.2f} ({r.tpot_p99_ms:.2f})", f"{r.host_mib:.0f} ({r.host_growth_mib:+.0f})",
            f"{r.device_mib:.0f} ({r.device_growth_mib:+.0f})",
        ]
        for r in chosen
    ])  # fmt: skip


def sections() -> dict[str, str]:
    """Return marker -> what stands there."""
    found, own = read_all(), read_all(ENGINES, EngineRow)
    tables = {name: of_each_gpu(found, one.paragraphs) for name, one in SECTIONS.items()}
    return tables | {
        "headline-picture": of_each_gpu(found, headline_picture),
        "headlines": of_each_gpu(found, lambda gpu, rows: headlines(gpu, rows, own.get(gpu, []))),
        "peers": of_each_gpu(found, lambda gpu, rows: beside_peers(gpu, rows, own.get(gpu, []))),
        "measured-trace": of_each_gpu(found, trace),
        "measured-family": of_each_gpu(found, family),
        "measured-parallel": of_each_gpu(found, parallel),
        "measured-sparsity": of_each_gpu(read_sparsity(), sparsity),
        "measured-engines": of_each_gpu(own, engines),
        "measured-engine-errors": of_each_gpu(read_all(ENGINE_ERRORS, ErrorRow), errors),
        "measured-servers": of_each_gpu(read_all(SERVERS, ServerRow), servers),
        **trust.sections(),
    }


def update() -> None:
    """Write all sections into the pages that hold them."""
    pages.fill(sections())
