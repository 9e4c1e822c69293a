"""Which spec a problem gets, and what is refused. Plain Python: no DSL."""

from dataclasses import replace
from itertools import product

import pytest

from cute_kernels.attention import args, decode, dispatch, sm90, sm100
from cute_kernels.attention.request import KernelRequest
from cute_kernels.attention.spec import TMA_PAGES, LogitsSpec

ARCH = "sm_90a"
BLACKWELL = ("sm_100a", "sm_103a")
BASE = KernelRequest("bf16", "bf16", "bf16", 128, 128, 16, 4)
WHOLE, SPLIT = replace(BASE, split_kv="never"), replace(BASE, split_kv="always")
DIMS = (*sm90.USUAL, *sm90.WIDE)  # head dims of shipped kernels
DECODED = dict.fromkeys((kind, dim) for kind, dim, _ in decode.TILES if dim in decode.SHIPPED)
FEW_KERNELS = 200  # of an architecture, attention and top-k together


def problems(way):
    """Every problem that some kernel serves with whole tiles ("never" split), or with split keys ("always"), for the
    head dims of shipped kernels."""
    every = product(("bf16", "fp16"), (8, 256, 1), (1, 3, 8), *[(False, True)] * 3, (1, 2, 64, 65, 1 << 30))
    for q, page, group, causal, window, cap, rows in every:
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
        base = replace(base, causal=True)
        for (kind, dim), out, way in product(DECODED, (q, "e4m3", "nvfp4"), ("always", "fixed")):
            kv = q if kind == "16-bit" else kind
            yield replace(base, kv=kv, out=out, head_dim_qk=dim, head_dim_vo=dim, split_kv=way,
                          drafts=window, skip=cap)  # fmt: skip
            yield replace(base, kv=kv, out=out, head_dim_qk=dim, head_dim_vo=dim, split_kv=way)
            if kv == "e4m3":
                yield replace(base, q=kv, kv=kv, out="bf16" if out == q else out, head_dim_qk=dim, head_dim_vo=dim,
                              split_kv=way)  # fmt: skip


def serves(spec, problem):
    """Whether a kernel of `spec` computes the problem, as the spec's docstrings say."""
    mask = spec.mask
    return (
        (spec.q, spec.kv.dtype, *spec.dims) == (problem.q, problem.kv, problem.head_dim_qk, problem.head_dim_vo)
        and problem.out in spec.out
        and mask.causal in (("always" if problem.causal else "never"), "value")
        and (mask.window or not problem.window)
        and (mask.tree or not problem.drafts)
        and (spec.logits.soft_cap or not problem.soft_cap)
        and (spec.logits.skip or not problem.skip)
        and spec.mask.custom == problem.custom_mask
        and spec.logits.alibi == problem.alibi
        and spec.kv.source == ("tma" if problem.source == "ragged" or problem.page_size in TMA_PAGES else "gather")
    )


def on_demand(spec):
    """Whether the policy of `shipped` leaves a spec to its first call: pages of no TMA box, but for usual problems;
    fp16 and e4m3 queries of other head dims than 64 and 128, and, in prefill, e4m3 with an output in fp16; of prefill
    over quantised K and V all but causal bf16 of the usual head dims."""
    if spec.schedule == "tiles" and spec.kv.dtype != spec.q:
        shipped = spec.q == "bf16" and spec.dims in sm90.USUAL and spec.mask.causal != "never"
        return not shipped or spec.kv.source == "gather"
    usual = spec.dims in ((64, 64), (128, 128)) and not spec.kv.block_scaled and spec.q != "e4m3"
    rare = spec.kv.source == "gather" and (not usual or spec.mask.causal == "never")
    if spec.q != "bf16":
        rare = rare or spec.dims not in ((64, 64), (128, 128))
    return rare or (spec.q == "e4m3" and spec.out[0] == "fp16")


def usual_types():
    """Fields of problems."""
    kinds = product(("bf16", "fp16"), (64, 128))
    return [{"q": q, "kv": q, "out": q, "head_dim_qk": dim, "head_dim_vo": dim} for q, dim in kinds]


def test_every_problem_of_prefill_gets_a_shipped_spec_that_serves_it():
    shipped, found, types = {s for s in sm90.shipped(ARCH) if s.schedule == "tiles"}, set(), usual_types()
    more = ({"custom_mask": True}, {"skip": True, "qhead_per_kvhead": 1})
    for problem in (*problems("never"), *(replace(WHOLE, **each, **also) for each in types for also in more)):
        op, spec = dispatch.select(problem, ARCH)
        found.add(spec)
        assert op == "attention.sm90" and serves(spec, problem)
    assert shipped <= found and all(on_demand(spec) for spec in found - shipped)


