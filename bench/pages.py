"""The generated sections of README and docs/: find the page that holds one, and write it."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from .results import ROOT, Run

AnyRows = TypeVar("AnyRows", bound=Sequence[Run])
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


def fill(sections: dict[str, str], check: bool = False) -> list[str]:
    """Put generated sections, name -> body, into the pages that hold their markers. Return the names of those that
    differed. check: write nothing."""
    stale = []
    for name, body in sections.items():
        page = holder(name)
        old = page.read_text()
        new = between(old, name, placed(body, page))
        if new != old:
            stale.append(name)
            if not check:
                page.write_text(new)
    return stale


CHECK = "write nothing; end with status 1 if a section is not current"


def command(sections: dict[str, str], check: bool) -> None:
    """Run the command of a generator: `fill`, or with `check` name the sections that are not current."""
    if (stale := fill(sections, check)) and check:
        raise SystemExit(f"not current: {', '.join(stale)}")


def table(head: Sequence[str], lines: Iterable[Sequence[object]], words: int = 1) -> str:
    """Return a table of Markdown. words: the number of first columns that are text; the others are numbers."""
    rows = [head, ["---"] * words + ["---:"] * (len(head) - words), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def made(gpu: str, rows: Iterable[Run], more: str = "") -> str:
    """Return a line per run that made the rows."""
    runs = sorted({(r.date, r.commit[:9], r.driver, r.torch) for r in rows})
    return "\n".join(f"{gpu}, {date}, commit {c}, driver {d}, torch {t}{more}." for date, c, d, t in runs)


def dated_table(gpu: str, rows: Sequence[Run], head: Sequence[str], lines: Iterable[Sequence[object]]) -> list[str]:
    """Return a line per run that made the rows, and their table, of which the first two columns are text."""
    return [made(gpu, rows), table(head, lines, 2)]


def of_each_gpu(results: dict[str, AnyRows], make: Callable[[str, AnyRows], Iterable[str]]) -> str:
    """Return the paragraphs that `make` has for the rows of each GPU; say so where there are none."""
    parts = [part for gpu, rows in results.items() for part in make(gpu, rows) if part]
    return "\n\n".join(parts) or "Not measured yet."
