"""The shape of the code, held with `ast`: small pieces, and imports that only go down.

tests, bench, tools, examples -> wrappers (its rooms: ROOMS below; in a family: op -> plan -> checks -> call)
-> {attention, topk, cache_write, latent, merge_states, indexer}/dispatch -> kernels (sm90, sm100, combine,
topk algorithms, rows, write) -> seams -> spec, geometry -> build, manifest, abi, device; latent's kernels find the
places of rows as those of cache_write do, in its modules

Beside that line: cute_kernels/paths and bundle stand on manifest and build; catalog, the command (cli) and ops, the
other name of wrappers, stand on top of what they list, build and pass on. The simulator, in tools/ptxsim, imports
nothing of this project.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from cute_kernels import catalog
from cute_kernels.attention.barriers import COUNTS, IDS, NamedBarrier

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("cute_kernels", "wrappers", "tools", "bench", "examples", "tests")
SIMULATOR = "tools/ptxsim/src/ptxsim/"  # the package of a distribution of its own
OUTSIDE = ("tools/ptxsim/build/",)  # where pip leaves copies
ALL = sorted(f.relative_to(ROOT).as_posix() for folder in FOLDERS for f in (ROOT / folder).rglob("*.py"))
PRODUCT = re.compile("tests/sim/(?!test_)")  # the commands that simulate our kernels, and their problems
TESTS = [f for f in ALL if f.startswith(("tests/", "tools/ptxsim/tests/")) and not PRODUCT.match(f)]
FILES = [f for f in ALL if f not in TESTS and not f.startswith(OUTSIDE)]
FILE_LINES, FUNCTION_LINES, PARAMETERS = 600, 120, 8
BODY_LINES = 60  # of a function of wrappers, behind its signature and docstring
# From the tree: a family of operators has a dispatch, an op of it a folder with a forward. {family: folders of its ops}
OPS = {
    dispatch.parent.name: {forward.parent.name for forward in dispatch.parent.glob("*/forward.py")}
    for dispatch in sorted((ROOT / "cute_kernels").glob("*/dispatch.py"))
}
FAMILIES = tuple(OPS)
# A family may build on modules of another: rows of latent attention go where rows of K and V go.
BUILDS_ON = {"latent": {"cute_kernels.cache_write." + module for module in ("args", "places", "store")}}

# Another library set the signatures of their methods and callbacks, and those of the functions in `wrappers.__all__`.
UPSTREAM = ("wrappers/integrations/", "wrappers/flashinfer/wrapper_classes/")

# The rooms of wrappers: imports go down. Those of one floor import nothing of each other.
ROOMS = (
    {"integrations"}, {"own"}, {"flashinfer", "flash_attn", "flash_mla", "deep_gemm", "vllm"}, {"attention"},
    {"indexer"}, {"topk", "cache_write", "merge", "latent"},
    {"reference"}, {"fp4"}, {"host"},
)  # fmt: skip
# Rooms whose functions `*_call` make the call of a public function: they have its arguments (test_registry.py).
ADAPTERS = {"own", "flashinfer", "flash_attn", "flash_mla", "deep_gemm", "vllm"}
# The reference takes an attention call whole, so it knows what one is.
BESIDE_ROOMS = {"wrappers/reference/paged.py": {"wrappers.attention.call"}}

# Read where no DSL is installed: by the runtime, dispatch and the tools that list kernels.
PLAIN = {
    f"cute_kernels/{name}.py"
    for name in ("__init__", "archs", "dtypes", "manifest", "device_code", "paths", "catalog", "shipped")
} | {
    f"cute_kernels/{family}/{name}.py"
    for family in FAMILIES
    for name in ("__init__", "request", "spec", "tile", "args", "dispatch")
    + tuple(f"{op}/{file}" for op in OPS[family] for file in ("__init__", "tile_table"))
}
PLAIN |= {f"cute_kernels/attention/{name}.py" for name in ("operands", "schedule/__init__", "schedule/policy")}
PLAIN |= {"cute_kernels/records.py"}
# The command lists without the DSL; build.py alone imports it, inside functions, after it has set the architecture.
COMMAND = {f"cute_kernels/{name}.py" for name in ("archive", "bundle", "cubin", "cli", "env", "__main__", "ops")}
LATE_DSL = {"cute_kernels/build.py"}
# Know every operator family. A user starts here, so that these may go up: ops to wrappers, and env inside functions.
TOP = {f"cute_kernels/{name}.py" for name in ("catalog", "cli", "env", "__main__", "ops")}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def tree(file: str) -> ast.Module:
    return parsed(ROOT / file)


def module_of(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def package_of(file: str) -> list[str]:
    return file.split("/")[:-1]


def imports(file: str, top_only: bool = False) -> set[str]:
    """Absolute dotted names of all modules that a file imports, and of names it imports from them.

    top_only: not those inside functions.
    """
    found = set()
    nodes = [*ast.walk(tree(file))]
    if top_only:
        inner = {n for f in nodes if isinstance(f, (ast.FunctionDef, ast.Lambda)) for n in ast.walk(f)}
        nodes = [n for n in nodes if n not in inner]
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package_of(file)[: len(package_of(file)) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def below(names: set[str], *packages: str) -> set[str]:
    """Those of `names` that are one of `packages` or inside one."""
    return {name for name in names for package in packages if name == package or name.startswith(package + ".")}


def lines_of(file: str) -> int:
    return len((ROOT / file).read_text().splitlines())


def functions(file: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree(file)) if isinstance(node, ast.FunctionDef)]


def parameters(function: ast.FunctionDef) -> int:
    """A tuple without a name for its type, which the function unpacks, counts as its elements."""
    a = function.args
    named = [*a.posonlyargs, *a.args, *a.kwonlyargs]
    found = {arg.arg: 1 for arg in named}
    types = {arg.arg: ast.unparse(arg.annotation) if arg.annotation else "Any" for arg in named}
    plain = {name for name, kind in types.items() if re.match(r"Any|tuple|.*Constexpr", kind)}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            whole = isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(node.targets[0].elts)
            pairs = zip(node.targets[0].elts, node.value.elts) if whole else [(node.targets[0], node.value)]
            for target, value in pairs:
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Name) and value.id in plain:
                    found[value.id] = len(target.elts)
    return sum(found.values()) + (a.vararg is not None) + (a.kwarg is not None)


def test_the_rules_see_what_they_forbid(tmp_path, monkeypatch):
    """The helpers above, on a file that breaks every rule."""
    file = "cute_kernels/attention/sm90/bad.py"
    text = "from ..sm100 import load\nfrom ... import abi\nimport torch.cuda\n"
    text += "def f(a, b=1, *c, d, **e):\n    import cutlass\n"
    text += "def g(a, b, c):\n    x, y = a\n    (u, v, w), z = b, c\n"
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    names = imports(file)
    assert below(names, "cute_kernels.attention.sm100") and below(names, "torch") and below(names, "cutlass")
    assert "cute_kernels.abi" in names and not below(imports(file, top_only=True), "cutlass")
    assert [parameters(f) for f in functions(file)] == [5, 6]


def public_functions() -> set[str]:
    """Return the names in `wrappers.__all__`."""
    values = [n.value for n in tree("wrappers/__init__.py").body if isinstance(n, ast.Assign)]
    return {name.value for value in values if isinstance(value, ast.List) for name in value.elts}


def body_lines(function: ast.FunctionDef) -> int:
    """Return the number of lines behind the signature and the docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("wrappers/")])
