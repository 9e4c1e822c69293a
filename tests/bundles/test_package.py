"""The package as a user has it: what a wheel holds, the command `cute-kernels`, the places and names that it uses."""

import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import cute_kernels
import wrappers
from cute_kernels import build, bundle, catalog, cli, manifest, ops, paths
from cute_kernels.attention import dispatch
from tests.conftest import ARCH, BLOCK_DSL, ROOT, finish, run_python
from tests.support.fake_bundle import TOOLCHAIN
from wrappers.host import runtime

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
    assert paths.homes() == [ROOT / "build", no_settings]
    assert paths.bundle_roots() == [ROOT / "build" / "bundle", no_settings / "bundle"]


@pytest.mark.parametrize("project", [None, b'[project]\nname = "of-a-user"\n', b"# caf\xe9\n"])
def test_an_installed_package_uses_the_cache(no_settings, monkeypatch, tmp_path, project):
    """Also where it was installed into a folder (pip install --target) that has another pyproject.toml."""
    if project:
        (tmp_path / "pyproject.toml").write_bytes(project)
    monkeypatch.setattr(manifest, "PACKAGE", tmp_path / "cute_kernels")
    assert paths.homes() == [no_settings]


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
    assert asked == paths.bundle_folders("sm_100a")[:1]


@pytest.mark.parametrize("setting", ["yes", "false", "2", " 0"])
def test_jit_is_0_or_1(no_settings, monkeypatch, tmp_path, capsys, setting):
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(tmp_path))
    monkeypatch.setenv("CUTE_KERNELS_JIT", setting)
    with pytest.raises(ValueError, match=rf"^CUTE_KERNELS_JIT: '{setting}', must be 0 .* or 1 "):
        runtime.kernel(OP, SPEC, ARCH)
    assert cli.main(["env"]) == 0
    assert f"JIT: CUTE_KERNELS_JIT: '{setting}', must be" in capsys.readouterr().out


def test_jit_0_forbids(no_settings, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_JIT", "0")
    assert paths.why_no_jit() == "forbidden by CUTE_KERNELS_JIT=0"
    for allowed in ("1", ""):
        monkeypatch.setenv("CUTE_KERNELS_JIT", allowed)
        assert paths.why_no_jit() == (None if find_spec("cutlass") else "nvidia-cutlass-dsl is not installed")


@pytest.mark.parametrize("verb", ["list", "verify"])
def test_no_bundle_is_said_with_the_command_that_builds_one(no_settings, monkeypatch, tmp_path, verb):
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(tmp_path / "none"))
    with pytest.raises(SystemExit, match=f"no bundle of {ARCH} in {tmp_path}/none: run cute-kernels build "):
        cli.main([verb])


@pytest.mark.parametrize("command", [["build"], ["show", SPEC.name]])
def test_what_compiles_names_what_is_missing(monkeypatch, capsys, command):
    monkeypatch.setattr(paths, "find_spec", lambda name: None)
    assert cli.main(command) == 1
    assert "nvidia-cutlass-dsl, the compiler, is not installed" in capsys.readouterr().err


