"""`cute-kernels env`: each fault of an installation is provoked, and the report names its cause and its remedy in one
screen."""

import ctypes
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from cute_kernels import bundle, catalog, env, manifest, paths
from tests.conftest import ARCH, ROOT, run_python
from tests.support import children, fake_bundle
from wrappers.host import runtime

SCREEN = 24  # lines

# Blocks torch, as if it were not installed.
NO_TORCH = """
import importlib.metadata, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
real = importlib.metadata.version
def version(name):
    if name == "torch":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
from cute_kernels import cli
sys.exit(cli.main(["env"]))
"""


class Machine(NamedTuple):
    """A machine without a fault: two GPUs, all versions, a bundle and a cache."""

    folder: Path
    bundle: Path

    def report(self) -> tuple[str, dict[str, str]]:
        """Return (the lines before the problems, cause -> remedy)."""
        lines = env.report()
        assert len(lines) <= SCREEN, "one screen"
        at = lines.index("")
        causes = [line.removeprefix("- ") for line in lines[at + 2 :: 2]]
        remedies = [line.removeprefix("  -> ") for line in lines[at + 3 :: 2]]
        count = {0: "no problem found", 1: "1 problem:"}.get(len(causes), f"{len(causes)} problems:")
        assert lines[at + 1] == count
        return "\n".join(lines[:at]), dict(zip(causes, remedies, strict=True))

    def only(self) -> tuple[str, str]:
        """Return (cause, remedy) of the only problem."""
        (problem,) = self.report()[1].items()
        return problem