def test_public_functions_are_adapters(file):
    """Their signatures and docstrings are long; what they do is not."""
    found = {function.name: body_lines(function) for function in functions(file)}
    assert not {name: lines for name, lines in found.items() if lines > BODY_LINES}


def test_pieces_are_small():
    public = public_functions()
    for file in FILES:
        assert lines_of(file) <= FILE_LINES
        for function in functions(file):
            lines = (function.end_lineno or 0) - function.lineno + 1
            assert lines <= FUNCTION_LINES, f"{file}: {function.name} has {lines} lines"
            mirrored = function.name in public or function.name.endswith("_call") and room_of(file) in ADAPTERS
            if not (file.startswith(UPSTREAM) or file.startswith("wrappers/") and mirrored):
                count = parameters(function)
                assert count <= PARAMETERS, f"{file}: {function.name} has {count} parameters"


def test_files_of_tests_are_short():
    """As those of the packages, the tools and the benchmarks are, which the test above holds."""
    assert not {file: lines_of(file) for file in TESTS if lines_of(file) > FILE_LINES}


def test_ops_are_those_that_are_shipped():
    """A folder that no bundle holds would escape the rules below, and so would an op without a forward."""
    folders = {f"{family}.{op}" for family, ops in OPS.items() for op in ops}
    assert folders == {op for arch in catalog.ARCHS for op, _ in catalog.shipped(arch)}


