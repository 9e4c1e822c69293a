"""The measured sections of README and docs/: the newest runs in bench/results, between markers."""

import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import pages, peers, trust
from .results import (
    FOLDER,
    ROOT,
    EngineRow,
    ErrorRow,
    ResultRow,
    ServerRow,
    SkipRow,
    newest,
    read_accuracy,
    read_all,
    read_determinism,
    read_engines,
    read_errors,
    read_sanitizers,
    read_servers,
    read_soaks,
    read_sparsity,
)

PEERS = ("cudnn", "flash-attn-4", "flashinfer")
PRECISION_PEERS = ("own-bf16", "own-fp8", "flashinfer")
SERVE_PEERS = ("own-parts", "flash-attn-4", "flashinfer")
TOPK_PEERS = ("torch", "flashinfer", "floor")
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


def section(
    gpu: str,
    rows: list[ResultRow],
    prefix: str | tuple[str, ...],
    head: list[str],
    line: Callable[[list[ResultRow]], list[str]],
    images: list[Path],
    choose: Callable[[list[ResultRow], str], list[ResultRow]] = newest,
) -> list[str]:
    """Paragraphs of one GPU's newest run: what ran, the table, host time, plots. Several prefixes have no host time."""
    chosen = [r for each in ((prefix,) if isinstance(prefix, str) else prefix) for r in choose(rows, each)]
    if not chosen:
        return []
    runs = sorted({(r.date, r.commit[:9], r.driver, r.torch) for r in chosen})
    parts = ["\n".join(f"{gpu}, {date}, commit {c}, driver {d}, torch {t}." for date, c, d, t in runs)]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    lines += [line([r for r in chosen if r.case == case]) for case in dict.fromkeys(r.case for r in chosen)]
    parts.append("\n".join("| " + " | ".join(cell) + " |" for cell in lines))
    host = host_line(rows, f"host-{prefix.rstrip('-')}") if isinstance(prefix, str) else ""
    parts += [host] if host else []
    return parts + [image(gpu, path) for path in images if path.is_relative_to(ROOT)]


def measured(results: dict[str, list[ResultRow]], folder: Path = FOLDER) -> str:
    """Markdown of all GPUs' newest prefill runs; says so where there is none."""
    head = ["case", "us", "TFLOP/s", "of matmul", *(f"{p} / ours" for p in PEERS)]
    parts = []
    for gpu, rows in results.items():
        rows = [r for r in rows if not low(r)]
        parts += section(gpu, rows, "prefill-", head, cells, sorted(folder.glob(f"{gpu}-prefill-*.png")))
    return "\n\n".join(parts) or "Not measured yet."


def measured_precision(results: dict[str, list[ResultRow]]) -> str:
    """The same of low precision and skip-softmax; `of matmul` is of the matmul of the MMAs' type."""
    head = ["case", "us", "TFLOP/s", "of matmul", *(f"{p} / ours" for p in PRECISION_PEERS)]
    line, parts = partial(cells, peers=PRECISION_PEERS), list[str]()
    for gpu, rows in results.items():
        parts += section(gpu, [r for r in rows if low(r)], "prefill-", head, line, [])
    return "\n\n".join(parts) or "Not measured yet."


def measured_serving(results: dict[str, list[ResultRow]], folder: Path = FOLDER) -> str:
    """The same of mixed batches and chunks; `of the floor`: its time over ours."""
    head = ["case", "us", "TFLOP/s", "of the floor", *(f"{p} / ours" for p in SERVE_PEERS)]
    line, parts = partial(cells, peers=SERVE_PEERS), list[str]()
    for gpu, rows in results.items():
        parts += section(gpu, rows, "serve-", head, line, sorted(folder.glob(f"{gpu}-serve-*.png")))
    return "\n\n".join(parts) or "Not measured yet."


TRACE = {  # last words of a case -> what they are
    "step-mean": "step, mean",
    "step-p50": "p50",
    "step-p90": "p90",
    "step-p99": "p99",
    "first-p50": "first token, p50",
    "first-p90": "p90",
    "first-p99": "p99",
}


def measured_trace(results: dict[str, list[ResultRow]]) -> str:
    """Attention of a trace: a line a provider."""
    parts = []
    for gpu, rows in results.items():
        chosen = newest(rows, "trace-")
        if not chosen:
            continue
        r = chosen[0]
        parts.append(f"{gpu}, {r.date}, commit {r.commit[:9]}, driver {r.driver}, torch {r.torch}; microseconds.")
        times = {("-".join(row.case.split("-")[-2:]), row.provider): f"{row.time_us:.0f}" for row in chosen}
        lines = [["", *TRACE.values()], ["---", *["---:"] * len(TRACE)]]
        for provider in dict.fromkeys(row.provider for row in chosen):
            lines.append([provider, *(times.get((part, provider), "") for part in TRACE)])
        parts.append("\n".join("| " + " | ".join(cell) + " |" for cell in lines))
    return "\n\n".join(parts) or "Not measured yet."


