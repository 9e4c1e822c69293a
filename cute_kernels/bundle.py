"""Build a bundle: the kernels of one architecture as shared libraries that run without the DSL.

    <bundle>/manifest.json                 written last: names, keys, hashes and resources of everything below
    <bundle>/<family>-<12 hex>.so          one library per operator family; the digits are a hash of its kernels' keys.
                                           Behind its end lies the device code, compressed (`device_code`)
    <bundle>/libcute_dsl_runtime.so        NVIDIA's runtime library, copied from the DSL; found by RUNPATH $ORIGIN
    <objects>/<key>.host and others        one compiled kernel each, see `build.object_file`; shared by all bundles

Kernels compile in processes, never in threads. A file of a published bundle is never rewritten, only replaced by
one with another name. So a build that is interrupted at any point leaves the old bundle or the new one, both
valid. There is one exception: a DSL of another version brings another runtime library under the same name. Between its
replacement and that of the manifest the hashes differ, so that nothing loads until the next build.

This module only builds and verifies. A process finds and loads the kernels of a bundle in wrappers/host/runtime.py."""

import errno
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, TextIO

from . import build, cubin, device_code, manifest
from .manifest import Kernel, Manifest

RUNTIME = "libcute_dsl_runtime.so"
LICENCE = (
    "copying {source} into the bundle: this is NVIDIA software under the licence of the CUTLASS DSL; read the licence "
    "before you pass the bundle on: https://docs.nvidia.com/cutlass/latest/media/docs/pythonDSL/license.html"
)
FULL_DISK = (
    "the disk is full: free space, or name folders on another disk with --out and --objects, and with TMPDIR; "
    "a build needs 400 MB"
)
UNWRITABLE = "this user may not write there: name other folders with --out and --objects, or set XDG_CACHE_HOME"
SUFFIXES = (".o", ".host", ".code", ".cubin", ".ptx", ".mlir", ".shared", ".facts")  # files of an object
UNUSED_DAYS = 14  # objects not used for this long are deleted
TOGETHER = 24  # kernels per run of the disassembler

SpecType = Callable[[str], Any]  # op -> type of its specs, for manifest.from_json


class BuildError(RuntimeError):
    """The build published nothing; the message says what to do."""


@dataclass(frozen=True)
class Item:
    """A kernel that is to be in a bundle."""

    op: str
    spec: Any
    key: str
    symbol: str

    @property
    def family(self) -> str:
        return self.op.split(".")[0]


@dataclass(frozen=True)
class BundlePaths:
    """The folder of a bundle, and the folder of the objects from which it is linked."""

    out: Path
    objects: Path


@dataclass(frozen=True)
class Built:
    """The result of a build."""

    manifest: Manifest
    compiled: int  # kernels that had no cached object


def remedy(error: BaseException | None) -> str:
    """Return what a user can do about an error of the file system, as a line of its own, or an empty text."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"\n{FULL_DISK}"
    return f"\n{UNWRITABLE}" if number in (errno.EACCES, errno.EPERM, errno.EROFS) else ""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Progress:
    """A bar on a terminal, a line per kernel elsewhere."""

    def __init__(self, total: int, out: TextIO = sys.stderr):
        self.total, self.out, self.done, self.start = total, out, 0, time.monotonic()

    def step(self, text: str) -> None:
        self.done += 1
        spent = time.monotonic() - self.start
        left = spent / self.done * (self.total - self.done)
        width = 30
        bar = "#" * (width * self.done // self.total)
        line = f"[{bar:<{width}}] {self.done}/{self.total} {left:4.0f} s left  {text}"
        if self.out.isatty():
            columns = shutil.get_terminal_size().columns - 1
            print(
                f"\r{line[:columns]:<{columns}}", end="" if self.done < self.total else "\n", file=self.out, flush=True
            )
        else:
            print(line, file=self.out, flush=True)


def start_worker() -> None:
    """Initialise a worker process: it exits when the builder ends. Otherwise workers outlive a builder that was
    killed. Garbage is collected seldom: cycles are few, and looking for them took a twentieth of a worker's time."""
    gc.set_threshold(50_000, 20, 20)

    def watch() -> None:
        parent = parent_process()
        if parent:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def compile_one(op: str, spec: Any, arch: str, objects: Path) -> str:
    """Compile a kernel in a worker process, and return the key of its object."""
    return build.object_file(op, spec, arch, objects, ".host").stem


def resources_of(paths: list[Path], arch: str) -> list[dict[str, Any]]:
    """Return `cubin.resources` of objects. They are kept in a file beside each object, with the opcodes that were
    counted."""
    kept = {path: cached_resources(path) for path in paths}
    found = {path: resources for path, resources in kept.items() if resources is not None}
    unknown = [path for path in paths if path not in found]
    cubins = [path.with_suffix(".cubin").read_bytes() for path in unknown]
    shared = [json.loads(path.with_suffix(".shared").read_text()) for path in unknown]
    for path, resources in zip(unknown, cubin.resources(cubins, shared, arch) if unknown else (), strict=True):
        found[path] = resources
        if cubin.disassembler() is not None:
            text = manifest.canonical({"counted": cubin.COUNTED, "facts": resources})
            manifest.write_atomic(path.with_suffix(".facts"), text.encode())
    return [found[path] for path in paths]


