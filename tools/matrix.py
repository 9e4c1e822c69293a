"""The support table: architecture x feature, from the requests that each kernel accepts.

    python -m tools.matrix              print the table
    python -m tools.matrix readme       write it into docs/support.md, and the tables of head dims and of bundles, and
                                        docs/matrix.md (tools.refusals)
    python -m tools.matrix record REPORT... --gpu NAME --commit COMMIT
                                        add the results of a GPU test run (pytest --junitxml) to tests/data/hardware.csv

A feature is a problem that is passed to its family's `dispatch.explain`. A cell is `no` if every kernel refuses it, and
`run` if GPU tests that carry the feature's marker passed on that architecture and none failed. Otherwise it is
`compiled` (`compiled, simulated` if CI's simulator runs the kernel's op for that architecture), or `on demand` if no
bundle has the kernel.
"""

import argparse
import csv
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import pages as generated
from cute_kernels import archs, catalog
from cute_kernels import shipped as policy
from cute_kernels.attention import dispatch as attention
from cute_kernels.attention.decode import ALONE
from cute_kernels.attention.decode import tile_table as decode_tiles
from cute_kernels.attention.request import KernelRequest
from cute_kernels.attention.sm90 import tile_table as sm90_tiles
from cute_kernels.attention.sm100 import tile_table as sm100_tiles
from cute_kernels.cache_write import dispatch as cache_write
from cute_kernels.cache_write.request import CacheWriteRequest
from cute_kernels.indexer import dispatch as indexer
from cute_kernels.indexer.request import IndexerRequest
from cute_kernels.latent import dispatch as latent
from cute_kernels.latent.request import LatentRequest, ReadRequest
from cute_kernels.merge_states import dispatch as merge_states
from cute_kernels.merge_states.request import MergeRequest
from cute_kernels.records import INDEX, RECORDS
from cute_kernels.topk import dispatch as topk
from cute_kernels.topk.request import TopKKernelRequest

ARCHS = {arch.name: arch.product for arch in archs.TABLE}
RUN = ("sm_90a",)  # architectures with GPU test runs
PARTLY = {"sm_121a": ("attention.decode",)}  # architecture -> the ops that the simulator runs, if not all of them
SIMULATED = {  # (architecture, op) of the kernels that the simulator runs in the weekly CI with all tests
    (arch, op) for arch in ARCHS for op, _ in catalog.shipped(arch) if op in PARTLY.get(arch, (op,))
}
RECORD = Path(__file__).resolve().parent.parent / "tests" / "data" / "hardware.csv"
COLUMNS = ("arch", "feature", "gpu", "commit", "passed")


FAMILIES: dict[str, Any] = {
    "prefill": attention,
    "decode": attention,
    "xqa": attention,
    "top-k": topk,
    "append": cache_write,
    "latent": latent,
    "merge": merge_states,
    "indexer": indexer,
}


TILE_COLUMNS: tuple[tuple[str, Any, dict[tuple[str, str], str]], ...] = (  # types -> column of a table of tiles
    (
        "prefill, Hopper",
        sm90_tiles,
        {
            ("bf16, fp16", "the same"): "half",
            ("e4m3", "e4m3"): "fp8",
            ("any", "another 8-bit type"): "quantised",
            ("any", "NVFP4"): "nvfp4",
        },
    ),
    (
        "prefill, Blackwell",
        sm100_tiles,
        {
            ("bf16, fp16", "the same"): "half",
            ("e4m3", "e4m3"): "fp8",
            ("bf16, fp16", "e4m3, e5m2, int8, NVFP4"): "quantised",
            ("e4m3", "e5m2, int8, NVFP4"): "e4m3_query",
        },
    ),
    (
        "decode",
        decode_tiles,
        {("bf16, fp16", "the same"): "half", ("any", "e4m3, e5m2, int8"): "e4m3", ("any", "NVFP4"): "nvfp4"},
    ),
)


