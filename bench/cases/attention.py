"""Attention cases and their inputs, shared by tests, benchmarks and the simulator."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import wrappers
from wrappers import fp4, reference, trtllm_batch_context_with_kv_cache
from wrappers.attention.call import AttentionCall, SequenceBatch
from wrappers.own.registry import call_of

from .. import skipping
from . import planted
from .memory import distant as _distant
from .outputs import poisoned, rounded

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
TOLERANCE = {"bf16": 1e-2, "fp16": 1e-3, "fp8": 5e-2}  # by query dtype, for N(0, 1) data against fp32; rtol = atol
TOKEN_SCALES, INT8_SCALES = "fp8-token", "int8-token"
BY_TOKEN = {TOKEN_SCALES: torch.float8_e4m3fn, INT8_SCALES: torch.int8}  # caches with an fp32 factor per token and head
SF_SCALE = 100.0  # forward scale of NVFP4 outputs
SF_START = 125  # first row of their block scales, in a tile of 128
SOFT_CAP_TOLERANCE, LSE_TOLERANCE = 1e-2, 1e-3
MANY_KEYS = 300  # the tolerance shrinks above this many keys, as an output of N(0, 1) values does
PAGE_SIZES = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class AttentionCase:
    """One call of a public function: "context", "decode" or "xqa". kv_dtype "": the query's; "nvfp4": packed; or
    one of `BY_TOKEN`.

    cache: "tuple" of K and V, "stacked" (pages, 2, ...), "shared" (pages, 1, ...) or, for xqa, "flat" rows. strided_q:
    the query is every second head of a wider tensor. sink: unit of the sinks, 0 for none; above 1 the first sink is
    -inf, and the last outweighs any keys. fresh: the call makes its outputs. spare_pages: pages of the pool that belong
    to no request. scale: of the logits, 0 for D^-0.5; out_scale: of the output (xqa: kv_scale, which is also a factor
    of `scale`). o_scale: decode's, or xqa's rcp_out_scale. device: the scales that are tensors: "scale", "log2", "out".
    data: "normal"; "needles": each row finds one key, far from the last and in its own block, 10 log2 units above the
    others; the others together, and the sink, weigh about as much; "peaks": 20 units for every third row; others: see
    `planted`. skip: threshold factor; in decode the last `kept` keys (0: all) must remain. drafts: a random mask of
    drafts; with equal q_lens it needs no offsets. zero_page: each table has a negative page id. q_unit: magnitude of
    the first query row; the next rows are smaller by powers of 8. nan: key 15 of each request is NaN in the first KV
    head. far: pages, tokens and rows of all large tensors are `memory.FAR_BYTES` apart.
    """

    name: str
    dtype: str = "bf16"
    q_lens: tuple[int, ...] = (8,)
    kv_lens: tuple[int, ...] = (8,)
    heads_q: int = 4
    heads_kv: int = 2
    head_dim_qk: int = 64
    head_dim_vo: int = 64
    page_size: int = 16
    layout: str = "HND"
    causal: bool = True
    window_left: int = -1
    soft_cap: float = 0.0
    sink: float = 0.0
    lse: bool = True
    kv_dtype: str = ""
    cache: str = "tuple"
    separate_tables: bool = False
    strided_q: bool = False
    spare_pages: int = 3
    function: str = "context"
    scale: float = 0.0
    out_scale: float = 1.0
    o_scale: float = 1.0
    device: tuple[str, ...] = ()
    out_dtype: str = ""
    data: str = "normal"
    skip: float = 0.0
    kept: int = 0
    drafts: bool = False
    interleaved: bool = False
    invariant: bool = False
    uint32_lens: bool = False
    zero_page: bool = False
    fresh: bool = False
    q_unit: float = 1.0
    nan: bool = False
    far: bool = False

    @property
    def bmm1_scale(self) -> float:
        return self.scale or self.head_dim_qk**-0.5

    @property
    def batch(self) -> int:
        return len(self.q_lens)

    @property
    def tolerance(self) -> float:
        """Return rtol = atol of the output."""
        return max(SOFT_CAP_TOLERANCE if self.soft_cap else 0.0, TOLERANCE[self.dtype])

    @property
    def lse_tolerance(self) -> float:
        """Return rtol = atol of the LSE: 8-bit products are summed with fewer bits than fp32 has. Prefill rounds K with
        a scale per token to the query's type."""
        if self.kv_dtype in BY_TOKEN and self.function == "context":
            return 3 * LSE_TOLERANCE
        return 1e-2 if self.dtype == "fp8" else LSE_TOLERANCE

    @property
    def output_factor(self) -> float:
        """Return the factor on the normalised output. o_scale counts in decode unless the output is e4m3, in xqa only
        if it is."""
        return self.out_scale * (self.o_scale if (self.out_dtype == "fp8") == (self.function == "xqa") else 1.0)

    def keys_seen(self) -> torch.Tensor:
        """Return the number of keys that each query token sees, (T,) float; drafts count as if they were causal."""
        found = []
        for q, n in zip(self.q_lens, self.kv_lens, strict=True):
            position = torch.arange(n - q, n)
            last = (position + 1).clamp(0, n) if self.causal else torch.full((q,), n)
            first = (position - self.window_left).clamp(0, n) if self.window_left >= 0 else torch.zeros(q)
            found.append((last - first).clamp(min=0))
        return torch.cat(found).float()

    def atol(self) -> torch.Tensor:
        """Return the atol of each token's output, (T, 1, 1). If n keys weigh alike, outputs and errors shrink as
        n^-0.5."""
        shrunk = (self.keys_seen().clamp(min=MANY_KEYS) / MANY_KEYS) ** -0.5
        return (self.tolerance * abs(self.output_factor) * shrunk)[:, None, None]

    def limit(self, want: torch.Tensor) -> torch.Tensor:
        """Return the largest allowed error of an output that should be `want` (T, Hq, D)."""
        return self.atol().to(want.device) + self.tolerance * want.abs() + rounded(want, self.out_dtype or self.dtype)


