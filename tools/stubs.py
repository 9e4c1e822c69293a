"""The types of the public names: `wrappers/__init__.pyi`, from `wrappers/__init__.py` and the signatures.

    python -m tools.stubs

Type checkers and editors read the stub instead of `__init__.py`. It differs where a flag decides what a function
returns: there it has overloads. Each repeats a signature of up to 20 lines, so they are made from the sources. A flag
that is absent or False gives the output, True gives (output, lse). A flag of type bool gives Any, and so does an output
that may be an FP4Tensor. A class with such a method is a subclass of itself in the stub.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import wrappers

TARGET = Path(wrappers.__file__).with_suffix(".pyi")
FLAGS = ("return_lse", "return_softmax_lse")
TENSOR, PAIR = "torch.Tensor", "tuple[torch.Tensor, torch.Tensor]"
OUTPUTS = {"out": "torch.Tensor | None", "out_dtype": "torch.dtype | None"}  # types with which the output is a tensor
HEAD = '''# fmt: off
# ruff: noqa
"""The types of the public names. `python -m tools.stubs` writes this file; see there."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

'''


def definition(function: Callable[..., Any]) -> ast.FunctionDef:
    """Return the definition of a function, without decorators, docstring and body."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    node.body, node.decorator_list, node.type_comment = [ast.Expr(ast.Constant(...))], [], None
    return node


def flags_of(function: Callable[..., Any]) -> list[str]:
    """Return the flags that decide what a function returns; none if its result has a type."""
    if inspect.signature(function).return_annotation not in (Any, "Any"):
        return []
    return [flag for flag in FLAGS if flag in inspect.signature(function).parameters]


def _hint(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _typed(node: ast.FunctionDef, result: str, hints: dict[str, str]) -> ast.FunctionDef:
    """Return a copy of a definition with a result and some hints replaced."""
    node = deepcopy(node)
    node.returns = _hint(result)
    for argument in (*node.args.args, *node.args.kwonlyargs):
        if argument.arg in hints:
            argument.annotation = _hint(hints[argument.arg])
    return node


def _keyword(node: ast.FunctionDef, flag: str) -> ast.FunctionDef:
    """Return the form of a definition in which a flag is given by its name: it has no default, and positions end before
    it."""
    node, a = deepcopy(node), node.args
    names = [argument.arg for argument in a.args]
    new = node.args
    if flag in names:
        at = names.index(flag)
        without = len(a.args) - len(a.defaults)
        moved = [a.defaults[i - without] if i >= without else None for i in range(at, len(a.args))]
        new.args, new.defaults = a.args[:at], a.defaults[: max(at - without, 0)]
        new.kwonlyargs, new.kw_defaults = [*a.args[at:], *a.kwonlyargs], [*moved, *a.kw_defaults]
    new.kw_defaults[[argument.arg for argument in new.kwonlyargs].index(flag)] = None
    return node


def _positional(node: ast.FunctionDef, flag: str) -> ast.FunctionDef | None:
    """Return the form of a definition in which a flag is given by its position: there are no defaults up to it. None if
    the flag has no position."""
    node = deepcopy(node)
    names = [argument.arg for argument in node.args.args]
    if flag not in names:
        return None
    behind = len(names) - names.index(flag) - 1
    node.args.defaults = node.args.defaults[len(node.args.defaults) - behind :]
    return node


def overloads(function: Callable[..., Any]) -> Iterator[ast.FunctionDef]:
    """Yield the overloads of a function: no flag is True; each flag is True; whatever is given."""
    node, flags = definition(function), flags_of(function)
    yield _typed(node, TENSOR, OUTPUTS | dict.fromkeys(flags, "Literal[False]"))
    for flag in flags:
        for form in (_keyword(node, flag), _positional(node, flag)):
            if form is not None:
                yield _typed(form, PAIR, OUTPUTS | {flag: "Literal[True]"})
    yield node


def _wrapped(text: str, indent: str = "") -> list[str]:
    """Break a statement into lines, behind the commas of its only outer pair of brackets."""
    depth, kept = 0, ""
    for before, character in zip(" " + text, text):
        depth += (character in "([") - (character in ")]")
        kept += "\0" if character == " " and (before != "," or depth != 1) else character
    lines = textwrap.wrap(
        kept, 120, initial_indent=indent, subsequent_indent=f"{indent}    ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return [line.replace("\0", " ") for line in lines]


def _lines(function: Callable[..., Any], indent: str) -> Iterator[str]:
    ignored = "  # type: ignore[override]" if "ignore[override]" in inspect.getsource(function) else ""
    for number, node in enumerate(overloads(function)):
        statement = ast.unparse(ast.fix_missing_locations(node)).replace(":\n    ...", ": ...")
        yield from (f"{indent}@overload{'' if number else ignored}", *_wrapped(statement, indent))


def methods_of(kind: type) -> list[Callable[..., Any]]:
    """Return the methods of a class whose result a flag decides, those of its bases too."""
    return [function for _, function in inspect.getmembers(kind, inspect.isfunction) if flags_of(function)]


def text() -> str:
    """Return the stub."""
    tree = ast.parse(Path(wrappers.__file__).read_text())
    imports, lines, names = list[str](), list[str](), set[str]()
    for name in wrappers.__all__:
        value = getattr(wrappers, name)
        if inspect.isclass(value) and methods_of(value):
            names.add(name)
            lines += ["", f"class {name}(_{name}):"]
            for method in methods_of(value):
                lines += _lines(method, "    ")
        elif inspect.isfunction(value) and flags_of(value):
            names.add(name)
            lines += ["", *_lines(value, "")]
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            pairs = [(alias.name, alias.asname) for alias in node.names if alias.name not in names]
            classes = [a.name for a in node.names if a.name in names and inspect.isclass(getattr(wrappers, a.name))]
            pairs += [(name, f"_{name}") for name in classes]
            given = ", ".join(name if other is None else f"{name} as {other}" for name, other in pairs)
            imports += _wrapped(f"from {'.' * node.level}{node.module} import ({given})") if pairs else []
    public = ", ".join(f'"{name}"' for name in wrappers.__all__)
    return HEAD + "\n".join([*imports, "", *_wrapped(f"__all__ = [{public}]"), *lines]) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
