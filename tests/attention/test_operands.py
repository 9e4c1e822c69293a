"""The list of operands of a main loop: what follows from it where K and V are two, and where V lies in K."""

from dataclasses import replace

import pytest

from cute_kernels.attention import decode, operands, sm90, sm100
from cute_kernels.attention.decode import tile_table as decode_table
from cute_kernels.attention.operands import K, Prepared, V
from cute_kernels.attention.request import KernelRequest
from cute_kernels.attention.sm90 import tile_table as sm90_table
from cute_kernels.attention.sm100 import tile_table as sm100_table
from cute_kernels.attention.spec import AttentionSpec, KVSpec

LATENT = 576, 512  # (head_dim_qk, head_dim_vo) of MLA: V is the first 512 columns of K
TILE = sm90.Sm90TileConfig(64, 64, 2, load_warps=1, o_parts=2)


def spec_of(q="bf16", kv="bf16", dims=(128, 128), tile=None, shares_v=False):
    return AttentionSpec(q, KVSpec(kv, shares_v=shares_v), (q,), *dims, tile=tile or sm90.Sm90TileConfig(64, 64, 2))


@pytest.mark.parametrize(
    "q, kv, bits, sf_bytes, prepared",
    [
        ("bf16", "bf16", 16, 0, (None, None)),
        ("e4m3", "e4m3", 8, 0, (None, Prepared(8, 2, transposed=True))),
        ("bf16", "e4m3", 8, 0, (Prepared(16, 2), Prepared(16, 2))),
        ("bf16", "nvfp4", 4, 8, (Prepared(16, 2), Prepared(16, 2))),
    ],
)
def test_two_operands_of_hopper(q, kv, bits, sf_bytes, prepared):
    tile = replace(TILE, raw_stages=3)
    k, v = sm90_table.operands(spec_of(q, kv), tile, (192, 128))
    assert (k.holds, v.holds) == ((K,), (V,)) and (k.load_role, v.prepare_role) == ("load_k", "prepare_v")
    assert (k.rows, k.columns, v.rows, v.columns) == (64, 192, 64, 128)
    assert (k.bits, v.sf_bytes, (k.prepared, v.prepared)) == (bits, sf_bytes, prepared)
    for x in (k, v):  # stages as stored are `raw_stages` only before stages that are prepared
        assert (x.stages, x.all_stages) == ((3, 5) if x.prepared else (2, 2))
        made = 2 * 64 * x.columns * x.prepared.bits // 8 if x.prepared else 0
        assert x.smem_bytes == x.stages * 64 * (x.columns * bits // 8 + x.sf_bytes) + made


def test_operands_of_blackwell_and_decode():
    assert all(x.prepared == Prepared(16, 2) for x in sm100_table.operands(spec_of("e4m3", "nvfp4"), TILE, (64, 64)))
    assert all(x.prepared is None for x in sm100_table.operands(spec_of("e4m3", "e4m3"), TILE, (64, 64)))
    tile = decode.DecodeTileConfig(64, 128, 3)
    k, v = decode_table.operands(KVSpec("e4m3", scales="token"), tile, (512, 256))
    assert (k.sf_bytes, v.sf_bytes, k.columns, v.columns, k.all_stages) == (4, 4, 512, 256, 3)


def test_pieces_cut_the_columns_of_k_and_the_keys_of_v():
    k, v = sm90_table.operands(spec_of(), replace(TILE, n=128, stages=4, pieces=8), (512, 512))
    assert (k.rows, k.columns, v.rows, v.columns) == (128, 64, 16, 512) and k.smem_bytes == v.smem_bytes == 4 * 16384


def test_v_in_k_is_one_operand_with_one_ring():
    """One tensor, one load role, one ring of stages with its barriers, and the bytes of K alone."""
    two, one = (spec_of(dims=LATENT, tile=TILE, shares_v=shares_v) for shares_v in (False, True))
    (x,) = found = sm90_table.operands(one, TILE, LATENT)
    assert x == sm90_table.operands(two, TILE, LATENT)[0]._replace(holds=(K, V))
    assert (x.tensor, x.load_role, x.all_stages, x.smem_bytes) == (K, "load_k", 2, 2 * 64 * 576 * 2)
    assert operands.holding(found, K) is operands.holding(found, V) is x and operands.tensors(one.kv) == (K,)
    saved = sm90_table.smem_bytes(two, TILE, LATENT) - sm90_table.smem_bytes(one, TILE, LATENT)
    assert saved == 2 * (64 * 512 * 2 + sm90_table.STAGE_BYTES), "stages of V, with a barrier pair each"
    for table in (sm100_table.operands(one, TILE, LATENT), decode_table.operands(one.kv, TILE, LATENT)):
        assert table == found


def test_roles_and_arrivals_follow_from_the_list():
    pytest.importorskip("cutlass")
    from cute_kernels.attention import geometry, pdl
    from cute_kernels.attention.kv import rings
    from cute_kernels.attention.sm90.roles import roles

    dims = 256, 256  # which the op has
    for kv, loaders, preparers in (("bf16", (2, 1), (0, 0)), ("e4m3", (2, 1), (2, 4))):
        two, one = (spec_of("bf16", kv, dims, replace(TILE, o_parts=1), shares_v) for shares_v in (False, True))
        for spec, load, prepare in zip((two, one), loaders, preparers, strict=True):
            table, each = roles(spec), sm90_table.operands(spec, spec.tile, dims)
            assert table.warps(*(x.load_role for x in each)) == len(each) == load
            assert pdl.prologue_threads(spec) == 32 * (1 + load)
            assert table.warps("load_v") == load - 1 and table.warps("prepare_k") == prepare
            for x in each:
                assert rings.arrivals(spec, table, x) == 1  # the warp that announces the bytes to TMA
                assert rings.readers(spec, table, x) == (prepare or table.warps("mma")), (
                    "once per warp, after its last MMA"
                )
        assert geometry.kv_row_bytes(two) == 2 * geometry.kv_row_bytes(one)


def test_which_kernels_read_v_in_k():
    """Hopper's of 16 bits, and of the head dims of latent attention."""
    for op in (sm100, decode):
        for schedule in ("tiles", "stream_k"):
            refusal = op.supports(replace(spec_of(shares_v=True), schedule=schedule))
            assert refusal is not None and refusal.field == "shares_v"
    for dims in (LATENT, (512, 512)):
        request = KernelRequest(head_dim_qk=dims[0], head_dim_vo=dims[1], shares_v=True)
        for split in (False, True):
            spec = sm90.candidate(request, "sm_90a", split)
            assert spec.kv.shares_v and sm90.supports(spec) is None and spec.tile.scores_apart
            assert sm90.supports(replace(spec, kv=KVSpec("e4m3", shares_v=True))).field == "shares_v"
            assert sm90.supports(sm90.candidate(replace(request, head_dim_vo=256), "sm_90a", split)) is not None
        for change, field in (({"alibi": True}, "alibi"), ({"custom_mask": "bits", "causal": False}, "custom_mask"),
                              ({"skip": True}, "skip")):  # fmt: skip
            assert sm90.supports(sm90.candidate(replace(request, **change), "sm_90a")).field == field


def test_which_kernels_take_turns():
    """Those over rows of 16 bits that are found by slots, with any tile that shared memory has room for."""
    for dims in (LATENT, (512, 512)):
        by_slots = KernelRequest(
            head_dim_qk=dims[0], head_dim_vo=dims[1], shares_v=True, source="slots", causal=False, rows=64
        )
        for split in (False, True):
            spec = sm90.candidate(by_slots, "sm_90a", split)
            assert sm90.supports(spec) is None and spec.tile.alternates and not spec.tile.scores_apart
            groups = spec.tile.column_groups(spec.kv, dims)
            assert groups == ((0, 1, 2, 3, 8) if dims == LATENT else (0, 1, 2, 3), (4, 5, 6, 7))
            apart = replace(spec.tile, scores_apart=True, alternates=False)
            assert sm90.supports(replace(spec, tile=apart)) is None  # to compare both
            for change in ({"scores_apart": True}, {"n": 32}, {"o_parts": 1}):
                refusal = sm90.supports(replace(spec, tile=replace(spec.tile, **change)))
                assert refusal is not None and refusal.field == "tile"
            for kv in (KVSpec(shares_v=True), KVSpec(shares_v=True, source="gather")):
                assert sm90.supports(replace(spec, kv=kv)).field == "tile"


def test_names_say_whether_v_is_in_k():
    plain, shared = (spec_of(dims=LATENT, tile=TILE, shares_v=shares_v).name for shares_v in (False, True))
    assert shared != plain and shared == plain.replace("bf16_", "bf16_kvbf16v_", 1)
