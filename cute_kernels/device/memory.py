"""Vectors of a row: at most 16 bytes in registers, loaded and stored at any address, and converted to fp32 and back.

A whole vector at an aligned address is one access; any other goes element by element, of which only those inside the
row are accessed."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint16, Uint32, const_expr

from . import copy, warp

UNITS = {1: Uint8, 2: Uint16, 4: Uint32}  # bytes of an element -> type
HALVES = {"bf16": BFloat16, "fp16": Float16}


def view(address: Int64, dtype, count, align):
    """Return a tensor of `count` elements in global memory."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(count))


def row_of(tensor, *at):
    """Return the address of a row, the last dimension of a tensor."""
    where = (*at, None)
    return tensor[where].iterator.toint()


def bytes_of(tensor, mode):
    """Return a stride in bytes."""
    return Int64(tensor.stride[mode]) * (tensor.element_type.width // 8)


def load_words(address, index, count):
    """Return `count` words from number `index` on, behind an aligned address in global memory. Loads stay in order."""
    loads = " ".join(f"ld.global.b32 {{$w{i}}}, [a+{4 * i}];" for i in range(count))
    text = f"{{ .reg .b64 a; mad.wide.s32 a, {{$r1}}, 4, {{$r0}}; {loads} }}"
    found = cute.arch.inline_ptx(text, write_only_types=[Uint32] * count, read_only_args=[address, Int32(index)])
    return found if count > 1 else (found,)


def load_word_if(address, condition):
    """Return the word at an aligned address in global memory, 0 unless `condition`, without a branch."""
    text = "{ .reg .pred p; setp.ne.u32 p, {$r1}, 0; mov.b32 {$w0}, 0; @p ld.global.b32 {$w0}, [{$r0}]; }"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[address, Uint32(condition)])


@cute.jit
def load(address: Int64, words: cute.Tensor, valid: Int32, unit: cutlass.Constexpr):
    """Load the first `valid` elements of a vector, of `unit` bytes each, into words of 32 bits. The others are 0."""
    count, bits = const_expr(cute.size(words)), const_expr(8 * unit)
    size = const_expr(4 * count)
    if valid * unit >= size and address % size == 0:
        copy.vector(view(address, Uint32, count, size), words)
    else:
        narrow = view(address, UNITS[unit], size // unit, unit)
        words.fill(0)
        held = cutlass.min(valid, size // unit)
        for e in cutlass.range(held, unroll=1):
            # from the last element to the first, each pushes the others up
            for i in cutlass.range_constexpr(count - 1, -1, -1):
                if const_expr(unit == 4):
                    words[i] = narrow[held - 1 - e] if const_expr(i == 0) else words[i - 1]
                else:
                    below = narrow[held - 1 - e].to(Uint32) if const_expr(i == 0) else words[i - 1] >> (32 - bits)
                    words[i] = words[i] << bits | below


@cute.jit
def store(address: Int64, words: cute.Tensor, valid: Int32, unit: cutlass.Constexpr):
    """Store a vector of 32-bit words, of which the first `valid` elements of `unit` bytes belong to the row."""
    count, bits = const_expr(cute.size(words)), const_expr(8 * unit)
    size = const_expr(4 * count)
    if valid * unit >= size and address % size == 0:
        copy.vector(words, view(address, Uint32, count, size))
    else:
        narrow, rest = view(address, UNITS[unit], size // unit, unit), cute.make_rmem_tensor(count, Uint32)
        for i in cutlass.range_constexpr(count):
            rest[i] = words[i]
        for e in cutlass.range(cutlass.min(valid, size // unit), unroll=1):
            narrow[e] = rest[0].to(UNITS[unit])
            for i in cutlass.range_constexpr(count):
                if const_expr(unit == 4):
                    rest[i] = Uint32(0) if const_expr(i == count - 1) else rest[i + 1]
                else:
                    above = Uint32(0) if const_expr(i == count - 1) else rest[i + 1] << (32 - bits)
                    rest[i] = rest[i] >> bits | above


def widen(dtype, word):
    """Return the two 16-bit values of a word in fp32."""
    if dtype == "bf16":
        low, high = "shl.b32 {$w0}, {$r0}, 16;", "and.b32 {$w1}, {$r0}, 0xFFFF0000;"
        return cute.arch.inline_ptx(f"{low} {high}", write_only_types=[Float32] * 2, read_only_args=[word])
    text = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; cvt.f32.f16 {$w0}, lo; cvt.f32.f16 {$w1}, hi; }"
    return cute.arch.inline_ptx(text, write_only_types=[Float32] * 2, read_only_args=[word])


@cute.jit
def unpack(dtype: cutlass.Constexpr, words: cute.Tensor, values: cute.Tensor):
    """Convert the words of a vector of bf16, fp16 or fp32 to fp32."""
    for i in cutlass.range_constexpr(cute.size(words)):
        if const_expr(dtype == "fp32"):
            values[i] = warp.from_bits(words[i])
        else:
            values[2 * i], values[2 * i + 1] = widen(dtype, words[i])


@cute.jit
def store_values(dtype: cutlass.Constexpr, address: Int64, first: Int32, dim: Int32, values: cute.Tensor):
    """Convert fp32 values to bf16 or fp16 and store them to elements `first` on of a row of `dim` elements."""
    words = cute.make_rmem_tensor(cute.size(values) // 2, Uint32)
    pack(dtype, values, words)
    store(address + 2 * first, words, dim - first, 2)


@cute.jit
def pack(dtype: cutlass.Constexpr, values: cute.Tensor, words: cute.Tensor):
    """Convert fp32 values to the words of a vector of bf16, fp16 or fp32."""
    for i in cutlass.range_constexpr(cute.size(words)):
        if const_expr(dtype == "fp32"):
            words[i] = Uint32(warp.bits(values[i]))
        else:
            words[i] = warp.pack_16bit(HALVES[dtype], values[2 * i], values[2 * i + 1])
