"""FlashInfer's functions of latent attention beside plain torch: parts of keys that are joined, and parts that are
rotated, quantised and written to two caches."""

import re

import pytest
import torch

import wrappers
from tests.support.emulated import emulation
from tests.support.rope_calls import latent_append
from wrappers.own.explanation import explain

BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
BYTE, POISON, TOKENS = torch.uint8, 0x5A, 7
POSITIONS = torch.tensor([5, 0, 8, 9, -1, 3, 2])  # 9 and -1 are no rows of the table
EXISTS = torch.tensor([True, True, True, False, False, True, True])
SIZES = [(64, 512, E4M3), (64, 128, E4M3), (128, 256, E4M3), (32, 96, E5M2), (64, 40, E4M3), (64, 0, E4M3)]  # R, M
JOINED = {(64, 512, E4M3), (64, 128, E4M3)}  # those that the kernel of latent attention serves


def randn(*shape, seed=0, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(*shape, dtype=E4M3):
    return torch.full(shape, POISON, dtype=BYTE).view(dtype)


def rotated(x, table, is_neox):
    """Rotate x (N, ..., R) in float64."""
    cos, sin = table.double()[POSITIONS.where(EXISTS, 0)].view(len(x), *[1] * (x.ndim - 2), -1).chunk(2, -1)
    a, b = x.double().chunk(2, -1) if is_neox else (x.double()[..., ::2], x.double()[..., 1::2])
    pair = a * cos - b * sin, b * cos + a * sin
    return torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2)


def near(got, want, scale):
    """Whether fp8 values are those of want * scale, of which few are rounded the other way."""
    want = (want.double() * scale).float().clamp(-torch.finfo(got.dtype).max, torch.finfo(got.dtype).max).to(got.dtype)
    a, b = (t.contiguous().view(BYTE) for t in (got, want))
    step = 0.26 if got.dtype == E5M2 else 0.13
    close = (got.float() - want.float()).abs() <= step * want.float().abs() + 2**-9
    return bool(close.all()) and (a != b).sum() <= 0.02 * a.numel()


class Given:
    """Parts of Q and K, views of packed tensors in the order [rope, nope], and a table."""

    def __init__(self, rotated, rest, heads=3):
        q, k = randn(TOKENS, heads, rotated + rest) * 3, randn(TOKENS, rotated + rest, seed=1) * 3
        self.q, self.q_nope, self.k, self.k_nope = q[..., :rotated], q[..., rotated:], k[:, :rotated], k[:, rotated:]
        self.table = randn(9, rotated, seed=2, dtype=torch.float32)

    @property
    def parts(self):
        return self.q, self.k, self.q_nope, self.k_nope, self.table, POSITIONS


# ---- parts of keys


@pytest.mark.parametrize("dtype", [BF16, FP16, E4M3, E5M2])
@pytest.mark.parametrize("latent,rotated", [(128, 64), (512, 4), (32, 0)])
def test_concat_mla_k(dtype, latent, rotated):
    """Every bit is copied, also of NaN, from and to views of wider tensors."""
    bits = torch.randint(256, (5, 3, 2 * latent + 8), generator=torch.Generator().manual_seed(0)).to(BYTE)
    width = latent * dtype.itemsize
    nope, rope = bits[..., 8 : 8 + width].view(dtype), bits[:, 1:2, : rotated * dtype.itemsize].clone().view(dtype)
    whole = poisoned(5, 3, width + rotated * dtype.itemsize + 12, dtype=BYTE)
    k = whole[..., 4:-8].view(dtype)
    with emulation() as machine:
        wrappers.concat_mla_k(k, nope, rope, backend="default" if rotated else "cake")
    assert len(machine.launches) == 1
    assert torch.equal(whole[..., 4:-8], torch.cat([nope, rope.expand(-1, 3, -1)], -1).view(BYTE))
    assert (whole[..., :4] == POISON).all() and (whole[..., -8:] == POISON).all()


NOPE, ROPE = randn(3, 2, 128).to(E4M3), randn(3, 1, 64).to(E4M3)
K = poisoned(3, 2, 192)


