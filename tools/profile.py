"""Profile one benchmark case with Nsight Compute and print the important figures.

    python -m tools.profile CASE [--provider ours] [--ncu PATH] [--lines 40]

The tool runs itself under `ncu --clock-control none` (so the clocks are those of the benchmark) and prints duration,
tensor pipe, memory, stalls and launch resources of every kernel of one warm call. With `--lines`, it also prints so
many instructions of the first kernel, those where warps were found most often, with the reason why they waited. Before
them, it prints the samples of each stretch of code in which all instructions were issued equally often. If warps have
roles, such a stretch is mostly the loop of one role, and its samples show whether this role works or waits.
"""

import argparse
import csv
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

SECTIONS = (
    "SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "SchedulerStats", "WarpStateStats",
    "LaunchStats", "Occupancy",
)  # fmt: skip
METRICS = (  # metrics that no section contains
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
)
# Heading -> patterns of the raw page's metric names, in print order.
GROUPS = {
    "duration": (r"gpu__time_duration\.sum", r"(gpc|sm)__cycles_elapsed\.(avg\.per_second|max)"),
    "tensor pipe": (
        r"sm__pipe_tensor_(op_hmma_|type_hmma\w*_)?cycles_active\.avg\.pct_of_peak_sustained_elapsed",
        r"sm__throughput\.avg\.pct_.*",
    ),
    "memory": (
        r"dram__bytes_(read|write)\.sum",
        r"(dram|lts)__throughput\.avg\.pct_of_peak_sustained_elapsed",
        r"lts__t_sector_hit_rate\.pct",
        r"l1tex__data_bank_conflicts.*",
    ),
    "issue": (r"smsp__issue_active\.avg\.per_cycle_active", r"smsp__warps_(active|eligible)\.avg\.per_cycle_active"),
    "launch": (
        r"launch__(registers_per_thread|grid_size|block_size)",
        r"launch__shared_mem_per_block_(dynamic|static)",
        r"launch__occupancy_limit_.*",
        r"sm__warps_active\.avg\.pct_of_peak_sustained_active",
    ),
}
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
STALLS_SHOWN = 6
ALIKE, LEAST_SHARE = 0.02, 0.01  # difference of counts within a stretch of code; samples of one that is shown