# ---- what users get wrong


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["build", "--jobs", "0"], "--jobs: 0, must be at least 1"),
        (["build", "--spec", "attention.decode={}"], "spec: attention.decode does not support {}: out bf16"),
        (["show", "attention.sm90={}"], "spec: attention.sm90 does not support {}: tile None"),
        (
            ["build", "--only", SPEC.name, "--only", "none1", "--only", "none2"],
            f"'none1', .* {ARCH}\n--only: 'none2', ",
        ),
        (["build", "--out", "/dev/null"], "/dev/null"),
        (["list", "--out", "/dev/null"], "no bundle at /dev/null: "),
        (["verify", "--out", "/dev/null"], "no bundle at /dev/null: "),
        (
            ["build", "--arch", "sm_100a", "--objects", "/dev/null"],
            "cannot compile for sm_100a: CUTE_DSL_ARCH is sm_90a",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_of_users_are_told_without_a_traceback(monkeypatch, capsys, command, said):
    monkeypatch.setattr(paths, "has_dsl", lambda: True)
    monkeypatch.setattr(build, "toolchain", lambda: {})
    monkeypatch.setenv("CUTE_DSL_ARCH", ARCH)
    try:
        status, error = cli.main(command), ""
    except SystemExit as end:
        status, error = (1, end.code) if isinstance(end.code, str) else (end.code, "")  # as the interpreter does
    assert status in (1, 2) and re.search(said, error or capsys.readouterr().err.strip())


def test_a_bundle_that_cannot_be_used_does_not_hide_the_next(no_settings, monkeypatch, tmp_path, capsys):
    broken, good = tmp_path / "broken" / ARCH, tmp_path / "good" / ARCH
    for folder in (broken, good):
        folder.mkdir(parents=True)
    (broken / manifest.FILE).write_text("{")
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(tmp_path / "broken"))
    assert cli.main(["list"]) == 1 and f"no bundle at {broken}: " in capsys.readouterr().err
    manifest.write(good, manifest.Manifest(ARCH, TOOLCHAIN, {}, EMPTY, []))
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", f"{tmp_path / 'broken'}{os.pathsep}{tmp_path / 'good'}")
    assert cli.main(["list"]) == 0 and capsys.readouterr().out.startswith(f"{good}: 0 kernels")


# ---- libraries that do not load

EMPTY = {"file": bundle.RUNTIME, "sha256": manifest.digest(b"")}
LIBRARY = {"file": "attention.so", "sha256": manifest.digest(b"")}


@pytest.fixture
def bundle_of_one(no_settings, monkeypatch, tmp_path):
    """Make the bundle `name` of SPEC, whose library is an empty file; loaded: as if that had been loaded."""
    monkeypatch.setattr(runtime, "_MODULES", {})
    monkeypatch.setattr(runtime, "_BROKEN", {})
    monkeypatch.setattr(runtime.device_code, "load", lambda library, entry: None)
    monkeypatch.setenv("CUTE_KERNELS_JIT", "0")

    def make(name: str, loaded: bool) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in (EMPTY, LIBRARY):
            (folder / file["file"]).touch()
        key = manifest.key(OP, SPEC, ARCH, TOOLCHAIN)
        code = {"offset": 0, "packed": 0, "size": 0, "sha256": ""}
        entry = {"op": OP, "key": key, "library": "attention", "symbol": "of_spec", "code": code}
        manifest.write(folder, manifest.Manifest(ARCH, TOOLCHAIN, {"attention": LIBRARY}, EMPTY, [entry]))
        if loaded:
            runtime._MODULES[folder / "attention.so"] = SimpleNamespace(get_function=lambda symbol: symbol)
        return folder

    return make


def test_a_library_that_does_not_load_hides_nothing(bundle_of_one, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("cute_kernels"), "warning", lambda text, *args: said.append(text % args))
    broken, good = bundle_of_one("broken", False), bundle_of_one("good", True)
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", f"{broken}{os.pathsep}{good}")
    assert runtime._obtain(OP, SPEC, ARCH) == "of_spec"
    (text,) = said
    assert text.startswith(f"bundle {broken}: attention.so does not load: ") and "file too short" in text
    monkeypatch.setenv("CUTE_KERNELS_BUNDLE", str(broken))
    with pytest.raises(runtime.KernelNotFound, match=f"bundle {broken}: attention.so does not load: "):
        runtime._obtain(OP, SPEC, ARCH)