def headline(
    mask: str, batch: int, length: int, heads: tuple[int, int], dim: int, page_size: int, kind: str = "bf16"
) -> AttentionCase:
    """Return a bf16 prefill case of equal requests. mask: "causal" or "full"; kind: the second word of its name."""
    name = f"prefill-{kind}-{mask}-b{batch}-s{length}-h{heads[0]}x{heads[1]}-d{dim}-p{page_size}"
    lens = (length,) * batch
    return AttentionCase(
        name, "bf16", lens, lens, *heads, dim, dim, page_size, causal=mask == "causal", lse=False, spare_pages=8
    )


PREFILL_BF16 = {
    case.name: case
    for case in (
        headline("causal", 2, 8192, (32, 8), 128, 64),
        headline("causal", 2, 8192, (32, 8), 128, 16),
        headline("full", 2, 8192, (32, 8), 128, 64),
        headline("causal", 4, 4096, (32, 8), 128, 64),
        headline("causal", 1, 16384, (64, 8), 128, 64),
        headline("causal", 16, 1024, (32, 8), 128, 64),
        headline("causal", 2, 8192, (64, 8), 64, 64),
    )
}


def decoding(
    batch: int, length: int, heads: tuple[int, int], dim: int, page_size: int, kv_dtype: str = "", tokens: int = 1
) -> AttentionCase:
    """Return a headline case with bf16 queries and `tokens` query tokens per request."""
    name = f"decode-{kv_dtype or 'bf16'}-b{batch}-s{length}-h{heads[0]}x{heads[1]}-d{dim}-p{page_size}"
    name += f"-q{tokens}" if tokens > 1 else ""
    case = AttentionCase(name, "bf16", (tokens,) * batch, (length,) * batch, *heads, dim, dim, page_size)
    return replace(case, lse=False, spare_pages=8, kv_dtype=kv_dtype)


DECODE = {
    case.name: case
    for kv_dtype in ("", "fp8", "nvfp4")
    for case in (
        decoding(64, 8192, (64, 8), 128, 64, kv_dtype),
        decoding(16, 32768, (64, 8), 128, 64, kv_dtype),
        decoding(1, 131072, (64, 8), 128, 64, kv_dtype),
        decoding(128, 2048, (32, 8), 128, 32, kv_dtype),
        decoding(64, 8192, (64, 8), 64, 64, kv_dtype),
        *(decoding(64, 8192, (64, 8), 128, 64, kv_dtype, tokens) for tokens in (2, 4, 8)),
    )
}
_TOKEN = (decoding(64, 8192, (64, 8), dim, 64, TOKEN_SCALES) for dim in (128, 64))
DECODE |= {case.name: case for case in (*_TOKEN, decoding(64, 8192, (64, 8), 128, 64, TOKEN_SCALES, 2))}
_INT8 = decoding(64, 8192, (64, 8), 128, 64, INT8_SCALES)
DECODE[_INT8.name] = _INT8

