"""Draw PNG plots from the rows of bench/results: ours beside the peers; roofline, share of the matmul rate and TFLOP/s
over sequence length; share of the copy rate in decode; mixed batches; speed of skip-softmax over sparsity; top-k times
over row length."""

import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import peers as beside
from .results import FOLDER, ResultRow, SkipRow, newest

Style = dict[str, tuple[str, str]]  # label of a line -> colour, marker
# Okabe-Ito colours, distinct with any colour vision; the marker shape repeats the distinction.
STYLE = {
    "ours": ("#D55E00", "o"),
    "cudnn": ("#0072B2", "s"),
    "flash-attn-4": ("#009E73", "^"),
    "flashinfer": ("#CC79A7", "D"),
}
TOPK_STYLE = {
    "ours": STYLE["ours"],
    "torch": ("#0072B2", "s"),
    "flashinfer": STYLE["flashinfer"],
    "floor": ("black", ""),
}
SERVE_STYLE = {
    "ours": STYLE["ours"],
    "own-parts": ("#E69F00", "v"),
    "flash-attn-4": STYLE["flash-attn-4"],
    "flashinfer": STYLE["flashinfer"],
    "floor": ("black", ""),
}
PEER_STYLE = {
    "cudnn": "#0072B2",
    "flash-attn-4": "#009E73",
    "flash-attn-3": "#44AA99",
    "flashinfer fa3": "#CC79A7",
    "flashinfer": "#E69F00",
    "XQA": "#56B4E9",
    "torch.topk": "#888888",
    "vLLM": "#D55E00",
    "FlashMLA": "#882255",
    "DeepGEMM": "#999933",
}
COLUMNS = (  # prefixes of the families that share a column of the picture of all peers
    ("serve-", "prefill-bf16-", "family-", "prefill-", "decode-"),
    tuple(prefix for prefix in beside.FAMILIES if prefix.startswith(("mla-", "dsa-", "indexer-"))),
    ("topk-",),
)
PEER_TICKS, FAR_TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 1.7, 2, 2.5), (0.5, 0.7, 1, 2, 3, 5, 10, 20)
TOPK_SWEEP = re.compile(r"sweep-topk-fp32-(\d+)x(\d+)-k")
ROOFLINE_TICKS = (100, 200, 400, 600, 800, 1000)
SWEEP = re.compile(r"sweep-bf16-(causal|full)-b\d+-s(\d+)-")
SERVE_SWEEP = re.compile(r"sweep-serve-bf16-(mixed-n|chunks-q)(\d+)-")


def figure(columns: int = 1, height: float = 4.2) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    fig, axes = pyplot.subplots(1, columns, figsize=(5.2 * columns + 2, height), layout="constrained", squeeze=False)
    for axis in axes[0]:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return fig, axes[0]


def save(fig: Any, name: str, dpi: int = 130, colours: int = 64, **metadata: str) -> Path:
    """Save a figure in bench/results, and close it. metadata: texts stored in the file."""
    from matplotlib import pyplot
    from PIL import Image, PngImagePlugin

    path, drawn, info = FOLDER / name, io.BytesIO(), PngImagePlugin.PngInfo()
    fig.savefig(drawn, dpi=dpi)
    pyplot.close(fig)
    for key, text in metadata.items():
        info.add_text(key, text)
    Image.open(drawn).convert("RGB").quantize(colours).save(path, optimize=True, pnginfo=info)
    return path


def curves(axis: Any, style: Style, points: list[tuple[str, Any, Any]], size: int = 5) -> None:
    """Draw a line per label of a style. points: (label, x, y)."""
    for label, (colour, marker) in style.items():
        if line := sorted((x, y) for name, x, y in points if name == label):
            axis.plot(*zip(*line), color=colour, marker=marker, ms=size, label=label)


def words(axis: Any, title: str, x: str, y: str = "", legend: str = "") -> None:
    """Set the texts of an axis. legend: its place, if there is one."""
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(x)
    if y:
        axis.set_ylabel(y)
    if legend:
        axis.legend(fontsize=8, frameon=False, loc=legend)


def log_ticks(axis: Any, found: Iterable[int]) -> None:
    """Set a logarithmic x axis of tokens with a tick at each number found."""
    ticks = sorted(set(found))
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks])


def matmul_rate(rows: Iterable[ResultRow]) -> float | None:
    """Return the TFLOP/s of the floor: the matmul of the same run."""
    rates = [r.tflops for r in rows if r.provider == "floor" and r.tflops]
    return rates[-1] if rates else None


def copy_rate(rows: Iterable[ResultRow]) -> float | None:
    """Return the GB/s of the newest copy measured."""
    rates = sorted((r.date, r.gbps) for r in rows if r.case == "ceiling-copy" and r.gbps)
    return rates[-1][1] if rates else None


