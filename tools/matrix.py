"""The support table: architecture x feature, from what every kernel says of itself.

    python -m tools.matrix              print the table
    python -m tools.matrix readme       write it into README
    python -m tools.matrix record REPORT... --gpu NAME --commit COMMIT
                                        add what a GPU test run (pytest --junitxml) executed to tests/data/hardware.csv

A cell is decided by `dispatch.explain` and by that record: `run` where tests of the feature passed on hardware,
`compiled` where a kernel takes it and CI compiles that kernel, `no` where every kernel refuses.
"""

import argparse
import csv
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from bench.readme import README, between
from cute_kernels.attention import dispatch
from cute_kernels.attention.problem import Problem as Request
from cute_kernels.topk import dispatch as topk
from cute_kernels.topk.spec import DTYPES as TOPK_DTYPES

ARCHS = {"sm_90a": "Hopper", "sm_100a": "B200", "sm_103a": "B300"}
RECORD = Path(__file__).resolve().parent.parent / "tests" / "data" / "hardware.csv"
COLUMNS = ("arch", "feature", "gpu", "commit", "passed")
BASE = Request(page_size=64, group=4)


@dataclass(frozen=True)
class Feature:
    """`requests`: calls that use it, all must be taken. `words`: a GPU test of `suite` whose id holds one runs it."""

    name: str
    requests: tuple[Request | topk.Request, ...] = (BASE,)
    words: tuple[str, ...] = field(default=())
    suite: str = "test_gpu_prefill"


def selection(name: str, words: tuple[str, ...], *shapes: tuple[int, int]) -> Feature:
    """A top-k feature: calls of all dtypes on so many rows of such a length."""
    requests = tuple(topk.Request(d, rows, length, 2048) for d in TOPK_DTYPES for rows, length in shapes)
    return Feature(name, requests, words, "test_gpu_topk")


def variants(**changes: object) -> tuple[Request, ...]:
    return (replace(BASE, **changes),)  # type: ignore[arg-type]


def dims(*pairs: tuple[int, int]) -> tuple[Request, ...]:
    return tuple(replace(BASE, head_dim_qk=qk, head_dim_vo=vo) for qk, vo in pairs)


FEATURES = (
    Feature("bf16", variants(), ("bf16",)),
    Feature("fp16", variants(q="fp16", kv="fp16", out="fp16"), ("fp16",)),
    Feature("fp8 (e4m3) Q, K and V", variants(q="e4m3", kv="e4m3")),
    Feature("prefill, e4m3 KV", variants(kv="e4m3")),
    Feature("prefill, NVFP4 KV", variants(kv="nvfp4")),
    Feature("head_dim 64", dims((64, 64)), ("d64",)),
    Feature("head_dim 128", dims((128, 128)), ("d128",)),
    Feature("head_dim 192 for Q and K, 128 for V", dims((192, 128)), ("d192x128",)),
    Feature("head_dim 256", dims((256, 256)), ("d256",)),
    Feature("page sizes 8 to 256", tuple(replace(BASE, page_size=p) for p in (8, 16, 32, 64, 128, 256)), ("page",)),
    Feature("grouped heads, any ratio", tuple(replace(BASE, group=g) for g in (1, 3, 8)), ("group", "gqa")),
    Feature("packed grouped heads (few query rows)", variants(rows=1), ("pack",)),
    Feature("causal mask", variants(causal=True), ("causal",)),
    Feature("full attention", variants(causal=False), ("full",)),
    Feature("sliding window", variants(window=True), ("window",)),
    Feature("soft cap", variants(soft_cap=True), ("cap",)),
    Feature("sinks", words=("sink",)),
    Feature("LSE", words=("lse",)),
    Feature("scales on the device", words=("scale",)),
    Feature("separate K and V page tables", words=("separate",)),
    Feature("CUDA graph replay at other lengths", words=("graph", "replay")),
    *(
        Feature(
            f"decode, {name}", tuple(replace(r, phase="decode", rows=rows) for r in found), words, "test_gpu_decode"
        )
        for name, found, rows, words in (
            (
                "split-KV, head_dim 64, 128, 256",
                dims((64, 64), (128, 128), (256, 256)),
                1,
                ("test_lengths", "one_long"),
            ),
            ("several query tokens", variants(), 64, ("query_tokens", "ragged")),
            ("sinks, window, soft cap", variants(window=True, soft_cap=True), 1, ("sink-window-cap",)),
            ("e4m3 KV", variants(kv="e4m3"), 1, ("fp8",)),
            ("NVFP4 KV", variants(kv="nvfp4"), 1, ("nvfp4",)),
            ("masks of drafts", variants(), 64, ("drafts",)),
            ("e4m3 output", variants(), 1, ("e4m3_output",)),
            ("skip-softmax", variants(), 1, ("skip",)),
            ("batch-invariant bits", variants(), 1, ("invariant",)),
            ("xqa", variants(), 1, ("xqa",)),
            ("CUDA graph replay at other lengths", variants(), 1, ("replay",)),
        )
    ),
    selection("top-k of fp32, fp16 and bf16 rows", ("test_data", "test_k", "test_rows"), (1, 4096), (4096, 8192)),
    selection("top-k, rows over several CTAs", ("_c2t", "_c16t"), (1, 131072), (64, 65536)),
    selection("top-k, streamed rows", ("test_streams_whatever",), (4096, 65536), (1, 1 << 21)),
    selection("top-k, a million equal scores", ("million",), (1, 1000000)),
    selection("top-k under CUDA graph replay", ("replay",), (12, 100000)),
)


