"""Show which synchronisation racecheck understands: minimal kernels (`kernels.VARIANTS`), each under compute-sanitizer.

    python -m tools.sanitize.handover [VARIANT ...] [--turns 1 4] [--tool racecheck] [--option WORD ...]

Prints, for each variant and number of turns, whether the result is right and what the tool reports. Variants with a
race must be reported, the others must not; `elect` is the synchronisation of decode's reduction. A single turn has no
write after a read. Needs a GPU, torch and the DSL. `--run VARIANT` only launches the variant.
"""

import argparse
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from . import under
from .report import lines, parse


def compiled(variant: str, folder: str):
    """Return the compiled kernel of a variant, with line info."""
    import cutlass.cute as cute

    from cute_kernels import abi, build

    from . import kernels

    name = f"handover_{variant}"
    kernels.handover.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    options = f"{build.OPTIONS} --generate-line-info --dump-dir {folder}"
    return cute.compile(kernels.forward, variant, abi.stream(), *kernels.fake_args(), options=options)


def expected(variant: str, given: list[int], turns: int) -> list[int]:
    """Return the sum of the words that each thread reads, over all turns."""
    from .kernels import THREADS, WARPS

    def read(tid: int, turn: int) -> int:
        total = sum(given[(tid + 32 * w) % THREADS] + turn for w in range(WARPS))
        if variant == "same":
            total += given[(tid // 32 + 1) % WARPS * 32] + turn
        if variant == "apart":
            total += given[((tid ^ 4) + turn + 1) % THREADS]
        return total

    return [sum(read(tid, turn) for turn in range(turns)) for tid in range(THREADS)]


def launch(variant: str, turns: int) -> None:
    """Run a variant once and print whether its result is right."""
    import torch

    from .kernels import THREADS

    given = [7 * i + 1 for i in range(THREADS)]
    out = torch.zeros(THREADS, dtype=torch.int32, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        kernel = compiled(variant, folder)
        kernel(torch.tensor(given, dtype=torch.int32, device="cuda"), out, turns)
        torch.cuda.synchronize()
    print("right" if out.tolist() == expected(variant, given, turns) else "WRONG")


def check(variant: str, turns: int, args: argparse.Namespace) -> str:
    """Run a variant under the tool and return the lines to print."""
    from .kernels import VARIANTS

    program = [sys.executable, "-m", "tools.sanitize.handover", "--run", variant, "--turns", str(turns)]
    text = under.run(under.command(args.sanitizer, args.tool, args.option) + program, args.timeout)
    report = parse(text)
    result = next((line for line in text.splitlines() if line in ("right", "WRONG")), "no result")
    races = "races" if VARIANTS[variant].races and not (variant == "unfreed" and turns == 1) else "ordered"
    head = f"{variant:9} turns {turns}  {races:8} {result:9} {report.count:>6} reported   {VARIANTS[variant].what}"
    more = lines(report) if report.summary else ["the tool did not finish: " + " / ".join(text.splitlines()[-3:])]
    return "\n".join([head, *(f"    {line}" for line in more)])


def main() -> None:
    from .kernels import VARIANTS

    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tools.sanitize.handover", description=description)
    parser.add_argument("variants", nargs="*", help=f"any of {', '.join(VARIANTS)}; default: all")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--run", metavar="VARIANT", help="launch this variant, without the tool")
    under.arguments(parser)
    parser.add_argument("--tool", default="racecheck")
    args = parser.parse_args()
    if args.run:
        launch(args.run, args.turns[0])
        return
    print(under.version(args.sanitizer), flush=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        work = product(args.variants or VARIANTS, args.turns)
        for future in [pool.submit(check, variant, turns, args) for variant, turns in work]:
            print(future.result(), flush=True)


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parents[2])
    main()
