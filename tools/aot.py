"""Ahead-of-time builds: bundles of compiled kernels that run where no DSL and no compiler is installed.

    python -m tools.aot build --arch sm_90a                     every shipped kernel, into build/bundle/sm_90a
    python -m tools.aot build --arch sm_90a --only 'bf16_d128*' what matches, and what is valid there already
    python -m tools.aot list                                    what a bundle holds
    python -m tools.aot verify                                  hashes, loading, symbols
    python -m tools.aot show bf16_d128_causal_paged_m128n128s3r --sass

The process that runs kernels finds bundles by CUTE_KERNELS_BUNDLE; see wrappers/runtime.py.
"""

import argparse
import json
import os
import signal
import sys
import time
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

from cute_kernels import build, manifest
from cute_kernels.attention import dispatch as attention
from cute_kernels.topk import dispatch as topk

from . import bundle, inspect

BUILD = manifest.build_folder()
FAMILIES = {"attention": attention, "topk": topk}  # operator family -> dispatch
ARCHS = ("sm_90a", "sm_100a", "sm_103a")


def shipped(arch: str) -> list[bundle.Kernel]:
    return [kernel for dispatch in FAMILIES.values() for kernel in dispatch.shipped(arch)]


def spec_type(op: str) -> Any:
    """What manifest.from_json makes specs of `op` as."""
    return import_module(f"cute_kernels.{op}").Spec


def matches(kernel: bundle.Kernel, pattern: str) -> bool:
    """pattern: part of `op/name`, or a glob over all of it or over the name."""
    label = manifest.label(*kernel)
    return pattern in label or fnmatchcase(label, pattern) or fnmatchcase(kernel[1].name, pattern)


def parse_spec(text: str) -> bundle.Kernel:
    """`attention.sm90={"dtype": "bf16", ...}`: fields that are left out take their defaults."""
    op, _, spec = text.partition("=")
    try:
        return op, manifest.from_json(spec_type(op), json.loads(spec))
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise SystemExit(f"--spec wants OP=JSON of a spec: {error!r}") from error


def command_build(args: argparse.Namespace) -> int:
    kernels = shipped(args.arch)
    keep = spec_type if args.only or args.spec else None
    if keep:
        kernels = [kernel for kernel in kernels if any(matches(kernel, pattern) for pattern in args.only)]
        kernels += [parse_spec(text) for text in args.spec]
    if not kernels:
        print(f"no shipped kernel of {args.arch} matches {' '.join(args.only)}", file=sys.stderr)
        return 2
    start = time.monotonic()
    try:
        built = bundle.build_bundle(kernels, args.arch, bundle.Place(args.out, args.objects), args.jobs, keep)
    except bundle.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted: {args.out} is as it was, what was compiled is kept in {args.objects}", file=sys.stderr)
        return 130
    total = len(built.manifest.kernels)
    seconds = time.monotonic() - start
    print(f"{args.out}: {total} kernels, {built.compiled} compiled, {total - built.compiled} cached, {seconds:.1f} s")
    return 0


def command_list(args: argparse.Namespace) -> int:
    try:
        found = manifest.read(args.out)
    except (FileNotFoundError, ValueError) as error:
        print(f"no bundle: {error}", file=sys.stderr)
        return 1
    toolchain = found.toolchain
    print(f"{args.out}: {found.arch}, DSL {toolchain['dsl']}, CUDA {toolchain['cuda']}, {len(found.kernels)} kernels")
    for entry in found.kernels:
        print(f"{entry['op']}/{entry['name']:<60} {summary(entry)}")
    return 0


def summary(facts: dict[str, Any]) -> str:
    counts = facts["instructions"] or {}
    shown = " ".join(f"{count} {name}" for name, count in counts.items() if name != "total") or "not disassembled"
    return f"{facts['registers']} registers, {facts['stack']} B stack, {facts['shared']} B shared, {shown}"


def command_verify(args: argparse.Namespace) -> int:
    problems = bundle.verify(args.out, args.arch)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    found = manifest.read(args.out)
    print(f"{args.out}: {len(found.kernels)} kernels load, hashes match")
    if any(entry["registers"] is None for entry in found.kernels):
        print(f"registers and instruction counts are unknown: {inspect.INSTALL}, then build again")
    return 0


def command_show(args: argparse.Namespace) -> int:
    """Facts of one kernel, compiled now unless its object exists."""
    found = [kernel for kernel in shipped(args.arch) if args.name in (kernel[1].name, manifest.label(*kernel))]
    if args.name.partition("=")[1]:
        found = [parse_spec(args.name)]
    if not found:
        close = [manifest.label(*kernel) for kernel in shipped(args.arch) if matches(kernel, args.name)]
        print("\n".join([f"no shipped kernel is called {args.name}", *close]), file=sys.stderr)
        return 2
    op, spec = found[0]
    path = build.object_file(op, spec, args.arch, args.objects)
    print(
        f"{manifest.label(op, spec)} {args.arch}\nspec {manifest.canonical(manifest.to_json(spec))}\nkey  {path.stem}"
    )
    print(summary(bundle.facts_of(path)))
    if args.ptx:
        print(path.with_suffix(".ptx").read_text())
    if inspect.disassembler() is None:
        print(f"no registers, no SASS: {inspect.INSTALL}")
    elif args.sass:
        print(inspect.sass(path.with_suffix(".cubin").read_bytes()))
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.aot", description=__doc__.split("\n")[0] if __doc__ else "")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--arch", default="sm_90a", choices=ARCHS)
    common.add_argument("--out", type=Path, help="the bundle's folder (build/bundle/ARCH)")
    common.add_argument("--objects", type=Path, default=BUILD / "obj", help="cache of compiled kernels (build/obj)")
    verbs = parser.add_subparsers(required=True, metavar="build | list | verify | show")
    verb = verbs.add_parser("build", parents=[common], help="compile what is missing and publish a bundle")
    verb.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    verb.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="part or glob of op/name; repeatable"
    )
    verb.add_argument("--spec", action="append", default=[], metavar="OP=JSON", help="a spec that is not shipped")
    verb.set_defaults(run=command_build)
    verbs.add_parser("list", parents=[common], help="kernels of a bundle").set_defaults(run=command_list)
    verbs.add_parser("verify", parents=[common], help="check a bundle").set_defaults(run=command_verify)
    verb = verbs.add_parser("show", parents=[common], help="facts, PTX and SASS of one kernel")
    verb.add_argument("name", help="a shipped kernel's name, or OP=JSON")
    verb.add_argument("--ptx", action="store_true")
    verb.add_argument("--sass", action="store_true")
    verb.set_defaults(run=command_show)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    args.out = args.out or BUILD / "bundle" / args.arch
    return args.run(args)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... show | head` ends quietly
    sys.exit(main())
