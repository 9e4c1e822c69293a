"""Which spec a problem gets, and what is refused. Plain Python: no DSL."""

from dataclasses import replace
from functools import partial
from itertools import islice, product

import pytest

from cute_kernels import archs, catalog
from cute_kernels import shipped as policy
from cute_kernels.attention import args, decode, dispatch, sm100
from cute_kernels.attention.request import KernelRequest
from cute_kernels.attention.spec import TMA_PAGES, KVSpec, LogitsSpec, MaskSpec
from tests.conftest import specs_of

ARCH = "sm_90a"
BLACKWELL = ("sm_100a", "sm_103a")
HEAD_DIMS = [{"head_dim_qk": dim, "head_dim_vo": dim} for dim in (64, 128)]
BASE = KernelRequest("bf16", "bf16", "bf16", 128, 128, 16, 4)
WHOLE, SPLIT = replace(BASE, split_kv="never"), replace(BASE, split_kv="always")
DIMS = (*policy.USUAL, *policy.WIDE)  # head dims of shipped kernels
DECODED = [("half", 64), ("half", 128), ("half", 256)]  # (type of the cache, head_dim) of shipped decode kernels
DECODED += [(kv, dim) for kv in ("e4m3", "nvfp4") for dim in (64, 128, 256)]
SAMPLED = 7  # no factor of a number of values


@pytest.fixture
def every_problem(request):
    """The function below for every problem with --all; otherwise for one in SAMPLED, in which all pairs of values of
    fields meet."""
    return partial(problems_of, 1 if request.config.getoption("--all") else SAMPLED)


def problems_of(step, way):
    """Problems that some kernel serves with whole tiles ("never" split), or with split keys ("always"), for the head
    dims of shipped kernels."""
    every = product(("bf16", "fp16"), (8, 256, 1), (1, 3, 8), *[(False, True)] * 3, (1, 2, 64, 65, 1 << 30))
    for q, page, group, causal, window, cap, rows in islice(every, 0, None, step):
        base = KernelRequest(
            q, q, q, 128, 128, page, group, rows, split_kv=way, causal=causal, window=window, soft_cap=cap
        )  # fmt: skip
        if way == "never":
            for qk, vo in DIMS:
                for kv in (q, "e4m3", "nvfp4"):
                    yield replace(base, kv=kv, head_dim_qk=qk, head_dim_vo=vo)
                for out in (q, "e4m3", "nvfp4"):
                    yield replace(base, head_dim_qk=qk, head_dim_vo=vo, q="e4m3", kv="e4m3", out=out)
            continue
        if not causal:
            continue
        for (kind, dim), out, way in product(DECODED, (q, "e4m3", "nvfp4"), ("always", "fixed")):
            kv = q if kind == "half" else kind
            yield replace(base, kv=kv, out=out, head_dim_qk=dim, head_dim_vo=dim, split_kv=way,
                          drafts=window, skip=cap)  # fmt: skip
            yield replace(base, kv=kv, out=out, head_dim_qk=dim, head_dim_vo=dim, split_kv=way)
            if kv == "e4m3":
                yield replace(base, q=kv, kv=kv, out="bf16" if out == q else out, head_dim_qk=dim, head_dim_vo=dim,
                              split_kv=way)  # fmt: skip


def serves(spec, problem):
    """Whether a kernel of `spec` computes the problem, as the spec's docstrings say."""
    mask, short = spec.mask, problem.kv == "nvfp4" and any(dim % 32 for dim in spec.dims)  # rows of 16 bytes for TMA
    fetched = problem.source == "ragged" or problem.page_size in TMA_PAGES and not short and not problem.record
    return (
        (spec.q, spec.kv.dtype, *spec.dims) == (problem.q, problem.kv, problem.head_dim_qk, problem.head_dim_vo)
        and problem.out in spec.out
        and mask.causal in (("always" if problem.causal else "never"), "value")
        and (mask.window or mask.custom == "ranges" or not problem.window)
        and mask.prefix == problem.prefix
        and (mask.tree or not problem.drafts)
        and (spec.logits.soft_cap or not problem.soft_cap)
        and (spec.logits.skip or not problem.skip)
        and spec.mask.custom == problem.custom_mask
        and spec.logits.alibi == problem.alibi
        and spec.kv.extra == problem.extra
        and spec.kv.source == ("slots" if problem.source == "slots" else "tma" if fetched else "gather")
        and (spec.kv.record, spec.kv.extra_record) == (problem.record, problem.extra_record)
        and spec.kv.union == problem.share_keys
    )


