"""`mma.sync.aligned.m16n8k16` of a warp, and the loads from shared memory that feed it.

Fragments (PTX ISA) of lane 4 g + t; each entry is two neighbours, x and x + 1:

    A (row, k)     (g, 2 t) (g + 8, 2 t) (g, 2 t + 8) (g + 8, 2 t + 8)     4 words of 16-bit pairs
    B (k, col)     (2 t, g) (2 t + 8, g)                                   2 words
    C (row, col)   (g, 2 t) (g + 8, 2 t)                                   4 floats

One MMA with A from shared memory:

    mma.issue("bf16", acc, 0, mma.load(address, 4), b)   # acc[0:4] += a b
"""

import cutlass.cute as cute
from cutlass import Float32, Uint32


def issue(name, c, at, a, b):
    """Issue c[at:at + 4] += a b. name: "bf16" or "fp16". a: 4 words. b: 2 words."""
    kind = {"bf16": "bf16", "fp16": "f16"}[name]
    out, rest = ", ".join(f"{{$w{i}}}" for i in range(4)), [f"{{$r{i}}}" for i in range(10)]
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{out}}}, "
    text += ", ".join(f"{{{', '.join(part)}}}" for part in (rest[:4], rest[4:6], rest[6:])) + ";"
    old = [c[at + i] for i in range(4)]
    new = cute.arch.inline_ptx(text, write_only_types=[Float32] * 4, read_only_args=[*a, *b, *old])
    for i in range(4):
        c[at + i] = new[i]


def transpose(word):
    """Transpose an 8 x 8 matrix of 16-bit elements (PTX `movmatrix`); quad g holds row g, a word per lane."""
    text = "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[word])


def load(address, count):
    """Load `count` (1, 2 or 4) words of shared memory. address: in bytes, aligned to their size."""
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    text = f"ld.shared.v{count}.b32 {{{names}}}, [{{$r0}}];" if count > 1 else "ld.shared.b32 {$w0}, [{$r0}];"
    words = cute.arch.inline_ptx(text, write_only_types=[Uint32] * count, read_only_args=[address])
    return list(words) if count > 1 else [words]


def store(address, words):
    """Store four words to shared memory. address: in bytes, aligned to 16."""
    text = "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
    cute.arch.inline_ptx(text, read_only_args=[address, *words])


def load_bytes(address, count):
    """Load `count` (1, 2 or 4) bytes of shared memory into the low bytes of a word."""
    if count == 4:
        return load(address, 1)[0]
    text = f"{{ .reg .b16 t; ld.shared.u{8 * count} t, [{{$r0}}]; cvt.u32.u16 {{$w0}}, t; }}"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[address])
