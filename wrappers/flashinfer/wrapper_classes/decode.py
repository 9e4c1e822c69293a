"""Batches of decoding requests over a paged KV cache with page lists that are stored one after another."""

from typing import Any

import torch

from ...attention.call import SequenceBatch, csr_sequences
from ...attention.checks import HEAD_SCALES, SIGNATURES
from ...attention.views import paged_kv, pair, scale_pair
from ...host.checks import check_flag, check_integer
from ...host.scalars import integer, real
from .. import values
from .batch import PrefillBatch

DECODE = "BatchDecodeWithPagedKVCacheWrapper"
SIGNATURES[DECODE] = values.NAMES | values.PAGED_KV | {
    "page_table": "indices", "kv_lens": "last_page_len", "kv_starts": "indptr", "max_q_len": "q_len_per_req",
}  # fmt: skip
HEAD_SCALES.add(DECODE)


class BatchDecodeWithPagedKVCacheWrapper(PrefillBatch):
    """Attention of the last tokens of each request over a paged KV cache that already holds them.

    `plan` is called once per batch, `run` for each layer.

    FlashInfer 0.7.2's class, with its positional arguments. Arguments that are not listed are as in
    `BatchPrefillWithPagedKVCacheWrapper`.

    Args:
        use_cuda_graph: if True, plan copies into the buffers below, and a graph captured from run holds for later plans
            of the same batch size, heads, dtypes, modifiers and q_len_per_req. A buffer that is itself passed to plan
            is not copied.
        paged_kv_indptr_buffer: int32 (B + 1,). paged_kv_indices_buffer: int32, room for all pages.
        paged_kv_last_page_len_buffer: int32 (B,).

    Hints: use_tensor_cores, backend. NotImplementedError: jit_args.

    >>> wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(0), "NHD")  # two requests, pages of 4 rows
    >>> starts, pages, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3], [2, 0, 1], [1, 4]))
    >>> wrapper.plan(starts, pages, last, 8, 2, 64, 4)  # 5 and 4 keys
    >>> wrapper.run(torch.randn(2, 8, 64).half(), torch.randn(3, 2, 4, 2, 64).half()).shape
    torch.Size([2, 8, 64])
    """

    _NAMES = ("indptr", "indices", "last_page_len")
    _OFFSETS = 1
    _BUFFER = "paged_kv_{}_buffer"
    _CACHE = "paged_kv_cache"
    _SCALES = 2

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None, paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto", jit_args: Any = None,
    ) -> None:  # fmt: skip
        values.refuse(jit_args=jit_args)
        check_flag("use_tensor_cores", use_tensor_cores)
        buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers, (None, None), backend)
        # Engines read these buffers, and write to the second.
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = buffers
        self.use_tensor_cores = use_tensor_cores
        self._q_len = 1

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str = "NONE", window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None, o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None, sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, non_blocking: bool = True, block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None, fixed_split_size: int | None = None, disable_split_kv: bool = False,
        q_len_per_req: int = 1, *, window_right: int = 0, is_causal: bool | None = None,
    ) -> None:  # fmt: skip
        """Set what `run` computes, replacing everything planned before. Reads and copies nothing from a device.

        Arguments that are not listed are as in `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Args:
            indptr: int32 (B + 1,): request b has the pages indptr[b]:indptr[b + 1] of indices, int32 (N,), which may
                have more entries. last_page_len: int32 (B,), rows in use of its last page. A request without pages has
                no keys. These tensors are on the host or on the workspace's device; those on the device are not copied:
                run reads them.
            data_type: dtype of queries and keys, if their own argument is None.
            fixed_split_size, disable_split_kv: with a size of at least 1, or True, a request's bits do not depend on
                the rest of its batch. The kernel chooses how the keys of a request are split.
            q_len_per_req: query tokens of each request, which are its last tokens; a row sees no later key.
            is_causal: None, or whether q_len_per_req is over 1. window_right: must be 0.

        Hints: non_blocking, block_tables, seq_lens.

        Raises, and keeps the previous plan, as `BatchPrefillWithPagedKVCacheWrapper.plan` does; NotImplementedError for
        another is_causal or window_right; ValueError with use_cuda_graph if q_len_per_req differs from the first
        plan's.
        """
        check_flag("disable_split_kv", disable_split_kv)
        split = -1 if fixed_split_size is None else check_integer("fixed_split_size", integer(fixed_split_size))
        q_len = check_integer("q_len_per_req", integer(q_len_per_req), 1)
        if is_causal is not None:
            check_flag("is_causal", is_causal)
            if is_causal != (q_len > 1):
                need = f"must be None or {q_len > 1} if q_len_per_req is {q_len}"
                raise NotImplementedError(f"is_causal: {is_causal}, not supported, {need}")
        if check_integer("window_right", integer(window_right)) != 0:
            raise NotImplementedError(f"window_right: {window_right}, not supported, must be 0")
        page_size = check_integer("page_size", integer(page_size), 1)
        shape = values.shape_of(num_qo_heads, num_kv_heads, head_dim, None, page_size)
        q_type = q_data_type if q_data_type is not None else data_type if data_type is not None else "float16"
        types = values.types_of(q_type, data_type if kv_data_type is None else kv_data_type, o_data_type)
        modifiers = values.modifiers_of(
            True, pos_encoding_mode, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta
        )
        values.check_rope(modifiers.rope, types)
        if self._buffers is not None and self._planned is not None and q_len != self._q_len:
            raise ValueError(f"q_len_per_req: {q_len}, must be that of the first plan, {self._q_len}")
        planned = self._prepare((indptr, indices, last_page_len), shape.page_size, None, None)
        self._q_len, self._split_kv = q_len, "fixed" if disable_split_kv or split > 0 else "auto"
        self._keep(planned, shape, types, modifiers)

    begin_forward = plan

    def run(
        self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], *,
        q_scale: float | torch.Tensor | None = None, k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
        return_lse: bool = False, enable_pdl: bool | None = None, window_left: int | None = None,
        sinks: torch.Tensor | None = None, q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None, v_scales_interleaved: bool = False,
    ) -> Any:  # fmt: skip
        """Compute attention as planned, of q (B * q_len_per_req, Hq, D) with any token and head strides.

        q_len_per_req: None, or plan's value. skip_softmax_threshold_scale_factor: as in
        `trtllm_batch_decode_with_kv_cache`. The other arguments, results and errors are as in
        `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        others = (
            q_scale, k_scale, v_scale, return_lse, enable_pdl, window_left, sinks, q_len_per_req,
            skip_softmax_threshold_scale_factor, kv_cache_sf, v_scales_interleaved,
        )  # fmt: skip
        views = paged_kv if self._shape.page_size == 1 else pair
        k, v = views("paged_kv_cache", paged_kv_cache, self._kv_layout)
        if (repeated := self._repeat(q, (k, v), out, lse, others)) is not None:
            return repeated
        self._plan_of_run()
        for name, value, of_plan in (
            ("window_left", window_left, self._window_left), ("q_len_per_req", q_len_per_req, self._q_len)
        ):  # fmt: skip
            if value is not None and value != of_plan:
                raise ValueError(f"{name}: {value}, must be None or plan's, {of_plan}")
        requests = self._ready(q, k, v)[1]
        if isinstance(q, torch.Tensor) and q.dim() == 3 and q.shape[0] != requests.batch * self._q_len:
            planned = f"{requests.batch} x {self._q_len}, the requests of plan x q_len_per_req"
            raise ValueError(f"q: {q.shape[0]} tokens, must be {planned}")
        k_scales, v_scales = scale_pair("kv_cache_sf", kv_cache_sf, self._kv_layout, views)
        return self._serve(
            others, self._scale, (q_scale, k_scale, v_scale), signature=DECODE, q=q, k=k, v=v, requests=requests,
            max_q_len=self._q_len, skip=real(skip_softmax_threshold_scale_factor), interleaved=v_scales_interleaved,
            return_lse=return_lse, enable_pdl=enable_pdl, out=out, lse=lse, sinks=sinks, k_scales=k_scales,
            v_scales=v_scales,
        )  # fmt: skip

    def forward(
        self, q: torch.Tensor, paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        pos_encoding_mode: str = "NONE", q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None, v_scale: float | torch.Tensor | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None, *, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        """Call `run` with these modifiers, each with its default, which replace those of plan from now on.

        The modifiers are as in `BatchDecodeWithPagedKVCacheWrapper.plan`, the other arguments as in
        `BatchDecodeWithPagedKVCacheWrapper.run`. FlashInfer keeps this method for older callers.
        """
        self._override(True, pos_encoding_mode, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta)
        return self.run(
            q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse
        )  # fmt: skip

    def _requests(self, here: tuple[torch.Tensor, ...]) -> SequenceBatch:
        return csr_sequences(None, here[0], here[1], here[2])


def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper, indptr: torch.Tensor, indices: torch.Tensor,
    last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
    pos_encoding_mode: str = "NONE", window_left: int = -1, logits_soft_cap: float | None = None,
    q_data_type: str | torch.dtype | None = None, kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None, sm_scale: float | None = None, rope_scale: float | None = None,
    rope_theta: float | None = None, non_blocking: bool = True, fixed_split_size: int | None = None,
    disable_split_kv: bool = False, q_len_per_req: int = 1, global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Plan a wrapper in the form that engines use before a graph is replayed.

    The arguments are as in `BatchDecodeWithPagedKVCacheWrapper.plan`. The output keeps the dtype of the previous plan.
    global_override_indptr_cpu, a copy of indptr on the host, is not used, since plan reads none. Raises as plan does.
    FlashInfer's function.

    >>> wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(0))
    >>> starts, pages, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3], [2, 0, 1], [1, 4]))
    >>> fast_decode_plan(wrapper, starts, pages, last, 8, 2, 64, 4)
    >>> wrapper.run(torch.randn(2, 8, 64).half(), torch.randn(3, 2, 4, 2, 64).half()).shape
    torch.Size([2, 8, 64])
    """
    out = None if wrapper._planned is None else wrapper._types.out
    BatchDecodeWithPagedKVCacheWrapper.plan(  # wrapper.plan may be this function
        wrapper, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode,
        window_left, logits_soft_cap, q_data_type, kv_data_type, out, data_type, sm_scale, rope_scale, rope_theta,
        non_blocking, None, None, fixed_split_size, disable_split_kv, q_len_per_req,
    )  # fmt: skip