BY_TOKEN = {"kv": "e4m3", "kv_scales": "token"}


def usual_types():
    """Fields of problems."""
    kinds = product(("bf16", "fp16"), (64, 128))
    return [{"q": q, "kv": q, "out": q, "head_dim_qk": dim, "head_dim_vo": dim} for q, dim in kinds]


@pytest.mark.parametrize("arch", [ARCH, *BLACKWELL])
def test_every_problem_of_prefill_is_served_and_every_shipped_kernel_serves_one(arch, every_problem):
    """With whole tiles, on every architecture that has an MMA for prefill."""
    prefill, found = "attention.sm90" if arch == ARCH else "attention.sm100", set()
    masked = {"custom_mask": "bits", "causal": False}
    ranges = {"custom_mask": "ranges", "causal": False}
    more = (
        masked,
        masked | {"window": True},
        ranges,
        {"prefix": True},
        {"skip": True, "qhead_per_kvhead": 1},
        {"out": "nvfp4"},
    )
    types = [*usual_types(), *({"kv": "e5m2"} | dim for dim in HEAD_DIMS)]
    types += [{"q": "e4m3", "kv": "nvfp4"} | dim for dim in HEAD_DIMS]
    types += [{"kv": kv, "out": "nvfp4"} | dim for kv in ("e4m3", "nvfp4") for dim in HEAD_DIMS]
    some = (replace(WHOLE, **each, **also) for each in types for also in ({}, {"window": True}))
    others = (replace(WHOLE, **each | also) for each in usual_types() for also in more)
    by_token = (replace(WHOLE, **BY_TOKEN, **dim, window=window) for dim in HEAD_DIMS for window in (False, True))
    for problem in (*every_problem("never"), *some, *others, *(by_token if arch == ARCH else ())):
        op, spec = dispatch.select(problem, arch)
        found.add(spec)
        assert op == prefill and serves(spec, problem)
    assert {spec for spec in specs_of(prefill, arch) if spec.schedule == "tiles"} <= found


RECORDS_OF = {  # of the first and of a second cache, by head_dim
    576: (("e4m3", ""), ("656", ""), ("352", "")),
    512: (("528_fp32", ""), ("528", ""), ("584", ""), ("584", "584"), ("528", "528"), ("528", "288")),
}


@pytest.mark.parametrize("arch", [ARCH, *BLACKWELL])
def test_every_problem_of_decode_is_served_and_every_shipped_kernel_serves_one(arch, every_problem):
    found = set()
    types = [{"kv": "e5m2"} | dim for dim in HEAD_DIMS] + [{"q": "e4m3", "kv": "nvfp4"} | dim for dim in HEAD_DIMS]
    some = (replace(SPLIT, **each, rows=rows) for each in types for rows in (1, 1 << 20))
    caches = list(product(("bf16", "e4m3", "nvfp4"), HEAD_DIMS))
    narrow = (replace(BASE, kv=kv, **dim, rows=1, visible_keys=200) for kv, dim in caches)
    many = (replace(BASE, kv=kv, **dim, rows=1, kv_heads=decode.MANY_PER_SM * 132) for kv, dim in caches)
    by_token = (replace(BASE, **BY_TOKEN, split_kv="always", **dim, rows=rows) for dim in HEAD_DIMS for rows in (1, 16))
    latent = [replace(BASE, head_dim_qk=dim, head_dim_vo=512, shares_v=True, **change) for dim in (512, 576)
              for change in ({}, {"causal": False}, {"window": True}, {"page_size": 1}) if arch == ARCH]  # fmt: skip
    latent += [replace(p, rows=rows) for p in latent for rows in (2, 4, 16)]
    slots = [replace(p, source="slots", causal=False) for p in latent if not p.window]
    latent += [replace(p, extra=extra) for p in slots for extra in (False, True)]
    latent += [replace(p, record=record, extra_record=extra) for p in latent
               for record, extra in RECORDS_OF[p.head_dim_qk] if p.extra == bool(extra)]  # fmt: skip
    latent += [replace(p, q="e4m3") for p in latent if p.record == "e4m3"]
    latent += [replace(p, share_keys=True) for p in latent if p.source == "slots" and not p.extra]
    latent += [replace(p, split_kv="never") for p in latent if p.source == "slots" and not (p.extra or p.record)]
    chosen = (replace(BASE, **dim, source="slots", causal=False, rows=rows) for dim in HEAD_DIMS for rows in (1, 4))
    for problem in (*every_problem("always"), *some, *narrow, *many, *by_token, *latent, *chosen):
        op, spec = dispatch.select(problem, arch)
        found.add((op, spec))
        assert spec.schedule == "stream_k" and serves(spec, problem)
    assert {(op, spec) for op, spec in dispatch.shipped(arch) if spec.schedule == "stream_k"} <= found


