"""Plant bugs in copies of the tree.

    python -m tests.bugs [--tree FOLDER] [--jobs N] [NAME ...]    plant each bug in a copy of the tree and run its check

Parts of a name select bugs. The exit status is the number of bugs that no check noticed.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from . import BUGS, ROOT, noticed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bugs", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", nargs="*")
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("-v", action="store_true", help="print what the checks printed")
    args = parser.parse_args()
    chosen = [bug for bug in BUGS if not args.name or any(part in bug.name for part in args.name)]
    missed = 0
    with ThreadPoolExecutor(args.jobs) as threads:
        for bug, (seen, text) in zip(chosen, threads.map(partial(noticed, tree=args.tree), chosen)):
            print(f"{'noticed' if seen else 'MISSED '} {bug.name}", flush=True)
            if args.v or not seen:
                print(text, flush=True)
            missed += not seen
    print(f"{len(chosen) - missed} of {len(chosen)} noticed")
    return missed


if __name__ == "__main__":
    sys.exit(main())