@dataclass(frozen=True)
class Feature:
    """One feature of the table.

    op: the public function's, a key of FAMILIES. what, value: the feature; values of a `what` with equal cells share a
    row. problem: a call that uses the feature. facts: the fields of the problem that express it, empty if the feature
    is no static fact of a kernel (sinks).
    """

    op: str
    what: str
    value: str
    problem: Any
    facts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the name that the markers of GPU tests use."""
        return f"{self.op} {self.what} {self.value}"

    def used_by(self, problem: Any) -> bool:
        """Return whether the static facts of a call show that it uses the feature."""
        return bool(self.facts) and all(getattr(problem, f) == getattr(self.problem, f) for f in self.facts)


def features(op: str, base: Any, what: str, values: dict[str, dict[str, Any]]) -> tuple[Feature, ...]:
    """Return the features of one kind. values: value -> the fields in which the problem differs from `base`."""
    return tuple(Feature(op, what, v, replace(base, **facts), tuple(facts)) for v, facts in values.items())


PREFILL = KernelRequest(page_size=64, qhead_per_kvhead=4, split_kv="never")
DECODE = KernelRequest(page_size=64, qhead_per_kvhead=4, rows=1, split_kv="always")
LATENT = replace(DECODE, qhead_per_kvhead=16, shares_v=True)
XQA = replace(DECODE, q="fp16", kv="fp16", out="fp16")
APPEND = CacheWriteRequest("bf16", "bf16")
ONE_BYTE = {"one byte": {"dtype": "uint8", "cache": "uint8"}}
HALVES = {dtype: {"q": dtype, "kv": dtype, "out": dtype} for dtype in ("bf16", "fp16")}
QUANTISED = {"e4m3": {"kv": "e4m3"}, "NVFP4": {"kv": "nvfp4"}}
CACHES = QUANTISED | {"e5m2": {"kv": "e5m2"}}
BY_TOKEN = {f"{kv}, a scale per token and head": {"kv": kv, "kv_scales": "token"} for kv in ("e4m3", "int8")}
OUTPUTS = {"e4m3": {"out": "e4m3"}, "NVFP4": {"out": "nvfp4"}}
MODIFIERS: dict[str, dict[str, Any]] = {
    "a causal mask": {"causal": True},
    "full attention": {"causal": False},
    "a sliding window": {"window": True},
    "a mask of drafts": {"drafts": True},
    "a soft cap": {"soft_cap": True},
    "skip-softmax": {"skip": True},
    "sinks": {},
    "LSE": {},
    "scales on the device": {},
    "separate K and V page tables": {},
    "CUDA graph replay at other lengths": {},
}
FAMILY: dict[str, dict[str, Any]] = {  # RoPE: a kernel that writes caches rotates Q and K before
    "chunked attention": {"chunk": True},
    "a custom mask": {"custom_mask": "bits"},
    "ranges of keys": {"custom_mask": "ranges", "causal": False},
    "a prefix": {"prefix": True},
    "ALiBi": {"alibi": True},
    "RoPE": {},
}
REQUESTS: dict[str, dict[str, Any]] = {  # how K and V are found; kernels only distinguish ragged from paged
    "block table": {},
    "CSR page lists": {},
    "ragged K and V": {"source": "ragged", "page_size": 0},
}


def heads(*groups: int) -> dict[str, dict[str, Any]]:
    return {str(group): {"qhead_per_kvhead": group} for group in groups}


def pages(*sizes: int) -> dict[str, dict[str, Any]]:
    return {str(size): {"page_size": size} for size in sizes}


def dims(*pairs: tuple[int, int]) -> dict[str, dict[str, Any]]:
    return {
        f"{qk}" if qk == vo else f"{qk} (Q, K) and {vo} (V)": {"head_dim_qk": qk, "head_dim_vo": vo} for qk, vo in pairs
    }


OTHER_DIMS = dims(*((dim, dim) for dim in (32, 80, 96, 112, 160, 192, 512)))  # a bundle holds no kernels of these
TRANSFORM = {"transform": True}
ASKED: tuple[tuple[str, Any, str, dict[str, dict[str, Any]]], ...] = (  # arguments of `features`
    ("prefill", PREFILL, "Q, K and V", HALVES | {"e4m3": {"q": "e4m3", "kv": "e4m3"}}),
    ("prefill", PREFILL, "KV", {kv: facts | {"q": "bf16"} for kv, facts in (CACHES | BY_TOKEN).items()}),
    ("prefill", replace(PREFILL, q="e4m3"), "KV", {"NVFP4 with e4m3 queries": {"q": "e4m3", "kv": "nvfp4"}}),
    ("prefill", PREFILL, "output", OUTPUTS),
    ("prefill", PREFILL, "head_dim", dims((64, 64), (128, 128), (192, 128), (256, 256)) | OTHER_DIMS),
    ("prefill", PREFILL, "requests", REQUESTS),
    ("prefill", PREFILL, "page size", pages(1, 2, 5, 8, 16, 24, 32, 64, 128, 256, 300)),
    ("prefill", PREFILL, "query heads of a KV head", heads(1, 2, 3, 4, 5, 6, 7, 8, 16)),
    ("prefill", PREFILL, "with", MODIFIERS | FAMILY),
    ("prefill", replace(PREFILL, rows=1), "with", {"few query tokens": {}}),
    ("prefill", replace(PREFILL, q="e4m3", kv="e4m3"), "with", {"scales a head": {"head_scales": True}}),
    ("decode", replace(DECODE, kv="e4m3", out="e4m3"), "query", {t: {"q": t} for t in ("bf16", "fp16", "e4m3")}),
    ("decode", DECODE, "KV", HALVES | CACHES | BY_TOKEN),
    ("decode", replace(DECODE, kv="nvfp4"), "KV", {"NVFP4 with interleaved V factors": {"interleaved": True}}),
    ("decode", DECODE, "output", OUTPUTS),
    ("decode", DECODE, "head_dim", dims((64, 64), (128, 128), (256, 256)) | OTHER_DIMS),
    ("decode", DECODE, "page size", pages(1, 2, 5, 8, 16, 24, 32, 64, 128, 256, 300)),
    ("decode", DECODE, "query heads of a KV head", heads(1, 3, 4, 5, 8, 16, 64, 96)),
    ("decode", DECODE, "with", MODIFIERS | {"batch-invariant bits": {"split_kv": "fixed"}}),
    ("decode", replace(DECODE, rows=64), "with", {"several query tokens": {}}),
    ("decode", replace(DECODE, causal=False), "with", {"keys that each token chooses": {"source": "slots"}}),
    (
        "decode",
        LATENT,
        "head_dim of a latent cache",
        {value: facts | {"shares_v": True} for value, facts in dims((576, 512), (512, 512)).items()},
    ),
    (
        "decode",
        replace(LATENT, head_dim_qk=576, head_dim_vo=512, causal=False),
        "with",
        {
            "keys that each token chooses, of a latent cache": {"source": "slots", "shares_v": True},
            "keys that each token chooses, of two latent caches": {"source": "slots", "shares_v": True, "extra": True},
            "keys that neighbouring tokens share, of a latent cache": {
                "source": "slots",
                "shares_v": True,
                "share_keys": True,
            },
            **{
                f"keys that neighbouring tokens share, of record {name}": {
                    "source": "slots",
                    "shares_v": True,
                    "share_keys": True,
                    "record": name,
                }
                for name in ("656", "e4m3")
            },
        },
    ),
    (
        "decode",
        LATENT,
        "KV of a latent cache",
        {
            "e4m3": {"record": "e4m3", "head_dim_qk": 576, "head_dim_vo": 512, "shares_v": True},
            "e4m3 under e4m3 queries": {
                "q": "e4m3",
                "record": "e4m3",
                "head_dim_qk": 576,
                "head_dim_vo": 512,
                "shares_v": True,
            },
            **{
                f"record {name}": facts | {"source": "slots", "causal": False, "shares_v": True, "record": name}
                for dim, names in ((576, ("656", "352")), (512, ("528_fp32", "528", "584")))
                for facts in ({"head_dim_qk": dim, "head_dim_vo": 512},)
                for name in names
            },
            **{
                f"records {name} and {extra}": {
                    "head_dim_qk": 512,
                    "head_dim_vo": 512,
                    "source": "slots",
                    "causal": False,
                    "shares_v": True,
                    "record": name,
                    "extra": True,
                    "extra_record": extra,
                }
                for name, extra in (("584", "584"), ("528", "528"), ("528", "288"))
            },
        },
    ),
    ("xqa", XQA, "KV", {"fp16": HALVES["fp16"]} | QUANTISED),
    ("xqa", XQA, "output", {"e4m3": {"out": "e4m3"}}),
    ("xqa", XQA, "page size", pages(1, 5, 16, 24, 32, 64, 128)),
    ("xqa", XQA, "with", {name: MODIFIERS[name] for name in ("a sliding window", "a mask of drafts", "sinks")}),
    (
        "top-k",
        TopKKernelRequest("fp32", 64, 65536, 2048),
        "scores",
        {d: {"dtype": d} for d in ("fp32", "fp16", "bf16")},
    ),
    ("top-k", TopKKernelRequest("fp32", 4096, 8192, 2048), "rows", {"in one CTA": {}}),
    ("top-k", TopKKernelRequest("fp32", 1, 131072, 2048), "rows", {"over several CTAs": {}}),
    ("top-k", TopKKernelRequest("fp32", 4096, 65536, 2048), "rows", {"streamed": {}}),
    ("top-k", TopKKernelRequest("fp32", 1, 1000000, 2048), "with", {"a million equal scores": {}}),
    ("top-k", TopKKernelRequest("fp32", 12, 100000, 1000), "with", {"CUDA graph replay": {}}),
    ("top-k", TopKKernelRequest("fp32", 64, 65536, 2048), "with", {"sorted values": {}}),
    ("top-k", TopKKernelRequest("fp32", 1, 1 << 21, 20000), "k", {"20000 of 2 million": {}}),
    ("append", APPEND, "rows copied", {d: {"dtype": d, "cache": d} for d in ("bf16", "fp16")} | ONE_BYTE),
    ("append", APPEND, "rows quantised to", {"e4m3": {"cache": "e4m3"}, "NVFP4": {"cache": "nvfp4"}}),
    (
        "append",
        replace(APPEND, scales="token", transform=True),
        "rows quantised to",
        {f"{cache}, a scale per token and head": {"cache": cache} for cache in ("e4m3", "int8")},
    ),
    ("append", APPEND, "rows quantised to", {"e5m2": {"cache": "e5m2"}}),
    ("append", APPEND, "values dequantised from", {"NVFP4": {"dtype": "nvfp4", "cache": "fp32"}}),
    ("append", APPEND, "rows of Q and K with", dict.fromkeys(("RMS norm", "RoPE", "RoPE in place"), TRANSFORM)),
    ("append", APPEND, "places", {"slot mapping": {}, "CSR page lists": {}, "block table": {}}),
    ("append", APPEND, "with", {"CUDA graph replay": {}}),
    ("latent", LatentRequest(), "record", {name: {"record": name} for name in RECORDS if name != INDEX}),
    (
        "latent",
        LatentRequest(),
        "rows of",
        {"an indexer": {"record": INDEX}, "an indexer in one launch": {"joined": True}},
    ),
    (
        "latent",
        ReadRequest(),
        "gathers of record",
        {
            **{name: {"record": name} for name in RECORDS if name not in (INDEX, "rows")},
            **{what: {"dtype": "uint8", "record": name} for what, name in (("rows", "bytes"), ("an indexer", INDEX))},
        },
    ),
    ("latent", LatentRequest(), "with", {"RMS norm": {}, "RoPE": {}, "a query": {}, "CUDA graph replay": {}}),
    ("merge", MergeRequest("bf16"), "V", {d: {"dtype": d} for d in ("bf16", "fp16", "fp32")}),
    ("merge", MergeRequest("bf16"), "states", {"of one tensor": {"pair": False}}),
    ("merge", MergeRequest("bf16", True), "states", {"of two tensors": {"pair": True}, "in place": {"pair": True}}),
    ("merge", MergeRequest("bf16"), "with", {"a mask of tokens": {"pair": True}, "CUDA graph replay": {}}),
    ("indexer", IndexerRequest(), "logits of", {"a prompt": {"rows": 4096}, "a paged cache": {}}),
    ("indexer", IndexerRequest(), "logits with", {f"{n} heads": {"heads": n} for n in (64, 32)}),
    ("indexer", IndexerRequest(), "logits output", {out: {"out": out} for out in ("fp32", "bf16")}),
    ("indexer", IndexerRequest(rows=4096), "logits of", {"queries and keys in bf16": {"keys": "bf16"}}),
    ("indexer", IndexerRequest(), "with", {"CUDA graph replay": {}}),
)
FEATURES = tuple(feature for asked in ASKED for feature in features(*asked))
NAMES = frozenset(feature.name for feature in FEATURES)


def record(path: Path = RECORD) -> dict[tuple[str, str], dict[str, str]]:
    """Return (arch, feature) -> the newest row of the hardware record."""
    if not path.exists():
        return {}
    with open(path, newline="") as f:
        return {(row["arch"], row["feature"]): row for row in csv.DictReader(f)}


def served(feature: Feature, arch: str) -> tuple[str, Any] | None:
    """Return (op, spec) of the kernel that serves the feature's problem on `arch`, None if all kernels refuse it.

    Prefill has whole tiles, decode and xqa split keys; on the architectures `ALONE` one kernel serves all.
    """
    schedule = {"prefill": "tiles", "decode": "stream_k", "xqa": "stream_k"}.get(feature.op)
    schedule = None if arch in ALONE else schedule
    answers = FAMILIES[feature.op].explain(feature.problem, arch)
    served = ((op, spec) for op, spec, reason in answers if reason is None)
    return next((one for one in served if schedule is None or one[1].schedule == schedule), None)


def cell(feature: Feature, arch: str, ran: dict[tuple[str, str], dict[str, str]]) -> str:
    """Return the table's text for one feature on one architecture."""
    kernel, row = served(feature, arch), ran.get((arch, feature.name))
    if kernel is None:
        return "no"
    if row:
        return f"run ({row['gpu']}, {row['commit'][:9]})"
    if kernel not in catalog.shipped(arch):
        return "on demand"
    return "compiled, simulated" if (arch, kernel[0]) in SIMULATED else "compiled"


