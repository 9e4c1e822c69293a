"""The package as a user has it: what a wheel holds, the command `cute-kernels`, the places and names that it uses."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

import cute_kernels
import wrappers
from cute_kernels import bundle, catalog, cli, manifest, ops, places
from cute_kernels.attention import dispatch
from tests.conftest import ARCH, BLOCK_DSL, ROOT, finish, run_python
from wrappers import runtime

OP, SPEC = dispatch.shipped(ARCH)[0]
OBJECTS = ROOT / "build" / "obj"

# ---- places and settings


@pytest.fixture
def no_settings(monkeypatch, tmp_path) -> Path:
    """No variable of ours is set, and the user's cache is a folder in tmp_path."""
    monkeypatch.delenv("CUTE_KERNELS_BUNDLE", raising=False)
    monkeypatch.delenv("CUTE_KERNELS_JIT", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cute_kernels"


def test_a_checkout_builds_in_its_own_folder_and_finds_the_cache_too(no_settings):
    assert places.homes() == [ROOT / "build", no_settings]
    assert places.bundle_roots() == [ROOT / "build" / "bundle", no_settings / "bundle"]


@pytest.mark.parametrize("project", [None, '[project]\nname = "of-a-user"\n'])
def test_an_installed_package_uses_the_cache(no_settings, monkeypatch, tmp_path, project):
    """Also where it was installed into a folder (pip install --target) that has another pyproject.toml."""
    if project:
        (tmp_path / "pyproject.toml").write_text(project)
    monkeypatch.setattr(manifest, "PACKAGE", tmp_path / "cute_kernels")
    assert places.homes() == [no_settings]


@pytest.mark.parametrize("chosen", [False, True])
def test_a_build_goes_where_lookups_begin(no_settings, monkeypatch, tmp_path, chosen):
    if chosen:
        monkeypatch.setenv("CUTE_KERNELS_BUNDLE", f"{tmp_path / 'first'}{os.pathsep}{tmp_path / 'second'}")
    asked = []

    def build_bundle(kernels, arch, place, *_):
        asked.append(place.out)
        raise bundle.BuildError("enough")

    monkeypatch.setattr(bundle, "build_bundle", build_bundle)
    assert cli.main(["build", "--arch", "sm_100a"]) == 1
    assert asked == [tmp_path / "first" / "sm_100a" if chosen else ROOT / "build" / "bundle" / "sm_100a"]
    assert asked == places.bundle_folders("sm_100a")[:1]


@pytest.mark.parametrize("setting", ["", "yes", "false", "2", " 0"])
def test_jit_is_0_or_1(no_settings, monkeypatch, tmp_path, capsys, setting):
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(tmp_path))
    monkeypatch.setenv("CUTE_KERNELS_JIT", setting)
    with pytest.raises(ValueError, match=rf"^CUTE_KERNELS_JIT is '{setting}'; it can be 0 .* or 1 "):
        runtime.kernel(OP, SPEC, ARCH)
    assert cli.main(["env"]) == 0
    assert f"JIT: CUTE_KERNELS_JIT is '{setting}'" in capsys.readouterr().out


def test_jit_0_forbids(no_settings, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_JIT", "0")
    assert places.why_no_jit() == "forbidden by CUTE_KERNELS_JIT=0"
    monkeypatch.setenv("CUTE_KERNELS_JIT", "1")
    assert places.why_no_jit() == (None if find_spec("cutlass") else "nvidia-cutlass-dsl is not installed")


@pytest.mark.parametrize("verb", ["list", "verify"])
def test_no_bundle_is_said_with_the_command_that_builds_one(no_settings, monkeypatch, tmp_path, verb):
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(tmp_path / "none"))
    with pytest.raises(SystemExit, match=f"no bundle of {ARCH} in {tmp_path}/none: cute-kernels build --arch {ARCH}"):
        cli.main([verb])


def test_env_names_gpus_and_their_architectures(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"NVIDIA H20{i}")
    monkeypatch.setattr(runtime, "arch_of", {0: "sm_90a", 1: "sm_100a"}.get)
    assert cli.main(["env"]) == 0
    assert "\nGPU 0: NVIDIA H200, sm_90a\nGPU 1: NVIDIA H201, sm_100a\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["build"], ["show", SPEC.name]])
def test_what_compiles_names_what_is_missing(monkeypatch, capsys, command):
    monkeypatch.setattr(places, "find_spec", lambda name: None)
    assert cli.main(command) == 1
    assert "nvidia-cutlass-dsl, which compiles, is not installed" in capsys.readouterr().err