_BASE = AttentionCase("", q_lens=(5, 37), kv_lens=(19, 37), sink=True)
EDGE = {
    case.name: case
    for case in (
        replace(_BASE, name="plain"),
        replace(_BASE, name="odd", q_lens=(1, 3, 129, 65), kv_lens=(1, 67, 131, 257)),
        replace(_BASE, name="q-len-0", q_lens=(0, 7, 0, 2, 0), kv_lens=(5, 9, 0, 40, 17)),
        replace(_BASE, name="kv-len-0", q_lens=(3, 4, 2), kv_lens=(9, 0, 5)),
        replace(_BASE, name="kv-len-0-no-sink", q_lens=(3, 4, 2), kv_lens=(9, 0, 5), sink=False),
        replace(_BASE, name="kv-below-q", q_lens=(9, 150, 2), kv_lens=(4, 20, 33), sink=False),
        replace(_BASE, name="one-token", q_lens=(1, 1, 60, 1), kv_lens=(300, 1, 77, 129)),
        *(replace(_BASE, name=f"group-{g}", heads_q=2 * g, heads_kv=2) for g in (1, 3, 4, 5, 7, 8)),
        *(replace(_BASE, name=f"page-{p}", page_size=p, q_lens=(9, 2), kv_lens=(300, 17)) for p in PAGE_SIZES),
        replace(_BASE, name="strided-q", strided_q=True),
        replace(_BASE, name="nhd", layout="NHD"),
        replace(_BASE, name="stacked", cache="stacked"),
        replace(_BASE, name="stacked-nhd", cache="stacked", layout="NHD"),
        replace(_BASE, name="shared", cache="shared"),
        replace(_BASE, name="shared-nhd", cache="shared", layout="NHD"),
        replace(_BASE, name="separate-tables", separate_tables=True),
        replace(_BASE, name="full", causal=False),
        replace(_BASE, name="window", window_left=6, kv_lens=(40, 90)),
        replace(_BASE, name="window-0", window_left=0),
        replace(_BASE, name="full-window", causal=False, window_left=11, kv_lens=(40, 90)),
        replace(_BASE, name="soft-cap", soft_cap=5.0),
        replace(_BASE, name="fp16", dtype="fp16"),
        replace(_BASE, name="d192x128", head_dim_qk=192, head_dim_vo=128),
    )
}


