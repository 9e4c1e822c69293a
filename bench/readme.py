"""README's measured table: the newest run in bench/results, between two markers."""

from pathlib import Path

from .results import FOLDER, ROOT, Row, newest, read_all

README = ROOT / "README.md"
PEERS = ("cudnn", "flash-attn-4", "flashinfer")


def between(text: str, name: str, body: str) -> str:
    """`text` with what stands between <!-- name:begin --> and <!-- name:end --> replaced by `body`."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"README needs one {begin} and one {end}")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{body}\n{end}{rest.split(end)[1]}"


def cells(rows: list[Row]) -> list[str]:
    """One line of the table: a case with its providers."""
    by = {r.provider: r for r in rows}
    mine, floor = by["ours"], by.get("floor")
    line = [f"`{mine.case}`", f"{mine.time_us:.0f}", f"{mine.tflops:.0f}" if mine.tflops else ""]
    line.append(f"{mine.tflops / floor.tflops:.0%}" if mine.tflops and floor and floor.tflops else "")
    line += [f"{by[p].ratio_to_ours:.2f}" if p in by and by[p].ratio_to_ours else "" for p in PEERS]
    return line


def host_line(rows: list[Row]) -> str:
    """Host time of a call, where it was measured."""
    times = [f"{r.provider} {r.time_us:.1f} us" for r in newest(rows, "host-prefill")]
    return f"Host time of a call whose kernel is loaded: {', '.join(times)}." if times else ""


def measured(results: dict[str, list[Row]], folder: Path = FOLDER) -> str:
    """Markdown of all GPUs' newest runs; says so where there is none."""
    parts = []
    for gpu, rows in results.items():
        chosen = newest(rows, "prefill-")
        if not chosen:
            continue
        runs = sorted({(r.date, r.commit[:9], r.driver, r.torch) for r in chosen})
        parts.append("\n".join(f"{gpu}, {date}, commit {c}, driver {d}, torch {t}." for date, c, d, t in runs))
        head = ["case", "us", "TFLOP/s", "of matmul", *(f"{p} / ours" for p in PEERS)]
        lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
        lines += [cells([r for r in chosen if r.case == case]) for case in dict.fromkeys(r.case for r in chosen)]
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
        parts += [host_line(rows)] if host_line(rows) else []
        images = sorted(folder.glob(f"{gpu}-*.png"))
        parts += [f"![{p.stem}]({p.relative_to(ROOT).as_posix()})" for p in images if p.is_relative_to(ROOT)]
    return "\n\n".join(parts) or "Not measured yet."


def update(path: Path = README) -> None:
    """Write the table into README."""
    path.write_text(between(path.read_text(), "measured", measured(read_all())))