def short(case: str) -> str:
    """Return 'causal b2 s8192 h32x8 d128 p64' for 'prefill-bf16-causal-b2-s8192-h32x8-d128-p64'."""
    return " ".join(case.split("-")[2:])


Bar = tuple[str, str, float, str]  # group, series, percent, text beside the bar


def bars(found: list[Bar], colours: dict[str, str], words: tuple[str, str], file: str) -> Path:
    """Draw horizontal bars: one group per measured case, one bar per series. words = (title, axis label that names the
    100 %)."""
    groups = list(dict.fromkeys(group for group, *_ in found))
    series = [name for name in colours if any(name == bar[1] for bar in found)]
    fig, (axis,) = figure(height=1.2 + 0.62 * len(groups))
    width = 0.8 / len(series)
    for i, name in enumerate(series):
        for group, _, value, text in (bar for bar in found if bar[1] == name):
            y = groups.index(group) + (i - (len(series) - 1) / 2) * width
            axis.barh(y, value, width * 0.92, color=colours[name])
            axis.text(value + 0.5, y, text, va="center", fontsize=7)
        axis.barh(0, 0, color=colours[name], label=name)
    axis.set_yticks(range(len(groups)), groups, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 5 + max(100, *(value for _, _, value, _ in found)))
    axis.set_xlabel(words[1], fontsize=9)
    axis.set_title(words[0], fontsize=9)
    fig.legend(loc="outside lower center", ncols=len(series), fontsize=8, frameon=False)
    return save(fig, file)


def record(found: list[beside.Point]) -> str:
    """Return the points that a plot of the peers was drawn from; the file stores them."""
    return "; ".join(f"{p.case} {p.form or '-'} {p.peer} {p.ratio:.3f} {p.commit}" for p in found)


def panel(axis: Any, found: list[beside.Point]) -> None:
    """Draw one line per case, grouped by family. Bars begin at 1, where a peer takes as long as ours."""
    lines: list[tuple[str, str]] = []  # (prefix, label), top first; each family begins with a heading line
    for point in found:
        lines += [line for line in ((point.prefix, ""), (point.prefix, point.label)) if line not in lines]
    for place, line in enumerate(lines):
        ratios = [(p.peer, p.ratio) for p in found if (p.prefix, p.label) == line]
        for i, (peer, ratio) in enumerate(ratios):
            width = 0.84 / len(ratios)
            y = place + (i - (len(ratios) - 1) / 2) * width
            axis.barh(y, ratio - 1, width, left=1, color=PEER_STYLE[peer])
            end = (max(1.0, ratio), y)
            axis.annotate(f"{ratio:.2f}", end, (3, 0), textcoords="offset points", va="center", fontsize=6)
    axis.set_yticks(range(len(lines)), [label or beside.FAMILIES[prefix] for prefix, label in lines], fontsize=7)
    for tick, (_, label) in zip(axis.get_yticklabels(), lines):
        tick.set_fontweight("normal" if label else "bold")
    axis.axvline(1, color=STYLE["ours"][0], lw=1.5)
    low, high = min(1.0, *(p.ratio for p in found)), max(1.0, *(p.ratio for p in found))
    axis.set_xscale("log")
    ticks = [t for t in (PEER_TICKS if high / low < 3 else FAR_TICKS) if low / 1.1 <= t <= high]
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks], fontsize=8)
    axis.minorticks_off()
    axis.set_xlim(low / 1.02, high * (high / low) ** 0.12)
    axis.set_ylim(len(lines) - 0.4, -0.6)
    axis.set_axisbelow(True)
    axis.set_xlabel("time of the peer / ours, in one run", fontsize=8)


def peers(rows: list[ResultRow], gpu: str) -> Path | None:
    """Plot each peer's time over ours: attention with K and V, latent and sparse attention, and top-k, side by side."""
    found = beside.points(rows)
    columns = [own for column in COLUMNS if (own := [p for p in found if p.prefix in column])]
    if not columns:
        return None
    most = max(len({(p.prefix, p.label) for p in own} | {(p.prefix, "") for p in own}) for own in columns)
    fig, axes = figure(len(columns), height=1.2 + 0.22 * most)
    for axis, own in zip(axes, columns):
        panel(axis, own)
    fig.suptitle(gpu, fontsize=9)
    names = dict.fromkeys(p.peer for p in found)
    handles = [axes[0].barh(0, 0, color=PEER_STYLE[name], label=name) for name in names]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    return save(fig, f"{gpu}-peers.png", Description=record(found))


