"""The generated sections about what was held on a GPU: reports of compute-sanitizer, scenarios of `tools.soak`, errors
against fp64 and equal bits."""

from . import pages
from .results import AND, AccuracyRow, DeterminismRow, SanitizerRow, SoakRow

NOTHING = "Not run yet."
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


def measured_sanitizers(results: dict[str, list[SanitizerRow]]) -> str:
    """Return a line per piece with what each tool reported, from the newest run of each, and the excused reports."""
    parts = []
    for gpu, rows in results.items():
        chosen = {(r.tool, r.piece): r for r in rows if r.status != "not begun"}
        reasons = list(dict.fromkeys(reason for r in chosen.values() if r.reason for reason in r.reason.split(AND)))

        def cell(row: SanitizerRow | None, reasons: list[str] = reasons) -> str:
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
        parts += pages.dated_table(gpu, list(chosen.values()), ["piece", "calls", *TOOLS], lines)
        notes = [f"{number}. {reason[0].upper()}{reason[1:]}." for number, reason in enumerate(reasons, 1)]
        parts += ["\n".join(notes)] if notes else []
    return "\n\n".join(parts) or NOTHING


def measured_soaks(results: dict[str, list[SoakRow]]) -> str:
    """Return a line per scenario, from the newest run of each."""
    parts = []
    for gpu, rows in results.items():
        chosen = list({r.scenario: r for r in rows}.values())
        lines = [[f"`{r.scenario}`", f"{r.result}: {r.detail}", f"{r.seconds:.0f}"] for r in chosen]
        parts += pages.dated_table(gpu, chosen, ["scenario", "result", "seconds"], lines)
    return "\n\n".join(parts) or NOTHING


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


def measured_accuracy(results: dict[str, list[AccuracyRow]]) -> str:
    """Return a table per form of calls: a line per types, data and number of keys, from the newest run of each."""
    parts = []
    for gpu, rows in results.items():
        newest = {(r.case, r.provider): r for r in rows}
        head = ["Q; K and V", "data", "keys", *OTHERS, "storing"]
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
                made, table = pages.dated_table(gpu, list(own.values()), head, lines)
                parts += [f"{form.capitalize()}. {made}", table]
    return "\n\n".join(parts) or NOTHING


def measured_determinism(results: dict[str, list[DeterminismRow]]) -> str:
    """Return a line per provider, form of calls and kind of comparison: how many found equal bits."""
    parts = []
    for gpu, rows in results.items():
        newest = {(r.case, r.provider, r.kind): r for r in rows}
        groups: dict[tuple[str, str, str], list[DeterminismRow]] = {}
        for r in newest.values():
            groups.setdefault((r.provider, r.case.split("-")[1], r.kind), []).append(r)
        lines = [
            [provider, f"{form}: {kind}", f"{sum(r.equal for r in own):,.0f} of {sum(r.count for r in own):,.0f}"]
            for (provider, form, kind), own in sorted(groups.items())
        ]
        parts += pages.dated_table(gpu, list(newest.values()), ["provider", "comparison", "equal bits"], lines)
    return "\n\n".join(parts) or NOTHING
