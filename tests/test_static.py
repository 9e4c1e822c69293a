"""tools/static.py on a program written down here; Blackwell's prefill within the numbers that it was designed
to, of instructions that kernels use which ran there."""

import re

import pytest

from cute_kernels import catalog
from tests.kernels import COVERING
from tools import proven, static

# A block of 128 x 128 scores; docs/blackwell.md has what flash-attn-4 issues.
MOST = {"softmax masked": 625, "correction": 30}
SOFTMAX = {"bf16": 565, "fp16": 565, "e4m3": 567}  # 1.03 (426 + 508 emulated); flash-attn-4's 562, and what catches NaN
MMA = {"bf16": 215, "fp16": 215, "e4m3": 133}  # for two blocks: 1.05 of flash-attn-4's
GATHERED = 4  # more, where pages of any size are: their proxy fence is 6 instructions
IN_TURN = {"bf16": 249, "fp16": 249, "e4m3": 170}  # for two blocks of one half, whose K and V are stages of their own
PERIOD = {"bf16": 2048, "fp16": 2048, "e4m3": 1552}  # cycles of a block of both halves, as the rates have them
RATES = {"bf16": 4, "fp16": 4, "e4m3": 2}  # cycles of Q K^T, and of P V, of a half, by 128 of head_dim / 128
PIECES = {"bf16": 4, "fp16": 4, "e4m3": 2}  # of P: MMAs begin with all but the last one
HOPS = 100  # cycles of two barriers
PRECISE = 0.02  # by which a count may change

STALLED = 2 << 41  # high word of an instruction


def listing(*texts):
    lines = ["Function : k"]
    for k, text in enumerate(texts):
        lines.append(f"        /*{16 * k:04x}*/                   {text} ;    /* 0x{k:016x} */")
        lines.append(f"                                                /* 0x{STALLED:016x} */")
    return "\n".join(lines) + "\n"


def test_a_steady_path_leaves_out_what_is_not_owed():
    texts = ["MOV R1, R2", "VOTE.ANY P0, P0", "@!P0 BRA 0x50", "LDTM.x32 R4, tmem[UR4]", "STTM.x32 tmem[UR4], R4",
             "FADD R1, R1, R2", "@P1 BRA 0x10", "EXIT"]  # fmt: skip
    (code,) = static.parse(listing(*texts)).values()
    (loop,) = static.loops(code)
    assert loop.role == "correction"
    assert [i.address for i in loop.path] == [0x10, 0x20, 0x50, 0x60]
    assert loop.stall == 8 and loop.stored == []


def test_a_steady_path_takes_in_all_mmas():
    texts = ["NOP", "@P0 BRA 0x30", "UTCHMMA gdesc[UR4]", "BRA 0x50", "EXIT", "@!P1 BRA 0x0", "BRA 0x0"]
    (code,) = static.parse(listing(*texts)).values()
    loop = next(iter(static.loops(code)))
    assert loop.role == "mma" and [i.name for i in loop.path].count("UTCHMMA") == 1


def shipped_here():
    return [(arch, spec) for arch, op, spec in COVERING if op == static.OP]


@pytest.mark.kernels
@pytest.mark.parametrize(("arch", "spec"), [pytest.param(*x, id=f"{x[0]}-{x[1].name}") for x in shipped_here()])
def test_counts_are_those_on_record(blackwell, arch, spec):
    """A change of the compiler, or of a seam, that costs over 2 % has to be seen: `python -m tools.static record`."""
    entry = blackwell(arch).find(static.OP, spec)
    found = static.rows(arch, spec.name, cubin_of(entry))
    known = [row for row in static.recorded() if (row["arch"], row["kernel"]) == (arch, spec.name)]
    assert [row["role"] for row in found] == [row["role"] for row in known]
    for new, old in zip(found, known, strict=True):
        assert abs(new["instructions"] / int(old["instructions"]) - 1) <= PRECISE, new


@pytest.mark.kernels
@pytest.mark.parametrize(("arch", "spec"), [pytest.param(*x, id=f"{x[0]}-{x[1].name}") for x in shipped_here()])
def test_kernels_use_what_kernels_that_ran_on_a_device_use(blackwell, arch, spec):
    entry = blackwell(arch).find(static.OP, spec)
    assert not proven.unproven(object_of(entry, "ptx").read_text())


def test_forms_are_told_with_all_qualifiers():
    ptx = """
    tcgen05.st.sync.aligned.32x32b.x64.b32 [%r1], {%r2};
    @%p1 add.rm.f32x2 %rd1, %rd2, %rd3; // tcgen05.other
    mul.f32x2 %rd1, %rd2, %rd3;
    max.f32 %f1, %f2, %f3;
    max.NaN.f32 %f1, %f2, %f3, %f4;
    cvt.rn.f16x2.e2m1x2 %r1, %b1;
    cvt.rn.f16x2.e4m3x2 %r1, %h1;
    cvt.rn.relu.f16x2.e2m1x2 %r1, %b1;
    """
    unknown = {"tcgen05.st.sync.aligned.32x32b.x64.b32", "max.NaN.f32", "cvt.rn.relu.f16x2.e2m1x2"}
    assert proven.forms(ptx) == unknown | {"add.rm.f32x2", "mul.rn.f32x2", *proven.ALONE}
    assert proven.unproven(ptx) == unknown