def headlines(rows: list[ResultRow], gpu: str) -> Path | None:
    """Plot the time of the fastest peer over ours for the calls of README's table, large enough for a telephone."""
    found = beside.headlines(beside.points(rows))
    if not found:
        return None
    fig, (axis,) = figure(height=0.9 + 0.52 * len(found))
    fig.set_figwidth(5)
    for place, (words, point) in enumerate(found):
        axis.barh(place, point.ratio - 1, 0.4, left=1, color=PEER_STYLE[point.peer])
        for text, end in (
            (f"{point.ratio:.2f} {point.peer}", (max(1.0, point.ratio), place)),
            (words, (1, place - 0.42)),
        ):
            axis.annotate(text, end, (4, 0), textcoords="offset points", va="center", fontsize=10)
    axis.axvline(1, color=STYLE["ours"][0], lw=1.5)
    axis.grid(axis="y", visible=False)
    ratios = [point.ratio for _, point in found]
    axis.set_xlim(min(1.0, *ratios) - 0.05, 0.45 + max(ratios))
    axis.set_ylim(len(found) - 0.5, -0.8)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.set_xlabel(f"time of the fastest peer / ours, {gpu}", fontsize=10)
    return save(fig, f"{gpu}-headlines.png", 120, 28, Description=record([point for _, point in found]))


def share(rows: list[ResultRow], gpu: str) -> Path | None:
    """Plot the share of the same run's matmul rate as bars: one group per headline case."""
    rows = newest(rows, "prefill-bf16-")
    floor = {r.case: r.tflops for r in rows if r.provider == "floor" and r.tflops}
    chosen = (r for r in rows if r.provider in STYLE and r.case in floor)
    found = [(short(r.case), r.provider, 100 * r.tflops / floor[r.case], f"{r.tflops:.0f}") for r in chosen if r.tflops]
    title = f"Prefill attention, {gpu}: ours paged, cudnn and flash-attn-4 contiguous"
    words = title, "% of the bf16 matmul rate of the same run; at the bars: TFLOP/s"
    colours = {provider: colour for provider, (colour, _) in STYLE.items()}
    return bars(found, colours, words, f"{gpu}-prefill-share.png") if found else None


def decode_share(rows: list[ResultRow], gpu: str) -> Path | None:
    """Plot the share of the copy rate at which decode reads K and V: one bar per cache type."""
    rows = newest(rows, "decode-")
    ratio = {r.case: r.ratio_to_ours for r in rows if r.provider == "floor" and r.ratio_to_ours}
    found = []
    for r in (r for r in rows if r.provider == "ours" and r.case in ratio):
        _, cache, shape = r.case.split("-", 2)
        types = "fp8 Q, K and V" if cache == "qfp8" else f"{cache} K and V"
        found.append((shape.replace("-", " "), types, 100 * ratio[r.case], f"{r.time_us:.0f} us"))
    colours = dict(zip(dict.fromkeys(bar[1] for bar in found), (colour for colour, _ in STYLE.values())))
    words = f"Decode attention, bf16 Q but where said, {gpu}", "% of the copy rate of the same run, of K and V"
    return bars(found, colours, words, f"{gpu}-decode-share.png") if found else None


def roofline(rows: list[ResultRow], gpu: str) -> Path | None:
    """Plot TFLOP/s over operations per byte that must move, below the two measured ceilings."""
    chosen = newest(rows, "prefill-bf16-") + newest(rows, "sweep-bf16-")
    mm, copy = matmul_rate(chosen), copy_rate(rows)
    points = [r for r in chosen if r.provider in STYLE and r.tflops and r.gbps]
    if not points or mm is None or copy is None:
        return None
    fig, (axis,) = figure()
    intensities = [1e3 * p.tflops / p.gbps for p in points if p.tflops and p.gbps]
    low, high = 50.0, max(intensities) * 2
    knee = 1e3 * mm / copy
    axis.plot([low, knee, high], [low * copy / 1e3, mm, mm], color="black", lw=1.2)
    axis.text(high, mm * 1.03, f"bf16 matmul {mm:.0f} TFLOP/s", ha="right", fontsize=8)
    axis.text(knee * 0.62, knee * 0.55 * copy / 1e3, f"copy {copy:.0f} GB/s", fontsize=8)
    for provider, (colour, marker) in STYLE.items():
        xy = [(1e3 * p.tflops / p.gbps, p.tflops) for p in points if p.provider == provider and p.tflops and p.gbps]
        if xy:
            axis.scatter(*zip(*xy), s=22, color=colour, marker=marker, label=provider, alpha=0.85)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_yticks(ROOFLINE_TICKS, [str(t) for t in ROOFLINE_TICKS])
    axis.set_ylim(ROOFLINE_TICKS[0], ROOFLINE_TICKS[-1])
    axis.minorticks_off()
    title = f"Roofline of prefill attention, {gpu}, bf16"
    words(axis, title, "FLOP per byte of Q, K, V and O", "TFLOP/s", "lower right")
    return save(fig, f"{gpu}-prefill-roofline.png")


