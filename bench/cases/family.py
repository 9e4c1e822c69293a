"""Cases of the prefill family (FlashInfer's classes and the function of one request): their tensors, and calls on any
device."""

from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch

import wrappers

from .attention import DTYPES, SOFT_CAP_TOLERANCE, TOLERANCE
from .forms import random_ranges

BLOCK = 128  # rows and keys of a block of a mask
SPARE = 3  # pages, or rows of ragged K and V, that belong to no request
ROPE = {"rope_scale": 2.0, "rope_theta": 5e3}


@dataclass(frozen=True)
class FamilyCase:
    """One call. form: "paged"; "sinks" (the paged class with sinks); "ragged"; "single" (one request).

    stacked: K and V are one tensor; otherwise V has more pages than K. strided: Q, K, V and the output are slices of
    tensors with twice as many rows or heads. room: the least number of rows of the cache, so that cases can share one.
    custom: a random mask that hides all keys from the first two rows; blocks: it hides some blocks of 128 rows x 128
    keys and keeps others, whole; packed: the mask is given in bits. ranges: the causal mask is extended by ranges of
    keys, those of `forms.random_ranges`, of the window range_window. prefix: all tokens see half of their keys.
    on_device: plan gets index tensors on the device.
    """

    name: str = ""
    form: str = "paged"
    dtype: str = "bf16"
    q_lens: tuple[int, ...] = (70, 1, 0, 150)
    kv_lens: tuple[int, ...] = (200, 259, 3, 90)
    heads_q: int = 8
    heads_kv: int = 2
    head_dim_qk: int = 64
    head_dim_vo: int = 64
    page_size: int = 5
    layout: str = "NHD"
    stacked: bool = False
    strided: bool = False
    room: int = 0
    causal: bool = True
    window_left: int = -1
    soft_cap: float = 0.0
    mode: str = "NONE"
    custom: bool = False
    packed: bool = False
    blocks: bool = False
    ranges: bool = False
    range_window: int = -1
    prefix: bool = False
    on_device: bool = False

    @property
    def paged(self) -> bool:
        return self.form in ("paged", "sinks")

    @property
    def tolerance(self) -> float:
        """Return rtol = atol of the output."""
        return SOFT_CAP_TOLERANCE if self.soft_cap or self.mode == "ALIBI" else TOLERANCE[self.dtype]


class Tensors(NamedTuple):
    """Tensors of a case, on the CPU. All rows of K and V that belong to no request are NaN."""

    q: torch.Tensor  # (T, Hq, Dqk)
    k: torch.Tensor  # (pages, P, Hkv, Dqk), or (rows, Hkv, Dqk)
    v: torch.Tensor
    starts: torch.Tensor  # (B + 1,) int32: query rows
    kv_starts: torch.Tensor  # (B + 1,) int32: pages, or rows
    indices: torch.Tensor  # page ids, then two ids far outside the pool; ragged: empty
    last: torch.Tensor  # (B,) number of rows in the last page
    mask: torch.Tensor | None  # bool
    sinks: torch.Tensor | None
    ranges: torch.Tensor | None


