"""A drawn call as JSON values, and the work that it stands for."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

Tree = Any  # nested dicts, tuples, lists and named tuples with tensors
Results = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Call:
    """One drawn call.

    family: a name in `families.FAMILIES`. function: the public function. seed: of the values of the tensors. mode:
    "eager", "graph" (captured once, replayed with other values), "threads" (several streams), "bind" or "repeat" (the
    launch that a layer keeps, and calls of other functions again). choice: "shape" or "function", which decides about
    the kernel. case: fields of the family's case that differ from its defaults. extra: options of the function that the
    case does not have.
    """

    family: str
    function: str
    seed: int
    mode: str = "eager"
    choice: str = "shape"
    case: dict[str, Any] = dataclasses.field(default_factory=dict)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return json.dumps(self.to_json(), sort_keys=True)


class Work(NamedTuple):
    """The tensors of a call and the way to make it.

    variants: the arguments on the CPU, one tree for each set of values, all of one structure. call: make the call with
    arguments on a device, and return results by name. written: the tensors of a tree that the call may write. judge:
    (variant, arguments after the call, results) -> "" or the first difference from the plain implementation. prepare:
    called before the call and before each replay with the arguments and the number of the variant. checked: whether the
    CPU path refuses this call because it reads its index tensors. repeated: (variant, arguments after the call,
    results) -> the tensors whose bits must repeat; None: the results and the written tensors.
    """

    variants: list[Tree]
    call: Callable[[Tree], Results]
    written: Callable[[Tree], list[torch.Tensor]]
    judge: Callable[[int, Tree, Results], str]
    prepare: Callable[[Tree, int], None] | None = None
    checked: bool = False
    repeated: Callable[[int, Tree, Results], list[torch.Tensor]] | None = None


class Options(NamedTuple):
    """Options of drawing. compiles: also calls whose kernels no bundle holds. small: sizes for a slow device."""

    compiles: bool = False
    small: bool = False


class Refused(Exception):
    """A drawn call that the family itself does not make. The message is the reason."""


def plain(value: Any) -> Any:
    """Return a value as JSON gives it back: lists in place of tuples."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def frozen(value: Any) -> Any:
    """Return a JSON value with tuples in place of lists, as the fields of a case are."""
    return tuple(map(frozen, value)) if isinstance(value, (list, tuple)) else value


def case_of(kind: Any, call: Call, **fixed: Any) -> Any:
    """Return the case of a call. kind: its dataclass."""
    return kind(**{name: frozen(value) for name, value in call.case.items()} | fixed)


def changed_fields(case: Any, without: str) -> dict[str, Any]:
    """Return, as JSON values, the fields of a case that differ from their defaults. without: a field to leave out."""
    values = ((field, getattr(case, field.name)) for field in dataclasses.fields(case) if field.name != without)
    return {field.name: plain(value) for field, value in values if value != field.default}


def from_json(data: dict[str, Any]) -> Call:
    names = {field.name for field in dataclasses.fields(Call)}
    return Call(**{name: value for name, value in data.items() if name in names})


def save(path: Path, call: Call, **facts: Any) -> Path:
    """Write a call and facts about it to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(call.to_json() | facts, indent=1, sort_keys=True) + "\n")
    return path


def load(path: Path) -> Call:
    return from_json(json.loads(path.read_text()))
