"""Rows of latent attention, value by value in plain Python, and caches in pages with bytes behind them.

`encode` writes the layouts and rules of the formats once more, and shares nothing with the product.
"""

import bisect
import math
import struct
from contextlib import nullcontext
from functools import cache

import torch

from tests.support.emulated import emulation
from wrappers import IndexerRows, LatentCache, LatentNorm, LatentQuery, RotaryEmbedding

E4M3, BYTE, BF16, FP16 = torch.float8_e4m3fn, torch.uint8, torch.bfloat16, torch.float16
POISON = 0xA5
HOSTS = {"cpu": nullcontext, "kernels": emulation}
QUARTER = torch.cat([torch.zeros(9, 32), torch.ones(9, 32)], 1)  # of a turn: (x, y) becomes (-y, x), exactly


E4M3_VALUES = [math.ldexp(8 + c % 8, c // 8 - 10) if c >= 8 else math.ldexp(c, -9) for c in range(0x7F)]
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
WIDTHS = {"656": 656, "528_fp32": 528, "528": 528, "528_planar": 528, "584": 584, "352": 352, "288": 288, "132": 132}
PLANAR = {"528_planar": (512, 16), "584": (576, 8), "132": (128, 4)}  # bytes of a row, and of a row of scales


def fp32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def code(x, values):
    """Return the code of the nearest magnitude, of two the even one. The largest serves all that are larger."""
    x = abs(x)
    above = min(bisect.bisect_left(values, x), len(values) - 1)
    below = max(above - 1, 0)
    middle = (values[below] + values[above]) / 2
    return below if x < middle or x == middle and below % 2 == 0 else above


def signed(x, values, sign):
    return code(x, values) | (sign if math.copysign(1.0, x) < 0 else 0)


def e4m3(values, scale=1.0):
    quotients = [fp32(x / fp32(scale)) for x in values]
    return bytes(0x7F if math.isnan(x) else signed(x, E4M3_VALUES, 0x80) for x in quotients)


def halves(values, dtype):
    if dtype == FP16:
        return struct.pack(f"<{len(values)}e", *values)
    return b"".join(struct.pack("<f", x)[2:] for x in values)


def power_above(x):
    """Return 2^ceil(log2(x))."""
    part, exponent = math.frexp(x)
    return math.ldexp(1.0, exponent - (part == 0.5))


def blocks(values, size):
    return [values[i : i + size] for i in range(0, len(values), size)]


def top(values):
    return max(abs(x) for x in values)


def e4m3_blocks(values, size, power):
    """Return the codes of blocks, and their scales: the largest magnitude over 448, at least 1e-4 as a power of two."""
    scales = [fp32(top(block) / 448) for block in blocks(values, size)]
    scales = [power_above(max(scale, 1e-4)) if power else max(scale, 2.0**-126) for scale in scales]
    return b"".join(map(e4m3, blocks(values, size), scales)), scales


def ue8m0(scales):
    return bytes(round(math.log2(scale)) + 127 for scale in scales)


def e2m1_blocks(values):
    """Return the codes of blocks of 16, two in a byte, and their scales: the largest magnitude over 6, rounded up."""
    data, scales = bytearray(), bytearray()
    for block in blocks(values, 16):
        least = max(fp32(top(block) / 6), 2.0**-9)
        scales.append(min(bisect.bisect_left(E4M3_VALUES, least), 0x7E))
        codes = [signed(fp32(x / E4M3_VALUES[scales[-1]]), E2M1_VALUES, 8) for x in block]
        data += bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2]))
    return bytes(data), bytes(scales)


