"""Counts of calls by family, as a table and as a file that another process reads."""

import json
import re
from collections import Counter
from pathlib import Path

from bench import results

from .check import FAILED, ON_DEMAND, REFUSED, RIGHT, SKIPPED
from .families import FAMILIES

WORDS = (RIGHT, REFUSED, SKIPPED, ON_DEMAND, FAILED)
ROOT = Path(__file__).resolve().parents[2]


def commit() -> str:
    """Return the measured commit, as in bench/results, or "unknown"."""
    try:
        return results.commit()
    except (OSError, RuntimeError):
        return "unknown"


def general(reason: str) -> str:
    """Return a reason without its numbers, so that like reasons are counted together."""
    return re.sub(r"0x[0-9a-f]+|-?\d+(\.\d+)?", "N", reason)[:110]


class Tally:
    """Counts of verdicts. words: (family, word) -> calls. reasons: (word, reason) -> calls. files: of failing calls."""

    def __init__(self) -> None:
        self.words: Counter[tuple[str, str]] = Counter()
        self.reasons: Counter[tuple[str, str]] = Counter()
        self.files: list[str] = []

    def add(self, family: str, word: str, reason: str) -> None:
        self.words[family, word] += 1
        if word != RIGHT:
            self.reasons[word, general(reason)] += 1

    def count(self, word: str = "") -> int:
        """Return the number of calls, or of those with one verdict."""
        return sum(n for (_, found), n in self.words.items() if not word or found == word)

    def merge(self, other: "Tally") -> None:
        self.words.update(other.words)
        self.reasons.update(other.reasons)
        self.files += other.files

    def write(self, path: Path) -> None:
        data = {"words": [[*key, n] for key, n in self.words.items()], "files": self.files}
        text = json.dumps(data | {"reasons": [[*key, n] for key, n in self.reasons.items()]})
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").replace(path)

    def line(self) -> str:
        parts = [f"{self.count()} calls", *(f"{self.count(word)} {word}" for word in WORDS[1:] if self.count(word))]
        return ", ".join(parts)

    def table(self) -> str:
        lines = [f"| family | calls | {' | '.join(WORDS)} |", "| --- |" + " ---: |" * (len(WORDS) + 1)]
        for family in (*FAMILIES, "all"):
            numbers = [
                sum(n for (f, w), n in self.words.items() if w == word and family in (f, "all")) for word in WORDS
            ]
            if sum(numbers):
                lines.append(f"| {family} | {sum(numbers)} | {' | '.join(map(str, numbers))} |")
        return "\n".join(lines)

    def why(self, most: int = 12) -> str:
        """Return the most frequent reasons of verdicts other than "right"."""
        return "\n".join(f"{n:6} {word}: {reason}" for (word, reason), n in self.reasons.most_common(most))


def read(path: Path) -> Tally:
    """Return the tally of a file; an empty one if there is no such file."""
    found = Tally()
    if path.exists():
        data = json.loads(path.read_text())
        found.words.update({(f, w): n for f, w, n in data["words"]})
        found.reasons.update({(w, r): n for w, r, n in data["reasons"]})
        found.files = data["files"]
    return found
