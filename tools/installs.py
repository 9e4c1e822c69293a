"""Install the wheel and the sdist as a stranger does, and use them: with several Pythons and versions, in folders with
spaces in their names, without a compiler, without the DSL, without torch, and with a bundle that another Python built.

    python -m tools.installs                 every environment of ENVIRONMENTS that this machine has; prints a table
    python -m tools.installs --only 3.12     those whose line contains this text
    python -m tools.installs --folder DIR    where environments and downloads are kept (default: build/installs)

It needs a package index and downloads about 1 GB, which it keeps; the folder then takes 8 GB. Environments are made
anew at each run. The Python that runs this tool builds the bundle, so it needs the DSL and a C compiler.

torch for Linux is on the package index with CUDA alone, 3 GB with its libraries. So an environment has torch only where
pip finds a build for the CPU (CPU_TORCH). The others run everything that needs no torch: the command, its builds, and
the hashes and symbols of a bundle."""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cute_kernels import __version__
from cute_kernels.env import DSL, requirement

ROOT = Path(__file__).resolve().parents[1]
ARCH = "sm_90a"
ONLY = "merge_states.rows/bf16_states"  # a small kernel
CPU_TORCH = "2.13.0+cpu"
OLD_DSL, NEW_DSL = "4.8.0", "4.8.1"
OLD_FFI, NEW_FFI = "0.1.11", "0.1.15.post2"
LIBRARIES = ("libs-base", "libs-core", "libs-cu13")  # of the DSL; without cu12, which it asks for as well
# Beside the reference on CPU tensors, they look up a kernel, which loads its library and fails at a launch alone.
CALL = """
import torch
from cute_kernels import catalog
from wrappers import merge_states, runtime
v, s = torch.randn(3, 2, 4, 64), torch.randn(3, 2, 4)
got, lse = merge_states(v, s)
weights = torch.softmax(s * 0.6931471805599453, 1)  # the LSE has base 2
assert torch.allclose(got, (v * weights[..., None]).sum(1), atol=1e-5) and got.shape == (3, 4, 64)
(kernel,) = (k for k in catalog.shipped("sm_90a") if f"{k[0]}/{k[1].name}" == "merge_states.rows/bf16_states")
assert callable(runtime.kernel(*kernel, "sm_90a"))
print("ok")
"""
NO_TORCH = """
import cute_kernels
try:
    import wrappers
except ImportError as error:
    print("ok" if "torch" in str(error) else error)
"""


class Installation(NamedTuple):
    python: str
    source: str = "wheel"
    dsl: str | None = None
    ffi: str = NEW_FFI
    torch: str | None = None

    @property
    def name(self) -> str:
        parts = (self.python, self.source, f"torch {self.torch}", f"DSL {self.dsl}", f"ffi {self.ffi}")
        return ", ".join(parts)


ENVIRONMENTS = (
    Installation("3.10", dsl=OLD_DSL, ffi=OLD_FFI),
    Installation("3.10", "sdist", dsl=NEW_DSL),
    Installation("3.11", torch=CPU_TORCH),
    Installation("3.11", "sdist", dsl=NEW_DSL, torch=CPU_TORCH),
    Installation("3.11", dsl=OLD_DSL, ffi=OLD_FFI, torch=CPU_TORCH),
    Installation("3.12", dsl=OLD_DSL, ffi=OLD_FFI),
    Installation("3.12", "sdist", dsl=NEW_DSL),
    Installation("3.13", dsl=OLD_DSL, ffi=OLD_FFI),
    Installation("3.13", "sdist", dsl=NEW_DSL),
    Installation("3.14", dsl=NEW_DSL),
    Installation("3.14", "sdist", dsl=OLD_DSL, ffi=OLD_FFI),
)


class StepFailed(Exception):
    """A step did not do what a user expects."""