@pytest.mark.parametrize("error,message,given", [
    (TypeError, "k_rope: dtype torch.float8_e5m2, must be that of k_nope, torch.float8_e4m3fn", {
        "k_rope": ROPE.to(E5M2)}),
    (TypeError, "k: dtype torch.bfloat16, must be that of k_nope", {"k": K.bfloat16()}),
    (RuntimeError, "k: dtype torch.bfloat16, must be that of k_nope", {"k": K.bfloat16()}),  # as FlashInfer's
    (ValueError, "backend: 'cute', must be one of default, cake", {"backend": "cute"}),
    (KeyError, "backend: None, must be one of default, cake", {"backend": None}),
    (ValueError, "k_rope: shape (3, 2, 64), must be (3, 1, 64)", {"k_rope": ROPE.expand(3, 2, 64)}),
    (ValueError, "k: shape (3, 2, 190), must be (3, 2, 192)", {"k": K[..., :190]}),
    (ValueError, "k: shape (3, 2, 192), overlaps the memory of k_rope", {"k_rope": K[:, :1, :64]}),
    (NotImplementedError, "k_nope, k_rope: 48 and 64 values of 8 bits, must be a multiple of 32 up to 1024", {
        "k_nope": NOPE[..., :48], "k": K[..., :112]}),
    (NotImplementedError, "k_nope, k_rope: 128 and 62 values of 8 bits", {
        "k_rope": ROPE[..., :62], "k": K[..., :190]}),
    (NotImplementedError, "k: shape (3, 2, 192), strides (386, 193, 1), offset 0, rows of 8 bits must", {
        "k": poisoned(3, 2, 193)[..., :192]}),
    (NotImplementedError, "k_nope: shape (3, 2, 128), strides (260, 130, 1), offset 1, rows of 8 bits must", {
        "k_nope": poisoned(3, 2, 130)[..., 1:129]}),
])  # fmt: skip
def test_refusals_of_parts_of_keys(error, message, given):
    before = K.view(BYTE).clone()
    with pytest.raises(error, match="^" + re.escape(message)):
        wrappers.concat_mla_k(**{"k": K, "k_nope": NOPE, "k_rope": ROPE} | given)
    assert torch.equal(K.view(BYTE), before)


# ---- parts that are rotated and quantised


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("given", ["new", "nope first", "rope first"])
@pytest.mark.parametrize("rotated_size,rest,dtype", SIZES)
def test_mla_rope_quantize_fp8(rotated_size, rest, dtype, given, is_neox):
    """One launch where the outputs of Q lie as MLA's kernels read them, and the sizes have a kernel."""
    x, outs = Given(rotated_size, rest), {}
    if given != "new":
        q, k = poisoned(TOKENS, 3, rotated_size + rest, dtype=dtype), poisoned(TOKENS, rotated_size + rest, dtype=dtype)
        first = given == "nope first"
        for name, t in (("q", q), ("k", k)):
            parts = t.split([rest, rotated_size] if first else [rotated_size, rest], -1)
            outs |= {f"{name}_rope_out": parts[first], f"{name}_nope_out": parts[not first]}
    with emulation() as machine:
        got = wrappers.mla_rope_quantize_fp8(*x.parts, is_neox, dtype, 0.5, 1.7, **outs)
    one = rest == 0 or given != "rope first" and (rotated_size, rest, dtype) in JOINED
    one |= given == "rope first" and rotated_size + rest <= 512
    one |= given == "new" and rotated_size + rest <= 512  # views of one tensor
    assert len(machine.launches) == (1 if one else 2)
    want = rotated(x.q, x.table, is_neox), rotated(x.k, x.table, is_neox), x.q_nope, x.k_nope
    for found, values, scale in zip(got, want, (0.5, 1.7, 0.5, 1.7), strict=True):
        assert found.dtype == dtype and found.shape == values.shape
        assert near(found[EXISTS], values[EXISTS], scale)
    if outs:
        names = ("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out")
        assert all(found is outs[name] for found, name in zip(got, names, strict=True))
        assert all((found[~EXISTS].view(BYTE) == POISON).all() for found in got[:2])


