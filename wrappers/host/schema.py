"""Torch operators that take a call field by field. Their schemas are generated from the NamedTuples of the calls."""

from collections.abc import Callable, Collection
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch

from .plain import fake_of, known, write

TYPES = {  # of a field of a call -> of the operator's argument
    str: "str", float: "float", float | None: "float?", int: "SymInt", bool: "bool", bool | None: "bool?",
    torch.Tensor: "Tensor", torch.Tensor | None: "Tensor?",
}  # fmt: skip
# Hints of tensors in a call that nobody has checked, which may hold any value.
GivenTensor = Annotated[Any, "Tensor"]
MaybeTensor = Annotated[Any, "Tensor?"]


def arguments(call: type, written: Collection[str] = (), **instead: str) -> list[str]:
    """Return the arguments of an operator that takes the fields of a call in order.

    call: a NamedTuple with type hints. written: the fields that the operator writes. instead: the argument, or several
    with commas between them, that takes the place of a field; an empty string leaves the field out.
    """
    found = []
    for name, hint in get_type_hints(call, include_extras=True).items():
        if name in instead:
            found += [instead[name]] * bool(instead[name])
        else:
            kind = hint.__metadata__[0] if hint in (GivenTensor, MaybeTensor) else TYPES[hint]
            found.append(f"{kind.replace('Tensor', f'Tensor({name}!)') if name in written else kind} {name}")
    return found


class Operator(NamedTuple):
    """A torch operator. fields: the names of its arguments. flags: those that are True or False."""

    overload: torch._ops.OpOverload
    fields: tuple[str, ...]
    flags: tuple[str, ...]

    def record(self, given: dict[str, Any]) -> None:
        """Call an operator that returns nothing; given: its arguments by name, among others."""
        taken = {name: given[name] for name in self.fields}
        write(self.overload, **taken | known(taken, *self.flags))


def define(
    name: str, taken: list[str], run: Callable[..., Any], fake: Callable[..., Any] | None = None, returns: str = "()"
) -> Operator:
    """Define an operator of this package for the CPU and CUDA.

    taken: its arguments, see `arguments`. run: gets them in order. fake: allocates the results; None for an operator
    that returns nothing.
    """
    full = f"cute_kernels::{name}"
    torch.library.define(full, f"({', '.join(taken)}) -> {returns}", tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(full, ("cpu", "cuda"))(run)
    torch.library.register_fake(full)(fake or fake_of(full))
    pairs = [argument.split() for argument in ", ".join(taken).split(", ")]
    flags = tuple(field for kind, field in pairs if kind.startswith("bool"))
    overload = getattr(torch.ops.cute_kernels, name).default
    return Operator(overload, tuple(field for _, field in pairs), flags)
