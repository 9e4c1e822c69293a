"""Small problems for every shipped attention kernel.

Each variant is ragged, fills unused memory and outputs with NaN, and takes another page size, layout and modifier, so
that together they reach each path of a kernel.
"""

import hashlib
import time
from dataclasses import replace
from typing import Any

import torch

from bench.cases import attention as cases
from bench.cases.attention import AttentionCase
from cute_kernels.attention.decode import FEW_ROWS
from cute_kernels.attention.spec import AttentionSpec
from wrappers import decode, prefill

from ..run import Result
from .common import SMS, Outcome, distance, simulated

SPLIT_SMS = 7  # where CTAs share the keys of a request


def split(spec):
    return spec.schedule == "stream_k"


def narrow(spec: AttentionSpec) -> bool:
    """Whether calls with many rows have another kernel, unless they ask for `batch_invariant`."""
    return split(spec) and spec.tile.rows_per_warp == FEW_ROWS and spec.head_dim_qk < 256


def attention_cases(spec: AttentionSpec, thorough: bool = False) -> list[AttentionCase]:
    """Cases whose kernel is `spec`. thorough: every box size, and lengths with which every pipeline wraps around."""
    common: dict[str, Any] = {
        "dtype": spec.q,
        "head_dim_qk": spec.head_dim_qk,
        "head_dim_vo": spec.head_dim_vo,
        "causal": (spec.mask.causal != "never"),
        "soft_cap": 12.0 if spec.logits.soft_cap else 0.0,
        "kv_dtype": {"e4m3": "fp8", "nvfp4": "nvfp4"}.get(spec.kv.dtype, ""),
    }
    window = 75 if spec.mask.window else -1
    other = -1 if spec.logits.soft_cap or spec.pack_gqa else window  # a kernel with a window serves calls without one
    heads: dict[str, Any]
    if spec.pack_gqa:
        heads = {"heads_q": 6, "heads_kv": 2}
        first, second = (5, 0, 33), (2, 1, 21)
    else:
        heads = {"heads_q": 2, "heads_kv": 2}
        first, second = (3, 0, 150), (9, 1, 197)
    if narrow(spec):
        second = (1, 2, 1)
    page_size = 16 if spec.q == "bf16" else 8  # with 64 below, every size of TMA box
    stacked = "stacked" if spec.head_dim_qk == spec.head_dim_vo else "tuple"
    cases = [
        AttentionCase("ragged", q_lens=first, kv_lens=(19, 7, 290), page_size=page_size, sink=True, window_left=window,
                      layout="NHD", strided_q=True, **heads, **common),
        AttentionCase("short", q_lens=second, kv_lens=(256, 0, 140), page_size=64, lse=False, cache=stacked,
                      window_left=other, **heads, **common),
    ]  # fmt: skip
    if split(spec):  # every soft cap is an argument
        cases[1] = replace(cases[1], soft_cap=12.0)
    if not thorough:
        return cases
    more: dict[str, Any] = dict(q_lens=first, kv_lens=(1000, 0, 700), window_left=-1 if other < 0 else 600)
    return [*cases, *(AttentionCase(f"page {p}", page_size=p, **more, **heads, **common) for p in (8, 16, 64))]


def run_attention(spec: AttentionSpec, case: AttentionCase, arch: str, **how: Any) -> Outcome:
    inputs = cases.make_inputs(case)
    expected, expected_lse = cases.reference_of(inputs)
    results: list[Result] = []
    start = time.perf_counter()
    with simulated(arch, results, SPLIT_SMS if split(spec) else SMS, spec, **how):
        if split(spec):
            many = max(case.q_lens) * case.heads_q // case.heads_kv > FEW_ROWS
            got = decode.trtllm_batch_decode_with_kv_cache(
                **cases.as_decode(inputs), batch_invariant=many and narrow(spec)
            )
        else:
            got = prefill.trtllm_batch_context_with_kv_cache(**inputs)
    seconds = time.perf_counter() - start
    out, lse = got if case.lse else (got, None)
    error = distance(out, expected, case.tolerance)
    if lse is not None:
        error = max(error, distance(lse, expected_lse, cases.LSE_TOLERANCE))
    bits = hashlib.sha256(out.view(torch.int16).contiguous().numpy().tobytes()).hexdigest()
    return Outcome(error, bits, seconds, results[0])
