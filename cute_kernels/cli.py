"""The command `cute-kernels`, also `python -m cute_kernels`: bundles of compiled kernels, which run without the DSL
and without a compiler.

    cute-kernels build --arch sm_90a                       every shipped kernel, into the folder where lookups begin
    cute-kernels build --arch sm_90a --only 'bf16_d128*'   the kernels that match, and those already valid there
    cute-kernels list                                      the kernels of a bundle
    cute-kernels verify                                    hashes, loading, symbols
    cute-kernels show bf16_d128_causal_tma_m128n128s3r --sass
    cute-kernels env                                       versions, GPUs, bundles found here, and what is wrong

`build` and `show` need the DSL. cute_kernels/paths.py says where bundles lie."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from . import __version__, archive, build, bundle, catalog, cubin, env, manifest, paths


def command_build(args: argparse.Namespace) -> int:
    kernels = list(catalog.shipped(args.arch))
    keep = catalog.spec_type if args.only or args.spec else None
    if keep:
        chosen = {only: [kernel for kernel in kernels if catalog.matches(kernel, only)] for only in args.only}
        nothing = [
            f"--only: {only!r}, matches no shipped kernel of {args.arch}" for only, found in chosen.items() if not found
        ]
        if nothing:
            print("\n".join(nothing), file=sys.stderr)
            return 2
        kernels = [kernel for found in chosen.values() for kernel in found] + [parsed(text) for text in args.spec]
    start = time.monotonic()
    bundle_paths = bundle.BundlePaths(args.out or default(paths.bundle_folders(args.arch), "--out"), objects(args))
    try:
        built = bundle.build_bundle(kernels, args.arch, bundle_paths, args.jobs, keep)
    except KeyboardInterrupt:
        print(
            f"interrupted: {bundle_paths.out} is unchanged; compiled kernels are kept in {bundle_paths.objects}",
            file=sys.stderr,
        )
        return 130
    total = len(built.manifest.kernels)
    seconds = time.monotonic() - start
    print(
        f"{bundle_paths.out}: {total} kernels, {built.compiled} compiled, {total - built.compiled} cached, "
        f"{seconds:.1f} s"
    )
    return 0


def objects(args: argparse.Namespace) -> Path:
    return args.objects or default([home / "obj" for home in paths.homes()], "--objects")


def default(folders: list[Path], option: str) -> Path:
    if not folders:
        raise SystemExit(f"{option}: must be given, because this user has no home directory")
    return folders[0]


def parsed(text: str) -> manifest.Kernel:
    try:
        return catalog.parse(text)
    except ValueError as error:
        raise SystemExit(str(error)) from None


def existing(args: argparse.Namespace) -> Path:
    """Return the bundle that the user names, else the first usable one that a process finds, else the first one."""
    if args.out:
        return args.out
    found = paths.bundles(args.arch)
    if found:
        return next((item for item in found if not item.problem), found[0]).folder
    searched = os.pathsep.join(map(str, paths.bundle_roots()))
    raise SystemExit(f"no bundle of {args.arch} in {searched}: run cute-kernels build --arch {args.arch} to make one")


def command_list(args: argparse.Namespace) -> int:
    out = existing(args)
    try:
        found = manifest.read(out)
    except (OSError, ValueError) as error:
        print(f"no bundle at {out}: {error}", file=sys.stderr)
        return 1
    print(f"{out}: {env.content(found)}")
    for entry in found.kernels:
        print(f"{entry['op']}/{entry['name']:<60} {summary(entry)}")
    return 0


def summary(facts: dict[str, Any]) -> str:
    counts = facts["instructions"] or {}
    shown = " ".join(f"{count} {name}" for name, count in counts.items() if name != "total")
    shown = shown or (f"{counts['total']} instructions" if counts else "not disassembled")
    units = {"registers": "registers", "stack": "B stack", "shared": "B shared"}
    return ", ".join([*(f"{facts[name]} {unit}" for name, unit in units.items() if facts[name] is not None), shown])


def command_verify(args: argparse.Namespace) -> int:
    out = existing(args)
    problems = bundle.verify(out, args.arch)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    found = manifest.read(out)
    print(f"{out}: {len(found.kernels)} kernels load, hashes match")
    if any(entry["registers"] is None for entry in found.kernels):
        print(f"registers and instruction counts are unknown: run {cubin.INSTALL}, then build again")
    return 0


def command_pack(args: argparse.Namespace) -> int:
    size = archive.pack(existing(args), args.arch, args.file)
    print(f"{args.file}: {size / 2**20:.1f} MiB\nsha256 {archive.digest_of(args.file)}")
    return 0


def command_unpack(args: argparse.Namespace) -> int:
    out = args.out or default(paths.bundle_folders(args.arch), "--out")
    held = archive.unpack(args.file, out, args.arch, args.sha256)
    print(f"{out}: {env.content(held)}, hashes match")
    return 0


def command_show(args: argparse.Namespace) -> int:
    """Print the facts of one kernel; compile it now unless its object exists."""
    shipped = catalog.shipped(args.arch)
    found = [kernel for kernel in shipped if args.name in (kernel[1].name, manifest.label(*kernel))]
    if args.name.partition("=")[1]:
        found = [parsed(args.name)]
    if not found:
        close = [manifest.label(*kernel) for kernel in shipped if catalog.matches(kernel, args.name)]
        print(
            "\n".join([f"name: {args.name!r}, must be the name of a shipped kernel or OP=JSON", *close]),
            file=sys.stderr,
        )
        return 2
    op, spec = found[0]
    path = build.object_file(op, spec, args.arch, objects(args), ".ptx")
    print(
        f"{manifest.label(op, spec)} {args.arch}\nspec {manifest.canonical(manifest.to_json(spec))}\nkey  {path.stem}"
    )
    print(summary(*bundle.resources_of([path], args.arch)))
    if args.ptx:
        print(path.with_suffix(".ptx").read_text())
    if cubin.disassembler() is None:
        print(f"registers and SASS are unknown: run {cubin.INSTALL}")
    elif args.sass:
        print(cubin.sass(path.with_suffix(".cubin").read_bytes()))
    return 0


def command_env(args: argparse.Namespace) -> int:
    print("\n".join(env.report()))
    return 0


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}, must be at least 1")
    return int(text)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cute-kernels", description="Build and inspect bundles of compiled kernels.")
    parser.add_argument("--version", action="version", version=__version__)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--arch", default="sm_90a", choices=catalog.ARCHS, help="GPU architecture (default: %(default)s)"
    )
    common.add_argument("--out", type=Path, help="folder of the bundle (default: the folder where lookups begin)")
    common.add_argument(
        "--objects",
        type=Path,
        help="folder of compiled kernels, by key (default: obj/ of the checkout's build/, or of the user's cache)",
    )
    verbs = parser.add_subparsers(required=True, metavar="build | list | verify | show | pack | unpack | env")
    verb = verbs.add_parser("build", parents=[common], help="compile the missing kernels and publish a bundle")
    verb.add_argument(
        "--jobs",
        type=positive,
        default=len(os.sched_getaffinity(0)),
        help="processes that compile, at least 1 (default: %(default)s)",
    )
    verb.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="build only kernels with this part of op/name, or matching this glob; repeatable",
    )
    verb.add_argument(
        "--spec",
        action="append",
        default=[],
        metavar="OP=JSON",
        help="also build this spec, which need not be shipped; repeatable",
    )
    verb.set_defaults(run=command_build)
    verbs.add_parser("list", parents=[common], help="list the kernels of a bundle").set_defaults(run=command_list)
    verbs.add_parser(
        "verify", parents=[common], help="check the hashes, libraries and symbols of a bundle"
    ).set_defaults(run=command_verify)
    verb = verbs.add_parser("show", parents=[common], help="show the facts, PTX and SASS of one kernel")
    verb.add_argument("name", help="name of a shipped kernel, or OP=JSON")
    verb.add_argument("--ptx", action="store_true", help="print the PTX")
    verb.add_argument("--sass", action="store_true", help="print the SASS")
    verb.set_defaults(run=command_show)
    for name, run, said in (
        ("pack", command_pack, "write a bundle to one file"),
        ("unpack", command_unpack, "extract a bundle from a packed file"),
    ):
        verb = verbs.add_parser(name, parents=[common], help=said)
        verb.add_argument("file", type=Path, help="the packed file")
        verb.set_defaults(run=run)
    verb.add_argument("--sha256", metavar="HEX", help="refuse a file that has another hash, before it is read")
    verbs.add_parser(
        "env", help="print versions, GPUs, the bundles found here, and for each problem its cause and its remedy"
    ).set_defaults(run=command_env)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    if args.run in (command_build, command_show) and not paths.has_dsl():
        print(f"{env.DSL}, the compiler, is not installed: {paths.get_compiler()}", file=sys.stderr)
        return 1
    if args.run in (command_build, command_show) and (wrong := env.version_problem(env.DSL)):
        print(f"{wrong.cause}: {wrong.remedy}", file=sys.stderr)
    try:
        return args.run(args)
    except (bundle.BuildError, build.ArchMismatch, NotImplementedError, OSError) as error:
        print(f"{error}{bundle.remedy(error)}", file=sys.stderr)
        return 1
