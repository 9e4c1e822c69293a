"""What compute-sanitizer printed, as findings: one for each distinct (kind, kernel, addresses), with a count."""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

PREFIX = "========= "
SUMMARY = re.compile(r"(ERROR|RACECHECK|LEAK) SUMMARY: (.*)")
# A report's first line: what it is. Lines that follow are indented.
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
    """kind: the report's own words without addresses; kernel: "" where the report names none; sites: what accessed
    where in the code, `write +0xbff0 reduce.py:70`, two for a race."""

    kind: str
    kernel: str = ""
    sites: tuple[str, ...] = ()


@dataclass
class SanitizerReport:
    """found: how often each; summary: the tool's own last line, "" where there is none, so that it did not end."""

    found: Counter[Finding] = field(default_factory=Counter)
    summary: str = ""

    @property
    def count(self) -> int:
        return sum(self.found.values())


def parse(text: str) -> SanitizerReport:
    """The report in a tool's output, in which the program's own lines may stand too."""
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
    """(kernel, access, offset and source line) that a line names; empty where it names none."""
    found = SITE.search(text)
    if not found:
        return "", ""
    words = (found["what"], f"+{found['offset']}", found["line"])
    return short(found["name"]), " ".join(word.lower() if word == found["what"] else word for word in words if word)


def _add_races(report: SanitizerReport, head: str, more: list[str]) -> None:
    """One access against each of those that follow, with the hazards of each pair."""
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
    """A kernel's name without its parameters."""
    return re.sub(r"\(.*|^void ", "", kernel).strip()


def lines(report: SanitizerReport, most: int = 12) -> list[str]:
    """The findings, the most frequent first, one a line."""
    shown = [
        " ".join([f"{count:>8} x {kind}", *([kernel] if kernel else []), *(f"[{site}]" for site in sites)])
        for (kind, kernel, sites), count in report.found.most_common(most)
    ]
    left = len(report.found) - len(shown)
    return [*shown, *([f"         and {left} other kinds"] if left > 0 else [])]
