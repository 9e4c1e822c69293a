"""Decide which calls may go straight to a kernel, and call the torch operator for the others."""

from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import TransformType
from torch._ops import _len_torch_dispatch_stack_pre_dispatch as _modes_before_dispatch

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling  # module globals: each saves an attribute look-up, 20 ns
_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter  # compared by class: a marked fake is an instance of the second


def traced(tensor: object) -> bool:
    """Return whether a call on `tensor` must be a torch operator; takes 0.1 us.

    It must if something records or rewrites the call (torch.compile, a mode, vmap and the like), or if the tensor has
    no memory of its own (fake, functional, proxy).
    """
    if _is_dynamo_compiling():  # first and alone: torch.compile traces no further
        return True
    plain = tensor.__class__ is _Tensor or tensor.__class__ is _Parameter
    if plain and not _modes() and _transform() is None and not _function_modes():
        return False
    return isinstance(tensor, _Tensor) or bool(_modes()) or _transform() is not None or bool(_modes_before_dispatch())


def recorded() -> bool:
    """Return whether something records or rewrites every torch call of this thread, whatever its tensors are."""
    if _is_dynamo_compiling():
        return True
    return bool(_modes() or _function_modes() or _modes_before_dispatch()) or _transform() is not None


def transformed() -> bool:
    """Return whether a transform of torch.func, such as vmap, rewrites the torch calls of this thread."""
    return not _is_dynamo_compiling() and _transform() is not None


def write(operator: torch._ops.OpOverload, **given: Any) -> None:
    """Call an operator that writes to some of its arguments and returns nothing.

    torch.func.functionalize has no rule for such an operator. It gets the one that torch.compile derives: an operator
    that returns what is written. given: all its arguments, in order; torch.compile refuses a tensor with gaps between
    its rows as a keyword argument of the name `out`, but not by position.
    """
    transform = None if _is_dynamo_compiling() else _transform()
    if transform is None or transform.key() != TransformType.Functionalize:
        operator(*given.values())
        return
    from torch._higher_order_ops.auto_functionalize import auto_functionalized, get_mutable_args

    names, _ = get_mutable_args(operator)
    for name, written in zip(names, auto_functionalized(operator, **given)[-len(names) :], strict=True):
        if written is not None:
            given[name].copy_(written)


def fake_of(operator: str) -> Callable[..., None]:
    """Return the fake of an operator that writes arguments and returns nothing.

    It refuses an argument that is written and begins at an offset of dynamic sizes, as a view does that is made in the
    traced function: Inductor would let the operator write at offset 0 (pytorch/pytorch#198068).
    """
    arguments = enumerate(torch._C._get_schema(operator, "").arguments)
    written = [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]

    def fake(*flat: Any) -> None:
        for i, name in written:
            offset = 0 if flat[i] is None else flat[i].storage_offset()
            if isinstance(offset, torch.SymInt) and not (offset.node.expr.is_Symbol or offset.node.expr.is_number):
                raise NotImplementedError(
                    f"{name}: a view at offset {offset} of dynamic sizes, where torch.compile would write elsewhere; "
                    "index it outside the compiled function, or compile with dynamic=False"
                )

    return fake


def known(given: dict[str, Any], *flags: str) -> dict[str, Any]:
    """Return the flags among given arguments as an operator takes them: True or False.

    A trace with symbolic sizes may compare them to make a flag. Asking for its value adds a guard to the trace.
    """
    return {name: True if given[name] else False for name in flags if given[name] is not None}


def no_backward(name: str) -> RuntimeError:
    """Return the error for an argument that requires grad, in a call in grad mode."""
    return RuntimeError(
        f"{name}: requires grad, and this function has no backward: call it under torch.no_grad(), or detach {name}"
    )


def refuse_grad(tensors: dict[str, torch.Tensor]) -> None:
    """Raise on the first tensor that requires grad, by its name, in grad mode."""
    if torch.is_grad_enabled():
        for name, t in tensors.items():
            if t.requires_grad:
                raise no_backward(name)
