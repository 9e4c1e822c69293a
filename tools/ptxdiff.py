"""Compare the PTX of the shipped kernels of two checkouts; kernel names may differ.

    python -m tools.ptxdiff dump build/ptx/before --root ../other-checkout
    python -m tools.ptxdiff dump build/ptx/now --only 'bf16_d128*' --jobs 2
    python -m tools.ptxdiff compare build/ptx/before build/ptx/now --lines 20

`dump` writes <folder>/<op>/<name>.ptx from the objects in that checkout's build/obj, and compiles the missing ones.
`compare` pairs kernels by their normalised text, so names may differ. For a kernel without an equal one, it counts the
lines that differ from the kernel with the closest name. The exit status is 1 if a kernel of the first folder has no
equal in the second.
"""

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# This script runs in the dumped checkout, which may be an older one: it uses names that have not changed for long.
WORKER = """
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from cute_kernels import build
from cute_kernels.catalog import shipped
folder, arch, only, share, shares = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
objects = Path("build/obj")
objects.mkdir(parents=True, exist_ok=True)
def matches(op, name):
    return only in f"{op}/{name}" or fnmatchcase(f"{op}/{name}", only) or fnmatchcase(name, only)
for op, spec in [kernel for kernel in shipped(arch) if matches(kernel[0], kernel[1].name)][share::shares]:
    text = build.object_file(op, spec, arch, objects).with_suffix(".ptx").read_text()
    target = folder / op / f"{spec.name}.ptx"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    print(f"{op}/{spec.name}", flush=True)
"""


def dump(folder: Path, root: Path, arch: str, only: str, jobs: int) -> int:
    """Write the PTX of the shipped kernels of the checkout `root` that match `only`. Return 1 if a kernel failed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", WORKER, str(folder.resolve()), arch, only]
    # -c puts the working directory first on the path: the modules are those of `root`
    workers = [
        subprocess.Popen([*command, str(share), str(jobs)], cwd=root, env={**os.environ, "CUTE_DSL_ARCH": arch})
        for share in range(jobs)
    ]
    statuses = [worker.wait() for worker in workers]
    return int(any(statuses))


def normalise(ptx: str) -> str:
    """Remove everything from PTX that is not code: names of kernels and parameters, comments, blank lines, files and
    line numbers."""
    ptx = re.sub(r"/\*.*?\*/", "", ptx, flags=re.DOTALL)
    ptx = re.sub(r"//.*", "", ptx)
    for index, name in enumerate(dict.fromkeys(re.findall(r"\.(?:entry|func)\b[^({;]*?([\w$]+)\s*\(", ptx))):
        ptx = re.sub(rf"(?<![\w$]){re.escape(name)}(?=_param_|(?![\w$]))", f"kernel{index}", ptx)
    lines = (re.sub(r"\s+", " ", line).strip() for line in ptx.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith((".file", ".loc")))


def read(folder: Path) -> dict[str, str]:
    """Return `<op>/<name>` -> normalised PTX of the files that `dump` wrote."""
    return {
        path.relative_to(folder).with_suffix("").as_posix(): normalise(path.read_text())
        for path in sorted(folder.glob("*/*.ptx"))
    }


def closest(label: str, others: list[str]) -> str | None:
    """Return the label of `others` with the kernel name most similar to that of `label`; the op only breaks ties."""

    def likeness(other: str) -> tuple[float, float]:
        names = difflib.SequenceMatcher(None, label.partition("/")[2], other.partition("/")[2])
        return names.ratio(), difflib.SequenceMatcher(None, label, other).ratio()

    return max(others, key=likeness, default=None)


def differing(one: str, other: str) -> list[str]:
    """Return the lines that only one of the texts has (`< line`, `> line`), from the program diff."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("one", "other")]
        for path, text in zip(paths, (one, other), strict=True):
            path.write_text(text + "\n")
        done = subprocess.run(["diff", "--speed-large-files", *map(str, paths)], capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if line.startswith(("< ", "> "))]


def compare(before: dict[str, str], after: dict[str, str], lines: int) -> int:
    """Print the kernels of `before` without an equal in `after`, with `lines` lines of each difference. Return the exit
    status."""
    texts = set(after.values())
    lost = [label for label, text in before.items() if text not in texts]
    known = set(before.values())
    new = [label for label, text in after.items() if text not in known]
    equal = len(before) - len(lost)
    print(f"{equal} of {len(before)} kernels have an equal, {len(lost)} have none, {len(new)} are new")
    for label in lost:
        other = closest(label, new or list(after))
        if other is None:
            print(f"{label}: nothing to compare with")
            continue
        found = differing(before[label], after[other])
        print(f"{label}: {len(found)} of {before[label].count(chr(10)) + 1} lines differ from {other}")
        print("".join(f"    {line}\n" for line in found[:lines]), end="")
    return int(bool(lost))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.ptxdiff", description=(__doc__ or "").split("\n")[0])
    verbs = parser.add_subparsers(required=True, dest="verb")
    verb = verbs.add_parser("dump", help="write the PTX of shipped kernels")
    verb.add_argument("folder", type=Path)
    verb.add_argument(
        "--root", type=Path, default=Path(__file__).resolve().parents[1], help="a checkout; default: this one"
    )
    verb.add_argument("--arch", default="sm_90a")
    verb.add_argument("--only", default="", metavar="PATTERN", help="part or glob pattern of op/name")
    verb.add_argument("--jobs", type=int, default=1, help="number of processes")
    verb = verbs.add_parser("compare", help="list the kernels of A without an equal in B")
    verb.add_argument("a", type=Path)
    verb.add_argument("b", type=Path)
    verb.add_argument("--lines", type=int, default=0, help="number of lines printed of each difference")
    args = parser.parse_args(argv)
    if args.verb == "dump":
        return dump(args.folder, args.root, args.arch, args.only, args.jobs)
    before, after = read(args.a), read(args.b)
    if not before or not after:
        print(f"no .ptx in {args.a if not before else args.b}", file=sys.stderr)
        return 2
    return compare(before, after, args.lines)


if __name__ == "__main__":
    sys.exit(main())