def encode(record, latent, rotated, dtype, power=True, scale=1.0):
    """Return the bytes of a row, and those of its row of scales in a planar record."""
    if record == "rows":
        return halves(latent + rotated, dtype), b""
    if record == "e4m3":
        return e4m3(latent + rotated, scale), b""
    if record in ("656", "528_fp32"):
        codes, scales = e4m3_blocks(latent, 128, power)
        return codes + struct.pack("<4f", *scales) + halves(rotated, dtype), b""
    if record in ("528", "528_planar"):
        codes, scales = e4m3_blocks(latent + rotated, 32, True)
        return (codes + ue8m0(scales), b"") if record == "528" else (codes, ue8m0(scales))
    if record == "584":
        codes, scales = e4m3_blocks(latent, 64, True)
        return codes + halves(rotated, dtype), ue8m0(scales)  # 7 of 8 bytes
    if record == "352":
        codes, scales = e2m1_blocks(latent)
        order = {8 * (s % 4) + s // 4: byte for s, byte in enumerate(scales)}
        return codes + e4m3(rotated) + bytes(order[i] for i in range(32)), b""
    if record == "288":
        return b"".join(e2m1_blocks(latent + rotated)), b""
    scale = fp32(max(top(latent), fp32(1e-4)) / 448)
    scale = power_above(scale) if power else scale
    return e4m3(latent, scale), struct.pack("<f", scale)


# ---- caches and inputs


class Paged:
    """A cache of bytes: memory (pages, bytes of a page and 24 behind it), and its view (pages, rows, bytes)."""

    def __init__(self, width, pages=3, size=4):
        self.size, self.width = size, width
        self.memory = torch.full((pages, size * width + 24), POISON, dtype=BYTE)
        self.view = self.memory.as_strided((pages, size, width), (self.memory.stride(0), width, 1))

    def put(self, record, slot, row, scales):
        """Write a row where the record has it."""
        page, at = self.memory[slot // self.size], slot % self.size
        wide, narrow = PLANAR.get(record, (self.width, 0))
        for first, data in ((at * wide, row), (self.size * wide + at * narrow, scales)):
            for i, byte in enumerate(data):
                page[first + i] = byte


def randn(*shape, seed=0, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def uneven(tokens, count, dtype, seed=0):
    """Return rows with another magnitude in every 16 values. The first begins with zeros, the second with numbers half
    way between two codes, the third with numbers that a scale of 2^-9 is too small for."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, count // 16, 16, generator=gen)
    x *= torch.exp2(torch.randint(-12, 9, (tokens, count // 16, 1), generator=gen))
    x = x.flatten(1)
    if count >= 128:
        x[0, :128], x[2, :128] = 0.0, 2.0**-14
        x[1, :128] = torch.tensor([448.0, 232, 248, -0.0, 2.0**-10, -3 * 2.0**-10, 17, -19] * 16)
        x[1, 16:32] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -6, -0.25, -0.75, -1.25, -5, 0, -0.0, 1])
    return x.to(dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


SLOTS = torch.tensor([5, 11, 0, -1, 12])  # three rows of twelve, and two that the cache lacks


fixed = cache(randn)  # of inputs that no test writes


def full():
    """Return arguments that use everything: three rows, the second of which has no place. Outputs are new."""
    table = fixed(9, 64, dtype=torch.float32)
    index = IndexerRows(
        fixed(3, 128, seed=1), Paged(132, 6).view, torch.tensor([2, 7, -1]), fixed(128, seed=2), fixed(128, seed=3),
        1e-5, RotaryEmbedding(ints(1, 2, 3), table), True, fixed(3, 4, 128, seed=4),
        fixed(3, 4, seed=5, dtype=torch.float32), 0.3, torch.zeros(3, 4, 128).to(E4M3), torch.zeros(3, 4),
    )  # fmt: skip
    query = LatentQuery(fixed(3, 2, 512, seed=9), fixed(3, 2, 64, seed=10), torch.zeros(3, 2, 576).bfloat16())
    return {
        "latent": fixed(3, 512, seed=6), "rotated": fixed(3, 64, seed=7),
        "cache": LatentCache(Paged(656, 6).view, "656"), "places": torch.tensor([5, -1, 9]),
        "norm": LatentNorm(fixed(512, seed=8)), "rope": RotaryEmbedding(ints(3, 0, 7), table, True), "query": query,
        "index": index, "rotated_out": torch.zeros(3, 64).bfloat16(),
    }  # fmt: skip
