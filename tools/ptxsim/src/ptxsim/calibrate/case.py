"""A calibration case: one small kernel with its arguments, and the code that writes its PTX.

A sketch is the part of a case that differs; `build` puts the common PTX around it. In a body, `$name` stands for:
$a $b $c $d (inputs), $x $y $z $w (outputs): registers of this thread, a vector {..} if the array has several
columns, $a0 $a1 ..: its single registers. $tid: %tid.x. $gt: number of the thread in the grid. $cta: number of
the CTA. $smem: address of the dynamic shared memory. $g0 $g1 ..: addresses of the buffers. $m0 $m1 ..: of the
tensor maps. %t<n> %h<n> %q<n> %p<n> are free 32-, 16-, 64-bit and predicate registers."""

import re
import zlib
from dataclasses import KW_ONLY, dataclass, fields, replace
from string import Template

import numpy as np

VERSION, TARGET = "8.6", "sm_90a"
SUFFIX = {1: "u8", 2: "b16", 4: "b32", 8: "b64"}  # bytes of an array's element: suffix of its loads and stores
WORD = {1: "rs", 2: "rs", 4: "r", 8: "rd"}
CLASSES = {"rs": "b16", "r": "b32", "rd": "b64", "h": "b16", "t": "b32", "q": "b64", "p": "pred"}
BYTES_A_THREAD = 16  # per step of the copies between global and shared memory


@dataclass(frozen=True)
class TensorMapArg:
    """A tensor map argument over argument number `array`. The other fields are those of call.TensorMap."""

    array: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    format: str
    swizzle: int = 0
    fill: str = "zero"


@dataclass(frozen=True, eq=False)
class CaseBase:
    """The fields that a sketch and its case share.

    shared: dynamic bytes. real: format of the outputs, "f16", "bf16" or "f32", if they are compared as numbers; ""
    compares their bits. tolerance: of |simulated - device| / max(|device|, floor); 0 requires equal bits, except NaN
    payloads."""

    name: str
    form: str
    isa: str
    _: KW_ONLY
    threads: int = 32
    grid: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared: int = 0
    real: str = ""
    tolerance: float = 0.0
    floor: float = 0.0