def test_skip_softmax_of_prefill_joins_every_kernel():
    """A call with a factor runs the spec of the call without one, and skip; others have no argument for a threshold."""
    for problem in problems("never"):
        (_, plain), (_, spec) = (dispatch.select(replace(problem, skip=skip), ARCH) for skip in (False, True))
        wide = spec.kv.dtype in ("bf16", "fp16")
        tile = plain.tile if wide else sm90.tiles_of(spec.q, spec.kv.dtype, False)[spec.dims]
        assert spec == replace(plain, logits=replace(plain.logits, skip=True), tile=tile)
        assert args.has(spec, "skip_threshold") and not args.has(plain, "skip_threshold")


@pytest.mark.parametrize("arch", [ARCH, *BLACKWELL])
def test_every_problem_of_decode_gets_a_shipped_spec_that_serves_it(arch):
    """More than 16 rows that ask for nothing else go to kernels of prefill whose CTAs share keys, all shipped."""
    op_of_many, prefill = ("attention.sm90", sm90) if arch == ARCH else ("attention.sm100", sm100)
    shared = {s for s in prefill.shipped(arch) if s.schedule == "stream_k"}
    shipped, found = set(decode.shipped(arch)), set()
    for problem in problems("always"):
        p, (op, spec) = problem, dispatch.select(problem, arch)
        found.add(spec)
        assert serves(spec, p)
        many = p.packed_rows > 8 and p.head_dim_qk < 256 and p.split_kv == "always"
        typed = p.out in ("bf16", "fp16") and p.page_size in TMA_PAGES
        plain = typed and not (p.drafts or p.skip) and (arch != ARCH or not (p.window or p.soft_cap))
        usual = p.head_dim_qk < 256 and p.q != "e4m3" and (p.q == p.kv or p.q == "bf16" and arch == ARCH)
        many_more = many and plain and usual and p.packed_rows > 16
        assert op == (op_of_many if many_more else "attention.decode") and (spec in shared) == many_more
        if not many_more:
            assert spec.tile.rows_per_warp == (16 if many else 8)
    shipped |= shared
    assert shipped <= found and all(on_demand(spec) for spec in found - shipped)


# ---- whether CTAs share keys


def schedule(arch=ARCH, **change):
    return dispatch.select(replace(BASE, **change), arch)[1].schedule


@pytest.mark.parametrize(
    "rows, heads, keys, want",
    [
        (1, 8, 131072, "stream_k"),  # decode
        (1, 2048, 8192, "stream_k"),
        (1, 64, 1024, "tiles"),  # a tile a head, which all CTAs read at the full rate, needs no merge
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
    for change in ({"custom_mask": True, "causal": False}, {"alibi": True}, {"causal": False}, {"head_dim_qk": 192}):
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


@pytest.mark.parametrize("way, want", [("never", "tiles"), ("fixed", "stream_k"), ("always", "stream_k")])
def test_a_call_may_say_how_keys_are_split(way, want):
    for rows, keys in ((1, 256), (1, 131072), (4, 1024)):
        assert schedule(rows=rows, keys=keys, split_kv=way) == want


def test_few_kernels_are_shipped(capsys):
    """A policy, not a product: of each types and head_dim one headline spec a mask and the general ones."""
    from cute_kernels.cache_write import dispatch as cache_write
    from cute_kernels.merge_states import dispatch as merge_states
    from cute_kernels.topk import dispatch as topk

    for arch in (ARCH, *BLACKWELL):
        counts = [len(family.shipped(arch)) for family in (dispatch, topk, cache_write, merge_states)]
        with capsys.disabled():
            of_others = f"{counts[1]} of top-k, {counts[2]} that write rows, {counts[3]} that merge states"
            print(f"\n{arch}: {counts[0]} attention kernels, {of_others}", end="")
        assert sum(counts) < FEW_KERNELS


def test_names_are_unique():
    names = [(op, spec.name) for op, spec in dispatch.shipped(ARCH)]
    assert len(set(names)) == len(names)


def test_general_kernels_take_every_modifier_of_their_op():
    """A field of the launch that some kernel of an op has, all kernels but the headline ones have."""
    for op, module in dispatch.OPS.items():
        specs = module.shipped(module.ARCHS[0])
        for q, dims in {(spec.q, spec.dims) for spec in specs}:
            mine = [s for s in specs if (s.q, s.kv.block_scaled, s.mask.custom, s.dims) == (q, False, False, dims)]
            if op != "attention.decode":  # kernels of their own
                mine = [s for s in mine if not s.logits.skip and s.schedule == "tiles"]
            general = [set(args.fields(s)) for s in mine if s.mask.window]
            assert general and all(set(args.fields(s)) <= fields for s in mine for fields in general), op


def test_blocks_of_keys_do_not_depend_on_the_batch():
    """n, which a row's rounding depends on, is the same whatever else a call holds: bits must not change with it.
    Decode's kernels of 16 rows are for rows that the longest request has; "fixed" does not ask."""
    widths: dict[tuple, set[int]] = {}
    for problem in (*problems("never"), *problems("always")):
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
        ({"drafts": True, "custom_mask": True}, "attention.decode: custom_mask True"),
        ({"drafts": True, "alibi": True}, "attention.decode: alibi True"),
        ({"drafts": True, "causal": False}, "attention.decode: causal False"),
        ({"drafts": True, "head_dim_qk": 192}, "attention.decode: head_dim (192, 128)"),
        ({"head_dim_qk": 272, "head_dim_vo": 272}, "attention.decode: head_dim (272, 272)"),
        ({"kv": "nvfp4", "head_dim_qk": 96, "head_dim_vo": 96}, "attention.decode: head_dim (96, 96)"),
        ({"q": "e4m3"}, "attention.decode: kv bf16"),
    ],
)
def test_what_is_refused_is_named(change, word):
    for base in (WHOLE, SPLIT, replace(BASE, rows=1), replace(BASE, split_kv="fixed")):
        with pytest.raises(dispatch.UnsupportedRequest) as error:
            dispatch.select(replace(base, **change), ARCH)
        assert word in str(error.value)
        assert error.value.field in {answer.reason.field for answer in dispatch.explain(replace(base, **change), ARCH)}
        assert error.value.field not in ("arch", "rows")