@pytest.mark.parametrize(
    "change, ctas_per_sm",
    [
        ({}, 2),
        ({"visible_keys": 257}, 1),
        ({"split_kv": "fixed"}, 1),
        ({"split_kv": "always"}, 2),
        ({"page_size": 1}, 1),
        ({"rows": 2}, 1),
        ({"q": "fp16", "out": "fp16"}, 1),  # none is shipped
        ({"q": "fp16", "out": "fp16", "split_kv": "always"}, 1),
        ({"head_dim_qk": 256, "head_dim_vo": 256}, 1),
    ],
)
def test_narrow_windows_are_served_by_two_ctas_of_an_sm(change, ctas_per_sm):
    request = KernelRequest(kv="e4m3", rows=1, qhead_per_kvhead=8, kv_heads=512, window=True, visible_keys=256)
    op, spec = dispatch.select(replace(request, **change), ARCH)
    assert (op, spec.tile.ctas_per_sm) == ("attention.decode", ctas_per_sm)
    assert dispatch.select(replace(request, **change), "sm_100a")[1].tile.ctas_per_sm == 1


@pytest.mark.parametrize(
    "change, ctas_per_sm",
    [
        ({}, 2),
        ({"kv_heads": 131}, 1),
        ({"sms": 78, "kv_heads": 78}, 2),
        ({"keys": 1 << 17}, 2),
        ({"rows": 2}, 1),
        ({"split_kv": "fixed"}, 1),
        ({"split_kv": "always"}, 1),
        ({"page_size": 1}, 1),
        ({"kv": "e5m2"}, 1),  # none is shipped
        ({"kv": "nvfp4"}, 2),
        ({"kv": "bf16"}, 2),
        ({"head_dim_qk": 128, "head_dim_vo": 128, "kv_heads": 6 * 132 - 1}, 1),
        ({"head_dim_qk": 128, "head_dim_vo": 128, "kv_heads": 6 * 132}, 2),
        ({"head_dim_qk": 128, "head_dim_vo": 128, "kv_heads": 6 * 132, "kv": "nvfp4"}, 1),
    ],
)
def test_many_tiles_are_served_by_two_ctas_of_an_sm(change, ctas_per_sm):
    request = KernelRequest(
        kv="e4m3", head_dim_qk=64, head_dim_vo=64, rows=1, qhead_per_kvhead=8, kv_heads=132, keys=300
    )
    op, spec = dispatch.select(replace(request, **change), ARCH)
    assert (op, spec.tile.ctas_per_sm) == ("attention.decode", ctas_per_sm)
    assert dispatch.select(replace(request, **change), "sm_100a")[1].tile.ctas_per_sm == 1


USUAL_CALLS = [  # changes of BASE: calls of serving, none of which may wait for a compiler
    {},
    {"causal": False},
    {"window": True},
    {"soft_cap": True},
    {"skip": True},
    {"custom_mask": "bits", "causal": False},
    {"custom_mask": "ranges", "causal": False},
    {"prefix": True},
    {"page_size": 1},
    {"page_size": 24, "window": True},
    {"kv": "e4m3"},
    {"kv": "nvfp4", "window": True},
    {"q": "e4m3", "kv": "e4m3"},
    {"q": "e4m3", "kv": "e4m3", "out": "nvfp4"},
    {"head_dim_qk": 64, "head_dim_vo": 64},
    {"head_dim_qk": 192, "window": True},
    {"head_dim_qk": 256, "head_dim_vo": 256},
    {"q": "fp16", "kv": "fp16", "out": "fp16"},
    {"source": "ragged", "page_size": 0},
]
USUAL_DECODE_CALLS = [  # the same with one query token and 131,072 keys, where keys are split
    {},
    {"window": True},
    {"soft_cap": True},
    {"drafts": True},
    {"out": "e4m3"},
    {"page_size": 1},
    {"kv": "e4m3"},
    {"kv": "nvfp4"},
    {"q": "e4m3", "kv": "e4m3"},
    {"head_dim_qk": 256, "head_dim_vo": 256, "kv": "nvfp4"},
    {"qhead_per_kvhead": 12},
    {"qhead_per_kvhead": 64},
    {"q": "fp16", "kv": "e4m3", "out": "fp16"},
]