def test_a_summary_tells_what_was_counted():
    facts = {"registers": 40, "stack": 0, "shared": 1024}
    for counts, said in (({"HMMA": 8, "total": 90}, "8 HMMA"), ({"total": 90}, "90 instructions"), (None, "not dis")):
        assert f"40 registers, 0 B stack, 1024 B shared, {said}" in cli.summary(facts | {"instructions": counts})


# ---- names


def test_ops_are_the_functions_of_wrappers():
    assert ops.__all__ == wrappers.__all__
    for name in wrappers.__all__:
        assert getattr(ops, name) is getattr(wrappers, name), name


def test_ops_names_a_module_that_hides_wrappers(tmp_path):
    (tmp_path / "wrappers.py").write_text("raise RuntimeError('foreign code runs')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = run_python("-c", "import cute_kernels.ops", cwd=tmp_path, PYTHONPATH=path)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: the module wrappers is {tmp_path}/wrappers.py, which hides"), done.stderr
    assert str(ROOT / "wrappers" / "__init__.py") in last


@pytest.mark.parametrize("file", ["/elsewhere/wrappers.py", None])
def test_ops_names_a_module_that_was_imported(monkeypatch, file):
    other = ModuleType("wrappers")
    other.__file__ = file
    monkeypatch.setitem(sys.modules, "wrappers", other)
    ours = ROOT / "wrappers" / "__init__.py"
    with pytest.raises(ImportError, match=f"wrappers is {file or 'a folder without'}.* hides {ours}"):
        ops._require(ours)


# ---- a wheel, outside the checkout

MINIMUM = 77  # of setuptools, as pyproject.toml has it


def why_no_wheel() -> str | None:
    try:
        old = int(version("setuptools").split(".")[0]) < MINIMUM
    except PackageNotFoundError:
        old = True
    if old or not find_spec("pip"):
        return f"needs pip and setuptools {MINIMUM}"
    return None if find_spec("cutlass") else "nvidia-cutlass-dsl is not installed"


class Installed:
    """A virtual environment that holds the wheel; what this depends on it finds where the tests' Python does."""

    def __init__(self, folder: Path):
        self.wheel = make_wheel(folder)
        self.folder, self.elsewhere, self.cache = folder / "venv", folder / "elsewhere", folder / "cache"
        self.elsewhere.mkdir()
        (self.elsewhere / "sitecustomize.py").write_text(BLOCK_DSL)  # for processes that have it on their path
        python = str(self.folder / "bin" / "python")
        for command in (
            ["-m", "venv", "--without-pip", str(self.folder)],
            ["-m", "pip", "--python", python, "install", "--no-deps", "--no-index", str(self.wheel)],
        ):
            done = run_python(*command)
            assert done.returncode == 0, done.stderr
        (self.site,) = self.folder.glob("lib/python3*/site-packages")
        # plain lines: the editable installation of this checkout, a line of code, is not among what they bring
        roots = {str(Path(find_spec(name).origin).parents[1]) for name in ("torch", "numpy", "tvm_ffi", "cutlass")}
        (self.site / "dependencies.pth").write_text("\n".join(sorted(roots)) + "\n")

    def start(self, *command: str, dsl: bool = False, **env: str) -> subprocess.Popen[str]:
        """Start a program of the environment, outside the checkout; dsl: it can be imported, and JIT is allowed."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("CUTE_", "PYTHON"))}
        ours |= {"XDG_CACHE_HOME": str(self.cache), "CUDA_VISIBLE_DEVICES": ""} | env
        if not dsl:
            ours |= {"PYTHONPATH": str(self.elsewhere), "CUTE_KERNELS_JIT": "0"}
        program, *arguments = command
        pipe = subprocess.PIPE
        where = {"cwd": self.elsewhere, "env": ours, "stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True}
        return subprocess.Popen([str(self.folder / "bin" / program), *arguments], **where)

    def run(self, *command: str, dsl: bool = False, **env: str) -> str:
        """What a program says that succeeds."""
        done = finish(self.start(*command, dsl=dsl, **env))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def make_wheel(folder: Path) -> Path:
    """The wheel of a copy of the tree, by the hook that pip calls, without an index."""
    tree = folder / "tree"
    for name in ("cute_kernels", "wrappers", "tools", "bench"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    hook = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = run_python("-c", hook, str(folder), cwd=tree)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Installed:
    reason = why_no_wheel()
    if reason:
        pytest.skip(reason)
    return Installed(tmp_path_factory.mktemp("installed"))


@pytest.mark.kernels
def test_a_wheel_holds_the_packages_and_what_describes_them(installed):
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = wheel.namelist()
        (metadata,) = (wheel.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    info = f"cute_kernels-{cute_kernels.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"cute_kernels", "wrappers", info}
    tree = {f.relative_to(ROOT).as_posix() for p in ("cute_kernels", "wrappers") for f in (ROOT / p).rglob("*.py")}
    assert tree | {"cute_kernels/py.typed", "wrappers/py.typed", f"{info}/licenses/LICENSE"} <= set(names)
    assert f"\nVersion: {cute_kernels.__version__}\n" in metadata and "\n# cute_kernels\n" in metadata
    assert "Requires-Dist: apache-tvm-ffi<0.2,>=0.1.11\n" in metadata
    assert 'Requires-Dist: nvidia-cutlass-dsl[cu13]<4.9,>=4.8.0; extra == "build"\n' in metadata


# Finds no kernel, says so, waits until one was built, and finds it.
FIND = """
import logging, sys
import cute_kernels, wrappers
from cute_kernels import ops
from cute_kernels.attention import dispatch
from wrappers import runtime
op, spec = dispatch.shipped("sm_90a")[0]
print(cute_kernels.__file__, wrappers.__file__)
try:
    runtime.kernel(op, spec, "sm_90a")
