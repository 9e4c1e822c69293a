"""Dense rows of 8-bit caches in decode: all ways to load them give equal bits, and lanes read each byte once."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("cutlass", reason="needs the DSL")

from bench.cases.attention import AttentionCase
from cute_kernels.attention import decode
from cute_kernels.attention.decode import layout, mainloop, tile_table
from cute_kernels.attention.kv import tma
from cute_kernels.attention.request import KernelRequest
from cute_kernels.attention.spec import HEAD_DIM_UNIT, MAX_PADDED_DIM
from cute_kernels.device.copy import LINE_BYTES
from tests.conftest import ARCH
from tests.sim import launcher
from tests.sim.workloads import attention, simulated

DIMS = [dim for dim in range(HEAD_DIM_UNIT, MAX_PADDED_DIM + 1, HEAD_DIM_UNIT) if dim % 64]
CASE = AttentionCase(
    "", function="decode", q_lens=(1, 2, 0, 1), kv_lens=(521, 300, 9, 0), heads_q=4, heads_kv=2, page_size=64,
    data="needles", sink=True, kv_dtype="fp8",
)  # fmt: skip
# The same tokens in other pages. Rows of a head follow each other in HND pages, and are loaded as lines; in NHD pages
# they lie apart, and are loaded one by one. Pages of 128 rows have two boxes.
SMALL, LARGE, APART = {"page_size": 8}, {"page_size": 128}, {"page_size": 128, "layout": "NHD"}


def spec_of(dim, kv="e4m3", page_size=16):
    request = KernelRequest(kv=kv, head_dim_qk=dim, head_dim_vo=dim, page_size=page_size, rows=1)
    return decode.candidate(request, ARCH)


def equal_bits(*calls):
    """Whether calls, each a case and its forms, have equal bits and are right, in the simulator."""
    with simulated(ARCH, [], 3):
        found = [attention.call(*call) for call in calls]
    assert max(error for _, error in found) <= 1
    return len({attention.digest(results) for results, _ in found}) == 1


@pytest.mark.kernels
def test_lines_and_rows_give_equal_bits():
    case = replace(CASE, head_dim_qk=80, head_dim_vo=80)
    assert equal_bits((case,), *((replace(case, **change),) for change in (SMALL, LARGE, APART)))


@pytest.mark.kernels
def test_rows_without_pages_are_loaded_one_by_one():
    """They may begin inside a line, also where there is one head, whose rows follow each other."""
    case = replace(CASE, head_dim_qk=80, head_dim_vo=80, heads_q=2, heads_kv=1)
    assert equal_bits((case,), (case, ("ragged",)))


@pytest.mark.kernels
@pytest.mark.parametrize("dim", [80, pytest.param(112, marks=pytest.mark.full)])
def test_tiles_are_chosen_by_the_shared_memory_of_padded_rows(dim):
    spec = spec_of(dim)
    counted = tile_table.smem_bytes("e4m3", spec.padded_vo, spec.tile)
    allocated = launcher.load("attention.decode", spec, ARCH).shared
    saved = 2 * (spec.padded_vo - dim) * spec.tile.n * spec.tile.stages
    assert 0 <= counted - saved - allocated <= 1024


def test_rows_are_dense_where_boxes_would_be_narrow_or_padded():
    for dim in range(HEAD_DIM_UNIT, MAX_PADDED_DIM + 1, HEAD_DIM_UNIT):
        assert layout.is_dense(spec_of(dim)) == layout.is_dense(spec_of(dim, "e5m2")) == (dim in DIMS)
        assert not any(layout.is_dense(spec) for spec in (spec_of(dim, "bf16"), spec_of(dim, page_size=3)))
        assert all(rows * dim % LINE_BYTES == 0 for rows in tma.BOXES), "boxes are whole lines"


def offsets_of(spec, lane):
    """The offsets of a lane, and the dense rows of K and V."""
    k, v = layout.CachedRow.of_k(spec), layout.CachedRow.of_v(spec)
    r = SimpleNamespace(k_offsets=[0, 0], v_offsets=[0, 0])
    mainloop.set_dense_offsets(r, k, v, lane // 4, lane % 4)
    return r, k, v


@pytest.mark.parametrize("dim", DIMS)
def test_four_lanes_read_a_row_of_k(dim):
    """Each byte of it once, with loads whose addresses are multiples of what they load: lane t the columns that it has
    of Q."""
    for g in range(8):
        found = []
        for t in range(4):
            r, k, _ = offsets_of(spec_of(dim), 4 * g + t)
            loads = [(k.offset(256, 8, chunk) + r.k_offsets[0], k.width // 4) for chunk in range(k.chunks)]
            loads += [(k.offset(256, 8, k.chunks) + r.k_offsets[1], k.tail // 4)] if k.tail else []
            assert all(at % size == 0 for at, size in loads)
            mine = [at + i - (g + 8) * dim for at, size in loads for i in range(size)]
            assert len(mine) == 2 * layout.q_words(spec_of(dim))
            found += mine
        assert sorted(found) == list(range(dim))


@pytest.mark.parametrize("dim", DIMS)
def test_lanes_read_their_columns_of_v(dim):
    """Of keys 2 t and 2 t + 1, and of a row nothing but its own bytes: columns past the head dim are others again."""
    spec = spec_of(dim)
    each = layout.columns(spec)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        r, _, v = offsets_of(spec, lane)
        for key in (0, 1, 8, 25):
            for chunk in range(v.chunks):
                own, added = layout.v_offset_of(spec, chunk, key)
                at = v.offset(256, added, chunk) + r.v_offsets[own] - (key + 2 * t) * dim
                wanted = layout.first_column(spec, chunk * each, g)
                assert at % each == 0 and 0 <= at <= dim - each
                assert at == wanted or wanted >= dim
