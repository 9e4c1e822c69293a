"""Cases of low-precision prefill, and of skip-softmax with its data."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tools import demo_data
from wrappers import fp4

from . import attention as cases
from .attention import DTYPES, AttentionCase

O_SF_SCALE = 1000.0  # scale of NVFP4 outputs; they are about 0.02 over 8192 keys
OUT_SCALE = 16.0  # scale of e4m3 outputs; without it they would be subnormal


class CaseDtypes(NamedTuple):
    """Dtypes of Q, of K and V ("": Q's) and of the output, by the names that AttentionCase uses."""

    q: str
    kv: str = ""
    out: str = "bf16"


BF16 = CaseDtypes("bf16")
KINDS = {  # the second word of a case's name
    "fp8": CaseDtypes("fp8"),
    "fp8out": CaseDtypes("fp8", "", "fp8"),
    "kvfp8": CaseDtypes("bf16", "fp8"),
    "kvnvfp4": CaseDtypes("bf16", "nvfp4"),
    "fp8kvnvfp4": CaseDtypes("fp8", "nvfp4"),
    "kvfp8outnvfp4": CaseDtypes("bf16", "fp8", "nvfp4"),
}
# Provider -> ours on the same case in wider types. own-fp8 has the case's Q with e4m3 K and V.
WIDER = {
    "fp8": {"own-bf16": BF16},
    "fp8out": {"own-bf16": BF16},
    "kvfp8": {"own-bf16": BF16},
    "kvnvfp4": {"own-fp8": KINDS["kvfp8"], "own-bf16": BF16},
    "fp8kvnvfp4": {"own-fp8": KINDS["fp8"], "own-bf16": BF16},
    "kvfp8outnvfp4": {"own-fp8": KINDS["kvfp8"], "own-bf16": BF16},
}


def typed(case: AttentionCase, types: CaseDtypes) -> AttentionCase:
    """Return the case in other dtypes. An e4m3 output is scaled."""
    scale = OUT_SCALE if types.out == "fp8" else 1.0
    return replace(case, dtype=types.q, kv_dtype=types.kv, out_dtype=types.out, out_scale=scale)


def kind_of(name: str) -> str:
    return name.split("-")[1]


def _case(
    kind: str, mask: str, batch: int, length: int, heads: tuple[int, int] = (32, 8), dim: int = 128
) -> AttentionCase:
    return typed(cases.headline(mask, batch, length, heads, dim, 64, kind), KINDS.get(kind, BF16))


PRECISION = {
    case.name: case
    for case in (
        _case("fp8", "causal", 2, 8192),
        _case("fp8", "full", 2, 8192),
        _case("fp8", "causal", 16, 1024),
        _case("fp8", "causal", 1, 32768),
        _case("fp8", "causal", 2, 8192, (64, 8), 64),
        _case("fp8out", "causal", 2, 8192),
        _case("kvfp8", "causal", 2, 8192),
        _case("kvnvfp4", "causal", 2, 8192),
        _case("fp8kvnvfp4", "causal", 2, 8192),
        _case("kvfp8outnvfp4", "causal", 2, 8192),
    )
}
SKIP = _case("skip75", "causal", 1, 32768)  # skip-softmax that leaves out three quarters of the blocks
SKIP_NONE = replace(SKIP, name=SKIP.name.replace("skip75", "skip0"))  # and that leaves out none
DECODE = {  # cases with e4m3 queries
    case.name: case
    for case in (
        replace(
            cases.decoding(64, 8192, (64, 8), 128, 64, "fp8"),
            name="decode-qfp8-b64-s8192-h64x8-d128-p64",
            dtype="fp8",
            out_dtype="bf16",
        ),
    )
}


def make_inputs(case: AttentionCase, device: "torch.device | str" = "cpu", seed: int = 0) -> dict[str, Any]:
    """Return the keyword arguments of `trtllm_batch_context_with_kv_cache`. The output has the case's dtype, and holds
    NaN if the dtype can."""
    inputs = cases.make_inputs(replace(case, fresh=True, out_dtype=""), device, seed)
    shape = (len(inputs["query"]), case.heads_q, case.head_dim_vo)
    if case.out_dtype == "nvfp4":
        return inputs | {"out": fp4.empty(shape, torch.device(device)), "o_sf_scale": O_SF_SCALE}
    out = torch.full(shape, math.nan, device=device, dtype=torch.bfloat16)
    return inputs | {"out": out.to(DTYPES[case.out_dtype or case.dtype])}


# ---- data with concentrated attention: Q (n, Hq, D), K and V (n, Hkv, D) in fp32, and the scale of the logits

Data = tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]
RANK = 16  # dimensions that determine how tiles and blocks match
SPREAD = 1.5  # of a tile's match with a block of magnitude 1; over 32768 keys a factor of 1300 leaves out 75 %


