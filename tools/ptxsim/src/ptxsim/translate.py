"""Translate a unit (straight-line instructions) to Python source that runs it for all its threads at once.

Registers live in local variables inside the unit and go back to the register file at its end, or before an
instruction that touches the register file itself; those that are written and then used in one unit alone do not."""

import struct
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import groupby
from typing import Any

import numpy as np

from .faults import NotModelled
from .forms import PtxOp, require, text_of
from .numbers import count_nonzero
from .parse import PtxInstruction, PtxKernel, vector
from .together import order

CLASS = {"pred": "P", "8": "B", "16": "H", "32": "W", "64": "D"}  # register class by width
STORAGE: dict[str, Any] = {"P": np.bool_, "B": np.uint8, "H": np.uint16, "W": np.uint32, "D": np.uint64}
WIDTH = {"B": 1, "H": 2, "W": 4, "D": 8}
# Special registers that differ between threads or CTAs (machine.specials), and others (machine.MachineState.uniform).
PER_THREAD = {
    *(f"{name}.{axis}" for name in ("tid", "ctaid", "nctaid", "cluster_ctaid", "cluster_nctaid") for axis in "xyz"),
    *(f"{name}.{axis}" for name in ("clusterid", "nclusterid") for axis in "xyz"),
    *(f"lanemask_{which}" for which in ("eq", "lt", "le", "ge", "gt")),
    *("laneid", "warpid", "cluster_ctarank", "cluster_nctarank", "is_explicit_cluster"),
}
UNIFORM = {
    *("ntid.x", "ntid.y", "ntid.z", "clock", "clock64", "globaltimer", "globaltimer_lo"),
    *("dynamic_smem_size", "total_smem_size", "nsmid", "smid"),
}


def register_class(kind: str) -> str:
    digits = kind.lstrip("busf")
    if kind != "pred" and digits not in CLASS:
        raise NotModelled(f"registers of type .{kind} are not modelled")
    return CLASS.get(kind) or CLASS[digits]


@cache
def dtype_of(kind: str) -> Any:
    """Return the numpy type of a PTX type; bf16, f8 and packed types are passed as bits."""
    if kind == "pred":
        return np.dtype(np.bool_)
    if kind in ("f16", "f32", "f64"):
        return np.dtype(f"f{int(kind[1:]) // 8}")
    letter, bits = kind[0], kind.lstrip("busf")
    return np.dtype(f"{'i' if letter == 's' else 'u'}{int(bits) // 8}")


@cache
def type_name(dtype: Any) -> tuple[str, np.dtype[Any]]:
    """Return the name of a type in generated code, and the type."""
    return f"t_{np.dtype(dtype).name}", np.dtype(dtype)


def literal(text: str, kind: str) -> Any:
    """Return an immediate operand as a numpy scalar."""
    if kind == "pred":
        return np.bool_(text not in ("0", "false"))
    dtype = dtype_of(kind)
    if text.startswith(("0f", "0F")):
        value: Any = np.frombuffer(struct.pack("<I", int(text[2:], 16)), np.float32)[0]
    elif text.startswith(("0d", "0D")):
        value = np.frombuffer(struct.pack("<Q", int(text[2:], 16)), np.float64)[0]
    elif dtype.kind == "f":
        value = dtype.type(float(text))
    else:
        number = int(text.rstrip("U"), 0) & ((1 << 8 * dtype.itemsize) - 1)
        return np.array(number, f"u{dtype.itemsize}").view(dtype)[()]
    if dtype.kind == "f":
        return dtype.type(value)
    return value.view(f"u{value.itemsize}").astype(dtype)


