"""Scales in host memory beside data of a device: a public function takes a tensor of one element there as a number.
`CASES` holds every argument that is a scale; one without a case fails.

Data of a device are meta tensors, of which every read raises, fake tensors, or CPU tensors that a machine takes for a
GPU's.
"""

import inspect
import math
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import wrappers
from tests.host.test_bad_calls import CODES, GOOD, SMALL, X, attention
from tests.host.test_plans import Recorder
from tests.support.flash_attn_batches import good_call
from tests.support.good_calls import NAMES, inputs_of
from tests.support.prefill_batches import HKV, HQ, D
from wrappers import fp4
from wrappers.attention import plan
from wrappers.flashinfer import values
from wrappers.host import machine

E4M3, HALF = torch.float8_e4m3fn, torch.float16
VALUE = 0.5
NUMBERS = {  # numbers only
    "sm_scale", "softmax_scale", "rope_scale", "o_scale", "o_sf_scale", "rcp_out_scale", "logits_soft_cap_scale",
    "skip_softmax_threshold_scale_factor", "quant_scale_q", "quant_scale_kv", "weight_scale",
}  # fmt: skip
FLAGS = {"skip_scale", "dst_scale", "kv_scale_format"}  # a flag, an output, and a name
BLOCKS = {("FP4Tensor", "scale"), ("FP4Tensor", "scale_start_index")}  # of block scales
BLOCKS |= {  # must be None
    (name, f"descale_{x}") for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd") for x in "qk"
}