def cached_resources(path: Path) -> dict[str, Any] | None:
    file = path.with_suffix(".facts")
    kept = json.loads(file.read_text()) if file.exists() else {}
    return kept["facts"] if kept.get("counted") == list(cubin.COUNTED) else None


def use(path: Path) -> bool:
    """Return whether an object exists, with its resources if they can be read, and mark it as used for `prune`."""
    try:
        os.utime(path.with_suffix(".ptx"))
    except FileNotFoundError:
        return False
    return path.exists() and (cubin.disassembler() is None or path.with_suffix(".facts").exists())


def compile_missing(items: list[Item], arch: str, objects: Path, jobs: int) -> int:
    """Compile the items without an object, in `jobs` processes, and return their number.

    Raise BuildError with every kernel that failed; the objects of the others are kept."""
    missing = [item for item in items if not use(objects / f"{item.key}.host")]
    if not missing:
        return 0
    failed: list[str] = []
    advice: dict[str, None] = {}
    progress = Progress(len(missing))
    os.environ["CUTE_DSL_ARCH"] = arch  # inherited by the workers, which import the DSL after it is set
    workers = min(jobs, len(missing))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=start_worker) as pool:
        tasks = {pool.submit(compile_one, item.op, item.spec, arch, objects): item for item in missing}
        try:
            for task in as_completed(tasks):
                item, error = tasks[task], task.exception()
                name = manifest.label(item.op, item.spec)
                if error is not None:
                    failed.append(f"{name}: {type(error).__name__}: {error}")
                    advice[remedy(error)] = None
                elif task.result() != item.key:
                    failed.append(f"{name}: the sources of cute_kernels changed during the build; run it again")
                progress.step(name)
            if not failed:
                paths = [objects / f"{item.key}.host" for item in missing]
                shares = [paths[i : i + TOGETHER] for i in range(0, len(paths), TOGETHER)]
                list(pool.map(resources_of, shares, [arch] * len(shares)))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    if failed:
        raise BuildError(
            f"{len(failed)} of {len(missing)} kernels failed to compile, so no bundle was published:\n"
            + "\n".join(failed)
            + "".join(advice)
        )
    return len(missing)


def describe(item: Item, resources: dict[str, Any], objects: Path, library: bytes) -> dict[str, Any]:
    """Return the manifest entry of a compiled kernel. library: the content of its library."""
    path = objects / f"{item.key}.host"
    return {
        "op": item.op,
        "spec": manifest.to_json(item.spec),
        "name": item.spec.name,
        "symbol": item.symbol,
        "key": item.key,
        "library": item.family,
        "object_sha256": manifest.digest(path.read_bytes()),
        "code": device_code.describe(path.with_suffix(".code").read_bytes(), library),
        **resources,
    }


def link(items: list[Item], bundle_paths: BundlePaths, libraries: list[str]) -> dict[str, str]:
    """Link the items' host code to one shared library, as NVIDIA documents it, and append their device code, unless
    the library exists. Return {file, sha256}."""
    name = f"{items[0].family}-{manifest.digest(manifest.canonical([i.key for i in items]).encode())[:12]}.so"
    target = bundle_paths.out / name
    if not target.exists():
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise BuildError("no linker on PATH: install a C compiler (cc, gcc or clang)")
        temporary = bundle_paths.out / f".tmp-{name}"
        objects = [bundle_paths.objects / item.key for item in items]
        host = [str(path.with_suffix(".host")) for path in objects]
        command = [compiler, "-shared", "-o", str(temporary), *host, *libraries]
        command += ["-Wl,-rpath,$ORIGIN", "-Wl,--enable-new-dtags", "-Wl,-z,defs", "-Wl,--strip-all"]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                full = f"\n{FULL_DISK}" if os.strerror(errno.ENOSPC) in done.stderr else ""
                raise BuildError(f"linking {name} failed:\n{done.stderr}{full}")
            with open(temporary, "ab") as file:
                file.writelines(path.with_suffix(".code").read_bytes() for path in objects)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    return {"file": name, "sha256": manifest.digest(target.read_bytes())}


def copy_runtime(source: Path, out: Path) -> dict[str, str]:
    """Copy the DSL's runtime library into the bundle. Return {file, sha256}."""
    data = source.read_bytes()
    sha = manifest.digest(data)
    target = out / RUNTIME
    if not target.exists() or manifest.digest(target.read_bytes()) != sha:
        say(LICENCE.format(source=source))
        manifest.write_atomic(target, data)
    return {"file": RUNTIME, "sha256": sha}


def still_valid(out: Path, arch: str, spec_type: SpecType, toolchain: dict[str, Any]) -> list[Kernel]:
    """Return the kernels of the bundle at `out` that the present sources and toolchain would compile again."""
    try:
        old = manifest.read(out)
    except (OSError, ValueError):
        return []
    kept = []
    for entry in old.kernels if old.problem(arch) is None else []:
        try:
            spec = manifest.from_json(spec_type(entry["op"]), entry["spec"])
        except (AttributeError, ImportError, TypeError, ValueError):  # an op or a spec that these sources do not have
            continue
        if manifest.key(entry["op"], spec, arch, toolchain) == entry["key"]:
            kept.append((entry["op"], spec))
    return kept