except runtime.KernelNotFound as error:
    print(str(error).replace(chr(10), "; "), flush=True)
sys.stdin.readline()
logging.basicConfig(stream=sys.stdout, level="INFO", format="%(name)s %(message)s")
found = runtime.kernel(op, spec, "sm_90a")
assert runtime.kernel(op, spec, "sm_90a") is found and ops.xqa is wrappers.xqa
assert not [name for name in sys.modules if name.split(".")[0] in ("cutlass", "nvidia_cutlass_dsl")]
"""


@pytest.mark.kernels
def test_an_installed_package_builds_and_finds_bundles(installed):
    """What the error of an absent kernel says is run, and the process that waits finds what was built."""
    process = installed.start("python", "-c", FIND)
    files, error = process.stdout.readline().split(), process.stdout.readline()
    assert files == [str(installed.site / name / "__init__.py") for name in ("cute_kernels", "wrappers")]
    assert f"no compiled kernel {OP}/{SPEC.name} for {ARCH}" in error
    command = re.search(r"installed: (python -m cute_kernels build .*)", error)
    assert command, error
    said = installed.run(*shlex.split(command[1]), "--objects", str(OBJECTS), dsl=True)
    folder = installed.cache / "cute_kernels" / "bundle" / ARCH
    assert said.startswith(f"{folder}: 1 kernels")
    out, err = process.communicate("go\n")
    assert process.returncode == 0, err
    loaded = rf"cute_kernels {OP}/{SPEC.name} for {ARCH}: loaded from the bundle {folder}, \d+\.\d{{4}} s"
    assert re.fullmatch(loaded, out.strip())

    assert f"{OP}/{SPEC.name}" in installed.run("cute-kernels", "list")
    assert f"{folder}: 1 kernels load, hashes match" in installed.run("cute-kernels", "verify")
    said = installed.run("cute-kernels", "env")
    assert f"cute-kernels {cute_kernels.__version__} in {installed.site / 'cute_kernels'}\n" in said
    assert f"bundle {folder}: usable, 1 kernels of {ARCH}, DSL " in said
    assert "JIT: forbidden by CUTE_KERNELS_JIT=0" in said
    for line in (r"Python \d", r"torch \d", r"apache-tvm-ffi \d", r"nvidia-cutlass-dsl \d", "GPUs: torch sees none$"):
        assert re.search(f"^{line}", said, re.MULTILINE), said

    file = installed.site / "cute_kernels" / "attention" / "mask.py"
    text = file.read_text()
    file.write_text(text + "changed = 1\n")
    try:
        code = f"from cute_kernels import cli, places; print(*map(cli.usable, places.bundles('{ARCH}')))"
        assert installed.run("python", "-c", code).startswith(f"not usable, 1 kernels of {ARCH}, DSL ")
    finally:
        file.write_text(text)


def test_version_of_the_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == cute_kernels.__version__


def test_shipped_kernels_are_named_by_the_catalog():
    """Every label finds its kernel alone, a glob of an op all of it, and a spec's JSON the spec."""
    shipped = catalog.shipped(ARCH)
    exact = [kernel for kernel in shipped if catalog.matches(kernel, f"{OP}/{SPEC.name}")]
    assert exact == [(OP, SPEC)]
    assert catalog.parse(f"{OP}={manifest.canonical(manifest.to_json(SPEC))}") == (OP, SPEC)
    for text in (OP, f"{OP}=[]", 'attention.none={"q": "bf16"}', f'{OP}={{"heads": 8}}'):
        with pytest.raises(ValueError, match="a spec is OP=JSON"):
            catalog.parse(text)