@pytest.mark.parametrize("arch", [ARCH, *BLACKWELL])
@pytest.mark.parametrize("change", USUAL_CALLS, ids=str)
def test_usual_calls_have_a_shipped_kernel(arch, change):
    assert dispatch.select(replace(BASE, rows=4096, kv_heads=8, keys=8192, **change), arch) in dispatch.shipped(arch)


@pytest.mark.parametrize("arch", [ARCH, *BLACKWELL])
@pytest.mark.parametrize("change", USUAL_DECODE_CALLS, ids=str)
def test_usual_calls_of_decode_have_a_shipped_kernel(arch, change):
    problem = replace(BASE, **{"rows": 1, "kv_heads": 8, "keys": 131072} | change)
    op, spec = dispatch.select(problem, arch)
    assert (op, spec) in dispatch.shipped(arch) and spec.schedule == "stream_k"


def test_skip_softmax_of_prefill_joins_every_kernel(every_problem):
    """A call with a factor runs the kernel of the call without one, and skip; others have no argument for a threshold.

    Over a quantised cache, votes need the registers that Q would take."""
    for problem in every_problem("never"):
        (_, plain), (_, spec) = (dispatch.select(replace(problem, skip=skip), ARCH) for skip in (False, True))
        tile = plain.tile if spec.kv.bits == 16 else replace(plain.tile, q_in_regs=False)
        if spec.q == "e4m3":
            tile = spec.tile
        assert spec == replace(plain, logits=replace(plain.logits, skip=True), tile=tile)
        assert spec.tile.n == plain.tile.n
        assert args.has(spec, "skip_threshold") and not args.has(plain, "skip_threshold")


@pytest.mark.parametrize("arch", [ARCH, *BLACKWELL])
@pytest.mark.parametrize(
    "change, prefill, rows",
    [
        ({"qhead_per_kvhead": 8}, False, 8),  # rows: per warp of decode
        ({"qhead_per_kvhead": 9}, False, 16),
        ({"qhead_per_kvhead": 16}, False, 16),
        ({"qhead_per_kvhead": 17}, True, 0),
        ({"rows": 4096}, True, 0),
        ({"rows": 4096, "drafts": True}, False, 16),
        ({"rows": 4096, "skip": True}, False, 16),
        ({"rows": 4096, "out": "nvfp4"}, False, 16),
        ({"rows": 4096, "page_size": 1}, False, 16),
        ({"rows": 4096, "q": "e4m3", "kv": "e4m3", "out": "nvfp4"}, False, 16),
        ({"rows": 4096, "kv": "e4m3"}, True, 0),
        ({"rows": 4096, "kv": "nvfp4"}, True, 0),
        ({"rows": 4096, "kv": "e4m3", "window": True}, False, 16),
        ({"rows": 4096, "kv": "e5m2"}, False, 16),
        ({"rows": 4096, "head_dim_qk": 256, "head_dim_vo": 256}, False, 8),
        ({"rows": 4096, "split_kv": "fixed"}, False, 8),
    ],
)
def test_the_rows_of_a_sequence_choose_among_kernels_that_split_keys(arch, change, prefill, rows):
    """More than 16 rows that ask for nothing else go to kernels of prefill whose CTAs share keys."""
    op, spec = dispatch.select(replace(SPLIT, **{"rows": 1, "qhead_per_kvhead": 1} | change), arch)
    assert (op != "attention.decode") == prefill and spec.schedule == "stream_k"
    assert getattr(spec.tile, "rows_per_warp", 0) == rows


def test_kernels_of_prefill_that_split_keys_differ_by_architecture():
    """Blackwell's take windows and soft caps over 16-bit caches, and queries of e4m3."""
    for change, ops in (({"window": True}, ("decode", "sm100")), ({"q": "e4m3", "kv": "e4m3"}, ("decode", "sm100"))):
        found = (dispatch.select(replace(SPLIT, rows=64, **change), arch)[0] for arch in (ARCH, "sm_100a"))
        assert tuple(found) == tuple(f"attention.{op}" for op in ops)


# ---- whether CTAs share keys


def schedule(arch=ARCH, **change):
    return dispatch.select(replace(BASE, **change), arch)[1].schedule


