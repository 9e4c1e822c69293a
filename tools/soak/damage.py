"""Scenarios of damaged bundles, full disks and caches that cannot be written, each in processes of its own."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import wrappers
from cute_kernels import bundle, catalog, device_code, manifest, paths
from wrappers.host import machine, runtime

from .pool import Wrong
from .probe import digest
from .scenarios import CannotRun, Soak, gpu, small

ROOT = Path(__file__).resolve().parents[2]
SMALL = "merge_states.rows/bf16_pair"  # a kernel that compiles in seconds
OTHERS = ("topk", "cache", "merge")  # families without attention
COUNT = 12
DIGEST = """
import json, sys
from tools.soak.probe import digest
print(json.dumps(digest("cuda:0", int(sys.argv[1]), int(sys.argv[2]), tuple(sys.argv[3:]))))
"""
ATTEND = """
import sys, torch, wrappers
from tools.soak.scenarios import small
def call():
    try:
        wrappers.trtllm_batch_decode_with_kv_cache(**small(torch.device("cuda:0")))
        torch.cuda.synchronize()
        return "no error"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
first = call()
if call() == "no error" and first != "no error":
    first = "no error at the second time"
print(first.replace(chr(10), " "))
"""
COMPILE = """
import sys
from cute_kernels import catalog
from wrappers import runtime
kernel = next(k for k in catalog.shipped(sys.argv[1]) if catalog.matches(k, sys.argv[2]))
try:
    print("found", callable(runtime.kernel(*kernel, sys.argv[1])))
except runtime.KernelNotFound as error:
    print(error)
"""


def run(*command: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout's root."""
    given, options = list(map(str, command)), {"capture_output": True, "text": True, "errors": "replace"}
    return subprocess.run(given, cwd=ROOT, env=os.environ | environ, timeout=240, **options)  # type: ignore[call-overload]


def python(code: str, *given: object, **environ: str) -> str:
    """Return the output of Python code in a process of its own. Raise `Wrong` if it was killed or failed."""
    ended = run(sys.executable, "-c", code, *given, **environ)
    if ended.returncode:
        raise Wrong(f"a process ended with status {ended.returncode}: {ended.stderr[-600:]}")
    return ended.stdout.strip()


def good_bundle(arch: str) -> Path:
    """Return the folder of the bundle that this process would use."""
    for folder, held, problem in paths.bundles(arch):
        if held and not problem:
            return folder
    raise CannotRun(f"no bundle of {arch}")


def linked(folder: Path, target: Path, *without: str) -> manifest.Manifest:
    """Make a folder with links to the files of a bundle, but for some, and return the bundle's manifest."""
    target.mkdir(parents=True)
    for path in folder.iterdir():
        if path.name not in (*without, manifest.FILE, ".lock") and path.is_file():
            (target / path.name).symlink_to(path)
    return manifest.read(folder)


