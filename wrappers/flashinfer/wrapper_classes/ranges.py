"""Batches over a paged KV cache with a causal mask that ranges of keys extend, as multimodal prefixes need."""

from typing import Any

import torch

from ...host.checks import check_integer
from ...host.scalars import integer
from .. import values
from .paged import BatchPrefillWithPagedKVCacheWrapper


class BatchPrefillWithCausalBidirectionalRangesWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Causal attention over a paged KV cache, in which each query also sees an inclusive range of keys.

    FlashInfer's class. The constructor's arguments up to paged_kv_last_page_len_buf, plan and run are as in
    `BatchPrefillWithPagedKVCacheWrapper`, unless their docstrings say otherwise. The constructor's dtypes and head dims
    are the defaults of plan, which refuses others.

    Args:
        pos_encoding_mode: "NONE"; another mode raises NotImplementedError.
        q_data_type, kv_data_type, o_data_type (None: the query's), head_dim_qk, head_dim_vo.

    >>> wrapper = BatchPrefillWithCausalBidirectionalRangesWrapper(torch.empty(0), head_dim_qk=64, head_dim_vo=64)
    >>> starts, last = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    >>> wrapper.plan(starts, starts.clamp(max=1), starts[:1], last, 8, 2, 64, 16)
    >>> ranges = torch.tensor([[-1, -1], [1, 3], [1, 3], [1, 3], [-1, -1]], dtype=torch.int32)  # of an image
    >>> q, cache = torch.randn(5, 8, 64).bfloat16(), torch.randn(1, 2, 16, 2, 64).bfloat16()
    >>> wrapper.run(q, cache, ranges).shape
    torch.Size([5, 8, 64])
    """

    _SCALES = 5

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None, paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None, paged_kv_last_page_len_buf: torch.Tensor | None = None,
        pos_encoding_mode: str = "NONE", q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16, o_data_type: torch.dtype | None = None, head_dim_qk: int = 128,
        head_dim_vo: int = 128,
    ) -> None:  # fmt: skip
        if pos_encoding_mode != "NONE":
            raise NotImplementedError(f"pos_encoding_mode: {pos_encoding_mode!r}, must be 'NONE' with ranges")
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf,
            paged_kv_indices_buf, paged_kv_last_page_len_buf,
        )  # fmt: skip
        types = values.types_of(q_data_type, kv_data_type, o_data_type)
        self._own: dict[str, Any] = dict(zip(("q_data_type", "kv_data_type", "o_data_type"), types, strict=True))
        self._own_dims: dict[str, Any] = {"head_dim_qk": head_dim_qk, "head_dim_vo": head_dim_vo}

    def plan(  # type: ignore[override]
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int,
        head_dim_vo: int | None = None, custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, sm_scale: float | None = None, window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: str | torch.dtype | None = None,
        kv_data_type: str | torch.dtype | None = None, o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True, prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None, token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None, max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None, fixed_split_size: int | None = None, disable_split_kv: bool = False,
    ) -> None:  # fmt: skip
        """Set what `run` computes. Other arguments than these are as in `BatchPrefillWithPagedKVCacheWrapper.plan`.

        head_dim_vo, q_data_type, kv_data_type, o_data_type: None, or the constructor's. logits_soft_cap: upstream
        refuses it. Raises ValueError for custom_mask, packed_custom_mask, causal (the mask is causal), a window_left
        that is not -1 (`run` has one for each part), and for another value than the constructor's.
        """
        given = {"q_data_type": q_data_type, "kv_data_type": kv_data_type, "o_data_type": o_data_type}
        for name, dtype in given.items():
            if dtype is not None and values.dtype_of(name, dtype) != self._own[name]:
                raise ValueError(f"{name}: {dtype}, must be None or the constructor's, {self._own[name]}")
        for name, dim in {"head_dim_qk": head_dim_qk, "head_dim_vo": head_dim_vo}.items():
            if dim is not None and dim != self._own_dims[name]:
                raise ValueError(f"{name}: {dim}, must be the constructor's, {self._own_dims[name]}")
        for name, mask in {"custom_mask": custom_mask, "packed_custom_mask": packed_custom_mask}.items():
            if mask is not None:
                raise ValueError(f"{name}: given, must be None: ranges of run say which keys are seen")
        if causal:
            raise ValueError(f"causal: {causal}, must be False, as upstream has it: the mask is always causal")
        if window_left != -1:
            raise ValueError(f"window_left: {window_left}, must be -1: run has causal_window_left, range_window_left")
        super().plan(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            page_size=page_size, causal=True, pos_encoding_mode=pos_encoding_mode, sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap, non_blocking=non_blocking, prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr, token_pos_in_items_len=token_pos_in_items_len,
            max_item_len_ptr=max_item_len_ptr, max_token_per_sequence=max_token_per_sequence,
            max_sequence_kv=max_sequence_kv, fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv,
            use_fp16_qk_reduction=use_fp16_qk_reduction, **self._own, **self._own_dims,
        )  # fmt: skip

    begin_forward = plan  # type: ignore[assignment]

    def run(  # type: ignore[override]
        self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        bidirectional_ranges: torch.Tensor, causal_window_left: int = -1, range_window_left: int = -1,
        q_scale: float | torch.Tensor | None = None, k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
        return_lse: bool = False, enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None, *,
        sinks: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Compute attention as planned: query i of a request with m queries and n keys has position p = i + n - m, and
        sees key j if j <= p and p - j <= causal_window_left, or if j is in its range and p - j < range_window_left.

        Args:
            bidirectional_ranges: int32 (T, 2), last stride 1: the first and the last key of each query's range, counted
                in its request; any values, (-1, -1) for none.
            causal_window_left: negative: no bound. range_window_left: not positive: no bound.
            sinks: fp32 (Hq,), which upstream lacks.

        The other arguments, the results and the errors are as in `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        if bidirectional_ranges is None:
            raise TypeError("bidirectional_ranges: None, must be a tensor")
        window = check_integer("causal_window_left", integer(causal_window_left))
        if window != self._window_left and self._planned is not None:
            self._window_left, self._bound = window, None
            self._planned_options = self._planned_options | {"window_left": window}
        return super().run(
            q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
            return_lse=return_lse, enable_pdl=enable_pdl, kv_cache_sf=kv_cache_sf, sinks=sinks,
            bidirectional_ranges=bidirectional_ranges, range_window_left=range_window_left,
        )  # fmt: skip

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError: run replaces this method, which has no ranges. args, kwargs: of any kind."""
        raise NotImplementedError("forward: has no bidirectional_ranges; call plan and run")