def interpreter(version: str) -> Path | None:
    """Return a Python of a version: this one, one of pyenv, or one on PATH."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return Path(sys.base_prefix) / "bin" / "python3"
    found = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    on_path = shutil.which(f"python{version}")
    return found[-1] if found else Path(on_path) if on_path else None


def run(*command: str, **env: str) -> str:
    """Run a command and return its output. Raise StepFailed if it fails. env: is added to the tool's own variables
    without those of this project and of Python."""
    status, said = ended(command, env)
    if status:
        raise StepFailed(f"{' '.join(command)}: exit status {status}\n{said[-3000:]}")
    return said


def run_failing(*command: str, **env: str) -> str:
    """Run a command that must fail, and return its output."""
    status, said = ended(command, env)
    if not status:
        raise StepFailed(f"{' '.join(command)}: did not fail\n{said[-3000:]}")
    return said


def ended(command: Sequence[str], env: dict[str, str]) -> tuple[int, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("CUTE_", "PYTHON", "XDG_"))}
    done = subprocess.run(command, capture_output=True, text=True, env=ours | env, cwd="/")
    return done.returncode, done.stdout + done.stderr


def expect(text: str, *parts: str) -> None:
    for part in parts:
        if part not in text:
            raise StepFailed(f"{part!r} is not in:\n{text}")


def artefacts(folder: Path) -> dict[str, Path]:
    """Build the sdist and the wheel of the files that git tracks."""
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)
    made = {}
    for kind in ("sdist", "wheel"):
        hook = f"import os, sys; os.chdir(sys.argv[1]); from setuptools import build_meta as b; b.build_{kind}('..')"
        run(sys.executable, "-c", hook, str(tree))
        (made[kind],) = folder.glob(f"cute_kernels-{__version__}*{'.whl' if kind == 'wheel' else '.tar.gz'}")
    return made


def packed_bundle(folder: Path) -> Path:
    """Build a bundle of one kernel with this Python, in a folder with spaces, and pack it."""
    out, file = folder / "another machine" / ARCH, folder / "bundle of another machine.tar.xz"
    env = {"PYTHONPATH": str(ROOT), "CUTE_DSL_ARCH": ARCH}
    command = (sys.executable, "-m", "cute_kernels")
    run(*command, "build", "--arch", ARCH, "--out", str(out), "--objects", str(folder / "obj"), "--only", ONLY, **env)
    run(*command, "pack", str(file), "--arch", ARCH, "--out", str(out), **env)
    return file


def install(environment: Installation, python: Path, folder: Path, artefact: Path) -> Path:
    """Make an environment and install into it. Return its folder of programs."""
    shutil.rmtree(folder, ignore_errors=True)
    run(str(python), "-m", "venv", str(folder))
    programs = folder / "bin"
    cache = {"PIP_CACHE_DIR": str(folder.parent / "pip"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    pip = (str(programs / "python"), "-m", "pip", "install", "-q", "--no-compile")
    names = [f"apache-tvm-ffi=={environment.ffi}", "numpy"]
    if environment.torch:
        names.append(f"torch=={environment.torch}")
    run(*pip, *names, **cache)
    if environment.dsl:
        run(*pip, "cuda-python>=13", "typing_extensions", **cache)
        dsl = [f"nvidia-cutlass-dsl-{name}=={environment.dsl}" for name in LIBRARIES]
        run(*pip, "--no-deps", f"nvidia-cutlass-dsl=={environment.dsl}", *dsl, **cache)
    run(*pip, *([] if environment.torch else ["--no-deps"]), str(artefact), **cache)
    return programs


def steps(environment: Installation, programs: Path, packed: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield (what a user does, a function that does it and raises StepFailed)."""
    home = programs.parent / "home of a user"
    home.mkdir()
    bare = {"PATH": str(programs), "HOME": str(home)}  # no compiler
    command, python = str(programs / "cute-kernels"), str(programs / "python")

    def env() -> None:
        said = run(command, "env", **bare)
        expect(
            said, f"cute-kernels {__version__} in {programs.parent}", "no CUDA driver", f"no usable bundle of {ARCH}"
        )
        if environment.torch is None:
            expect(said, "torch is not installed: no function of wrappers runs")
        if environment.dsl is None:
            expect(said, "nvidia-cutlass-dsl, the compiler, is not installed", f"pip install {requirement(DSL)}")
        else:
            expect(said, "no C compiler on PATH")

    def unpack() -> None:
        run(command, "unpack", str(packed), "--arch", ARCH, **bare)
        expect(run(command, "verify", **bare), "1 kernels load, hashes match")
        expect(run(command, "list", **bare), ONLY)
        expect(run(command, "env", **bare), f"{ARCH}: usable, 1 kernels of {ARCH}")

    def call() -> None:
        code = CALL if environment.torch else NO_TORCH
        expect(run(python, "-c", code, CUTE_KERNELS_JIT="0", **bare), "ok")

    def build() -> None:
        out, scratch = home / "a bundle" / ARCH, home / "temporary files"
        scratch.mkdir()
        arguments = ("build", "--arch", ARCH, "--out", str(out), "--only", ONLY, "--jobs", "1")
        if environment.dsl is None:
            expect(run_failing(command, *arguments, **bare), "nvidia-cutlass-dsl, the compiler, is not installed")
            return
        spaces = bare | {"TMPDIR": str(scratch)}
        expect(run_failing(command, *arguments, **spaces), "no linker on PATH")
        compiler = f"{programs}{os.pathsep}{os.environ['PATH']}"
        said = run(command, *arguments, **spaces | {"PATH": compiler})
        expect(said, f"{out}: 1 kernels, 1 compiled, 0 cached")  # without a linker, nothing compiles
        expect(run(command, "verify", "--out", str(out), **bare), "1 kernels load, hashes match")

    yield "env", env
    yield "bundle", unpack
    yield "call", call
    yield "build", build


def tried(environment: Installation, folder: Path, made: dict[str, Path], packed: Path) -> tuple[str, ...]:
    """Install and use one environment. Return a row of the table."""
    row = (environment.python, environment.source, environment.torch or "-", environment.dsl or "-", environment.ffi)
    python = interpreter(environment.python)
    if python is None:
        return *row, f"not run: no Python {environment.python} on this machine"
    place = folder / f"environment {ENVIRONMENTS.index(environment) + 1} of a stranger"
    done = []
    try:
        programs = install(environment, python, place, made[environment.source])
        done.append("install")
        for name, step in steps(environment, programs, packed):
            step()
            done.append(name)
    except StepFailed as error:
        print(f"{environment.name}: after {', '.join(done) or 'nothing'}: {error}", file=sys.stderr, flush=True)
        return *row, f"FAILED after {', '.join(done) or 'nothing'}"
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return *row, "passed: " + ", ".join(done)


def table(folder: Path, only: str = "") -> list[tuple[str, ...]]:
    """Return a row for each environment with `only` in its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("cute_kernels-*"):
        old.unlink()
    made, packed, rows = artefacts(folder), packed_bundle(folder), []
    for environment in (environment for environment in ENVIRONMENTS if only in environment.name):
        rows.append(tried(environment, folder, made, packed))
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def markdown(rows: list[tuple[str, ...]]) -> str:
    head = ("Python", "from", "torch", "DSL", "apache-tvm-ffi", "result")
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="environments whose line contains this text")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "installs of strangers")
    args = parser.parse_args()
    rows = table(args.folder.resolve(), args.only)
    print(markdown(rows))
    return int(any("FAILED" in row[-1] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
