"""Artifact keys and specs as JSON: what a key depends on, and what it does not."""

import ast
import json
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from cute_kernels import catalog, manifest
from cute_kernels.attention import dispatch
from tests.conftest import ARCH, run_python

SHIPPED = catalog.shipped(ARCH)
OPS = sorted({op for op, _ in SHIPPED})
OP, SPEC = dispatch.shipped(ARCH)[0]
OTHER = [spec for op, spec in dispatch.shipped(ARCH) if op == OP][-1]

# ---- specs as JSON


def read(op: str, data: object):
    return manifest.from_json(catalog.spec_type(op), data)


@pytest.mark.parametrize("op", OPS)
def test_specs_survive_json(op):
    for spec in [spec for other, spec in SHIPPED if other == op]:
        assert read(op, json.loads(manifest.canonical(manifest.to_json(spec)))) == spec


TILE = manifest.to_json(SPEC.tile)


@pytest.mark.parametrize(
    "change",
    [{"heads": 8}, {"q": 16}, {"head_dim_qk": "128"}, {"schedule": 1}, {"tile": [128]}, {"tile": TILE | {"m": True}}],
    ids=str,
)
def test_json_that_is_no_spec_is_refused(change):
    data = manifest.to_json(SPEC)
    assert read(OP, data | {"tile": TILE}) == SPEC
    with pytest.raises((TypeError, ValueError)):
        read(OP, data | change)


# ---- keys


