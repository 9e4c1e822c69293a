"""One tensor of a call in another layout: the results must stay as they are, or the call must be refused by its name.

Like operands of a good call have one layout, so a call cannot show that a kernel takes the strides of V from K, that
one of two tensors is checked, or that the key of a plan lacks a stride. Here each tensor differs alone. The same code
runs on the CPU, on an emulated machine, and on a GPU.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch

from tests.support.bad_values import BITS, POISON, REFUSALS, recast
from wrappers import FP4Tensor
from wrappers.host import machine

CPU = torch.device("cpu")
ODD = 7919  # a stride that no kernel's alignment divides
PLACES = {"places", "slot_mapping", "positions", "batch_indices", "kv_indices"}  # arguments of functions that append
INDICES = {torch.int32: torch.int64, torch.int64: torch.int32}
Arguments = dict[str, Any]
Strides = tuple[int, ...]


# ---- tensors within arguments


class Operand(NamedTuple):
    """A tensor of a call. words: those that a refusal of it must contain. put: makes its argument anew with another
    tensor in its place."""

    argument: str
    words: tuple[str, ...]
    tensor: torch.Tensor
    put: Callable[[torch.Tensor], Any]

    @property
    def name(self) -> str:
        return " ".join((self.argument, *self.words[1:]))


def operands_of(arguments: Arguments) -> list[Operand]:
    return [
        Operand(name, (name, *words), t, put)
        for name, value in arguments.items()
        for words, t, put in _within(value)
    ]  # fmt: skip


def _within(value: Any) -> Iterator[tuple[tuple[str, ...], torch.Tensor, Callable[[torch.Tensor], Any]]]:
    """Yield (words, tensor, put) of each tensor in a value."""
    if isinstance(value, torch.Tensor):
        yield (), value, lambda new: new
    for word, part, put in _parts(value):
        for words, t, inner in _within(part):
            yield (word, *words) if word else words, t, lambda new, put=put, inner=inner: put(inner(new))


def _parts(value: Any) -> Iterator[tuple[str, Any, Callable[[Any], Any]]]:
    """Yield (word, part, put) of each part of a tuple, of a named tuple or of a packed tensor."""
    if isinstance(value, FP4Tensor):
        start, shape = value.scale_start_index, value.original_shape
        yield "data", value.data, lambda new: FP4Tensor(new, value.scale, start, shape)
        yield "scale", value.scale, lambda new: FP4Tensor(value.data, new, start, shape)
    elif hasattr(value, "_fields"):
        for field in value._fields:
            yield field, getattr(value, field), lambda new, field=field: value._replace(**{field: new})
    elif isinstance(value, tuple):
        alike = len(value) == 2 and all(isinstance(part, torch.Tensor) and part.ndim == value[0].ndim for part in value)
        for i, part in enumerate(value):
            yield "KV"[i] if alike else "", part, lambda new, i=i: (*value[:i], new, *value[i + 1 :])


def placed(value: Any, device: torch.device, memo: dict[int, torch.UntypedStorage] | None = None) -> Any:
    """Return a copy on a device with the same strides and offsets. Tensors of one memory have one again."""
    memo = {} if memo is None else memo
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        if storage.data_ptr() not in memo or not storage.nbytes():
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            memo[storage.data_ptr()] = whole.to(device, copy=True).untyped_storage()
        new = torch.empty(0, dtype=value.dtype, device=device)
        return new.set_(memo[storage.data_ptr()], value.storage_offset(), value.shape, value.stride())
    if isinstance(value, dict):
        return {name: placed(part, device, memo) for name, part in value.items()}
    if isinstance(value, FP4Tensor):
        data, scale = placed((value.data, value.scale), device, memo)
        return FP4Tensor(data, scale, value.scale_start_index, value.original_shape)
    if isinstance(value, tuple):
        parts = [placed(part, device, memo) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


# ---- layouts


def laid_out(t: torch.Tensor, strides: Strides, offset: int = 0) -> torch.Tensor:
    """Return the tensor with other strides, in new memory that is poisoned between its elements."""
    extent = sum((size - 1) * stride for size, stride in zip(t.shape, strides)) + 1 if t.numel() else 0
    memory = torch.full(((offset + extent) * t.element_size(),), POISON, dtype=torch.uint8)
    made = torch.empty(0, dtype=t.dtype).set_(memory.untyped_storage(), offset, t.shape, strides)
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)  # all of its elements, each once
    _bits(made)[once] = _bits(t)[once]
    return made


def _bits(t: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers, which torch copies bit by bit."""
    return recast(t, BITS[t.element_size()])


