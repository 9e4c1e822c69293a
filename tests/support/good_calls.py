"""A good call of every public function in `wrappers.own.registry`, and of the RoPE functions."""

from dataclasses import replace
from typing import Any

import torch

from bench.cases import attention as cases
from bench.cases import topk as topk_cases
from tests.attention.test_decode_wrapper import xqa_inputs
from tests.engines.test_engines import as_fmha, as_persistent, as_xqa_batch
from tests.support import rope_calls
from tests.support.flash_attn_batches import good_call
from wrappers import KVCacheTarget
from wrappers.flashinfer import rope
from wrappers.own.registry import FUNCTIONS

NAMES = [row.function.__name__ for row in FUNCTIONS]
PLAIN = replace(cases.EDGE["plain"], q_lens=(1, 2), kv_lens=(9, 40))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def appended(function: str) -> dict[str, Any]:
    """Arguments of a function that appends three rows to a cache of six pages of four rows."""
    rows = torch.ones(3, 2, 16).bfloat16()
    if function == "append_qkv":
        q, cache = torch.ones(3, 4, 16).bfloat16(), KVCacheTarget(torch.zeros(6, 2, 4, 2, 16).bfloat16())
        return {"q": q, "k": rows, "v": rows.clone(), "cache": cache, "places": ints(5, -1, 9)}
    given = {"append_key": rows, "append_value": rows.clone()}
    if function.endswith("slot_mapping"):
        given["slot_mapping"] = ints(5, -1, 9)
    else:
        given |= {"batch_indices": ints(0, 2, 2), "positions": ints(6, 7, 8), "kv_indices": ints(0, 1, 2, 3, 4),
                  "kv_indptr": ints(0, 2, 2, 5), "kv_last_page_len": ints(3, 0, 1)}  # fmt: skip
    if function == "append_paged_kv_cache":
        return given | {"paged_kv_cache": torch.zeros(6, 2, 4, 2, 16).bfloat16()}
    codes, factors = (torch.zeros(6, 2, 4, 2, n, dtype=torch.uint8) for n in (8, 1))
    return given | {"paged_kv_cache": codes, "kv_cache_sf": factors, "k_scale": 0.5, "v_scale": 2.0}


def inputs_of(function: str) -> dict[str, Any]:
    """Keyword arguments of a good call."""
    if function == "xqa":
        return xqa_inputs()[0]
    if "append" in function and function not in rope.__all__:
        return appended(function)
    if function in rope.__all__:
        return rope_calls.good_call(function)
    if function in topk_cases.FUNCTIONS:
        return topk_cases.make_inputs(topk_cases.PLAIN[function])
    if function.startswith("flash_attn"):
        return good_call(function)
    if function in ("persistent_topk", "cooperative_topk"):
        return as_persistent(topk_cases.make_inputs(topk_cases.PLAIN["top_k_ragged_transform"]))
    if function == "trtllm_fmha_v2_prefill":
        return as_fmha(cases.make_inputs(replace(PLAIN, cache="stacked", lse=False)))
    if function.startswith("single_prefill_with_kv_cache"):
        q, k, v = torch.randn(3, 40, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        return {"q": q[:5], "k": k[:, :2], "v": v[:, :2], "causal": True}
    if function == "single_decode_with_kv_cache":
        q, k, v = torch.randn(3, 40, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        return {"q": q[5], "k": k[:, :2], "v": v[:, :2]}
    inputs = cases.make_inputs(PLAIN)
    if function == "xqa_batch_decode_with_kv_cache":
        return as_xqa_batch(inputs)
    return inputs if function == "trtllm_batch_context_with_kv_cache" else cases.as_decode(inputs)