def heavy_tailed(case: AttentionCase, device: "torch.device | str", seed: int = 0) -> Data:
    """Return N(0, 1) data in which few blocks hold a tile's largest logits.

    In the first RANK dimensions, 64 query rows share a vector, and 128 keys share a vector of log-normal magnitude; so
    the largest logits of the blocks have a heavy tail. Both differ between heads.
    """
    gen = torch.Generator(torch.device(device)).manual_seed(seed)
    n, dim = case.kv_lens[0], case.head_dim_qk

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, device=device)

    q, k = normal(n, case.heads_q, dim), normal(n, case.heads_kv, dim)
    tiles, blocks = -(-n // 64), -(-n // 128)
    unit = math.sqrt(SPREAD) * (dim / RANK) ** 0.25
    magnitude = (normal(blocks, case.heads_kv, 1) - 0.5).exp()
    q[..., :RANK] = unit * normal(tiles, case.heads_q, RANK).repeat_interleave(64, 0)[:n]
    k[..., :RANK] = unit * (magnitude * normal(blocks, case.heads_kv, RANK)).repeat_interleave(128, 0)[:n]
    return q, k, normal(n, case.heads_kv, dim), dim**-0.5


def text(case: AttentionCase, device: "torch.device | str", seed: int = 0, stretched: bool = False) -> Data:
    """Return Q, K and V of the demo's trained transformer on real text (`tools.demo_data`: 645 tokens), extended to the
    case's length: the text is repeated, or, if `stretched`, each token is repeated.

    Each KV head has the data of one of the layer's heads; each query head of the group reads the text from a different
    position. An orthonormal map takes the heads' 32 dimensions to the case's: no zeros, the same logits. Nothing is
    scaled: a row's probabilities have a perplexity of 20 to 200 over the text's first 384 tokens, depending on the
    head. In the repeated text almost every block contains the keys that a row attends to, so no block can be left out;
    a long text would mention them in few places. In the stretched text a block holds 2 or 3 tokens, and blocks differ
    as the tokens do.
    """
    data, _ = demo_data.load()
    n, tokens, heads = case.kv_lens[0], len(data["q"]), case.heads_kv
    gen = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(case.head_dim_qk, data["q"].shape[2], generator=gen))[0].T.to(device)
    at = torch.arange(n, device=device)
    at = at * tokens // n if stretched else at % tokens
    q, k, v = (torch.from_numpy(data[name]).to(device).float()[:, :heads] @ turn for name in ("q", "k", "v"))
    group = case.heads_q // heads
    places = [(at + tokens * i // group) % tokens for i in range(group)]
    wide = torch.stack([q[place] for place in places], 2).flatten(1, 2)
    return wide, k[at], v[at], demo_data.head_scale(data)


DATA: dict[str, Callable[[AttentionCase, Any], Data]] = {
    "heavy-tailed": heavy_tailed,
    "text-stretched": lambda case, device: text(case, device, stretched=True),
    "text": text,
}


def concentrated(case: AttentionCase, device: "torch.device | str", data: str) -> dict[str, Any]:
    """Return the inputs of a case of one request, with one of DATA in its query and pages."""
    inputs, (n,) = make_inputs(case, device), case.kv_lens
    q, k, v, scale = DATA[data](case, device)
    row = torch.arange(n, device=device)
    page = inputs["block_tables"][0, row // case.page_size].long()
    inputs["query"].copy_(q)
    for pool, values in zip(inputs["kv_cache"], (k, v)):
        pool[page, :, row % case.page_size] = values.to(pool.dtype)
    return inputs | {"bmm1_scale": scale}
