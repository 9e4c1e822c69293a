"""The command `cute-kernels`, also `python -m cute_kernels`: bundles of compiled kernels, which run without the DSL
and without a compiler.

    cute-kernels build --arch sm_90a                       every shipped kernel, into the folder where lookups begin
    cute-kernels build --arch sm_90a --only 'bf16_d128*'   the kernels that match, and those already valid there
    cute-kernels list                                      the kernels of a bundle
    cute-kernels verify                                    hashes, loading, symbols
    cute-kernels show bf16_d128_causal_tma_m128n128s3r --sass
    cute-kernels env                                       versions, GPUs, and the bundles that a process here finds

`build` and `show` need the DSL. cute_kernels/paths.py says where bundles lie."""

import argparse
import os
import platform
import sys
import time
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from . import __version__, archive, build, bundle, catalog, cubin, manifest, paths
from .paths import FoundBundle


def command_build(args: argparse.Namespace) -> int:
    kernels = catalog.shipped(args.arch)
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
    print(f"{out}: {content(found)}")
    for entry in found.kernels:
        print(f"{entry['op']}/{entry['name']:<60} {summary(entry)}")
    return 0


def content(held: manifest.Manifest) -> str:
    return f"{len(held.kernels)} kernels of {held.arch}, DSL {held.toolchain['dsl']}, CUDA {held.toolchain['cuda']}"


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
    print(f"{args.file}: {size / 2**20:.1f} MiB")
    return 0


def command_unpack(args: argparse.Namespace) -> int:
    out = args.out or paths.bundle_folders(args.arch)[0]
    held = archive.unpack(args.file, out, args.arch)
    print(f"{out}: {content(held)}, hashes match")
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
    path = build.object_file(op, spec, args.arch, objects(args))
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
    """Print the versions, GPUs and bundles with which a process of this Python runs kernels. A part that is missing
    is reported; it is no error."""
    print(f"cute-kernels {__version__} in {manifest.PACKAGE}")
    print(f"Python {platform.python_version()}, {manifest.HOST}")
    for name in ("torch", "apache-tvm-ffi", "nvidia-cutlass-dsl"):
        print(f"{name} {installed(name)}")
    print("\n".join(gpus()))
    found: dict[Path, FoundBundle] = {}
    for arch in catalog.ARCHS:
        for item in paths.bundles(arch):  # a folder that is itself a bundle is found for every architecture
            if item.folder not in found or item.problem is None:
                found[item.folder] = item
    for item in found.values():
        print(f"bundle {item.folder}: {usable(item)}")
    if not found:
        print(f"no bundle in {os.pathsep.join(map(str, paths.bundle_roots()))}")
    try:
        print(f"JIT: {paths.why_no_jit() or 'allowed'}")
    except ValueError as error:
        print(f"JIT: {error}")
    return 0


def installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "is not installed"


def gpus() -> list[str]:
    """Return a line for each GPU that torch sees, with its architecture."""
    try:
        import_module("cute_kernels.ops")  # it raises if another module is called wrappers
        import torch

        from wrappers import runtime

        archs = [runtime.arch_of(i) for i in range(torch.cuda.device_count())]
        names = [torch.cuda.get_device_name(i) for i in range(len(archs))]
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # from a library, a driver or torch
        return [f"GPUs: unknown, {error}"]
    lines = [
        f"GPU {i}: {name}, {arch}{'' if arch in catalog.ARCHS else ': no kernels for it'}"
        for i, (name, arch) in enumerate(zip(names, archs))
    ]
    return lines or ["GPUs: torch sees none"]


def usable(found: FoundBundle) -> str:
    """Return how much of a bundle the installed sources can use."""
    held = found.manifest
    if held is None or found.problem:
        return f"not usable, {found.problem}"
    valid = len(bundle.still_valid(found.folder, held.arch, catalog.spec_type, held.toolchain))
    if valid == len(held.kernels):
        return f"usable, {content(held)}"
    which = f"{valid} of its kernels usable" if valid else "not usable"
    return f"{which}, {content(held)}: compiled from other sources of cute_kernels; build it again"


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
    verbs.add_parser("env", help="print versions, GPUs, the bundles found, and whether JIT is allowed").set_defaults(
        run=command_env
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    if args.run in (command_build, command_show) and not paths.has_dsl():
        print(
            "nvidia-cutlass-dsl, the compiler, is not installed: run pip install cute-kernels[build]", file=sys.stderr
        )
        return 1
    try:
        return args.run(args)
    except (bundle.BuildError, build.ArchMismatch, NotImplementedError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
