"""Record times on a device and draw them: one row per request, and curves over the steps below."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

COLOURS = ("#CCCCCC", "#0072B2", "#D55E00", "#009E73")


def mark(device: torch.device) -> Any:
    """Record the current time; on a GPU, the time at which its stream gets here. Does not wait."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(begin: Any, end: Any) -> float:
    """Return the time between two marks. Waits for the second one."""
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


class Span(NamedTuple):
    row: int
    kind: str
    begin: float  # seconds, as all times here
    end: float


def draw(spans: list[Span], ends: list[float], curves: dict[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Draw rows of spans, later spans over earlier ones, and below them curves[axis][name], with a value per step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    top, *rest = axes = figure.subplots(1 + len(curves), 1, sharex=True, height_ratios=(4, *(1 for _ in curves)))
    thick = 300 / (1 + max(span.row for span in spans))  # points
    kinds = list(dict.fromkeys(span.kind for span in spans))
    for kind, colour in zip(kinds, COLOURS):
        found = [span for span in spans if span.kind == kind]
        rows, begins, until = zip(*((span.row, span.begin, span.end) for span in found))
        top.hlines(rows, begins, until, color=colour, label=kind, linewidth=thick, capstyle="butt", antialiased=False)
    for axis, (title, lines) in zip(rest, curves.items()):
        for name, values in lines.items():
            colour = COLOURS[kinds.index(name) if name in kinds else -1]
            axis.stairs(values, [0.0, *ends], fill=True, color=colour)
        axis.set_ylabel(title)
    top.set_ylabel("request")
    top.legend(loc="lower right")
    axes[-1].set_xlabel("s")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
