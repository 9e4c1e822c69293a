"""Which spec a request gets, and what is refused. Plain Python: no DSL."""

from dataclasses import replace
from itertools import product

import pytest

from cute_kernels.attention import dispatch, sm90
from cute_kernels.attention.spec import AttentionSpec, MaskSpec, TileSpec

ARCH = "sm_90a"
BASE = dispatch.Request("bf16", 128, 128, 16, 4)


def all_requests():
    for dtype, dims, page, group, causal, window, cap, rows in product(
        ("bf16", "fp16"), sm90.TILES, sm90.PAGE_SIZES, (1, 3, 8), *[(False, True)] * 3, (1, 2, 64, 65, 1 << 30)
    ):
        yield dispatch.Request(dtype, dims[0], dims[1], page, group, causal, window, cap, rows)
        for kv_dtype, dim in sm90.SPLIT_TILES if causal else ():
            if dims == (dim, dim):
                yield dispatch.Request(dtype, dim, dim, page, group, causal, window, cap, rows, True, kv_dtype)


def test_every_request_gets_a_shipped_spec_that_serves_it():
    shipped = set(dispatch.shipped(ARCH))
    found = set()
    for request in all_requests():
        op, spec = dispatch.select(request, ARCH)
        found.add((op, spec))
        assert spec.mask.causal == request.causal and spec.kv.dtype == request.kv_dtype
        assert spec.soft_cap == (request.soft_cap and not request.split)
        assert spec.mask.window or not request.window
        assert (spec.dtype, spec.head_dim_qk) == (request.dtype, request.head_dim_qk)
        assert spec.head_dim_vo == request.head_dim_vo
        assert spec.pack_gqa == (request.split or request.group > 1 and request.rows <= dispatch.PACK_ROWS)
        assert spec.split == request.split
        many = request.rows * request.group > 8
        assert spec.wide == (request.split and many and request.head_dim_qk in sm90.WIDE_DIMS)
    assert found == shipped


def test_names_are_unique():
    names = [spec.name for _, spec in dispatch.shipped(ARCH)]
    assert len(set(names)) == len(names)


def test_blocks_of_keys_do_not_depend_on_the_batch():
    """n, which a row's rounding depends on, is the same whatever else a call holds: bits must not change with it. Wide
    kernels are for rows that the longest request has; `batch_invariant` does not ask."""
    widths: dict[tuple, set[int]] = {}
    for request in all_requests():
        _, spec = dispatch.select(request, ARCH)
        key = request.head_dim_qk, request.head_dim_vo, request.split, request.kv_dtype, spec.wide
        widths.setdefault(key, set()).add(spec.tile.n)
    assert all(len(n) == 1 for n in widths.values()), widths


@pytest.mark.parametrize(
    "change, word",
    [
        ({"dtype": "fp32"}, "dtype fp32"),
        ({"head_dim_qk": 96, "head_dim_vo": 96}, "(96, 96)"),
        ({"head_dim_vo": 64}, "(128, 64)"),
        ({"page_size": 5}, "page_size 5"),
        ({"page_size": 512}, "page_size 512"),
        ({"head_dim_qk": 192, "split": True}, "split: head_dim (192, 128)"),
        ({"kv_dtype": "e4m3"}, "kv e4m3: the sm_90a kernel has it for decoding only"),
    ],
)
def test_what_is_refused_is_named(change, word):
    with pytest.raises(NotImplementedError) as error:
        dispatch.select(replace(BASE, **change), ARCH)
    assert word in str(error.value) and "attention.sm90" in str(error.value)


def test_an_architecture_without_a_kernel_is_named():
    with pytest.raises(NotImplementedError, match=r"sm_100a.*sm_90a"):
        dispatch.select(BASE, "sm_100a")
    assert dispatch.shipped("sm_100a") == []


@pytest.mark.parametrize(
    "tile, word", [(TileSpec(64, 384, groups=3), "m is 8 rows"), (TileSpec(48, 128, groups=3), "n is a multiple")]
)
def test_supports_refuses_tiles_that_warps_cannot_share(tile, word):
    spec = AttentionSpec(mask=MaskSpec(True, True), pack_gqa=True, split=True, tile=tile)
    assert word in (sm90.supports(spec) or "")
    assert sm90.supports(replace(spec, tile=TileSpec(48, 384, groups=3))) is None


@pytest.mark.parametrize("tile", [TileSpec(96, 128), TileSpec(256, 128), TileSpec(128, 100)])
def test_supports_refuses_tiles(tile):
    assert "tile" in (sm90.supports(replace(AttentionSpec(), tile=tile)) or "")
