"""Compare checkouts on one GPU: time our kernels in each and compare the bits of their results.

    python -m bench.compare ../other-checkout ... --cases prefill,serve,decode,topk,host --rounds 15

This tool checks a refactoring when the PTX cannot be compared. Each checkout runs in its own process; the processes
take turns, so that clock drift affects all of them alike. The report has one line per case: the time of this checkout,
its spread, and for each other checkout its time divided by this one's (above 1: this checkout is faster). A star marks
outputs that differ in their bits. Cases named `more-...` are calls that no headline case covers: windows, soft caps,
few query rows.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from .cases import attention as cases
from .cases import precision, serving
from .cases.attention import AttentionCase
from .timing import summarise

ROOT = Path(__file__).resolve().parents[1]
TARGET_US = 2000
BASE = cases.PREFILL_BF16["prefill-bf16-causal-b2-s8192-h32x8-d128-p64"]
MORE: dict[str, dict[str, Any]] = {  # changes to BASE
    "more-window1024-d128": {"window_left": 1024},
    "more-window1024-d64": {"window_left": 1024, "head_dim_qk": 64, "head_dim_vo": 64},
    "more-full-window1024-d128": {"window_left": 1024, "causal": False},
    "more-cap-d128": {"soft_cap": 30.0},
    "more-cap-d64": {"soft_cap": 30.0, "head_dim_qk": 64, "head_dim_vo": 64},
    "more-d192x128": {"heads_q": 16, "heads_kv": 16, "head_dim_qk": 192},
    "more-d256": {"heads_q": 16, "heads_kv": 8, "head_dim_qk": 256, "head_dim_vo": 256},
    "more-window1024-d256": {"heads_q": 16, "heads_kv": 8, "head_dim_qk": 256, "head_dim_vo": 256, "window_left": 1024},
    "more-rows16-d128": {"q_lens": (16,) * 64, "kv_lens": (8192,) * 64},
    "more-rows16-window1024-d128": {"q_lens": (16,) * 64, "kv_lens": (8192,) * 64, "window_left": 1024},
    "more-rows16-full-d128": {"q_lens": (16,) * 64, "kv_lens": (8192,) * 64, "causal": False},
    "more-window128-d64": {"window_left": 127, "head_dim_qk": 64, "head_dim_vo": 64, "sink": 1.0},
    "more-page8-d128": {"page_size": 8},
    "more-rows1-page8-d128": {"q_lens": (1,) * 64, "kv_lens": (8192,) * 64, "page_size": 8},
    "more-rows16-d64": {"q_lens": (16,) * 64, "kv_lens": (8192,) * 64, "head_dim_qk": 64, "head_dim_vo": 64},
}
CASES = {
    **cases.PREFILL_BF16, **serving.PREFILL, **precision.PRECISION, precision.SKIP.name: precision.SKIP,
    **serving.SERVE, **cases.DECODE, **serving.DECODE,
    **{name: replace(BASE, name=name, **change) for name, change in MORE.items()},
}  # fmt: skip
# This script runs in the measured checkout, which may be an older one: it uses names that have not changed for long.
WORKER = """
import hashlib, json, sys
import torch
from bench import decode, prefill, topk
from bench.cases import attention as cases
from bench.timing import CudaClock, HostClock, input_sets
from wrappers import trtllm_batch_context_with_kv_cache as context
clock, host = CudaClock(), HostClock(torch.cuda.synchronize)
tuples = lambda x: {k: tuple(v) if isinstance(v, list) else v for k, v in x.items()}
known = {name: cases.AttentionCase(**tuples(fields)) for name, fields in json.loads(sys.argv[1]).items()}
calls, sets, found = None, 1, []
def same(inputs):
    # each checkout makes its own values and page ids: replace both, so that the bits of the results can be compared
    gen = torch.Generator("cuda").manual_seed(0)
    codes = lambda t, low, high: t.view(torch.uint8).random_(low, high, generator=gen)
    for t in (inputs["query"], *inputs["kv_cache"]):
        t.normal_(generator=gen) if t.element_size() == 2 else codes(t, 0, 256 if t.dtype == torch.uint8 else 72)
    for t in inputs.get("kv_block_scales") or ():
        codes(t, 40, 60)
    table, size = inputs["block_tables"], inputs["kv_cache"][0].shape[2]
    counts = (-(-inputs["seq_lens"] // size)).tolist()
    for row, first, count in zip(table, [sum(counts[:b]) for b in range(len(counts))], counts):
        row[:count] = torch.arange(first, first + count, device="cuda")
    return inputs
def low(case):
    # inputs of a low-precision case, or of skip-softmax, for which the data decide how many blocks are left out
    from bench import sparsity
    from bench.cases import precision
    if "skip" not in case.name:
        return same(precision.make_inputs(case, "cuda"))
    inputs = precision.concentrated(case, "cuda", "heavy-tailed")
    factor = sparsity.factor_of(0.75, sparsity.maxima_of(inputs), case.kv_lens[0])
    return inputs | {"skip_softmax_threshold_scale_factor": factor}
def plain(t):
    # the codes of an NVFP4 output
    return (t if isinstance(t, torch.Tensor) else t.data).contiguous().view(torch.uint8)
def prepare(name):
    if "topk" in name:
        inputs = [topk.make(name, "cuda", 0)] if name.startswith("host") else topk.inputs_of(name, "cuda")
        run = topk.PROVIDERS["ours"]
        out, each = run(inputs[0]), len(inputs)
        call = (lambda i: run(inputs[0])) if name.startswith("host") else topk.graph(run, inputs)
        return call, 1, 1 if name.startswith("host") else each, out
    if name == "host-prefill":
        case = prefill.host_case()
    elif name == "host-decode":
        case = cases.AttentionCase(name, q_lens=(1,), kv_lens=(64,), lse=False)
    else:
        case = known[name]
    if "decode" in name:
        count = 1 if name.startswith("host") else input_sets(decode.kv_bytes(case), 50 << 20)
        runs = [decode.ours(same(cases.make_inputs(case, "cuda", seed))) for seed in range(count)]
    elif name.startswith("prefill") and not name.startswith("prefill-bf16"):
        inputs = low(case)
        runs = [lambda: context(**inputs)]
    else:
        one = [cases.make_inputs(case, "cuda", 0)]
        every = prefill.inputs_of(case, "cuda") if name.startswith("prefill") else one
        runs = [lambda i=same(i): context(**i) for i in every]
    return (lambda i: runs[i]()), len(runs), 1, runs[0]()
for line in sys.stdin:
    want = json.loads(line)
    if "open" in want:
        calls = found = None
        torch.cuda.empty_cache()
        call, sets, each, out = prepare(want["open"])
        bits = hashlib.sha256(plain(out).cpu().numpy().tobytes()).hexdigest()
        answer, place = {"bits": bits}, 0
    else:
        order = [(place + i) % sets for i in range(want["count"])]
        place += want["count"]
        answer = {"us": (host if want["host"] else clock).measure(call, order) / each}
        torch.cuda.synchronize()
    print(">>" + json.dumps(answer), flush=True)
"""


def changed(case: AttentionCase) -> dict[str, Any]:
    """Return the fields that a case sets, so that a checkout with fewer fields can read it."""
    return {f.name: value for f in fields(case) if (value := getattr(case, f.name)) != f.default}


class Side:
    """A checkout in its own process."""

    def __init__(self, root: Path):
        command = [sys.executable, "-c", WORKER, json.dumps({name: changed(case) for name, case in CASES.items()})]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, text=True)

    def ask(self, **want: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(want) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(">>"):
                return json.loads(line[2:])
        raise RuntimeError(f"the process of a checkout ended with {self.process.wait()}")


def compare(sides: list[Side], name: str, rounds: int) -> str:
    """Return one line of the table. This checkout is the last side."""
    bits = [side.ask(open=name)["bits"] for side in sides]
    host = name.startswith("host")
    first = [min(side.ask(count=1, host=host)["us"] for _ in range(5)) for side in sides]
    count = max(1, min(100, round(TARGET_US / max(first))))
    samples: list[list[float]] = [[] for _ in sides]
    for turn in range(rounds):
        for i in range(len(sides)):
            which = (turn + i) % len(sides)
            samples[which].append(sides[which].ask(count=count, host=host)["us"])
    *others, this = map(summarise, samples)
    ratios = (f"{t.median / this.median:7.4f}{' ' if b == bits[-1] else '*'}" for t, b in zip(others, bits))
    return f"{name:48} {this.median:9.2f} {this.spread:6.1%} {' '.join(ratios)}"


def main() -> None:
    from .topk import HEADLINE, HOST_CASE

    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("others", type=Path, nargs="+", help="roots of the other checkouts; build their kernels first")
    parser.add_argument(
        "--cases", default="prefill,serve,decode,topk,host,more", help="prefixes of case names, comma-separated"
    )
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    hosts = ("host-prefill", "host-decode", HOST_CASE)
    names = [*CASES, *HEADLINE, *hosts]
    sides = [Side(root) for root in (*args.others, ROOT)]
    print(f"{'case':48} {'us':>9} {'spread':>6} {' '.join(root.name[:8].rjust(7) for root in args.others)}", flush=True)
    for name in names:
        if name.startswith(tuple(args.cases.split(","))):
            print(compare(sides, name, args.rounds), flush=True)


if __name__ == "__main__":
    main()