@pytest.mark.parametrize("file", [f for f in FILES if f.startswith("cute_kernels/")])
def test_cute_kernels_imports_nothing_above(file):
    names = imports(file, top_only=file in TOP)
    assert not below(names, "torch", "numpy", *(() if file == "cute_kernels/ops.py" else ("wrappers",)))
    assert not below(imports(file), "tools", "bench", "tests")
    parts = file.split("/")
    for family in FAMILIES:
        others = [f"cute_kernels.{other}" for other in FAMILIES if other != family]
        if parts[1] == family:
            modules = BUILDS_ON.get(family, set())
            allowed = below(names, *modules) | {module.rpartition(".")[0] for module in modules}
            assert not below(names, *others) - allowed, f"{family} must not import another operator family"
        if parts[1] not in FAMILIES and file not in TOP:
            assert not below(names, f"cute_kernels.{family}", *map(module_of, TOP)), "shared modules know no operator"


@pytest.mark.parametrize("file", [f for f in ALL if f.startswith(("tools/ptxsim/src/", "tools/ptxsim/tests/"))])
def test_the_simulator_knows_no_project(file):
    """It is a distribution of its own: it imports nothing of this repository, and the DSL and torch only in functions
    that users of them call."""
    assert not below(imports(file), "cute_kernels", "wrappers", "bench", "examples", "tests")
    assert not [name for name in below(imports(file), "tools") if not name.startswith("tools.ptxsim.")]
    if file.startswith(SIMULATOR):
        assert not below(imports(file, top_only=True), "torch", "cutlass")


@pytest.mark.parametrize("file", [f for f in FILES if f.split("/")[1] in FAMILIES and f.startswith("cute_kernels/")])
def test_kernels_never_import_each_other(file):
    """The folders of ops are separate, and only dispatch knows them; seams and facts import no kernel."""
    family, rest = file.split("/")[1], file.split("/")[2:]
    folders = OPS[family]
    allowed = folders if rest == ["dispatch.py"] else {rest[0]} & folders
    forbidden = [f"cute_kernels.{family}.{folder}" for folder in sorted(folders - allowed)]
    assert not below(
        imports(file), *forbidden, *([] if rest == ["dispatch.py"] else [f"cute_kernels.{family}.dispatch"])
    )


@pytest.mark.parametrize("file", [f for f in FILES if f in PLAIN | COMMAND | LATE_DSL])
def test_plain_modules_import_no_dsl(file):
    assert not below(imports(file, top_only=file in LATE_DSL), "cutlass", "cute_kernels.abi", "cute_kernels.device")


ROLES = [
    file
    for op in sorted(OPS["attention"])
    for file in FILES
    if file.startswith(f"cute_kernels/attention/{op}/")
    and Path(file).name not in ("__init__.py", "precision.py", "tile_table.py", "keys.py", "values.py")
]
# Named by `AttentionSpec`. How Q, K and V are stored is asked of `precision`, `keys` and `values`, and `kv.scales`, the
# rest of `policy`.
NAMES_IN_SPECS = {"bf16", "fp16", "e4m3", "e5m2", "nvfp4", "tiles", "stream_k"}


def comparisons(file: str) -> set[str]:
    """Return the names of types and of schedules that a file compares, and the tests of block scales."""
    constants = {
        constant.value
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Compare)
        for constant in ast.walk(node)
        if isinstance(constant, ast.Constant)
    }
    scaled = {node.attr for node in ast.walk(tree(file)) if isinstance(node, ast.Attribute)} & {"of_rows"}
    return constants & NAMES_IN_SPECS | scaled


@pytest.mark.parametrize("file", ROLES)
def test_roles_compare_no_types_and_no_schedules(file):
    assert not comparisons(file)


