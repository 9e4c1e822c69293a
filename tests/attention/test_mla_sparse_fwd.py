"""FlashMLA's sparse prefill on the CPU: against float64, index values that name no row, lengths, and bad arguments."""

import math
from dataclasses import replace

import pytest
import torch

import wrappers
from bench.cases import mla as cases
from bench.cases.mla import MlaCase
from cute_kernels import shipped as policy
from cute_kernels.attention import dispatch
from cute_kernels.attention.request import KernelRequest
from tests.conftest import ARCH
from tests.support.emulated import emulation
from tests.support.good_calls import inputs_of

NAME = "flash_mla_sparse_fwd"
CASES = [
    MlaCase(function=NAME.removeprefix("flash_mla_"), lens=(9, 40), rows=3, heads=5, chosen=70),
    MlaCase(function="sparse_fwd", lens=(40,), rows=7, heads=130, dim=512, chosen=20, counted=True, sink=True),
    MlaCase(function="sparse_fwd", record="656", lens=(9, 40), rows=3, heads=5, chosen=70, sink=True),
    MlaCase(function="sparse_fwd", record="528", lens=(40,), rows=3, heads=5, dim=512, chosen=70, counted=True),
    MlaCase(function="sparse_fwd", record="584", lens=(40, 3), rows=3, heads=5, dim=512, chosen=70, page_size=2, gap=1),
    MlaCase(function="sparse_fwd", record="e4m3", lens=(40,), rows=3, heads=5, chosen=70, sink=True, page_size=9,
            gap=1),
    MlaCase(function="sparse_fwd", record="e4m3", lens=(40,), rows=3, heads=70, dim=512, chosen=70, q8=True,
            strided=True),
    MlaCase(function="sparse_fwd", lens=(40,), rows=3, heads=5, chosen=7, second=30, sink=True),
    MlaCase(function="sparse_fwd", record="584", second_record="584", lens=(40, 9), rows=3, heads=5, dim=512,
            chosen=20, second=30, counted=True),
    MlaCase(function="sparse_fwd", record="528", second_record="288", lens=(40,), rows=3, heads=5, dim=512, chosen=20,
            second=30),
    MlaCase(function="sparse_fwd", dtype="fp16", lens=(3, 0, 90), rows=2, heads=1, chosen=129, counted=True),
    MlaCase(function="sparse_fwd", lens=(40,), rows=7, heads=16, chosen=20, counted=True, sink=True, share=True),
    MlaCase(function="sparse_fwd", lens=(9, 40), rows=4, heads=8, dim=512, chosen=30, strided=True, share=True),
    MlaCase(function="sparse_fwd", record="656", lens=(40,), rows=3, heads=32, chosen=20, page_size=7, share=True),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kernels", [False, True])
def test_against_float64(case, kernels):
    given = cases.make(case)
    if kernels:
        with emulation() as machine:
            got = cases.call(case, given)
        (launch,) = machine.launches
        assert launch.blocks_per_split > 1 << 25 and len(launch.o_partial) == 1  # no token's keys are split
    else:
        got = cases.call(case, given)
    assert len(got) == 3 and cases.error(case, got, cases.expected(case, given)) <= 1


@pytest.mark.parametrize(("heads", "size", "count"), [(8, 8, 3), (16, 4, 5), (24, 2, 10), (32, 2, 10)])
def test_tokens_that_share_keys_are_sequences_of_the_kernel(heads, size, count):
    """As many of them as a tile has room for; the last sequence has those that are left."""
    given = dict(q=torch.randn(19, heads, 576).bfloat16(), kv=torch.randn(40, 1, 576).bfloat16(), sm_scale=0.1)
    given["indices"] = torch.randint(-3, 45, (19, 1, 7)).int()
    with emulation() as machine:
        got = wrappers.flash_mla_sparse_fwd(**given, share_keys=True)
        again = wrappers.bind(wrappers.flash_mla_sparse_fwd, **given, share_keys=True).run(given["q"])
    (spec, *_), (launch, bound) = machine.specs, machine.launches
    assert spec.kv.union and spec.tile.m == 64 and launch.union_size == size
    assert launch.union_slots.shape == launch.union_tokens.shape == (count, 7 * size)
    assert launch.cu_seqlens_q.tolist() == [n * size for n in range(count + 1)]
    assert launch.union_slots.data_ptr() != bound.union_slots.data_ptr()  # launches may overlap
    for x, y, z in zip(got, again, wrappers.flash_mla_sparse_fwd(**given), strict=True):
        assert torch.equal(x, y) and torch.equal(x, z)


def test_which_numbers_are_rows():
    """Upstream's own tests have these; a row that comes twice counts twice."""
    q, kv = torch.randn(1, 4, 576).bfloat16(), torch.randn(9, 1, 576).bfloat16()
    hostile = [-(1 << 31), -123456, -1, 9, 114514, 1919810, 2147480000, (1 << 31) - 1]
    rows = torch.tensor([[[*hostile[:4], 3, 8, 3, *hostile[4:]]]]).int()
    out, top, lse = wrappers.flash_mla_sparse_fwd(q, kv, rows, 0.1)
    logits = q[0].float() @ kv[[3, 8, 3], 0].float().T * 0.1
    torch.testing.assert_close(lse[0], logits.logsumexp(1))
    torch.testing.assert_close(top[0], logits.amax(1))
    want = logits.softmax(1) @ kv[[3, 8, 3], 0, :512].float()
    torch.testing.assert_close(out[0].float(), want, rtol=1e-2, atol=1e-2)


def test_tokens_without_keys():
    given = inputs_of(NAME)
    for change in ({"indices": torch.full((5, 1, 16), -1).int()}, {"topk_length": torch.zeros(5).int()}):
        for sink in (None, torch.zeros(8)):
            out, top, lse = wrappers.flash_mla_sparse_fwd(**given | change | {"attn_sink": sink})
            assert not out.any() and bool((top == -math.inf).all()) and bool((lse == math.inf).all())


def test_what_lies_behind_topk_length_is_not_read():
    given = inputs_of(NAME)
    given["kv"][7] = math.nan
    given["indices"][:, :, 3:] = 7
    given["indices"][:, :, :3] = 2
    for x in wrappers.flash_mla_sparse_fwd(**given | {"topk_length": torch.full((5,), 3).int()}):
        assert x.isfinite().all()


def test_a_sink_changes_the_output_alone():
    given = inputs_of(NAME)
    out, top, lse = wrappers.flash_mla_sparse_fwd(**given | {"attn_sink": None})
    for sink, factor in ((math.inf, 0.0), (-math.inf, 1.0)):
        other = wrappers.flash_mla_sparse_fwd(**given | {"attn_sink": torch.full((8,), sink)})
        torch.testing.assert_close(other[0], out * factor)
        assert torch.equal(other[1], top) and torch.equal(other[2], lse)


def test_an_output_that_is_given():
    given = inputs_of(NAME)
    wide = torch.zeros(5, 8, 640).bfloat16()
    got = wrappers.flash_mla_sparse_fwd(**given | {"out": wide[..., :512]})
    assert got[0].data_ptr() == wide.data_ptr() and not wide[..., 512:].any()
    assert torch.equal(got[0], wrappers.flash_mla_sparse_fwd(**given)[0])


REFUSED = [
    ({"q": torch.zeros(5, 8).bfloat16()}, ValueError, r"q: shape \(5, 8\), must have 3 dimensions"),
    ({"kv": torch.zeros(40, 2, 576).bfloat16()}, ValueError, r"kv: shape \(40, 2, 576\), must be \(40, 1, 576\)"),
    ({"kv": torch.zeros(40, 1, 512).bfloat16()}, ValueError, r"kv: shape \(40, 1, 512\), must be \(40, 1, 576\)"),
    ({"kv": torch.zeros(40, 1, 576).half()}, TypeError, "kv"),
    ({"kv": torch.zeros(40, 1, 584).byte()}, ValueError, "kv: shape .*must end with a row .* 576, 656, 352 bytes"),
    ({"kv": torch.zeros(40, 1, 584).byte(), "q": torch.zeros(5, 8, 512).bfloat16()}, ValueError,
     "kv: shape .*must end with a row .* 512, 528 bytes"),
    ({"kv": torch.zeros(4, 9, 2, 576).bfloat16()}, ValueError, r"kv: shape .*, must be \(4, 9, 1, 576\)"),
    ({"kv": torch.zeros(4, 9, 1, 570).bfloat16()}, ValueError, r"kv: shape .*, must end with 576"),
    ({"kv": torch.zeros(40, 1, 576).to(torch.float8_e4m3fn), "q": torch.zeros(5, 8, 576).half()}, NotImplementedError,
     "q: dtype torch.float16, must be torch.bfloat16 or torch.float8_e4m3fn over a cache of record e4m3"),
    ({"extra_indices": torch.zeros(5, 1, 3).int()}, ValueError, r"extra_indices: .* must be None without extra_kv"),
    ({"extra_kv": torch.zeros(40, 1, 576).bfloat16()}, TypeError, "extra_indices: NoneType, must be a torch.Tensor"),
    ({"extra_kv": torch.zeros(40, 1, 656).byte(), "extra_indices": torch.zeros(5, 1, 3).int()}, ValueError,
     r"extra_kv: shape \(40, 1, 656\), dtype torch.uint8 beside kv .*, must have values of 16 bits, of e4m3, or"),
    ({"descale_k": 2.0}, ValueError, "descale_k: 2.0, must be None without values of torch.float8_e4m3fn"),
    ({"indices": torch.zeros(5, 16).int()}, ValueError, r"indices: shape \(5, 16\), must have 3 dimensions"),
    ({"indices": torch.zeros(4, 1, 16).int()}, ValueError, r"indices: shape \(4, 1, 16\), must be \(5, 1, 16\)"),
    ({"indices": torch.zeros(5, 1, 16).long()}, TypeError, "indices: dtype torch.int64"),
    ({"topk_length": torch.zeros(4).int()}, ValueError, r"topk_length: shape \(4,\), must be \(5,\)"),
    ({"d_v": 600}, ValueError, "d_v: 600, must be at most 576"),
    ({"sm_scale": "1"}, TypeError, "sm_scale: '1', must be a float"),
    ({"attn_sink": torch.zeros(7)}, ValueError, r"attn_sink: shape \(7,\)"),
    ({"out": torch.zeros(5, 8, 576).bfloat16()}, ValueError, r"out: shape \(5, 8, 576\)"),
    ({"share_keys": 1}, TypeError, "share_keys: 1, must be True or False"),
    ({"share_keys": True, "extra_kv": torch.zeros(40, 1, 576).bfloat16(),
      "extra_indices": torch.zeros(5, 1, 3).int()}, NotImplementedError,
     r"share_keys: True with extra_kv \(1, 1, 40, 512\), not supported, must be False: tokens share keys of one cache"),
    *(({"share_keys": True, "q": torch.zeros(5, heads, 576).bfloat16(), "attn_sink": None}, NotImplementedError,
       f"share_keys: True with {heads} heads in q, not supported, must be False unless there are 8, 16, 24, 32")
      for heads in (0, 1, 12, 40, 64)),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_refusals(change, error, message):
    with pytest.raises(error, match=message):
        wrappers.flash_mla_sparse_fwd(**inputs_of(NAME) | change)


@pytest.mark.parametrize(
    "change, served",
    [
        ({}, True),
        ({"qhead_per_kvhead": 8}, True),
        ({"qhead_per_kvhead": 17}, False),
        ({"split_kv": "auto", "kv_heads": 4096}, True),
        ({"split_kv": "auto", "kv_heads": 128}, False),  # a decode
        ({"split_kv": "fixed", "kv_heads": 4096}, False),  # as of a decode of other lengths
        ({"head_dim_qk": 512}, False),
        ({"extra": True}, False),
        ({"share_keys": True}, False),
        ({"q": "fp16", "kv": "fp16", "out": "fp16"}, False),
    ],
)
def test_prompts_of_few_heads_over_16_bits(change, served):
    """They have the kernel of few rows. It has no split keys to gain from, and is slower where memory bounds both."""
    prompt = KernelRequest(head_dim_qk=576, head_dim_vo=512, shares_v=True, source="slots", causal=False, rows=1,
                     qhead_per_kvhead=16, kv_heads=4096, split_kv="never")  # fmt: skip
    op, spec = dispatch.select(replace(prompt, **change), ARCH)
    assert op == (policy.LATENT_ROWS if served else policy.PREFILL)
    assert op == policy.PREFILL or spec.tile.m == change.get("qhead_per_kvhead", 16)
