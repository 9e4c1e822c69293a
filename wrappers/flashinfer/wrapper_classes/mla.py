"""Batches over a paged cache of latent attention (MLA), of which V is the first columns of K."""

from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.attention.spec import LSE_NATURAL

from ...attention.call import SequenceBatch, csr_sequences, sequences_of
from ...attention.checks import E4M3, LATENT_QUERIES, SIGNATURES
from ...attention.views import columns_and_rope
from ...host.checks import (
    PlannedDtypes,
    UnknownName,
    check_flag,
    check_integer,
    check_one_of,
    check_operand,
    check_shape,
    check_strided,
    listed,
)
from ...host.scalars import check_scale, integer, split_scale
from .. import values
from ..values import HeadShape, LogitsModifiers, TensorTypes
from .batch import BatchPlan, PrefillBatch

MLA = "BatchMLAPagedAttentionWrapper"
SIGNATURES[MLA] = values.NAMES | {
    **dict.fromkeys(("kv", "k", "v", "shares_v"), "ckv_cache"), "q": "q_nope", "q_rope": "q_pe", "k_rope": "kpe_cache",
    "page_table": "kv_indices", "kv_lens": "kv_len_arr", "kv_starts": "kv_indptr", "cu_seqlens_q": "qo_indptr",
    "scale": "sm_scale", "out_dtype": "output_dtype",
}  # fmt: skip
DENSE = MLA + ", block_tables"
SIGNATURES[DENSE] = SIGNATURES[MLA] | {
    "page_table": "block_tables", "kv_lens": "seq_lens", "cu_seqlens_q": "cum_seq_lens_q", "max_q_len": "max_q_len",
}  # fmt: skip
CSR_FIELDS = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
DENSE_FIELDS = ("cum_seq_lens_q", "block_tables", "seq_lens", "max_q_len")
LSE_MODES, LAYOUTS = ("none", "base2", "basee"), ("packed", "split")