def measured_sparsity(found: dict[str, list[SkipRow]], folder: Path = FOLDER) -> str:
    """Skip-softmax over factors: a line a data set and factor, and the plot."""
    head = ["data", "factor", "blocks left out", "us", "dense / ours", "largest error", "RMS error"]
    parts = []
    for gpu, rows in found.items():
        r = rows[0]
        parts.append(f"{gpu}, {r.date}, commit {r.commit[:9]}, driver {r.driver}, torch {r.torch}, `{r.case}`.")
        lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
        for r in rows:
            errors = [f"{r.max_error:.2g}", f"{r.rms_error:.2g}"]
            speed = [f"{r.time_us:.0f}", f"{r.dense_us / r.time_us:.2f}"]
            lines.append([r.data, f"{r.factor:g}", f"{r.left_out:.0%}", *speed, *errors])
        parts.append("\n".join("| " + " | ".join(cell) + " |" for cell in lines))
        path = folder / f"{gpu}-skip-softmax.png"
        parts += [image(gpu, path)] if path.is_file() else []
    return "\n\n".join(parts) or "Not measured yet."


def measured_parallel(results: dict[str, list[ResultRow]]) -> str:
    """Return the steps of `examples.parallel`: a line per number of GPUs."""
    parts = []
    for gpu, rows in results.items():
        found = [r for r in rows if r.case.startswith("parallel-")]
        if not found:
            continue
        r = max(found, key=lambda row: row.date)
        chosen = [row for row in found if row.run == r.run]
        parts.append(f"{gpu}, {r.date}, commit {r.commit[:9]}, driver {r.driver}, torch {r.torch}.")
        lines = [["GPUs", "heads per rank", "keys per rank"], ["---:"] * 3]
        for case in dict.fromkeys(r.case for r in chosen):
            times = {r.provider: f"{r.time_us:.0f} us" for r in chosen if r.case == case}
            lines.append([case.rpartition("-x")[2], times.get("heads", ""), times.get("keys", "")])
        parts.append("\n".join("| " + " | ".join(cell) + " |" for cell in lines))
    return "\n\n".join(parts) or "Not measured yet."


def outputs(rows: list[ResultRow]) -> str:
    """Return a sentence with the time of each top-k function on one case, or "" if none was measured."""
    found = newest(rows, "outputs-")
    times = [f"`{r.case.removeprefix('outputs-').partition('-topk-')[0]}` {r.time_us:.1f} us" for r in found]
    case = found[0].case.partition("-topk-")[2] if found else ""
    return f"All functions on `topk-{case}`: {', '.join(times)}." if found else ""


def measured_topk(results: dict[str, list[ResultRow]], folder: Path = FOLDER) -> str:
    """The same of top-k."""
    head = ["case", "ours, us", *(f"{p}, us (/ ours)" for p in TOPK_PEERS)]
    parts = []
    for gpu, rows in results.items():
        found = section(gpu, rows, "topk-", head, topk_cells, sorted(folder.glob(f"{gpu}-topk-*.png")))
        parts += [*found[:2], *filter(None, [outputs(rows)]), *found[2:]] if found else []
    return "\n\n".join(parts) or "Not measured yet."


def cache_cells(rows: list[ResultRow]) -> list[str]:
    """One line of the table of caches and merged states."""
    by = {r.provider: r for r in rows}
    mine, floor = by["ours"], by["floor"]
    return [
        f"`{mine.case}`", number(mine.time_us, 1), f"{mine.gbps or 0:.0f}", number(floor.ratio_to_ours or 0.0, 2),
        beside(by.get("flashinfer")), beside(by.get("vllm")),
    ]  # fmt: skip


def newest_of_each(rows: list[ResultRow], prefix: str) -> list[ResultRow]:
    """Return the newest row of each case and provider: no run has all peers. A peer's ratio is that of its own run."""
    return list({(r.case, r.provider): r for r in rows if r.case.startswith(prefix)}.values())


def measured_caches(results: dict[str, list[ResultRow]]) -> str:
    """The same of functions that write caches, quantise and merge states."""
    head = ["case", "ours, us", "GB/s", "of copy", "flashinfer, us (/ ours)", "vLLM, us (/ ours)"]
    parts = []
    for gpu, rows in results.items():
        parts += section(gpu, rows, CACHE_CASES, head, cache_cells, [], newest_of_each)
        hosts = [r for r in newest_of_each(rows, "host-") if r.case in CACHE_HOSTS]
        times = [f"`{r.case.removeprefix('host-')}` {r.time_us:.1f} us" for r in hosts]
        parts += [f"Host time per call, with the kernel loaded: {', '.join(times)}."] if times else []
    return "\n\n".join(parts) or "Not measured yet."


