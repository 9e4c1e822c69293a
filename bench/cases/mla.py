"""Decode over caches of latent attention (MLA): inputs of a call, its exact result, and ways to call it.

Rows of pages that belong to no request, rows behind the last key and what lies between pages are NaN; entries of the
table that no key needs name no page. Sinks of two heads are infinite.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

import wrappers
from cute_kernels.attention.spec import LSE_MAX
from cute_kernels.records import RECORDS, LatentRecord
from wrappers import reference
from wrappers.attention.op import serve
from wrappers.flash_mla.api import sparse_call

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
VALUES = 512  # columns of V
NO_PAGE = 2_147_480_000
NO_SLOTS = (-1, -1, -7, -(2**31), 2**31 - 1)  # numbers that are no row of a cache, and those right behind its rows
SCALE = 192**-0.5
ALIGNED = 64  # bytes of which strides of pages of packed records are a multiple
E4M3_SCALE = 0.75  # of record "e4m3"
Q8_SCALE = 0.5  # of e4m3 queries
ROUNDING = {"bf16": 2.0**-7, "fp16": 2.0**-10}  # of P and of the output together, relative
LSE_TOLERANCE = 2.0**-18  # relative, and 1e-5


NATURAL = "flash_mla", "sparse_fwd"  # functions with an LSE in natural logarithms, without the sink


@dataclass(frozen=True)
class MlaCase:
    """One call.

    function: "flash_mla", "trtllm", or "wrapper", FlashInfer's class with lists of pages, and queries and caches in two
    tensors each, "qv", FlashAttention's `flash_attn_with_kvcache`, or "xqa", which has no LSE (the exact one is
    returned). lens: keys of each request. rows: query tokens of each. dim: columns of K. window: keys before a row, 0
    for all, and cap, a soft cap: of "qv" alone. gap: rows behind each page. strided: the query has every second head of
    a wider tensor, and its rows are apart. sink: of heads. data: "normal", or "peaks": keys with scores that grow along
    the sequence. chosen: keys that each row chooses among all rows of all requests, some of them twice, between numbers
    that are no row; 0: it sees its request's. counted: fewer of them count, of some requests none. second: keys that
    each row chooses of a second cache, with pages of 5 rows, too. record, second_record: how rows of both caches are
    packed, keys of `cute_kernels.records.RECORDS`; "" for rows of dtype. q8: queries are e4m3, too. invariant: of
    "flash_mla", `enable_batch_invariant`. share: of "sparse_fwd", `share_keys`. split: of "sparse_fwd", CTAs may share
    the keys of a tile, as in the calls of engines; the largest logits are then not returned. exact: factors in fp32 are
    powers of two, as vLLM 0.33 and FlashMLA write them; else most rows have others.
    alike: of benchmarks, the percentage of its chosen keys that a token has in common with the token before it; -1: the
    keys are independent of each other.

    The function may also be "sparse_fwd", FlashMLA's `flash_mla_sparse_fwd` over the rows of the cache, with `chosen`,
    or "dsa", FlashInfer's `dsa_sparse_attention`, with rotated columns in tensors of their own, or "dsa_varlen", its
    other form, with one document, or "gather", FlashAttention's function with gather_kv_indices, with one request.
    """

    function: str = "flash_mla"
    dtype: str = "bf16"
    lens: tuple[int, ...] = (70,)
    rows: int = 1
    heads: int = 16
    dim: int = 576
    page_size: int = 64
    causal: bool = True
    window: int = 0
    cap: float = 0.0
    sink: bool = False
    gap: int = 0
    strided: bool = False
    data: str = "normal"
    chosen: int = 0
    counted: bool = False
    second: int = 0
    record: str = ""
    second_record: str = ""
    q8: bool = False
    invariant: bool = False
    share: bool = False
    split: bool = False
    exact: bool = False
    alike: int = -1


class MlaInputs(NamedTuple):
    """The tensors of a call: q (B, rows, H, D), cache (pages, P, D or bytes), table (B, M), lens (B,), sinks (H,) or
    None; slots (B, rows, K) and how many of them count (B,), or None."""

    q: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    sinks: torch.Tensor | None
    slots: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    second: "MlaInputs | None" = None  # the cache, the slots and the counts of a second cache


def make(case: MlaCase, device: "torch.device | str" = "cpu", seed: int = 0) -> MlaInputs:
    """Make the inputs of a case."""
    gen = torch.Generator(device).manual_seed(seed)
    batch, size, dtype = len(case.lens), case.page_size, DTYPES[case.dtype]
    columns = max(1, *(-(-n // size) for n in case.lens))
    used = [-(-n // size) for n in case.lens]
    pages = sum(used) + 2
    cache = empty_cache(case, pages, device)
    order = torch.randperm(pages, generator=gen, device=device)
    table = torch.full((batch, columns), NO_PAGE, dtype=torch.int32, device=device)
    for b, n in enumerate(case.lens):
        mine = order[sum(used[:b]) : sum(used[: b + 1])]
        table[b, : used[b]] = mine.int()
        keys = torch.randn(n, case.dim, generator=gen, device=device)
        if case.data == "peaks":
            keys *= torch.linspace(0.1, 4.0, n, device=device)[:, None]
        positions = torch.arange(n, device=device)
        put(case.record, cache, mine[positions // size], positions % size, keys, gen, case.exact)
    q = torch.randn(batch, case.rows, case.heads, case.dim, generator=gen, device=device).to(dtype)
    if case.q8:
        q = (q / Q8_SCALE).to(torch.float8_e4m3fn)
    if case.strided:
        wide = torch.full((batch, case.rows + 1, 2 * case.heads, case.dim + 16), float("nan"), device=device)
        wide = wide.to(q.dtype)
        wide[:, : case.rows, ::2, : case.dim] = q
        q = wide[:, : case.rows, ::2, : case.dim]
    sinks = torch.randn(case.heads, generator=gen, device=device) * 2 if case.sink else None
    if sinks is not None and case.heads > 2:
        sinks[1], sinks[2] = math.inf, -math.inf
    lens = torch.tensor(case.lens, dtype=torch.int32, device=device)
    inputs = MlaInputs(q, cache, table, lens, sinks)
    if case.second:
        other = replace(case, page_size=5, gap=case.gap + 1, chosen=case.second, second=0, lens=case.lens[::-1],
                        record=case.second_record)  # fmt: skip
        inputs = inputs._replace(second=make(other, device, seed + 1))
    return inputs._replace(**choices(case, inputs, gen)) if case.chosen else inputs


def empty_cache(case: MlaCase, pages: int, device: "torch.device | str") -> torch.Tensor:
    """Return a cache of which every byte is 0xFF: NaN in all types that have one."""
    size, form = case.page_size, RECORDS[case.record or "rows"]
    row = row_bytes(case.record, case.dim)
    stride = (size + case.gap) * row
    stride += -stride % ALIGNED if case.record else 0
    whole = torch.full((pages, stride), 0xFF, dtype=torch.uint8, device=device)
    cache = whole.as_strided((pages, size, row), (stride, row, 1))
    if not case.record or not form.packed:
        return cache.view(torch.float8_e4m3fn if case.record else DTYPES[case.dtype])
    return cache


def row_bytes(record: str, dim: int) -> int:
    """Return the bytes of a row with `dim` columns and its factors."""
    form = RECORDS[record or "rows"]
    return form.token_bytes or dim * (1 if form.codes else 2)


def put(
    record: str, cache: torch.Tensor, page: torch.Tensor, row: torch.Tensor, keys: torch.Tensor, gen: torch.Generator,
    exact: bool,
) -> None:  # fmt: skip
    """Write keys to rows of pages. exact: see `MlaCase`."""
    form = RECORDS[record or "rows"]
    if not form.packed:
        scaled = (keys / (E4M3_SCALE if form.codes else 1.0)).to(cache.dtype)
        cache.view(torch.uint8)[page, row] = scaled.view(torch.uint8)
        return
    rows, factors = packed(form, keys, gen, exact)
    flat = cache.as_strided((len(cache), cache.shape[1] * form.token_bytes), (cache.stride(0), 1))

    def store(first: torch.Tensor, what: torch.Tensor) -> None:
        flat[page[:, None], first[:, None] + torch.arange(what.shape[1], device=what.device)] = what

    if form.planar:
        store(row * form.row, rows)
        store(cache.shape[1] * form.row + row * form.factor_row, factors)
    else:
        rows[:, form.factors_at : form.factors_at + factors.shape[1]] = factors
        store(row * form.row, rows)


def packed(
    form: LatentRecord, keys: torch.Tensor, gen: torch.Generator, exact: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of packed rows and of their factors, which are random. One in 512 is 2 or more. If they are fp32
    and not `exact`, products with codes need rounding in three of four groups of 16 keys."""
    device, blocks = keys.device, keys[:, : form.latent].unflatten(-1, (-1, form.vec))
    draws = torch.randint(512, blocks.shape[:-1], generator=gen, device=device)
    bits = draws % 128
    power = 2.0 ** torch.where(draws == 511, 1, bits % 4 - (2 if form.codes == "e2m1" else 8))
    mantissa = torch.full_like(bits, 16 if form.factor == "e4m3" else 0)
    if form.factor == "fp32" and not exact:
        some = torch.randint(4, (-(-len(keys) // 16), 1), generator=gen, device=device) > 0
        mantissa = bits // 4 * 4 * some.repeat_interleave(16, 0)[: len(keys)]
    factors = power * (1 + mantissa / 128)
    scaled = blocks / factors[..., None]
    if form.codes == "e2m1":
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device)
        nearest = (scaled.abs()[..., None] - table).abs().argmin(-1) + 8 * (scaled < 0)
        low, high = nearest.flatten(1).unflatten(-1, (-1, 2)).unbind(-1)
        codes = (low | high << 4).byte()
    else:
        codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
    if form.factor == "fp32":
        held = factors.contiguous().view(torch.uint8)
    elif form.factor == "ue8m0":
        held = (torch.log2(factors) + 127).byte()
    else:
        held = factors.to(torch.float8_e4m3fn).view(torch.uint8)
    if form.permuted:
        held = held.unflatten(-1, (-1, 4)).transpose(1, 2).flatten(1)
    rows = torch.zeros(len(keys), form.row, dtype=torch.uint8, device=device)
    rows[:, : codes.shape[1]] = codes
    if form.rotated and form.rotated_as != "codes":
        rest = keys[:, form.latent :].to(torch.float8_e4m3fn if form.rotated_as else torch.bfloat16).view(torch.uint8)
        rows[:, form.rotated_at : form.rotated_at + rest.shape[1]] = rest
    padding = torch.full((len(keys), form.factor_row - held.shape[1]), 0xFF) if form.planar else held[:, :0]
    return rows, torch.cat([held, padding.to(held)], 1)


def values(record: str, cache: torch.Tensor) -> torch.Tensor:
    """Return the values (pages, P, D) of a cache, as kernels make them."""
    if not record:
        return cache
    if not RECORDS[record].packed:
        return (cache.float() * E4M3_SCALE).double()
    return reference.latent_values(record, cache).bfloat16()


def choices(case: MlaCase, i: MlaInputs, gen: torch.Generator) -> dict[str, Any]:
    """Return `slots` and `counts`. Slots that do not count name any row, also those that are NaN."""
    size, rows, device = case.page_size, i.cache.shape[0] * case.page_size, i.q.device
    held = [i.table[b, j // size].long() * size + j % size for b, n in enumerate(case.lens) for j in range(n)]
    none = torch.tensor((*NO_SLOTS, rows, rows + 1), device=device)
    shape = (len(case.lens), case.rows, case.chosen)

    def among(values: torch.Tensor) -> torch.Tensor:
        return values[torch.randint(len(values), shape, generator=gen, device=device)]

    slots = among(torch.stack(held) if held else none)
    share = torch.rand(shape[:2], generator=gen, device=device).round(decimals=1)[..., None]  # often none, or all
    slots = torch.where(
        torch.rand(shape, generator=gen, device=device) < (share - 0.4).clamp(0.0, 1.0), among(none), slots
    )
    if len(case.lens) * case.rows > 1:  # a row without a key
        slots[-1, 0] = among(none)[-1, 0]
    if not case.counted:
        return {"slots": slots.int(), "counts": None}
    counts = torch.randint(case.chosen + 1, shape[:1], generator=gen, device=device)
    counts[::3] = 0 if len(counts) > 1 else counts[::3]
    behind = torch.arange(case.chosen, device=device) >= counts[:, None, None]
    slots = torch.where(behind, among(torch.arange(rows, device=device)), slots)
    return {"slots": slots.int(), "counts": counts.int()}


def call(case: MlaCase, i: MlaInputs) -> tuple[torch.Tensor, ...]:
    """Call the case's function. Return out (B, rows, H, 512), lse (B, H, rows) and, if the function returns them, the
    largest logits, as `expected` has them."""
    if case.function == "qv":
        (qv, q), (v, k) = (t.split([VALUES, case.dim - VALUES], -1) for t in (i.q, i.cache.unsqueeze(2)))
        out, lse = wrappers.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=i.lens, block_table=i.table, qv=qv, softmax_scale=SCALE, causal=case.causal,
            window_size=(case.window or -1, -1), softcap=case.cap, s_aux=i.sinks, return_softmax_lse=True,
        )  # fmt: skip
        return out, lse / math.log(2.0)
    if case.function == "flash_mla":
        second: dict[str, Any] = {} if i.second is None else {
            "extra_k_cache": i.second.cache.unsqueeze(2), "extra_indices_in_kvcache": i.second.slots,
            "extra_topk_length": i.second.counts,
        }  # fmt: skip
        descale = torch.full((1,), E4M3_SCALE, device=i.q.device) if case.record == "e4m3" else None
        return wrappers.flash_mla_with_kvcache(
            i.q, i.cache.unsqueeze(2), i.table, i.lens, VALUES, softmax_scale=SCALE,
            causal=case.causal and not case.chosen, attn_sink=i.sinks, indices=i.slots, topk_length=i.counts,
            is_fp8_kvcache=bool(case.record), enable_batch_invariant=case.invariant,
            descale_q=Q8_SCALE if case.q8 else None, descale_k=descale, **second,
        )  # fmt: skip
    if case.function == "gather":
        assert i.slots is not None
        (qv, q), (v, k) = (t.flatten(0, 1).split([VALUES, case.dim - VALUES], -1) for t in (i.q, i.cache))
        q_ends, k_ends = (torch.arange(2, dtype=torch.int32, device=q.device) * len(t) for t in (q, k))
        out, lse = wrappers.flash_attn_varlen_func(
            q, k[:, None], v[:, None], q_ends, k_ends, qv=qv, gather_kv_indices=i.slots.flatten(0, 1),
            softmax_scale=SCALE, s_aux=i.sinks, return_lse=True,
        )  # fmt: skip
        return out.view(*i.q.shape[:3], VALUES), lse.view(*i.q.shape[:3]).transpose(1, 2) / math.log(2.0)
    if case.function in ("dsa", "dsa_varlen"):
        assert i.slots is not None
        counts = None if i.counts is None else i.counts.repeat_interleave(case.rows)
        (q, q_rope), (k, k_rope) = (t.flatten(0, 1).split([VALUES, case.dim - VALUES], -1) for t in (i.q, i.cache))
        given = q, q_rope.clone(), k, k_rope.clone(), i.slots.flatten(0, 1)
        options: dict[str, Any] = {"topk_length": counts, "softmax_scale": SCALE, "return_lse": True}
        if case.function == "dsa":
            out, lse = wrappers.dsa_sparse_attention(*given, **options)
        else:
            q_ends, k_ends = (torch.arange(2, dtype=torch.int32, device=q.device) * len(t) for t in (q, k))
            out, lse = wrappers.dsa_sparse_attention_varlen(*given, q_ends, k_ends, **options)
        return out.view(*i.q.shape[:3], VALUES), lse.view(*i.q.shape[:3]).transpose(1, 2) / math.log(2.0)
    if case.function == "sparse_fwd":
        assert i.slots is not None

        def of_tokens(one: MlaInputs, record: str) -> tuple[Any, Any, Any]:
            """Return rows, or a cache if its pages are no rows one after the other, and indices and counts."""
            assert one.slots is not None
            counts = None if one.counts is None else one.counts.repeat_interleave(case.rows)
            paged = bool(record) and RECORDS[record].planar or not one.cache.is_contiguous()
            kv = one.cache.unsqueeze(2) if paged else one.cache.flatten(0, 1).unsqueeze(1)
            return kv, one.slots.flatten(0, 1).unsqueeze(1), counts

        kv, slots, counts = of_tokens(i, case.record)
        names = "extra_kv", "extra_indices", "extra_topk_length"
        second = {} if i.second is None else dict(zip(names, of_tokens(i.second, case.second_record)))
        descale = torch.full((1,), E4M3_SCALE, device=i.q.device) if case.record == "e4m3" else None
        tokens = i.q.flatten(0, 1), kv, slots, SCALE, VALUES, i.sinks, counts
        how = {"descale_q": Q8_SCALE if case.q8 else None, "descale_k": descale, "share_keys": case.share} | second
        if case.split:
            call = sparse_call(*tokens, **how)
            out, lse = serve(call._replace(split_kv="auto", lse_form=call.lse_form & ~LSE_MAX))
            return out.view(*i.q.shape[:3], VALUES), lse.view(*i.q.shape[:3]).transpose(1, 2)
        out, top, lse = wrappers.flash_mla_sparse_fwd(*tokens, **how)
        lse, top = (x.reshape(*i.q.shape[:3]).transpose(1, 2) for x in (lse, top))
        return out.view(*i.q.shape[:3], VALUES), lse, top
    if case.function == "wrapper":
        out, lse = _planned(case, i)
        return out.view(*i.q.shape[:3], VALUES), lse.view(*i.q.shape[:3]).transpose(1, 2)
    if case.function == "xqa":
        out = wrappers.xqa_batch_decode_with_kv_cache_mla(
            i.q, i.cache, None, 128, VALUES, case.dim - VALUES, i.table, i.lens, i.table.shape[1] * case.page_size,
            bmm1_scale=SCALE, sinks=i.sinks,
        )  # fmt: skip
        return out, expected(case, i).lse
    table, lens = i.table, i.lens  # type: torch.Tensor, torch.Tensor | None
    if i.slots is not None:
        table, lens = i.slots, i.counts
    if i.slots is not None and lens is not None:
        lens = lens[:, None].expand(-1, case.rows)
    factor = E4M3_SCALE if case.record == "e4m3" else 1.0
    out, lse = wrappers.trtllm_batch_decode_with_kv_cache_mla(
        i.q, i.cache, None, 128, VALUES, case.dim - VALUES, table, lens, i.table.shape[1] * case.page_size,
        bmm1_scale=SCALE * factor * (Q8_SCALE if case.q8 else 1.0), bmm2_scale=factor, sinks=i.sinks, return_lse=True,
        sparse_mla_top_k=case.chosen,
    )  # fmt: skip
    return out, lse.view(*i.q.shape[:3]).transpose(1, 2)


def _planned(case: MlaCase, i: MlaInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Plan and run a batch with FlashInfer's class."""
    pages = [-(-n // case.page_size) for n in case.lens]
    entries = torch.cat([i.table[b, :n] for b, n in enumerate(pages)])
    starts = torch.nn.functional.pad((-(-i.lens // case.page_size)).cumsum(0), (1, 0)).int()
    rows = torch.arange(len(pages) + 1, dtype=torch.int32, device=i.q.device) * case.rows
    wrapper = wrappers.BatchMLAPagedAttentionWrapper(torch.empty(0, device=i.q.device))
    wrapper.plan(
        rows, starts, entries, i.lens, case.heads, VALUES, case.dim - VALUES, case.page_size, case.causal, SCALE,
        i.q.dtype, i.cache.dtype,
    )  # fmt: skip
    (q, q_rope), (k, k_rope) = ([part.clone() for part in t.split([VALUES, case.dim - VALUES], -1)]
                                for t in (i.q.flatten(0, 1), i.cache))  # fmt: skip
    factor = E4M3_SCALE if case.record == "e4m3" else None
    return wrapper.run(q, q_rope, k, k_rope, return_lse=True, ckv_scale=factor, kpe_scale=factor)


class MlaResult(NamedTuple):
    """The exact result of a call. mass: the sum of the magnitudes that are added up to each value of out."""

    out: torch.Tensor
    lse: torch.Tensor
    mass: torch.Tensor
    top: torch.Tensor  # (B, H, rows), natural: the largest logit, -inf for a row without keys


def chosen_rows(record: str, i: MlaInputs, b: int, t: int) -> torch.Tensor:
    """Return the rows of a cache that count of those that a row has chosen, in float64."""
    assert i.slots is not None
    slots = i.slots[b, t, : i.slots.shape[2] if i.counts is None else int(i.counts[b])].long()
    rows = values(record, i.cache).flatten(0, 1)
    return rows[slots[(slots >= 0) & (slots < len(rows))]].double()


def expected(case: MlaCase, i: MlaInputs) -> MlaResult:
    """Return the result in float64. FlashMLA's lse is natural, without the sink, +inf for a row without keys; the other
    function's has base 2, with the sink."""
    batch, rows, heads, _ = i.q.shape
    out, mass = torch.zeros(2, batch, rows, heads, VALUES, dtype=torch.float64, device=i.q.device)
    lse = torch.full((batch, heads, rows), -math.inf, dtype=torch.float64, device=i.q.device)
    top = lse.clone()
    for b, n in enumerate(case.lens):
        pages = i.table[b, : -(-n // case.page_size)].long()
        keys = values(case.record, i.cache[pages]).flatten(0, 1)[:n].double()
        for t in range(rows):
            seen = max(n - rows + 1 + t, 0) if case.causal else n
            own = keys[max(0, n - rows + t - case.window) if case.window else 0 : seen]
            if i.slots is not None:
                caches = ((case.record, i), (case.second_record, i.second))
                own = torch.cat([chosen_rows(record, each, b, t) for record, each in caches if each is not None])
            if len(own):
                logits = i.q[b, t].double() @ own.T * SCALE * (Q8_SCALE if case.q8 else 1.0)
                if case.cap:
                    logits = case.cap * torch.tanh(logits / case.cap)
                lse[b, :, t], top[b, :, t] = torch.logsumexp(logits, -1), logits.amax(-1)
                out[b, t] = torch.softmax(logits, -1) @ own[:, :VALUES]
                mass[b, t] = torch.softmax(logits, -1) @ own[:, :VALUES].abs()
    if i.sinks is not None:
        both = torch.logaddexp(lse, i.sinks.double()[None, :, None])
        share = (lse - both).exp().nan_to_num(0.0).transpose(1, 2)[..., None]
        out, mass = out * share, mass * share
        lse = lse if case.function in NATURAL else both
    if case.function in NATURAL:
        return MlaResult(out, torch.where(lse == -math.inf, math.inf, lse), mass, top)
    return MlaResult(out, lse / math.log(2.0), mass, top)


def error(case: MlaCase, got: tuple[torch.Tensor, ...], want: MlaResult) -> float:
    """Return the largest difference over its tolerance; infinity for a number that is none."""
    (out, lse, *tops), (exact, exact_lse, mass, exact_top) = (t.double() for t in got), want
    finite = exact_lse.isfinite()
    if not out.isfinite().all() or not torch.equal(lse[~finite], exact_lse[~finite]):
        return math.inf
    for top in tops:
        found = top.isfinite()
        allowed = 1e-5 + LSE_TOLERANCE * exact_top.abs()
        if not torch.equal(found, exact_top.isfinite()) or bool(((top - exact_top).abs() > allowed)[found].any()):
            return math.inf
    allowed = ROUNDING[case.dtype] * mass + 1e-6
    allowed_lse = 1e-5 + LSE_TOLERANCE * exact_lse.abs()
    worst = ((out - exact).abs() / allowed).max().item() if out.numel() else 0.0
    return max(worst, ((lse - exact_lse).abs() / allowed_lse)[finite].max().item() if finite.any() else 0.0)