# ---- the calls: name -> (function, its good arguments); classes are planned for the data's device


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def drawn(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


PREFILL = {"q": drawn(5, HQ, D), "paged_kv_cache": drawn(3, 2, 16, HKV, D)}
PAGES = {"indptr": ints(0, 2, 3), "indices": ints(2, 0, 1), "last_page_len": ints(4, 16)}
RANGED = PREFILL | {"bidirectional_ranges": ints(*range(10)).view(5, 2)}
ROWS = {"q": drawn(5, HQ, D), "k": drawn(9, HKV, D), "v": drawn(9, HKV, D)}


def planned(name: str, method: str, device: str) -> Any:
    """The method of a class that was planned for a device."""
    own = dict(q_data_type=HALF, kv_data_type=HALF, head_dim_qk=D, head_dim_vo=D) if "Ranges" in name else {}
    wrapper = getattr(wrappers, name)(torch.empty(0, device=device), **own)
    starts, pages = moved([ints(0, 2, 5), ints(0, 4, 9)], device), moved([*PAGES.values()], device)
    if name.startswith("BatchDecode"):
        wrapper.plan(*pages, HQ, HKV, D, 16)
    elif "Ragged" in name:
        wrapper.plan(*starts, HQ, HKV, D)
    else:
        wrapper.plan(starts[0], *pages, HQ, HKV, D, 16)
    return getattr(wrapper, method)


def fmha() -> dict[str, Any]:
    given = attention(SMALL, "context")
    names = ("seq_lens", "max_q_len", "max_kv_len", "bmm1_scale", "bmm2_scale", "batch_size", "cum_seq_lens_q")
    return {name: given[name] for name in names} | {
        "qkv": (drawn(5, 4, 64), drawn(8, 2, 16, 2, 64)), "input_layout": "Q_PAGED_KV_NHD", "workspace_buffer": None,
        "cum_seq_lens_kv": None, "block_tables": ints(0, 1, 2, 3, 4, 5).view(2, 3),
    }  # fmt: skip


def single() -> dict[str, Any]:
    return {"q": drawn(3, HQ, D), "k": drawn(9, HKV, D), "v": drawn(9, HKV, D)}


def flash(name: str) -> dict[str, Any]:
    given, quantised = good_call(name), ("q", "k", "v", "k_cache", "v_cache")
    if name == "flash_attn_func":
        given["k"] = drawn(*given["k"].shape)
    return {n: t.float().nan_to_num().to(E4M3) if n in quantised else t for n, t in given.items()}


FUNCTIONS: dict[str, Any] = {name: partial(inputs_of, name) for name in NAMES} | {
    "trtllm_batch_context_with_kv_cache": lambda: attention(SMALL, "context"),
    "trtllm_batch_decode_with_kv_cache": lambda: attention(SMALL, "decode"),
    "xqa_batch_decode_with_kv_cache": lambda: {
        "query": drawn(2, 4, 64), "kv_cache": drawn(8, 2, 16, 2, 64), "workspace_buffer": None,
        "block_tables": ints(0, 1, 2, 3).view(2, 2), "seq_lens": ints(20, 9), "max_seq_len": None,
    },
    "trtllm_fmha_v2_prefill": fmha,
    "xqa": GOOD["xqa"][1],
    "single_prefill_with_kv_cache": single,
    **{name: lambda name=name: flash(name)
       for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache", "flash_attn_func")},
    **{name: lambda name=name: inputs_of(name) | {"kv_cache": torch.zeros(6, 4, 576).byte(), "kv_cache_dtype": "fp8"}
       for name in ("concat_and_cache_mla", "concat_and_cache_mla_rope_fused")},
    "gather_and_maybe_dequant_cache": lambda: inputs_of("gather_and_maybe_dequant_cache") | {
        "src_cache": torch.ones(6, 4, 576).to(E4M3), "kv_cache_dtype": "fp8"},
    "nvfp4_quantize": lambda: dict(X),
    "nvfp4_dequantize": lambda: dict(CODES),
    "fp4.store": GOOD["fp4.store"][1],
    "fp4.load": GOOD["fp4.load"][1],
    "nvfp4_quantize_append_paged_kv_cache": GOOD["append, quantised"][1],
    "nvfp4_quantize_append_paged_mla_kv_cache": lambda: inputs_of("nvfp4_quantize_append_paged_mla_kv_cache"),
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": GOOD["append, slots"][1],
}  # fmt: skip
METHODS: dict[str, Any] = {
    f"{name}.{method}": given
    for name, given in (
        ("BatchPrefillWithPagedKVCacheWrapper", PREFILL), ("BatchAttentionWithAttentionSinkWrapper", PREFILL),
        ("BatchDecodeWithPagedKVCacheWrapper", PREFILL | {"q": drawn(2, HQ, D)}),
        ("BatchPrefillWithRaggedKVCacheWrapper", ROWS),
        ("BatchPrefillWithCausalBidirectionalRangesWrapper", RANGED),
    )
    for method in ("run", "forward")
}  # fmt: skip


def function_of(name: str) -> Any:
    if "." in name:
        owner, attribute = name.split(".")
        return getattr(getattr(wrappers, owner), attribute)
    return getattr(wrappers, name)


def scales_of(function: Any) -> list[str]:
    """Parameters that are a scale, by their names."""
    return [
        n for n in inspect.signature(function).parameters if re.search(r"(^|_)(de)?scale(_|$)", n) and n not in FLAGS
    ]


def public() -> dict[str, Any]:
    """Public functions, and methods of public classes."""
    found = {n: getattr(wrappers, n) for n in wrappers.__all__}
    found |= {f"fp4.{n}": f for n, f in vars(fp4).items() if inspect.isfunction(f) and n[0] != "_"}
    found = {n: f for n, f in found.items() if n.removeprefix("fp4.") == n or n.removeprefix("fp4.") not in found}
    for name, kind in list(found.items()):
        if inspect.isclass(kind):
            methods = inspect.getmembers(kind, inspect.isfunction)
            found |= {f"{name}.{n}": f for n, f in methods if n[0] != "_"}
    return found


CASES = [
    (name, argument)
    for name in (*FUNCTIONS, *METHODS)
    for argument in scales_of(function_of(name))
    if argument not in NUMBERS and (name, argument) not in BLOCKS
] + [("BatchAttentionWithAttentionSinkWrapper.run", f"{x}_scale") for x in "qkv"]  # its keywords
WRITING = ("nvfp4", "fp4.", "mla", "gather")  # words in the names of other functions, but for attention to a cache
ATTENTION = [case for case in CASES if "decode" in case[0] or not any(word in case[0] for word in WRITING)]
POSITIVE = [case for case in CASES if case not in ATTENTION]


# Arguments of `append_qkv` and `append_latent`, see test_cache_write.py and test_latent.py; and checks, which
# `nvfp4_quantize` and `nvfp4_dequantize` call.
# Those of `BatchMLAPagedAttentionWrapper` must be None, see test_mla_batches.py.
ELSEWHERE = ("KVCacheTarget", "QueryOutput", "RotaryEmbedding", "LatentCache", "LatentQuery", "fp4.quantizable",
             "fp4.dequantizable", "BatchMLAPagedAttentionWrapper.plan",
             "BatchMLAPagedAttentionWrapper.run")  # fmt: skip


def test_every_scale_has_a_case():
    missing = []
    for name, function in public().items():
        if name in ELSEWHERE:
            continue
        for argument in scales_of(function) if callable(function) else ():
            kind = str(inspect.signature(function).parameters[argument].annotation)
            if argument in NUMBERS:
                assert "Tensor" not in kind, f"{name}, {argument}"
            elif (name, argument) not in CASES and (name, argument) not in BLOCKS:
                missing.append((name, argument))
    assert not missing and len(CASES) == len(set(CASES)) > 40


def moved(value: Any, device: str) -> Any:
    """A copy on a device."""
    if isinstance(value, wrappers.FP4Tensor):
        data, scale = moved([value.data, value.scale], device)
        return wrappers.FP4Tensor(data, scale, value.scale_start_index, value.original_shape)
    if isinstance(value, (list, tuple)):
        return type(value)(moved(v, device) for v in value)
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value


def prepared(case: tuple[str, str], device: str = "cpu") -> tuple[Any, dict[str, Any]]:
    """Return the function of a case and its arguments without the scale. The tensors are on `device`."""
    name, argument = case
    if name in METHODS:
        function, given = planned(*name.split("."), device), METHODS[name]
    else:
        function, given = function_of(name), FUNCTIONS[name]()
    given = {n: moved(t, device) for n, t in given.items() if n != argument}
    return function, given


def outcome(case: tuple[str, str], scale: Any, device: str = "cpu") -> list[torch.Tensor]:
    """Return the results of a call and the tensors that it wrote."""
    function, given = prepared(case, device)
    returned = function(**given | {case[1]: scale})
    flat = tree_leaves([returned, list(given.values())])
    return [t for value in flat for t in ((value.data, value.scale) if isinstance(value, fp4.FP4Tensor) else (value,))
            if isinstance(t, torch.Tensor)]  # fmt: skip


def number_of(case: tuple[str, str]) -> Any:
    """The scale as a number, where the argument may be one."""
    return torch.tensor(VALUE) if takes_no_number(case) else VALUE


def takes_no_number(case: tuple[str, str]) -> bool:
    return case[1].endswith(("descale", "_log2"))


def bits(tensors: list[torch.Tensor]) -> list[Any]:
    return [t.contiguous().flatten().view(torch.uint8).tolist() for t in tensors]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls that are served."""
    found, run = [], plan.run
    monkeypatch.setattr(plan, "run", lambda p: found.append(p) or run(p))
    return found


def named(case: tuple[str, str]) -> Any:
    return f"{case[0]}-{case[1]}"


every = pytest.mark.parametrize("case", CASES, ids=named)
FORMS = {"()": torch.tensor(VALUE), "(1,)": torch.tensor([VALUE]), "(1, 1)": torch.tensor([[VALUE]]),
         "parameter": torch.nn.Parameter(torch.tensor([VALUE]))}  # fmt: skip


@every
def test_a_tensor_of_the_host_is_a_number(case, served):
    """On the CPU, bit by bit, and beside data of a device, of which no value is read."""
    want, forms = bits(outcome(case, number_of(case))), [*FORMS.values()]
    assert want != bits(outcome(case, torch.tensor([3.0]) if takes_no_number(case) else 3.0)), "the scale is not used"
    for scale in forms:
        assert bits(outcome(case, scale)) == want
        assert any(t.is_meta for t in outcome(case, scale, "meta"))
    if case in ATTENTION:
        assert len(served) == 2 + 2 * len(forms)
        first = served[0]
        for p in served[2:]:
            assert (p.scale, p.out_scale) == (first.scale, first.out_scale)
            assert p.scale_tensor is p.out_scale_tensor is None


TWO = r"(shape \(2,\)|device cpu), must"
BAD = {
    "nan": (torch.tensor([math.nan]), ValueError, "nan, must be finite"),
    "inf": (torch.tensor(math.inf), ValueError, "inf, must be finite"),
    "double": (torch.ones(1).double(), TypeError, "dtype torch.float64, must be torch.float32"),
    "half": (torch.ones(1).half(), TypeError, "dtype torch.float16, must be torch.float32"),
    "two, as there are heads": (torch.ones(HKV), ValueError, TWO),
}


@every
def test_bad_tensors_are_refused_by_name(case):
    """An argument with two names is called by the first."""
    function, given = prepared(case, "meta")
    name = re.sub(r"^scale_([qkv])$", r"\1_scale", case[1])
    for bad, (scale, error, message) in BAD.items():
        with pytest.raises(error) as found:
            function(**given | {case[1]: scale})
        assert re.search(rf"\b{name}\b.*: {message}", str(found.value)), f"{bad}: {found.value}"


@every
def test_numbers_that_are_not_normal_in_float32_are_refused(case):
    """A kernel would get 0 or an infinity for them. A tensor holds the subnormal ones, which kernels flush to 0."""
    function, given = prepared(case, "meta")
    name = re.sub(r"^scale_([qkv])$", r"\1_scale", case[1])
    bad: list[Any] = [torch.tensor([1e-39])]
    if not takes_no_number(case):
        bad += [1e-46, 1e-39, 1e39, 10**39, np.float64(1e-46)]
    for scale in bad:
        with pytest.raises(ValueError) as found:
            function(**given | {case[1]: scale})
        assert re.search(rf"\b{name}\b.*: 1.*, must be (positive and )?finite in float32", str(found.value)), scale


@pytest.mark.parametrize("value", [1e-46, 1e-39, 1e39])
def test_other_numbers_that_are_not_normal_in_float32_are_refused(value):
    """Each decides a branch by being 0 or not, which the kernel would take otherwise."""
    context = attention(SMALL, "context")
    for argument in ("logits_soft_cap", "skip_softmax_threshold_scale_factor"):
        with pytest.raises(
            ValueError, match=f"^{argument}: {re.escape(str(value))}, must be None, 0 .off. or positive and finite in"
        ):
            wrappers.trtllm_batch_context_with_kv_cache(**context | {argument: value})
    with pytest.raises(ValueError, match=f"^softcap: {re.escape(str(value))}, must be None, 0"):
        wrappers.flash_attn_func(**good_call("flash_attn_func") | {"softcap": value})
    with pytest.raises(ValueError, match=f"^softmax_scale: {re.escape(str(value))}, must be finite in float32"):
        wrappers.flash_attn_func(**good_call("flash_attn_func") | {"softmax_scale": value})
    with pytest.raises(
        ValueError, match=f"^o_sf_scale: {re.escape(str(value))}, must be positive and finite in float32"
    ):
        wrappers.trtllm_batch_context_with_kv_cache(
            **context | {"out": None, "out_dtype": "nvfp4", "o_sf_scale": value}
        )


def test_scales_of_heads_are_checked_on_the_cpu_as_one_is():
    heads = {"q": drawn(5, HQ, D), "k": drawn(9, HKV, D), "v": drawn(9, HKV, D)}
    for name in ("q_scale", "k_scale", "v_scale"):
        bad = torch.full((HQ if name == "q_scale" else HKV,), 1e-40)
        with pytest.raises(ValueError, match="1.* of query head 0, must be .*finite in float32, .*at least 1.18e-38"):
            wrappers.single_prefill_with_kv_cache(**heads, **{name: bad})


def test_a_factor_on_the_logits_that_overflows_in_base_2_is_refused():
    """Kernels multiply it by log2(e)."""
    most = plan.checks.MOST_SCALE
    for value in (most * 1.001, 3.4e38):
        with pytest.raises(ValueError, match="^softmax_scale: .*, must be at most 2.36e.38"):
            wrappers.flash_attn_func(**good_call("flash_attn_func") | {"softmax_scale": value})
    with pytest.raises(
        ValueError, match="^quant_scale_q: 3e.38, must be at most 8.51e.37: kernels divide by its recip"
    ):
        wrappers.rope_quantize_fp8(**GOOD["rope_quantize_fp8"][1]() | {"quant_scale_q": 3e38})


@pytest.mark.parametrize("case", POSITIVE, ids=named)
@pytest.mark.parametrize("value", [0.0, -1.0])
def test_values_are_checked_as_numbers_are(case, value):
    for scale in (value, torch.tensor([value])):
        with pytest.raises(ValueError, match=f"^{case[1]}: {value}, must be positive and finite"):
            outcome(case, scale, "meta")


@pytest.fixture
def gpu() -> Any:
    """Provide a fake GPU for CPU tensors, except scales of one element, and record its launches."""
    with machine.override(Recorder()) as found:
        found.host_scales = True
        yield found


@pytest.mark.parametrize("case", ATTENTION, ids=named)
def test_launches_of_a_captured_graph(case, gpu):
    """The kernel gets the number; a tensor of the device goes to it as it is."""
    gpu.capturing = True
    outcome(case, number_of(case))
    outcome(case, torch.tensor([VALUE]))
    gpu.host_scales = False
    outcome(case, torch.tensor([VALUE]))
    want, got, there = (launch for op, _, launch in gpu.launches if op.startswith("attention"))
    for name in ("softmax_scale_log2", "out_scale"):
        assert want[name] == got[name]
    pointers = "softmax_scale_ptr", "out_scale_ptr"
    assert not any(len(launch[name]) for launch in (want, got) for name in pointers)
    assert any(len(there[name]) for name in pointers)


def test_cuda_refuses_a_number_that_is_not_positive(gpu):
    for scale in (-1.0, torch.tensor([-1.0])):
        with pytest.raises(NotImplementedError, match="^bmm1_scale: -1.0, must be positive on CUDA"):
            outcome(("trtllm_batch_context_with_kv_cache", "bmm1_scale"), scale)


# ---- beside scales of a device


def test_products_with_scales_of_heads():
    host, heads = torch.tensor([0.25]), torch.ones(HQ, device="meta")
    scale, tensor, out_scale, out = values.combine_scales(0.5, heads, host, host, heads.device, (HQ, HKV))
    assert (scale, out_scale, out) == (0.125, 0.25, None) and tensor is heads


# ---- where something traces the call: the value is read by the operator


def compiled(function: Any, given: dict[str, Any], name: str) -> Any:
    def step(scale: torch.Tensor) -> Any:
        return function(**given | {name: scale})

    return torch.compile(step, fullgraph=True, backend="aot_eager")


ONE_OF_EACH = [
    ("trtllm_batch_context_with_kv_cache", "bmm1_scale"), ("trtllm_batch_decode_with_kv_cache", "bmm1_scale_log2"),
    ("xqa", "kv_scale"), ("BatchPrefillWithPagedKVCacheWrapper.run", "v_scale"), ("flash_attn_func", "k_descale"),
    ("nvfp4_quantize", "global_scale"), ("nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", "v_scale"),
]  # fmt: skip


def test_the_operator_of_a_traced_call_checks_the_value(fresh_compiler):
    case = ONE_OF_EACH[0]
    call = compiled(*prepared(case), case[1])
    with pytest.raises(ValueError, match="^bmm1_scale: nan, must be finite"):
        call(torch.tensor([math.nan]))


def test_a_traced_launch_gets_the_number(gpu, fresh_compiler):
    case = ONE_OF_EACH[0]
    compiled(*prepared(case), case[1])(torch.tensor([VALUE]))
    outcome(case, VALUE)
    (_, _, got), (_, _, want) = gpu.launches
    assert got["softmax_scale_log2"] == want["softmax_scale_log2"] and len(got["softmax_scale_ptr"]) == 0
