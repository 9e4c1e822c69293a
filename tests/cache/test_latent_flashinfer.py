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
        wrappers.concat_mla_k(k, nope, rope)
    assert len(machine.launches) == 1
    assert torch.equal(whole[..., 4:-8], torch.cat([nope, rope.expand(-1, 3, -1)], -1).view(BYTE))
    assert (whole[..., :4] == POISON).all() and (whole[..., -8:] == POISON).all()


NOPE, ROPE = randn(3, 2, 128).to(E4M3), randn(3, 1, 64).to(E4M3)
K = poisoned(3, 2, 192)


@pytest.mark.parametrize("error,message,given", [
    (TypeError, "k_rope: dtype torch.float8_e5m2, must be that of k_nope, torch.float8_e4m3fn", {
        "k_rope": ROPE.to(E5M2)}),
    (TypeError, "k: dtype torch.bfloat16, must be that of k_nope", {"k": K.bfloat16()}),
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