def markdown(ran: dict[tuple[str, str], dict[str, str]] | None = None) -> str:
    """Return the table as Markdown."""
    ran = record() if ran is None else ran
    rows: dict[tuple[str, ...], list[str]] = {}  # (op, what, cells) -> values
    for f in FEATURES:
        rows.setdefault((f.op, f.what, *(cell(f, arch, ran) for arch in ARCHS)), []).append(f.value)
    head = ["", "", "", *(f"{arch} ({name})" for arch, name in ARCHS.items())]
    return generated.table(
        head, ([op, what, ", ".join(values), *cells] for (op, what, *cells), values in rows.items()), len(head)
    )


def dims_name(dims: tuple[int, int]) -> str:
    """Return how documents name (head_dim_qk, head_dim_vo)."""
    return str(dims[0]) if dims[0] == dims[1] else f"{dims[0]} with {dims[1]}"


def head_dims() -> str:
    """Return the head dims that attention kernels compute with, from the tables of tiles, as a Markdown table."""
    lines = []
    for op, table, kinds in TILE_COLUMNS:
        for (q, kv), column in kinds.items():
            found = [getattr(row, "dims", (row[0], row[0])) for row in table.TABLE if getattr(row, column)]
            lines.append([op, q, kv, ", ".join(map(dims_name, found))])
    return generated.table(["kernel", "queries", "K and V", "columns of a kernel"], lines, 4)