@pytest.mark.parametrize(
    "rows, heads, keys, want",
    [
        (1, 8, 131072, "stream_k"),  # decode
        (1, 2048, 8192, "stream_k"),
        (1, 64, 700, "tiles"),  # a tile a head, which all CTAs read at the full rate, needs no merge
        (1, 64, 1024, "stream_k"),
        (4, 8, 131072, "stream_k"),  # few query tokens over many keys
        (16, 32, 131072, "stream_k"),
        (16, 8, 512, "tiles"),
        (16, 512, 8192, "tiles"),  # as many tiles as keep all CTAs busy
        (64, 8, 131072, "stream_k"),
        (256, 8, 131072, "stream_k"),
        (512, 8, 512, "tiles"),  # a prompt
        (2048, 8, 131072, "tiles"),
        (1 << 20, 8, 1 << 20, "tiles"),
    ],
)
@pytest.mark.parametrize("arch", [ARCH, *BLACKWELL])
def test_shapes_choose(rows, heads, keys, want, arch):
    assert schedule(arch, rows=rows, kv_heads=heads, keys=keys) == want


def test_a_choice_that_a_kernel_refuses_falls_to_the_other():
    """Every modifier is served whatever the shapes, with whole tiles or with split keys."""
    few = {"rows": 1, "kv_heads": 8, "keys": 131072}
    for change in ({"custom_mask": "bits", "causal": False}, {"alibi": True}, {"causal": False}, {"head_dim_qk": 192}):
        assert schedule(**few) == "stream_k" != schedule(**few, **change)
    assert schedule(rows=4096, drafts=True) == "stream_k" != schedule(rows=4096)


def test_rows_without_pages_have_whole_tiles():
    """No device has run the kernels that split their keys."""
    few = {"rows": 1, "kv_heads": 8, "keys": 131072, "source": "ragged", "page_size": 0}
    assert schedule(**few) == "tiles" and schedule(**few, split_kv="always") == "stream_k"


def test_what_is_shipped_comes_first_if_rows_are_few():
    """A kernel is not compiled for a small gain: no whole tiles of fp16 over e4m3 are shipped, decode is."""
    few = {"q": "fp16", "kv": "e4m3", "out": "fp16", "rows": 2, "kv_heads": 64, "keys": 1024}
    held = set(dispatch.shipped(ARCH))
    for change in ({}, {"window": True}):
        assert dispatch.select(replace(BASE, **few, **change), ARCH) in held
    assert dispatch.select(replace(BASE, **few | {"rows": 4096}), ARCH)[1].schedule == "tiles"


TWO_CACHES = {"record": "584", "head_dim_qk": 512, "source": "slots", "causal": False, "extra": True}
RECORDED = replace(BASE, head_dim_qk=576, head_dim_vo=512, shares_v=True, record="656", page_size=1, qhead_per_kvhead=1)


@pytest.mark.parametrize(
    "change, m",
    [
        ({}, 8),
        ({"rows": 8}, 8),
        ({"rows": 9}, 16),
        ({"rows": 2, "qhead_per_kvhead": 8}, 16),
        ({"rows": 17}, 64),
        ({"source": "slots", "causal": False, "rows": 5}, 8),
        ({"record": "e4m3", "q": "e4m3"}, 8),
        ({"record": "e4m3", "head_dim_qk": 512}, 8),
        ({"record": "528_fp32", "head_dim_qk": 512, "source": "slots", "causal": False, "rows": 16}, 16),
        ({"split_kv": "always"}, 8),
        ({"split_kv": "never"}, 64),  # the number of rows of a call would change its bits
        ({"split_kv": "fixed"}, 64),
        ({"split_kv": "never", "source": "slots", "causal": False}, 8),  # rows are the heads of a token in any call
        ({"record": "352"}, 8),
        ({"record": "584", "head_dim_qk": 512, "rows": 9}, 16),
        ({"record": "528", "head_dim_qk": 512, "source": "slots", "causal": False, "rows": 16}, 16),
        ({"record": "528_planar", "head_dim_qk": 512}, 8),
        ({"window": True}, 64),
        ({"soft_cap": True}, 64),
        ({"source": "slots", "causal": False, "extra": True, "extra_record": "656"}, 8),
        ({"source": "slots", "causal": False, "extra": True, "extra_record": "352", "rows": 12}, 16),
        (TWO_CACHES | {"extra_record": "584", "rows": 16}, 16),
        (TWO_CACHES | {"record": "528", "extra_record": "288"}, 8),
        (TWO_CACHES | {"extra_record": "584", "rows": 17}, 64),
    ],
)
def test_few_rows_over_records(change, m):
    """Up to 16 rows have tiles of their own, in which keys are the M side of the MMAs."""
    op, spec = dispatch.select(replace(RECORDED, **{"rows": 1} | change), ARCH)
    assert (op, spec.tile.m) == ("attention.sm90" if m == 64 else "attention.latent", m)