def test_an_architecture_without_a_kernel_is_named():
    with pytest.raises(NotImplementedError, match=r"sm_80: needs sm_90a"):
        dispatch.select(BASE, "sm_80")
    assert sm90.shipped("sm_100a") == [] == decode.shipped("sm_80") == sm100.shipped("sm_90a")


@pytest.mark.parametrize("arch", BLACKWELL)
def test_prefill_on_blackwell_serves_a_problem_or_names_what_it_lacks(arch):
    shipped, found, lacking = {s for s in sm100.shipped(arch) if s.schedule == "tiles"}, set(), set()
    more = product(usual_types(), ({"custom_mask": True}, {"skip": True}))
    for problem in (*problems("never"), *(replace(WHOLE, **each, **also) for each, also in more)):
        prefill_on_hopper, answer, *_ = (a for a in dispatch.explain(problem, arch) if a.op != "attention.decode")
        if prefill_on_hopper.op != "attention.sm90":  # what is shipped comes first
            prefill_on_hopper, answer = answer, prefill_on_hopper
        assert prefill_on_hopper.reason.field == "arch"
        if answer.reason is None:
            found.add(answer.spec)
            assert serves(answer.spec, problem)
        else:
            lacking.add(answer.reason.field)
    assert shipped <= found
    assert not lacking


@pytest.mark.parametrize("arch", BLACKWELL)
def test_tiles_of_few_rows_do_not_depend_on_the_batch(arch):
    """A kernel of prefill chooses for each request: the spec is the same whatever rows a call has."""
    for spec in sm100.shipped(arch):
        alone = spec.logits.skip or spec.head_dim_vo > 128 or spec.schedule == "stream_k"
        assert spec.tile.m_choices == ((spec.tile.m,) if alone else (128, 256))
    short = replace(WHOLE, rows=1)
    assert dispatch.select(short, arch) == dispatch.select(replace(short, rows=1 << 30), arch)
    few = sm100.shipped(arch)[0]
    for other in (replace(few, logits=LogitsSpec(skip=True)), replace(few, tile=replace(few.tile, m=128))):
        refusal = sm100.supports(other)
        assert refusal is not None and refusal.field == "tile"


@pytest.mark.parametrize("arch", [ARCH, *BLACKWELL])
@pytest.mark.parametrize("kv", ["bf16", "e4m3", "nvfp4"])
def test_every_multiple_of_16_is_a_head_dim(arch, kv):
    """Over NVFP4 every multiple of 64. Kernels compute with as few more columns as their tiles allow."""
    for dim in range(16, 257, 16):
        for way in ("never", "always"):
            one = replace(WHOLE, kv=kv, head_dim_qk=dim, head_dim_vo=dim, split_kv=way, rows=1)
            if kv == "nvfp4" and dim % 64:
                with pytest.raises(
                    dispatch.UnsupportedRequest, match=f"head_dim .{dim}, {dim}.: must be multiples of 64"
                ):
                    dispatch.select(one, arch)
                continue
            op, spec = dispatch.select(one, arch)
            splits = way == "always" and (kv, dim) != ("nvfp4", 192)  # decode has no tile for that
            assert serves(spec, one) and (op == "attention.decode") == splits
            assert dim <= spec.padded_qk == spec.padded_vo < dim + 2 * spec.head_dim_step