def test_key_depends_on_each_part():
    tools = {"dsl": "4.8.1", "cuda": "13.4"}
    keys = [
        manifest.key(OP, SPEC, ARCH, tools),
        manifest.key("attention.sm100", SPEC, ARCH, tools),
        manifest.key(OP, OTHER, ARCH, tools),
        manifest.key(OP, SPEC, "sm_100a", tools),
        manifest.key(OP, SPEC, ARCH, tools | {"cuda": "12.9"}),
        manifest.key(OP, SPEC, ARCH, tools | {"settings": {"CUTE_DSL_LINEINFO": "1"}}),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == manifest.key(OP, replace(SPEC), ARCH, dict(reversed(tools.items())))


LOADED = """
import json, os, sys
import cutlass.cute, torch
for op in sys.argv[1:]:
    if not os.fork():
        __import__(f"cute_kernels.{op}.forward")
        ours = [module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "cute_kernels"]
        print(json.dumps([op, ours]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, op
"""


@pytest.mark.slow
def test_sources_are_what_the_kernel_modules_import():
    """No file that an import really reads is missing; beyond those there are only what compiles, and late imports."""
    done = run_python("-c", LOADED, *OPS)
    assert done.returncode == 0, done.stderr
    loaded = dict(map(json.loads, done.stdout.splitlines()))
    assert sorted(loaded) == OPS
    for op, files in loaded.items():
        sources, found = set(manifest.source_files(op)), {Path(file) for file in files}
        assert found <= sources
        assert {file.name for file in sources - found} <= {"build.py", "abi.py"}


def test_no_traced_file_imports_by_a_computed_name():
    """Such an import would escape `source_files`."""
    for file in {file for op in OPS for file in manifest.source_files(op)} - {manifest.PACKAGE / "build.py"}:
        assert not {"importlib", "__import__"} & set(ast.unparse(ast.parse(file.read_text())).replace(".", " ").split())


@pytest.fixture
def package(tmp_path) -> Path:
    return shutil.copytree(manifest.PACKAGE, tmp_path / "cute_kernels", ignore=shutil.ignore_patterns("__pycache__"))


SOURCE = manifest.source.__wrapped__


@cache
def parsed(data: bytes) -> tuple[str, list[tuple[int, str]]]:
    """What `manifest.source` says of a file of these bytes, wherever it lies."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(data)
        return SOURCE(Path(file.name))


@pytest.fixture
def edited(package, monkeypatch):
    """The hash of an op's sources while text is appended to files of the package."""
    monkeypatch.setattr(manifest, "source", lambda file: parsed(file.read_bytes()))

    def hash_with(op: str, files: Iterable[Path], text: str = "\nx = 1\n") -> str:
        before = {package / file: (package / file).read_text() for file in files}
        for file, code in before.items():
            file.write_text(code + text)
        found = manifest.source_hash.__wrapped__(op, package)
        for file, code in before.items():
            file.write_text(code)
        return found

    return hash_with


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_key_changes_with_each_source_and_with_nothing_else(op, package, edited):
    before = manifest.source_hash(op, package)
    assert before == manifest.source_hash(op)
    sources = {file.relative_to(package) for file in manifest.source_files(op, package)}
    assert {Path("build.py"), Path("abi.py"), Path(*op.split("."), "forward.py")} <= sources
    others = {file.relative_to(package) for file in package.rglob("*.py")} - sources
    assert {Path("manifest.py"), Path(op.split(".")[0], "dispatch.py")} <= others
    assert edited(op, others) == before
    assert [file for file in sources if edited(op, [file]) == before] == []


@pytest.mark.parametrize("op", OPS)
def test_comments_and_docstrings_are_no_code(op, package, edited):
    files = [file.relative_to(package) for file in manifest.source_files(op, package)]
    assert edited(op, files, '\n# more\n\n"""More."""\n') == manifest.source_hash(op, package)


@pytest.mark.parametrize("op", OPS)
def test_the_version_of_the_package_is_no_code(op, package, edited):
    """A release that changes no kernel keeps what was compiled."""
    root = [Path("__init__.py")]
    assert edited(op, root, '\n__version__ = "9.9"\n') == manifest.source_hash(op, package)
    assert edited(op, root, '\n__version__, x = "9.9", 1\n') != manifest.source_hash(op, package)


def test_an_edit_of_one_op_leaves_the_others(package, edited):
    for op in OPS:
        folder = Path(*op.split("."))
        for other in [other for other in OPS if other != op]:
            assert edited(other, [folder / "forward.py"]) == manifest.source_hash(other, package), (op, other)


FILES = {
    "__init__.py": "",
    "abi.py": "from .leaves import of_abi",
    "build.py": "from . import unused",
    "unused.py": "",
    "ops/__init__.py": "from . import facts",
    "ops/facts.py": "from ..leaves.one import ONE",
    "ops/a/__init__.py": "",
    "ops/a/forward.py": "import package.leaves.two as two\nfrom .. import seam\nfrom .. import NAME\nimport os.path",
    "ops/a/late.py": "",
    "ops/seam.py": "def f():\n    if True:\n        from .a.late import *\n        from ...outside import h",
    "leaves/of_abi.py": "",
    "leaves/one.py": "",
    "leaves/two.py": "from package import leaves",
    "leaves/three.py": "",
    "NAME.py": "",
}


def test_imports_of_every_kind_are_followed(tmp_path):
    package = tmp_path / "package"
    for name, text in FILES.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    found = {file.relative_to(package).as_posix() for file in manifest.source_files("ops.a", package)}
    assert found == FILES.keys() - {"unused.py", "leaves/three.py", "NAME.py"}


SAMPLE = '''
"""Docstring."""
@jit
def f(a, *, b: int = -1, **c) -> "T":  # comment
    """Docstring."""
    x = [f"{a!r:>{b}} {1.5}" 'tail', None, (), [""], {**c}]
    return lambda: x[1:, ...]
'''
CODE = (
    "Module(body=[FunctionDef(name='f',args=arguments(args=[arg(arg='a')],kwonlyargs=[arg(arg='b',annotation=Name("
    "id='int'))],kw_defaults=[UnaryOp(op=USub(),operand=Constant(value=1))],kwarg=arg(arg='c')),body=[Assign(targets=["
    "Name(id='x')],value=List(elts=[JoinedStr(values=[FormattedValue(value=Name(id='a'),conversion=114,format_spec="
    "JoinedStr(values=[Constant(value='>'),FormattedValue(value=Name(id='b'),conversion=-1)])),Constant(value=' '),"
    "FormattedValue(value=Constant(value=1.5),conversion=-1),Constant(value='tail')]),Constant(),Tuple(),List(elts=["
    "Constant(value='')]),Dict(keys=[None],values=[Name(id='c')])])),Return(value=Lambda(args=arguments(),body="
    "Subscript(value=Name(id='x'),slice=Tuple(elts=[Slice(lower=Constant(value=1)),Constant(value=Ellipsis)]))))],"
    "decorator_list=[Name(id='jit')],returns=Constant(value='T'))])"
)


def test_code_is_the_same_under_every_python():
    tree = ast.parse(SAMPLE)
    assert manifest.code(tree) == CODE
    function = tree.body[1]
    function._fields = (*function._fields, "type_params")  # as from 3.12
    function.type_params = []  # type: ignore[attr-defined]
    text = next(node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr))
    text.values.append(ast.Constant(""))
    assert manifest.code(tree) == CODE