def test_a_library_that_a_build_replaces_is_looked_for_again(bundle_of_one, monkeypatch):
    """Between reading a manifest and loading: the second manifest names what is there."""
    folders = [bundle_of_one("before", False), bundle_of_one("after", True)]
    read = iter(folders)
    monkeypatch.setattr(paths, "bundles", lambda arch: [paths.FoundBundle(f := next(read), manifest.read(f), None)])
    assert runtime._from_bundles(OP, SPEC, ARCH) == ("of_spec", f"loaded from the bundle {folders[1]}")


# ---- the cache of objects


@pytest.fixture
def old_object(tmp_path, monkeypatch) -> bundle.Item:
    """An item whose object was not used for longer than objects are kept."""
    item = bundle.Item(OP, SPEC, "0" * 64, "symbol")
    for suffix in (".host", ".ptx", ".facts"):
        (tmp_path / f"{item.key}{suffix}").touch()
        os.utime(tmp_path / f"{item.key}{suffix}", (0, 0))
    return item


NONE = manifest.Manifest(ARCH, TOOLCHAIN, {}, EMPTY, [])


def test_a_build_keeps_the_objects_it_used(old_object, tmp_path):
    place = bundle.BundlePaths(tmp_path / "out", tmp_path)
    assert bundle.compile_missing([old_object], ARCH, tmp_path, 1) == 0
    bundle.prune(place, NONE)
    assert (tmp_path / f"{old_object.key}.host").exists()
    os.utime(tmp_path / f"{old_object.key}.ptx", (0, 0))
    bundle.prune(place, NONE)
    assert not list(tmp_path.glob(f"{old_object.key}.[hpf]*"))


