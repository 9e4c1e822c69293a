"""Index tensors that hold anything, in the simulator: it faults where a kernel leaves its tensors, does not end, or
leaves a counter behind. On a GPU: test_gpu_hostile.py."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.cases import attention as cases
from bench.cases import hostile
from bench.cases.attention import LSE_TOLERANCE, AttentionCase
from cute_kernels.attention import geometry
from tests.conftest import ARCH
from tests.sim.workloads import distance, simulated
from wrappers import reference
from wrappers.attention.call import csr_sequences
from wrappers.attention.op import serve

ANY = st.one_of(st.integers(-(1 << 31), (1 << 31) - 1), st.integers(-20, 200))


def arguments(tokens, offsets, lens, columns, page_size, pages):
    shaped = lambda *shape: SimpleNamespace(shape=shape)  # noqa: E731
    return SimpleNamespace(
        query=SimpleNamespace(q=shaped(tokens, 8, 64), cu_seqlens_q=offsets),
        kv=SimpleNamespace(k=shaped(pages, 2, page_size, 64), page_table=shaped(1, 2, columns), kv_lens=lens),
    )


@given(st.integers(1, 100), ANY, ANY, ANY, st.integers(0, 9), st.sampled_from([1, 8, 64]), st.integers(0, 3))
def test_a_request_lies_inside_its_tensors(tokens, first, behind, length, columns, page_size, pages):
    a = arguments(tokens, [first, behind], [length], columns, page_size, pages)
    start, count = geometry.sequence_queries(a, 0)
    assert 0 <= start <= start + count <= tokens or (count == 0 and 0 <= start <= tokens)
    keys = geometry.table_keys(length, columns, page_size)
    assert 0 <= keys <= columns * page_size
    if 0 <= first <= behind <= tokens:
        assert (start, count) == (first, behind - first)
    if 0 <= length <= columns * page_size:
        assert keys == length
    keys = geometry.page_keys(pages, length, page_size)
    assert 0 <= keys <= pages * page_size
    if pages and 0 <= length <= page_size:
        assert keys == (pages - 1) * page_size + length


BASE = AttentionCase(
    "hostile", q_lens=(3, 0, 5), kv_lens=(140, 9, 40), heads_q=2, heads_kv=1, spare_pages=0, separate_tables=True,
    sink=True,
)  # fmt: skip
WHOLE = replace(BASE, heads_kv=2)  # heads that are not packed into rows
DECODE = replace(BASE, function="decode")
BY_FIVE = {"page_size": 5}  # no TMA box fits
WINDOW = {"window_left": 300}  # longer than all requests
D128 = {"head_dim_qk": 128, "head_dim_vo": 128}
SOME = {"rising offsets": 0, "pages": 1, "any bytes": 2}
ALL = {
    "lengths": 0, "rising offsets": 1, "falling offsets": 2, "pages": 3, "fewer pages of V": 4, "no columns": 5,
    "no pages": 6, "any bytes": 7,
}  # fmt: skip
LENGTHS = SOME | {"lengths": 0}
LISTED = {"starts": 2, "lengths": 4, "pages": 2, "any bytes": 8}
CALLS: dict[str, tuple[AttentionCase, tuple[str, ...], dict[str, int]]] = {  # case, forms, kind -> seed
    "prefill": (BASE, (), ALL),
    "prefill, window": (replace(WHOLE, window_left=30, causal=False), (), SOME),
    "prefill, shared scores": (replace(WHOLE, head_dim_qk=512, head_dim_vo=512), (), {"pages": 1, "any bytes": 2}),
    "prefill, gathered": (replace(WHOLE, **WINDOW, **BY_FIVE), ("csr",), LISTED),
    "prefill, gathered, packed": (
        replace(BASE, page_size=1, **WINDOW),
        (),
        {"lengths": 3, "pages": 1, "fewer pages of V": 2},
    ),
    "prefill, ragged": (WHOLE, ("ragged",), {"starts": 2, "falling starts": 1, "no pages": 2, "any bytes": 4}),
    "prefill, ranges": (WHOLE, ("ragged", "ranges"), {"starts": 2, "ranges": 3, "any bytes": 4}),
    "prefill, prefix": (WHOLE, ("ragged", "prefix"), {"ranges": 3, "any bytes": 4}),
    "prefill, mask": (WHOLE, ("csr", "mask"), {"starts": 2, "mask starts": 18, "no mask": 0}),
    "decode": (DECODE, (), ALL),
    "decode, nvfp4": (replace(DECODE, kv_dtype="nvfp4", **D128), (), SOME | {"no pages": 3}),
    "decode, many rows": (replace(DECODE, q_lens=(3, 0, 21), **D128), (), LENGTHS),  # all kinds: "decode"
    "decode, many rows, nvfp4": (replace(DECODE, q_lens=(3, 0, 21), kv_dtype="nvfp4", **D128), (), SOME),
    "decode, parts of their own": (replace(DECODE, invariant=True), (), SOME | {"no columns": 3}),
    "decode, gathered": (replace(DECODE, q_lens=(3, 0, 4), **BY_FIVE), ("csr",), LISTED | {"fewer pages of V": 0}),
}


@pytest.mark.parametrize(
    "in_forms", [(), ("csr",), ("ragged",), ("csr", "mask"), ("ragged", "mask", "alibi"), ("csr", "ranges")]
)
def test_the_reference_clamps_alike(in_forms):
    for seed, kind in enumerate(hostile.kinds(in_forms)):
        case = replace(BASE, page_size=5, window_left=100)
        p = hostile.spoilt(case, hostile.made(case, in_forms), kind, seed)
        o, lse, owners = hostile.expected(p)
        got, got_lse = reference.paged_attention(p)
        own = owners == 1
        assert distance(got[own], o[own], 1e-5) <= 1 and distance(got_lse[own], lse[own], 1e-5) <= 1, kind


# Calls served by a kernel that no other test compiles.
LATER = {"decode, many rows, nvfp4"}


@pytest.mark.kernels
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n in LATER else ()) for n in CALLS])
def test_simulated_kernels_stay_inside_their_tensors(name):
    case, in_forms, kinds = CALLS[name]
    with simulated(ARCH, [], 7):
        for kind, seed in kinds.items():
            p = hostile.spoilt(case, hostile.made(case, in_forms), kind, seed)
            function = hostile.served(p) if in_forms else cases.FUNCTIONS[case.function][0]
            o, lse, owners = hostile.expected(p)
            assert owners.max() <= 1, "two requests that own a row race"
            with hostile.guarded(hostile.arguments(case, p), ("out", "lse"), 0) as inputs:
                got, got_lse = function(**inputs)
            assert got[owners == 0].isnan().all() and got_lse[owners == 0].isnan().all(), (kind, "rows of no request")
            own = owners == 1
            assert distance(got[own], o[own], case.tolerance) <= 1, kind
            assert distance(got_lse[own], lse[own], LSE_TOLERANCE) <= 1, kind


@pytest.mark.kernels
def test_a_launch_without_room_for_all_parts_computes_none():
    """Offsets that fall make requests overlap: these have more tiles than their rows could, so parts than slots."""
    case = replace(DECODE, invariant=True, q_lens=(39, 41, *(40,) * 6), kv_lens=(9,) * 8, heads_q=1)
    p = cases.make_call(case)
    offsets = torch.tensor([0, 320] * 4 + [0], dtype=torch.int32)
    p = p._replace(requests=p.requests._replace(cu_seqlens_q=offsets))
    inputs = hostile.arguments(case, p)
    with simulated(ARCH, [], 7), hostile.guarded(inputs, ("out", "lse"), 0) as given_:
        got, lse = cases.FUNCTIONS["decode"][0](**given_)
    assert got.isnan().all() and lse.isnan().all()


@pytest.mark.kernels
@pytest.mark.parametrize("requests", [256, 2])
def test_a_launch_of_more_units_than_32_bits_count_computes_none(requests):
    """Half of the requests own all rows, with nearly 2^30 keys each: 5 tiles of 2^23 KV blocks, 5 x 2^30 in all. Of
    two, one does, without keys: that is computed."""
    case = replace(DECODE, q_lens=(319, 1), kv_lens=(9, 9), heads_q=1, page_size=256, lse=False, **D128)
    p = cases.make_call(case)
    columns = (1 << 30) // case.page_size - 1
    table = torch.empty(columns, dtype=torch.int32).as_strided((requests, columns), (0, 1))
    lens = torch.full((requests,), (1 << 31) - 1 if requests > 2 else 0, dtype=torch.int32)
    offsets = torch.tensor([0, 320] * (requests // 2) + [0], dtype=torch.int32)
    inputs = hostile.arguments(replace(case, separate_tables=False), p)
    inputs |= {"block_tables": table, "seq_lens": lens, "cum_seq_lens_q": offsets, "uses_shared_paged_kv_idx": True}
    with simulated(ARCH, [], 7):
        got = cases.FUNCTIONS["decode"][0](**inputs)
    assert got.isnan().all() == (requests > 2)


@pytest.mark.kernels
@pytest.mark.parametrize("function", ["context", "decode"])
def test_simulated_pages_of_many_rows(function):
    """Of 2^27 + 1, each page's the same: a request sees the last rows of its third page and of the one before. The last
    page holds 2^31 - 1 rows by what the call says, which is clamped, or 5."""
    case = replace(BASE, function=function, q_lens=(3, 4), kv_lens=(30, 12), window_left=20, page_size=15)
    size, ends, p = (1 << 27) + 1, (1 << 27, 5), hostile.made(case, ())
    pools = [x[:3, :, :1].contiguous() for x in (p.k, p.v)]
    pages = torch.tensor([2, 0, 1, 1, 2, 0], dtype=torch.int32)
    starts, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 6], [(1 << 31) - 1, 5]))
    out, lse = (torch.full(shape, torch.nan) for shape in ((7, 2, 64), (7, 2)))
    wide = p._replace(
        k=pools[0].expand(-1, -1, size, -1), v=pools[1].expand(-1, -1, size, -1), out=out.to(p.q.dtype), lse=lse,
        requests=csr_sequences(p.requests.cu_seqlens_q, starts, pages, last),
    )  # fmt: skip
    with simulated(ARCH, [], 7):
        serve(wide)
    for b, (rows, end) in enumerate(zip(((0, 3), (3, 7)), ends)):
        own = [2 if b else 0] * (40 - min(end, 40)) + [0 if b else 1] * min(end, 40)  # page of each of the last 40 keys
        k, v = (pool[own, :, 0] for pool in pools)
        options = {
            "mask": reference.TokenMask(left=reference.LeftBound(20)),
            "of_heads": reference.HeadTerms(p.sinks),
            "scale": p.scale,
        }
        want = reference.attention(p.q[slice(*rows)], k, v, **options)
        assert distance(wide.out[slice(*rows)], want[0], case.tolerance) <= 1
        assert distance(lse[slice(*rows)], want[1], LSE_TOLERANCE) <= 1
