"""Artifact keys, specs as JSON, and the manifest of a bundle. Plain Python: the runtime reads bundles without a DSL.

The key of an artifact is a hash of everything that decides its code:

    op, spec, arch   the request
    sources          the code of all files of cute_kernels that the kernel module imports (`source_hash`)
    toolchain        DSL version, CUDA flavour of its compiler, and compiler settings from the environment

A process that runs a bundle need not have the DSL: it takes `toolchain` from the bundle's manifest and computes
the other parts itself. So an entry serves a request exactly if op, spec, arch and the installed sources are those
from which it was compiled. A DSL that is installed at run time plays no part: compiled code does not call it, and
the runtime library that the code needs lies in the bundle. Two facts are in no key, and the loader or the driver
checks them: the host platform of the bundle (`Manifest.problem`), and the driver, which must not be older than
the CUDA flavour (CUDA 13 needs driver 580)."""

import ast
import dataclasses
import fcntl
import hashlib
import json
import os
import platform
import re
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

SCHEMA = 3
FILE = "manifest.json"
PACKAGE = Path(__file__).resolve().parent
Kernel = tuple[str, Any]  # (op, spec)
LIBRARY_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*\.so")
HOST = f"{platform.system()}-{platform.machine()}".lower()


def to_json(value: Any) -> Any:
    """Return a spec (nested dataclasses, tuples, enums, scalars) as JSON values, with every field, defaults too."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return to_json(value.value)
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{value!r}: a spec may hold dataclasses, tuples, enums, numbers, strings, bools and None")


def from_json(hint: Any, data: Any) -> Any:
    """Return the value of type `hint` for which `to_json` returns `data`. Missing fields take their defaults.

    Raise TypeError or ValueError if `data` does not fit: unknown fields, a string for an int."""
    kind = get_origin(hint) or hint
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(data, dict):
            raise TypeError(f"{kind.__name__}: {data!r}, must be an object")
        hints = _field_types(kind, get_args(hint))
        unknown = data.keys() - hints.keys()
        if unknown:
            raise TypeError(f"{kind.__name__} has no field {', '.join(sorted(unknown))}; it has {', '.join(hints)}")
        return kind(**{name: from_json(hints[name], item) for name, item in data.items()})
    if kind in (Union, types.UnionType):
        (inner,) = (arg for arg in get_args(hint) if arg is not type(None))  # spec fields have no unions but `T | None`
        return None if data is None else from_json(inner, data)
    if kind is tuple:
        args = get_args(hint)
        kinds = args[:1] * len(data) if args[1:] == (...,) else args
        return tuple(from_json(kind, item) for kind, item in zip(kinds, data, strict=True))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(data)
    if type(data) is not hint and not (hint is float and type(data) is int):
        raise TypeError(f"{data!r}, must be {getattr(hint, '__name__', hint)}")
    return data


def _field_types(kind: type, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return field -> type of the dataclass `kind`, with its type variables replaced by `args`: `T` is the tile
    config in `AttentionSpec[Sm90TileConfig]`."""
    bound = dict(zip(getattr(kind, "__parameters__", ()), args))

    def concrete(hint: Any) -> Any:
        if isinstance(hint, TypeVar):
            return bound.get(hint, hint)
        free = getattr(hint, "__parameters__", ()) if get_origin(hint) else ()
        return hint[tuple(bound.get(variable, variable) for variable in free)] if free else hint

    hints = get_type_hints(kind)
    return {field.name: concrete(hints[field.name]) for field in dataclasses.fields(kind)}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def canonical(value: Any) -> str:
    """Return a value as JSON with one spelling per value: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def source_files(op: str, package: Path = PACKAGE) -> list[Path]:
    """Return the files of `package` that decide the code of `op`.

    These are the files that its kernel module imports, inside functions too, with the packages that such an
    import runs first; and build.py, which compiles them, but not the imports of build.py (this file)."""
    found: dict[str, Path | None] = {f"{package.name}.build": package / "build.py"}
    waiting = [f"{package.name}.abi", f"{package.name}.{op}.forward"]
    while waiting:
        parts = waiting.pop().split(".")
        for name in (".".join(parts[: n + 1]) for n in range(len(parts))):
            if name not in found:
                file = found[name] = _file(name, package)
                waiting += _imports(file, name) if file else ()
    return sorted(file for file in found.values() if file)


def _file(module: str, package: Path) -> Path | None:
    """Return the file of a module inside `package`, by its dotted name, or None for other names."""
    first, *rest = module.split(".")
    path = package.joinpath(*rest)
    files = (path / "__init__.py", path.parent / f"{path.name}.py")
    return next((file for file in files if file.is_file()), None) if first == package.name else None


def _imports(file: Path, module: str) -> list[str]:
    """Return the dotted names that a file, the module `module`, imports from anywhere: modules, or names in them."""
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    above = {level: package[: len(package) + 1 - level] if level else [] for level, _ in source(file)[1]}
    return [".".join([*above[level], name]) for level, name in source(file)[1]]


@cache
def source(file: Path) -> tuple[str, list[tuple[int, str]]]:
    """Return (digest of a file's code, its imports). An import is (level, dotted name); level: number of dots before
    the name."""
    tree = ast.parse(file.read_bytes())
    imports: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = f"{node.module}." if node.module else ""
            imports += [(node.level, origin + alias.name) for alias in node.names]
    return digest(code(tree).encode()), imports


def code(tree: Any) -> str:
    """Return a syntax tree as text without comments, docstrings and layout, the same under every Python from 3.10.

    ast.dump differs between versions: it shows fields that later versions have added. In code that 3.10 can read,
    they are empty."""
    if isinstance(tree, list):
        return f"[{','.join(map(code, tree))}]"
    if not isinstance(tree, ast.AST):
        return repr(tree)
    shown = []
    for name, value in ast.iter_fields(tree):
        if isinstance(value, list):
            value = [item for item in value if not _says_nothing(item, tree)]
        if value not in (None, []) and name not in ("ctx", "kind"):
            shown.append(f"{name}={code(value)}")
    return f"{type(tree).__name__}({','.join(shown)})"


def _says_nothing(node: Any, parent: ast.AST) -> bool:
    """Return whether `node` is a statement of a string alone, an assignment of the package's version, or an empty
    part of an f-string, which some Pythons add."""
    if isinstance(parent, ast.JoinedStr):
        return isinstance(node, ast.Constant) and node.value == ""
    if isinstance(node, ast.Assign) and isinstance(parent, ast.Module):
        return [ast.unparse(target) for target in node.targets] == ["__version__"]
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@cache
def source_hash(op: str, package: Path = PACKAGE) -> str:
    """Return a hash of the names and the code of `source_files(op)`; computed once per process, in 0.2 s."""
    sums = {f.relative_to(package).as_posix(): source(f)[0] for f in source_files(op, package)}
    return digest(canonical(sums).encode())


def key(op: str, spec: Any, arch: str, toolchain: dict[str, Any]) -> str:
    """Return the artifact key, 64 hex digits. toolchain: `build.toolchain()`, or the one that a manifest recorded."""
    facts = {"op": op, "spec": to_json(spec), "arch": arch, "toolchain": toolchain, "sources": source_hash(op)}
    return digest(canonical({"schema": SCHEMA, **facts}).encode())


def label(op: str, spec: Any) -> str:
    """Return the name of a kernel in lists, patterns and errors: `attention.sm90/bf16_d128_...`."""
    return f"{op}/{spec.name}"


def symbol(op: str, spec: Any, artifact_key: str) -> str:
    """Return the C name of an artifact. It holds part of the key, so equal symbols mean equal code."""
    return re.sub(r"\W", "_", f"{op}__{spec.name}") + f"__{artifact_key[:12]}"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a bundle (one folder, one architecture). It is written last, so the files that it names are
    complete.

    libraries: family -> {file, sha256}. runtime: {file, sha256} of the DSL's runtime library. kernels: one dict
    per kernel with op, spec, name, symbol, key, library (family), code {offset, packed, size, sha256} (its device code:
    place and bytes in the library, and the bytes and the hash when unpacked), object_sha256 (of its host code), and
    the resources of cute_kernels/cubin.py, null if no disassembler was installed. File names are relative."""

    arch: str
    toolchain: dict[str, Any]
    libraries: dict[str, dict[str, str]]
    runtime: dict[str, str]
    kernels: list[dict[str, Any]]
    host: str = HOST
    schema: int = SCHEMA

    def problem(self, arch: str) -> str | None:
        """Return why nothing of this bundle can run here for `arch`, or None."""
        if self.arch != arch:
            return f"is for {self.arch}"
        if self.host != HOST:
            return f"is for {self.host} hosts, this is {HOST}"
        return None

    def find(self, op: str, spec: Any) -> dict[str, Any] | None:
        """Return the entry with the key of (op, spec) under the installed sources, or None."""
        wanted = key(op, spec, self.arch, self.toolchain)
        return next((entry for entry in self.kernels if entry["key"] == wanted), None)

    def refusal(self, op: str, spec: Any) -> str:
        """Return why `find` returned None."""
        wanted = to_json(spec)
        if any(entry["op"] == op and entry["spec"] == wanted for entry in self.kernels):
            return f"holds {label(op, spec)}, but compiled from other sources of cute_kernels: key does not match"
        return f"does not hold {label(op, spec)} ({len(self.kernels)} kernels)"


def read(folder: Path) -> Manifest:
    """Return the manifest of a bundle. Raise FileNotFoundError if there is none, ValueError if it cannot be used."""
    data = (folder / FILE).read_bytes()
    try:
        return parse(data)
    except ValueError as error:
        raise ValueError(f"{folder / FILE}: {error}") from None


def parse(text: bytes) -> Manifest:
    """Return the manifest of the content of a file. Raise ValueError unless all that this package reads of it is there,
    and all files are named by plain names."""
    try:
        data = json.loads(text)
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema {data.get('schema')}, must be {SCHEMA}")
        held = Manifest(**data)
        files = [held.runtime, *held.libraries.values()]
        names = [file["file"] for file in files]
        for file in files:
            if not LIBRARY_NAME.fullmatch(file["file"]):
                raise ValueError(
                    f"{file['file']!r}, must be the name of a file in the bundle's folder that ends in .so"
                )
            if not re.fullmatch("[0-9a-f]{64}", file["sha256"]):
                raise ValueError(f"sha256 of {file['file']}: {file['sha256']!r}, must be 64 hex digits")
        if len(names) != len(set(names)):
            raise ValueError(f"files {', '.join(sorted(names))}, must be named once each")
        for texts in (
            (held.arch, held.host, held.toolchain["dsl"], held.toolchain["cuda"]),
            *map(_texts, held.kernels),
        ):
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"{texts}, must be strings")
        for code in (entry["code"] for entry in held.kernels):
            numbers = code["offset"], code["packed"], code["size"]
            if not all(isinstance(number, int) and number >= 0 for number in numbers):
                raise ValueError(f"{numbers}, must be sizes in bytes")
        lost = {entry["library"] for entry in held.kernels} - held.libraries.keys()
        if lost:
            raise ValueError(f"kernels of {', '.join(sorted(lost))}, a library that is not in it")
        return held
    except KeyError as error:
        raise ValueError(f"lacks {error}") from None
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"is no manifest: {error}") from None


def _texts(entry: dict[str, Any]) -> tuple[Any, ...]:
    return (*(entry[name] for name in ("op", "key", "library", "symbol")), entry["code"]["sha256"])


def file_problem(folder: Path, file: dict[str, str]) -> str | None:
    """Return why a file of a bundle, {file, sha256}, cannot be used, or None. Reads all of it, at 1 to 2 GB per second.

    A process that loads a library that is truncated is killed, when it loads it or at a later call (SIGBUS)."""
    try:
        data = (folder / file["file"]).read_bytes()
    except FileNotFoundError:
        return f"{file['file']} is missing"
    except OSError as error:
        return f"{file['file']} cannot be read: {error.strerror}"
    if digest(data) == file["sha256"]:
        return None
    return f"{file['file']} does not have the hash in the manifest: its {len(data)} bytes are truncated or changed"


def write(folder: Path, manifest: Manifest) -> None:
    """Publish a bundle. All its files must be in place."""
    write_atomic(folder / FILE, (json.dumps(dataclasses.asdict(manifest), indent=1, sort_keys=True) + "\n").encode())


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one step: other processes see either the old file or the new one, complete."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold an exclusive lock between processes (and threads) while the block runs. The system frees it after a
    crash.

    waiting: called once if another process holds the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