def _tokens(case: AttentionCase, q: torch.Tensor, n: int, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K (n, Hkv, Dqk) and V (n, Hkv, Dvo) of a request with queries q (m, Hq, Dqk), in fp32."""
    k = torch.randn(n, case.heads_kv, case.head_dim_qk, generator=gen, device=q.device)
    v = torch.randn(n, case.heads_kv, case.head_dim_vo, generator=gen, device=q.device)
    if case.data in ("needles", "peaks") and len(q) and n:
        k, v = 0.25 * k, v + 1
        rows = q.float().unflatten(1, (case.heads_kv, -1)).transpose(1, 2).flatten(0, 1)  # (m * group, Hkv, D)
        height = 10 * math.log(2) / case.bmm1_scale / rows.square().sum(-1, keepdim=True)
        if case.data == "peaks":
            height[::3] *= 2
        for i, row in enumerate(rows * height):
            token = i // (case.heads_q // case.heads_kv)
            own = n - len(q) + token
            last = n - len(q) if case.drafts else own + 1 if case.causal else n
            first = max(0, own - case.window_left) if case.window_left >= 0 else 0
            if first < last:
                k[first + i * 37 % max(1, (last - first) // 2)] = row
    planted.plant_keys(case.data, k, v)
    if case.nan:
        k[15:16, 0] = math.nan
    return k, v


def _pool(case: AttentionCase, lists: list[torch.Tensor], tokens: list[torch.Tensor]) -> torch.Tensor:
    """Return (pages, Hkv, P, D) in the cache's dtype (fp32 for NVFP4), with NaN in page tails and unused pages."""
    size, dtype = case.page_size, DTYPES.get(case.kv_dtype or case.dtype, torch.float32)
    pages = sum(-(-n // size) for n in case.kv_lens) + case.spare_pages
    dim = tokens[0].shape[2] if tokens else case.head_dim_qk
    device = tokens[0].device if tokens else None
    wide = torch.float32 if dtype.itemsize == 1 else dtype
    pool = torch.full((pages, case.heads_kv, size, dim), float("nan"), dtype=wide, device=device)
    for ids, rows in zip(lists, tokens, strict=True):
        whole = torch.full((len(ids) * size, case.heads_kv, dim), float("nan"), dtype=wide, device=device)
        whole[: len(rows)] = rows.to(wide)
        pool[ids.to(pool.device)] = whole.view(len(ids), size, case.heads_kv, dim).transpose(1, 2)
    return pool.to(dtype)


def by_token(t: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows (..., D) with a factor each. Rows of NaN have NaN factors."""
    whole = not dtype.is_floating_point
    scales = t.abs().amax(-1) / (torch.iinfo(dtype) if whole else torch.finfo(dtype)).max
    codes = t / scales.clamp(min=1e-30)[..., None]
    return (codes.nan_to_num(-128.0).round() if whole else codes).to(dtype), scales


def _page_lists(case: AttentionCase, seed: int) -> list[torch.Tensor]:
    """Return the shuffled page ids of each request, on the CPU."""
    counts = [-(-n // case.page_size) for n in case.kv_lens]
    order = torch.randperm(sum(counts) + case.spare_pages, generator=torch.Generator().manual_seed(seed))
    return list(order[: sum(counts)].split(counts)) if counts else []


def _table(case: AttentionCase, lists: list[torch.Tensor]) -> torch.Tensor:
    """Return the page table (B, M) int32. Entries after a request's last page are an id far outside the pool."""
    width = max([1, *(len(ids) for ids in lists)]) + 1
    table = torch.full((case.batch, width), 1 << 30, dtype=torch.int32)
    for row, ids in zip(table, lists, strict=True):
        row[: len(ids)] = ids
    return table


def _laid_out(case: AttentionCase, k: torch.Tensor, v: torch.Tensor) -> Any:
    """Return the K and V pools in the case's layout and form."""
    if case.layout == "NHD":
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    if case.cache == "stacked":
        return torch.stack([k, v], dim=1)
    return k.unsqueeze(1) if case.cache == "shared" else (k, v)


def make_call(case: AttentionCase, device: "torch.device | str" = "cpu", seed: int = 0) -> AttentionCall:
    """Return the case's problem for the reference. Its query may be a slice of a wider tensor."""
    gen = torch.Generator(torch.device(device)).manual_seed(seed)
    wide_heads = case.heads_q * (2 if case.strided_q else 1)
    q = torch.randn(sum(case.q_lens), wide_heads, case.head_dim_qk, generator=gen, device=device)
    if case.q_unit != 1.0:
        powers = torch.arange(q[..., 0].numel(), device=device).view(q[..., :1].shape) % 3
        q *= case.q_unit * 8.0**-powers
    planted.plant_queries(case.data, q, case.heads_kv, wide_heads // case.heads_q)
    q = q.to(DTYPES[case.dtype])[:, :: wide_heads // case.heads_q]
    sinks = torch.randn(case.heads_q, generator=gen, device=device) * case.sink
    if case.sink > 1:
        sinks[0], sinks[-1] = -math.inf, 1e4
    if case.data in ("needles", "peaks"):
        sinks += math.log(500)
    lists = _page_lists(case, seed)
    v_lists = _page_lists(case, seed + 1) if case.separate_tables else lists
    tokens = [_tokens(case, rows, n, gen) for rows, n in zip(q.split(case.q_lens), case.kv_lens, strict=True)]
    k, v = _pool(case, lists, [k for k, _ in tokens]), _pool(case, v_lists, [v for _, v in tokens])
    v = k if case.cache == "shared" else v
    k_scales, v_scales = None, None
    if case.kv_dtype in BY_TOKEN:
        (k, k_scales), (v, v_scales) = (by_token(t, BY_TOKEN[case.kv_dtype]) for t in (k, v))
    if case.kv_dtype == "nvfp4":
        (k, k_scales), (v, v_scales) = fp4.nvfp4_quantize(k), fp4.nvfp4_quantize(v)
        if case.interleaved:
            blocks = v_scales.view(torch.uint8).unflatten(2, (-1, 4)).transpose(-1, -2)
            v_scales = blocks.contiguous().reshape(v_scales.shape).view(v_scales.dtype)
    table = torch.stack([_table(case, lists), _table(case, v_lists)], 1)
    if case.zero_page:
        table[:, :, 1] = -1
    drafts = None
    if case.drafts:
        shape = sum(case.q_lens), (max(case.q_lens) + 31) // 32
        drafts = torch.randint(-(1 << 31), 1 << 31, shape, generator=torch.Generator().manual_seed(seed))
        drafts[:1] = 0  # this row sees no draft
        drafts = drafts.to(torch.int32).to(device)
    lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=device)
    offsets = torch.tensor([0, *case.q_lens]).cumsum(0).to(torch.int32).to(device)
    return AttentionCall(
        f"trtllm_batch_{case.function}_with_kv_cache", q, k, v,
        SequenceBatch(table.to(device), lens, offsets, case.batch, None), max([0, *case.q_lens]), scale=case.bmm1_scale,
        out_scale=case.output_factor, causal=case.causal, window_left=case.window_left, soft_cap=case.soft_cap,
        skip=case.skip or None, interleaved=case.interleaved,
        sinks=sinks if case.sink else None, k_scales=k_scales, v_scales=v_scales, drafts=drafts,
    )  # fmt: skip


def expected(case: AttentionCase, p: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o (T, Hq, Dvo), lse (T, Hq)) in fp32, o saturated but not rounded. Prefill with a skip factor: without
    the blocks that our kernels skip."""
    if case.skip and case.function == "context":
        o, lse = skipping.expected(p)
    else:
        o, lse = reference.paged_attention(p._replace(window_left=case.kept - 1) if case.kept else p)
    return (o.clamp(-fp4.E4M3_MAX, fp4.E4M3_MAX) if case.out_dtype == "fp8" else o), lse


def _tensors(case: AttentionCase, p: AttentionCall) -> dict[str, Any]:
    """Return the arguments that context and decode share, by trtllm's names. Outputs are NaN, and slices if the query
    is one."""
    distant = _distant if case.far else lambda t: t
    device, tokens = p.q.device, len(p.q)

    def layer(t: torch.Tensor) -> torch.Tensor:  # the second layer of a model
        return distant(t) if case.far else torch.stack([torch.full_like(t, -1), t])[1]

    def pools(k: torch.Tensor, v: torch.Tensor) -> Any:
        found = _laid_out(case, k, v)
        return tuple(layer(t) for t in found) if isinstance(found, tuple) else layer(found)

    def scale(name: str, value: float) -> Any:
        return torch.tensor([value], device=device) if name in case.device else value

    inputs: dict[str, Any] = {
        "query": distant(p.q),
        "kv_cache": pools(p.k, p.v),
        "workspace_buffer": torch.zeros(1, dtype=torch.uint8, device=device),
        "block_tables": p.requests.page_table if case.separate_tables else p.requests.page_table[:, 0].contiguous(),
        "seq_lens": p.requests.kv_lens.view(torch.uint32) if case.uint32_lens else p.requests.kv_lens,
        "max_q_len": max([0, *case.q_lens]),
        "bmm1_scale": scale("scale", case.bmm1_scale),
        "bmm2_scale": scale("out", case.out_scale),
        "cum_seq_lens_q": p.requests.cu_seqlens_q,
        "window_left": case.window_left,
        "kv_layout": case.layout,
        "sinks": p.sinks,
        "uses_shared_paged_kv_idx": not case.separate_tables,
        "return_lse": case.lse,
        "logits_soft_cap": case.soft_cap or None,
    }
    if p.k_scales is not None:
        assert p.v_scales is not None
        inputs["kv_cache_sf"] = pools(p.k_scales, p.v_scales)
    if case.skip:
        inputs["skip_softmax_threshold_scale_factor"] = case.skip
    if case.lse and not case.fresh:
        inputs["lse"] = distant(torch.full((tokens, case.heads_q), math.nan, device=device))
    every = 2 if case.strided_q else 1
    if case.out_dtype == "nvfp4":
        packed = poisoned((tokens, case.heads_q, case.head_dim_vo), SF_START, device, every)
        inputs |= {"o_sf_scale": SF_SCALE, "out": None if case.fresh else packed, "out_dtype": "nvfp4"}
    elif (case.out_dtype or case.dtype != "fp8") and not case.fresh:  # otherwise, for an fp8 query, the caller chooses
        out = torch.full((tokens, case.heads_q * every, case.head_dim_vo), math.nan, device=device)
        inputs["out"] = distant(out.to(DTYPES[case.out_dtype or case.dtype])[:, ::every])
    return inputs


def context_arguments(case: AttentionCase, p: AttentionCall) -> dict[str, Any]:
    inputs = _tensors(case, p)
    inputs["kv_block_scales"] = inputs.pop("kv_cache_sf", None)
    if case.interleaved:
        inputs["v_scales_interleaved"] = True
    return inputs | {
        "max_kv_len": max([0, *case.kv_lens]),
        "batch_size": case.batch,
        "cum_seq_lens_kv": torch.tensor([0, *case.kv_lens]).cumsum(0).to(torch.int32).to(p.q.device),
        "causal": case.causal,
    }


def _mask_of(case: AttentionCase, p: AttentionCall, equal: bool) -> torch.Tensor | None:
    """Return the public functions' uint16 words: two for every 32 drafts."""
    if p.drafts is None:
        return None
    words = p.drafts.view(torch.uint16)
    return words.unflatten(0, (case.batch, -1)) if equal else words


def decode_arguments(case: AttentionCase, p: AttentionCall) -> dict[str, Any]:
    """Return decode's arguments: equal numbers of query tokens are passed as one number, others as offsets."""
    inputs, equal = _tensors(case, p), len(set(case.q_lens)) == 1
    if equal:
        del inputs["cum_seq_lens_q"], inputs["max_q_len"]
        inputs["q_len_per_req"] = case.q_lens[0]
    if "log2" in case.device:
        scale = torch.tensor([inputs.pop("bmm1_scale") * math.log2(math.e)], device=p.q.device)
        inputs["bmm1_scale_log2"] = scale
    if case.invariant:
        inputs["batch_invariant"] = True
    return inputs | {
        "max_seq_len": max([0, *case.kv_lens]),
        "o_scale": case.o_scale,
        "mask": _mask_of(case, p, equal),
        "v_scales_interleaved": case.interleaved,
    }


def xqa_arguments(case: AttentionCase, p: AttentionCall) -> dict[str, Any]:
    """Return xqa's arguments, like `decode_arguments`. One token per request without a mask is the form without
    drafts."""
    t, equal, device = _tensors(case, p), len(set(case.q_lens)) == 1, p.q.device
    most, q, out = max(case.q_lens), t["query"], t["out"]
    if equal:
        shape = (case.batch, 1) if most == 1 and not case.drafts else (case.batch, 1, most)
        q, out = (x.unflatten(0, shape) for x in (q, out))
    caches = [*t["kv_cache"], *t.get("kv_cache_sf", ())]
    if case.cache == "flat":
        caches = [x.flatten(0, 2) for x in caches]
    scale = case.bmm1_scale * math.sqrt(case.head_dim_qk) / case.out_scale
    inputs: dict[str, Any] = {
        "q": q, "k_cache": caches[0], "v_cache": caches[1], "page_table": t["block_tables"],
        "seq_lens": t["seq_lens"][:, None], "output": out, "workspace_buffer": None, "semaphores": None,
        "num_kv_heads": case.heads_kv, "page_size": case.page_size, "kv_layout": case.layout,
        "sinks": None if p.sinks is None else p.sinks.view(case.heads_kv, -1),
        "q_scale": torch.tensor(scale, device=device) if "scale" in case.device else scale,
        "kv_scale": t["bmm2_scale"] if "out" in case.device or case.out_scale != 1.0 else None,
        "sliding_win_size": case.window_left + 1, "rcp_out_scale": case.o_scale, "q_seq_len": most,
        "mask": _mask_of(case, p, equal), "v_scales_interleaved": case.interleaved, "batch_invariant": case.invariant,
    }  # fmt: skip
    if not equal:
        assert p.requests.cu_seqlens_q is not None
        inputs["q_cu_seq_lens"] = p.requests.cu_seqlens_q.view(torch.uint32)
    if len(caches) == 4:
        inputs |= {"k_sf_cache": caches[2].view(torch.uint8), "v_sf_cache": caches[3]}
    return inputs


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Any]]]] = {  # AttentionCase.function -> both
    "context": (wrappers.trtllm_batch_context_with_kv_cache, context_arguments),
    "decode": (wrappers.trtllm_batch_decode_with_kv_cache, decode_arguments),
    "xqa": (wrappers.xqa, xqa_arguments),
}


def alone(case: AttentionCase, p: AttentionCall) -> tuple[AttentionCase, AttentionCall]:
    """Return a case of the first request alone, and its problem."""
    assert p.drafts is None
    m, r = case.q_lens[0], p.requests
    first = SequenceBatch(
        r.page_table[:1], r.kv_lens[:1], None if r.cu_seqlens_q is None else r.cu_seqlens_q[:2], 1, None
    )
    first_case = replace(case, q_lens=case.q_lens[:1], kv_lens=case.kv_lens[:1])
    return first_case, p._replace(q=p.q[:m], requests=first, max_q_len=m)


def make_inputs(case: AttentionCase, device: "torch.device | str" = "cpu", seed: int = 0) -> dict[str, Any]:
    """Return the arguments of `trtllm_batch_context_with_kv_cache`: shuffled pages; NaN in all unused memory and the
    outputs."""
    return context_arguments(case, make_call(case, device, seed))


def as_decode(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the same call, which must be causal, for `trtllm_batch_decode_with_kv_cache`, with ragged queries."""
    assert inputs["causal"]
    gone = ("batch_size", "cum_seq_lens_kv", "causal", "max_kv_len", "kv_block_scales")
    found = {name: value for name, value in inputs.items() if name not in gone}
    return found | {"max_seq_len": inputs["max_kv_len"], "kv_cache_sf": inputs.get("kv_block_scales")}


def reference_of(inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o (T, Hq, Dvo), lse (T, Hq)) in fp32 for a call of the public function. Writes nothing."""
    return reference.paged_attention(call_of(trtllm_batch_context_with_kv_cache, **inputs))


def refusals() -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    """Return invalid changes to the plain edge case: name -> (arguments, exception, pattern of its message).

    tests/host/test_bad_calls.py has every bad value of each argument alone; here are those that only other arguments
    make wrong."""
    pool = make_inputs(EDGE["plain"])["kv_cache"]
    tokens, heads, dim = 42, 4, 64
    nvfp4: dict[str, Any] = {"out_dtype": "nvfp4", "out": None}
    return {
        "V stride": ({"kv_cache": (pool[0], pool[1].mT.contiguous().mT)}, ValueError, r"kv_cache \(V\): stride"),
        "table not shared": ({"uses_shared_paged_kv_idx": False}, ValueError, "block_tables"),
        "table dim 1": (
            {"uses_shared_paged_kv_idx": False, "block_tables": torch.zeros(2, 3, 4).int()}, ValueError, "block_tables",
        ),
        "out differs": ({"out_dtype": torch.float16}, TypeError, "out: dtype"),
        "nvfp4 needs a scale": (nvfp4, TypeError, "o_sf_scale"),
        "nvfp4 scale": (nvfp4 | {"o_sf_scale": 0.0}, ValueError, "o_sf_scale: 0.0"),
        "nvfp4 out": ({"out_dtype": "nvfp4", "o_sf_scale": 1.0}, ValueError, "out: a torch.bfloat16"),
        "nvfp4 vec": (nvfp4 | {"o_sf_scale": 1.0, "o_sf_vec_size": 32}, ValueError, "o_sf_vec_size: 32"),
        "nvfp4 out.scale": (
            {"out": fp4.empty((tokens, heads, 128), torch.device("cpu")), "o_sf_scale": 1.0}, ValueError,
            "out.data: shape",
        ),
        "o_sf_scale": ({"o_sf_scale": 1.0}, ValueError, "o_sf_scale: 1.0"),
        "o_sf_vec_size": ({"o_sf_vec_size": 16}, ValueError, "o_sf_vec_size: 16"),
        "block scales": ({"kv_block_scales": pool}, ValueError, "kv_block_scales: K is Tensor, must be None"),
        "both sf": (
            {"kv_block_scales": torch.zeros(1), "kv_cache_sf": torch.zeros(1)}, ValueError,
            "kv_block_scales: another name",
        ),
        "query device": (
            {"query": torch.zeros(tokens, heads, dim, device="meta").bfloat16()}, ValueError,
            "device .*, must be the query's, meta",
        ),
    }  # fmt: skip
