"""Parse PTX text into a PtxKernel: instructions of its one .entry in order, registers, labels, parameters, shared
memory.

Registers and labels of scopes in braces (inline assembly) are renamed, so that the result is flat."""

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from .faults import NotModelled

BYTES = {"pred": 1} | {
    f"{kind}{bits}": bits // 8
    for kind in "busf"
    for bits in (8, 16, 32, 64, 128)
    if kind != "f" or bits in (16, 32, 64)
}
_WORD = re.compile(r"%?[A-Za-z_$][\w$]*")
_LABEL = re.compile(r"([\w$]+):(?!:)")
_SPACE = re.compile(r"\s*")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(\[(\d*)\])?")
_ENTRY = re.compile(r"(?:\.(?:visible|weak)\s+)*\.entry\s+([\w$]+)")
_BRACE = re.compile(r"[{}]")
_INSTRUCTION = re.compile(r"(?:@(!?[%\w$@]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)


class PtxInstruction(NamedTuple):
    guard: str  # "" | "%p1" | "!%p1"
    op: str  # opcode with modifiers
    args: tuple[str, ...]  # operands; {...}, [...] and (...) are one operand each
    line: int  # in the PTX text
    source: str  # "file:line" of the kernel's source, "" without line info


@dataclass
class PtxKernel:
    name: str = ""
    target: str = ""
    block: tuple[int, int, int] = (0, 0, 0)  # .reqntid; zeros if the PTX has none
    params: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # name -> (offset, bytes, alignment)
    types: dict[str, str] = field(default_factory=dict)  # parameter -> PTX type, of an element if it is an array
    registers: dict[str, str] = field(default_factory=dict)  # name -> PTX type
    instructions: list[PtxInstruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # name -> index of the next instruction
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)  # variable -> (offset, bytes); dynamic: bytes 0
    shared_bytes: int = 0  # static shared memory


def split(text: str) -> list[str]:
    """Split text into operands at the commas that no bracket encloses."""
    if "{" not in text and "[" not in text and "(" not in text:
        return [part.strip() for part in text.split(",")] if text.strip() else []
    out, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif char == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    out.append(text[start:].strip())
    return out


def vector(text: str) -> list[str]:
    """Return the elements of {a, b, ...}; a plain operand is one element."""
    return [part.strip() for part in text[1:-1].split(",")] if text.startswith("{") else [text]


def _blank_comments(text: str) -> str:
    """Return the text with spaces in place of comments: all else keeps its place."""
    blank = lambda found: re.sub(r"[^\n]", " ", found[0])  # noqa: E731
    return re.sub(r"/\*.*?\*/|//[^\n]*", blank, text, flags=re.DOTALL)


def entries(ptx: str) -> dict[str, tuple[int, int]]:
    """Return the kernels of a PTX text: name -> where it begins and ends."""
    text, found, at = _blank_comments(ptx), {}, 0
    while entry := _ENTRY.search(text, at):
        depth, at = 0, entry.end()
        while brace := _BRACE.search(text, at):
            at, depth = brace.end(), depth + (1 if brace[0] == "{" else -1)
            if not depth:
                break
        else:
            at = len(text)  # cut off: `parse` says so
        found[entry[1]] = entry.start(), at
    return found


@lru_cache(64)
def alone(ptx: str, kernel: str) -> str:
    """Return the PTX without other kernels; the lines keep their numbers."""
    places = entries(ptx)
    if kernel not in places:
        raise ValueError(f"kernel {kernel}: the PTX has {', '.join(places) or 'none'}")
    for name, (start, end) in places.items():
        if name != kernel:
            ptx = ptx[:start] + re.sub(r"[^\n]", " ", ptx[start:end]) + ptx[end:]
    return ptx


def parse_head(ptx: str) -> PtxKernel:
    """Return the kernel of a PTX text without its body: name, parameters, block."""
    kernel = PtxKernel()
    _head(_blank_comments(ptx), kernel)
    return kernel


def _head(text: str, kernel: PtxKernel) -> int:
    """Parse everything before the body into `kernel`; return the position of the body's brace."""
    found = re.search(r"\.entry\s+([\w$]+)\s*\(", text)
    if not found:
        raise ValueError("no .entry in the PTX text")
    kernel.name = found[1]
    target = re.search(r"\.target\s+(\w+)", text)
    kernel.target = target[1] if target else ""
    end = text.index(")", found.end())
    offset = 0
    for param in split(text[found.end() : end]):
        pattern = r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+[.\w ]*?)?([\w$]+)(?:\[(\d+)\])?$"
        match = re.match(pattern, " ".join(param.split()))
        if not match:
            raise NotModelled(f"parameter {param!r}")
        align, kind, name, count = match.groups()
        if kind not in BYTES:
            raise NotModelled(f"parameter {param!r}: the type .{kind} is not modelled")
        size = BYTES[kind] * int(count or 1)
        alignment = int(align or BYTES[kind])
        offset = -(-offset // alignment) * alignment
        kernel.params[name] = (offset, size, alignment)
        kernel.types[name] = kind
        offset += size
    body = text.index("{", end)
    for word in ("reqntid", "maxntid"):
        shape = re.search(rf"\.{word}\s+([\d, ]+)", text[end:body])
        if shape:
            numbers = [int(n) for n in shape[1].split(",")] + [1, 1]
            kernel.block = (numbers[0], numbers[1], numbers[2])
            break
    for declared in _SHARED.finditer(text[: found.start()]):
        _declare_shared(declared, kernel)
    return body


def _declare_shared(found: re.Match[str], kernel: PtxKernel) -> None:
    align, kind, name, array, count = found.groups()
    size = 0 if array and not count else BYTES[kind] * int(count or 1)
    start = -(-kernel.shared_bytes // int(align or BYTES[kind])) * int(align or BYTES[kind]) if size else -1
    kernel.shared[name] = (start, size)
    if size:
        kernel.shared_bytes = start + size


class _Scope(NamedTuple):
    number: int  # 0 is the kernel's own
    names: dict[str, str]  # declared here -> flat name


def parse(text: str) -> PtxKernel:
    """Parse a PTX text with one .entry. Raise NotModelled if it declares something that the simulator does not
    model."""
    text = _blank_comments(text)
    kernel = PtxKernel()
    at = _head(text, kernel)
    newlines = [i for i, char in enumerate(text) if char == "\n"]
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text))
    scopes: list[_Scope] = []
    branches: list[tuple[int, list[int]]] = []  # instruction, numbers of the scopes around it
    created, source = 0, ""
    while True:
        found = _SPACE.match(text, at)
        at = found.end() if found else at
        if at == len(text):
            raise ValueError(f"kernel {kernel.name}: the text ends before the kernel does")
        if text[at] == "{":
            scopes.append(_Scope(created, {}))
            created += 1
            at += 1
            continue
        if text[at] == "}":
            scopes.pop()
            at += 1
            if not scopes:
                break
            continue
        label = _LABEL.match(text, at)
        if label:
            kernel.labels[f"{label[1]}@{scopes[-1].number}"] = len(kernel.instructions)
            at = label.end()
            continue
        line = bisect_right(newlines, at) + 1
        if text.startswith((".loc", ".file"), at):
            end = text.find("\n", at)
            loc = re.match(r"\.loc\s+(\d+)\s+(\d+)", text[at:end])
            if loc and loc[1] in files and loc[2] != "0":
                source = f"{files[loc[1]].rsplit('/', 1)[-1]}:{loc[2]}"
            at = end
            continue
        end = text.find(";", at)
        if end < 0:
            raise ValueError(f"line {line}: {text[at:].strip()[:80]}: no semicolon ends this")
        statement = text[at:end].strip()
        at = end + 1
        if not statement:
            continue
        if statement[0] == ".":
            _declare(statement, kernel, scopes, line)
            continue
        instruction = _instruction(statement, scopes, line, source)
        if instruction.op.startswith("bra"):
            branches.append((len(kernel.instructions), [scope.number for scope in scopes]))
        kernel.instructions.append(instruction)
    _resolve(kernel, branches)
    return kernel


