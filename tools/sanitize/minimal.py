"""Minimal kernels behind the excuses of `report.EXPECTED`: each has one way of ordering that a tool does not see, and a
twin that differs in nothing else and that the tool sees.

    python -m tools.sanitize.minimal [--tool racecheck] [--sanitizer PATH]

prints for each variant whether its result is right without the tool, and what the tool's summary says. Needs a GPU,
torch and the DSL.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels import abi, build
from cute_kernels.device import pipeline

from . import report
from .__main__ import BARRIERS, ROOT, sanitizer_path

LANES, TURNS, ID = 32, 4, 10


class Variant(NamedTuple):
    """tool: that looks at it. seen: whether the tool sees its order, and reports nothing. meaning: how it orders."""

    tool: str
    seen: bool
    meaning: str


VARIANTS = {
    "barrier_apart": Variant("synccheck", False, "two warps wait at a barrier in two places, a third one arrives"),
    "barrier_together": Variant("synccheck", True, "they wait in one place"),
    "one_arrives": Variant("racecheck", False, "a warp reads and synchronises, one lane arrives, another warp writes"),
    "all_arrive": Variant("racecheck", True, "every lane arrives"),
    "shuffled": Variant("racecheck", False, "lanes read a word and shuffle what they read; then one lane writes it"),
    "synchronised": Variant("racecheck", True, "they synchronise as well before the word is written"),
    "named_arrives": Variant("racecheck", False, "a warp reads and arrives at a named barrier, the writer waits"),
    "named_waits": Variant("racecheck", True, "both wait at the named barrier"),
}  # fmt: skip


def fake_args():
    """Return given (32,) int32 and out (64,) int32."""
    return [abi.tensor(Int32, (None,), align=4), abi.tensor(Int32, (None,), align=4)]


@cute.jit
def forward(variant: cutlass.Constexpr, stream, given, out):
    kernel(variant, given, out).launch(grid=[1, 1, 1], block=[4 * LANES, 1, 1], stream=stream)


@cute.jit
def arrive(barrier, every: cutlass.Constexpr):
    cute.arch.sync_warp()
    if const_expr(every):
        cute.arch.mbarrier_arrive(barrier)
    elif cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def meet(variant: cutlass.Constexpr, words, given, out):
    """Warps 0 and 1 wait for a word of warp 2."""
    warp, tid = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.thread_idx()[0]
    if warp == 2:
        if cute.arch.lane_idx() == 0:
            words[0] = given[0]
        cute.arch.barrier_arrive(barrier_id=ID, number_of_threads=3 * LANES)
    elif const_expr(variant == "barrier_together"):
        if warp < 2:
            cute.arch.barrier(barrier_id=ID, number_of_threads=3 * LANES)
            out[tid] = words[0] * (1 - warp) + (words[0] + given[1]) * warp
    elif warp == 0:
        cute.arch.barrier(barrier_id=ID, number_of_threads=3 * LANES)
        out[tid] = words[0]
    elif warp == 1:
        cute.arch.barrier(barrier_id=ID, number_of_threads=3 * LANES)
        out[tid] = words[0] + given[1]


@cute.jit
def shuffle(variant: cutlass.Constexpr, words, given, out):
    """One warp counts in a word of shared memory."""
    lane = cute.arch.lane_idx()
    if cute.arch.warp_idx() == 0:
        if lane == 0:
            words[0] = given[0]
        cute.arch.sync_warp()
        total = Int32(0)
        for turn in cutlass.range(TURNS, unroll=1):
            total = cute.arch.shuffle_sync(words[0] + lane, turn) + 1
            if const_expr(variant == "synchronised"):
                cute.arch.sync_warp()
            if lane == 0:
                words[0] = total
            cute.arch.sync_warp()
        out[lane] = total


@cute.jit
def hand_over(variant: cutlass.Constexpr, words, p, given, out):
    """Warp 0 writes a word per lane, warp 1 reads the word of another lane, in turns."""
    lane, warp, total = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx()), Int32(0)
    for turn in cutlass.range(TURNS, unroll=1):
        if warp == 0:
            pipeline.producer_acquire(p, turn)
            words[lane] = given[lane]
            arrive(pipeline.full_barrier(p, turn), True)
        elif warp == 1:
            pipeline.consumer_wait(p, turn)
            total += words[(lane + 5) % LANES]
            arrive(pipeline.empty_barrier(p, turn), const_expr(variant == "all_arrive"))
    if warp == 1:
        out[lane] = total


@cute.jit
def take_turns(variant: cutlass.Constexpr, words, given, out):
    """Warp 0 writes a word per lane, warp 1 reads the word of another lane, in turns that named barriers order."""
    lane, warp, total = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx()), Int32(0)
    for _ in cutlass.range(TURNS, unroll=1):
        if warp == 0:
            words[lane] = given[lane]
            cute.arch.barrier(barrier_id=ID, number_of_threads=2 * LANES)
            cute.arch.barrier(barrier_id=ID + 1, number_of_threads=2 * LANES)
        elif warp == 1:
            cute.arch.barrier(barrier_id=ID, number_of_threads=2 * LANES)
            total += words[(lane + 5) % LANES]
            if const_expr(variant == "named_arrives"):
                cute.arch.barrier_arrive(barrier_id=ID + 1, number_of_threads=2 * LANES)
            else:
                cute.arch.barrier(barrier_id=ID + 1, number_of_threads=2 * LANES)
    if warp == 1:
        out[lane] = total


@cute.kernel
def kernel(variant: cutlass.Constexpr, given: cute.Tensor, out: cute.Tensor):
    smem = cutlass.utils.SmemAllocator()
    words = smem.allocate_tensor(Int32, cute.make_layout(LANES), 16)
    p = pipeline.make(smem, 1, LANES, 1 if variant == "one_arrives" else LANES)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    if const_expr(variant.startswith("barrier")):
        meet(variant, words, given, out)
    elif const_expr(variant in ("shuffled", "synchronised")):
        shuffle(variant, words, given, out)
    elif const_expr(variant.startswith("named")):
        take_turns(variant, words, given, out)
    else:
        hand_over(variant, words, p, given, out)


def expected(variant: str, given: list[int]) -> list[int]:
    """Return the elements of out that a variant writes."""
    if variant.startswith("barrier"):
        return [given[0]] * LANES + [given[0] + given[1]] * LANES
    if variant in ("shuffled", "synchronised"):
        return [given[0] + sum(turn + 1 for turn in range(TURNS))] * LANES
    return [TURNS * given[(lane + 5) % LANES] for lane in range(LANES)]


def compiled(variant: str, folder: str):
    """Return the compiled kernel of a variant."""
    kernel.set_name_prefix(f"minimal_{variant}", remove_cutlass_symbol=True, keep_mangled_name=False)
    return cute.compile(forward, variant, abi.stream(), *fake_args(), options=f"{build.OPTIONS} --dump-dir {folder}")


def launch(variant: str) -> None:
    """Run a variant once and print whether its result is right."""
    import torch

    given = [7 * i + 1 for i in range(LANES)]
    out = torch.zeros(2 * LANES, dtype=torch.int32, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        compiled(variant, folder)(torch.tensor(given, dtype=torch.int32, device="cuda"), out)
        torch.cuda.synchronize()
    want = expected(variant, given)
    print("right" if out[: len(want)].tolist() == want else "WRONG")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.sanitize.minimal", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--tool", nargs="+", default=["racecheck", "synccheck"])
    parser.add_argument("--sanitizer", default=sanitizer_path(), help="path of compute-sanitizer")
    parser.add_argument("--out", type=Path, help="folder for the outputs")
    parser.add_argument("--run", choices=VARIANTS, help="launch this variant, without the tool")
    args = parser.parse_args()
    if args.run:
        launch(args.run)
        return 0
    print(subprocess.run([args.sanitizer, "--version"], capture_output=True, text=True).stdout.strip(), flush=True)
    for name, variant in VARIANTS.items():
        if variant.tool not in args.tool:
            continue
        program = [sys.executable, "-m", "tools.sanitize.minimal", "--run", name]
        plain = subprocess.run(program, cwd=ROOT, text=True, capture_output=True)
        result = next((word for word in ("right", "WRONG") if word in plain.stdout.split()), "no result")
        tooled = [args.sanitizer, "--tool", variant.tool, "--kernel-name", "regex=minimal_", *BARRIERS, *program]
        ended = subprocess.run(tooled, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        found = report.SUMMARY.findall(ended.stdout)
        count = found[-1] if found else "no summary"
        print(f"{name:17} {variant.tool:9} {result:9} {count:>10} reported   {variant.meaning}", flush=True)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"{variant.tool}-{name}.txt").write_text(ended.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
