"""Read the output of compute-sanitizer, and tell the reports that are expected, with their reason, from the others."""

import re
from typing import NamedTuple

from bench.results import AND

from .calls import DONE

CLEAN, EXPECTED_ONLY, FOUND, UNFINISHED = "clean", "expected", "FOUND", "did not end"
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
DROPPED = re.compile(r"(\d+) errors were skipped")
BESIDE = (
    "COMPUTE-SANITIZER",
    "SUMMARY",
    "Target application",
    "Internal Sanitizer",
    "rror buffer overflow",
)  # lines that report nothing


class Expected(NamedTuple):
    """Reports of a tool that are no errors. pattern: matches each of them. reason: why they are none."""

    tool: str
    pattern: re.Pattern[str]
    reason: str


def pair(level: str, first: str, second: str, kernel: str) -> re.Pattern[str]:
    """Return the pattern of a report of racecheck: accesses of one kind, and the others' that it races with."""
    place = rf"{kernel}\S*\+0x[0-9a-f]+(?: in .*)?"
    others = rf"(?:\nand {second} access at {place} \[\d+ hazards\])+"
    return re.compile(rf"{level}: Race reported between {first} access at {place}{others}")


ONE_LANE = (
    "an mbarrier orders the pair: each warp synchronises its lanes, one lane arrives, all wait; racecheck does not "
    "carry the order of the other lanes over that one arrival (`tools.sanitize.minimal`, `one_arrives`)"
)
SCORES_APART = r"attention_sm90__\w*o2a(?:c2)?_\d+(?=\+)"  # kernels in which a warpgroup of its own computes the scores
# The only place that excuses a report.
EXPECTED = (
    Expected("racecheck", pair("(?:Error|Warning)", "Write", "Read", "attention_(?:decode|latent|sm90)__"), ONE_LANE),
    Expected("racecheck", pair("(?:Error|Warning)", "Read", "Write", "attention_(?:decode|latent)__"), ONE_LANE),
    Expected(
        "racecheck",
        pair("Error", "Read", "Write", SCORES_APART),
        "the warps of `scoring.output` read the factors, maxima and sums of rows, all lanes of a warp meet in the next "
        "MMA, one lane arrives at the mbarrier of `scores.pipe`, and the warps of `scoring.score` wait for it before "
        "they write those of a later block or tile; racecheck does not carry the order of the other lanes over that "
        "one arrival (`tools.sanitize.minimal`, `one_arrives`)",
    ),
    Expected(
        "racecheck",
        pair("Warning", "Read", "Write", "attention_sm90__"),
        "the warp that finds tiles reads its cursor, all lanes shuffle and vote with what they read, and one lane "
        "writes the cursor; racecheck wants a syncwarp before the write (`tools.sanitize.minimal`, `shuffled`)",
    ),
    Expected(
        "synccheck",
        re.compile(
            r"Barrier error detected\. Divergent thread\(s\) in block\.\nat attention_decode__\S+"
            r"\nby thread \((?:\d|[1-5]\d|6[0-3]),0,0\) in block .*"
        ),
        "the warps that load K and V wait at the named barrier of the prologue, each in its own copy of the code, and "
        "the schedule warp arrives; synccheck wants one place for all (`tools.sanitize.minimal`, `barrier_apart`)",
    ),
)


class Findings(NamedTuple):
    """The reports of a process. status: one of the four words above. errors: by the tool's summary, and those that it
    skipped; None without a summary. unexpected: the reports that nothing excuses. reason: of those that are excused."""

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
    errors = summaries[-1] + sum(map(int, DROPPED.findall(text))) if summaries else None
    reasons, unexpected = [], []
    for block in blocks(text):
        reason = next((e.reason for e in EXPECTED if e.tool == tool and e.pattern.fullmatch(block)), "")
        reasons.append(reason) if reason else unexpected.append(block)
    if unexpected:
        return Findings(FOUND, errors, unexpected)
    if errors is None or DONE not in text:
        return Findings(UNFINISHED, errors, [])
    if errors and not reasons:
        return Findings(FOUND, errors, ["reports that were not printed"])
    return Findings(EXPECTED_ONLY if errors else CLEAN, errors, [], AND.join(dict.fromkeys(reasons)))