@pytest.mark.parametrize("way, want", [("never", "tiles"), ("fixed", "stream_k"), ("always", "stream_k")])
def test_a_call_may_say_how_keys_are_split(way, want):
    for rows, keys in ((1, 256), (1, 131072), (4, 1024)):
        assert schedule(rows=rows, keys=keys, split_kv=way) == want


@pytest.mark.parametrize("arch", archs.NAMES)
def test_few_kernels_are_shipped(arch):
    """A policy, not a product: of each types and head_dim one headline spec a mask and the general ones."""
    assert len(catalog.shipped(arch)) < (90 if arch in decode.ALONE else 320)


@pytest.mark.parametrize("arch", archs.NAMES)
def test_names_are_unique(arch):
    names = [(op, spec.name) for op, spec in catalog.shipped(arch)]
    assert len(set(names)) == len(names)


def test_general_kernels_take_every_modifier_of_their_op():
    """A field of the launch that some kernel of an op has, all kernels but the headline ones have; those of the
    schedule are no modifiers."""
    schedule = set(args.ScheduleArgs._fields)
    for op, module in dispatch.OPS.items():
        specs = specs_of(op, module.ARCHS[0])
        # others are compiled on demand
        specs = [
            s for s in specs if not (s.kv.shares_v and s.head_dim_qk == 512 or s.kv.record or op == policy.LATENT_ROWS)
        ]
        for q, dims in {(spec.q, spec.dims) for spec in specs}:
            mine = [s for s in specs if (s.q, s.kv.layout.exists, s.mask.custom, s.dims) == (q, False, "", dims)]
            if op != "attention.decode":  # kernels of their own
                mine = [s for s in mine if not s.logits.skip and not s.mask.prefix and s.kv.source != "slots"]
                mine = [s for s in mine if s.schedule == "tiles" or s.kv.shares_v]
                mine = [s for s in mine if len(s.out) == 1 or s.q == "e4m3"]
            general = [set(args.fields(s)) for s in mine if s.mask.window]
            assert general and all(set(args.fields(s)) - schedule <= fields for s in mine for fields in general), op


def test_blocks_of_keys_do_not_depend_on_the_batch(every_problem):
    """n, which a row's rounding depends on, is the same whatever else a call holds: bits must not change with it.
    Decode's kernels of 16 rows are for rows that the longest request has; "fixed" does not ask."""
    widths: dict[tuple, set[int]] = {}
    for problem in (*every_problem("never"), *every_problem("always")):
        _, spec = dispatch.select(problem, ARCH)
        rows_a_warp = getattr(spec.tile, "rows_per_warp", 0)
        key = problem.split_kv, spec.dims, spec.kv.bits, problem.q == problem.kv, rows_a_warp, spec.schedule
        widths.setdefault(key, set()).add(spec.tile.n)
    assert all(len(n) == 1 for n in widths.values()), widths


@pytest.mark.parametrize(
    "change, word",
    [
        ({"head_dim_qk": 72, "head_dim_vo": 72}, "attention.sm90: head_dim (72, 72)"),
        ({"head_dim_vo": 64}, "attention.sm90: head_dim (128, 64)"),
        ({"kv": "fp16"}, "attention.sm90: kv fp16"),
        ({"q": "e4m3"}, "attention.sm90: kv bf16"),
        ({"q": "e5m2", "kv": "e5m2"}, "attention.sm90: q e5m2"),
        ({"kv": "nvfp4", "source": "ragged"}, "attention.decode: source ragged"),
        ({"kv": "nvfp4", "source": "ragged"}, "attention.sm90: source ragged"),
        ({"drafts": True, "custom_mask": "bits"}, "attention.decode: custom_mask bits"),
        ({"drafts": True, "alibi": True}, "attention.decode: alibi True"),
        ({"drafts": True, "causal": False}, "attention.decode: causal False"),
        ({"drafts": True, "head_dim_qk": 192}, "attention.decode: head_dim (192, 128)"),
        ({"head_dim_qk": 272, "head_dim_vo": 272}, "attention.decode: head_dim (272, 272)"),
        ({"kv": "nvfp4", "head_dim_qk": 72, "head_dim_vo": 72}, "attention.decode: head_dim (72, 72)"),
        ({"q": "e4m3"}, "attention.decode: kv bf16"),
    ],
)
@pytest.mark.parametrize("arch", [ARCH, BLACKWELL[0]])
def test_what_is_refused_is_named(change, word, arch):
    for base in (WHOLE, SPLIT, replace(BASE, rows=1), replace(BASE, split_kv="fixed")):
        with pytest.raises(dispatch.UnsupportedRequest) as error:
            dispatch.select(replace(base, **change), arch)
        assert word.replace("sm90", "sm90" if arch == ARCH else "sm100") in str(error.value)
        assert error.value.field in {answer.reason.field for answer in dispatch.explain(replace(base, **change), arch)}
        assert error.value.field not in ("arch", "rows")