def decode_cells(rows: list[ResultRow]) -> list[str]:
    """One line of the decode table."""
    by = {r.provider: r for r in rows}
    mine, floor = by["ours"], by.get("floor")
    line = [f"`{mine.case}`", f"{mine.time_us:.1f}", f"{mine.gbps:.0f}" if mine.gbps else ""]
    line.append(number(floor.ratio_to_ours, 2) if floor and floor.ratio_to_ours else "")
    own = next((r for name, r in by.items() if name.startswith("own-")), None)
    line.append(beside(own))
    return [*line, beside(by.get("batch-invariant")), beside(by.get("flashinfer"))]


def measured_decode(results: dict[str, list[ResultRow]], folder: Path = FOLDER) -> str:
    """The same of decode attention."""
    head = [
        "case",
        "ours, us",
        "GB/s of K and V",
        "floor / ours",
        "next wider type, us (/ ours)",
        "`batch_invariant`, us (/ ours)",
        "flashinfer, us (/ ours)",
    ]
    parts = []
    for gpu, rows in results.items():
        parts += section(gpu, rows, "decode-", head, decode_cells, sorted(folder.glob(f"{gpu}-decode-*.png")))
    return "\n\n".join(parts) or "Not measured yet."


def measured_family(results: dict[str, list[ResultRow]], folder: Path = FOLDER) -> str:
    """The forms of the prefill family beside the context function: one line each, then host times."""
    parts = []
    for gpu, rows in results.items():
        chosen = [r for r in newest(rows, "family-") if r.provider != "floor"]
        if not chosen:
            continue
        r = chosen[0]
        parts.append(f"{gpu}, {r.date}, commit {r.commit[:9]}, driver {r.driver}, torch {r.torch}.")
        lines = [["case", "provider", "us", "/ ours"], ["---", "---", "---:", "---:"]]
        lines += [[f"`{r.case}`", r.provider, f"{r.time_us:.1f}", number(r.ratio_to_ours or 0.0, 3)] for r in chosen]
        parts.append("\n".join("| " + " | ".join(cell) + " |" for cell in lines))
        parts += [host for host in [host_line(rows, "host-family")] if host]
    return "\n\n".join(parts) or "Not measured yet."


def pictured(results: dict[str, list[ResultRow]], folder: Path = FOLDER) -> str:
    """Return the picture of the peers beside ours, and its caption."""
    parts = []
    for gpu, rows in results.items():
        found, path = peers.points(rows), folder / f"{gpu}-peers.png"
        if found and path.is_file():
            names, runs = peers.listed(dict.fromkeys(p.peer for p in found)), peers.ran(gpu, (p.commit for p in found))
            alt = f"Bars: the time of {names} over ours, case by case; right of 1 ours is faster"
            parts.append(picture(alt, path))
            parts.append(
                f"The time of each peer over ours in the same run, case by case; {runs}. Right of 1, ours is faster."
            )
    return "\n\n".join(parts) or "Not measured yet."


def engine_headlines(results: dict[str, list[EngineRow]]) -> str:
    """One sentence per GPU: the range of tokens per second of an engine's loads over those of its fastest other
    provider."""
    parts = []
    for gpu, rows in results.items():
        found: dict[str, list[float]] = {}
        for case in dict.fromkeys(r.case for r in rows):
            run = [r for r in rows if r.case == case and r.date == max(r.date for r in rows if r.case == case)]
            ours = next((r.tokens_per_s for r in run if r.provider == "ours"), None)
            others = [r.tokens_per_s for r in run if r.provider != "ours"]
            if ours and others:
                engine = {"vllm": "vLLM", "sglang": "SGLang"}[case.split("-")[1]]
                found.setdefault(engine, []).append(ours / max(others))
        if found:
            link = "[whole engines](docs/engines.md#whole-engines-measured)"
            text = f"Tokens per second of {link} with our backend, on {gpu}, over those with the engine's fastest own "
            text += "backend, or for an nvfp4 cache over those with our backend and fp8: "
            text += ", ".join(f"{engine} {spread(ratios)}" for engine, ratios in found.items())
            parts.append(textwrap.fill(f"{text}.", 160, break_on_hyphens=False, break_long_words=False))
    return "\n\n".join(parts) or "Not measured yet."


def spread(ratios: list[float]) -> str:
    """Return the range of the ratios of a number of loads, in words."""
    if len(ratios) == 1:
        return f"{ratios[0]:.2f} (one load)"
    return f"{min(ratios):.2f} to {max(ratios):.2f} ({len(ratios)} loads)"