def dense_strides(shape: tuple[int, ...]) -> Strides:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _apart(shape: tuple[int, ...], dim: int, more: int) -> Strides:
    """Return strides with `more` elements behind dimension `dim`; all that lies outside of it moves apart."""
    wide = [size + (more if i == dim else 0) for i, size in enumerate(shape)]
    return dense_strides(tuple(wide))


def _swapped(shape: tuple[int, ...], i: int) -> Strides:
    """Return strides with dimension i inside of dimension i + 1."""
    order = [*range(i), i + 1, i, *range(i + 2, len(shape))]
    inner = dense_strides(tuple(shape[j] for j in order))
    return tuple(inner[order.index(j)] for j in range(len(shape)))


def strides_of(t: torch.Tensor) -> dict[str, Strides]:
    """Return name -> strides in which the tensor may lie instead of its own."""
    shape, last = tuple(t.shape), t.ndim - 1
    found = {"columns apart": tuple(2 * stride for stride in dense_strides(shape))} if last >= 0 else {}
    if last > 0:
        found["rows apart"] = _apart(shape, last, 16 // min(16, t.element_size()))
        found["rows apart by one"] = _apart(shape, last, 1)
    if last > 1:
        found["first dimension apart"] = _apart(shape, 1, 1)
    found |= {f"dimensions {i} and {i + 1} swapped": _swapped(shape, i) for i in range(last - 1)}
    alike = lambda strides: all(a == b or size == 1 for a, b, size in zip(strides, t.stride(), shape))  # noqa: E731
    return {name: strides for name, strides in found.items() if not alike(strides)}


def odd(t: torch.Tensor) -> torch.Tensor:
    """Return a view with ODD as the stride of each dimension of size 1."""
    return t.as_strided(t.shape, [ODD if size == 1 else stride for size, stride in zip(t.shape, t.stride())])


class Variation(NamedTuple):
    """A tensor in another form. plain: the tensor with the same values that it is compared with."""

    name: str
    plain: torch.Tensor
    varied: torch.Tensor


def with_odd_strides(t: torch.Tensor) -> Iterator[Variation]:
    """Yield the tensor with other strides of its dimensions of size 1, if it has some."""
    if 1 in t.shape:
        yield Variation("strides of size 1", t, odd(t))


def other_strides(t: torch.Tensor) -> Iterator[Variation]:
    """Yield the tensor in each other form with its values: moved, with other strides, or of other integers."""
    if t.numel():
        yield Variation("moved", t, laid_out(t, t.stride(), 1))
    for name, strides in strides_of(t).items():
        yield Variation(name, t, laid_out(t, strides))
    if t.numel() == 1 and t.dtype == torch.float32:
        for shape in ((), (1,), (1, 1)):
            if t.shape != shape:
                yield Variation(f"shape {shape}", t, t.reshape(shape).clone())
    if t.dtype in INDICES:
        yield Variation(str(INDICES[t.dtype])[6:], t, t.to(INDICES[t.dtype]))
    yield from with_odd_strides(t)


def variations(t: torch.Tensor) -> Iterator[Variation]:
    """Yield the tensor in each other form, also with equal values."""
    yield from other_strides(t)
    offsets = t.dtype in INDICES and t.ndim == 1 and len(t) and t[0] == 0 and (t.diff() >= 0).all()
    for dim, size in enumerate(t.shape):
        if size > 1 and not offsets:  # of equal offsets, no row belongs to a request, and its result is undefined
            one = _bits(t).narrow(dim, 0, 1).clone().expand(t.shape)
            yield Variation(
                f"expanded over dimension {dim}", recast(one.contiguous(), t.dtype), recast(one, t.dtype)
            )  # fmt: skip


# ---- calls


class Outcome(NamedTuple):
    """What a call did. values: of what it returned and of all its tensors. refused: the error instead of them. spoilt:
    whether it wrote elsewhere, or before it refused."""

    values: Any = None
    refused: str = ""
    spoilt: bool = False


def values_of(value: Any, returned: bool = True) -> Any:
    """Return what tensors hold, whatever their layout and the type of their integers."""
    found = []
    for _, t, _ in _within(value):
        if t.dtype in INDICES:
            t = t.to(torch.int64)
        found.append((tuple(t.shape) if returned else (), _bits(t.cpu()).contiguous().numpy().tobytes()))
    return found


def outcome(function: Callable[..., Any], arguments: Arguments, device: torch.device) -> Outcome:
    """Call a function with copies of its arguments on a device."""
    given = placed(arguments, device)
    memory = Memory.of([operand.tensor for operand in operands_of(given)])
    before = memory.copy()
    try:
        found = function(**given)
    except REFUSALS as error:
        return Outcome(refused=f"{type(error).__name__}: {error}", spoilt=memory.changed(before, False))
    return Outcome((values_of(found), values_of(tuple(given.values()), False)), spoilt=memory.changed(before, True))


class Memory(NamedTuple):
    """All memory of some tensors: its bytes, and those that belong to a tensor, by address."""

    held: dict[int, torch.Tensor]
    own: dict[int, torch.Tensor]

    @staticmethod
    def of(tensors: list[torch.Tensor], own: bool = True) -> "Memory":
        """Return the memory of tensors. own: False if no byte of it counts as one of a tensor."""
        found = Memory({}, {})
        for t in tensors:
            memory, size = t.untyped_storage(), t.element_size()
            whole = torch.empty(0, dtype=torch.uint8, device=t.device).set_(memory)
            found.held.setdefault(memory.data_ptr(), whole)
            mask = found.own.setdefault(memory.data_ptr(), torch.zeros_like(whole))
            if not own:
                continue
            shape = [min(n, 1) if stride == 0 else n for n, stride in zip(t.shape, t.stride())]
            mask.as_strided((*shape, size), (*(size * n for n in t.stride()), 1), size * t.storage_offset()).fill_(1)
        return found

    def copy(self) -> dict[int, torch.Tensor]:
        return {address: held.clone() for address, held in self.held.items()}

    def changed(self, before: dict[int, torch.Tensor], elsewhere: bool) -> bool:
        """Return whether bytes differ from a copy. elsewhere: those that belong to no tensor alone."""
        for address, old in before.items():
            differs = old != self.held[address]
            if (differs & (self.own[address] == 0) if elsewhere else differs).any():
                return True
        return False


class Bench:
    """Where calls of one function run. The results of plain calls are those of its first one.

    new: makes a machine that knows no call; None: no machine keeps anything from call to call.
    """

    def __init__(
        self, function: Callable[..., Any], arguments: Arguments, device: torch.device = CPU,
        new: Callable[[], machine.HostMachine] | None = None,
    ) -> None:  # fmt: skip
        self.function, self.arguments, self.device, self.new = function, arguments, device, new
        self.known = machine.HostMachine() if new is None else new()
        self.want = self.run(self.known, arguments)

    def run(self, here: machine.HostMachine, given: Arguments) -> Outcome:
        with machine.override(here):
            return outcome(self.function, given, self.device)

    def races(self, operand: Operand) -> bool:
        """Return whether tokens with equal values in a tensor have one place: a GPU stores any of them last."""
        writes = "append" in self.function.__name__ or "and_cache" in self.function.__name__
        return writes and (operand.argument in PLACES or "places" in operand.words)

    def faults(
        self, operand: Operand, forms: Callable[[torch.Tensor], Iterator[Variation]] = variations
    ) -> Iterator[tuple[str, str, bool]]:
        """Yield (name of a variation of one tensor, what is wrong with it or "", whether it is refused).

        The varied call follows a plain one; and it is the first call of a machine, where a plain one follows it unless
        it is refused. On the machine that knows the plain call, more calls follow each refusal."""
        for name, plain, varied in forms(operand.tensor):
            if name.startswith("expanded") and self.races(operand):
                continue
            try:
                given = self.arguments | {operand.argument: operand.put(varied)}
            except REFUSALS:
                yield name, "", True  # by the class of the argument
                continue
            usual, want = self.arguments, self.want
            if plain is not operand.tensor:
                usual = usual | {operand.argument: operand.put(plain)}
                want = self.run(self.known, usual)
                if want.refused:
                    continue  # values that are all equal need not make a good call
            found = {"a call after a plain one": self.run(self.known, given)}
            if self.new is not None:
                other = self.new()
                found["a first call"] = self.run(other, given)
                if not found["a first call"].refused:
                    found["a plain call after the first one"] = self.run(other, usual)
            wrong = [f"{when} {fault}" for when, one in found.items()
                     if (fault := _fault(one, want, None if "plain call" in when else operand))]  # fmt: skip
            refused = {bool(one.refused) for when, one in found.items() if "plain call" not in when}
            wrong += ["is served or refused, as the calls before it decide"] * (len(refused) > 1)
            yield name, ", ".join(wrong), True in refused


def _fault(found: Outcome, want: Outcome, operand: Operand | None = None) -> str:
    """Return what is wrong with an outcome. operand: what a refusal must name; None if nothing may be refused."""
    if found.spoilt:
        return f"writes where it must not: {found.refused}"
    if found.refused:
        named = operand is not None and all(re.search(rf"\b{word}\b", found.refused) for word in operand.words)
        return "" if named else f"is refused: {found.refused}"
    return "" if found.values == want.values else "has other results"


def whole_rows(variation: str) -> bool:
    """Return whether each row of a variation is in one piece and as aligned as before."""
    return variation in ("rows apart", "first dimension apart") or variation.endswith("swapped")


def faults_of_call(
    bench: Bench, forms: Callable[[torch.Tensor], Iterator[Variation]] = variations, strict: Collection[str] = ()
) -> list[str]:
    """Return what is wrong with the variations of all tensors of a call, each alone.

    strict: the tensors that may be refused though their rows are whole and aligned."""
    if bench.want.refused or bench.want.spoilt:
        return [f"the plain call: {bench.want.refused or 'writes where it must not'}"]
    wrong = []
    for operand in operands_of(bench.arguments):
        for name, fault, refused in bench.faults(operand, forms):
            if not fault and refused and whole_rows(name) and operand.name not in strict:
                fault = "is refused, though its rows are whole and aligned"
            wrong += [f"{operand.name}: {name}: {fault}"] * bool(fault)
    return wrong


def all_odd(arguments: Arguments) -> Arguments:
    """Return the arguments with odd strides of all dimensions of size 1 at once."""
    for operand in operands_of(arguments):
        arguments = arguments | {operand.argument: operand.put(odd(operand.tensor))}
    return arguments


# ---- memory that two tensors share


def with_shared_row(arguments: Arguments, written: int, read: int) -> Arguments:
    """Return the arguments with two tensors in one memory: the last row of one lies where the other begins.

    written, read: their numbers among `operands_of`. The rows of the second are far apart, so that only a call that
    knows this stride can see that it reaches the first."""
    out, t = (operands_of(arguments)[i].tensor for i in (written, read))
    inner = dense_strides(tuple(t.shape[1:]))
    step = 64 * (1 + t[0].numel() // 64)
    begin = (len(t) - 1) * step * t.element_size()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(out.shape, out.stride()))
    memory = torch.full((begin + max(extent * out.element_size(), step * t.element_size()),), POISON, dtype=torch.uint8)
    for i, old, strides, offset in (
        (read, t, (step, *inner), 0), (written, out, out.stride(), begin // out.element_size()),
    ):  # fmt: skip
        new = torch.empty(0, dtype=old.dtype).set_(memory.untyped_storage(), offset, old.shape, strides)
        _bits(new).copy_(_bits(old))
        operand = operands_of(arguments)[i]
        arguments = arguments | {operand.argument: operand.put(new)}
    return arguments


def faults_of_sharing(bench: Bench, always: bool, free: set[str]) -> list[str]:
    """Return which tensors may share memory with one that the call writes.

    always: whether each such call must be refused: with the plan of the plain call, with that of a call in which the
    two lie apart, and without a plan. Otherwise only one without a plan, unless it is right all the same, because a
    tensor is copied first. free: words of tensors that need not be apart from outputs."""
    wrong, operands = [], operands_of(bench.arguments)
    before, after = values_of(tuple(bench.arguments.values()), False), bench.want.values[1]
    written = [i for i, (old, new) in enumerate(zip(before, after)) if old != new]
    for i, (j, t) in product(written, enumerate(operands)):
        if i == j or free & {*t.words} or not t.tensor.ndim or len(t.tensor) < 2 or not t.tensor.numel():
            continue
        try:
            given = with_shared_row(bench.arguments, i, j)
        except REFUSALS:  # by the class of the argument
            continue
        shared = operands_of(given)[j]
        alone = given | {t.argument: shared.put(laid_out(shared.tensor, shared.tensor.stride()))}
        new, planned = (bench.new or machine.HostMachine)(), (bench.new or machine.HostMachine)()
        want = bench.run(planned, alone)
        for here in (bench.known, planned, new) if always else (new,):
            found = bench.run(here, given)
            if found.refused:
                named = any(all(word in found.refused for word in operands[one].words) for one in (i, j))
                right = named and not found.spoilt
            else:
                right = not always and found.values[1][i] == want.values[1][i]
            if not right:
                wrong.append(f"{operands[i].name} and {t.name}: {found.refused or 'served'}")
    return wrong
