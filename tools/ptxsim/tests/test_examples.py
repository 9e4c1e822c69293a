"""The examples and commands of README.md print what it says."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)
TIME = re.compile(r"ran in \d+\.\d+ s")
PYTHON = [text for language, text in BLOCKS if language == "python"]
DSL, TRITON = [text for text in PYTHON if "Path(" not in text], [text for text in PYTHON if "Path(" in text]


def printed(code: str, file: Path) -> str:
    """Return what a program prints that is stored in `file` and runs beside the README."""
    file.write_text(code)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "ignore", str(file)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def comments(code: str) -> list[str]:
    """Return the outputs that comments behind `print` promise."""
    return re.findall(r"^ *print\(.*\)  # (.*)$", code, re.M)


@pytest.mark.kernels
@pytest.mark.skipif(not find_spec("cutlass"), reason="needs nvidia-cutlass-dsl")
def test_a_kernel_of_the_dsl(tmp_path: Path) -> None:
    """Lines of PTX depend on the DSL's version, and those of the source do not."""
    (report,) = [text for language, text in BLOCKS if not language and "the last write" in text]
    right, _, race = printed("".join(DSL), tmp_path / "reverse.py").partition("\n")
    assert [right] == comments(DSL[0])
    assert re.sub(r"line \d+", "line", race) == re.sub(r"line \d+", "line", report)


def test_a_kernel_of_triton(tmp_path: Path) -> None:
    (code,) = TRITON
    assert printed(code, tmp_path / "example.py").splitlines() == comments(code) == ["True"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what stands beside the README, and the PTX file that it shows."""
    for path in ROOT.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (ptx,) = [text for language, text in BLOCKS if language == "ptx"]
    (name,) = re.findall(r"Save this file as `(.*)`", README)
    (tmp_path / name).write_text(ptx)
    return tmp_path


def test_the_commands(folder: Path) -> None:
    """They print what the README says, apart from times."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    console = "".join(text for language, text in BLOCKS if language == "console")
    commands = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", console, re.M)
    assert len(commands) >= 6
    for command, expected in commands:
        line = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", command)
        done = subprocess.run(line, shell=True, cwd=folder, env=environ, capture_output=True, text=True)
        assert TIME.sub("ran", done.stdout) == TIME.sub("ran", expected), command
        assert not done.stderr and done.returncode == ("Fault" in expected or "Deadlock" in expected)


def test_paths_lie_in_the_folder_that_the_readme_names() -> None:
    assert "`cd tools/ptxsim`" in README and ROOT.parts[-2:] == ("tools", "ptxsim")
    installs = re.findall(r"pip install (\S+)", README)
    extras = re.findall(
        r"^(\w+) = ", (ROOT / "pyproject.toml").read_text().partition("optional-dependencies]")[2], re.M
    )
    assert len(installs) == 3 and all(re.fullmatch(r"'?\.(\[(\w+)\])?'?", text.strip("`,")) for text in installs)
    assert {name for text in installs for name in re.findall(r"\[(\w+)\]", text)} <= set(extras)
    for path in re.findall(r"(?:src|tests)/[\w/.]+", README):
        assert (ROOT / path).exists(), path
    files = [name for row in re.findall(r"^\| (`.*?) \|", README.partition("## Where things are")[2], re.M)
             for name in re.findall(r"`(\w+\.py)`", row)]  # fmt: skip
    assert len(files) > 30 and all((ROOT / "src/ptxsim" / name).exists() for name in files)
