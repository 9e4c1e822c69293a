"""Parser, translation, scheduling and checks of the simulator, on hand-written PTX."""

import ml_dtypes
import numpy as np
import pytest
from ptxsim import MODES, Deadlock, Fault, Livelock, NotModelled, TiledArray, launch, numbers, run
from ptxsim.__main__ import main, unknown_forms
from ptxsim.forms import find, registered
from ptxsim.parse import parse

HEAD = """.version 8.7
.target sm_90a
.address_size 64
.file 1 "/somewhere/kernel.py"
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel(.param .b64 out) .reqntid {threads}, 1, 1
{{
.reg .pred %p<8>;
.reg .b32 %r<16>;
.reg .b64 %rd<8>;
.reg .f32 %f<8>;
ld.param.b64 %rd0, [out];
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ctaid.x;
mad.lo.s32 %r2, %r1, {threads}, %r0;
mul.wide.u32 %rd1, %r2, 4;
add.s64 %rd1, %rd0, %rd1;
mov.u32 %r3, dynamic;
shl.b32 %r4, %r0, 2;
add.s32 %r4, %r3, %r4;
"""
STORE = "st.global.b32 [%rd1], %r5;\nret;\n}\n"


def execute(body: str, threads: int = 64, grid: int = 1, cluster: int = 1, **how) -> np.ndarray:
    """Run `body`, which leaves its result in %r5; one u32 a thread. %r4: shared word of the thread."""
    out = np.full(threads * grid, 0xDEAD, np.uint32)
    run(launch(HEAD.format(threads=threads) + body + STORE, [out], grid, cluster=cluster, shared=4096), **how)
    return out


def test_scopes_rename_registers_and_labels():
    body = (
        "mov.u32 %r5, 1;\n" + 2 * "{ .reg .b32 %r6; mov.u32 %r6, 3; AGAIN: add.s32 %r5, %r5, %r6; bra NEXT; NEXT: }\n"
    )
    assert (execute(body) == 7).all()
    kernel = parse(HEAD.format(threads=32) + body + STORE)
    assert {"AGAIN@1", "AGAIN@2"} <= set(kernel.labels) and {"%r6@1", "%r6@2"} <= set(kernel.registers)


def test_guards_keep_old_values():
    out = execute("and.b32 %r6, %r0, 1; setp.eq.u32 %p1, %r6, 0; mov.u32 %r5, 9; @%p1 mov.u32 %r5, 4;\n")
    assert (out == np.where(np.arange(64) % 2, 9, 4)).all()


def test_threads_load_parameters_at_addresses_of_their_own():
    """The two words of the parameter, which is the address of the output."""
    body = "mov.b64 %rd2, out; and.b32 %r6, %r0, 1; mul.wide.u32 %rd3, %r6, 4; add.s64 %rd2, %rd2, %rd3;\n"
    low, high = execute(body + "ld.param.b32 %r5, [%rd2];\n").reshape(-1, 2).T
    same = execute(body.replace(", 1;", ", 0;") + "ld.param.b32 %r5, [%rd2];\n")
    assert (low == low[0]).all() and (high == high[0]).all() and low[0] != high[0]
    assert (same == same[0]).all()


def test_pairs_take_an_operand_that_is_the_same_for_all():
    body = "mov.b32 %r6, 0x00050007; shl.b32 %r7, %r0, 16; or.b32 %r7, %r7, %r0; {}.u16x2 %r5, %r7, %r6;\n"
    lane = np.arange(64)
    for name, choose in (("min", np.minimum), ("max", np.maximum)):
        assert (execute(body.format(name)) == (choose(lane, 5) << 16 | choose(lane, 7))).all()


@pytest.mark.parametrize(("rounding", "low"), [("rm", 2.0**24), ("rn", 2.0**24), ("rp", 2.0**24 + 2)])
def test_packed_sums_are_rounded_as_they_say(rounding, low):
    """sm_100a. 2^24 + 1 lies between two float32; 1 + 1 does not."""
    body = f"""mov.b64 %rd2, {{0f4B800000, 0f3F800000}}; mov.b64 %rd3, {{0f3F800000, 0f3F800000}};
    add.{rounding}.f32x2 %rd4, %rd2, %rd3; mov.b64 {{%r6, %r7}}, %rd4;
    and.b32 %r5, %r0, 1; setp.eq.u32 %p1, %r5, 0; selp.b32 %r5, %r6, %r7, %p1;
    """
    out = execute(body).view(np.float32)
    assert (out == np.where(np.arange(64) % 2, np.float32(2), np.float32(low))).all()