def bundles() -> str:
    """Return the rows of `shipped` as a Markdown table, and what their kinds are."""
    same = {"q": "the query's type"}
    lines = []
    for row in policy.ATTENTION:
        caches, dims = ", ".join(same.get(kv, kv) for kv in row.kv), ", ".join(map(dims_name, row.head_dims))
        arch = "all" if row.archs == archs.NAMES else ", ".join(row.archs)
        lines.append([f"`{row.op}`", arch, ", ".join(row.q), caches, dims, ", ".join(row.kinds)])
    kinds = [[name, kind.meaning] for name, kind in attention.KINDS.items()]
    counts = [[arch, len(catalog.shipped(arch))] for arch in ARCHS]
    return "\n\n".join((
        generated.table(["op", "architectures", "queries", "caches", "head_dim", "kinds"], lines, 6),
        generated.table(["kind", "serves"], kinds, 2),
        generated.table(["bundle", "kernels of all families"], counts, 2),
    ))  # fmt: skip


def sections() -> dict[str, str]:
    """Return the generated sections of documents: name -> body."""
    from . import refusals

    return {"support": markdown(), "head-dims": head_dims(), "shipped": bundles(), "refusals": refusals.markdown()}


def executed(reports: Iterable[Path]) -> dict[str, tuple[int, int]]:
    """Count, per feature, the tests with its marker that passed and failed in junit reports. Skipped tests count as
    neither."""
    counts: dict[str, tuple[int, int]] = {}
    for case in (case for report in reports for case in ET.parse(report).getroot().iter("testcase")):
        ended = {child.tag for child in case}
        if "skipped" in ended:
            continue
        bad = bool(ended & {"failure", "error"})
        for name in {p.get("value", "") for p in case.iter("property") if p.get("name") == "feature"}:
            passed, failed = counts.get(name, (0, 0))
            counts[name] = passed + (not bad), failed + bad
    return counts