@pytest.mark.parametrize("given", ["new", "apart"])
@pytest.mark.parametrize("rotated_size,rest,dtype", SIZES)
def test_quantised_and_appended(rotated_size, rest, dtype, given):
    """Rows go to the pages of their requests; request -1 is padding, whose query is written."""
    x, pages, starts = Given(rotated_size, rest), torch.tensor([2, 0, 3]), torch.tensor([0, 1, 3])
    requests, positions = torch.tensor([0, 1, 1, 1, 0, -1, 1]), torch.tensor([2, 0, 5, 6, 1, 0, 8])
    caches = poisoned(4, 4, rest, dtype=dtype), poisoned(4, 4, rotated_size, dtype=dtype)
    outs = {}
    if given == "apart":
        sizes = {"q_rope_out": rotated_size, "q_nope_out": rest}
        outs = {name: poisoned(TOKENS, 3, size, dtype=dtype) for name, size in sizes.items()}
    parts = [None if t is not x.table and t.shape[-1] == 0 else t for t in x.parts]
    with emulation() as machine:
        got = wrappers.rope_quantize_fp8_append_paged_kv_cache(
            *parts[:4], None, x.table, POSITIONS, caches, pages, starts, requests, positions, False, dtype, 0.5, 1.7, 4,
            **outs,
        )  # fmt: skip
    one = rest == 0 or given == "new" and (rotated_size, rest, dtype) in JOINED
    assert len(machine.launches) == (1 if one else 2)
    for found, values in zip(got, (rotated(x.q, x.table, False), x.q_nope), strict=True):
        assert found.dtype == dtype and found.shape == values.shape
        assert near(found[EXISTS], values[EXISTS], 0.5)
    places = {0: (2, 2), 1: (0, 0), 2: (3, 1)}  # token 6 is past its request's pages
    for cache, values in zip(caches, (x.k_nope, rotated(x.k, x.table, False)), strict=True):
        left = cache.view(BYTE).clone()
        for token, place in places.items():
            assert near(cache[place], values[token], 1.7)
            left[place] = POISON
        assert (left == POISON).all()


def test_explain_says_which_kernel():
    function = wrappers.rope_quantize_fp8_append_paged_kv_cache
    for dtype, wanted in ((E4M3, "latent.write bf16_e4m3"), (E5M2, "cache_write.rows bf16_e5m2")):
        found = explain(**latent_append(quantize_dtype=dtype), function=function, arch="sm_90a").runs
        assert found.startswith(wanted), found


# ---- latents in NVFP4 beside rotated parts in e4m3

LISTS = {  # two requests of 6 and 5 rows in pages of 4; the last row has no request
    "batch_indices": torch.tensor([0, 1, 0, 0, 1, 1, 2]), "positions": torch.tensor([5, 0, 2, 3, 4, 1, 0]),
    "kv_indices": torch.tensor([3, 1, 0, 4]), "kv_indptr": torch.tensor([0, 2, 4]),
    "kv_last_page_len": torch.tensor([2, 1]),
}  # fmt: skip
SLOTS = [5, 0, 14, 15, 16, 1]  # of the rows, in pages 3, 1 and 0, 4


