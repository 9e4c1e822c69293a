"""Latent decode over packed records: the CPU reference and the emulated kernels beside float64, and refusals."""

import pytest
import torch

import wrappers
from bench.cases import mla as cases
from bench.cases.mla import MlaCase, expected, make
from cute_kernels.attention import dispatch
from cute_kernels.attention.request import KernelRequest
from cute_kernels.records import INDEX, RECORDS, ROWS
from tests.support.emulated import emulation

CASES = {
    "656": MlaCase(record="656", lens=(70, 9), chosen=65, heads=3, rows=2, counted=True, sink=True),
    "656, all keys": MlaCase(record="656", lens=(70, 0, 3), page_size=5, heads=3, rows=2, gap=1),
    "352": MlaCase(record="352", lens=(70,), chosen=65, heads=3),
    "352, all keys": MlaCase(record="352", lens=(70, 5), page_size=7),
    "584": MlaCase(record="584", dim=512, lens=(70, 9), page_size=2, chosen=65, gap=3),
    "584, all keys": MlaCase(record="584", dim=512, lens=(70, 9), page_size=3, gap=3),
    "528": MlaCase(record="528", dim=512, lens=(70, 9), chosen=65),
    "528_fp32": MlaCase(function="trtllm", record="528_fp32", dim=512, lens=(70, 9), chosen=65, rows=3),
    "e4m3": MlaCase(record="e4m3", lens=(70, 9), rows=2),
    "e4m3, chosen": MlaCase(record="e4m3", lens=(70, 9), chosen=40),
    "e4m3 queries": MlaCase(record="e4m3", lens=(70, 9), rows=2, q8=True, sink=True),
    "e4m3 queries, chosen": MlaCase(record="e4m3", lens=(70, 9), chosen=40, q8=True, strided=True),
    "e4m3 queries, trtllm": MlaCase(function="trtllm", record="e4m3", lens=(70, 9), rows=2, q8=True),
    "e4m3, trtllm": MlaCase(function="trtllm", record="e4m3", lens=(70, 9), rows=2, sink=True),
    "656, trtllm": MlaCase(function="trtllm", record="656", lens=(70, 9), chosen=65, rows=2, sink=True),
    "two of 584": MlaCase(
        record="584", second_record="584", dim=512, lens=(70, 9), chosen=65, second=33, counted=True, sink=True
    ),
    "584 and 288": MlaCase(record="584", second_record="288", dim=512, lens=(70, 9), chosen=65, second=33),
    "528 and 288": MlaCase(record="528", second_record="288", dim=512, lens=(70, 9), chosen=65, second=33, page_size=1),
    "two of 656": MlaCase(record="656", second_record="656", lens=(70, 9), chosen=65, second=33),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kernels", [False, True])
def test_right(name, kernels):
    case = CASES[name]
    given = make(case, seed=len(name))
    with emulation() if kernels else torch.no_grad():
        assert cases.error(case, cases.call(case, given), expected(case, given)) <= 1.0


@pytest.mark.parametrize("kernels", [False, True])
def test_a_cache_of_the_type_of_e4m3_queries_needs_no_flag(kernels):
    """As vLLM calls its function for such a cache, with factors in tensors."""
    case = CASES["e4m3 queries"]
    i = make(case)
    given = {
        "q": i.q, "k_cache": i.cache.unsqueeze(2), "block_table": i.table, "cache_seqlens": i.lens, "head_dim_v": 512,
        "causal": True, "descale_q": torch.tensor([0.5]), "descale_k": torch.tensor([0.25]),
    }  # fmt: skip
    with emulation() if kernels else torch.no_grad():
        want = wrappers.flash_mla_with_kvcache(**given, is_fp8_kvcache=True)
        for found, expected in zip(wrappers.flash_mla_with_kvcache(**given), want, strict=True):
            assert torch.equal(found, expected)
    with pytest.raises(ValueError, match=r"^k_cache: shape \(\d, 64, 1, 575\), must end with 576, the last dimension"):
        wrappers.flash_mla_with_kvcache(**given | {"k_cache": given["k_cache"][..., :575]})


def test_every_record_is_read():
    of_cases = {x for case in CASES.values() for x in (case.record, case.second_record)}
    read = {spec.kv.record for _, spec in dispatch.shipped("sm_90a")} | {"288"}
    assert of_cases == read and read - {""} == RECORDS.keys() - {ROWS, INDEX, "528_planar"}


def test_a_planar_record_of_another_kind_is_served():
    request = KernelRequest(shares_v=True, source="slots", causal=False, record="528_planar", head_dim_qk=512,
                            head_dim_vo=512)  # fmt: skip
    assert dispatch.select(request, "sm_90a")[1].kv.record == "528_planar"


@pytest.mark.parametrize("change, why", [
    ({"record": "584"}, "record 584: with head_dim 576, the kernel has 656, 352"),
    ({"q": "fp16", "kv": "fp16", "out": "fp16"}, "record 656: the kernel makes bf16 of records"),
    ({"q": "e4m3", "out": "bf16"}, "q e4m3 over 656: the kernel has bf16, or e4m3 over e4m3 with one scale"),
    ({"extra": True, "extra_record": "288"}, "record 288: with head_dim 576, the kernel has 656, 352"),
    ({"extra": True}, "record : with head_dim 576"),
    ({"record": "132"}, "record 132: with head_dim 576"),
])  # fmt: skip
def test_refusals_of_the_kernel(change, why):
    request = KernelRequest(
        **dict(shares_v=True, source="slots", causal=False, record="656", head_dim_qk=576, head_dim_vo=512) | change
    )
    with pytest.raises(NotImplementedError) as raised:
        dispatch.select(request, "sm_90a")
    assert f"attention.sm90: {why}" in str(raised.value)


def packed(case, **changes):
    i = make(case)
    return {
        "q": i.q, "k_cache": i.cache.unsqueeze(2), "block_table": None, "cache_seqlens": None, "head_dim_v": 512,
        "is_fp8_kvcache": True, "indices": i.slots,
    } | changes  # fmt: skip


BYTES = torch.zeros(4, 64, 1, 656, dtype=torch.uint8)
REFUSALS = [
    ({"is_fp8_kvcache": False}, ValueError, "k_cache: shape (4, 64, 1, 656), must end with 576, the last dimension"),
    ({"k_cache": BYTES[..., :655]}, ValueError, "k_cache: shape (4, 64, 1, 655), must end with 576, or 656, 352 bytes"),
    ({"q": torch.zeros(1, 1, 16, 512).bfloat16()}, ValueError, "must end with 512, or 584, 528 bytes"),
    ({"k_cache": BYTES.float()}, ValueError, "k_cache: shape (4, 64, 1, 656), must end with 576"),
    ({"q": torch.zeros(1, 1, 16, 576).half()}, NotImplementedError, "q: dtype torch.float16, must be torch.bfloat16"),
    ({"k_cache": torch.zeros(4, 64, 2, 656).byte()}, ValueError, "k_cache: shape (4, 2, 64, 656), must have one head"),
    ({"k_cache": torch.zeros(4, 64, 1, 576).half()}, TypeError, "k_cache: with is_fp8_kvcache, dtype torch.float16"),
    ({"descale_k": 2.0}, ValueError, "descale_k: 2.0, must be None without is_fp8_kvcache and values of"),
    ({"descale_q": 2.0}, ValueError, "descale_q: 2.0, must be None without queries of torch.float8_e4m3fn"),
    ({"q": torch.zeros(1, 1, 16, 576).to(torch.float8_e4m3fn)}, NotImplementedError,
     "q: dtype torch.float8_e4m3fn, must be torch.bfloat16 over a cache of record 656: not supported"),
    ({"extra_k_cache": torch.zeros(4, 64, 1, 288).byte(), "extra_indices_in_kvcache": torch.zeros(1, 1, 3).int()},
     ValueError, "extra_k_cache: shape (4, 64, 1, 288), must end with 576, or 656, 352 bytes"),
]  # fmt: skip


@pytest.mark.parametrize("changes, kind, why", REFUSALS, ids=range(len(REFUSALS)))
@pytest.mark.parametrize("kernels", [False, True])
def test_refusals(changes, kind, why, kernels):
    with emulation() if kernels else torch.no_grad(), pytest.raises(kind) as raised:
        wrappers.flash_mla_with_kvcache(**packed(MlaCase(record="656", chosen=20), **changes))
    assert why in str(raised.value)


@pytest.mark.parametrize("shift, stride", [(8, 656), (0, 656 + 8)])
def test_rows_that_are_not_aligned_are_refused_before_a_launch(shift, stride):
    given = packed(MlaCase(record="656", chosen=20))
    room = torch.zeros(8 + 3 * 64 * (656 + 8), dtype=torch.uint8)
    given["k_cache"] = room.as_strided((3, 64, 1, 656), (64 * stride, stride, stride, 1), shift)
    with emulation(), pytest.raises(ValueError, match="^k_cache: (address|strides)"):
        wrappers.flash_mla_with_kvcache(**given)


def test_trtllm_takes_wider_rows_without_a_rotated_part():
    case = MlaCase(function="trtllm", record="528_fp32", dim=512, lens=(70,), chosen=65)
    i = make(case)
    wide = torch.full((*i.cache.shape[:2], 544), 0xFF, dtype=torch.uint8)
    wide[..., :528] = i.cache
    assert cases.error(case, cases.call(case, i._replace(cache=wide)), expected(case, i)) <= 1.0
    with pytest.raises(ValueError, match=r"^kv_cache: shape \(4, 64, 527\), must end with 528 or more, bytes of"):
        cases.call(case, i._replace(cache=i.cache[..., :527]))
    narrow = MlaCase(function="trtllm", record="656", lens=(70,), chosen=65)
    i = make(narrow)
    with pytest.raises(ValueError, match=r"^kv_cache: shape \(4, 64, 655\), must end with 656, bytes of"):
        cases.call(narrow, i._replace(cache=i.cache[..., :655]))
