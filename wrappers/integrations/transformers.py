"""Hugging Face transformers on a paged KV cache: an attention function for its interface, and the cache it reads.

    from wrappers.integrations.transformers import PagedCache, register

    model.set_attn_implementation(register())  # bf16 or fp16, on CUDA or the CPU, under torch.no_grad()
    cache = PagedCache(batch=2, pages=9, max_tokens=64, page_size=16, device=model.device)
    for request, prompt in enumerate(prompts):  # of 40 and of 3 tokens, for example; no padding
        cache.admit(request, tokens=64)
    logits = model(  # all prompts in one row
        torch.cat(prompts)[None], position_ids=cache.extend([40, 3]), paged_cache=cache, use_cache=False
    ).logits[0]
    tokens = logits[cache.last_rows].argmax(-1, keepdim=True)  # (2, 1)
    for _ in range(20):  # one token of each request
        out = model(tokens, position_ids=cache.extend(), paged_cache=cache, use_cache=False)
        tokens = out.logits[:, -1].argmax(-1, keepdim=True)

`examples/hugging_face.py` runs this on four models, with the decode step in a CUDA graph.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface

from ..attention.bound import LayerLaunch, StepTensors, memory_of
from ..attention.call import AttentionCall
from ..flashinfer.trtllm import context_call, decode_call
from ..host import machine
from ..host.checks import check_integer
from ..host.scalars import integer
from ..own.append_qkv import KVCacheTarget, append_qkv
from .support import E4M3, E5M2, query_dtype

NAME = "cute_kernels"  # of the attention function


class StorageFormat(NamedTuple):
    """How a `PagedCache` stores keys and values.

    dtype: None (the keys'), e4m3 or e5m2, or uint8 for NVFP4. k_scale, v_scale: positive numbers, by which quantised
    keys and values are divided; NVFP4 has a scale factor per 16 values besides.
    """

    dtype: torch.dtype | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0


class PagedCache:
    """Keys and values of up to `batch` requests, in pages that all of them share.

    A layer's pools are allocated when the layer first runs: two tensors (pages, page_size, KV heads, head_dim) of its
    keys' dtype, or in a `StorageFormat`. NVFP4 packs two values in a byte and has two tensors of scale factors besides.

    Lengths and block tables stay on the device and keep their addresses: a captured `extend()` and forward may be
    replayed for ever, also after `release` and `admit`, since a slot without a request has length 0 and counts as one.

    Page 0 belongs to no request: slots without a request write there, and so does a request past its pages. So `pages`
    is one more than requests can have.
    """

    def __init__(
        self, batch: int, pages: int, max_tokens: int, page_size: int = 16, device: torch.device | str = "cuda",
        stored: StorageFormat | None = None,
    ) -> None:  # fmt: skip
        """Allocate lengths and block tables.

        max_tokens: an upper bound of a request's tokens, prompt and output. page_size: any from 1; powers of two from 8
        to 256 are fastest. stored: None for the keys' dtype.
        """
        self.stored = stored or StorageFormat()
        dtype = self.stored.dtype
        if dtype not in (None, E4M3, E5M2, torch.uint8):
            raise TypeError(f"stored.dtype: {dtype}, must be None, {E4M3}, {E5M2} or {torch.uint8}")
        known = machine.current.device_info(torch.device(device)) if dtype is E4M3 else None
        self.e4m3_queries = query_dtype(torch.bfloat16, dtype or torch.bfloat16, known and known[0]) is E4M3
        self.pages, self.page_size, self.max_tokens = pages, page_size, max_tokens
        width = -(-max_tokens // page_size)
        self.block_tables = torch.zeros(batch, width, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)  # this step's tokens included
        self.cu_seq_lens_q: torch.Tensor | None = None  # (batch + 1,) int32; None: one token per request
        self.max_q_len = 1  # of this step
        self._live = torch.zeros(batch, dtype=torch.int32, device=device)  # 1: the slot has a request
        self._slots = torch.arange(batch, device=device)
        self._rows = self._slots  # (T,) int64: row of each new token in a pool seen as (pages * page_size, ...)
        self._free = list(range(pages - 1, 0, -1))
        self._owned: dict[int, list[int]] = {}  # slot -> pages of its request
        self._seen = [0] * batch  # tokens of each slot that the host knows; replayed steps are not among them
        self._pools: dict[int, KVCacheTarget] = {}  # of each layer
        self._launches: dict[int, LayerLaunch] = {}  # of each layer
        self._sinks: dict[int, tuple[Any, torch.Tensor, torch.Tensor]] = {}  # of each layer: where, as given, in fp32

    def admit(self, request: int, tokens: int) -> None:
        """Give a request, which takes a free slot of the batch, pages for `tokens` tokens.

        request: the slot, from 0 to batch - 1. Raises ValueError if there is no such slot, if it is taken, or if tokens
        exceeds max_tokens, and MemoryError if too few pages are free. A call that raises changes nothing.
        """
        request, tokens = self._slot(request), check_integer("tokens", integer(tokens))
        if request in self._owned:
            raise ValueError(f"request: {request}, already admitted")
        if not 0 < tokens <= self.max_tokens:
            raise ValueError(f"tokens: {tokens}, must be in [1, {self.max_tokens}]")
        count = -(-tokens // self.page_size)
        if count > len(self._free):
            raise MemoryError(f"request: {request}, needs {count} pages, {len(self._free)} are free")
        self._owned[request] = pages = [self._free.pop() for _ in range(count)]
        self.block_tables[request, :count] = torch.tensor(pages, dtype=torch.int32)
        self._live[request] = 1

    def release(self, request: int) -> None:
        """Take a request's pages back and free its slot. Raises ValueError for a slot without a request."""
        if self._slot(request) not in self._owned:
            raise ValueError(f"request: {request}, not admitted")
        self._free += self._owned.pop(request)
        self._seen[request] = 0
        self.block_tables[request] = self.seq_lens[request] = self._live[request] = 0

    def extend(self, lens: Sequence[int] | None = None) -> torch.Tensor:
        """Begin a step in which each request r gets lens[r] new tokens, or one token if lens is None.

        Lengths grow; the forward that follows writes the tokens' keys and values. Returns position_ids: int64
        (1, sum of lens) for tokens packed in the order of requests, or (batch, 1).

        With lens, a request gets a prompt, a chunk of one, or nothing (0). Reads the lengths from the device and copies
        lens there, so it waits. Raises ValueError, before anything is changed, if the pages of a request cannot hold
        its tokens, those of replayed steps included.

        Without lens there is no copy and no wait, shapes are fixed, and the call may be captured. The host then knows
        the steps that it called, not those that a graph replayed: ValueError if the former fill the pages of a request,
        and the lengths on the device say so, too. The keys of a request that is replayed past its pages go to page 0.
        """
        if lens is None:
            steps = [int(request in self._owned) for request in range(len(self._seen))]
            runs = machine.current.uncaptured_stream(self.seq_lens.device) is not None  # a captured step runs later
            if runs and not self._has_room(steps):
                self._seen = self.seq_lens.tolist()  # which the caller may have set back
                self._check_room(steps, self._seen)
            if runs:
                self._seen = [known + count for known, count in zip(self._seen, steps)]
            self.cu_seq_lens_q, self.max_q_len = None, 1
            self.seq_lens += self._live
            request, positions = self._slots, (self.seq_lens - 1).clamp(min=0).long()
        else:
            if len(lens) != len(self._slots):
                raise ValueError(f"lens: {len(lens)} entries, must be {len(self._slots)}, one per slot")
            lens = lens.tolist() if isinstance(lens, torch.Tensor) else lens
            lens = [check_integer(f"lens[{i}]", integer(count)) for i, count in enumerate(lens)]
            known = self.seq_lens.tolist()
            self._check_room(lens, known)
            self._seen = [before + count for before, count in zip(known, lens)]
            starts = [0, *accumulate(lens)]
            self.cu_seq_lens_q = torch.tensor(starts, dtype=torch.int32, device=self.seq_lens.device)
            self.max_q_len = max(lens)
            counts = self.cu_seq_lens_q.diff()
            self.seq_lens += counts
            request = torch.repeat_interleave(self._slots, counts, output_size=starts[-1])
            from_end = self.cu_seq_lens_q[request + 1] - torch.arange(starts[-1], device=self.seq_lens.device)
            positions = self.seq_lens[request] - from_end
        entries, width = positions // self.page_size, self.block_tables.shape[1]
        page = self.block_tables[request, entries.clamp(max=width - 1)].long() * (entries < width)
        self._rows = page * self.page_size + positions % self.page_size
        return positions[:, None] if lens is None else positions[None]

    def _slot(self, request: int) -> int:
        request, batch = check_integer("request", integer(request)), len(self._seen)
        if not 0 <= request < batch:
            raise ValueError(f"request: {request}, must be in [0, {batch - 1}], the slots of the batch")
        return request

    def _room(self, request: int) -> int:
        """Return the tokens that the pages of a request hold."""
        return self.page_size * len(self._owned.get(request, ()))

    def _has_room(self, steps: Sequence[int]) -> bool:
        """Return whether the pages of each request hold the next step, as far as the host knows."""
        return all(self._seen[i] + count <= self._room(i) for i, count in enumerate(steps) if count)

    def _check_room(self, lens: Sequence[int], known: Sequence[int]) -> None:
        """Raise unless the pages of each request hold lens[request] more tokens than the `known` ones."""
        for request, (count, held) in enumerate(zip(lens, known)):
            pages = self._room(request)
            room = max(pages - held, 0)
            if not 0 <= count <= room:
                why = f"request {request} has pages for {pages} tokens and has {held} tokens"
                raise ValueError(f"lens[{request}]: {count}, must be in [0, {room}]: {why}")

    @property
    def last_rows(self) -> torch.Tensor:
        """Return the row of each request's last packed token, (batch,) int64; without tokens, a neighbour's."""
        return self._slots if self.cu_seq_lens_q is None else self.cu_seq_lens_q[1:].long() - 1

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> KVCacheTarget:
        """Write this step's (T, KV heads, head_dim) to their pages, quantised if the pools are, in one launch.

        Returns the layer's pools, `kv`, and their scale factors, `sf`. Never waits.
        """
        if len(key) != len(self._rows):
            announced = f"must be the {len(self._rows)} that extend announced; use_cache must be False"
            raise ValueError(f"key: {len(key)} tokens, {announced}")
        if layer not in self._pools:
            self._pools[layer] = self._allocate(key, value)
        target = self._pools[layer]
        append_qkv(None, key, value, target, self._rows)
        return target

    def _allocate(self, key: torch.Tensor, value: torch.Tensor) -> KVCacheTarget:
        def pools(per: int, dtype: torch.dtype | None) -> tuple[torch.Tensor, ...]:
            return tuple(
                t.new_empty(self.pages, self.page_size, t.shape[1], t.shape[2] // per, dtype=dtype or t.dtype)
                for t in (key, value)
            )

        dtype, k_scale, v_scale = self.stored
        packed = dtype is torch.uint8
        kv, sf = pools(2 if packed else 1, dtype), pools(16, E4M3) if packed else None
        return KVCacheTarget(kv, "NHD", sf, k_scale, v_scale)

    def sinks(self, layer: int, sinks: torch.Tensor | None) -> torch.Tensor | None:
        """Return a layer's sinks in fp32, as kernels take them, in the same memory at each step.

        Sinks of another type are cast at each step: a weight may be written without a trace, as by `w.data.copy_(...)`.
        """
        if sinks is None:
            return None
        where = sinks.dtype, *memory_of([sinks])
        known = self._sinks.get(layer)
        if known is None or known[0] != where:
            own = sinks.detach()  # keeps the memory, so that no other sinks get its address
            known = self._sinks[layer] = where, own, own.float()
        elif known[1].dtype != torch.float32:
            known[2].copy_(known[1])
        return known[2]

    def launch(self, layer: int) -> LayerLaunch:
        """Return the launch of a layer's attention, which later steps repeat."""
        return self._launches.setdefault(layer, LayerLaunch())


def paged_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None, position_bias: torch.Tensor | None = None, paged_cache: PagedCache | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute attention of one layer, with the signature that transformers' interface calls.

    query: (b, Hq, s, D), key and value: (b, Hkv, s, D), bf16 or fp16, rotated; b * s tokens in the order that
    `PagedCache.extend` announced. paged_cache: a keyword of model(...), which transformers passes on. sliding_window
    counts the token itself. s_aux: (Hq,), sinks. Returns (b, s, Hq, D), and None for the attention weights.

    Raises ValueError without a cache; NotImplementedError for masks, biases, dropout, and attention that is not causal.
    """
    if paged_cache is None:
        raise ValueError("paged_cache: None, required: call model(..., paged_cache=PagedCache(...), use_cache=False)")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None or position_bias is not None or dropout or not causal:
        given = {
            "attention_mask": attention_mask is not None, "position_bias": position_bias is not None,
            "dropout": bool(dropout), "is_causal": not causal,
        }  # fmt: skip
        names = ", ".join(name for name, refused in given.items() if refused)
        need = "attention_mask and position_bias must be None, dropout 0 and is_causal True"
        raise NotImplementedError(f"{names}: not supported, {need}")
    cache, layer = paged_cache, int(module.layer_idx)  # type: ignore[arg-type]
    b, _heads, s, dim = query.shape
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))  # views if b or s is 1
    target = cache.append(layer, k, v)
    if cache.e4m3_queries:  # on Blackwell, see `support.query_dtype`
        q = q.to(E4M3)
    scale = (dim**-0.5 if scaling is None else scaling) * cache.stored.k_scale
    tables, lens, sinks, v_scale = cache.block_tables, cache.seq_lens, cache.sinks(layer, s_aux), cache.stored.v_scale
    left = -1 if sliding_window is None else sliding_window - 1  # keys before the token itself

    def call() -> AttentionCall:
        modifiers: dict[str, Any] = {
            "window_left": left, "sinks": sinks, "logits_soft_cap": softcap, "kv_layout": "NHD",
            "out_dtype": query.dtype, "kv_cache_sf": target.sf,
        }  # fmt: skip
        if cache.cu_seq_lens_q is None:
            return decode_call(q, target.kv, tables, lens, scale, v_scale, **modifiers)
        return context_call(
            q, target.kv, tables, lens, cache.max_q_len, scale, v_scale, len(lens), cache.cu_seq_lens_q, **modifiers
        )

    asked = scale, v_scale, left, softcap, query.dtype, cache.max_q_len, cache.cu_seq_lens_q is None
    step = StepTensors(q, tables, lens, cache.cu_seq_lens_q)
    out = cache.launch(layer).serve(step, asked, (*target.kv, *(target.sf or ()), sinks), call)
    return out.unflatten(0, (b, s)), None


def register(name: str = NAME) -> str:
    """Register `paged_attention` with transformers under a name, and return the name. May be called again.

    The name is for attn_implementation of `from_pretrained`, or for `model.set_attn_implementation`. No mask function
    has this name, so transformers makes no mask (and drops a padding mask: pack the tokens instead).

    >>> register()
    'cute_kernels'
    """
    AttentionInterface.register(name, paged_attention)
    return name