def parse(lines: Iterable[str]) -> list[dict[str, tuple[str, str]]]:
    """Parse the kernels of `ncu --csv --page raw`: metric -> (value, unit). Skips ncu's messages before the header."""
    found = list(lines)
    start = next((i for i, line in enumerate(found) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError("no table in ncu's output: " + " ".join(line.strip() for line in found[-5:]))
    names, units, *kernels = csv.reader(found[start:])
    return [{n: (v, u) for n, v, u in zip(names, row, units)} for row in kernels if len(row) == len(names)]


def number(text: str) -> float | None:
    """Return a figure of the table as a float, None for `n/a`."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def report(kernel: dict[str, tuple[str, str]]) -> str:
    """Return the important figures of one kernel as lines."""
    lines = [kernel.get("Kernel Name", ("?", ""))[0]]
    for heading, patterns in GROUPS.items():
        names = [n for p in patterns for n in kernel if re.fullmatch(p, n)]
        lines += [f"  {heading}"] if names else []
        lines += [f"    {n:72} {kernel[n][0]:>16} {kernel[n][1]}".rstrip() for n in dict.fromkeys(names)]
    stalls = [(x, m[1]) for n, (v, _) in kernel.items() if (m := STALL.fullmatch(n)) and (x := number(v)) is not None]
    if stalls:
        lines.append("  stalls (warps stalled a cycle that issues)")
        lines += [f"    {name:72} {value:16.2f}" for value, name in sorted(stalls, reverse=True)[:STALLS_SHOWN]]
    return "\n".join(lines)


class SampledInstruction(NamedTuple):
    """An instruction of a kernel: its number, how often it was issued, how many samples found a warp at it, and for
    which reasons it was there."""

    number: int
    issued: int
    samples: int
    reasons: Counter[str]
    text: str

    @property
    def reason(self) -> str:
        """The most frequent reason, "" without samples."""
        return max(self.reasons, key=self.reasons.__getitem__, default="")


def sampled(lines: Iterable[str]) -> list[SampledInstruction]:
    """Return the instructions of a source page of ncu, in CSV."""
    rows = [row for row in csv.reader(lines) if len(row) > 2]
    heading = next(i for i, row in enumerate(rows) if "Source" in row)
    of, found = {name: i for i, name in enumerate(rows[heading])}, []
    reasons = [name for name in of if name.startswith("stall_") and "(" not in name]
    for number, row in enumerate(rows[heading + 1 :]):
        why = Counter({name.removeprefix("stall_"): int(row[of[name]] or 0) for name in reasons})
        issued, samples = (int(row[of[name]] or 0) for name in ("Instructions Executed", "# Samples"))
        found.append(SampledInstruction(number, issued, samples, +why, row[of["Source"]].strip()))
    return found


def stretches(found: list[SampledInstruction]) -> str:
    """Return a table of the stretches of code that run equally often, with their samples by reason."""
    groups: list[list[SampledInstruction]] = []
    for each in found:
        alike = groups and abs(each.issued - groups[-1][0].issued) <= ALIKE * groups[-1][0].issued
        if alike:
            groups[-1].append(each)
        else:
            groups.append([each])
    total, lines = sum(each.samples for each in found) or 1, [f"{'numbers':>13} {'issued':>9} {'share':>6} reasons"]
    for group in groups:
        share, why = sum(each.samples for each in group) / total, Counter[str]()
        for each in group:
            why += each.reasons
        if share >= LEAST_SHARE:
            shown = ", ".join(f"{name} {count / total:.1%}" for name, count in why.most_common(STALLS_SHOWN))
            lines.append(f"{group[0].number:6}-{group[-1].number:6} {group[0].issued:9} {share:6.1%} {shown}")
    return "\n".join(lines)


def hottest(found: list[SampledInstruction], count: int) -> str:
    """Return a table of the instructions with the most samples, in their order."""
    total = sum(each.samples for each in found) or 1
    most = sorted(sorted(found, key=lambda each: -each.samples)[:count], key=lambda each: each.number)
    rows = (f"{x.number:6} {x.issued:9} {x.samples / total:6.1%} {x.reason:18} {x.text}" for x in most)
    return "\n".join([f"{'number':>6} {'issued':>9} {'share':>6} {'waits for':18} instruction", *rows])


def known(case: str, device: str) -> tuple[dict[str, Any], Callable[[], Any]]:
    """Return the providers of a benchmark case (prefill, decode, MLA or top-k), each a function of the inputs, and the
    function that makes the inputs."""
    from bench import decode, mla, prefill, topk
    from bench import precision as measured
    from bench.cases import attention as cases
    from bench.cases import precision, serving

    prefills, decodes = cases.PREFILL_BF16 | serving.PREFILL | serving.SERVE, cases.DECODE | serving.DECODE
    if case in prefills:
        return dict(prefill.PROVIDERS), partial(cases.make_inputs, prefills[case], device)
    if case in precision.PRECISION:
        return {"ours": prefill.PROVIDERS["ours"]}, partial(precision.make_inputs, precision.PRECISION[case], device)
    if case in measured.CASES:  # of skip-softmax
        dense = partial(precision.concentrated, measured.CASES[case], device, "heavy-tailed")
        return {"ours": prefill.PROVIDERS["ours"]}, lambda: measured.with_factor(measured.CASES[case], dense())[0]
    if case in decodes:
        return dict(decode.PROVIDERS), partial(cases.make_inputs, decodes[case], device)
    if case in mla.CASES:
        of = mla.CASES[case]
        return {name: partial(run, of) for name, run in mla.PROVIDERS.items()}, partial(mla.make, of, device, 0)
    if case.startswith("topk-"):
        calls = {name: partial(partial, run) for name, run in topk.PROVIDERS.items()}
        return dict(calls), partial(topk.make, case, device, 0)
    names = ", ".join([*prefills, *measured.CASES, *decodes, *mla.CASES, *topk.HEADLINE])
    raise SystemExit(f"no case {case!r}; there are: {names}, and all that end as topk-fp32-64x65536-k2048")


def call_of(case: str, provider: str, device: str) -> Callable[[], object]:
    """Return a provider's call on a case; if it has several variants, the first."""
    providers, inputs = known(case, device)
    if provider not in providers:
        raise SystemExit(f"no provider {provider!r} for {case}; there are: {', '.join(providers)}")
    made = providers[provider](inputs())
    return next(iter(made.values()))[0] if isinstance(made, dict) else made


def child(case: str, provider: str) -> None:
    """Run one warm call between profiler start and stop. This process runs under ncu."""
    import torch

    run = call_of(case, provider, "cuda")
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def profile(case: str, provider: str, ncu: str, page: str, what: Iterable[str]) -> list[str]:
    """Run `case` under ncu, which measures `what`, and return the lines of a page of its report."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "ncu.csv")
        command = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all", *what]
        command += ["--csv", "--page", page, "--print-units", "base", "--log-file", str(log)]
        command += [sys.executable, "-m", "tools.profile", case, "--provider", provider, "--child"]
        ended = subprocess.run(command)
        text = log.read_text().splitlines() if log.exists() else []
        if ended.returncode:
            raise SystemExit(f"ncu ended with {ended.returncode}: " + " ".join(text[-5:]))
        return text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.profile", description=__doc__.splitlines()[0])
    parser.add_argument("case", help="a case of bench, such as prefill-bf16-causal-b2-s8192-h32x8-d128-p64")
    parser.add_argument("--provider", default="ours", help="ours, or a peer that bench has for the case")
    parser.add_argument("--ncu", default="ncu", help="path of Nsight Compute's command line")
    parser.add_argument("--lines", type=int, default=0, help="instructions to show, those with the most samples")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.case, args.provider)
        return
    what = [word for s in SECTIONS for word in ("--section", s)] + ["--metrics", ",".join(METRICS)]
    for kernel in parse(profile(args.case, args.provider, args.ncu, "raw", what)):
        print(report(kernel))
    if args.lines:
        what = ["--section", "SourceCounters", "--launch-count", "1"]
        found = sampled(profile(args.case, args.provider, args.ncu, "source", what))
        print(stretches(found), hottest(found, args.lines), sep="\n\n")


if __name__ == "__main__":
    main()