def object_of(entry, suffix):
    return static.RECORD.parents[2] / "build" / "obj" / f"{entry['key']}.{suffix}"


def cubin_of(entry):
    return object_of(entry, "cubin").read_bytes()


def test_all_shipped_kernels_are_on_record():
    names = {(row["arch"], row["kernel"]) for row in static.recorded() if not static.is_peer(row)}
    assert names == {(arch, s.name) for arch in static.ARCHS for op, s in catalog.shipped(arch) if op == static.OP}


def test_peers_are_on_record():
    """What docs/blackwell.md compares with, on both architectures."""
    assert {row["arch"] for row in static.recorded() if static.is_peer(row)} == set(static.ARCHS)


def headlines():
    rows = (row for row in static.recorded() if row["arch"] == "sm_100a" and not static.is_peer(row))
    found, mmas = [], set()
    for row in rows:
        if not re.search("_cap_|_skip_", row["kernel"]) and "m256n128" in row["kernel"]:
            again = row["role"] == "mma" and row["kernel"] in mmas  # those of tiles of one half come last
            found.append(row | {"role": "mma in turn"} if again else row)
            mmas |= {row["kernel"]} if row["role"] == "mma" else set()
    return found


@pytest.mark.parametrize("row", headlines(), ids=lambda row: f"{row['kernel']}-{row['role']}")
def test_loops_keep_within_the_budget_of_a_b200(row):
    """Headline kernels with blocks of 128 keys; soft caps cost exponentials of their own, skip-softmax votes. From the
    first and from the last part of P on, until S of the next block is there."""
    dtype, dim = row["kernel"].split("_")[:2]
    mma = MMA[dtype] + GATHERED * ("_gather_" in row["kernel"])
    most = MOST | {"softmax": SOFTMAX[dtype], "mma": mma, "mma in turn": IN_TURN[dtype]}
    assert int(row["instructions"]) <= most[row["role"]]
    if row["role"] == "softmax":
        cycles = RATES[dtype] * int(dim.removeprefix("d"))  # of Q K^T, and of P V
        stored = [int(clock) for clock in row["stored"].split()]
        assert len(stored) == PIECES[dtype] == static.pieces(row["kernel"]) + 1
        first, last = stored[-2:]
        assert max(first + 2 * cycles, last + cycles // PIECES[dtype] + cycles) + HOPS <= PERIOD[dtype]


PREPARED = {"e4m3": 6, "nvfp4": 3}  # turns of the loop that converts a warp's 48 rows of a block
SHARED = {"e4m3": 2048, "nvfp4": 1880}  # cycles of shared memory: MMAs read 160 KiB, conversion and TMA move the rest


@pytest.mark.parametrize(("arch", "kv"), [(arch, kv) for arch in static.ARCHS for kv in PREPARED])
def test_a_scheduler_has_issue_slots_for_what_converts_a_cache(arch, kv):
    """A block of 96 keys and both halves, head_dim 128: a warp of each softmax, one that corrects, one that converts,
    and that which multiplies."""
    name = f"bf16_kv{kv}_d128_causal_tma_"
    rows = [row for row in static.recorded() if row["arch"] == arch and row["kernel"].startswith(name)]
    counts = {row["role"]: int(row["instructions"]) for row in rows}  # the last that prepares: V
    slots = 2 * counts["softmax"] + counts["correction"] + counts["mma"] + PREPARED[kv] * counts["prepare"]
    assert slots <= SHARED[kv]


def test_a_softmax_of_head_dim_256_takes_less_than_its_mmas():
    """64 keys of a tile's only half, whose Q K^T is a block ahead."""
    rows = [row for row in static.recorded() if "_d256_" in row["kernel"] and row["role"] == "softmax"]
    assert rows and all(int(row["stall"]) + HOPS <= 2 * 256 * RATES["bf16"] * 64 // 128 for row in rows)


KEY_BYTES, BYTES_A_CYCLE = 4, 27  # of K and V of 16 bits, times head_dim; what 8 TB/s leave an SM


def test_keys_of_many_rows_take_less_than_they_take_from_memory():
    """Two blocks, of which a group of softmax has each; slots of a scheduler: a warp each of two groups, one that
    corrects, and that which multiplies."""
    found: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for row in static.recorded():
        if "_m128n" in row["kernel"] and "_d256_" not in row["kernel"]:
            found.setdefault((row["arch"], row["kernel"]), {})[row["role"]] = row
    assert len(found) == 8 * len(static.ARCHS)
    for (_, kernel), rows in found.items():
        dim, keys = (int(re.search(name, kernel)[1]) for name in (r"_d(\d+)", r"m128n(\d+)"))
        memory = 2 * keys * KEY_BYTES * dim // BYTES_A_CYCLE
        softmax, *others = (rows[role] for role in ("softmax masked", "correction", "mma"))
        assert 2 * int(softmax["instructions"]) + sum(int(row["instructions"]) for row in others) <= memory, kernel
        if "_cap_" not in kernel:  # which costs exponentials of its own
            assert int(softmax["stall"]) + HOPS + RATES["bf16"] * 2 * dim * keys // 128 <= memory, kernel


def test_no_kernel_spills():
    assert {row["stack"] for row in static.recorded() if not static.is_peer(row)} == {"0"}
