"""The generated sections of README and docs/: find the page that holds one, and write it."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from .results import ROOT, Run

README, DOCS = ROOT / "README.md", ROOT / "docs"


def pages() -> list[Path]:
    return [README, *sorted(DOCS.glob("*.md"))]


def between(text: str, name: str, body: str) -> str:
    """Replace the text between <!-- name:begin --> and <!-- name:end --> by `body`."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"one {begin} and one {end} are needed")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{body}\n{end}{rest.split(end)[1]}"


def holder(name: str) -> Path:
    """Return the page that has the markers of a section."""
    found = [path for path in pages() if f"<!-- {name}:begin -->" in path.read_text()]
    if len(found) != 1:
        raise ValueError(f"{name}: {len(found)} pages have this section, must be 1")
    return found[0]


def placed(body: str, page: Path) -> str:
    """Return a generated section with links from `page`; the given ones begin at the root."""
    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", lambda m: f"]({os.path.relpath(ROOT / m[1], page.parent)})", body)


def fill(sections: dict[str, str]) -> None:
    """Put generated sections, name -> body, into the pages that hold their markers."""
    for name, body in sections.items():
        page = holder(name)
        page.write_text(between(page.read_text(), name, placed(body, page)))


def stale(sections: dict[str, str]) -> list[str]:
    """Return the names of the sections that differ from their page."""

    def differs(page: Path, name: str, body: str) -> bool:
        return between(page.read_text(), name, placed(body, page)) != page.read_text()

    return [name for name, body in sections.items() if differs(holder(name), name, body)]


def dated_table(gpu: str, rows: Sequence[Run], head: list[str], lines: list[list[str]]) -> list[str]:
    """Return a line per run that made the rows, and their table, of which the first two columns are text."""
    runs = sorted({(r.date, r.commit[:9], r.driver, r.torch) for r in rows})
    made = "\n".join(f"{gpu}, {date}, commit {c}, driver {d}, torch {t}." for date, c, d, t in runs)
    cells = [head, ["---", "---"] + ["---:"] * (len(head) - 2), *lines]
    return [made, "\n".join("| " + " | ".join(cell) + " |" for cell in cells)]
