"""FlashInfer's RoPE functions against loops over rows in float64: angles and tables, requests and positions, in place
and quantised; launches, refusals before anything is written, `torch.compile`."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

import wrappers
from bench.cases import cache_write as cases
from cute_kernels.cache_write.args import ANGLES, FROM_FIRST, INTERLEAVED, PAGES, ROWS
from cute_kernels.cache_write.spec import CacheWriteSpec
from tests.cache.test_cache_write import refused, turned
from tests.support.emulated import emulation
from tests.support.rope_calls import NAMES, good_call
from wrappers import RotaryEmbedding
from wrappers.cache_write import checks, plan

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
POISON = 0x7F
LLAMA31 = RotaryEmbedding(scale=8.0, theta=5e5, llama31=(1.0, 4.0, 8192))
STARTS, OFFSETS = [0, 3, 3, 8], [5, 7, 100_000]  # of requests; two tokens more belong to none
AT = [5, 6, 7, 100_000, 100_001, 100_002, 100_003, 100_004, None, None]
POSITIONS = [3, 0, -1, 70_000, 12, 1, 1, 255, 256, -(1 << 31)]
TOKENS = len(AT)


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def packed(hq=3, h=2, dim=96, dtype=torch.bfloat16, tokens=TOKENS):
    """A packed tensor and its views Q and K, behind and before which other elements lie."""
    whole = torch.randn(tokens, 8 + (hq + h) * dim + 24, generator=gen()).to(dtype)
    q, k = whole[:, 8 : 8 + (hq + h) * dim].split([hq * dim, h * dim], 1)
    return whole, q.unflatten(1, (hq, dim)), k.unflatten(1, (h, dim))


def wanted(x, at, how):
    """x in float64 with every row rotated, and whether each token is."""
    rows = [[turned(row, how, position) if position is not None else row for row in token.double()]
            for token, position in zip(x, at, strict=True)]  # fmt: skip
    return torch.stack([torch.stack(token) for token in rows])


def close(got, want, at):
    known = torch.tensor([position is not None for position in at])
    torch.testing.assert_close(got.double()[known], want[known], rtol=2**-8, atol=1e-5)


def valid(positions, rows=1 << 40):
    return [position if 0 <= position < rows else None for position in positions]


ANGLE_FORMS = [  # of functions, arguments, the same as a rotation, dtype, dtype of indices
    ("apply{}_rope", {}, RotaryEmbedding(), torch.bfloat16, torch.int32),
    ("apply{}_rope", {"rotary_dim": 32, "interleave": True, "rope_scale": 4, "rope_theta": 1e6},
     RotaryEmbedding(None, None, True, 32, 4.0, 1e6), torch.float16, torch.int64),
    ("apply{}_rope", {"rotary_dim": 48}, RotaryEmbedding(rotary_dim=48), torch.float16, torch.int32),
    ("apply{}_llama31_rope", {}, LLAMA31, torch.bfloat16, torch.int64),
    ("apply{}_llama31_rope",
     {"rotary_dim": 64, "interleave": True, "rope_scale": 2, "rope_theta": 1e4, "low_freq_factor": 0.5,
      "high_freq_factor": 40, "old_context_len": 512},
     RotaryEmbedding(None, None, True, 64, 2.0, 1e4, (0.5, 40.0, 512)), torch.float16, torch.int32),
]  # fmt: skip


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("by", ["requests", "positions"])
@pytest.mark.parametrize("form", range(len(ANGLE_FORMS)))
def test_angles(form, by, inplace):
    name, given, how, dtype, index = ANGLE_FORMS[form]
    name = name.format("") + ("" if by == "requests" else "_pos_ids") + ("_inplace" if inplace else "")
    whole, q, k = packed(dtype=dtype)
    before, at = whole.clone(), AT if by == "requests" else valid(POSITIONS)
    where = (STARTS, OFFSETS) if by == "requests" else (POSITIONS,)
    want = [wanted(x, at, how) for x in (q, k)]
    result = getattr(wrappers, name)(q, k, *(torch.tensor(t).to(index) for t in where), **given)
    if not inplace:
        assert torch.equal(whole, before)
        assert [(t.shape, t.dtype, t.is_contiguous()) for t in result] == [(t.shape, dtype, True) for t in (q, k)]
        for got, one in zip(result, want, strict=True):
            close(got, one, at)
        return
    assert result is None
    for got, one in zip((q, k), want, strict=True):
        close(got, one, at)
    same = before.clone()
    same[:, 8:-24] = whole[:, 8:-24]
    assert torch.equal(same, whole)  # the elements around Q and K
    for token in range(TOKENS):
        assert torch.equal(before[token], whole[token]) == (at[token] in (None, 0))


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("inplace", [False, True])
def test_tables(inplace, is_neox):
    whole, q, k = packed(dim=80)
    table = torch.randn(256, 64, generator=gen(1))
    at, how = valid(POSITIONS, 256), RotaryEmbedding(None, table, not is_neox)
    want, before = [wanted(x, at, how).flatten(1) for x in (q, k)], whole.clone()
    flat = [x.flatten(1) if x.flatten(1).data_ptr() == x.data_ptr() else None for x in (q, k)]
    function = wrappers.apply_rope_with_cos_sin_cache_inplace if inplace else wrappers.apply_rope_with_cos_sin_cache
    result = function(torch.tensor(POSITIONS), *flat, 80, table, is_neox)
    for got, one in zip(flat if inplace else result, want, strict=True):
        assert got.shape == one.shape
        close(got, one, at)
    if inplace:
        assert result is None
        whole[:, 8:-24] = before[:, 8:-24]
    assert torch.equal(whole, before)


def test_requests_with_any_values():
    """A position that is not one of int32 names no row."""
    for starts, offsets, at in (
        ([0, 2, 4], [(1 << 31) - 2, -1], [(1 << 31) - 2, (1 << 31) - 1, None, None]),
        ([0, 2, 4], [(1 << 31) - 1, -(1 << 31)], [(1 << 31) - 1, None, None, None]),
        ([2, 4], [3], [None, None, 3, 4]), ([0], [], [None] * 4), ([-5, 9], [0], [1, 2, 3, 4]),
    ):  # fmt: skip
        for index in (torch.int32, torch.int64):
            x = torch.randn(4, 1, 16, generator=gen()).half()
            q, k = x.clone(), x.clone()
            wrappers.apply_rope_inplace(q, k, torch.tensor(starts).to(index), torch.tensor(offsets).to(index))
            close(q, wanted(x, at, RotaryEmbedding()), [0 if p is None or p < 1 << 24 else None for p in at])
            assert torch.equal(q, k)
            assert [torch.equal(a, b) for a, b in zip(q, x, strict=True)] == [p is None for p in at]


# ---- quantisation


def poisoned(*shape, dtype=E4M3):
    return torch.full(shape, POISON, dtype=torch.uint8).view(dtype)


def bits(t):
    return t.contiguous().view(torch.uint8)


def near(got, want, scale, known):
    """Quantised values of float64: at most one step beside the rounded value, and almost never."""
    most = torch.finfo(got.dtype).max
    rounded = (want * scale).clamp(-most, most).float().to(got.dtype)
    a, b = (bits(t[known]).int() & 0x7F for t in (got, rounded))
    assert (a - b).abs().max() <= 1 and (a != b).float().mean() < 0.02
    signs = (bits(got[known]) ^ bits(rounded[known])) >> 7
    assert not (signs.bool() & (b > 1)).any()


def parts_of(form, heads, tokens, rotated, rest, dtype):
    """Parts `rope` and `nope` of rows: views of one tensor in this order, or the other way round, or of two tensors."""
    shape = (tokens, heads) if heads else (tokens,)
    if form == "apart":
        return [torch.randn(*shape, n, generator=gen(n)).to(dtype) * 3 for n in (rotated, rest)]
    whole = torch.randn(*shape, rotated + rest, generator=gen(7)).to(dtype) * 3
    if form == "behind":
        return whole[..., :rotated], whole[..., rotated:]
    return whole[..., rest:], whole[..., :rest]


QUANTISED = [  # form of the parts, heads of K (0: MLA's form), R, M, dtype of the result, whether it is given
    ("behind", 2, 32, 16, None, False), ("behind", 2, 32, 48, E5M2, True), ("apart", 1, 16, 40, E4M3, True),
    ("before", 0, 64, 512, None, False), ("apart", 0, 48, 0, None, True), ("behind", 3, 64, 0, E5M2, False),
    ("behind", 1, 128, 400, None, False),
]  # fmt: skip


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("form,heads,rotated,rest,dtype,given", QUANTISED)
def test_quantised(form, heads, rotated, rest, dtype, given, is_neox):
    table = torch.randn(300, rotated, generator=gen(2))
    q_rope, q_nope = parts_of(form, 4, TOKENS, rotated, rest, torch.bfloat16)
    k_rope, k_nope = parts_of(form, heads, TOKENS, rotated, rest, torch.bfloat16)
    kind, outputs = dtype or E4M3, {}
    if given:
        for name, part in (("q", q_rope), ("k", k_rope)):
            whole = poisoned(*part.shape[:-1], rotated + rest, dtype=kind)
            outputs |= {f"{name}_rope_out": whole[..., :rotated], f"{name}_nope_out": whole[..., rotated:]}
    absent = not rest and not given  # a part without elements may be None
    results = wrappers.rope_quantize_fp8(
        q_rope, k_rope, None if absent else q_nope, None if absent else k_nope, table, torch.tensor(POSITIONS), is_neox,
        dtype, 0.5, 1.7, **outputs,
    )  # fmt: skip
    at, how = valid(POSITIONS, 300), RotaryEmbedding(None, table, not is_neox)
    known = torch.tensor([position is not None for position in at])
    scales = 0.5, 1.7, 0.5, 1.7
    for number, (got, x) in enumerate(zip(results, (q_rope, k_rope, q_nope, k_nope), strict=True)):
        assert got.dtype == kind and got.shape == x.shape
        if x.numel():
            x = x if x.ndim == 3 else x[:, None]
            want = wanted(x, at, how) if number < 2 else x.double()
            near(got.view(x.shape) if got.ndim == 2 else got, want, scales[number], known)
    if given:
        assert all(got is outputs[name] for got, name in zip(
            results, ("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out"), strict=True))  # fmt: skip
        assert (bits(results[0])[~known] == POISON).all() and (bits(results[1])[~known] == POISON).all()


@pytest.mark.parametrize("form", ["behind", "apart"])
@pytest.mark.parametrize("layout,rest,dtype", [("NHD", 16, E4M3), ("HND", 48, E5M2), ("NHD", 0, E4M3)])
def test_quantised_and_appended(layout, rest, dtype, form):
    rotated, heads, size = 32, 2, 4
    dim = rotated + rest
    table = torch.randn(300, rotated, generator=gen(2))
    q_rope, q_nope = parts_of(form, 3, TOKENS, rotated, rest, torch.float16)
    k_rope, k_nope = parts_of(form, heads, TOKENS, rotated, rest, torch.float16)
    v = torch.randn(TOKENS, heads, 24, generator=gen(4)).half()
    shape = (6, size, heads) if layout == "NHD" else (6, heads, size)
    cache = poisoned(*shape, dim, dtype=dtype), poisoned(*shape, 24, dtype=dtype)
    pages, ends = torch.tensor([4, 1, 5, 0]), torch.tensor([0, 1, 4])
    requests = torch.tensor([0, 0, 1, 1, 1, -1, 1, 2, 0, 1])
    rows = torch.tensor([0, 3, 0, 5, 11, 3, 12, 0, 2, 7])  # token 6 is behind the pages, token 7 of no request
    got = wrappers.rope_quantize_fp8_append_paged_kv_cache(
        q_rope, k_rope, q_nope if rest else None, k_nope if rest else None, v, table, torch.tensor(POSITIONS), cache,
        pages, ends, requests.int(), rows.int(), quantize_dtype=dtype, quant_scale_q=2.0, quant_scale_kv=0.3,
        page_size=size, kv_layout=layout,
    )  # fmt: skip
    at, how = valid(POSITIONS, 300), RotaryEmbedding(None, table)
    known = torch.tensor([position is not None for position in at])
    near(got[0], wanted(q_rope, at, how), 2.0, known)
    assert got[1].shape == (TOKENS, 3, rest) and got[1].dtype == dtype
    if rest:
        near(got[1], q_nope.double(), 2.0, known)
    keys, values = (t if layout == "NHD" else t.transpose(1, 2) for t in cache)
    whole, stored = torch.cat([wanted(k_rope, at, how), k_nope.double()], -1), torch.zeros(6, size, dtype=torch.bool)
    for token, (request, row) in enumerate(zip(requests.tolist(), rows.tolist(), strict=True)):
        inside = 0 <= request < 2 and row // size < ends[request + 1] - ends[request]
        if not inside or not known[token] and form == "behind":
            continue
        page = pages[ends[request] + row // size]
        stored[page, row % size] = True
        if known[token]:
            near(keys[page, row % size], whole[token], 0.3, slice(None))
            near(values[page, row % size], v[token].double(), 0.3, slice(None))
    for t in (keys, values):
        assert (bits(t)[~stored] == POISON).all()
    assert stored.sum() >= 4


# ---- launches


def test_one_launch_each():
    _, q, k = packed()
    starts, offsets, positions = (torch.tensor(t) for t in (STARTS, OFFSETS, POSITIONS))
    with emulation() as machine:
        for count in range(2):
            wrappers.apply_rope(q, k, starts, offsets, interleave=True)
            assert len(machine.launches) == count + 1 and len(machine.plans) == 1
        first = machine.launches[0]
        assert first["rope"] == INTERLEAVED | ANGLES | FROM_FIRST and first["places"] == ROWS
        assert first["k"] is k and first["k_cache"].shape == (1, *k.shape) and not first["v"].shape[1]
        assert len(first["kv_lens"]) == 6 and len(first["rope_positions"]) == 0  # int64 as words
        wrappers.apply_rope_pos_ids_inplace(q, k, positions.int())
        assert machine.launches[2]["q_out"].data_ptr() == q.data_ptr() and machine.launches[2]["rope"] == ANGLES
        assert machine.launches[2]["k_cache"].data_ptr() == k.data_ptr()
        assert machine.specs == [CacheWriteSpec("bf16", "bf16", True)] * 2
        wrappers.apply_rope(q[:0], k[:0], starts, offsets)
        assert len(machine.launches) == 3


@pytest.mark.parametrize("form,outputs,launches", [
    ("behind", "none", 1), ("behind", "joined", 1), ("behind", "apart", 2), ("apart", "none", 2),
    ("before", "joined", 2),
])  # fmt: skip
def test_launches_that_quantise(form, outputs, launches):
    """One if the parts lie behind each other, else two, and nothing is copied."""
    q, k = (parts_of(form, heads, TOKENS, 32, 16, torch.float16) for heads in (4, 2))
    table, given = torch.ones(300, 32), {}
    for name, heads in (("q", 4), ("k", 2)) if outputs != "none" else ():
        made = poisoned(TOKENS, heads, 48).split([32, 16], -1)
        made = [t.clone() if outputs == "apart" else t for t in made]
        given |= {f"{name}_rope_out": made[0], f"{name}_nope_out": made[1]}
    with emulation() as machine:
        got = wrappers.rope_quantize_fp8(q[0], k[0], q[1], k[1], table, torch.tensor(POSITIONS), **given)
        assert len(machine.launches) == launches
        assert [launch["q"].data_ptr() for launch in machine.launches] == [t.data_ptr() for t in q[:launches]]
        assert got[0].data_ptr() == machine.launches[0]["q_fp8"].data_ptr()
        assert got[1].data_ptr() == machine.launches[0]["k_cache"].data_ptr()
        assert machine.launches[0]["q"].shape[2] == (48 if launches == 1 else 32)
        v, cache = torch.ones(TOKENS, 2, 48).half(), poisoned(2, 3, 16, 2, 48).unbind()
        index = torch.zeros(TOKENS, dtype=torch.int32)
        given = {name: t for name, t in given.items() if name[0] == "q"}
        wrappers.rope_quantize_fp8_append_paged_kv_cache(
            q[0], k[0], q[1], k[1], v, table, torch.tensor(POSITIONS), cache, index, index[:2], index, index, **given
        )
        assert [launch["places"] for launch in machine.launches[launches:]] == [PAGES] * launches
        assert [launch["v"].shape[1] for launch in machine.launches[launches:]] == [2, 0][:launches]


@pytest.mark.parametrize("function", ["apply_rope_inplace", "apply_rope_pos_ids_inplace"])
def test_known_calls_in_place_are_not_checked_again(function, monkeypatch):
    """Rows of one packed tensor, whose bounds overlap: other distances between them are."""
    where = {"pos_ids": POSITIONS} if "pos_ids" in function else {"indptr": STARTS, "offsets": OFFSETS}
    call = partial(getattr(wrappers, function), **{name: torch.tensor(t) for name, t in where.items()})
    checked = []
    validate = lambda given: checked.append(1) or checks.validate(given)  # noqa: E731
    monkeypatch.setattr(plan, "FAMILY", replace(plan.FAMILY, validate=validate))
    with emulation() as machine:
        for _ in range(3):
            call(*packed()[1:])
        assert len(checked) == 1 and len(machine.launches) == 3
        whole, q, k = packed()
        other = whole[:, 16 : 16 + 192].unflatten(1, (2, 96))
        with pytest.raises(ValueError, match="^q: shape .*, overlaps the memory of k"):
            call(q, other)
        assert len(machine.launches) == 3


# ---- torch.compile


def written(result, given):
    """The bytes of what a call returned and of what it was given."""
    returned = result if isinstance(result, tuple) else ()
    return [bits(t) for t in returned] + [bits(t) for t in cases.tensors_of(given)]


FORMS = [(name, False) for name in NAMES] + [(name, True) for name in NAMES if "fp8" in name]


FP8, PAGED = "rope_quantize_fp8", "rope_quantize_fp8_append_paged_kv_cache"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["apply_rope", "apply_rope_with_cos_sin_cache_inplace", FP8, PAGED])
def test_under_torch_compile(name):
    given = good_call(name)
    again, function = cases.copied(given, "cpu"), getattr(wrappers, name)
    want = written(function(**given), given)
    torch.compiler.reset()
    got = torch.compile(lambda **args: function(**args), backend="aot_eager", fullgraph=True)(**again)
    assert all(map(torch.equal, written(got, again), want))


@pytest.mark.parametrize("name,new", FORMS)
def test_tensors_without_values(name, new):
    """Fake and meta tensors get results of the same form, and a trace has one operator per launch."""
    given = {name: t for name, t in good_call(name).items() if not (new and name.endswith("_out"))}
    function = getattr(wrappers, name)
    want = function(**given)
    with FakeTensorMode() as mode:
        fakes = tree_map(lambda t: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t, given)
        found = [function(**fakes)]
    found.append(function(**tree_map(lambda t: t.to("meta") if isinstance(t, torch.Tensor) else t, given)))
    for got in found:
        assert (got is None) == (want is None)
        for a, b in zip(got or (), want or (), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
    graph = make_fx(lambda args: function(**args))(cases.copied(given, "cpu")).graph
    operators = [node for node in graph.nodes if node.target is torch.ops.cute_kernels.write_rows.default]
    assert len(operators) == (2 if "fp8" in name else 1)


# ---- refusals


X = torch.ones(5, 2, 48).bfloat16()
LONG = torch.ones(5, 3, 528).bfloat16()
WORDS = torch.ones(5, 3, 32).bfloat16()
CACHED = "apply_rope_with_cos_sin_cache"


# What other arguments make wrong; test_bad_calls.py has the bad values of each alone.
@pytest.mark.parametrize("error,message,name,changes", [
    (NotImplementedError, "^rotary_dim: 24, must be a multiple of 16", "apply_rope", {"rotary_dim": 24}),
    (NotImplementedError, "^rotary_dim: head_dim 40 of q, must be a multiple", "apply_rope",
     {"q": X[..., :40], "k": X[..., :40], "rotary_dim": None}),
    (NotImplementedError, "^q: head_dim 528, must be at most 512", "apply_rope_pos_ids", {"q": LONG, "k": LONG}),
    (ValueError, "^rotary_dim: 112, must be at most head_dim 48", "apply_rope_inplace", {"rotary_dim": 112}),
    (ValueError, "^high_freq_factor: 2.0, must differ", "apply_llama31_rope",
     {"low_freq_factor": 2.0, "high_freq_factor": 2.0}),
    (ValueError, "^k: strides .*, elements must not overlap", "apply_rope_pos_ids_inplace",
     {"k": torch.ones(5, 1, 48).bfloat16().expand(-1, 2, -1)}),
    (RuntimeError, "^q: requires grad", "apply_rope", {"q": torch.ones(5, 3, 48).bfloat16().requires_grad_()}),
    (RuntimeError, "^k: requires grad", "apply_rope_inplace", {"k": torch.ones(5, 2, 48).bfloat16().requires_grad_()}),
    (RuntimeError, "^q_nope: requires grad", FP8, {"q_nope": torch.ones(5, 3, 16).bfloat16().requires_grad_()}),
    (NotImplementedError, r"^cos_sin_cache: shape \(9, 24\), columns must be a multiple of 16", CACHED,
     {"cos_sin_cache": torch.ones(9, 24)}),
    (ValueError, r"^cos_sin_cache: shape \(9, 112\), must have 1 to 48 columns", CACHED,
     {"cos_sin_cache": torch.ones(9, 112)}),
    (ValueError, r"^query: shape \(5, 144\), the last dimension must be a multiple of head_size 80", CACHED,
     {"head_size": 80}),
    (NotImplementedError, "^q_nope: head_dim 528, must be at most 512", FP8,
     {"q_nope": LONG, "k_nope": LONG[:, :2]}),
    (ValueError, r"^k_nope: shape \(5, 2, 48\), must have the last dimension of q_nope, 16", FP8, {"k_nope": X}),
    (ValueError, r"^q_nope: shape \(5, 2, 16\), must be \(5, 3, 16\)", FP8, {"q_nope": X[..., :16].clone()}),
    (TypeError, "^k_nope: dtype torch.float16, must be that of k_rope, torch.bfloat16", FP8,
     {"k_nope": X[..., :16].half()}),
    (ValueError, r"^cos_sin_cache: shape \(9, 16\), must have the 32 columns of q_rope", FP8,
     {"cos_sin_cache": torch.ones(9, 16)}),
    (ValueError, r"^k_nope_out: shape \(5, 2, 48\), must be \(5, 2, 16\)", FP8, {"k_nope_out": poisoned(5, 2, 48)}),
    (TypeError, "^k_nope_out: dtype torch.float8_e5m2, must be torch.float8_e4m3fn", FP8,
     {"k_nope_out": poisoned(5, 2, 16, dtype=E5M2), "quantize_dtype": E4M3}),
    (ValueError, "^k_nope_out: shape .*, overlaps the memory of k_nope", FP8, dict(zip(
        ("q_nope", "k_nope", "k_nope_out"), (torch.ones(5, 3, 16).bfloat16(), X[..., :16], X.view(E4M3)[..., :16])))),
    *((ValueError, f"^{out}: shape .*, overlaps the memory of {x}", FP8, {
        "q_nope": torch.ones(5, 3, 16).bfloat16(), x: WORDS[:, : 2 if x[0] == "k" else 3, :n],
        out: WORDS.view(E4M3)[:, : 2 if out[0] == "k" else 3, :m]})
      for out, m in (("q_rope_out", 32), ("k_rope_out", 32)) for x, n in (("q_nope", 16), ("k_nope", 16))),
    *((ValueError, f"^{out}: shape .*, overlaps the memory of {x}", FP8, {
        "q_nope": torch.ones(5, 3, 16).bfloat16(), x: WORDS[:, : 2 if x[0] == "k" else 3, :32],
        out: WORDS.view(E4M3)[:, : 2 if out[0] == "k" else 3, :16]})
      for out in ("q_nope_out", "k_nope_out") for x in ("q_rope", "k_rope")),
    (ValueError, r"^k_nope: shape \(5, 2, 16\), must have 2 dimensions", PAGED, {"k_rope": X[:, 0, :32]}),
    (ValueError, "^page_size: 8, must be that of paged_kv_cache, 16", PAGED, {"page_size": 8}),
    (TypeError, r"^paged_kv_cache \(K\): dtype torch.float8_e4m3fn, must be quantize_dtype", PAGED,
     {"quantize_dtype": E5M2}),
    (ValueError, r"^paged_kv_cache \(K\): shape \(3, 16, 2, 40\), the last dimension must be 48", PAGED,
     {"paged_kv_cache": poisoned(2, 3, 16, 2, 40).unbind()}),
])  # fmt: skip
def test_refusals(error, message, name, changes):
    refused(error, message, getattr(wrappers, name), good_call(name), changes)