@pytest.mark.parametrize("given", ["float", "tensor"])
@pytest.mark.parametrize("latent, rotated", [(512, 64), (48, 20)])
def test_nvfp4_and_e4m3_rows(latent, rotated, given):
    """The latent as `nvfp4_quantize` has it, the rotated part over its scale, and nothing else is written."""
    rows = 3 * randn(TOKENS, latent + rotated)
    ckv, kpe = rows[:, :latent], rows[:, latent:]
    scales = 0.25, 0.5
    passed = scales if given == "float" else tuple(torch.tensor([s]) for s in scales)
    whole = poisoned(5, 4, latent // 2 + latent // 16 + rotated, dtype=BYTE)  # all of a row in one tensor
    codes, factors, rest = whole.split([latent // 2, latent // 16, rotated], 2)
    lists = {name: t.int() for name, t in LISTS.items()}
    wrappers.nvfp4_quantize_append_paged_mla_kv_cache(
        ckv, kpe, lists["batch_indices"], lists["positions"], codes, factors.view(E4M3), rest.view(E4M3),
        lists["kv_indices"], lists["kv_indptr"], lists["kv_last_page_len"], *passed,
    )  # fmt: skip
    want = poisoned(20, whole.shape[2], dtype=BYTE)
    packed, sf = wrappers.nvfp4_quantize(ckv[:6], 1 / scales[0])
    fp8 = (kpe[:6].float() / scales[1]).clamp(-448, 448).to(E4M3)
    want[SLOTS] = torch.cat([packed, sf.view(BYTE), fp8.view(BYTE)], 1)
    assert torch.equal(whole.view(20, -1), want)


def nvfp4_append(**changed):
    caches = {
        "ckv_cache": poisoned(5, 4, 256, dtype=BYTE), "ckv_sf_cache": poisoned(5, 4, 32),
        "kpe_cache": poisoned(5, 4, 64), "ckv_scale": 0.5, "kpe_scale": 0.5,
    }  # fmt: skip
    rows = {"append_ckv": randn(TOKENS, 512), "append_kpe": randn(TOKENS, 64)}
    return LISTS | caches | rows | changed


@pytest.mark.parametrize(
    "name, value, error, message",
    [
        ("append_ckv", randn(TOKENS, 500), ValueError, "append_ckv: shape (7, 500), the last dimension must be"),
        ("append_kpe", randn(TOKENS, 64).half(), TypeError, "append_kpe: dtype torch.float16, must be"),
        ("append_kpe", randn(TOKENS, 63), ValueError, "kpe_cache: shape (5, 4, 64), must be (5, 4, 63)"),
        ("ckv_sf_cache", poisoned(5, 4, 16), ValueError, "ckv_sf_cache: shape (5, 4, 16), must be (5, 4, 32)"),
        ("kpe_cache", poisoned(4, 4, 64), ValueError, "kpe_cache: shape (4, 4, 64), must be (5, 4, 64)"),
        ("kpe_cache", poisoned(5, 4, 64, dtype=BYTE), TypeError, "kpe_cache: dtype torch.uint8, must be"),
        ("ckv_scale", 0.0, ValueError, "ckv_scale: 0.0, must be"),
        ("kpe_scale", float("nan"), ValueError, "kpe_scale: nan, must be"),
        ("kv_last_page_len", torch.tensor([2]), ValueError, "kv_last_page_len: shape (1,), must be (2,)"),
    ],
)
def test_refusals_of_nvfp4_rows(name, value, error, message):
    given = nvfp4_append(**{name: value})
    with pytest.raises(error, match="^" + re.escape(message)):
        wrappers.nvfp4_quantize_append_paged_mla_kv_cache(**given)
    assert all((given[f"{part}_cache"].view(BYTE) == POISON).all() for part in ("ckv", "ckv_sf", "kpe"))


@pytest.mark.parametrize("name, other", [("kpe_cache", "append_ckv"), ("kpe_cache", "ckv_sf_cache"),
                                         ("ckv_cache", "append_kpe")])  # fmt: skip
def test_no_launch_writes_what_the_other_reads(name, other):
    given = nvfp4_append()
    shared = torch.zeros(8192, dtype=BYTE)
    for field in (name, other):
        own = given[field]
        given[field] = shared[: own.numel() * own.element_size()].view(own.dtype).view(own.shape)
    with pytest.raises(ValueError, match=f"^({name}|{other}): .* overlaps the memory of ({other}|{name})"):
        wrappers.nvfp4_quantize_append_paged_mla_kv_cache(**given)


@pytest.mark.parametrize("name", ["q_rope_out", "q_nope_out"])
def test_a_table_is_no_output(name):
    """Neither of the launch that rotates, nor of the other one."""
    given = latent_append(quantize_dtype=E5M2)
    table = given["cos_sin_cache"]
    memory = torch.zeros(1 << 16, dtype=torch.float32)
    given["cos_sin_cache"] = memory[: table.numel()].view(table.shape)
    shape = given["q_rope" if name == "q_rope_out" else "q_nope"].shape
    given[name] = memory.view(E5M2)[: shape.numel()].view(shape)
    with pytest.raises(ValueError, match=f"^{name}: .* overlaps the memory of cos_sin_cache"):
        wrappers.rope_quantize_fp8_append_paged_kv_cache(**given)


def test_a_page_size_that_is_not_the_caches_is_refused():
    given = latent_append()
    size = given["paged_kv_cache"][0].shape[1]
    for other in (1, 2 * size):
        with pytest.raises(ValueError, match=rf"^page_size: {other}, must be that of paged_kv_cache, {size}"):
            wrappers.rope_quantize_fp8_append_paged_kv_cache(**given | {"page_size": other})
