"""Arguments of a launch and choice of a kernel, for families that have one kernel per type.

Plain Python: it runs where no DSL is installed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Args = TypeVar("Args")
Answer = tuple[str, Any, str | None]  # op, the spec it would run, None or its reason to refuse


def fields(args: Any, optional: Mapping[str, Callable[[Any], bool]], spec: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a kernel of `spec`, in launch order.

    args: the NamedTuple of all arguments. optional: field -> whether a spec has it; every spec has the others."""
    return tuple(field for field in args._fields if field not in optional or optional[field](spec))


def pack(args: Callable[..., Args], names: Sequence[str], flat: Sequence[Any]) -> Args:
    """Put the arguments of a launch, in the order of `fields`, under their names. The others are None."""
    values = dict(zip(names, flat, strict=True))
    return args(**{name: values.get(name) for name in args._fields})  # type: ignore[attr-defined]


def explain(kernels: Mapping[str, Any], spec: Any, request: Any, arch: str) -> tuple[Answer, ...]:
    """Return the answer of every kernel of an operator. kernels: op -> its package."""
    found = []
    for op, module in kernels.items():
        reason = None if arch in module.ARCHS else f"architecture {arch}: needs {' or '.join(module.ARCHS)}"
        found.append((op, spec, reason or module.supports(spec) or module.refuses(request)))
    return tuple(found)


def select(found: Sequence[Answer], what: str) -> tuple[str, Any]:
    """Return (op, spec) of the first kernel that serves a request.

    Raise NotImplementedError if there is none: `what`, and every kernel's reason to refuse."""
    for op, spec, reason in found:
        if reason is None:
            return op, spec
    raise NotImplementedError(f"{what}: " + "; ".join(f"{op}: {why}" for op, _, why in found))