def add(reports: Iterable[Path], arch: str, gpu: str, commit: str, path: Path = RECORD) -> dict[str, int]:
    """Replace the rows of `arch` for the features with test results. Return feature -> passed tests, for features
    without a failure."""
    found = executed(reports)
    counts = {name: passed for name, (passed, failed) in found.items() if not failed}
    kept = [row for (a, feature), row in record(path).items() if a != arch or feature not in found]
    rows = [dict(zip(COLUMNS, (arch, name, gpu, commit, n))) for name, n in counts.items()]
    order = {feature.name: i for i, feature in enumerate(FEATURES)}
    with open(path, "w", newline="") as f:
        out = csv.DictWriter(f, COLUMNS, lineterminator="\n")
        out.writeheader()
        out.writerows(sorted([*kept, *rows], key=lambda row: (row["arch"], order.get(row["feature"], -1))))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb")
    one = verbs.add_parser("readme", help="write the table into docs/support.md")
    one.add_argument("--check", action="store_true", help=generated.CHECK)
    one = verbs.add_parser("record", help="add the results of a GPU test run")
    one.add_argument("reports", type=Path, nargs="+", help="reports of pytest --junitxml")
    one.add_argument("--arch", default="sm_90a")
    one.add_argument("--gpu", required=True)
    one.add_argument("--commit", required=True)
    args = parser.parse_args()
    if args.verb == "record":
        print(add(args.reports, args.arch, args.gpu, args.commit))
    elif args.verb == "readme":
        generated.command(sections(), args.check)
    else:
        print(markdown())


if __name__ == "__main__":
    main()
