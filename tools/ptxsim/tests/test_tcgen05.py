"""Tensor memory and tcgen05 on small kernels; layouts are written down here a second time."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from ptxsim import MODES, Fault, NotModelled, launch, run

RNG = np.random.default_rng(0)
FORMATS = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "ue8m0": ml_dtypes.float8_e8m0fnu,
}
CODES = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
LAYOUT = {0: 0, 128: 2, 64: 4, 32: 6}  # descriptor bits 61-63 by swizzle
B_AT, SCALES_AT, IMAGE = 16384, 32768, 40960  # where operands lie in the shared memory of a CTA; bytes
START = """\
mov.u32 %tid, %tid.x; mov.u32 %rank, %cluster_ctarank; and.b32 %odd, %rank, 1; shr.u32 %warp, %tid, 5;
mad.lo.u32 %row, %rank, 128, %tid; mov.u32 %smem, smem; mov.u32 %bar, bar; mov.u32 %slot, slot;
ld.param.u64 %image, [image]; ld.param.u64 %fill, [fill]; ld.param.u64 %out, [out];
setp.eq.u32 %first, %tid, 0; setp.eq.u32 %alloc, %warp, 0; setp.eq.u32 %leads, %row, 0;
@%first mbarrier.init.shared.b64 [%bar], 1;
fence.mbarrier_init.release.cluster;
@!%alloc bra ALLOCATED;
tcgen05.alloc.cta_group::G.sync.aligned.shared::cta.b32 [%slot], COLUMNS;
ALLOCATED:
mad.wide.u32 %at, %rank, BYTES, %image; mad.wide.u32 %at, %tid, 16, %at; mad.lo.u32 %to, %tid, 16, %smem; mov.u32 %i, 0;
COPY:
ld.global.v4.b32 {%x0, %x1, %x2, %x3}, [%at]; st.shared.v4.b32 [%to], {%x0, %x1, %x2, %x3};
add.u64 %at, %at, 2048; add.u32 %to, %to, 2048; add.u32 %i, %i, 2048; setp.lt.u32 %more, %i, BYTES;
@%more bra COPY;
fence.proxy.async.shared::cta;
bar.sync 0;
ld.shared.b32 %tmem, [%slot]; shl.b32 %lanes, %warp, 21; add.u32 %mine, %tmem, %lanes;
"""
SYNC = "barrier.cluster.arrive; barrier.cluster.wait;\n"
WAIT = "WAIT:\nmbarrier.try_wait.parity.shared.b64 %done, [%bar], 0;\n@!%done bra WAIT;\n"
FREE = """\
bar.sync 0;
@!%alloc bra END;
tcgen05.relinquish_alloc_permit.cta_group::G.sync.aligned; tcgen05.dealloc.cta_group::G.sync.aligned.b32 %tmem, COLUMNS;
"""
NAMES = [f"%x{i}" for i in range(128)]


def registers(count: int) -> str:
    return "{" + ", ".join(NAMES[:count]) + "}"


def address(name: str, count: int, offset: int) -> str:
    """%at = name + 4 * (count * row of the thread + offset)"""
    return f"mad.wide.u32 %at, %row, {4 * count}, {name}; add.u64 %at, %at, {4 * offset};\n"


def move(kind: str, count: int) -> str:
    if kind == "ld":
        return "".join(f"ld.global.b32 %x{i}, [%at+{4 * i}];\n" for i in range(count))
    return "".join(f"st.global.b32 [%at+{4 * i}], %x{i};\n" for i in range(count))


def filled(columns: int) -> str:
    """Every thread stores its row of `fill` to its lane."""
    text = ""
    for c in range(0, columns, 16):
        text += address("%fill", columns, c) + move("ld", 16) + f"add.u32 %to, %mine, {c};\n"
        text += f"tcgen05.st.sync.aligned.32x32b.x16.b32 [%to], {registers(16)};\n"
    return text + "tcgen05.wait::st.sync.aligned;\n"


def dumped(columns: int) -> str:
    """Every thread loads its lane to its row of `out`."""
    text = ""
    for c in range(0, columns, 16):
        text += f"add.u32 %to, %mine, {c};\ntcgen05.ld.sync.aligned.32x32b.x16.b32 {registers(16)}, [%to];\n"
        text += address("%out", columns, c) + move("st", 16)
    return text


def simulate(body: str, image: np.ndarray, fill: np.ndarray, mode: str = "eager", group: int = 1) -> np.ndarray:
    """Tensor memory, or whatever the body stores to `out`: an array like `fill`, (128 * CTAs, columns) words."""
    text = START + body + FREE + ("END:\n" + SYNC if group == 2 else "END:\n") + "ret;"
    values = {
        "COLUMNS": str(max(32, 1 << (fill.shape[1] - 1).bit_length())),
        "BYTES": str(image.shape[1]),
        "::G": f"::{group}",
    }
    for name, value in values.items():
        text = text.replace(name, value)
    names = [f".reg .b32 {', '.join(NAMES)};", ".reg .b32 %tid, %rank, %odd, %warp, %row, %smem, %bar, %slot, %tmem;"]
    names += [".reg .b32 %lanes, %mine, %to, %i, %d, %sa, %sb; .reg .b16 %mask; .reg .b64 %image, %fill, %out, %at;"]
    names += [".reg .b64 %da, %db; .reg .pred %first, %alloc, %leads, %more, %done, %yes, %no;"]
    names += [f".shared .align 1024 .b8 smem[{image.shape[1]}]; .shared .align 8 .b64 bar; .shared .align 4 .b32 slot;"]
    head = ".version 9.0\n.target sm_100a\n.address_size 64\n"
    entry = ".visible .entry k(.param .u64 image, .param .u64 fill, .param .u64 out)\n.reqntid 128, 1, 1\n{\n"
    ptx = head + entry + "\n".join(names) + "\n" + text.replace("; ", ";\n") + "\n}\n"
    out = np.zeros_like(fill)
    run(launch(ptx, [image, fill, out], group, cluster=group), mode=mode)
    return out


# ------------------------------------------------------------------------------------------------ register fragments
FRAGMENTS = {  # of .x2, in bits: width of a lane, (extent, stride) of the digits of a thread's index, of a register's
    "32x32b": (64, ((32, 64),), ((2, 32),)),
    "16x64b": (128, ((2, 1024), (2, 32), (8, 128)), ((2, 64),)),
    "16x128b": (256, ((4, 32), (8, 256)), ((2, 2048), (2, 128))),
    "16x256b": (512, ((4, 64), (8, 512)), ((2, 32), (2, 4096), (2, 256))),
    "16x32bx2": (128, ((16, 128), (2, 64)), ((2, 32),)),
}


def digits(number: int, modes: tuple[tuple[int, int], ...]) -> int:
    total = 0
    for extent, stride in modes:
        total += number % extent * stride
        number //= extent
    return total


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("op", ["min", "max"])
def test_load_and_reduce(op: str, absolute: bool, nan: bool) -> None:
    """A lane's words, and behind them the least or largest of them."""
    text = f"tcgen05.ld.red.sync.aligned.32x32b.x16.{op}{'.abs' * absolute}{'.NaN' * nan}.f32 "
    body = filled(16) + text + f"{registers(16)}, %x16, [%mine];\n" + address("%out", 17, 0) + move("st", 17)
    if nan == absolute:  # ptxas takes the type in both places
        body = body.replace(f"x16.{op}", f"x16.f32.{op}").replace(".f32 ", " ")
    given = np.random.default_rng(0).standard_normal((128, 16)).astype(np.float32)
    given[::5, 3] = np.nan
    fill = np.zeros((128, 17), np.uint32)
    fill.reshape(-1)[: 128 * 16] = given.view(np.uint32).reshape(-1)
    out = simulate(body, np.zeros((1, 2048), np.uint8), fill).view(np.float32)
    np.testing.assert_array_equal(out[:, :16], given)
    among = np.abs(given) if absolute else given
    want = among.min(1) if op == "min" else among.max(1)
    if not nan:
        want = np.nanmin(among, 1) if op == "min" else np.nanmax(among, 1)
    np.testing.assert_array_equal(out[:, 16], want)