def measured_engines(results: dict[str, list[EngineRow]]) -> str:
    """Whole engines: one line per load and backend, from the newest run of each load."""
    head = ["load", "attention", "tokens/s", "/ ours", "first pass, tokens/s", "first token, ms", "each token, ms",
            "cache, tokens", "difference"]  # fmt: skip
    parts = []
    for gpu, rows in results.items():
        newest_date = {r.case: r.date for r in rows}
        chosen = [r for r in rows if r.date == newest_date[r.case]]
        ours = {r.case: r.tokens_per_s for r in chosen if r.provider == "ours"}
        lines = [
            [
                f"`{r.case.removeprefix('engine-')}`", r.provider,
                f"{r.tokens_per_s:.{0 if r.tokens_per_s > 99 else 2}f}",
                f"{r.tokens_per_s / ours[r.case]:.3f}" if r.case in ours else "",
                "" if r.cold_tokens_per_s is None else f"{r.cold_tokens_per_s:.0f}",
                f"{r.ttft_p50_ms:.0f} ({r.ttft_p99_ms:.0f})", f"{r.tpot_p50_ms:.2f} ({r.tpot_p99_ms:.2f})",
                f"{r.cache_tokens:.0f}", "" if r.provider == r.reference else number(r.difference, 3),
            ]
            for r in chosen
        ]  # fmt: skip
        parts += pages.dated_table(gpu, chosen, head, lines)
    return "\n\n".join(parts) or "Not measured yet."


def measured_errors(results: dict[str, list[ErrorRow]]) -> str:
    """Engines against fp32: one line per model and backend, from the newest run of each."""
    head = ["model", "attention", "tokens", "mean", "90 %", "largest"]
    parts = []
    for gpu, rows in results.items():
        chosen = list({(r.case, r.provider): r for r in rows}.values())
        lines = [
            [f"`{r.case.removeprefix('engine-')}`", r.provider, f"{r.tokens:.0f}", f"{r.mean:.4f}", f"{r.p90:.3f}",
             f"{r.largest:.3f}"]
            for r in chosen
        ]  # fmt: skip
        parts += pages.dated_table(gpu, chosen, head, lines)
    return "\n\n".join(parts) or "Not measured yet."


def measured_servers(results: dict[str, list[ServerRow]]) -> str:
    """Servers: one line per load and backend, from the newest run of each."""
    head = ["load", "attention", "requests", "abandoned", "tokens/s", "first token, ms", "each token, ms",
            "host memory, MiB", "GPU memory, MiB"]  # fmt: skip
    parts = []
    for gpu, rows in results.items():
        chosen = list({(r.case, r.provider): r for r in rows}.values())
        lines = [
            [
                f"`{r.case.removeprefix('server-')}`", r.provider, f"{r.completed:.0f}", f"{r.abandoned:.0f}",
                f"{r.tokens_per_s:.0f}", f"{r.ttft_p50_ms:.0f} ({r.ttft_p99_ms:.0f})",
                f"{r.tpot_p50_ms:.2f} ({r.tpot_p99_ms:.2f})", f"{r.host_mib:.0f} ({r.host_growth_mib:+.0f})",
                f"{r.device_mib:.0f} ({r.device_growth_mib:+.0f})",
            ]
            for r in chosen
        ]  # fmt: skip
        parts += pages.dated_table(gpu, chosen, head, lines)
    return "\n\n".join(parts) or "Not measured yet."


def sections() -> dict[str, str]:
    """Marker -> what stands there."""
    found = read_all()
    return {
        "peers": pictured(found),
        "headlines": f"{peers.headlines(found)}\n\n{engine_headlines(read_engines())}",
        "measured": measured(found),
        "measured-serving": measured_serving(found),
        "measured-trace": measured_trace(found),
        "measured-family": measured_family(found),
        "measured-decode": measured_decode(found),
        "measured-precision": measured_precision(found),
        "measured-topk": measured_topk(found),
        "measured-caches": measured_caches(found),
        "measured-parallel": measured_parallel(found),
        "measured-sparsity": measured_sparsity(read_sparsity()),
        "measured-engines": measured_engines(read_engines()),
        "measured-engine-errors": measured_errors(read_errors()),
        "measured-servers": measured_servers(read_servers()),
        "measured-sanitizers": trust.measured_sanitizers(read_sanitizers()),
        "measured-soaks": trust.measured_soaks(read_soaks()),
        "measured-accuracy": trust.measured_accuracy(read_accuracy()),
        "measured-determinism": trust.measured_determinism(read_determinism()),
    }


def update() -> None:
    """Write all sections into the pages that hold them."""
    pages.fill(sections())