@dataclass(frozen=True)
class MLAPlanMetadata:
    """Where the queries and the keys of a batch are, for `BatchMLAPagedAttentionWrapper.plan`: as lists of pages
    (`csr`: qo_indptr, kv_indptr, kv_indices, kv_len_arr), as a table (`dense`: cum_seq_lens_q, block_tables, seq_lens,
    max_q_len), or as both (`dual`), of which plan takes the table. FlashInfer's class.

    >>> MLAPlanMetadata.csr(*(torch.tensor(x).int() for x in ([0, 1], [0, 2], [3, 1], [70]))).kv_len_arr
    tensor([70], dtype=torch.int32)
    """

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_len_arr: torch.Tensor | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(
        cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor
    ) -> "MLAPlanMetadata":
        """Return metadata of lists: qo_indptr, kv_indptr, kv_indices and kv_len_arr of plan."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls, cum_seq_lens_q: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> "MLAPlanMetadata":  # fmt: skip
        """Return metadata of a table: cum_seq_lens_q, block_tables, seq_lens and max_q_len of plan."""
        return cls(None, None, None, None, cum_seq_lens_q, block_tables, seq_lens, max_q_len)

    @classmethod
    def dual(
        cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor, *,
        cum_seq_lens_q: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_q_len: int | None = None,
    ) -> "MLAPlanMetadata":  # fmt: skip
        """Return metadata of both forms, qo_indptr, kv_indptr, kv_indices and kv_len_arr, and cum_seq_lens_q,
        block_tables, seq_lens and max_q_len of plan, which must describe the same batch."""
        return cls(
            qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len
        )  # fmt: skip


class BatchMLAPagedAttentionWrapper(PrefillBatch):
    """Decode, and prefill of the absorbed form, over a paged cache of latent attention.

    `plan` is called once per batch, `run` for each layer.

    FlashInfer's class, of its versions 0.6 and 0.7.

    Args:
        float_workspace_buffer: any tensor; its device is the wrapper's. Nothing is kept in it.
        use_cuda_graph: if True, plan copies lists into the buffers below, and a graph captured from run holds for later
            plans of the same batch size. If False, the buffers are ignored. They may all be None if only tables are
            planned, which run reads where they are.
        qo_indptr, kv_indptr: int32 (B + 1,). kv_indices: int32, room for all pages. kv_len_arr: int32 (B,).

    Hint: backend ("auto", "fa2", "fa3", "cutlass", ...).

    >>> wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0))  # one request of 70 keys in pages of 64
    >>> index = (torch.tensor(x).int() for x in ([0, 1], [0, 2], [3, 1], [70]))
    >>> half = torch.float16
    >>> wrapper.plan(*index, 16, 512, 64, 64, True, 192**-0.5, half, half)
    >>> q, cache = torch.randn(1, 16, 576).half(), torch.randn(4, 64, 576).half()
    >>> wrapper.run(query=q, kv_cache=cache).shape
    torch.Size([1, 16, 512])
    """

    _NAMES = CSR_FIELDS
    _BUFFER = "{}"
    _CACHE = "ckv_cache"
    _QUERY = "q_nope"
    _PLANNED = {"num_qo_heads": "num_heads", "head_dim": "head_dim_ckv", "head_dim_vo": "head_dim_ckv"}
    _SCALES = 1 << 30  # none
    _signature, _rope = MLA, 0

    def __init__(
        self, float_workspace_buffer: torch.Tensor, use_cuda_graph: bool = False, qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None, kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None, backend: str = "auto",
    ) -> None:  # fmt: skip
        buffers = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        check_flag("use_cuda_graph", use_cuda_graph)
        has_buffers = use_cuda_graph and any(t is not None for t in buffers)
        super().__init__(float_workspace_buffer, "NHD", has_buffers, buffers, (None, None), backend)
        self._graph = bool(use_cuda_graph)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._graph

    def plan(
        self, qo_indptr: torch.Tensor | None = None, kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None, kv_len_arr: torch.Tensor | None = None, num_heads: int | None = None,
        head_dim_ckv: int | None = None, head_dim_kpe: int | None = None, page_size: int | None = None,
        causal: bool | None = None, sm_scale: float | None = None, q_data_type: str | torch.dtype | None = None,
        kv_data_type: str | torch.dtype | None = None, use_profiler: bool = False, *,
        metadata: MLAPlanMetadata | None = None, cum_seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None, seq_lens: torch.Tensor | None = None, max_q_len: int | None = None,
        query_layout: str | None = None, kv_cache_layout: str | None = None, lse_mode: str = "none",
        output_dtype: torch.dtype | None = None, output_scale: str = "none", scale_mode: str = "default",
        skip_softmax: bool = False,
    ) -> None:  # fmt: skip
        """Set what `run` computes, replacing everything planned before. Reads and copies nothing from a device.

        Args:
            qo_indptr: int32 (B + 1,): request b owns query rows qo_indptr[b]:qo_indptr[b + 1]. kv_indptr: int32
                (B + 1,) or more: likewise its entries of kv_indices, int32 (N,). kv_len_arr: int32 (B,), its keys.
            cum_seq_lens_q, block_tables, seq_lens: instead, offsets as qo_indptr, int32 (B, M), pages of each request,
                and int32 (B,), its keys. max_q_len: an upper bound of the query lengths, or None.
            metadata: instead of all of these, a `MLAPlanMetadata`. Tensors on the device are not copied: run reads
                them.
            num_heads; head_dim_ckv: columns of V; head_dim_kpe: further columns of K, may be 0; page_size.
            causal: row i of m sees keys up to i + n - m, n being the number of keys of its request. sm_scale: factor on
                the logits.
            q_data_type, kv_data_type: float16 or bfloat16, the same; or bfloat16 and float8_e4m3fn. output_dtype: None,
                or q_data_type.

        Hints, since run takes all forms of tensors and returns an LSE if asked: use_profiler, query_layout,
        kv_cache_layout, lse_mode. NotImplementedError: output_scale other than "none", scale_mode other than "default",
        skip_softmax.

        Raises, and keeps the previous plan: ValueError for a shape or device, offsets on the host that fall or pass
        kv_indices, buffers that are too small, or a batch size other than the buffers'; TypeError for a dtype;
        UnknownName, which is both a KeyError and a ValueError, for an unknown name; RuntimeError while a CUDA graph is
        captured.
        """
        for name, given, known in (
            ("lse_mode", lse_mode, LSE_MODES), ("query_layout", query_layout, (None, *LAYOUTS)),
            ("kv_cache_layout", kv_cache_layout, (None, *LAYOUTS)),
        ):  # fmt: skip
            if given not in known:
                raise UnknownName(f"{name}: {given!r}, must be one of {listed(known)}")
        check_flag("use_profiler", use_profiler)
        check_flag("skip_softmax", skip_softmax)
        for name, value, only in (
            ("output_scale", output_scale, "none"), ("scale_mode", scale_mode, "default"),
            ("skip_softmax", skip_softmax, False),
        ):  # fmt: skip
            if value != only:
                raise NotImplementedError(f"{name}: {value!r}, must be {only!r}: not supported")
        flat = (qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len)
        of = _metadata(metadata, flat)
        page_size = check_integer("page_size", integer(page_size), 1)
        columns = check_integer("head_dim_ckv", integer(head_dim_ckv), 1)
        rotated = check_integer("head_dim_kpe", integer(head_dim_kpe), 0)
        shape = HeadShape(check_integer("num_heads", integer(num_heads), 0), 1, columns, columns, page_size)
        q_type, kv_type = values.dtype_of("q_data_type", q_data_type), values.dtype_of("kv_data_type", kv_data_type)
        check_one_of("q_data_type:", q_type, LATENT_QUERIES)
        if kv_type is E4M3 and q_type is not torch.bfloat16:
            raise PlannedDtypes(f"kv_data_type: {kv_type}, must be {q_type} unless q_data_type={torch.bfloat16}")
        check_one_of("kv_data_type:", kv_type, (q_type, E4M3) if q_type is torch.bfloat16 else (q_type,))
        out_type = q_type if output_dtype is None else values.dtype_of("output_dtype", output_dtype)
        check_one_of("output_dtype:", out_type, (q_type,))
        check_flag("causal", causal)
        scale = values.number("sm_scale", sm_scale)
        signature = MLA
        if of.block_tables is None:
            if self._graph and self._buffers is None:
                raise ValueError("qo_indptr: None in the constructor, must be a tensor if use_cuda_graph is True")
            lists: Any = (of.qo_indptr, _entries(of.kv_indptr, of.qo_indptr), of.kv_indices, of.kv_len_arr)
            planned = self._prepare(lists, page_size, None, None)
        else:
            signature, planned = DENSE, self._table(of)
        self._signature, self._rope = signature, rotated
        modifiers = LogitsModifiers(bool(causal), "NONE", scale, -1, 0.0, None)
        self._keep(planned, shape, TensorTypes(q_type, kv_type, out_type), modifiers)

    def _table(self, of: MLAPlanMetadata) -> BatchPlan:
        """Return the plan of a batch with a table, after a check of its tensors."""
        for name, given, ndim in (("block_tables", of.block_tables, 2), ("seq_lens", of.seq_lens, 1),
                                  ("cum_seq_lens_q", of.cum_seq_lens_q, 1)):  # fmt: skip
            check_operand(name, given, ndim, (torch.int32,), None)
        assert of.block_tables is not None and of.seq_lens is not None and of.cum_seq_lens_q is not None
        batch = of.block_tables.shape[0]
        check_shape("seq_lens", of.seq_lens, (batch,), "rows of block_tables")
        check_shape("cum_seq_lens_q", of.cum_seq_lens_q, (batch + 1,), "rows of block_tables + 1")
        rows = values.last_of("cum_seq_lens_q", of.cum_seq_lens_q) if of.cum_seq_lens_q.is_cpu else None
        most = None if of.max_q_len is None else check_integer("max_q_len", integer(of.max_q_len), 0)
        if most is None and rows is not None:
            most = values.longest(of.cum_seq_lens_q)
        table, lens, offsets = values.moved((of.block_tables, of.seq_lens, of.cum_seq_lens_q), self.device)
        return BatchPlan(sequences_of(table, lens, offsets), rows, None, most)

    def run(
        self, q_nope: torch.Tensor | None = None, q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None, kpe_cache: torch.Tensor | None = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, return_lse: bool = False, profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None, page_table: torch.Tensor | None = None, return_lse_base_on_e: bool = False,
        o_scale: float | None = None, *, query: Any = None, kv_cache: Any = None, ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None, kpe_scale: float | None = None,
    ) -> Any:  # fmt: skip
        """Compute attention as planned: softmax(sm_scale (q_nope ckv^T + q_pe kpe^T)) ckv.

        Args:
            q_nope: (T, H, head_dim_ckv), q_pe: (T, H, head_dim_kpe); or query: both as a pair, or one tensor with the
                columns of both side by side. T is the last element of qo_indptr.
            ckv_cache: (pages, P, head_dim_ckv), kpe_cache: (pages, P, head_dim_kpe); or kv_cache: likewise. All may
                have any strides, the last 1.
            out: (T, H, head_dim_ckv). lse: fp32 (T, H). Both are filled and returned; None: new tensors.
            return_lse: whether to return the LSE too. return_lse_base_on_e: in natural logarithms, not base 2.
            ckv_scale, kpe_scale: factors of the e4m3 values of both parts of K: floats, or fp32 tensors of one element.
                Required over e4m3 caches, None over others. If they differ, one launch more multiplies q_pe by their
                quotient, rounded to bf16.

        Returns out, or (out, lse). A row without keys gives 0 and -inf.

        NotImplementedError: profiler_buffer, kv_len, page_table, o_scale, ckv_scale_arr. Raises before any launch:
        RuntimeError without a plan; ValueError for what does not fit the plan, dtypes among it, and for a shape, stride
        or device; TypeError for another dtype.
        """
        values.refuse(profiler_buffer=profiler_buffer, kv_len=kv_len, page_table=page_table, o_scale=o_scale)
        self._plan_of_run()
        check_flag("return_lse_base_on_e", return_lse_base_on_e)
        types = self._types
        q, q_rope = self._parts("query", query, ("q_nope", q_nope), ("q_pe", q_pe), "q_data_type", types.q)
        k, k_rope = self._parts(
            "kv_cache", kv_cache, ("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache), "kv_data_type", types.kv
        )
        if ckv_scale_arr is not None or types.kv is E4M3:
            self._check_factors(k, ckv_scale, ckv_scale_arr)
        k, k_rope = k.unsqueeze(1), None if k_rope is None else k_rope.unsqueeze(1)
        others = return_lse, return_lse_base_on_e, ckv_scale, kpe_scale
        if ckv_scale is not None or kpe_scale is not None or types.kv is E4M3:
            q_rope = self._scaled(q_rope, ckv_scale, kpe_scale)
        if (repeated := self._repeat(q, (k, k, k_rope), out, lse, others, q_rope)) is not None:
            return repeated
        _, requests, max_q_len = self._ready(q, k, k)
        return self._serve(
            others, self._scale, (None, ckv_scale, ckv_scale), signature=self._signature, q=q, k=k, v=k,
            requests=requests, max_q_len=max_q_len, return_lse=return_lse, out=out, lse=lse, q_rope=q_rope,
            k_rope=k_rope, shares_v=True,
            lse_form=LSE_NATURAL if return_lse_base_on_e else 0, record="e4m3" if k.dtype is E4M3 else "",
        )  # fmt: skip

    def _check_factors(self, k: torch.Tensor, ckv_scale: Any, ckv_scale_arr: Any) -> None:
        """Check that the factors of ckv_cache are given in one form. k: ckv_cache. The message names both as upstream's
        does. Factors of 128 columns are not supported."""
        if self._types.kv is not E4M3:
            raise ValueError(f"ckv_scale_arr: given, must be None unless kv_data_type is {E4M3}")
        if (ckv_scale is None) == (ckv_scale_arr is None):
            given = "None" if ckv_scale is None else "given"
            raise ValueError(f"Exactly one of ckv_scale or ckv_scale_arr must be given over {E4M3}; both are {given}")
        if ckv_scale_arr is not None:
            shape = (*k.shape[:2], k.shape[2] // 128)
            if tuple(check_strided("ckv_scale_arr", ckv_scale_arr).shape) != shape:
                raise ValueError(f"Invalid shape of ckv_scale_arr: {tuple(ckv_scale_arr.shape)}, must be {shape}")
            values.refuse(ckv_scale_arr=ckv_scale_arr)

    def _scaled(self, q_rope: torch.Tensor | None, ckv_scale: Any, kpe_scale: Any) -> torch.Tensor | None:
        """Return the columns of Q that multiply those of kpe_cache, times kpe_scale / ckv_scale, after a check of both:
        the kernel multiplies all logits by ckv_scale."""
        shown = [f"{name}: {type(x).__name__ if isinstance(x, torch.Tensor) else repr(x)}"
                 for name, x in (("ckv_scale", ckv_scale), ("kpe_scale", kpe_scale)) if x is not None]  # fmt: skip
        if self._types.kv is not E4M3:
            raise ValueError(f"{shown[0]}, must be None unless kv_data_type is {E4M3}")
        parts = (("ckv_scale", ckv_scale), ("kpe_scale", kpe_scale))[: 1 if q_rope is None else 2]
        factors = []
        for name, value in parts:
            if value is None:
                raise ValueError(f"{name}: None, must be given, since kv_data_type is {E4M3}")
            number, tensor = split_scale(name, value)
            check_scale(name, number, tensor, self.device)
            factors.append(number if tensor is None else tensor.reshape(()))
        if q_rope is None or ckv_scale is kpe_scale:
            return q_rope
        numbers = not any(isinstance(x, torch.Tensor) for x in factors)
        if numbers and factors[0] == factors[1]:
            return q_rope
        return (q_rope.float() * (factors[1] / factors[0])).to(q_rope.dtype)

    def _parts(
        self, name: str, joined: Any, one: tuple[str, Any], other: tuple[str, Any], planned: str, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the columns that V has and the others, None if there are none, of a query or of a cache. joined: a
        tensor or a pair, or None. one, other: otherwise, with their names. planned: the plan's argument that has their
        dtype."""
        (first, a), (second, b) = one, other
        if joined is not None:
            if a is not None or b is not None:
                raise ValueError(f"{first if a is not None else second}: given, must be None with {name}")
            if isinstance(joined, torch.Tensor):
                width = self._shape.dim_vo + self._rope
                if check_strided(name, joined, 3).shape[2] != width:
                    need = f"{width}, head_dim_ckv + head_dim_kpe"
                    raise ValueError(f"{name}: shape {tuple(joined.shape)}, must end with {need}")
                return columns_and_rope(joined, self._shape.dim_vo)
            if not isinstance(joined, tuple) or len(joined) != 2:
                raise TypeError(f"{name}: {type(joined).__name__}, must be a torch.Tensor or a pair of them")
            a, b = joined
        a = check_strided(first, a, 3)
        if b is None and not self._rope:
            return a, None
        if check_strided(second, b, 3).shape[2] != self._rope:
            raise ValueError(f"{second}: shape {tuple(b.shape)}, must end with {self._rope}, head_dim_kpe")
        if b.dtype is not dtype:
            raise ValueError(f"{second}.dtype: {b.dtype}, must be plan's {planned}, {dtype}")
        return a, b if self._rope else None

    def _keys(self, given: tuple[torch.Tensor, ...], page_size: int) -> torch.Tensor:
        return given[3]

    def _requests(self, here: tuple[torch.Tensor, ...]) -> SequenceBatch:
        return csr_sequences(here[0], here[1], here[2], here[3])