def build_bundle(
    kernels: Iterable[Kernel], arch: str, bundle_paths: BundlePaths, jobs: int, keep: SpecType | None = None
) -> Built:
    """Make the bundle at `bundle_paths` hold exactly `kernels`; with `keep`, also the kernels that are still valid
    in it.

    Raise BuildError if a kernel failed to compile or a library to link; the old bundle then stays."""
    build.use_arch(arch)
    toolchain = build.toolchain()
    bundle_paths.objects.mkdir(parents=True, exist_ok=True)
    with manifest.locked(bundle_paths.out / ".lock", lambda: say("waiting for another build of this bundle")):
        wanted = dict.fromkeys([*kernels, *(still_valid(bundle_paths.out, arch, keep, toolchain) if keep else ())])
        items = [item_of(op, spec, arch, toolchain) for op, spec in wanted]
        items.sort(key=lambda item: item.symbol)
        if not items:
            raise BuildError("kernels: none, must be at least one kernel to build")
        compiled = compile_missing(items, arch, bundle_paths.objects, jobs)
        result = publish(items, arch, toolchain, bundle_paths)
        prune(bundle_paths, result)
    return Built(result, compiled)


def item_of(op: str, spec: Any, arch: str, toolchain: dict[str, Any]) -> Item:
    key = manifest.key(op, spec, arch, toolchain)
    return Item(op, spec, key, manifest.symbol(op, spec, key))


def publish(items: list[Item], arch: str, toolchain: dict[str, Any], bundle_paths: BundlePaths) -> Manifest:
    """Link the libraries, copy the runtime, and then write the manifest. All objects must exist."""
    libraries = build.runtime_libraries()
    runtime = next(Path(lib) for lib in libraries if Path(lib).name == RUNTIME)
    families = sorted({item.family for item in items})
    linked = {f: link([i for i in items if i.family == f], bundle_paths, libraries) for f in families}
    content = {f: (bundle_paths.out / lib["file"]).read_bytes() for f, lib in linked.items()}
    resources = resources_of([bundle_paths.objects / f"{item.key}.host" for item in items], arch)
    result = Manifest(
        arch=arch,
        toolchain=toolchain,
        runtime=copy_runtime(runtime, bundle_paths.out),
        libraries=linked,
        kernels=[
            describe(item, known, bundle_paths.objects, content[item.family]) for item, known in zip(items, resources)
        ],
    )
    manifest.write(bundle_paths.out, result)
    return result


def prune_folder(out: Path, current: Manifest) -> None:
    """Delete the files that the manifest of a bundle does not name: libraries and temporary files of earlier builds."""
    named = {lib["file"] for lib in current.libraries.values()}
    for path in [*out.glob("*.so"), *out.glob(".tmp-*")]:
        if re.search(r"-[0-9a-f]{12}\.so$|^\.tmp-", path.name) and path.name not in named:
            path.unlink()
    shutil.rmtree(out / "cubin", ignore_errors=True)  # written by schema 1


def prune(bundle_paths: BundlePaths, current: Manifest) -> None:
    """Delete the files that no manifest names, and the objects that were unused for UNUSED_DAYS."""
    prune_folder(bundle_paths.out, current)
    oldest = time.time() - UNUSED_DAYS * 86400
    for path in bundle_paths.objects.glob("*.ptx"):
        if unused(path, oldest):
            with manifest.locked(path.with_suffix(".lock")):  # another build may have used it just now
                for suffix in SUFFIXES if unused(path, oldest) else ():
                    path.with_suffix(suffix).unlink(missing_ok=True)


def unused(path: Path, since: float) -> bool:
    return path.exists() and path.stat().st_mtime < since


def verify(out: Path, arch: str) -> list[str]:
    """Return the problems of a bundle: files with a wrong hash, libraries that do not load, symbols that do not
    resolve, device code that cannot be unpacked."""
    try:
        found = manifest.read(out)
    except (OSError, ValueError) as error:
        return [f"no bundle at {out}: {error}"]
    problem = found.problem(arch)
    if problem:
        return [f"{out} {problem}"]
    files = [found.runtime, *found.libraries.values()]
    problems = [said for file in files if (said := manifest.file_problem(out, file))]
    if problems:
        return problems
    import tvm_ffi

    for family, file in found.libraries.items():
        try:
            module = tvm_ffi.load_module(out / file["file"])
        except Exception as error:  # the library is unusable, whatever the loader raises
            problems.append(f"{file['file']} does not load: {error}")
            continue
        for entry in (entry for entry in found.kernels if entry["library"] == family):
            if not module.implements_function(entry["symbol"]):
                problems.append(f"{file['file']} lacks {entry['symbol']}")
                continue
            try:
                device_code.load(out / file["file"], entry)
            except (OSError, ValueError) as error:
                problems.append(f"{file['file']}: {error}")
    return problems