def make(case: FamilyCase, seed: int = 0) -> Tensors:
    gen, dtype = torch.Generator().manual_seed(seed), DTYPES[case.dtype]
    size = case.page_size if case.paged else 1
    counts = [-(-n // size) for n in case.kv_lens]  # pages, or rows
    total = max(sum(counts) + SPARE, -(-case.room // size))
    order = torch.randperm(total, generator=gen) if case.paged else torch.arange(total)
    q = torch.randn(sum(case.q_lens), case.heads_q, case.head_dim_qk, generator=gen).to(dtype)
    caches = []
    for dim in (case.head_dim_qk, case.head_dim_vo):
        cache = torch.full((total, size, case.heads_kv, dim), float("nan"), dtype=dtype)
        for own, n in zip(order[: sum(counts)].split(counts), case.kv_lens):
            rows = torch.full((len(own) * size, *cache.shape[2:]), float("nan"))
            rows[:n] = torch.randn(n, *cache.shape[2:], generator=gen)
            cache[own] = rows.view(len(own), *cache.shape[1:]).to(dtype)
        caches.append(cache if case.paged else cache.flatten(0, 1))
    mask = None
    if case.custom:
        bits = [torch.rand(m, n, generator=gen) < 0.5 for m, n in zip(case.q_lens, case.kv_lens)]
        for request in bits:
            for row, column in product(range(0, len(request), BLOCK), range(0, request.shape[1], BLOCK)):
                kind = int(torch.randint(3, (), generator=gen)) if case.blocks else 1
                if kind != 1:
                    request[row : row + BLOCK, column : column + BLOCK] = kind == 2
            request[:2] = False
        mask = torch.cat([request.flatten() for request in bits])
    sinks = torch.randn(case.heads_q, generator=gen) if case.form == "sinks" else None
    last = [n - max(count - 1, 0) * size for count, n in zip(counts, case.kv_lens)]
    starts, kv_starts = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (case.q_lens, counts))
    indices = torch.cat([order[: sum(counts)], torch.full((2,), 1 << 30)]) if case.paged else order[:0]
    ranges = random_ranges(list(case.q_lens), list(case.kv_lens), seed) if case.ranges else None
    lens = torch.tensor(last).int()
    return Tensors(q, caches[0], caches[1], starts, kv_starts, indices.int(), lens, mask, sinks, ranges)


def within(t: torch.Tensor) -> torch.Tensor:
    """Return the same values as a slice of a tensor with twice as many rows or heads and NaN in between."""
    wide = t.new_full((t.shape[0], 2 * t.shape[1], *t.shape[2:]), float("nan"))
    wide[:, ::2] = t
    return wide[:, ::2]


def placed(case: FamilyCase, t: Tensors, device: Any) -> tuple[Any, ...]:
    """Return the arguments of `run` on the device: q and the cache, or q, k and v."""
    q, k, v = (x.to(device) for x in t[:3])
    if case.paged and not case.stacked:
        v = torch.cat([v, torch.full_like(v[:2], float("nan"))])
    if case.layout == "HND":
        k, v = (x.transpose(-3, -2).contiguous() for x in (k, v))
    if case.stacked:
        return (within(q) if case.strided else q, torch.stack([k, v], 1))
    q, k, v = (within(x) if case.strided else x for x in (q, k, v))
    return (q, (k, v)) if case.paged else (q, k, v)


def buffers(case: FamilyCase, device: Any, room: int = 1 << 16) -> dict[str, Any]:
    """Return the constructor's arguments for CUDA graphs of the case's batch. room: pages, and bytes of the mask."""

    def zeros(n: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(n, dtype=dtype, device=device)

    found: dict[str, Any] = {"use_cuda_graph": True}
    for name in ("qo_indptr_buf", "paged_kv_indptr_buf" if case.paged else "kv_indptr_buf"):
        found[name] = zeros(len(case.q_lens) + 1)
    if case.paged:
        found |= {"paged_kv_indices_buf": zeros(room), "paged_kv_last_page_len_buf": zeros(len(case.q_lens))}
    if case.custom:
        starts = "mask_indptr_buf" if case.form == "sinks" else "qk_indptr_buf"
        found |= {"custom_mask_buf": zeros(room, torch.uint8), starts: zeros(len(case.q_lens) + 1)}
    return found


def wrapper_of(case: FamilyCase, device: Any, **given: Any) -> Any:
    """Return an object of the case's class. Its workspace holds arbitrary bytes."""
    kinds = {
        "paged": wrappers.BatchPrefillWithPagedKVCacheWrapper,
        "sinks": wrappers.BatchAttentionWithAttentionSinkWrapper,
        "ragged": wrappers.BatchPrefillWithRaggedKVCacheWrapper,
    }
    return kinds[case.form](torch.full((4096,), 255, dtype=torch.uint8, device=device), case.layout, **given)


def modifiers(case: FamilyCase) -> dict[str, Any]:
    """Return the arguments that plan and the function of one request have in common."""
    rope = ROPE if case.mode == "ROPE_LLAMA" else {}
    return rope | {
        "causal": case.causal,
        "pos_encoding_mode": case.mode,
        "window_left": case.window_left,
        "logits_soft_cap": case.soft_cap or None,
    }


def mask_of(case: FamilyCase, t: Tensors) -> dict[str, Any]:
    if t.mask is None or not case.packed:
        return {"custom_mask": t.mask}
    elements = torch.tensor([0, *(m * n for m, n in zip(case.q_lens, case.kv_lens))]).cumsum(0)
    return {"packed_custom_mask": wrappers.segment_packbits(t.mask, elements, "little")[0]}


def plan(case: FamilyCase, wrapper: Any, t: Tensors) -> Any:
    """Plan the case and return the wrapper."""
    index: tuple[torch.Tensor, ...] = (t.starts, t.kv_starts)
    index += (t.indices, t.last) if case.paged else ()
    given = mask_of(case, t) | modifiers(case) | ({"page_size": case.page_size} if case.paged else {})
    if case.on_device:
        index = tuple(x.to(wrapper.device) for x in index)
        given = {name: x.to(wrapper.device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    dims = {"head_dim_qk": case.head_dim_qk, "head_dim_vo": case.head_dim_vo}
    dtype = DTYPES[case.dtype]
    wrapper.plan(*index, case.heads_q, case.heads_kv, **dims, **given, q_data_type=dtype, kv_data_type=dtype)
    return wrapper


def outputs(case: FamilyCase, device: Any) -> dict[str, torch.Tensor]:
    """Return the output arguments of `run`, filled with NaN."""
    tokens, nan = sum(case.q_lens), float("nan")
    out = torch.full((tokens, case.heads_q, case.head_dim_vo), nan, dtype=DTYPES[case.dtype], device=device)
    lse = torch.full((tokens, case.heads_q), nan, device=device)
    return {"out": within(out), "lse": within(lse)} if case.strided else {"out": out, "lse": lse}


def run_options(case: FamilyCase, t: Tensors, device: Any) -> dict[str, Any]:
    """Return the keywords of `run` that the case has."""
    found: dict[str, Any] = {} if t.sinks is None else {"sinks": t.sinks.to(device)}
    if t.ranges is not None:
        found |= {"bidirectional_ranges": t.ranges.to(device), "range_window_left": case.range_window}
    if case.prefix:
        lens = [n // 2 if n % 2 else 2 * n for n in case.kv_lens]  # some prefixes are longer than their requests
        found["prefix_lens"] = torch.tensor(lens, dtype=torch.int32, device=device)
    return found


def answer(case: FamilyCase, t: Tensors, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o (T, Hq, Dvo), lse (T, Hq)) of one call."""
    arguments = placed(case, t, device)
    if case.form == "single":
        given = {name: None if x is None else x.to(device) for name, x in mask_of(case, t).items()}
        q, k, v = arguments
        rows = case.kv_lens[0]
        k, v = (x[:rows] if case.layout == "NHD" else x[:, :rows] for x in (k, v))
        call = wrappers.single_prefill_with_kv_cache_return_lse
        return call(q, k, v, **given, **modifiers(case), kv_layout=case.layout)
    ready = plan(case, wrapper_of(case, device), t)
    return ready.run(*arguments, **run_options(case, t, device), **outputs(case, device), return_lse=True)
