"""The examples of README.md print what it says."""

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from ptxsim.__main__ import main

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
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


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (text,) = [text for language, text in BLOCKS if not language and "ptxsim run tests" in text]
    assert main(shlex.split(text.splitlines()[0])[1:]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("eager: ran in ") and said[1].startswith("argument 1: float32 5x400, 0.00")
    assert [line.partition(":")[0] for line in said[2:]] == ["late", "newest", "random"]
