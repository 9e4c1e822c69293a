"""Batches over K and V without pages: the rows of all requests, one request after another."""

from typing import Any

import torch

from ...attention.call import SequenceBatch, ragged_sequences
from ...attention.checks import HEAD_SCALES, SIGNATURES
from ...attention.views import rows_of
from .. import values
from .batch import PrefillBatch

RAGGED = "BatchPrefillWithRaggedKVCacheWrapper"
SIGNATURES[RAGGED] = values.NAMES | {
    "kv": "k, v", "page_table": "kv_indptr", "kv_lens": "kv_indptr", "kv_starts": "kv_indptr",
    "cu_seqlens_q": "qo_indptr", "max_q_len": "max_token_per_sequence",
}  # fmt: skip
HEAD_SCALES.add(RAGGED)


def scales_of(given: Any, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale factors of NVFP4 rows in the form of an `AttentionCall`.

    given: (k, v), each in the layout of K's or V's rows: (rows, Hkv, D / 16) or (Hkv, rows, D / 16).
    """
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise TypeError(f"kv_cache_sf: {type(given).__name__}, must be (k, v)")
    return rows_of("kv_cache_sf (K)", given[0], layout), rows_of("kv_cache_sf (V)", given[1], layout)


class BatchPrefillWithRaggedKVCacheWrapper(PrefillBatch):
    """Attention of ragged queries over ragged K and V, which are read in place.

    `plan` is called once per batch, `run` for each layer.

    FlashInfer's class. Positional arguments are those of its version 0.2; names that were added later are keywords. The
    constructor's arguments are as in `BatchPrefillWithPagedKVCacheWrapper`, except that kv_indptr_buf, int32
    (B + 1,), replaces the three buffers of pages.

    >>> wrapper = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0), "NHD")
    >>> starts = torch.tensor([0, 3, 7], dtype=torch.int32)  # two requests
    >>> wrapper.plan(starts, starts, 8, 2, 64, causal=True)
    >>> q, k, v = (torch.randn(7, heads, 64).half() for heads in (8, 2, 2))
    >>> wrapper.run(q, k, v).shape
    torch.Size([7, 8, 64])
    """

    _NAMES = ("qo_indptr", "kv_indptr")
    _CACHE = "k, v"
    _SCALES = 3

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None, kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None, qk_indptr_buf: torch.Tensor | None = None, backend: str = "auto",
        jit_args: Any = None, jit_kwargs: Any = None, *, mask_indptr_buf: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        mask = custom_mask_buf, values.either("qk_indptr_buf", qk_indptr_buf, "mask_indptr_buf", mask_indptr_buf)
        buffers = qo_indptr_buf, kv_indptr_buf
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers, mask, backend)

    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int | None = None, custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None, causal: bool = False, pos_encoding_mode: str = "NONE",
        allow_fp16_qk_reduction: bool = False, window_left: int = -1, logits_soft_cap: float | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16", kv_data_type: str | torch.dtype | None = None, *,
        head_dim_qk: int | None = None, head_dim_vo: int | None = None, use_fp16_qk_reduction: bool | None = None,
        o_data_type: str | torch.dtype | None = None, non_blocking: bool = True,
        max_token_per_sequence: int | None = None, max_sequence_kv: int | None = None,
        seq_lens: torch.Tensor | None = None, seq_lens_q: torch.Tensor | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False,
        prefix_len_ptr: torch.Tensor | None = None, token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0, max_item_len_ptr: torch.Tensor | None = None,
        v_indptr: torch.Tensor | None = None, o_indptr: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Set what `run` computes, replacing everything planned before. Reads and copies nothing from a device.

        qo_indptr, kv_indptr: int32 (B + 1,), on the host or the workspace's device. Request b owns query rows
        qo_indptr[b]:qo_indptr[b + 1] and keys kv_indptr[b]:kv_indptr[b + 1]. The other arguments, hints and errors are
        as in `BatchPrefillWithPagedKVCacheWrapper.plan`; note that sm_scale has another position.
        NotImplementedError: multi-item scoring, v_indptr, o_indptr.
        """
        values.refuse(
            prefix_len_ptr=prefix_len_ptr, token_pos_in_items_ptr=token_pos_in_items_ptr,
            token_pos_in_items_len=token_pos_in_items_len or None, max_item_len_ptr=max_item_len_ptr,
            v_indptr=v_indptr, o_indptr=o_indptr,
        )  # fmt: skip
        split = values.split_of(fixed_split_size, disable_split_kv)
        head_dim = values.either("head_dim", head_dim, "head_dim_qk", head_dim_qk)
        shape = values.shape_of(num_qo_heads, num_kv_heads, head_dim, head_dim_vo, 0)
        types = values.types_of(q_data_type, kv_data_type, o_data_type)
        modifiers = values.modifiers_of(
            causal, pos_encoding_mode, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta
        )
        values.check_rope(modifiers.rope, types)
        mask = values.mask_of(custom_mask, packed_custom_mask, self.device, non_blocking)
        planned = self._prepare((qo_indptr, kv_indptr), 0, max_token_per_sequence, mask)
        self._split_kv = split
        self._keep(planned, shape, types, modifiers)

    begin_forward = plan

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool = False,
        scale_k: float | torch.Tensor | None = None, scale_v: float | torch.Tensor | None = None, *,
        q_scale: float | torch.Tensor | None = None, k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None, o_scale: float | None = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, enable_pdl: bool | None = None, sinks: torch.Tensor | None = None,
        kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
        bidirectional_ranges: torch.Tensor | None = None, range_window_left: int = -1,
        prefix_lens: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Compute attention as planned.

        Args:
            q: (T, Hq, D); k: (rows, Hkv, D), v: (rows, Hkv, Dvo) "NHD", or (Hkv, rows, ...) "HND"; any strides with 1
                as the last. T is the last element of qo_indptr. k and v may have more rows than kv_indptr says, not
                fewer; this is checked when T is.
            q_scale, k_scale, v_scale: as in `BatchPrefillWithPagedKVCacheWrapper.run`; or by position,
                `run(q, k, v, q_scale, k_scale, v_scale)`, in the order of upstream's fa3. They apply to rows of any
                dtype. scale_k and scale_v are other names of k_scale and v_scale.
            kv_cache_sf: scale factors of packed NVFP4, (k, v): e4m3, or its bytes in uint8, (rows, Hkv, D / 16) in the
                wrapper's layout, linear.

        The other arguments are as in `BatchPrefillWithPagedKVCacheWrapper.run`. Returns out, or (out, lse). Raises
        as that method does; NotImplementedError for o_scale.
        """
        others = (
            return_lse, scale_k, scale_v, q_scale, k_scale, v_scale, o_scale, enable_pdl, sinks, kv_cache_sf,
            bidirectional_ranges, range_window_left, prefix_lens,
        )  # fmt: skip
        layout = self._kv_layout
        k, v = rows_of("k", k, layout), rows_of("v", v, layout)
        if (repeated := self._repeat(q, (k, v), out, lse, others)) is not None:
            return repeated
        if return_lse is not False and return_lse is not True and isinstance(return_lse, (torch.Tensor, float)):
            q_scale, return_lse = values.either("q_scale", q_scale, "scale_q", return_lse), False
        if scale_k is not None or scale_v is not None:
            k_scale = values.either("k_scale", k_scale, "scale_k", scale_k)
            v_scale = values.either("v_scale", v_scale, "scale_v", scale_v)
        if o_scale is not None:
            one = isinstance(o_scale, (int, float)) and o_scale == 1
            values.refuse(o_scale=None if one else o_scale)
        (_, _, _, _, mask, mask_starts), requests, max_q_len = self._ready(q, k, v)
        k_scales, v_scales = (None, None) if kv_cache_sf is None else scales_of(kv_cache_sf, layout)
        return self._serve(
            others, self._scale, (q_scale, k_scale, v_scale), signature=RAGGED, q=q, k=k, v=v, requests=requests,
            max_q_len=max_q_len, return_lse=return_lse, enable_pdl=enable_pdl, out=out, lse=lse, sinks=sinks,
            k_scales=k_scales, v_scales=v_scales, custom_mask=mask, mask_starts=mask_starts,
            ranges=bidirectional_ranges, range_left=values.range_left(range_window_left), prefix_lens=prefix_lens,
        )  # fmt: skip

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False,
        pos_encoding_mode: str = "NONE", allow_fp16_qk_reduction: bool = False, window_left: int = -1,
        logits_soft_cap: float | None = None, sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, *, use_fp16_qk_reduction: bool | None = None, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        """Call `run` with these modifiers, each with its default, which replace those of plan from now on.

        The modifiers are as in `BatchPrefillWithRaggedKVCacheWrapper.plan`, the other arguments as in
        `BatchPrefillWithRaggedKVCacheWrapper.run`. FlashInfer keeps this method for older callers.
        """
        self._override(causal, pos_encoding_mode, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta)
        return self.run(q, k, v, return_lse=return_lse)

    def _keys(self, given: tuple[torch.Tensor, ...], page_size: int) -> torch.Tensor:
        return given[1].to(torch.int64).diff().clamp(min=0)

    def _requests(self, here: tuple[torch.Tensor, ...]) -> SequenceBatch:
        return ragged_sequences(here[0], here[1])