def record(path: Path = RECORD) -> dict[tuple[str, str], dict[str, str]]:
    """(arch, feature) -> the newest row of what ran on hardware."""
    if not path.exists():
        return {}
    with open(path, newline="") as f:
        return {(row["arch"], row["feature"]): row for row in csv.DictReader(f)}


def refusal(feature: Feature, arch: str) -> str | None:
    """None where every request of the feature has a kernel on `arch`, else the first reason."""
    for request in feature.requests:
        if isinstance(request, topk.Request):
            try:
                topk.select(request, arch)
            except NotImplementedError as error:
                return str(error)
            continue
        rows = dispatch.explain(request, arch)
        if not any(reason is None for _, _, reason in rows):
            return "; ".join(str(reason) for _, _, reason in rows if reason)
    return None


def cell(feature: Feature, arch: str, ran: dict[tuple[str, str], dict[str, str]]) -> str:
    """What the table says of one feature on one architecture."""
    if refusal(feature, arch) is not None:
        return "no"
    row = ran.get((arch, feature.name))
    return f"run ({row['gpu']}, {row['commit'][:9]})" if row else "compiled"


def markdown(ran: dict[tuple[str, str], dict[str, str]] | None = None) -> str:
    """The table."""
    ran = record() if ran is None else ran
    lines = [["", *(f"{arch} ({name})" for arch, name in ARCHS.items())], ["---"] * (len(ARCHS) + 1)]
    lines += [[f.name, *(cell(f, arch, ran) for arch in ARCHS)] for f in FEATURES]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def executed(report: Path) -> tuple[list[str], list[str]]:
    """Ids of the passed and of the failed tests of a junit report; skipped ones are neither."""
    passed, failed = [], []
    for case in ET.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" not in kinds:
            passed.append(f"{case.get('classname')}::{case.get('name')}")
    return passed, failed


def covered(passed: Iterable[str], failed: Iterable[str]) -> dict[str, int]:
    """Feature -> how many GPU tests of it passed; a feature with a failure, or with no test, is left out."""
    good, bad = ([t.lower() for t in tests if "gpu" in t.lower()] for tests in (passed, failed))
    counts = {}
    for feature in FEATURES:
        mine = [
            [t for t in ts if feature.suite in t and any(word in t for word in feature.words)] for ts in (good, bad)
        ]
        hits, misses = map(len, mine)
        if hits and not misses:
            counts[feature.name] = hits
    return counts


def add(reports: Iterable[Path], arch: str, gpu: str, commit: str, path: Path = RECORD) -> dict[str, int]:
    """Replace the rows of `arch` by what the reports of one run show, for the suites that ran."""
    passed, failed = (list(chain(*tests)) for tests in zip(*map(executed, reports)))
    counts = covered(passed, failed)
    ran = {f.name for f in FEATURES if any(f.suite in t.lower() for t in passed + failed)}
    kept = [row for (a, feature), row in record(path).items() if a != arch or feature not in ran]
    rows = [dict(zip(COLUMNS, (arch, name, gpu, commit, n))) for name, n in counts.items()]
    with open(path, "w", newline="") as f:
        out = csv.DictWriter(f, COLUMNS, lineterminator="\n")
        out.writeheader()
        out.writerows([*kept, *rows])
    return counts


def update(path: Path = README) -> None:
    """Write the table into README."""
    path.write_text(between(path.read_text(), "support", markdown()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb")
    verbs.add_parser("readme", help="write the table into README")
    one = verbs.add_parser("record", help="add what a GPU test run executed")
    one.add_argument("reports", type=Path, nargs="+", help="of pytest --junitxml")
    one.add_argument("--arch", default="sm_90a")
    one.add_argument("--gpu", required=True)
    one.add_argument("--commit", required=True)
    args = parser.parse_args()
    if args.verb == "record":
        print(add(args.reports, args.arch, args.gpu, args.commit))
    elif args.verb == "readme":
        update()
    else:
        print(markdown())


if __name__ == "__main__":
    main()