class Names:
    """Constants and functions that generated code refers to, shared by the units of a program."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"np": np, "where": np.where, "full": full, "note": note_active}
        self.values |= {"rows_of": rows_of, "put_rows": put_rows}
        self._known: dict[int, str] = {}
        self._filled: dict[str, str] = {}

    def filled(self, name: str) -> str:
        """Return the name of a function that returns an array of n times the constant `name`."""
        if name not in self._filled:
            self._filled[name] = self.add(lru_cache(4)(partial(constant_array, self.values[name])))
        return self._filled[name]

    def add(self, value: Any) -> str:
        name = self._known.get(id(value))
        if name is None:
            name = f"k{len(self.values)}"
            self.values[name] = value
            self._known[id(value)] = name
        return name


def constant_array(value: Any, n: int) -> np.ndarray:
    out = np.full(n, value)
    out.flags.writeable = False
    return out


def note_active(m: Any, index: int, guard: Any) -> None:
    """Note whether the guard of an instruction holds for a thread."""
    m.active[index] = bool(count_nonzero(guard))


def full(value: Any, n: int) -> np.ndarray:
    """Return an array of n threads; a constant expression gives a scalar, which is repeated."""
    array = np.asarray(value)
    return array if array.ndim else np.full(n, array)


def rows_of(file: np.ndarray, rows: np.ndarray, s: Any) -> np.ndarray:
    """Return rows of a register file, of the threads `s`."""
    return file[rows, s] if isinstance(s, slice) else file[rows[:, None], s]


def put_rows(file: np.ndarray, rows: np.ndarray, s: Any, values: np.ndarray) -> None:
    file[(rows, s) if isinstance(s, slice) else (rows[:, None], s)] = values


class RegisterMap:
    """The positions of a kernel's registers: class and row."""

    def __init__(self, kernel: PtxKernel) -> None:
        self.at: dict[str, tuple[str, int]] = {}
        self.count = dict.fromkeys(STORAGE, 0)
        for name, kind in kernel.registers.items():
            letter = register_class(kind)
            self.at[name] = (letter, self.count[letter])
            self.count[letter] += 1
        self._rows: dict[tuple[str, ...], tuple[int, ...]] = {}
        # Registers of asynchronous MMAs: a wgmma.fence must follow a write to them.
        mmas = [x for x in kernel.instructions if x.op.startswith("wgmma.mma")]
        self.fenced = {name for x in mmas for text in x.args[:2] if text[0] == "{" for name in vector(text)}

    def rows(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Return the rows of registers of one class."""
        if names not in self._rows:
            self._rows[names] = tuple(self.at[name][1] for name in names)
        return self._rows[names]

    def rows_by_class(self, names: set[str]) -> dict[str, np.ndarray]:
        """Return the rows of registers, by class."""
        places = sorted(self.at[name] for name in names)
        return {letter: np.array([row for _, row in found]) for letter, found in groupby(places, lambda at: at[0])}


class Translator:
    """Writes the source of one unit. An instance is not reused. own: the registers that no other unit names."""

    def __init__(self, kernel: PtxKernel, registers: RegisterMap, names: Names, own: set[str]) -> None:
        self.kernel, self.registers, self.names = kernel, registers, names
        self.own = own  # those that the unit writes before it uses them stay
        self.lines: list[str] = []
        self.loaded: set[str] = set()
        self.dirty: set[str] = set()
        self.filed: set[str] = set()  # registers that the unit reads from the register file, or writes to it
        self.views: dict[str, dict[str, str]] = {}  # register -> type -> expression
        self.stacked: dict[str, tuple[str, int]] = {}  # register -> array of several registers that has it, and its row
        self.stacks: dict[str, tuple[Any, int]] = {}  # such an array -> its type and number of rows
        self.later: dict[str, str] = {}  # register -> expression of the variable that holds it, not assigned yet
        self.arrays: set[str] = set()  # variables that certainly hold an array

    def unit(self, name: str, first: int, end: int) -> str:
        """Return the source of `name(t)`, t the threads, for instructions [first, end). The function returns the
        branch condition, or None if the last instruction falls through."""
        result = "None"
        part = self.kernel.instructions[first:end]
        x = part[0]
        try:
            ops = []
            for x in part:
                branches = x.op.startswith("bra") or x.op in ("ret", "exit")
                ops.append(None if branches else require(x)[0].make(x, require(x)[1]))
                if ops[-1] and ops[-1].registers:
                    named = {name for text in x.args for name in vector(text)}
                    self.own -= named
                    self.filed |= named & self.registers.at.keys()
            for group in order(part, ops):
                x = part[group[0]]
                if len(group) > 1 and self.together([op for i in group if (op := ops[i])]):
                    continue
                for i in group:
                    x, op = part[i], ops[i]
                    if op is None:
                        result = self.guard(x) if x.guard else "True"
                        continue
                    if x.guard:
                        self.lines.append(f"m.active[{first + i}] or note(m, {first + i}, {self.guard(x)})")
                    self.instruction(x, op)
        except NotModelled as error:
            if str(error).startswith("line "):
                raise
            raise NotModelled(f"line {x.line}: {text_of(x)}: {error}") from None
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise NotModelled(f"line {x.line}: {text_of(x)}: {error!r}") from error
        self.lines.append(f"result = {result}")
        self.flush()
        body = "\n".join(f"  {line}" for line in self.lines)
        return f"def {name}(t):\n  m, s, n = t.machine, t.where, t.count\n{body}\n  return result\n"

    def instruction(self, x: PtxInstruction, op: PtxOp) -> None:
        if not op.effect:
            operands = [self.read(text, kind) for text, kind in op.ins]
            self.assign(x, op, f"{self.names.add(op.run)}({', '.join(operands)})", any(map(self.is_array, operands)))
            return
        operands = [self.array(self.read(text, kind)) for text, kind in op.ins]
        if op.registers:
            guard = f"full({self.guard(x)}, n)" if x.guard else "None"
            self.lines.append(f"a = [{', '.join(operands)}]; g = {guard}")
            self.flush()
            self.loaded &= self.own
            self.later = {register: value for register, value in self.later.items() if register in self.own}
            self.stacked = {register: place for register, place in self.stacked.items() if register in self.own}
            self.views.clear()
            if x.guard:
                self.lines.append("h = t.select(g)")
                self.lines.append(f"if h: {self.names.add(op.run)}(h, {self.names.add(x)}, *[v[h.pick] for v in a])")
            else:
                self.lines.append(f"{self.names.add(op.run)}(t, {self.names.add(x)}, *a)")
            return
        if not x.guard:
            self.assign(x, op, f"{self.names.add(op.run)}({', '.join(['t', self.names.add(x), *operands])})", True)
            return
        self.lines.append(f"a = [{', '.join(operands)}]; h = t.select(full({self.guard(x)}, n))")
        call = f"{self.names.add(op.run)}(h, {self.names.add(x)}, *[v[h.pick] for v in a])"
        if not op.outs:
            self.lines.append(f"if h: {call}")
            return
        self.lines.append(f"r = {call} if h else None")
        many = len(op.outs) > 1
        for i, (register, kind) in enumerate(op.outs):
            if register == "_":
                continue
            old = self.load(register)
            value = self.convert(f"r[{i}]" if many else "r", kind, register)
            self.lines.append(f"{old} = h.merge({self.array(old)}, {value}) if h else {old}")
            self.wrote(register)

    def together(self, ops: list[PtxOp]) -> bool:
        """Run instructions that do the same at once, on arrays with a row for each. Return False if they must run one
        by one."""
        if all(len(set(texts)) == 1 for texts in zip(*([text for text, _ in op.ins] for op in ops), strict=True)):
            return False  # one result for all, without rows
        outs, kind = [op.outs[0][0] for op in ops], ops[0].outs[0][1]
        letters = {self.registers.at.get(register, ("",))[0] for register in outs}
        columns = [
            self.column([op.ins[i][0] for op in ops], operand_kind) for i, (_, operand_kind) in enumerate(ops[0].ins)
        ]
        if len(letters) > 1 or "" in letters or not any(array for _, array in columns):
            return False
        (letter,) = letters
        value, dtype = f"{self.names.add(ops[0].run)}({', '.join(text for text, _ in columns)})", dtype_of(kind)
        if dtype.itemsize != WIDTH.get(letter):  # predicates, and what is extended
            value, dtype = self.convert(value, kind, outs[0]), np.dtype(STORAGE[letter])
        name = f"R{len(self.stacks)}"
        self.stacks[name] = dtype, len(outs)
        self.lines.append(f"{name} = {value}")
        for row, register in enumerate(outs):
            self.wrote(register)
            self.stacked[register] = name, row
            self.later[register] = self.as_type(f"{name}[{row}]", dtype, np.dtype(STORAGE[letter]))
            if dtype != STORAGE[letter]:
                self.views[register] = {dtype.str: f"{name}[{row}]"}
            self.arrays |= {self.variable(register), f"{name}[{row}]"}
        return True

    def column(self, texts: list[str], kind: str) -> tuple[str, bool]:
        """Return an operand of several instructions as an expression with a row for each, or with one for all; and
        whether it certainly has a column for each thread."""
        if len(set(texts)) == 1:
            value = self.read(texts[0], kind)
            return value, self.is_array(value)
        if not any(text[0] in "!%" or text in self.kernel.shared or text in self.kernel.params for text in texts):
            return self.names.add(np.array([self.constant(text, kind) for text in texts])[:, None]), False
        arrays = {self.stacked.get(text, ("",))[0] for text in texts}
        letters = {self.registers.at.get(text, ("",))[0] for text in texts}
        if len(arrays) == 1 and "" not in arrays:
            return self.as_type(*self.part_of_stack(texts), dtype_of(kind)), True
        if len(letters) == 1 and "" not in letters and not self.loaded & set(texts):
            self.own -= set(texts)
            self.filed |= set(texts)
            letter, rows = self.rows(texts)
            value = f"m.{letter}[{rows}, s]" if ":" in rows else f"rows_of(m.{letter}, {rows}, s)"
            return self.as_type(value, np.dtype(STORAGE[letter]), dtype_of(kind)), True
        parts = [self.array(self.read(text, kind)) for text in texts]
        return f"np.concatenate(({', '.join(parts)})).reshape({len(parts)}, n)", True

    def rows(self, registers: list[str]) -> tuple[str, str]:
        """Return the class of registers, and their rows in its file as an index in generated code."""
        (letter, *_), rows = zip(*(self.registers.at[register] for register in registers))
        return letter, self.index(rows)

    def index(self, rows: Sequence[int]) -> str:
        whole = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        return f"{rows[0]}:{rows[0] + len(rows)}" if whole else self.names.add(np.array(rows))

    def part_of_stack(self, registers: list[str]) -> tuple[str, Any]:
        """Return the rows of registers that one array holds, and their type."""
        name = self.stacked[registers[0]][0]
        dtype, count = self.stacks[name]
        index = self.index([self.stacked[register][1] for register in registers])
        return name if index == f"0:{count}" else f"{name}[{index}]", dtype

    def as_type(self, value: str, held: Any, wanted: Any) -> str:
        """Return an expression of type `wanted` with the bits of a value of type `held`, or with its low ones."""
        if held == wanted:
            return value
        if held.itemsize == wanted.itemsize:
            return f"{value}.view({self.type(wanted)})"
        low = f"{self.as_type(value, held, np.dtype(f'u{held.itemsize}'))}.astype({self.type(f'u{wanted.itemsize}')})"
        return self.as_type(low, np.dtype(f"u{wanted.itemsize}"), wanted)

    def is_array(self, expression: str) -> bool:
        """Return whether an expression certainly gives an array of n threads."""
        return expression.lstrip("~(").split(" ")[0].rstrip(")") in self.arrays

    def array(self, expression: str) -> str:
        """Return an expression as an array of n threads."""
        if self.is_array(expression):
            return expression
        constant = expression[0] == "k" and expression.isalnum()
        return f"{self.names.filled(expression)}(n)" if constant else f"full({expression}, n)"

    def assign(self, x: PtxInstruction, op: PtxOp, expression: str, array: bool) -> None:
        """Write the results of `expression` to registers. array: they are arrays of n threads."""
        if not op.outs:
            self.lines.append(expression)
            return
        if len(op.outs) > 1:
            self.lines.append(f"r = {expression}")
        for i, (register, kind) in enumerate(op.outs):
            value = f"r[{i}]" if len(op.outs) > 1 else expression
            if register == "_":
                if len(op.outs) == 1:
                    self.lines.append(value)
                continue
            letter, dtype = self.registers.at[register][0], dtype_of(kind)
            if letter != "P" and not x.guard and dtype != STORAGE[letter] and dtype.itemsize == WIDTH[letter]:
                variable = self.variable(register)
                view = f"{variable}_{dtype.str[1:]}"
                self.lines.append(f"{view} = {value}")
                self.wrote(register)
                self.views[register] = {dtype.str: view}
                self.later[register] = f"{view}.view({self.type(STORAGE[letter])})"
                for name in (variable, view):
                    (self.arrays.add if array else self.arrays.discard)(name)
                continue
            value = self.convert(value, kind, register)
            if x.guard:
                guard, old = self.guard(x), self.load(register)
                value, array = f"where({guard}, {value}, {old})", array or self.is_array(guard) or self.is_array(old)
            self.lines.append(f"{self.variable(register)} = {value}")
            self.wrote(register)
            (self.arrays.add if array else self.arrays.discard)(self.variable(register))

    def variable(self, register: str) -> str:
        letter, row = self.registers.at[register]
        return f"{letter}{row}"

    def load(self, register: str) -> str:
        name = self.variable(register)
        if register in self.later:
            self.lines.append(f"{name} = {self.later.pop(register)}")
        if register not in self.loaded:
            self.lines.append(f"{name} = m.{name[0]}[{name[1:]}, s]")
            self.loaded.add(register)
            self.own.discard(register)
            self.filed.add(register)
            self.arrays.add(name)
        return name

    def wrote(self, register: str) -> None:
        self.loaded.add(register)
        self.dirty.add(register)
        self.views.pop(register, None)
        self.later.pop(register, None)
        self.stacked.pop(register, None)

    def flush(self) -> None:
        if self.dirty & self.registers.fenced:
            self.lines.append("m.touched[s] = True")
        self.filed |= self.dirty - self.own
        together: dict[str, list[str]] = {}
        for register in sorted(self.dirty - self.own):
            if register in self.stacked:
                together.setdefault(self.stacked[register][0], []).append(register)
                continue
            name = self.variable(register)
            self.lines.append(f"m.{name[0]}[{name[1:]}, s] = {self.later.get(register, name)}")
        for registers in together.values():
            registers.sort(key=lambda register: self.stacked[register][1])
            letter, rows = self.rows(registers)
            values = self.as_type(*self.part_of_stack(registers), np.dtype(STORAGE[letter]))
            one_slice = f"m.{letter}[{rows}, s] = {values}"
            self.lines.append(one_slice if ":" in rows else f"put_rows(m.{letter}, {rows}, s, {values})")
        self.dirty &= self.own

    def guard(self, x: PtxInstruction) -> str:
        predicate = self.load(x.guard.lstrip("!"))
        return f"~{predicate}" if x.guard[0] == "!" else predicate

    def convert(self, value: str, kind: str, register: str) -> str:
        """Return `value` of PTX type `kind` as the register's class stores it; narrower integers are extended."""
        letter = self.registers.at[register][0]
        dtype = dtype_of(kind)
        if letter == "P" or dtype == STORAGE[letter]:
            return value
        if dtype.itemsize == WIDTH[letter]:
            return f"{value}.view({self.type(STORAGE[letter])})"
        if dtype.kind == "f":
            return f"{value}.view({self.type(f'u{dtype.itemsize}')}).astype({self.type(STORAGE[letter])})"
        if dtype.kind == "i" and dtype.itemsize < WIDTH[letter]:
            signed = self.type(f"i{WIDTH[letter]}")
            return f"{value}.astype({signed}).view({self.type(STORAGE[letter])})"
        return f"{value}.astype({self.type(STORAGE[letter])})"

    def type(self, dtype: Any) -> str:
        name, known = type_name(dtype)
        self.names.values[name] = known
        return name

    def read(self, text: str, kind: str) -> str:
        if kind == "address":
            return self.address(text)
        if text.startswith("!"):
            return f"~{self.read(text[1:], kind)}"
        if text in self.registers.at:
            return self.register(text, kind)
        if text.startswith("%"):
            return self.special(text[1:], kind)
        if text in self.kernel.shared:
            return f"m.shared_address(s, {self.kernel.shared[text][0]}).astype({self.type(dtype_of(kind))})"
        if text in self.kernel.params:
            return f"m.param_address({self.kernel.params[text][0]})"
        return self.names.add(self.constant(text, kind))

    def constant(self, text: str, kind: str) -> Any:
        """Return one object per value, because Names knows objects by identity and must keep them alive."""
        known: dict[tuple[str, str], Any] = self.names.values.setdefault("literals", {})
        if (text, kind) not in known:
            known[text, kind] = literal(text, kind)
        return known[text, kind]

    def register(self, name: str, kind: str) -> str:
        variable = self.load(name)
        letter = self.registers.at[name][0]
        if letter == "P" or kind == "pred":
            return variable
        dtype = dtype_of(kind)
        if dtype == STORAGE[letter]:
            return variable
        views = self.views.setdefault(name, {})
        if dtype.str not in views:
            view = views[dtype.str] = f"{variable}_{dtype.str[1:]}"
            (self.arrays.add if variable in self.arrays else self.arrays.discard)(view)
            unsigned = self.type(f"u{dtype.itemsize}")
            value = variable if dtype.itemsize == WIDTH[letter] else f"{variable}.astype({unsigned})"
            value = value if dtype.kind == "u" else f"{value}.view({self.type(dtype)})"
            self.lines.append(f"{view} = {value}")
        return views[dtype.str]

    def special(self, name: str, kind: str) -> str:
        if name not in PER_THREAD | UNIFORM:
            raise NotModelled(f"the special register %{name} is not modelled")
        value = f"m.special[{name!r}][s]" if name in PER_THREAD else f"m.uniform({name!r})"
        return f"{value}.astype({self.type(dtype_of(kind))})" if kind not in ("u32", "b32") else value

    def address(self, text: str) -> str:
        """Translate [base] or [base+offset] to byte addresses with the width of the base."""
        inside = text[1:-1].strip()
        base, plus, offset = inside.partition("+")
        base = base.strip()
        if not plus and "-" in base[1:]:
            base, _, offset = base.rpartition("-")
            offset = "-" + offset
        if base in self.registers.at:
            kind = "u32" if self.registers.at[base][0] == "W" else "u64"
            value = self.register(base, kind)
        elif base in self.kernel.shared or base in self.kernel.params:
            kind = "u32" if base in self.kernel.shared else "u64"
            value = self.read(base, kind)
        else:
            return self.names.add(self.constant(inside, "u32"))
        return f"({value} + {self.names.add(self.constant(offset.strip(), kind))})" if offset else value


def build(names: Names, name: str, source: str) -> Callable[[Any], Any]:
    exec(compile(source, f"<{name}>", "exec"), names.values)
    return names.values[name]