def test_an_architecture_without_a_kernel_is_named():
    with pytest.raises(NotImplementedError, match=r"sm_80: needs sm_90a"):
        dispatch.select(BASE, "sm_80")
    assert dispatch.shipped("sm_80") == [] == specs_of("attention.sm90", "sm_100a") == specs_of("attention.sm100", ARCH)


@pytest.mark.parametrize("arch", BLACKWELL)
def test_tiles_of_few_rows_do_not_depend_on_the_batch(arch):
    """A kernel of prefill chooses for each request: the spec is the same whatever rows a call has."""
    for spec in specs_of("attention.sm100", arch):
        alone = spec.logits.skip or spec.head_dim_vo > 128 or spec.schedule == "stream_k"
        assert spec.tile.m_choices == ((spec.tile.m,) if alone else (128, 256))
    short = replace(WHOLE, rows=1)
    assert dispatch.select(short, arch) == dispatch.select(replace(short, rows=1 << 30), arch)
    few = specs_of("attention.sm100", arch)[0]
    for other in (replace(few, logits=LogitsSpec(skip=True)), replace(few, tile=replace(few.tile, m=128))):
        refusal = sm100.supports(other)
        assert refusal is not None and refusal.field == "tile"


@pytest.mark.parametrize("arch", [ARCH, *BLACKWELL])
@pytest.mark.parametrize("kv", ["bf16", "e4m3", "nvfp4"])
def test_every_multiple_of_16_is_a_head_dim(arch, kv):
    """Kernels compute with as few more columns as their tiles allow. NVFP4 rows of bytes that are no multiple of 16 are
    gathered."""
    for dim in range(16, 257, 16):
        for way in ("never", "always"):
            one = replace(WHOLE, kv=kv, head_dim_qk=dim, head_dim_vo=dim, split_kv=way, rows=1)
            op, spec = dispatch.select(one, arch)
            assert serves(spec, one) and (op == "attention.decode") == (way == "always")
            wide = (kv, op) == ("nvfp4", "attention.decode") and 128 < dim <= 192  # no tile between 128 and 256
            assert dim <= spec.padded_qk == spec.padded_vo < dim + (128 if wide else 64)


@pytest.mark.parametrize("kv", ["bf16", "e4m3", "e5m2", "nvfp4"])
@pytest.mark.parametrize("arch", [ARCH, *BLACKWELL])
def test_head_dim_512_divides_the_columns_of_o(arch, kv):
    """Among the warpgroups of a CTA on Hopper's prefill, elsewhere among tiles. Hopper decodes 16 bits with prefill's
    code, which reads K once."""
    wide = replace(WHOLE, kv=kv, head_dim_qk=512, head_dim_vo=512)
    few = replace(wide, rows=1, split_kv="always")
    for problem in (wide, replace(wide, window=True), few, replace(few, window=True)):
        op, spec = dispatch.select(problem, arch)
        splits = problem.split_kv == "always"
        of_prefill = "attention.sm90" if arch == ARCH else "attention.sm100"
        code_of_prefill = not splits or (arch, kv, problem.window) == (ARCH, "bf16", False)
        assert op == (of_prefill if code_of_prefill else "attention.decode")
        assert serves(spec, problem) and (spec.schedule == "stream_k") == splits
        assert (getattr(spec.tile, "o_parts", 1), spec.tile.o_tiles) == ((2, 1) if op == "attention.sm90" else (1, 2))


