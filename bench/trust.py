"""The generated sections about what was held on a GPU: reports of compute-sanitizer, scenarios of `tools.soak`, errors
against fp64 and equal bits."""

from .pages import dated_table, of_each_gpu
from .results import (
    ACCURACY,
    AND,
    DETERMINISM,
    SANITIZERS,
    SOAKS,
    AccuracyRow,
    DeterminismRow,
    SanitizerRow,
    SoakRow,
    read_all,
)

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


def sanitizers(gpu: str, rows: list[SanitizerRow]) -> list[str]:
    """Return a line per piece with what each tool reported, from the newest run of each, and the excused reports."""
    chosen = {(r.tool, r.piece): r for r in rows if r.status != "not begun"}
    reasons = list(dict.fromkeys(reason for r in chosen.values() if r.reason for reason in r.reason.split(AND)))

    def cell(row: SanitizerRow | None) -> str:
        if row is None:
            return ""
        if row.errors is None:
            return f"did not end in {row.seconds:.0f} s"
        notes = [str(reasons.index(reason) + 1) for reason in row.reason.split(AND)] if row.reason else []
        note = f" ({', '.join(notes)})" if notes else ""
        return f"{row.errors:,.0f}{note}" if row.status != "FOUND" else f"**{row.errors:,.0f}**"

    lines = []
    for piece in sorted({r.piece for r in chosen.values()}):
        calls = next(r.calls for r in chosen.values() if r.piece == piece)
        lines.append([f"`{piece}`", f"{calls:.0f}", *(cell(chosen.get((tool, piece))) for tool in TOOLS)])
    notes = "\n".join(f"{number}. {reason[0].upper()}{reason[1:]}." for number, reason in enumerate(reasons, 1))
    return [*dated_table(gpu, list(chosen.values()), ["piece", "calls", *TOOLS], lines), notes]


def soaks(gpu: str, rows: list[SoakRow]) -> list[str]:
    """Return a line per scenario: its newest run, and how many runs held for how many seconds in all."""
    chosen = list({r.scenario: r for r in rows if r.result != "skipped"}.values())
    lines = []
    for newest in chosen:
        own = [r for r in rows if r.scenario == newest.scenario and r.result != "skipped"]
        held = [r.seconds for r in own if r.result == "held"]
        count = f"{len(held)} of {len(own)}"
        lines.append([f"`{newest.scenario}`", f"{newest.result}: {newest.detail}", count, f"{sum(held):,.0f}"])
    return dated_table(gpu, chosen, ["scenario", "newest run", "runs that held", "seconds of these"], lines)


OTHERS = ("rounded", "ours", "flash-attn-4", "cudnn")
TYPES = {  # of Q, and of K and V, by the word in a case's name
    "bf16": ("bf16", "bf16"),
    "fp16": ("fp16", "fp16"),
    "kve4m3": ("bf16", "e4m3"),
    "kve5m2": ("bf16", "e5m2"),
    "kvnvfp4": ("bf16", "NVFP4"),
    "qe4m3": ("e4m3", "e4m3"),
    "qe4m3kvnvfp4": ("e4m3", "NVFP4"),
}


def percent(value: float) -> str:
    return f"{100 * value:.2g}"


def accuracy(gpu: str, rows: list[AccuracyRow]) -> list[str]:
    """Return a table per form of calls: a line per types, data and number of keys, from the newest run of each."""
    newest, parts = {(r.case, r.provider): r for r in rows}, []
    for form in ("prefill", "extend", "decode"):
        own = {key: r for key, r in newest.items() if key[0].startswith(f"accuracy-{form}-")}
        lines = []
        for case in dict.fromkeys(name for name, _ in own):
            _, _, types, data, keys = case.split("-")
            errors = [own.get((case, provider)) for provider in OTHERS]
            stored = next((r.format_error for r in errors if r and r.format_error is not None), None)
            cells = [f"{percent(r.rms_error)} ({percent(r.max_error)})" if r else "" for r in errors]
            names = [f"{'; '.join(TYPES[types])}", data, f"{int(keys[1:]):,}"]
            lines.append([*names, *cells, "" if stored is None else percent(stored)])
        if lines:
            made, table = dated_table(
                gpu, list(own.values()), ["Q; K and V", "data", "keys", *OTHERS, "storing"], lines
            )
            parts += [f"{form.capitalize()}. {made}", table]
    return parts


def determinism(gpu: str, rows: list[DeterminismRow]) -> list[str]:
    """Return a line per provider, form of calls and kind of comparison: how many found equal bits."""
    newest = {(r.case, r.provider, r.kind): r for r in rows}
    groups: dict[tuple[str, str, str], list[DeterminismRow]] = {}
    for r in newest.values():
        groups.setdefault((r.provider, r.case.split("-")[1], r.kind), []).append(r)
    lines = [
        [provider, f"{form}: {kind}", f"{sum(r.equal for r in own):,.0f} of {sum(r.count for r in own):,.0f}"]
        for (provider, form, kind), own in sorted(groups.items())
    ]
    return dated_table(gpu, list(newest.values()), ["provider", "comparison", "equal bits"], lines)


def sections() -> dict[str, str]:
    """Return marker -> what stands there."""
    return {
        "measured-sanitizers": of_each_gpu(read_all(SANITIZERS, SanitizerRow), sanitizers),
        "measured-soaks": of_each_gpu(read_all(SOAKS, SoakRow), soaks),
        "measured-accuracy": of_each_gpu(read_all(ACCURACY, AccuracyRow), accuracy),
        "measured-determinism": of_each_gpu(read_all(DETERMINISM, DeterminismRow), determinism),
    }
