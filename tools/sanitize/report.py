"""Parse compute-sanitizer's output into findings: one per distinct (kind, kernel, addresses), with a count."""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

PREFIX = "========= "
SUMMARY = re.compile(r"(ERROR|RACECHECK|LEAK) SUMMARY: (.*)")
# The first line of a report states its kind. The lines that belong to it are indented.
HEADS = re.compile(
    r"(?P<race>(?:Error|Warning|Info): Race reported between .*)"
    r"|(?P<hazard>(?:Error|Warning|Info): Potential (?:WAW|WAR|RAW) hazard .*)"
    r"|(?P<access>(?:Invalid|Misaligned|Uninitialized|Potential invalid) \S+ .*|Uninitialized access .*)"
    r"|(?P<barrier>(?:Barrier|Warpgroup MMA sequence) error detected.*|Deadlock detected .*)"
    r"|(?P<api>Program hit .*|Host API .*)"
    r"|(?P<tool>Internal Sanitizer Error.*|Error: .*|Warning: .*|Target application .*)",
    re.IGNORECASE,
)
SITE = re.compile(
    r"(?:(?P<what>Read|Write|Atomic)\S* access |(?:Read|Write) Thread \S+ )?"
    r"at (?P<name>\S.*?)\+(?P<offset>0x[0-9a-f]+)(?: in (?P<line>\S+:\d+))?"
)
HAZARDS = re.compile(r"\[(\d+) hazards?\]")


class Finding(NamedTuple):
    """One kind of report. kind: the report's words without addresses. kernel: "" if the report names none. sites: the
    accesses and their place in the code, `write +0xbff0 reduce.py:70`; two for a race."""

    kind: str
    kernel: str = ""
    sites: tuple[str, ...] = ()


@dataclass
class SanitizerReport:
    """All findings of a process. found: finding -> count. summary: the tool's last line, "" if there is none: it did
    not finish."""

    found: Counter[Finding] = field(default_factory=Counter)
    summary: str = ""

    @property
    def count(self) -> int:
        return sum(self.found.values())


def parse(text: str) -> SanitizerReport:
    """Parse a tool's output, which may also contain lines of the program."""
    report, lines = SanitizerReport(), [line[len(PREFIX) :] for line in text.splitlines() if line.startswith(PREFIX)]
    for i, line in enumerate(lines):
        if summary := SUMMARY.match(line):
            report.summary = f"{report.summary}; {summary[0]}" if report.summary else summary[0]
        elif head := HEADS.match(line):
            more = []
            for after in lines[i + 1 :]:
                if not after.startswith(" "):
                    break
                more.append(after.strip())
            if head["race"]:
                _add_races(report, line, more)
            else:
                _add_one(report, line, more)
    return report


def _site(text: str) -> tuple[str, str]:
    """Return (kernel, "access +offset source line") of the code that a line names, empty strings if it names none."""
    found = SITE.search(text)
    if not found:
        return "", ""
    words = (found["what"], f"+{found['offset']}", found["line"])
    return short(found["name"]), " ".join(word.lower() if word == found["what"] else word for word in words if word)


def _add_races(report: SanitizerReport, head: str, more: list[str]) -> None:
    """Add the races of one access with each of those that follow, with the number of hazards of each pair."""
    kernel, first = _site(head)
    for line in more:
        if line.startswith("and "):
            hazards = HAZARDS.search(line)
            pair = Finding(head.split(":")[0].lower() + " race", kernel, (first, _site(line)[1]))
            report.found[pair] += int(hazards[1]) if hazards else 1


def _add_one(report: SanitizerReport, head: str, more: list[str]) -> None:
    sites = [_site(line) for line in more if line.startswith(("at ", "Write Thread", "Read Thread"))] or [_site(head)]
    kind = re.sub(r" at \S.*\+0x[0-9a-f]+.*| (at|in|by|on) .*0x[0-9a-f]+.*| in block .*", "", head).strip()
    sites = sites[:2] if "hazard" in kind else sites[:1]
    report.found[Finding(kind, sites[0][0], tuple(site for _, site in sites if site))] += 1


def short(kernel: str) -> str:
    """Return a kernel's name without its parameters."""
    return re.sub(r"\(.*|^void ", "", kernel).strip()


def lines(report: SanitizerReport, most: int = 12) -> list[str]:
    """Return the findings as lines, most frequent first."""
    shown = [
        " ".join([f"{count:>8} x {kind}", *([kernel] if kernel else []), *(f"[{site}]" for site in sites)])
        for (kind, kernel, sites), count in report.found.most_common(most)
    ]
    left = len(report.found) - len(shown)
    return [*shown, *([f"         and {left} other kinds"] if left > 0 else [])]