def lengths(rows: list[ResultRow], gpu: str) -> Path | None:
    """Plot TFLOP/s over sequence length: one panel causal, one full."""
    found = [(m[1], int(m[2]), r) for r in newest(rows, "sweep-bf16-") if (m := SWEEP.match(r.case)) and r.tflops]
    if not found:
        return None
    fig, axes = figure(2)
    for axis, mask in zip(axes, ("causal", "full")):
        curves(axis, STYLE, [(r.provider, s, r.tflops) for kind, s, r in found if kind == mask])
        mm = matmul_rate(r for kind, _, r in found if kind == mask)
        if mm:
            axis.axhline(mm, color="black", lw=1, ls="--", label="bf16 matmul")
        log_ticks(axis, {s for kind, s, _ in found if kind == mask})
        axis.set_ylim(0, 1.08 * max([mm or 0, *(r.tflops or 0 for _, _, r in found)]))
        words(axis, f"{mask}, bf16, 32x8 heads, D128, {gpu}", "sequence length (32768 tokens in all)")
    axes[0].set_ylabel("TFLOP/s" + " (causal counts half the work)")
    axes[1].legend(fontsize=8, frameon=False, loc="lower right")
    return save(fig, f"{gpu}-prefill-lengths.png")


def serving(rows: list[ResultRow], gpu: str) -> Path | None:
    """Plot mixed batches (time over the number of decode tokens) and prompt chunks (TFLOP/s over their size)."""
    found = [(m[1], int(m[2]), r) for r in newest(rows, "sweep-serve-") if (m := SERVE_SWEEP.match(r.case))]
    if not found:
        return None
    fig, (mixed, chunks) = figure(2)
    for axis, kind, value in ((mixed, "mixed-n", "time_us"), (chunks, "chunks-q", "tflops")):
        curves(axis, SERVE_STYLE, [(r.provider, n, getattr(r, value)) for k, n, r in found if k == kind])
        axis.set_ylim(0, None)
    log_ticks(chunks, (n for kind, n, _ in found if kind == "chunks-q"))
    title = "four chunks of 1024 over 2k to 14k, and decode tokens"
    words(mixed, title, "decode tokens over 1k to 7k keys each", f"us, {gpu}", "lower right")
    title = "four chunks over 4k, 8k, 16k and 32k, bf16, 32x8 heads, D128, pages of 16"
    words(chunks, title, "query tokens of a chunk", "TFLOP/s")
    return save(fig, f"{gpu}-serve-sweep.png")


def rows_and_lengths(rows: list[ResultRow], gpu: str) -> Path | None:
    """Plot top-k time over row length, one panel per number of rows, and the time to read the scores once."""
    found = [(int(m[1]), int(m[2]), r) for r in newest(rows, "sweep-topk-") if (m := TOPK_SWEEP.match(r.case))]
    counts = sorted({count for count, _, _ in found})
    if not found:
        return None
    fig, axes = figure(len(counts))
    for axis, count in zip(axes, counts):
        curves(axis, TOPK_STYLE, [(r.provider, n, r.time_us) for c, n, r in found if c == count], 4)
        ticks = sorted({n for c, n, _ in found if c == count})[::2]
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_ylim(1, None)
        axis.set_xticks(ticks, [f"{n // 1024}k" for n in ticks])
        words(axis, f"{count} row{'s' if count > 1 else ''}, fp32, k 2048 or length / 4", "row length")
    axes[0].set_ylabel(f"us, {gpu}")
    axes[-1].legend(fontsize=8, frameon=False, loc="upper left")
    return save(fig, f"{gpu}-topk-lengths.png")


Plot = Callable[[list[Any], str], Path | None]
PLOTS: tuple[Plot, ...] = (
    headlines, peers, share, decode_share, serving, lengths, roofline, rows_and_lengths,
)  # fmt: skip


def draw_all(results: dict[str, list[Any]], plots: tuple[Plot, ...] = PLOTS) -> list[Path]:
    """Draw every plot for which there are rows."""
    return [path for gpu, rows in results.items() for plot in plots if (path := plot(rows, gpu))]


def sparsity(rows: list[SkipRow], gpu: str) -> Path | None:
    """Plot the speedup over dense attention against the share of blocks left out: one line per data set."""
    if not rows:
        return None
    fig, (axis,) = figure()
    style = dict(zip(dict.fromkeys(r.data for r in rows), STYLE.values()))
    curves(axis, style, [(r.data, 100 * r.left_out, r.dense_us / r.time_us) for r in rows])
    axis.axhline(1, color="black", lw=1, ls="--", label="without skip-softmax")
    axis.set_ylim(0, None)
    title = f"Skip-softmax, {short(rows[0].case)}, bf16, {gpu}"
    words(axis, title, "% of blocks left out, by the rule", "dense time / time", "upper left")
    return save(fig, f"{gpu}-skip-softmax.png")
