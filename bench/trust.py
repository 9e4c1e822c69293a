"""The generated sections about what was held on a GPU: reports of compute-sanitizer, and scenarios of `tools.soak`."""

from . import pages
from .results import SanitizerRow, SoakRow

NOTHING = "Not run yet."
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


def measured_sanitizers(results: dict[str, list[SanitizerRow]]) -> str:
    """Return a line per piece with what each tool reported, from the newest run of each, and the excused reports."""
    parts = []
    for gpu, rows in results.items():
        chosen = {(r.tool, r.piece): r for r in rows if r.status != "not begun"}
        reasons = list(dict.fromkeys(r.reason for r in chosen.values() if r.reason))

        def cell(row: SanitizerRow | None, reasons: list[str] = reasons) -> str:
            if row is None:
                return ""
            if row.errors is None:
                return f"did not end in {row.seconds:.0f} s"
            note = f" ({reasons.index(row.reason) + 1})" if row.reason else ""
            return f"{row.errors:,.0f}{note}" if row.status != "FOUND" else f"**{row.errors:,.0f}**"

        lines = []
        for piece in dict.fromkeys(r.piece for r in chosen.values()):
            calls = next(r.calls for r in chosen.values() if r.piece == piece)
            lines.append([f"`{piece}`", f"{calls:.0f}", *(cell(chosen.get((tool, piece))) for tool in TOOLS)])
        parts += pages.dated_table(gpu, list(chosen.values()), ["piece", "calls", *TOOLS], lines)
        parts += [f"{number}. {reason}." for number, reason in enumerate(reasons, 1)]
    return "\n\n".join(parts) or NOTHING


def measured_soaks(results: dict[str, list[SoakRow]]) -> str:
    """Return a line per scenario, from the newest run of each."""
    parts = []
    for gpu, rows in results.items():
        chosen = list({r.scenario: r for r in rows}.values())
        lines = [[f"`{r.scenario}`", f"{r.result}: {r.detail}", f"{r.seconds:.0f}"] for r in chosen]
        parts += pages.dated_table(gpu, chosen, ["scenario", "result", "seconds"], lines)
    return "\n\n".join(parts) or NOTHING