@pytest.mark.parametrize(("flush", "low"), [("", 0x00400001), (".ftz", 0)])
def test_packed_sums_flush_where_they_say(flush, low):
    """sm_100a. Denormals are an operand and a result in the low half, and a result of normal ones in the high half."""
    body = f"""mov.b64 %rd2, {{0f00400000, 0f00800001}}; mov.b64 %rd3, {{0f00000001, 0f80800000}};
    add.rm{flush}.f32x2 %rd4, %rd2, %rd3; mov.b64 {{%r6, %r7}}, %rd4;
    and.b32 %r5, %r0, 1; setp.eq.u32 %p1, %r5, 0; selp.b32 %r5, %r6, %r7, %p1;
    """
    assert (execute(body) == np.where(np.arange(64) % 2, 0 if flush else 1, low)).all()


def test_loops_diverge_and_meet_again():
    body = """mov.u32 %r5, 0; mov.u32 %r6, 0;
    MORE: setp.ge.u32 %p1, %r6, %r0; @%p1 bra DONE;
    add.s32 %r6, %r6, 1; add.s32 %r5, %r5, 2; bra MORE;
    DONE: shfl.sync.idx.b32 %r7, %r5, 31, 31, 0xffffffff; add.s32 %r5, %r5, %r7;
    """
    lane = np.arange(64)
    for mode in MODES:
        assert (execute(body, mode=mode, seed=2) == 2 * lane + 2 * (lane // 32 * 32 + 31)).all()


def test_an_unknown_form_names_its_line(tmp_path):
    with pytest.raises(NotModelled, match=r"line 21: .*multimem"):
        execute("multimem.ld_reduce.global.add.u32 %r5, [%rd0];\n")
    (tmp_path / "kernel.ptx").write_text(HEAD.format(threads=32) + "frob.u32 %r5, %r0;\n" + STORE)
    assert unknown_forms(tmp_path / "kernel.ptx") == {"frob.u32": 1}
    assert main(["forms", str(tmp_path / "kernel.ptx")]) == 1


def test_every_form_names_its_section():
    assert len(registered()) > 100
    assert all(" " in form.isa for form in registered())
    assert find("add.s32") and find("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16")


def test_a_fault_names_the_source_line():
    with pytest.raises(
        Fault, match=r"line 22 \(kernel.py:77\), warps 0, 1 of CTA 0: ld.shared.b32: reads shared 0x0, which nothing"
    ):
        execute(".loc 1 77 5\nld.shared.b32 %r5, [%r4];\n")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 %r5, [%rd1+4];\n", r"4 B at offset 256 of argument 0, which has 256 B"),
        ("ld.global.b32 %r5, [%rd1+-1048576];\n", r"lies below every buffer|offset"),
        ("ld.global.b32 %r5, [%rd1+2];\n", r"is not aligned to 4 B"),
        ("add.s32 %r4, %r4, 4096; st.shared.b32 [%r4], %r0; mov.u32 %r5, 0;\n", r"4 B at shared 0x10\d0, the CTA has"),
        (
            "st.shared.b32 [%r4], %r0; xor.b32 %r6, %r4, 128; ld.shared.b32 %r5, [%r6];\n",
            r"written by warp \d of CTA 0|which warp \d of CTA 0 writes without",
        ),
        (
            "st.shared.b32 [%r3], %r0; mov.u32 %r5, 0;\n",
            r"overwrites shared 0x0, written by warp \d of CTA 0, without synchronisation",
        ),
        (
            "cp.async.ca.shared.global [%r3], [%rd1], 4; mov.u32 %r5, 0;\n",
            r"several threads write shared 0x0|writes shared 0x0 while an async write is under way",
        ),
        ("add.s32 %r6, %r0, 15; bar.sync %r6, 64; mov.u32 %r5, 0;\n", r"barrier \d\d, a CTA has 16"),
        ("mov.u32 %r5, 0; div.u32 %r5, %r0, %r5;\n", r"division by zero"),
        ("setp.eq.u32 %p1, %r0, 7; mov.u32 %r5, 0; @%p1 trap;\n", r"gave up"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", MODES)
def test_faults(body, message, mode):
    with pytest.raises(Fault, match=message):
        execute(body, mode=mode)


def test_barriers_order_shared_memory():
    """The other warp's value after a barrier; the next write needs a second one."""
    body = "st.shared.b32 [%r4], %r0; bar.sync 0; xor.b32 %r6, %r4, 128; ld.shared.b32 %r5, [%r6];\n"
    for mode in MODES:
        assert (execute(body, mode=mode, seed=3) == np.arange(64) ^ 32).all()
    with pytest.raises(Fault, match=r"which warp \d of CTA 0 has read, without synchronisation"):
        execute(body + "st.shared.b32 [%r4], %r5;\n")
    assert (execute(body + "bar.sync 0; st.shared.b32 [%r4], %r5;\n") == np.arange(64) ^ 32).all()


def test_barriers_that_reduce():
    """All threads learn whether each of them, or one, agrees, also where they call the barrier at two places."""
    body = """setp.ne.u32 %p1, %r0, {alone}; setp.lt.u32 %p2, %r0, 32; @%p2 bra FIRST;
    barrier.cta.red.{op}.aligned.pred %p3, 1, 64, %p1; bra.uni JOIN;
    FIRST: barrier.cta.red.{op}.aligned.pred %p3, 1, 64, %p1; JOIN: selp.u32 %r5, 1, 0, %p3;
    """
    for mode in MODES:
        for op, alone, found in (("and", 40, 0), ("and", 64, 1), ("or", 40, 1)):
            assert (execute(body.format(op=op, alone=alone), mode=mode) == found).all()
    assert (execute("setp.eq.u32 %p1, %r0, 64; bar.red.or.pred %p3, 0, %p1; selp.u32 %r5, 1, 0, %p3;\n") == 0).all()


def test_half_words_of_two_warps():
    """Different warps write and read halves of one word; the other half stays unordered."""
    body = """and.b32 %r6, %r0, 31; shl.b32 %r6, %r6, 2; shr.u32 %r7, %r0, 5; mad.lo.s32 %r6, %r7, 2, %r6;
    add.s32 %r6, %r3, %r6; st.shared.b16 [%r6], %r0; ld.shared.u16 %r5, [%r6];
    """
    assert (execute(body) == np.arange(64)).all()
    whole = "bar.sync 0; and.b32 %r6, %r0, 31; shl.b32 %r6, %r6, 2; add.s32 %r6, %r3, %r6; ld.shared.b32 %r5, [%r6];\n"
    assert (execute(body + whole) >> 16 == np.arange(64) % 32 + 32).all()


def test_deadlock_report():
    body = "setp.lt.u32 %p1, %r0, 32; mov.u32 %r5, 0; @%p1 bra LEAVE; bar.sync 1, 64; LEAVE:\n"
    with pytest.raises(Deadlock) as caught:
        execute(body)
    assert "warp  1 of CTA 0, 32 lanes, line 21: bar.sync 1, 64 [in the barrier]" in str(caught.value)
    assert "barrier 1 of CTA 0: 32 of 64 threads have arrived" in str(caught.value)


def test_livelock_report():
    with pytest.raises(Livelock, match=r"no end after 500 units(.|\n)*line 21"):
        execute("AGAIN: ld.global.b32 %r5, [%rd1]; setp.ne.u32 %p1, %r5, 0; @%p1 bra AGAIN;\n", limit=500)


def test_grid_subsets():
    body = "mov.u32 %r5, %r1;\n"
    assert (execute(body, grid=5).reshape(5, 64) == np.arange(5)[:, None]).all()
    out = execute(body, grid=5, blocks=[(3, 0, 0)]).reshape(5, 64)
    assert (out[3] == 3).all() and (out[[0, 1, 2, 4]] == 0xDEAD).all()
    out = execute(body, grid=6, cluster=2, blocks=[(3, 0, 0)]).reshape(6, 64)
    assert (out[2:4] == [[2], [3]]).all() and (out[[0, 1, 4, 5]] == 0xDEAD).all()


def test_blocks_wait_for_each_other_only_if_resident():
    """CTA 0 spins until CTA 1 has written."""
    body = """mov.u32 %r5, 1; setp.eq.u32 %p1, %r1, 0; @%p1 bra SPIN;
    st.relaxed.gpu.global.b32 [%rd1+-256], 1; bra DONE;
    SPIN: ld.relaxed.gpu.global.b32 %r6, [%rd1]; setp.ne.u32 %p2, %r6, 1; @%p2 bra SPIN; DONE:
    """
    assert (execute(body, grid=2, resident=2, mode="random", seed=1) == 1).all()
    with pytest.raises(Livelock):
        execute(body, grid=2, resident=1, limit=2000)


MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"


def test_shared_memory_of_a_cta_that_has_left():
    write = "st.shared.b32 [%r4], %r1;" + MEET + "xor.b32 %r6, %r1, 1; mapa.shared::cluster.u32 %r7, %r4, %r6;\n"
    read = "ld.shared::cluster.b32 %r5, [%r7];\n"
    assert (execute(write + read + MEET, grid=2, cluster=2).reshape(2, 64) == [[1], [0]]).all()
    with pytest.raises(Fault, match="exit: CTA . leaves, warp . of CTA . reads shared 0x0 of CTA . without"):
        execute(write + read, grid=2, cluster=2)
    late = """setp.eq.u32 %p1, %r1, 1; @%p1 bra OUT; mov.u32 %r8, 0;
    WASTE: add.s32 %r8, %r8, 1; setp.lt.u32 %p2, %r8, 300; @%p2 bra WASTE; ld.shared::cluster.b32 %r5, [%r7]; OUT:
    """
    with pytest.raises(Fault, match="of a CTA that has exited"):
        execute(write + late, grid=2, cluster=2)


def test_cluster_waits_belong_to_arrivals():
    assert (execute("mov.u32 %r5, 1;" + MEET + MEET, grid=2, cluster=2) == 1).all()
    with pytest.raises(Fault, match="waits at the cluster barrier without having arrived"):
        execute(MEET + "barrier.cluster.wait.aligned;\n", grid=2, cluster=2)


@pytest.mark.parametrize("mode", MODES)
def test_plain_accesses_are_ordered_after_atomics(mode):
    body = """setp.ne.u32 %p1, %r0, 0; @%p1 bra JOIN; st.shared.b32 [%r3], 0; JOIN: bar.sync 0;
    atom.shared.add.u32 %r6, [%r3], 1; {} ld{}.shared.u32 %r5, [%r3]; max.u32 %r5, %r5, 32; min.u32 %r5, %r5, 32;
    """
    assert (execute(body.format("bar.sync 0;", ""), mode=mode) == 32).all()
    assert (execute(body.format("", ".volatile"), mode=mode) == 32).all()
    for unordered in ("", "setp.eq.u32 %p2, %r0, 0; @%p2 st.shared.b32 [%r3], 5; bar.sync 0;"):
        with pytest.raises(Fault, match=r"shared 0x0, .*warp \d.*, without synchronisation in between"):
            execute(body.format(unordered, ""), mode=mode)


def test_a_relaxed_arrival_hands_on_what_was_fenced_of_the_own_cta():
    fence = "fence.release.sync_restrict::shared::cta.cluster;\n"
    meet = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;\n"
    peer = "xor.b32 %r6, %r1, 1; mapa.shared::cluster.u32 %r7, %r4, %r6;\n"
    end = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
    own = peer + "st.shared.b32 [%r4], %r1;\n{}" + meet + "ld.shared::cluster.b32 %r5, [%r7];\n" + end
    assert (execute(own.format(fence), grid=2, cluster=2).reshape(2, 64) == [[1], [0]]).all()
    with pytest.raises(Fault, match="without synchronisation in between"):
        execute(own.format(""), grid=2, cluster=2)
    other = peer + "st.shared::cluster.b32 [%r7], %r1;\n" + fence + meet + "ld.shared.b32 %r5, [%r4];\n" + end
    with pytest.raises(Fault, match="without synchronisation in between"):
        execute(other, grid=2, cluster=2)
    full = other.replace(fence, "").replace(".relaxed", "")
    assert (execute(full, grid=2, cluster=2).reshape(2, 64) == [[1], [0]]).all()


def test_arrivals_beyond_the_count():
    body = """setp.ne.u32 %p1, %r0, 0; @%p1 bra READY; mbarrier.init.shared.b64 [%r3], 1; READY: bar.sync 0;
    mbarrier.arrive.shared.b64 _, [%r3]; mov.u32 %r5, 0;
    """
    with pytest.raises(Fault, match="more arrivals in phase 0 than its count 1"):
        execute(body)


def test_bytes_that_nobody_waits_for():
    body = """setp.ne.u32 %p1, %r0, 0; mov.u32 %r5, 0; @%p1 bra OUT; mbarrier.init.shared.b64 [%r3], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 64; OUT:
    """
    with pytest.raises(Fault, match="exit: mbarrier shared 0x0 with 64 bytes missing"):
        execute(body)


def test_byte_matrices():
    """sm_100a: what stmatrix .m16n8 scatters, ldmatrix .m16n16 gathers by rows four apart instead of two."""
    store = """shl.b32 %r7, %r0, 4; and.b32 %r7, %r7, 255; add.s32 %r7, %r3, %r7; mul.lo.u32 %r8, %r0, 0x04040404;
    add.u32 %r8, %r8, 0x03020100; stmatrix.sync.aligned.m16n8.x2.trans.shared.b8 [%r7], {%r8, %r8}; bar.sync 0;
    """
    out = execute(store + "ld.shared.b32 %r5, [%r4];\n", threads=32).view(np.uint8).reshape(8, 16)
    row, column = np.arange(8)[:, None], np.arange(16)[None, :]
    lane, byte = row // 2 + 4 * (column % 8), row % 2 + 2 * (column // 8)
    assert (out == (4 * lane + byte)).all()
    load = "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r5, %r6}, [%r7];\n"
    for wanted, register in enumerate(("", "mov.b32 %r5, %r6;\n")):
        got = execute(store + load + register, threads=32).view(np.uint8).reshape(32, 4)
        lane, byte = np.arange(32)[:, None], np.arange(4)[None, :]
        row, column = (4 * (lane % 4) + 2 * wanted + byte % 2) % 8, lane // 4 + 8 * (byte // 2)
        assert (got == out[row, column]).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("swizzle", [0, 128])
def test_gather_and_scatter_of_four_rows(swizzle, mode):
    """sm_100a: rows 5, 0, 9 (outside: zeros) and 3 of a column block, stored to rows 1, 2, 7 and 0 elsewhere."""
    source = np.random.default_rng().integers(0, 1 << 16, (8, 96), np.uint16)
    target = np.zeros((8, 64), np.uint16)
    ptx = """.target sm_100a
    .extern .shared .align 1024 .b8 dynamic[];
    .visible .entry kernel(.param .align 64 .b8 a[128], .param .align 64 .b8 b[128]) .reqntid 32, 1, 1 {
    .reg .pred %p<4>; .reg .b32 %r<16>; .reg .b64 %rd<4>;
    mov.b64 %rd0, a; cvta.param.u64 %rd0, %rd0; mov.b64 %rd1, b; cvta.param.u64 %rd1, %rd1;
    mov.u32 %r0, %tid.x; mov.u32 %r3, dynamic; add.s32 %r4, %r3, 1024;
    setp.ne.u32 %p0, %r0, 0; @%p0 bra OUT;
    mbarrier.init.shared.b64 [%r4], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 512;
    mov.b32 %r5, 32; mov.b32 %r6, 5; mov.b32 %r7, 0; mov.b32 %r8, 9; mov.b32 %r9, 3;
    cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes
        [%r3], [%rd0, {%r5, %r6, %r7, %r8, %r9}], [%r4];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r4], 0; @%p1 bra HERE; bra WAIT;
    HERE: mov.b32 %r5, 0; mov.b32 %r6, 1; mov.b32 %r7, 2; mov.b32 %r8, 7; mov.b32 %r9, 0;
    cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%rd1, {%r5, %r6, %r7, %r8, %r9}], [%r3];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; OUT: ret; }
    """
    run(launch(ptx, [TiledArray(array, (1, 64), swizzle) for array in (source, target)], shared=2048), mode=mode)
    expected = np.zeros_like(target)
    expected[[1, 2, 0]] = source[[5, 0, 3], 32:]
    assert (target == expected).all()


@pytest.mark.parametrize("place", range(4))
def test_every_pair_of_e2m1_codes_becomes_fp16(place):
    """The low code is the low half. Other bytes of the word, which differ, leave no trace."""
    others = 0x5AC3961E & ~(255 << 8 * place)
    body = f"""{{ .reg .b8 b0, b1, b2, b3; shl.b32 %r6, %r0, {8 * place}; xor.b32 %r6, %r6, {others};
    mov.b32 {{b0, b1, b2, b3}}, %r6; cvt.rn.f16x2.e2m1x2 %r5, b{place}; }}\n"""
    pairs = np.arange(256, dtype=np.uint8)
    codes = np.stack([pairs & 15, pairs >> 4], -1).view(ml_dtypes.float4_e2m1fn)
    assert (execute(body, 256) == codes.astype(np.float16).view(np.uint32)[:, 0]).all()


def test_fma_rounds_once():
    """(1 - 2^-24) (1 + 2^-23) lies 2^-47 below a tie of normal numbers, 2^-150 (1 - 2^-40) just below one of denormal
    ones. float64 does not hold the sums."""
    got = numbers.fma(1 - 2**-24, np.float32(1 + 2**-23), np.float32(2**-47) * np.float32([1 - 2**-24, 1, 1 + 2**-23]))
    assert got.tolist() == [1, 1, 1 + 2**-23]
    odd = np.float32(2**-127 + 2**-149)
    assert numbers.fma(2**-75 * (1 + 2**-20), np.float32(2**-75 * (1 - 2**-20)), odd) == odd