@pytest.mark.parametrize("mode", ["eager", "late"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", FRAGMENTS)
def test_fragment(shape: str, packed: bool, mode: str) -> None:
    """A store lies where the traits say, and a load of the same shape brings it back."""
    width, threads, values = FRAGMENTS[shape]
    count = int(np.prod([extent for extent, _ in values]))
    columns = 64
    half = f", {4 if packed else 2}" if shape == "16x32bx2" else ""
    body = "mov.u32 %i, 0;\n" + "".join(f"mov.b32 %x{i}, 0;\n" for i in range(16))
    for c in range(0, columns, 16):
        body += f"add.u32 %to, %mine, {c}; tcgen05.st.sync.aligned.32x32b.x16.b32 [%to], {registers(16)};\n"
    body += "tcgen05.wait::st.sync.aligned;\n" + address("%fill", columns, 0) + move("ld", count)
    kind = f"sync.aligned.{shape}.x2"
    body += f"tcgen05.st.{kind}{'.unpack::16b' * packed}.b32 [%mine]{half}, {registers(count)};\n"
    body += "tcgen05.wait::st.sync.aligned;\n" + "".join(f"mov.b32 %x{i}, 7;\n" for i in range(count))
    body += f"tcgen05.ld.{kind}{'.pack::16b' * packed}.b32 {registers(count)}, [%mine]{half};\n"
    body += "tcgen05.wait::ld.sync.aligned;\n" + address("%fill", columns, 32) + move("st", count) + dumped(columns)
    fill = np.arange(1, 128 * columns + 1, dtype=np.uint32).reshape(128, columns) * np.uint32(0x10001)
    given = fill[:, :count].copy()
    out = simulate(body, np.zeros((1, 2048), np.uint8), fill, mode)
    np.testing.assert_array_equal(fill[:, 32 : 32 + count], given)
    want = np.zeros_like(out)
    for thread in range(128):
        for i in range(count):
            lane, bit = divmod(digits(thread % 32, threads) + digits(i, values), width)
            lane, column, value = thread // 32 * 32 + lane, bit // 32, given[thread, i]
            if packed:
                want[lane, 2 * column], want[lane, 2 * column + 1] = value & 0xFFFF, value >> 16
            else:
                want[lane, column] = value
    np.testing.assert_array_equal(out, want)


# ------------------------------------------------------------------------------------------------ mma
@dataclass
class Case:
    kind: str
    formats: tuple[str, str]
    m: int = 128
    n: int = 64
    group: int = 1
    swizzle: int = 128
    major: str = "k"  # of both operands
    half: bool = False  # float16 accumulators
    in_tensor: bool = False  # A
    vector: str = ""
    ids: tuple[int, int] = (0, 0)
    negate: int = 0
    shift: int | None = None  # scale-input-d

    @property
    def k(self) -> int:
        return 64 if self.kind.startswith("mxf4") else {"f16": 16, "tf32": 8}.get(self.kind, 32)

    @property
    def scales(self) -> int:
        return {"block16": 4, "block32": 1 if self.kind == "mxf8f6f4" else 2}.get(self.vector, 0)

    def descriptor(self) -> int:
        codes = [1 if self.kind.startswith("mxf4") else CODES[name] for name in self.formats]
        bits = codes[0] << 7 | codes[1] << 10 | self.negate << 13 | self.n // 8 << 17 | self.m // 16 << 24
        bits |= 3 << 15 if self.major == "mn" else 0
        if not self.vector:
            return bits | (0 if self.half else 1) << 4
        return bits | self.ids[1] << 4 | self.ids[0] << 29 | (0 if self.vector == "block16" else 1) << 23

    def columns(self) -> int:
        return self.n // 2 if (self.group, self.m) == (2, 128) else self.n


CASES = [
    Case("f16", ("f16", "f16")),
    Case("f16", ("bf16", "bf16"), m=64, n=16, swizzle=0),
    Case("f16", ("f16", "f16"), n=128, major="mn", negate=1),
    Case("f16", ("f16", "f16"), half=True, swizzle=64, negate=2),
    Case("f16", ("bf16", "bf16"), in_tensor=True, shift=2),
    Case("f16", ("f16", "f16"), group=2, m=256),
    Case("f16", ("f16", "f16"), group=2, m=128, n=128),
    Case("f16", ("f16", "f16"), group=2, m=128, n=128, in_tensor=True),
    Case("tf32", ("tf32", "tf32"), swizzle=32),
    Case("f8f6f4", ("e4m3", "e5m2"), n=32),
    Case("f8f6f4", ("e4m3", "e4m3"), n=128, major="mn", group=2, m=256),
    Case("f8f6f4", ("e2m1", "e2m3"), swizzle=0),
    Case("f8f6f4", ("e3m2", "e4m3")),
    Case("mxf8f6f4", ("e5m2", "e3m2"), vector="block32", ids=(1, 3)),
    Case("mxf4", ("e2m1", "e2m1"), vector="block32", ids=(2, 0), n=256, swizzle=32),
    Case("mxf4nvf4", ("e2m1", "e2m1"), vector="block16", n=96),
    Case("mxf4nvf4", ("e2m1", "e2m1"), vector="block16", group=2, m=256, n=128),
    Case("mxf4nvf4", ("e2m1", "e2m1"), vector="block16", group=2, m=128, n=128),
]


def name(case: Case) -> str:
    extra = [case.major * (case.major == "mn"), "half" * case.half, "tensor" * case.in_tensor, case.vector]
    return "-".join([case.kind, *case.formats, f"m{case.m}", f"cta{case.group}", *filter(None, extra)])


def numbers(rows: int, k: int, kind: str) -> np.ndarray:
    return RNG.choice(np.array([-2, -1.5, -1, 0, 0.5, 1, 2, 3], np.float32), (rows, k)).astype(FORMATS[kind])


def row_bytes(values: np.ndarray, case: Case, kind: str) -> np.ndarray:
    """(rows, 32) bytes of K-major rows, packed as the kind wants them."""
    raw = values.view(f"u{values.itemsize}") | (0x1FFF if kind == "tf32" else 0)  # tf32 has no such bits
    if case.kind.startswith("mxf4"):
        return raw[:, ::2] | raw[:, 1::2] << 4
    bits = {"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(kind, 0)
    if not bits:
        return raw.view(np.uint8).reshape(len(raw), -1)
    out = np.full((len(raw), 2, 16), 0xA5, np.uint8)  # 16 elements, then padding
    ones = (raw.reshape(len(raw), 2, 16, 1) >> np.arange(bits, dtype=np.uint8)) & 1
    out[:, :, : 2 * bits] = np.packbits(ones.reshape(len(raw), 2, -1), axis=-1, bitorder="little")
    return out.reshape(len(raw), 32)


def placed(values: np.ndarray, case: Case, kind: str) -> tuple[np.ndarray, int]:
    """(image of a tile in shared memory from an aligned address, its descriptor without the address)."""
    image, span = np.zeros(16384, np.uint8), case.swizzle
    if case.major == "mn":  # 128-byte swizzle: atoms of 8 k x 128 bytes, along k first
        raw = values.view(f"u{values.itemsize}")
        size, wide, ks = raw.itemsize, 128 // raw.itemsize, raw.shape[1]
        leading, stride = ks // 8 * 1024, 1024
        for row, k in np.ndindex(*raw.shape):
            at = row // wide * leading + k // 8 * stride + k % 8 * 128 + row % wide * size
            at ^= at >> 3 & 0x70
            image[at : at + size] = np.array([raw[row, k]]).view(np.uint8)
        return image, leading >> 4 << 16 | stride >> 4 << 32
    rows = row_bytes(values, case, kind)
    for row, byte in np.ndindex(*rows.shape):
        if span:
            at = row * span + byte
            at ^= at >> 3 & {128: 0x70, 64: 0x30, 32: 0x10}[span]
        else:
            at = row // 8 * 256 + row % 8 * 16 + byte // 16 * 128 + byte % 16
        image[at] = rows[row, byte]
    return image, (1 << 16 | span * 8 >> 4 << 32) if span else (128 >> 4 << 16 | 256 >> 4 << 32)


def lane_rows(case: Case) -> np.ndarray:
    """Lane of each row of D in its CTA."""
    rows = np.arange(case.m // case.group)
    return rows // 16 * 32 + rows % 16 if case.m == 64 else rows


def mma_body(case: Case, columns: int, descriptors: tuple[int, int]) -> str:
    """Thread 0 of the first CTA issues the mma and its commit."""
    fixed = 1 << 46 | LAYOUT[case.swizzle] << 61
    body = filled(columns) + (SYNC if case.group == 2 else "bar.sync 0;\n") + "@!%leads bra ISSUED;\n"
    for one, start, bits in (("a", 0, descriptors[0]), ("b", B_AT, descriptors[1])):
        body += (
            f"add.u32 %to, %smem, {start}; and.b32 %to, %to, 0xFFFFFF; shr.u32 %to, %to, 4; cvt.u64.u32 %d{one}, %to;\n"
        )
        body += f"or.b64 %d{one}, %d{one}, {bits | fixed};\n"
    body += "add.u32 %i, %tmem, 256; add.u32 %sa, %tmem, 288; add.u32 %sb, %tmem, 304; setp.eq.u32 %yes, %tid, 0;\n"
    kind = f"tcgen05.mma.cta_group::G.kind::{case.kind}" + (f".block_scale.{case.vector}" if case.vector else "")
    a = "[%i]" if case.in_tensor else "%da"
    scales = ", [%sa], [%sb]" if case.vector else ""
    shift = f", {case.shift}" if case.shift is not None else ""
    body += f"mov.b32 %x0, {case.descriptor()};\n{kind} [%tmem], {a}, %db, %x0{scales}, %yes{shift};\n"
    commit = "tcgen05.commit.cta_group::G.mbarrier::arrive::one.shared::cluster"
    if case.group == 2:
        body += f"mov.b16 %mask, 3; {commit}.multicast::cluster.b64 [%bar], %mask;\n"
    else:
        body += f"{commit}.b64 [%bar];\n"
    return body + "ISSUED:\n" + WAIT + dumped(columns)


def factor_words(case: Case, scale: np.ndarray, which: int) -> np.ndarray:
    """(128, columns) words with the factors of the rows of `scale` in every quarter of the lanes."""
    halves = 2 if which and (case.group, case.m) == (2, 128) else 1
    out = np.zeros((128, 16, 4), np.uint8)
    for half, part in enumerate(np.split(scale.view(np.uint8), halves)):
        for row, quarter in np.ndindex(len(part), 4):
            if halves == 1 or quarter // 2 == half:
                out[32 * quarter + row % 32, row // 32, case.ids[which] : case.ids[which] + case.scales] = part[row]
    return out.reshape(128, 64).view(np.uint32)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name)
def test_mma(case: Case) -> None:
    """D = A * B + D * 2^-shift for one instruction, D in the layout of M and cta_group."""
    a, b = numbers(case.m, case.k, case.formats[0]), numbers(case.n, case.k, case.formats[1])
    columns, lanes, per = 320, lane_rows(case), case.m // case.group
    image = np.zeros((case.group, IMAGE), np.uint8)
    start = RNG.integers(-4, 5, (case.m, case.n)).astype(np.float32)
    fill = np.zeros((case.group, 128, columns), np.uint32)
    left, right = a.astype(np.float32), b.astype(np.float32)
    sa = sb = np.zeros((0, 0), np.uint8)
    if case.vector:
        scale = np.array([0.5, 1, 2, 4], np.float32).astype(FORMATS["ue8m0" if case.vector == "block32" else "e4m3"])
        sa, sb = (RNG.choice(scale, (rows, case.scales)) for rows in (case.m, case.n))
        left = left * np.repeat(sa.astype(np.float32), case.k // case.scales, 1)
        right = right * np.repeat(sb.astype(np.float32), case.k // case.scales, 1)
    descriptors = (0, 0)
    for cta in range(case.group):
        mine = slice(cta * per, cta * per + per)
        image[cta, :16384], first = placed(a[mine], case, case.formats[0])
        half = case.n // case.group
        image[cta, B_AT:SCALES_AT], second = placed(b[cta * half : cta * half + half], case, case.formats[1])
        descriptors = first, second
        words = (
            start[mine].astype(np.float16).view(np.uint16).astype(np.uint32)
            if case.half
            else start[mine].view(np.uint32)
        )
        put(case, fill[cta], lanes, words)
        if case.in_tensor:
            both = np.concatenate([a[mine], -a[mine]])[:128]  # Layout B takes A from the lane of D
            fill[cta, :, 256:264] = both.view(np.uint16).view(np.uint32)
        if case.vector:
            fill[cta, :, 288:304] = factor_words(case, sa[mine], 0)
            fill[cta, :, 304:320] = factor_words(case, sb, 1)
    got = simulate(mma_body(case, columns, descriptors), image, fill.reshape(-1, columns), "late", case.group)
    product = (-1) ** bin(case.negate).count("1") * left @ right.T
    if case.in_tensor and case.columns() < case.n:
        product[:, case.n // 2 :] *= -1
    want = start * np.float32(2.0 ** -(case.shift or 0)) + product
    for cta in range(case.group):
        words = taken(case, got.reshape(case.group, 128, columns)[cta], lanes)
        values = words.astype(np.uint16).view(np.float16) if case.half else words.view(np.float32)
        np.testing.assert_array_equal(values, want[cta * per : cta * per + per].astype(values.dtype))


def put(case: Case, tensor: np.ndarray, lanes: np.ndarray, words: np.ndarray) -> None:
    if case.columns() < case.n:
        words, lanes = np.concatenate(np.split(words, 2, axis=1)), np.arange(128)
    tensor[lanes, : words.shape[1]] = words


def taken(case: Case, tensor: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    if case.columns() < case.n:
        return np.concatenate(np.split(tensor[:, : case.columns()], 2), axis=1)
    return tensor[lanes, : case.n].copy()


# ------------------------------------------------------------------------------------------------ copies
@pytest.mark.parametrize(
    "shape, source",
    [
        ("128x256b", np.arange(128)),
        ("128x128b", np.arange(128)),
        ("32x128b.warpx4", np.tile(np.arange(32), 4)),
        ("64x128b.warpx2::02_13", np.tile(np.arange(64), 2)),
        ("64x128b.warpx2::01_23", np.repeat(np.arange(64).reshape(2, 1, 32), 2, 1).reshape(-1)),
    ],
)
def test_copy(shape: str, source: np.ndarray) -> None:
    """source: row of shared memory that each lane gets."""
    width = 8 if "256b" in shape else 4
    rows = RNG.integers(0, 1 << 32, (128, width), dtype=np.uint32)
    image = np.zeros((1, 4096), np.uint8)
    for row, chunk in np.ndindex(
        128, width // 4
    ):  # 8 rows x 16 bytes are contiguous, chunks along the row 2048 B apart
        image[0, row * 16 + chunk * 2048 :][:16] = rows[row, 4 * chunk : 4 * chunk + 4].view(np.uint8)
    descriptor = 1 << 46 | 2048 >> 4 << 16 | 128 >> 4 << 32
    body = filled(16) + "bar.sync 0; @!%leads bra ISSUED;\n"
    body += f"shr.u32 %to, %smem, 4; cvt.u64.u32 %da, %to; or.b64 %da, %da, {descriptor};\n"
    body += f"tcgen05.cp.cta_group::1.{shape} [%tmem], %da;\n"
    body += "tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%bar];\nISSUED:\n" + WAIT + dumped(16)
    got = simulate(body, image, np.zeros((128, 16), np.uint32), "newest")
    np.testing.assert_array_equal(got[:, :width], rows[source])
    assert not got[:, width:].any()


# ------------------------------------------------------------------------------------------------ what is wrong
def small(mode: str, change: tuple[str, str]) -> None:
    """One f16 mma, with text replaced."""
    case = Case("f16", ("f16", "f16"), n=16)
    image = np.zeros((1, IMAGE), np.uint8)
    body = mma_body(case, 32, (1 << 16 | 64 << 32, 1 << 16 | 64 << 32))
    assert change[0] in START + body + FREE, change[0]
    everything = {"START": START, "body": body, "FREE": FREE}
    for key, text in everything.items():
        if change[0] in text:
            everything[key] = text.replace(*change)
            break
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "START", everything["START"])
        patch.setitem(globals(), "FREE", everything["FREE"])
        simulate(everything["body"], image, np.zeros((128, 32), np.uint32), mode)


@pytest.mark.parametrize("mode", MODES)
def test_right(mode: str) -> None:
    small(mode, ("bar.sync 0;", "bar.sync 0;"))


COMMIT = "tcgen05.commit.cta_group::G.mbarrier::arrive::one.shared::cluster.b64 [%bar];\n"
WRONG = {
    "leak": (("tcgen05.dealloc.cta_group::G.sync.aligned.b32 %tmem, COLUMNS;", ""), "are not deallocated"),
    "bad dealloc": (("%tmem, COLUMNS", "%tmem, 64"), "no allocation of the CTA"),
    "bad count": (("[%slot], COLUMNS", "[%slot], 48"), "power of two"),
    "permit": (
        (
            "aligned; tcgen05.dealloc",
            "aligned; tcgen05.alloc.cta_group::G.sync.aligned.shared::cta.b32 [%slot], 32; tcgen05.dealloc",
        ),
        "after tcgen05.relinquish_alloc_permit",
    ),
    "exhausted": (
        ("ALLOCATED:", "tcgen05.alloc.cta_group::G.sync.aligned.shared::cta.b32 [%slot], 512;\nALLOCATED:"),
        "no 512 columns",
    ),
    "group": (("alloc_permit.cta_group::G", "alloc_permit.cta_group::2"), r"cta_group::2 in a kernel that uses"),
    "foreign quarter": (("shl.b32 %lanes, %warp, 21", "shl.b32 %lanes, %odd, 21"), "may access lanes 32 to 63"),
    "not allocated": (("add.u32 %to, %mine, 16", "add.u32 %to, %mine, 32"), "columns 32 to 47 of tensor memory"),
    "never written": (("tcgen05.st.sync.aligned.32x32b.x16.b32", "// "), "which nothing has written"),
    "no wait::st": (("tcgen05.wait::st.sync.aligned;\n", ""), "without tcgen05.wait::st"),
    "wait::st after the barrier": (
        ("tcgen05.wait::st.sync.aligned;\nbar.sync 0;", "bar.sync 0;\ntcgen05.wait::st.sync.aligned;"),
        "without (synchronisation in between|tcgen05.wait::st)",
    ),
    "no barrier": (("bar.sync 0;\n@!%leads", "@!%leads"), "without synchronisation in between"),
    "no commit wait": ((WAIT, ""), "tcgen05 operation"),
    "no commit": ((COMMIT, "mbarrier.arrive.shared.b64 _, [%bar];\n"), "no tcgen05.commit covers|under way"),
    "no proxy fence": (("fence.proxy.async.shared::cta;\n", ""), "without fence.proxy.async"),
    "operand overwritten": (
        (COMMIT, COMMIT + "st.shared.b32 [%smem], %x0;\n"),
        "async operation (reads it|may still read)",
    ),
    "tensor memory overwritten": (
        ("ISSUED:\n", "ISSUED:\ntcgen05.st.sync.aligned.32x32b.x1.b32 [%mine], {%x0};\n"),
        "overwrites tensor memory lanes 0 to 15, column 0",
    ),
}


@pytest.mark.parametrize("mode", ["eager", "late"])
@pytest.mark.parametrize("what", WRONG)
def test_wrong(what: str, mode: str) -> None:
    change, message = WRONG[what]
    with pytest.raises(Fault, match=message):
        small(mode, change)


def test_store_left() -> None:
    """A tcgen05.st that nobody has waited for when the kernel ends."""
    with pytest.raises(Fault, match="not waited for its tcgen05.st|without tcgen05.wait::st"):
        small("eager", (WAIT, WAIT + "tcgen05.st.sync.aligned.32x32b.x1.b32 [%mine], {%x0};\n"))


def test_read_before_overwrite() -> None:
    """An mma writes what another warp has read, without a barrier after the read."""
    read = "bar.sync 0;\ntcgen05.ld.sync.aligned.32x32b.x1.b32 {%x1}, [%mine];\n@!%leads"
    with pytest.raises(Fault, match="overwrites tensor memory lanes .* which warp . of CTA 0 has read"):
        small("eager", ("bar.sync 0;\n@!%leads", read))


@pytest.mark.parametrize(
    "text",
    ["tcgen05.shift.cta_group::1.down [%tmem];", "tcgen05.cp.cta_group::1.4x256b [%tmem], %da;"],
)
def test_refused(text: str) -> None:
    with pytest.raises(NotModelled, match="no form for tcgen05"):
        small("eager", (COMMIT, text + "\n" + COMMIT))
