"""Batches over a paged KV cache with page lists that are stored one after another."""

from typing import Any

import torch

from ...attention.call import SequenceBatch, csr_sequences
from ...attention.checks import HEAD_SCALES, SIGNATURES
from ...attention.views import paged_kv, pair, scale_pair
from ...host.checks import check_integer
from ...host.scalars import integer, real
from .. import values
from ..page import get_seq_lens
from .batch import PrefillBatch

PAGED = "BatchPrefillWithPagedKVCacheWrapper"
SIGNATURES[PAGED] = values.NAMES | values.PAGED_KV | {
    "page_table": "paged_kv_indices", "kv_lens": "paged_kv_last_page_len", "kv_starts": "paged_kv_indptr",
    "cu_seqlens_q": "qo_indptr", "max_q_len": "max_token_per_sequence",
}  # fmt: skip
HEAD_SCALES.add(PAGED)


class BatchPrefillWithPagedKVCacheWrapper(PrefillBatch):
    """Attention of ragged queries over a paged KV cache that already holds the queries' own tokens.

    `plan` is called once per batch, `run` for each layer.

    FlashInfer's class. Positional arguments are those of its version 0.2; names that were added later are keywords.

    Args:
        float_workspace_buffer: any tensor; its device is the wrapper's. Nothing is kept in it.
        kv_layout: "NHD", pages (P, Hkv, D), or "HND", pages (Hkv, P, D).
        use_cuda_graph: if True, plan copies into the buffers below, and a graph captured from run holds for later plans
            of the same batch size, heads, dtypes, modifiers and presence of a mask. If False, the buffers are ignored.
        qo_indptr_buf, paged_kv_indptr_buf: int32 (B + 1,). paged_kv_indices_buf: int32, room for all pages.
        paged_kv_last_page_len_buf: int32 (B,).
        custom_mask_buf: uint8, room for a packed mask; qk_indptr_buf (or mask_indptr_buf): int32 (B + 1,). Both are
            needed only if masks are planned.

    Hints: backend ("auto", "fa2", "fa3", ...), jit_args, jit_kwargs.

    >>> wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(0), "NHD")  # two requests, pages of 4 rows
    >>> starts, pages = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32)
    >>> page_starts, last = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([1, 4], dtype=torch.int32)
    >>> wrapper.plan(starts, page_starts, pages, last, 8, 2, 64, 4, causal=True)  # 5 and 4 keys
    >>> cache = torch.randn(3, 2, 4, 2, 64).half()
    >>> wrapper.run(torch.randn(4, 8, 64).half(), cache).shape
    torch.Size([4, 8, 64])
    """

    _NAMES = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    _CACHE = "paged_kv_cache"
    _SCALES = 2

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None, paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None, paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None, qk_indptr_buf: torch.Tensor | None = None, backend: str = "auto",
        jit_args: Any = None, jit_kwargs: Any = None, *, mask_indptr_buf: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        buffers = qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        mask = custom_mask_buf, values.either("qk_indptr_buf", qk_indptr_buf, "mask_indptr_buf", mask_indptr_buf)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers, mask, backend)

    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int | None = None,
        page_size: int | None = None, custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None, causal: bool = False, pos_encoding_mode: str = "NONE",
        allow_fp16_qk_reduction: bool = False, sm_scale: float | None = None, window_left: int = -1,
        logits_soft_cap: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16", kv_data_type: str | torch.dtype | None = None,
        non_blocking: bool = False, *, head_dim_qk: int | None = None, head_dim_vo: int | None = None,
        use_fp16_qk_reduction: bool | None = None, o_data_type: str | torch.dtype | None = None,
        max_token_per_sequence: int | None = None, max_sequence_kv: int | None = None,
        seq_lens: torch.Tensor | None = None, seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None, fixed_split_size: int | None = None, disable_split_kv: bool = False,
        prefix_len_ptr: torch.Tensor | None = None, token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0, max_item_len_ptr: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Set what `run` computes, replacing everything planned before. Reads and copies nothing from a device.

        Args:
            qo_indptr: int32 (B + 1,): request b owns query rows qo_indptr[b]:qo_indptr[b + 1].
            paged_kv_indptr: int32 (B + 1,): likewise its entries of paged_kv_indices, int32 (N,), which may have more
                entries.
            paged_kv_last_page_len: int32 (B,), rows in use of its last page. A request without pages has no keys. These
                index tensors are on the host or on the workspace's device; those on the device are not copied: run
                reads them.
            num_qo_heads, num_kv_heads, head_dim (or head_dim_qk), page_size; head_dim_vo: V's, default head_dim.
            custom_mask: bool, or numbers that count as True unless 0, (N,): query rows x keys of each request, row by
                row, one request after another. True: the key is seen. Replaces causal, but not window_left.
            packed_custom_mask: uint8 (bytes,), the same in bits, lowest first (`segment_packbits(..., "little")`), each
                request from a byte of its own; custom_mask is then ignored. A wrong size raises if all index tensors
                are on the host; otherwise keys without a bit are hidden.
            causal: row i of m sees keys up to i + n - m, n being the number of keys of its request.
            pos_encoding_mode: "NONE"; "ROPE_LLAMA": Q and K are rotated by rope_scale (None: 1) and rope_theta
                (None: 1e4), and the cache holds K without rotation; "ALIBI": logits + slope * (key - row), with slopes
                from the number of heads.
            sm_scale: factor on the logits; None: 1 / sqrt(head_dim). window_left: keys from the row's position minus
                this value on are seen; negative: all. logits_soft_cap c: c * tanh(logit / c); None or not positive:
                off.
            q_data_type, kv_data_type, o_data_type: dtypes or their names; None: the query's. 16-bit queries take caches
                of their dtype, e4m3, e5m2 and uint8 (NVFP4); e4m3 queries the last three; e5m2 queries e5m2. The output
                is float16, bfloat16, or e4m3, saturated; with e5m2 queries o_data_type is required.
            max_token_per_sequence: an upper bound of the query lengths, for the schedule; derived if qo_indptr is on
                the host.
            non_blocking: applies to the copy of a mask from the host; if True, the mask may not be written before the
                copy is done. Copies of index tensors never wait: the current stream orders them, and they may be
                written at once.

        fixed_split_size, disable_split_kv: with a size of at least 1, or True, a request's bits do not depend on the
                rest of its batch: no two CTAs share its keys.

        Hints: allow_fp16_qk_reduction (or use_fp16_qk_reduction), max_sequence_kv, seq_lens, seq_lens_q, block_tables.
        NotImplementedError: multi-item scoring (prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len,
        max_item_len_ptr).

        Raises, and keeps the previous plan: ValueError for a shape or device, offsets on the host that fall or pass
        paged_kv_indices, buffers that are too small, a batch size other than the buffers', or more query rows than the
        first plan with buffers had; TypeError for a dtype; UnknownName, which is both a KeyError and a ValueError, for
        an unknown name; RuntimeError while a CUDA graph is captured.
        """
        values.refuse(
            prefix_len_ptr=prefix_len_ptr, token_pos_in_items_ptr=token_pos_in_items_ptr,
            token_pos_in_items_len=token_pos_in_items_len or None, max_item_len_ptr=max_item_len_ptr,
        )  # fmt: skip
        split = values.split_of(fixed_split_size, disable_split_kv)
        head_dim = values.either("head_dim", head_dim, "head_dim_qk", head_dim_qk)
        page_size = check_integer("page_size", integer(page_size), 1)
        shape = values.shape_of(num_qo_heads, num_kv_heads, head_dim, head_dim_vo, page_size)
        types = values.types_of(q_data_type, kv_data_type, o_data_type)
        modifiers = values.modifiers_of(
            causal, pos_encoding_mode, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta
        )
        values.check_rope(modifiers.rope, types)
        given = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        mask = values.mask_of(custom_mask, packed_custom_mask, self.device, non_blocking)
        planned = self._prepare(given, shape.page_size, max_token_per_sequence, mask)
        self._split_kv = split
        self._keep(planned, shape, types, modifiers)

    begin_forward = plan

    def run(
        self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None,
        return_lse: bool = False, *, q_scale: float | torch.Tensor | None = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, enable_pdl: bool | None = None, window_left: int | None = None,
        sinks: torch.Tensor | None = None, kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None, use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None, sm_scale: float | None = None,
        kv_block_scales: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        v_scales_interleaved: bool = False, bidirectional_ranges: torch.Tensor | None = None,
        range_window_left: int = -1,
        prefix_lens: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Compute attention as planned: softmax(sm_scale q_scale k_scale q k^T) v v_scale.

        Args:
            q: (T, Hq, D), any token and head strides. T is the last element of qo_indptr; this is checked if plan got
                qo_indptr on the host and torch.compile does not trace the call.
            paged_kv_cache: (k, v), each (pages, P, Hkv, D) "NHD" or (pages, Hkv, P, D) "HND", any strides with 1 as the
                last, K and V with their own numbers of pages; or one tensor (pages, 2, ...). If P is 1, its dimension
                may be missing.
            q_scale, k_scale, v_scale: factors on the logits beside sm_scale, positive on CUDA (q_scale, k_scale), and
                on the output (v_scale); they apply to caches of any dtype. Each is a float, or an fp32 tensor on q's
                device, which the kernel reads, of one element or of one per head: (Hq,) for q_scale, (Hkv,) for the
                others. A tensor of one element may be on the host, where it counts as a float. Three scales by
                position, `run(q, cache, q_scale, k_scale, v_scale)`, are in the order of upstream's fa3.
            out: (T, Hq, Dvo) of o_data_type. lse: fp32 (T, Hq). Both are filled and returned; None: new tensors.
            sinks: fp32 (Hq,), added to each head's softmax denominator; natural-log units.
            kv_cache_sf (or kv_block_scales), v_scales_interleaved: scale factors of NVFP4 caches, as in
                `trtllm_batch_context_with_kv_cache`, in the wrapper's layout.
            window_left: None, or plan's value. sm_scale: replaces plan's for this call. enable_pdl: a hint.
            skip_softmax_threshold_scale_factor: as in `trtllm_batch_context_with_kv_cache`.
            bidirectional_ranges, range_window_left: as in `BatchPrefillWithCausalBidirectionalRangesWrapper.run`; plan
                must be causal and without a mask, and its window bounds the causal part. Upstream lacks both here.
            prefix_lens: int32 (B,), which upstream lacks: all queries of a request also see its first keys, as many as
                this says. Plan must have no mask; its window bounds the prefix, too.
            use_fp16_softmax, uses_spcompress: None or False; True raises NotImplementedError.
            return_lse: whether to return the LSE too.

        Returns out, or (out, lse): lse is log2 of the softmax denominator. A row without keys gives 0 and -inf.

        Raises before any launch: RuntimeError without a plan; ValueError for what does not fit the plan, and for a
        shape, stride or device; TypeError for a dtype; NotImplementedError if no kernel serves the call.

        >>> wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(0), "NHD")  # 3 queries, 6 keys
        >>> index = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3], [0, 2], [1, 0], [2]))
        >>> e4m3 = torch.float8_e4m3fn
        >>> wrapper.plan(*index, 8, 2, 64, 4, causal=True, q_data_type=e4m3, o_data_type=torch.bfloat16)
        >>> q, cache = torch.randn(3, 8, 64).to(e4m3), torch.randn(2, 2, 4, 2, 64).to(e4m3)
        >>> wrapper.run(q, cache, torch.ones(8), torch.ones(2), torch.ones(2)).dtype
        torch.bfloat16
        """
        others = (
            k_scale, v_scale, return_lse, q_scale, enable_pdl, window_left, sinks, kv_cache_sf,
            skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress, sm_scale, kv_block_scales,
            v_scales_interleaved, bidirectional_ranges, range_window_left, prefix_lens,
        )  # fmt: skip
        views = paged_kv if self._shape.page_size == 1 else pair
        k, v = views("paged_kv_cache", paged_kv_cache, self._kv_layout)
        if (repeated := self._repeat(q, (k, v), out, lse, others)) is not None:
            return repeated
        if return_lse is not False and return_lse is not True and isinstance(return_lse, (torch.Tensor, float)):
            q_scale, k_scale = values.either("q_scale", q_scale, "scale_q", k_scale), v_scale
            v_scale, return_lse = return_lse, False
        if kv_block_scales is not None:
            kv_cache_sf = values.either("kv_cache_sf", kv_cache_sf, "kv_block_scales", kv_block_scales)
        if use_fp16_softmax or uses_spcompress:
            values.refuse(use_fp16_softmax=use_fp16_softmax or None, uses_spcompress=uses_spcompress or None)
        if window_left is not None and self._planned is not None and window_left != self._window_left:
            raise ValueError(f"window_left: {window_left}, must be None or plan's, {self._window_left}")
        (_, _, _, _, mask, mask_starts), requests, max_q_len = self._ready(q, k, v)
        scale = self._scale if sm_scale is None else values.number("sm_scale", sm_scale)
        k_scales, v_scales = scale_pair("kv_cache_sf", kv_cache_sf, self._kv_layout, views)
        return self._serve(
            others, scale, (q_scale, k_scale, v_scale), signature=PAGED, q=q, k=k, v=v, requests=requests,
            max_q_len=max_q_len, skip=real(skip_softmax_threshold_scale_factor), interleaved=v_scales_interleaved,
            return_lse=return_lse, enable_pdl=enable_pdl, out=out, lse=lse, sinks=sinks, k_scales=k_scales,
            v_scales=v_scales, custom_mask=mask, mask_starts=mask_starts, ranges=bidirectional_ranges,
            range_left=values.range_left(range_window_left), prefix_lens=prefix_lens,
        )  # fmt: skip

    def forward(
        self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], causal: bool = False,
        pos_encoding_mode: str = "NONE", allow_fp16_qk_reduction: bool = False,
        k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None, *, use_fp16_qk_reduction: bool | None = None,
        return_lse: bool = False,
    ) -> Any:  # fmt: skip
        """Call `run` with these modifiers, each with its default, which replace those of plan from now on.

        The modifiers are as in `BatchPrefillWithPagedKVCacheWrapper.plan`, the other arguments as in
        `BatchPrefillWithPagedKVCacheWrapper.run`. FlashInfer keeps this method for older callers.
        """
        self._override(causal, pos_encoding_mode, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    def _keys(self, given: tuple[torch.Tensor, ...], page_size: int) -> torch.Tensor:
        return get_seq_lens(given[1].to(torch.int64), given[3], page_size)

    def _requests(self, here: tuple[torch.Tensor, ...]) -> SequenceBatch:
        return csr_sequences(here[0], here[1], here[2], here[3])


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """`BatchPrefillWithPagedKVCacheWrapper` with a run that takes each head's sink right after the cache.

    FlashInfer's class. The constructor's arguments up to backend are as in `BatchPrefillWithPagedKVCacheWrapper`. The
    others are hints, because plan decides what is computed: pos_encoding_mode, use_fp16_qk_reduction, q_data_type,
    kv_data_type, head_dim_qk, head_dim_vo, window_left, o_data_type.

    >>> wrapper = BatchAttentionWithAttentionSinkWrapper(torch.empty(0), q_data_type=torch.float16)
    >>> starts, last = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    >>> wrapper.plan(starts, starts, starts[:2] * 0, last, 4, 2, 64, 16, causal=True)
    >>> q, cache = torch.randn(2, 4, 64).half(), torch.randn(1, 2, 16, 2, 64).half()
    >>> wrapper.run(q, cache, torch.zeros(4), 64**-0.5).shape
    torch.Size([2, 4, 64])
    """

    _SCALES = 4

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None, paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None, paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None, mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto", pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        q_data_type: torch.dtype = torch.bfloat16, kv_data_type: torch.dtype = torch.bfloat16, head_dim_qk: int = 128,
        head_dim_vo: int = 128, window_left: int = -1, *, o_data_type: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf,
            paged_kv_indices_buf, paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf, backend,
        )  # fmt: skip

    def run(  # type: ignore[override]
        self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        sinks: torch.Tensor | None = None, sm_scale: float | None = None, *, return_lse: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Call `BatchPrefillWithPagedKVCacheWrapper.run` with sinks and sm_scale by position.

        sinks: fp32 (Hq,), natural-log units, not scaled. sm_scale: for this call; None: plan's. The other arguments,
        kwargs among them, are as in `BatchPrefillWithPagedKVCacheWrapper.run`, and keywords.
        """
        return super().run(q, paged_kv_cache, sinks=sinks, sm_scale=sm_scale, return_lse=return_lse, **kwargs)