@pytest.fixture
def versions(monkeypatch) -> dict[str, str]:
    """Distribution -> version, all that are installed."""
    found = {"torch": "2.13.0", "apache-tvm-ffi": "0.1.15.post2", "nvidia-cutlass-dsl": "4.8.1"}

    def version(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(env, "version", version)
    monkeypatch.setattr(paths, "has_dsl", lambda: "nvidia-cutlass-dsl" in found)
    return found


@pytest.fixture
def machine(versions, monkeypatch, tmp_path) -> Machine:
    monkeypatch.delenv("CUTE_KERNELS_JIT", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(tmp_path / "bundle"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "NVIDIA H200")
    monkeypatch.setattr(runtime, "arch_of", lambda i: ARCH)
    monkeypatch.setattr(env, "driver", lambda: fake_driver(13000))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    return Machine(tmp_path, fake_bundle.make(tmp_path / "bundle" / ARCH))


def fake_driver(number: int) -> SimpleNamespace:
    def get(pointer) -> int:
        pointer._obj.value = number
        return 0

    return SimpleNamespace(cuDriverGetVersion=get)


def test_a_machine_without_a_fault(machine):
    said, problems = machine.report()
    assert problems == {}
    for line in (
        *("torch 2.13.0", "apache-tvm-ffi 0.1.15.post2", "nvidia-cutlass-dsl 4.8.1", "JIT: allowed"),
        *(f"GPU {i}: NVIDIA H200, {ARCH}" for i in range(2)),
        f"bundle {machine.bundle}: usable, 2 kernels of {ARCH}, DSL 4.8.1, CUDA 13.0",
        f"cache {machine.folder / 'cache' / 'cute_kernels'}",
    ):
        assert f"\n{line}" in said


def test_the_ranges_are_those_of_pyproject():
    text = (ROOT / "pyproject.toml").read_text()
    for name in env.VERSIONS:
        assert f'"{env.requirement(name)[1:-1]}"' in text


def test_the_compiler_that_make_demo_installs_first_is_the_demos():
    """Otherwise the rest of the installation would replace a compiler at work."""
    text = (ROOT / "pyproject.toml").read_text()
    lists = dict(re.findall(r"^([a-z-]+) = \[\n(.*?)^\]", text, re.M | re.S))
    compiler, demo, always = (set(lists[name].split("\n")) for name in ("compiler", "demo", "dependencies"))
    assert compiler <= demo | always


# ---- distributions


def test_no_torch(machine):
    done = run_python("-c", NO_TORCH)
    assert done.returncode == 0, done.stderr
    assert "\ntorch is not installed\n" in done.stdout and "GPUs: unknown, No module named 'torch'" in done.stdout
    said = "\n- torch is not installed: no function of wrappers runs\n  -> run pip install 'torch>=2.11'\n"
    assert said in done.stdout and len(done.stdout.splitlines()) <= SCREEN


def test_a_torch_that_does_not_import(machine, monkeypatch):
    def refuse(name):
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(env, "import_module", refuse)
    cause, remedy = machine.only()
    assert cause == "torch or wrappers cannot be imported: libcudart.so.13: cannot open shared object file"
    assert "pip install --force-reinstall 'torch>=2.11'" in remedy


def test_no_ffi(machine, versions):
    versions.pop("apache-tvm-ffi")
    assert machine.only() == (
        "apache-tvm-ffi is not installed: no bundle loads",
        "run pip install 'apache-tvm-ffi>=0.1.11,<0.2'",
    )


def test_no_dsl_matters_where_no_bundle_serves(machine, versions):
    versions.pop("nvidia-cutlass-dsl")
    said, problems = machine.report()
    assert problems == {} and "\nnvidia-cutlass-dsl is not installed\n" in said
    shutil.rmtree(machine.bundle)
    problems = machine.report()[1]
    remedy = problems.pop("nvidia-cutlass-dsl, the compiler, is not installed: nothing can be compiled")
    assert "run pip install 'nvidia-cutlass-dsl[cu13]>=4.8.0,<4.9'" in remedy and "unpack a bundle" in remedy
    assert len(problems) == 1, "the bundle"


@pytest.mark.parametrize(
    ("name", "version", "wanted"),
    [
        ("torch", "2.10.0+cu130", "'torch>=2.11'"),
        ("apache-tvm-ffi", "0.1.10", "'apache-tvm-ffi>=0.1.11,<0.2'"),
        ("apache-tvm-ffi", "0.2.0", "'apache-tvm-ffi>=0.1.11,<0.2'"),
        ("nvidia-cutlass-dsl", "4.7.1", "'nvidia-cutlass-dsl[cu13]>=4.8.0,<4.9'"),
        ("nvidia-cutlass-dsl", "4.9.0", "'nvidia-cutlass-dsl[cu13]>=4.8.0,<4.9'"),
        ("nvidia-cutlass-dsl", "5.0", "'nvidia-cutlass-dsl[cu13]>=4.8.0,<4.9'"),
    ],
)
def test_a_version_outside_the_range(machine, versions, name, version, wanted):
    versions[name] = version
    assert machine.only() == (
        f"{name} {version} is outside the supported range {wanted}",
        f"run pip install {wanted}",
    )


def test_no_linker(machine, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert machine.only() == ("no C compiler on PATH: cute-kernels build cannot link a bundle", "install gcc or clang")


def test_a_setting_that_is_neither_0_nor_1(machine, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_JIT", "no")
    cause, remedy = machine.only()
    assert cause.startswith("CUTE_KERNELS_JIT: 'no', must be 0") and "unset CUTE_KERNELS_JIT" in remedy


# ---- GPUs


def test_no_driver(machine, monkeypatch):
    def none():
        return ctypes.CDLL("libcuda_of_no_machine.so.1")

    monkeypatch.setattr(env, "driver", none)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    cause, remedy = machine.only()
    assert cause.startswith("no CUDA driver, libcuda_of_no_machine.so.1: cannot open shared object file")
    assert remedy.startswith("install NVIDIA driver 580 or newer") and "--gpus all" in remedy


@pytest.mark.parametrize("asked", [False, True], ids=["no GPU", "torch refuses"])
def test_an_old_driver(machine, monkeypatch, asked):
    def refuse(i):
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr(env, "driver", lambda: fake_driver(12080))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(asked))
    monkeypatch.setattr(runtime, "arch_of", refuse)
    assert machine.only() == (
        "the CUDA driver serves CUDA 12.8, the kernels need CUDA 13",
        "install NVIDIA driver 580 or newer",
    )


def test_a_torch_without_cuda(machine, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    cause, remedy = machine.only()
    assert cause == f"torch {torch.__version__} is built without CUDA: calls run the reference on CPU tensors"
    assert remedy == "to run kernels, install a torch of CUDA 13"


def test_gpus_that_are_hidden(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    cause, remedy = machine.only()
    assert cause == "torch sees no GPU: CUDA_VISIBLE_DEVICES is ''" and remedy.startswith("unset CUDA_VISIBLE_DEVICES")


def test_a_gpu_that_torch_cannot_use(machine, monkeypatch):
    def refuse(i):
        raise RuntimeError("CUDA error: ECC")

    monkeypatch.setattr(runtime, "arch_of", refuse)
    cause, remedy = machine.only()
    assert cause == "torch cannot use the GPUs: CUDA error: ECC" and "nvidia-smi" in remedy


def test_a_gpu_that_is_not_supported(machine, monkeypatch):
    monkeypatch.setattr(runtime, "arch_of", lambda i: ("sm_80", ARCH)[i])
    cause, remedy = machine.only()
    assert cause == "GPU 0 (NVIDIA H200, sm_80) is not supported: calls on it raise NotImplementedError"
    assert remedy == f"use a GPU of {', '.join(catalog.ARCHS)}, or tensors on the CPU"


# ---- bundles


def test_no_bundle(machine):
    shutil.rmtree(machine.bundle)
    said, _ = machine.report()
    assert f"\nno bundle in {machine.folder / 'bundle'}\n" in said
    assert machine.only() == (
        f"no usable bundle of {ARCH} in {machine.folder / 'bundle'}",
        f"run cute-kernels build --arch {ARCH}, or cute-kernels unpack FILE --arch {ARCH}",
    )


@pytest.mark.parametrize("part", [0, 1, 0.5, 0.99])
@pytest.mark.parametrize("name", ["attention-0123456789ab.so", bundle.RUNTIME])
def test_a_truncated_library(machine, name, part):
    file = machine.bundle / name
    size = int(part) if part in (0, 1) else int(part * file.stat().st_size)
    os.truncate(file, size)
    said, problems = machine.report()
    what = f"{name} does not have the hash in the manifest: its {size} bytes are truncated or changed"
    assert f"\nbundle {machine.bundle}: not usable, {what}\n" in said
    assert (
        f"run cute-kernels build --arch {ARCH}, or cute-kernels unpack" in problems[f"bundle {machine.bundle}: {what}"]
    )
    assert f"no usable bundle of {ARCH} in {machine.folder / 'bundle'}" in problems


def test_a_truncated_manifest(machine):
    file = machine.bundle / manifest.FILE
    os.truncate(file, file.stat().st_size // 2)
    (cause, remedy), _ = machine.report()[1].items()
    assert cause.startswith(f"bundle {machine.bundle} cannot be read: {file}: ") and "truncated" in remedy


def edit(folder: Path, **values: object) -> None:
    """Change fields of a manifest."""
    held = vars(manifest.read(folder)) | values
    manifest.write(folder, manifest.Manifest(**held))


def test_a_bundle_of_another_architecture(machine):
    shutil.rmtree(machine.bundle)
    fake_bundle.make(machine.folder / "bundle" / "sm_100a", "sm_100a")
    said, _ = machine.report()
    assert "usable, 2 kernels of sm_100a" in said
    cause, remedy = machine.only()
    assert cause == f"no usable bundle of {ARCH} in {machine.folder / 'bundle'}; there are bundles of sm_100a"
    assert f"build --arch {ARCH}" in remedy


@pytest.mark.parametrize(
    ("change", "cause", "remedy"),
    [
        ({"host": "linux-riscv64"}, f" is for linux-riscv64 hosts, this is {manifest.HOST}", "build it on a linux-"),
        ({"arch": "sm_130a"}, " is for sm_130a, which this version does not have", "install the version of cute-kern"),
        ({"schema": 1}, " cannot be read: ", "it is truncated, or of another version: run cute-kernels build"),
        (
            {"schema": manifest.SCHEMA + 1},
            " cannot be read: ",
            "it is truncated, or of another version: run cute-kernels build",
        ),
    ],
)
def test_a_foreign_bundle(machine, change, cause, remedy):
    edit(machine.bundle, **change)
    (first, *_) = machine.report()[1].items()
    assert first[0].startswith(f"bundle {machine.bundle}{cause}") and first[1].startswith(remedy)


@pytest.mark.parametrize("stale", [1, 2])
def test_a_bundle_of_another_version(machine, stale):
    kernels = [dict(entry) for entry in manifest.read(machine.bundle).kernels]
    for entry in kernels[:stale]:
        entry["key"] = "0" * 64
    edit(machine.bundle, kernels=kernels)
    said, problems = machine.report()
    assert "compiled from other sources of cute_kernels; build it again" in said
    remedy = problems.pop(f"bundle {machine.bundle}: {stale} of 2 kernels come from another version of cute_kernels")
    assert remedy.startswith("run cute-kernels build") and "install the version that built it" in remedy
    assert len(problems) == (stale == 2), "then no kernel can be used"


# ---- folders that cannot be read or written, by a user without rights


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that all users can enter; pytest's are its user's own."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in folder.rglob("*"):
        path.chmod(0o700)
    shutil.rmtree(folder)


def as_nobody(report: Callable[[], tuple[str, dict[str, str]]]) -> str:
    return children.run(lambda: "\n".join(map(" -> ".join, report()[1].items())), children.NOBODY)


def test_a_bundle_that_cannot_be_read(machine, monkeypatch, open_folder):
    folder = open_folder / ARCH
    shutil.copytree(machine.bundle, folder)
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(open_folder))
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp")
    (folder / manifest.FILE).chmod(0o000)
    said = as_nobody(machine.report)
    assert f"bundle {folder}: cannot be read: [Errno {errno.EACCES}] Permission denied" in said
    assert f" -> let this user read it (chmod -R a+rX {folder}), or set CUTE_KERNELS_BUNDLE to" in said
    (folder / manifest.FILE).chmod(0o644)
    library = folder / "attention-0123456789ab.so"
    library.chmod(0o000)
    said = as_nobody(machine.report)
    assert f"bundle {folder}: {library.name} cannot be read: Permission denied -> let this user read it" in said
    open_folder.chmod(0o000)
    said = as_nobody(machine.report)
    assert said.count("Permission denied") == 1, "not for each architecture"
    assert f"bundle {open_folder}: cannot be read: Permission denied -> let this user" in said
    open_folder.chmod(0o755)


@pytest.mark.parametrize("made", [False, True], ids=["parent", "folder"])
def test_a_cache_that_cannot_be_written(machine, monkeypatch, open_folder, made):
    home = open_folder / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(open_folder / "bundle"))
    shutil.copytree(machine.bundle, open_folder / "bundle" / ARCH)
    for path in (open_folder / "bundle", open_folder / "bundle" / ARCH):
        path.chmod(0o755)
    if made:
        (home / "cute_kernels").mkdir(parents=True)
        home.chmod(0o755)
    place = home / "cute_kernels" if made else open_folder
    place.chmod(0o555)
    said = as_nobody(machine.report)
    cause = f"the cache {home / 'cute_kernels'} cannot be written, {place} is not writable for this user"
    remedy = "set XDG_CACHE_HOME to a folder that this user can write"
    assert said == f"{cause}: each process compiles its kernels anew -> {remedy}"
    monkeypatch.setenv("CUTE_KERNELS_JIT", "0")
    assert as_nobody(machine.report) == "", "nothing is compiled"


def test_a_user_without_a_home(machine, monkeypatch):
    """The user's id is in no list, as in many containers, and HOME is not set."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    if os.geteuid():
        monkeypatch.setattr(paths, "user_cache", lambda: None)
    monkeypatch.setenv("CUTE_KERNELS_JIT", "0")
    said = children.run(lambda: "\n".join(env.report()), children.UNKNOWN)
    cause = "this user has no home directory: no cache holds bundles or compiled kernels"
    assert "\ncache none\n" in said
    assert f"- {cause}\n  -> set XDG_CACHE_HOME to a folder that this user can write" in said


def test_a_full_disk(machine, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=(12 << 20) + 5))
    monkeypatch.setenv("TMPDIR", "/var/tmp")
    cache = machine.folder / "cache" / "cute_kernels"
    assert machine.only() == (
        f"the disk is full at {cache} (12 MB are free) and /var/tmp (12 MB are free): a build needs 400 MB",
        "free space, or set XDG_CACHE_HOME and TMPDIR to folders on another disk",
    )