def test_an_object_that_another_build_takes_meanwhile_is_kept(old_object, tmp_path, monkeypatch):
    path = tmp_path / f"{old_object.key}.ptx"

    @contextmanager
    def locked(lock):
        assert lock == path.with_suffix(".lock")
        os.utime(path)  # by the process that had the lock
        yield

    monkeypatch.setattr(manifest, "locked", locked)
    bundle.prune(bundle.BundlePaths(tmp_path / "out", tmp_path), NONE)
    assert path.exists()


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
    try:  # find_spec("pip") would make a later import of setuptools fail
        fits = version("pip") and int(version("setuptools").split(".")[0]) >= MINIMUM
    except PackageNotFoundError:
        fits = False
    if not fits:
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
        """Return the output of a program, which must succeed."""
        done = finish(self.start(*command, dsl=dsl, **env))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def tracked() -> list[str]:
    """Return the files that git tracks; skips where this is no checkout."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("needs a git checkout")
    done = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).exists()]


def run_hook(name: str, tree: Path, out: Path) -> Path:
    """Run a hook that pip calls, without an index: build_wheel or build_sdist; return the file that it makes."""
    hook = f"import sys; from setuptools import build_meta; print(build_meta.{name}(sys.argv[1]))"
    done = run_python("-c", hook, str(out), cwd=tree)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def make_wheel(folder: Path) -> Path:
    """Make the wheel of a copy of the tree."""
    tree = folder / "tree"
    for name in ("cute_kernels", "wrappers", "tools", "bench", "examples"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree)
    return run_hook("build_wheel", tree, folder)


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
        (entries,) = (wheel.read(name).decode() for name in names if name.endswith(".dist-info/entry_points.txt"))
    info = f"cute_kernels-{cute_kernels.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"cute_kernels", "wrappers", info}
    tree = {f.relative_to(ROOT).as_posix() for p in ("cute_kernels", "wrappers") for f in (ROOT / p).rglob("*.py")}
    assert tree | {"cute_kernels/py.typed", "wrappers/py.typed", f"{info}/licenses/LICENSE"} <= set(names)
    assert f"\nVersion: {cute_kernels.__version__}\n" in metadata and "\n# cute_kernels\n" in metadata
    assert "Requires-Dist: apache-tvm-ffi<0.2,>=0.1.11\n" in metadata
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        assert f"[{group}]\ncute_kernels = wrappers.integrations.plugins:" in entries
    assert 'Requires-Dist: nvidia-cutlass-dsl[cu13]<4.9,>=4.8.0; extra == "build"\n' in metadata


@pytest.mark.full
@pytest.mark.kernels
def test_an_sdist_holds_all_that_is_tracked_but_the_diary_and_its_tests_run(tmp_path):
    if reason := why_no_wheel():
        pytest.skip(reason)
    files, tree = tracked(), tmp_path / "tree"
    for name in files:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
    diary = {name for name in files if name.startswith("bench/notes/diary/")}
    top = f"cute_kernels-{cute_kernels.__version__}"
    with tarfile.open(run_hook("build_sdist", tree, tmp_path)) as sdist:
        held = {member.name.removeprefix(f"{top}/") for member in sdist if member.isfile()}
        sdist.extractall(tmp_path, filter="data")
    made = {path.split("/")[0] for path in held - set(files)}
    assert diary and set(files) - diary <= held and not diary & held
    assert made == {"PKG-INFO", "setup.cfg", "cute_kernels.egg-info"}
    tests = (
        "tests/attention/test_quantization.py",
        "tests/project/test_figures.py",
    )  # one of the packages, one that reads files beside
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=tmp_path / top)
    assert done.returncode == 0, done.stdout + done.stderr


# Runs a kernel in an environment that has the simulator's wheel; prints what else of ours or of compilers was imported.
SIMULATE = """
import sys, numpy as np, ptxsim
from pathlib import Path
ptx, x, y = Path(sys.argv[1]).read_text(), np.zeros((2, 400), np.float32), np.ones((2, 400), np.float32)
ptxsim.run(ptxsim.launch(ptx, [x, y, 400, 400, None, None], grid=2, shared=16))
others = {name.partition(".")[0] for name in sys.modules} & {"torch", "cutlass", "cute_kernels", "wrappers", "tools"}
print(ptxsim.__file__, abs(y - 1 / 400).max() < 1e-6, others)
"""


@pytest.mark.slow
def test_the_wheel_of_the_simulator_stands_alone(tmp_path):
    """It needs numpy and ml_dtypes, has the record of the calibration and no tests, and simulates."""
    if reason := why_no_wheel():
        pytest.skip(reason)
    ours, site = ROOT / "tools" / "ptxsim", tmp_path / "site"
    shutil.copytree(ours, tmp_path / "tree", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    with zipfile.ZipFile(run_hook("build_wheel", tmp_path / "tree", tmp_path)) as wheel:
        names = wheel.namelist()
        (metadata,) = (wheel.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
        wheel.extractall(site)
    package = {path.relative_to(ours / "src").as_posix() for path in (ours / "src").rglob("*.py")}
    described = {name for name in names if "dist-info" in name}
    assert set(names) - described == package | {"ptxsim/py.typed", "ptxsim/calibrate/h200.json"}
    needs = re.findall(r"^Requires-Dist: ([\w.-]+)(?!.*extra)", metadata, re.M)
    assert sorted(needs) == ["ml_dtypes", "numpy"]
    assert any(name.endswith("licenses/LICENSE") for name in described)
    assert (ours / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    softmax = str(ours / "tests" / "from_triton" / "softmax.ptx")
    done = run_python("-c", SIMULATE, softmax, cwd=tmp_path, PYTHONPATH=str(site))
    assert done.stdout.split(maxsplit=2) == [str(site / "ptxsim" / "__init__.py"), "True", "set()\n"], done.stderr


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


@pytest.mark.full
@pytest.mark.kernels
def test_an_installed_package_builds_and_finds_bundles(installed):
    """Run the command of the error of an absent kernel: the process that waits then finds the kernel."""
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
        code = (
            f"from cute_kernels import env, paths; print(*map(env.usable, map(env.checked, paths.bundles('{ARCH}'))))"
        )
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
        with pytest.raises(ValueError, match="^spec: .*, must be OP=JSON"):
            catalog.parse(text)