@dataclass(frozen=True, eq=False)
class CalibrationCase(CaseBase):
    """One launch. outputs: numbers of the arguments that are compared."""

    ptx: str
    args: tuple[np.ndarray | TensorMapArg, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Sketch(CaseBase):
    """The input of `build`. ins and outs have one row per thread of the grid.

    inout: output registers start with the values of their array. image: bytes copied to shared memory before the
    body, one row per CTA, or one for all. dump: bytes of shared memory copied out after the body. Shared memory has
    room for both. changed: the buffers that are compared."""

    body: str
    ins: tuple[np.ndarray, ...] = ()
    outs: tuple[np.ndarray, ...] = ()
    buffers: tuple[np.ndarray, ...] = ()
    changed: tuple[int, ...] = ()
    maps: tuple[TensorMapArg, ...] = ()
    image: np.ndarray | None = None
    dump: int = 0
    inout: bool = False


def random(name: str) -> np.random.RandomState:
    """Return the generator of a case: a RandomState, because its streams stay the same in every version of numpy."""
    return np.random.RandomState(zlib.crc32(name.encode()))


def columns(array: np.ndarray) -> int:
    return 1 if array.ndim == 1 else array.shape[1]


class Writer:
    """Collects the lines of a kernel and allocates its registers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, str] = {}
        self.used = dict.fromkeys(CLASSES, 0)

    def new(self, kind: str) -> str:
        self.used[kind] += 1
        return f"%{kind}{self.used[kind] - 1}"

    def add(self, *lines: str) -> None:
        self.lines += lines

    def pointer(self, number: int) -> str:
        register = self.new("rd")
        self.add(f"ld.param.b64 {register}, [arg{number}];")
        return register

    def row(self, number: int, index: str, size: int) -> str:
        """Return the address of row `index` of the array that is argument `number`; a row has `size` bytes."""
        base, offset = self.pointer(number), self.new("rd")
        self.add(f"mul.wide.u32 {offset}, {index}, {size};", f"add.s64 {base}, {base}, {offset};")
        return base

    def registers(self, letter: str, array: np.ndarray) -> list[str]:
        found = [self.new(WORD[array.itemsize]) for _ in range(columns(array))]
        self.names[letter] = found[0] if len(found) == 1 else "{" + ", ".join(found) + "}"
        self.names.update({f"{letter}{i}": register for i, register in enumerate(found)})
        return found

    def load(self, base: str, array: np.ndarray, registers: list[str]) -> None:
        for i, register in enumerate(registers):
            self.add(f"ld.global.{SUFFIX[array.itemsize]} {register}, [{base}+{i * array.itemsize}];")

    def store(self, base: str, array: np.ndarray, registers: list[str]) -> None:
        for i, register in enumerate(registers):
            self.add(f"st.global.{SUFFIX[array.itemsize]} [{base}+{i * array.itemsize}], {register};")

    def copy(self, base: str, size: int, threads: int, inward: bool) -> None:
        """Write a loop that copies `size` bytes between global memory at `base` and the start of shared memory."""
        label, at, there, address = "IN" if inward else "OUT", self.new("r"), self.new("r"), self.new("rd")
        words = ", ".join(self.new("r") for _ in range(4))
        shared = f"shared.v4.b32 {{{words}}}, [{there}];" if not inward else f"shared.v4.b32 [{there}], {{{words}}};"
        outer = f"global.v4.b32 {{{words}}}, [{address}];" if inward else f"global.v4.b32 [{address}], {{{words}}};"
        self.add(
            f"shl.b32 {at}, {self.names['tid']}, 4;",
            f"setp.ge.u32 %p0, {at}, {size};",
            f"@%p0 bra {label}_DONE;",
            f"{label}_MORE:",
            f"cvt.u64.u32 {address}, {at};",
            f"add.s64 {address}, {base}, {address};",
            f"add.s32 {there}, {self.names['smem']}, {at};",
            f"ld.{outer if inward else shared}",
            f"st.{shared if inward else outer}",
            f"add.s32 {at}, {at}, {BYTES_A_THREAD * threads};",
            f"setp.lt.u32 %p0, {at}, {size};",
            f"@%p0 bra {label}_MORE;",
            f"{label}_DONE:",
        )


def build(sketch: Sketch) -> CalibrationCase:
    """Build the case; its arguments are ins, outs, buffers, maps, image, dump, in this order."""
    s, w = sketch, Writer()
    ctas = s.grid[0] * s.grid[1] * s.grid[2]
    args: list[np.ndarray | TensorMapArg] = [*s.ins, *s.outs, *s.buffers]
    first = len(s.ins) + len(s.outs)
    args += [replace(m, array=first + m.array) for m in s.maps]
    outputs = [*range(len(s.ins), first), *(first + i for i in s.changed)]
    shared = max(s.shared, s.dump, 0 if s.image is None else s.image.shape[-1])
    w.names.update(tid=w.new("r"), cta=w.new("r"), gt=w.new("r"), smem=w.new("r"))
    w.add(f"mov.u32 {w.names['tid']}, %tid.x;", f"mov.u32 {w.names['cta']}, %ctaid.x;")
    if s.grid[1] > 1:
        y, nx = w.new("r"), w.new("r")
        w.add(f"mov.u32 {y}, %ctaid.y;", f"mov.u32 {nx}, %nctaid.x;")
        w.add(f"mad.lo.s32 {w.names['cta']}, {y}, {nx}, {w.names['cta']};")
    w.add(f"mad.lo.s32 {w.names['gt']}, {w.names['cta']}, {s.threads}, {w.names['tid']};")
    if shared:
        w.add(f"mov.b32 {w.names['smem']}, dynamic;")
    if s.image is not None:
        rows = s.image.shape[-1] if s.image.ndim == 2 else 0
        w.copy(w.row(len(args), w.names["cta"], rows), s.image.shape[-1], s.threads, True)
        w.add("fence.proxy.async.shared::cta;", "bar.sync 0;")
        args.append(s.image)
    for number, array in enumerate(s.ins):
        base = w.row(number, w.names["gt"], array.nbytes // len(array))
        w.load(base, array, w.registers("abcd"[number], array))
    results = []
    for number, array in enumerate(s.outs):
        base = w.row(len(s.ins) + number, w.names["gt"], array.nbytes // len(array))
        results.append((base, array, w.registers("xyzw"[number], array)))
        if s.inout:
            w.load(*results[-1])
    w.names.update({f"g{i}": w.pointer(first + i) for i in range(len(s.buffers))})
    for i in range(len(s.maps)):
        w.names[f"m{i}"] = w.new("rd")
        w.add(f"mov.b64 {w.names[f'm{i}']}, arg{first + len(s.buffers) + i};")
        w.add(f"cvta.param.u64 {w.names[f'm{i}']}, {w.names[f'm{i}']};")
    w.add(*(line.strip() for line in Template(s.body).substitute(w.names).strip().splitlines()))
    for result in results:
        w.store(*result)
    if s.dump:
        w.add("bar.sync 0;")
        w.copy(w.row(len(args), w.names["cta"], s.dump), s.dump, s.threads, False)
        outputs.append(len(args))
        args.append(np.full((ctas, s.dump), 0xEE, np.uint8))
    w.add("ret;")
    text = module(w.lines, args, s.threads, shared)
    common = {field.name: getattr(s, field.name) for field in fields(CaseBase)} | {"shared": shared}
    return CalibrationCase(**common, ptx=text, args=tuple(args), outputs=tuple(outputs))


def module(lines: list[str], args: list[np.ndarray | TensorMapArg], threads: int, shared: int) -> str:
    """Return the PTX module around the lines of a kernel; it declares every register that they name."""
    text = "\n".join(f"    {line}" for line in lines)
    params = ",\n".join(
        f"    .param .align 64 .b8 arg{i}[128]" if isinstance(arg, TensorMapArg) else f"    .param .b64 arg{i}"
        for i, arg in enumerate(args)
    )
    counts: dict[str, int] = {}
    for kind, number in re.findall(r"%(rs|rd|r|h|t|q|p)(\d+)", text):
        counts[kind] = max(counts.get(kind, 0), int(number) + 1)
    registers = "\n".join(f"    .reg .{CLASSES[kind]} %{kind}<{count}>;" for kind, count in sorted(counts.items()))
    dynamic = ".extern .shared .align 1024 .b8 dynamic[];\n" if shared else ""
    return (
        f".version {VERSION}\n.target {TARGET}\n.address_size 64\n{dynamic}"
        f".visible .entry calibrate(\n{params}\n)\n.reqntid {threads}, 1, 1\n{{\n{registers}\n{text}\n}}\n"
    )


def wait(barrier: str, parity: int | str, label: str) -> str:
    """Return a wait for a phase of the mbarrier at shared address `barrier`. It gives up after 100000 tries: a wrong
    case must not hang a GPU."""
    return f"""
        mov.b32 %t99, 0;
        {label}:
        mbarrier.try_wait.parity.shared.b64 %p9, [{barrier}], {parity};
        @%p9 bra {label}_DONE;
        add.s32 %t99, %t99, 1;
        setp.lt.u32 %p9, %t99, 100000;
        @%p9 bra {label};
        {label}_DONE:
    """


def elementwise(isa: str, op: str, ins: tuple[np.ndarray, ...], out: np.dtype | type, **more: object) -> Sketch:
    """Return a sketch of `op $x, $a, ...;` with one thread per row of the inputs. An `op` that contains operands is
    used unchanged."""
    body = op if ";" in op else f"{op} $x, {', '.join('$' + letter for letter in 'abcd'[: len(ins)])};"
    name = " ".join(op.replace("\n", " ").split())
    form = str(more.pop("form", name.split(" ")[0]))
    label = str(more.pop("name", name))
    outs = (np.full(len(ins[0]), 0xEE, np.uint8).astype(out),)
    return Sketch(label, form, isa, body, ins, outs, threads=len(ins[0]), **more)  # type: ignore[arg-type]


def named(
    isa: str, form: str, op: str, ins: tuple[np.ndarray, ...], out: np.dtype | type = np.uint32, name: str = ""
) -> Sketch:
    """Return an elementwise sketch with its form for a name, if it has no other."""
    return elementwise(isa, op, ins, out, form=form, name=name or form)