def truncated(folder: Path, target: Path) -> Path:
    """Make a bundle with a library of attention that is cut, and return its folder."""
    held = manifest.read(folder)
    name = held.libraries["attention"]["file"]
    linked(folder, target, name)
    data = (folder / name).read_bytes()
    (target / name).write_bytes(data[: len(data) // 2])
    manifest.write(target, held)
    return target


def unloadable(folder: Path, target: Path, kernels: list[manifest.Kernel]) -> Path:
    """Make a bundle in which some kernels' device code is zeros, with the right hashes, and return its folder."""
    held = manifest.read(folder)
    library = held.libraries["attention"]
    linked(folder, target, library["file"])
    data = (folder / library["file"]).read_bytes()
    for kernel in kernels:
        entry: Any = held.find(*kernel)
        packed = device_code.pack(bytes(entry["code"]["size"]))
        data += packed
        entry["code"] = device_code.describe(packed, data)
    (target / library["file"]).write_bytes(data)
    library["sha256"] = manifest.digest(data)
    manifest.write(target, held)
    return target


class Recorder(machine.HostMachine):
    """The real machine, which notes the kernels of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[manifest.Kernel] = []

    def kernel(self, op: str, spec: Any, arch: str) -> Any:
        self.found.append((op, spec))
        return super().kernel(op, spec, arch)


def bundles(s: Soak) -> str:
    """A truncated bundle before a good one serves nothing and breaks nothing; alone it and a foreign one are named."""
    gpu(s)
    arch = runtime.arch_of(s.device)
    good = good_bundle(arch)
    want = digest("cuda:0", s.seed, COUNT)
    with tempfile.TemporaryDirectory() as top:
        cut = truncated(good, Path(top, "cut"))
        both = python(DIGEST, s.seed, COUNT, CUTE_KERNELS_BUNDLE=f"{cut}:{good}", CUTE_KERNELS_JIT="0")
        if json.loads(both.splitlines()[-1]) != want:
            raise Wrong("other bits with a truncated bundle before the good one")
        foreign = replace(linked(good, Path(top, "foreign")), arch="sm_100a")
        manifest.write(Path(top, "foreign"), foreign)
        said = []
        for name in ("cut", "foreign"):
            answer = python(ATTEND, CUTE_KERNELS_BUNDLE=str(Path(top, name)), CUTE_KERNELS_JIT="0")
            if not answer.startswith("KernelNotFound") or str(Path(top, name)) not in answer:
                raise Wrong(f"a {name} bundle: {answer}")
            said.append(f"{name}: {answer.partition(f'bundle {Path(top, name)}: ')[2].partition('   ')[0][:80]}")
    return f"{len(want)} calls behind a truncated bundle, equal bits; {'; '.join(said)}"


def unloadable_kernel(s: Soak) -> str:
    """A kernel that the driver refuses raises at each call; calls of other kernels go on."""
    gpu(s)
    arch = runtime.arch_of(s.device)
    with machine.override(Recorder()) as recorder:
        wrappers.trtllm_batch_decode_with_kv_cache(**small(s.device))
    want = digest("cuda:0", s.seed, COUNT, OTHERS)
    with tempfile.TemporaryDirectory() as top:
        folder = unloadable(good_bundle(arch), Path(top, "bundle"), recorder.found)  # type: ignore[attr-defined]
        environ = {"CUTE_KERNELS_BUNDLE": str(folder), "CUTE_KERNELS_JIT": "0"}
        found = python(f"{ATTEND}\n{DIGEST}", s.seed, COUNT, *OTHERS, **environ).splitlines()
    if found[-2].startswith("no error"):
        raise Wrong(f"a kernel of zeros: {found[-2]}")
    if json.loads(found[-1]) != want:
        raise Wrong("other bits after a kernel that did not load")
    return f"{found[-2][:120]}; then {len(want)} calls of other kernels, equal bits"


# ---- disks


def arch_of(s: Soak) -> str:
    return runtime.arch_of(s.device) if s.on_gpu else catalog.ARCHS[0]


def mounted(top: Path, options: str, *command: str, **environ: str) -> subprocess.CompletedProcess[str] | None:
    """Run a command while a file system with these options is mounted at `top`. Return None without the right to mount
    one."""
    mount = f"mount -t tmpfs -o {options} none {top}"
    if not shutil.which("unshare") or run("unshare", "-m", "sh", "-c", mount).returncode:
        return None
    return run("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *command, **environ)


def on_small_disk(top: Path, kib: int, *command: str, **environ: str) -> tuple[int, str, str]:
    """Run a command while `top` is a file system of a size, or without the right to mount one, with a limit of the size
    of files. Return its status, its output, and which of the two it was."""
    how, ended = "a full file system", mounted(top, f"size={kib}k", *command, **environ)
    if ended is None:
        how = "a limit of the size of files"
        ended = run("sh", "-c", f'ulimit -f {2 * kib} && exec "$@"', "sh", *command, **environ)
    return ended.returncode, ended.stdout + ended.stderr, how


def disk(s: Soak) -> str:
    """A build and a call that compiles, on a disk that is full: both name the disk; with space the build succeeds."""
    if not paths.has_dsl():
        raise CannotRun("needs the DSL, which compiles")
    arch, build = arch_of(s), [sys.executable, "-m", "cute_kernels", "build", "--only", SMALL, "--jobs", "1"]
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder, "disk")
        top.mkdir()
        build += ["--arch", arch, "--out", f"{top}/bundle", "--objects", f"{top}/obj"]
        status, said, how = on_small_disk(top, 24, *build)
        if status != 1 or how == "a full file system" and bundle.FULL_DISK not in said:
            raise Wrong(f"a build with {how} ended with status {status}: {said[-600:]}")
        if "Traceback" in said:
            raise Wrong(f"a build with {how} ended in a traceback: {said[-600:]}")
        if (top / "bundle" / manifest.FILE).exists():
            raise Wrong("a build that failed published a bundle")
        environ = {"CUTE_KERNELS_BUNDLE": f"{top}/none", "XDG_CACHE_HOME": str(top), "TMPDIR": folder}
        status, said, how = on_small_disk(top, 24, sys.executable, "-c", COMPILE, arch, SMALL, **environ)
        if how == "a full file system" and (status or "cannot be compiled into" not in said):
            raise Wrong(f"a call with {how} ended with status {status}: {said[-600:]}")
        ended = run(*build)
        if ended.returncode or bundle.verify(top / "bundle", arch):
            raise Wrong(f"a build with space failed: {ended.stderr[-600:]}")
    return f"with {how}: the build ended with status 1, the call named the disk; with space the build was right"


def read_only_cache(s: Soak) -> str:
    """A cache that cannot be written: a kernel compiles for its process alone."""
    if not paths.has_dsl():
        raise CannotRun("needs the DSL, which compiles")
    with tempfile.TemporaryDirectory() as folder:
        top, command = Path(folder, "cache"), [sys.executable, "-c", COMPILE, arch_of(s), SMALL]
        top.mkdir()
        environ = {"CUTE_KERNELS_BUNDLE": f"{folder}/none", "XDG_CACHE_HOME": str(top)}
        how, ended = "a read-only file system", mounted(top, "ro", *command, **environ)
        if ended is None:
            how = "a file in place of the folder"
            top.rmdir()
            top.write_text("")
            ended = run(*command, **environ)
        if ended.stdout.strip() != "found True":
            raise Wrong(f"with {how}: {ended.stdout[-300:]} {ended.stderr[-300:]}")
    return f"with {how}, the kernel compiled and loaded"