def _entries(kv_indptr: Any, qo_indptr: Any) -> Any:
    """Return the entries of kv_indptr that a batch has, as many as those of qo_indptr: callers may give more."""
    if isinstance(kv_indptr, torch.Tensor) and isinstance(qo_indptr, torch.Tensor) and kv_indptr.dim() == 1:
        return kv_indptr[: qo_indptr.shape[0]] if qo_indptr.dim() == 1 else kv_indptr
    return kv_indptr


def _metadata(given: Any, flat: tuple[Any, ...]) -> MLAPlanMetadata:
    """Return the metadata of a plan, of which one complete form must be given."""
    if given is not None:
        if not isinstance(given, MLAPlanMetadata):
            raise TypeError(f"metadata: {type(given).__name__}, must be an MLAPlanMetadata")
        for name, value in zip((*CSR_FIELDS, *DENSE_FIELDS), flat, strict=True):
            if value is not None:
                raise ValueError(f"{name}: given, must be None with metadata")
        return given
    found = MLAPlanMetadata(*flat)
    lists, table = any(t is not None for t in flat[:4]), any(t is not None for t in flat[4:])
    if lists and table:
        raise ValueError(f"{CSR_FIELDS[0]}: given, must be None with {', '.join(DENSE_FIELDS[:3])}")
    return found