@pytest.mark.parametrize("file", [f for f in FILES if f.startswith("wrappers/")])
def test_wrappers_import_plain_modules_only(file):
    """A process that runs a bundle has no DSL. The runtime may import build, inside the function that compiles."""
    names = imports(file)
    assert not below(names, "cutlass", "tools", "bench", "tests", "examples")
    plain = set(map(module_of, PLAIN))
    modules = {
        name
        for name in below(names, "cute_kernels")
        if (ROOT / (name.replace(".", "/") + ".py")).exists() or (ROOT / name.replace(".", "/")).is_dir()
    }
    assert modules - plain <= ({"cute_kernels.build"} if file == "wrappers/host/runtime.py" else set())
    assert not below(imports(file, top_only=True), "cute_kernels.build")


FLOORS = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}


def room_of(name: str) -> str:
    """Return the room of a file or a module of wrappers."""
    return name.removesuffix(".py").replace("/", ".").split(".")[1]


@pytest.mark.parametrize("file", [f for f in FILES if f.startswith("wrappers/") and f != "wrappers/__init__.py"])
def test_rooms_import_only_rooms_below(file):
    room = room_of(file)
    modules = {name for name in below(imports(file), "wrappers") if name.count(".") and room_of(name) in FLOORS}
    allowed = BESIDE_ROOMS.get(file, set())
    others = {name for name in modules if room_of(name) != room and not below({name}, *allowed)}
    up = sorted(name for name in others if FLOORS[room_of(name)] <= FLOORS[room])
    assert not up, f"{file} imports {up}"


def test_every_room_has_a_floor():
    found = {room_of(f) for f in FILES if f.startswith("wrappers/") and f != "wrappers/__init__.py"}
    assert found == set(FLOORS)


def shared_names(files: list[str]) -> list[str]:
    """Return, for each name of several classes, the name and the places of the classes."""
    places: dict[str, list[str]] = {}
    for file in files:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{file}:{node.lineno}")
    return [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]


def test_no_two_classes_share_a_name():
    """One word means one thing, in the product and in its tools; examples are programs of their own."""
    shared = shared_names([file for file in FILES if not file.startswith("examples/")])
    assert not shared, "\n".join(shared)


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Names along a cycle, the first once more at the end; none where there is no cycle."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for other in sorted(graph[name]):
                if found := visit(other, (*path, name)):
                    return found
            done.add(name)
        return []

    return next(filter(None, (visit(name, ()) for name in graph)), [])


def test_no_cycles_among_package_modules():
    """Imports, those inside functions too, form no cycle: any module can be imported first, and calls go down only."""
    modules = {module_of(f): f for f in FILES}
    graph = {
        name: {other for other in imports(file) & modules.keys() if not f"{name}.".startswith(other + ".")}
        for name, file in modules.items()  # a module's own packages are imported before it in any case
    }
    assert not cycle(graph)


def test_cycles_are_seen(tmp_path, monkeypatch):
    (tmp_path / "p").mkdir()
    for name, text in (("a", "def f():\n    from . import b\n"), ("b", "from .c import x\n"), ("c", "from . import a")):
        (tmp_path / "p" / f"{name}.py").write_text(text)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    graph = {name: imports(f"p/{name[2:]}.py") & {"p.a", "p.b", "p.c"} for name in ("p.a", "p.b", "p.c")}
    assert cycle(graph) == ["p.a", "p.b", "p.c", "p.a"] and not cycle(graph | {"p.a": set()})


def test_named_barriers_have_ids_of_their_own():
    """Else code of two owners that meet in one kernel would wait for each other's threads."""
    ids = [barrier + i for barrier in NamedBarrier for i in range(COUNTS.get(barrier, 1))]
    assert len(ids) == len(set(ids)) and 0 < min(ids) and max(ids) < IDS


def test_named_barriers_are_listed():
    calls = [
        (name, ast.unparse(argument))
        for name in FILES
        if name.startswith("cute_kernels/")
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Call)
        for argument in (
            *(k.value for k in node.keywords if k.arg == "barrier_id"),
            *(node.args[:1] if ast.unparse(node.func).endswith("barrier_red_and") else ()),
        )
    ]
    assert len(calls) > 8
    assert not [call for call in calls if not call[1].startswith(("NamedBarrier.", "LogitsBarrier."))]