def _declare(statement: str, kernel: PtxKernel, scopes: list[_Scope], line: int) -> None:
    registers = _REGISTERS.match(statement)
    if registers:
        for name in split(registers[2]):
            many = re.fullmatch(r"(%?[\w$]+)<(\d+)>", name)
            if many:
                kernel.registers.update({f"{many[1]}{i}": registers[1] for i in range(int(many[2]))})
            elif len(scopes) > 1:
                scopes[-1].names[name] = f"%{name.strip('%')}@{scopes[-1].number}"
                kernel.registers[scopes[-1].names[name]] = registers[1]
            else:
                kernel.registers[name] = registers[1]
        return
    shared = _SHARED.match(statement)
    if shared:
        _declare_shared(shared, kernel)
    elif not statement.startswith((".pragma", ".branchtargets")):
        raise NotModelled(f"line {line}: {statement[:80]}")


def _instruction(statement: str, scopes: list[_Scope], line: int, source: str) -> PtxInstruction:
    found = _INSTRUCTION.fullmatch(" ".join(statement.split()))
    if not found:
        raise NotModelled(f"line {line}: {statement[:80]}")
    guard, op, rest = found[1] or "", found[2], found[3]
    local = [scope.names for scope in scopes[1:] if scope.names]
    if local:
        rename = lambda word: next((n[word[0]] for n in reversed(local) if word[0] in n), word[0])  # noqa: E731
        guard, rest = _WORD.sub(rename, guard), _WORD.sub(rename, rest)
    return PtxInstruction(guard, op, tuple(split(rest)), line, source)


def _resolve(kernel: PtxKernel, branches: list[tuple[int, list[int]]]) -> None:
    """Rename the targets of branches to keys of `labels`: the innermost scope that declares a label wins."""
    for index, numbers in branches:
        branch = kernel.instructions[index]
        names = [f"{branch.args[0]}@{number}" for number in reversed(numbers)]
        target = next((name for name in names if name in kernel.labels), None)
        if target is None:
            raise NotModelled(f"line {branch.line}: branch to {branch.args[0]}, which is no label of this kernel")
        kernel.instructions[index] = branch._replace(args=(target,))
