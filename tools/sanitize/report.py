"""Read the output of compute-sanitizer, and tell the reports that are expected, with their reason, from the others."""

import re
from typing import NamedTuple

from .calls import DONE

CLEAN, EXPECTED_ONLY, FOUND, UNFINISHED = "clean", "expected", "FOUND", "did not end"
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
BESIDE = ("COMPUTE-SANITIZER", "SUMMARY", "Target application", "Internal Sanitizer")  # lines that report nothing


class Expected(NamedTuple):
    """Reports of a tool that are no errors. pattern: matches each of them. reason: why they are none."""

    tool: str
    pattern: re.Pattern[str]
    reason: str


# The only place that excuses a report.
EXPECTED = (
    Expected(
        "racecheck",
        re.compile(
            r"(?s)(?=.*attention_decode)(?!.*attention_sm90).*(Write access.*Read access|Read access.*Write access)"
        ),
        "an mbarrier orders the pair: each warp synchronises its lanes, one lane arrives, all wait; racecheck does not "
        "carry the order of the other lanes over that one arrival",
    ),
)


class Findings(NamedTuple):
    """The reports of a process. status: one of the four words above. errors: by the tool's summary, None without one.
    unexpected: the reports that nothing excuses. reason: of those that are excused."""

    status: str
    errors: int | None
    unexpected: list[str]
    reason: str = ""


def blocks(text: str) -> list[str]:
    """Return the reports of an output: lines with the tool's prefix, up to an empty one."""
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if not line.startswith("========="):
            continue
        said = line.removeprefix("=========").strip()
        if not said:
            found.append([])
        elif not any(word in said for word in BESIDE):
            found[-1].append(said)
    return ["\n".join(lines) for lines in found if lines]


def read(tool: str, text: str) -> Findings:
    """Return the findings of a process that ended or was ended."""
    summaries = [int(number) for number in SUMMARY.findall(text)]
    errors = summaries[-1] if summaries else None
    reasons, unexpected = [], []
    for block in blocks(text):
        reason = next((e.reason for e in EXPECTED if e.tool == tool and e.pattern.search(block)), "")
        reasons.append(reason) if reason else unexpected.append(block)
    if unexpected:
        return Findings(FOUND, errors, unexpected)
    if errors is None or DONE not in text:
        return Findings(UNFINISHED, errors, [])
    if errors and not reasons:
        return Findings(FOUND, errors, ["reports that were not printed"])
    return Findings(EXPECTED_ONLY if errors else CLEAN, errors, [], reasons[0] if reasons else "")