def test_only_hopper_has_head_dim_512():
    """One kernel of prefill serves it, with whole tiles or with keys that CTAs share, however few rows there are."""
    wide = replace(WHOLE, head_dim_qk=512, head_dim_vo=512)
    for problem in (wide, replace(wide, rows=1), replace(wide, rows=1, split_kv="always"), replace(wide, window=True)):
        op, spec = dispatch.select(problem, ARCH)
        assert op == "attention.sm90" and serves(spec, problem) and spec.tile.o_parts == 2
        assert (spec.schedule == "stream_k") == (problem.split_kv == "always")
        with pytest.raises(dispatch.UnsupportedRequest, match="attention.sm100: head_dim .512, 512."):
            dispatch.select(problem, "sm_100a")
    for change, word in (({"skip": True}, "skip"), ({"out": "nvfp4"}, "out"), ({"kv": "e4m3"}, "head_dim")):
        with pytest.raises(dispatch.UnsupportedRequest) as error:
            dispatch.select(replace(wide, **change), ARCH)
        assert error.value.field == word


def test_what_blackwell_lacks_is_named():
    with pytest.raises(NotImplementedError, match="attention.sm100: head_dim .72, 72.") as error:
        dispatch.select(replace(BASE, head_dim_qk=72, head_dim_vo=72), "sm_100a")
    assert error.value.field == "head_dim"


@pytest.mark.parametrize(
    "tile, word",
    [
        (decode.DecodeTileConfig(64, 384, 3, 3), "m must be rows_per_warp (8 or 16)"),
        (decode.DecodeTileConfig(48, 128, 3, 3), "n must be a multiple"),
    ],
)
def test_decode_refuses_tiles_that_warps_cannot_share(tile, word):
    spec = replace(decode.shipped(ARCH)[0], tile=tile)
    assert word in str(decode.supports(spec))
    assert decode.supports(replace(spec, tile=decode.DecodeTileConfig(48, 384, 3, 3))) is None


@pytest.mark.parametrize(
    "tile",
    [
        sm90.Sm90TileConfig(96),
        sm90.Sm90TileConfig(256),
        sm90.Sm90TileConfig(128, 100),
        sm90.Sm90TileConfig(load_warps=1),
    ],
)
def test_prefill_refuses_tiles(tile):
    refusal = sm90.supports(replace(sm90.shipped(ARCH)[0], tile=tile))
    assert refusal is not None and refusal.field == "tile"


def test_prefill_of_blackwell_refuses_two_q_stages_over_a_quantised_cache():
    """Row scales of the tile after the next could be written before the softmax reads those of the tile."""
    spec = next(spec for spec in sm100.shipped("sm_100a") if spec.kv.dtype != spec.q)
    assert sm100.supports(spec) is None
    assert sm100.supports(replace(spec, tile=replace(spec.tile, q_stages=2))).field == "tile"


@pytest.mark.parametrize("tile", [sm90.Sm90TileConfig(q_in_regs=True), sm90.Sm90TileConfig(q_stages=2)])
def test_prefill_with_a_soft_cap_refuses_tiles_that_begin_early(tile):
    """Their first Q K^T is in flight where the code for capped scores, or for others, is chosen."""
    spec = replace(sm90.general("bf16", "bf16", (128, 128)), tile=tile)
    refusal = sm90.supports(spec)
    assert refusal is not None and refusal.field == "tile" and "soft cap" in refusal.why
    assert sm90.supports(replace(spec, logits=LogitsSpec())) is None


def test_what_a_kernel_cannot_be_traced_with_is_refused():
    """Specs that no problem gives, but --spec of the artifact tool may."""
    spec = decode.shipped(ARCH)[0]
    for logits in (LogitsSpec(), LogitsSpec(soft_cap=True), LogitsSpec(skip=True)):
        refusal = decode.supports(replace(spec, logits=logits))
        assert refusal is not None and refusal.field == "logits"
    for op, module in dispatch.OPS.items():
        refusal = module.supports(replace(module.shipped(module.ARCHS[0])[0], tile=None))
        assert refusal is not None and refusal.field == "tile", op


def test_arguments_come_in_blocks():
    """`pack` is the inverse of `fields`: every name once, in its block, absent ones None."""
    for _, spec in dispatch.shipped(ARCH):
        names = args.fields(spec)
        packed = args.pack(spec, names)
        held = {name: value for _, block in zip(args.BLOCKS, packed) for name, value in block._asdict().items()}
        assert len(set(names)) == len(names)
        assert all(held.pop(name) == name for name in names) and set(held.values()) <= {None}