def test_small_shared_memory_has_no_head_dim_512_in_16_bits():
    wide = replace(WHOLE, head_dim_qk=512, head_dim_vo=512)
    with pytest.raises(dispatch.UnsupportedRequest, match="the smallest tile needs 115968 bytes") as error:
        dispatch.select(wide, "sm_120a")
    assert error.value.field == "head_dim"
    for kv in ("e4m3", "nvfp4"):
        op, spec = dispatch.select(replace(wide, kv=kv), "sm_120a")
        assert op == "attention.decode" and spec.tile.o_tiles == 2


FEW, CAPPED, RAW = replace(SPLIT, rows=1), replace(WHOLE, soft_cap=True), replace(WHOLE, kv="e4m3")
SHARED = replace(SPLIT, kv="e4m3", rows=4096)
CHOSEN = replace(FEW, source="slots", causal=False)
REFUSED = [  # (problem, what another spec than its own has, or its tile, and the field: words of the refusal)
    (FEW, {"m": 64, "n": 384, "warpgroups": 3}, "tile: m must be rows_per_warp (8 or 16)"),
    (FEW, {"m": 48, "warpgroups": 3}, "tile: n must be a multiple"),
    *((FEW, {"logits": logits}, "logits: takes a soft cap and skip-softmax as values")
      for logits in (LogitsSpec(), LogitsSpec(soft_cap=True), LogitsSpec(skip=True))),
    (FEW, {"tile": None}, "head_dim: the smallest tile needs"),
    (CHOSEN, {"mask": MaskSpec("never", True)}, "source: no mask but the keys that a token chooses"),
    (CHOSEN, {"kv": KVSpec(source="slots", extra=True)}, "extra: reads one cache"),
    (CHOSEN, {"kv": KVSpec("e4m3", "slots", "token")}, "kv_scales: no factors of keys that a token chooses"),
    (FEW, {"mask": MaskSpec("never", True, True)}, "causal: is causal, or as the argument says"),
    *((CAPPED, change, "tile: m must be 64, 128 or 192, and n a ") for change in ({"m": 96}, {"m": 256}, {"n": 100})),
    (CAPPED, {"load_warps": 1}, "tile: load_warps must be 2"),
    *((CAPPED, change, "tile: with a soft cap") for change in ({"q_in_regs": True}, {"q_stages": 2})),
    (CAPPED, {"tile": None}, "tile: must be the op's TileConfig"),
    (RAW, {"q_stages": 2}, "tile: q_stages must be 1 over a quantised cache"),
    (RAW, {"tile": None}, "tile: must be"),
    (SHARED, {"q_stages": 2}, "tile: q_stages must be 1 over a quantised cache"),
    (SHARED, {"m": 256}, "tile: m must be 128"),
    *((SHARED, {"out": out}, "rows: serves 16-bit outputs") for out in (("fp16",), ("bf16", "e4m3", "nvfp4"))),
    (SHARED, {"kv": KVSpec("e4m3", "gather")}, "rows: pages of TMA"),
    (SHARED, {"kv": KVSpec("e5m2")}, "rows: bf16 over e4m3, bf16 over nvfp4"),
    (SHARED, {"mask": MaskSpec("always", window=True)}, "rows: serves causal masks"),
    (SHARED, {"logits": LogitsSpec(soft_cap=True)}, "rows: serves causal masks"),
]  # fmt: skip


@pytest.mark.parametrize("problem, change, words", REFUSED)
def test_what_a_kernel_cannot_be_traced_with_is_refused(problem, change, words):
    """Specs that no problem gives, but --spec of the artifact tool may."""
    op, spec = dispatch.select(problem, "sm_100a" if problem in (RAW, SHARED) else ARCH)
    assert dispatch.OPS[op].supports(spec) is None
    other = change if hasattr(spec, next(iter(change))) else {"tile": replace(spec.tile, **change)}
    refusal, (field, text) = dispatch.OPS[op].supports(replace(spec, **other)), words.split(": ")
    assert refusal.field == field and text in refusal.why


def test_arguments_come_in_blocks():
    """`pack` is the inverse of `fields`: every name once, in its block, absent ones None."""
    for _, spec in dispatch.shipped(ARCH):
        names = args.fields(spec)
        packed = args.pack(spec, names)
        held = {name: value for _, block in zip(args.BLOCKS, packed) for name, value in block._asdict().items()}
        assert len(set(names)) == len(names)
        assert all(held.pop(name) == name for name in names) and set(held.values()) <= {None}
