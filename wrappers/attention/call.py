"""The tensors of an attention call in one form, whatever its signature. Nothing here reads or checks values."""

from itertools import count
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensor

from cute_kernels.attention.spec import LSE_MAX

from ..fp4 import FP4Tensor
from ..host import machine

_Tensor = torch.Tensor  # module globals: each saves an attribute look-up, 20 ns
_strided = torch.strided


class SequenceBatch(NamedTuple):
    """Where the tokens of each request are.

    form: "table", a row of pages per request; "csr", the pages of all requests one after another (`csr_sequences`);
    "ragged", K and V without pages (`ragged_sequences`); "slots", rows of the cache per query token (`slot_sequences`).
    """

    page_table: torch.Tensor  # (B, 2, M) int32: [:, 0] pages of K, [:, 1] pages of V; csr: (1, 2, N); ragged: (1, 2, 0)
    # (B,) int32: keys; csr: keys in the last page, except where V lies in K; ragged: (0,); slots: (B / n,)
    kv_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None  # (B + 1,) int32; None: every request has max_q_len tokens
    batch: int
    shape_id: int | None  # a number for the properties that a plan depends on (shapes); None: something traces the call
    unsigned: bool = False  # the caller's lengths are uint32
    kv_starts: torch.Tensor | None = None  # (B + 1,) int32, offsets in page_table (csr) or rows of K (ragged)
    form: str = "table"


class Rope(NamedTuple):
    """Rotary embedding of Q and K over the whole head_dim D, in halves, rounded to 16 bits before Q K^T.

    Dimension d is rotated with d + D / 2: for a token at position x, by x / scale * theta ** (-2 d / D) radians.
    """

    scale: float = 1.0
    theta: float = 1e4


class AttentionCall(NamedTuple):
    """An attention call, as the kernels and the reference take it: the one statement of its arguments.

    The torch operator's schema (`op`), the key of its plan and the arguments of a launch (`plan`) follow from these
    fields. None stands for an argument that is absent. k and v hold values of 16 bits, e4m3, e5m2 or int8, or packed
    e2m1 (uint8, last dimension D / 2). k_scales and v_scales are the scale factors of packed e2m1, one per 16 elements,
    or of 8 bits, one per token and head.
    """

    signature: str  # the public function that was called, a key of `checks.SIGNATURES`
    q: torch.Tensor  # (T, Hq, Dqk)
    k: torch.Tensor  # (pages, Hkv, P, Dqk); ragged: (1, Hkv, rows, Dqk)
    v: torch.Tensor  # (pages, Hkv, P, Dvo), its number of pages may differ from k's; ragged: (1, Hkv, rows, Dvo)
    requests: SequenceBatch
    max_q_len: int  # upper bound of the query lengths; steers the schedule

    # Values that are part of a plan (`OPTIONS`).
    scale: float  # factor on the logits, natural units
    out_scale: float = 1.0  # factor on the normalised output
    causal: bool = True
    window_left: int = -1  # negative: off
    range_left: int = -1  # keys before a token's position minus this are not in its range (`ranges`); negative: off
    chunk: int = 0  # a token sees no key before its own chunk of this many positions; 0: off; needs causal
    soft_cap: float | None = None  # 0: off
    skip: float | None = None  # skip-softmax's threshold times kv_len; 0: off
    interleaved: bool = False  # v_scales are interleaved, as `fp4.deinterleave_v_scales` describes
    # May CTAs share a request's keys: "auto", "fixed" or "never", see `KernelRequest`. No public function asks for its
    # fourth value, "always", which benchmarks and tests put into requests.
    split_kv: str = "auto"
    return_lse: bool = False
    enable_pdl: bool | None = None  # None: on
    out_dtype: torch.dtype | str | None = None  # "nvfp4", or a dtype; None: that of out, else that of q
    out_sf_scale: float | None = None  # NVFP4's forward scale
    rope: Rope | None = None  # rotation of Q and K, which are given without it
    # v is k, and q_rope and k_rope are what scores multiply beside: Dqk is Dvo and their columns
    shares_v: bool = False
    lse_form: int = 0  # with shares_v, how lse differs: bits of `cute_kernels.attention.spec.LSE_*`
    # With shares_v, how rows of k are packed, a key of `cute_kernels.records.RECORDS`: k is (pages, 1, P, bytes)
    # uint8 or, in record "e4m3", values like those of k and k_rope otherwise. "": not packed
    record: str = ""
    extra_record: str = ""  # likewise, of extra_k
    # With slots, consecutive tokens read the union of their keys; the bits of a token then depend on its neighbours
    share_keys: bool = False

    out: torch.Tensor | FP4Tensor | None = None  # (T, Hq, Dvo)
    lse: torch.Tensor | None = None  # (T, Hq) fp32, base 2, sink included; with LSE_MAX (T, 2 Hq)

    # Tensors that are read and that a call may lack (`OPTIONAL`).
    sinks: torch.Tensor | None = None  # (Hq,) fp32, natural-log units
    # Another factor on the logits: fp32, one element, or in the prefill family one per query head. It is in host memory
    # only if something traces the call.
    scale_tensor: torch.Tensor | None = None
    out_scale_tensor: torch.Tensor | None = None  # likewise, on the output
    # (pages, Hkv, P, Dqk / 16) e4m3, which `op.serve` makes of a caller's uint8; or (pages, Hkv, P) fp32
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None  # likewise, with Dvo
    drafts: torch.Tensor | None = None  # (T, W) int32, replaces causal: bit t of a token's row: it sees draft t
    custom_mask: torch.Tensor | None = None  # (N,) uint8, replaces causal: bits of (query row, key), lowest first
    mask_starts: torch.Tensor | None = None  # (B + 1,) int32: byte of custom_mask where a request's bits begin
    ranges: torch.Tensor | None = None  # (T, 2) int32: a token sees keys [0] to [1], too; window_left bounds the others
    prefix_lens: torch.Tensor | None = None  # (B,) int32: all tokens of a request see its first so many keys, too
    alibi_slopes: torch.Tensor | None = None  # (Hq,) fp32: slope * (key - query row) is added to a logit before the cap
    # With shares_v, columns of Q and K behind those of q and k: (T, Hq, D) and (pages, Hkv, P, D) of the dtype of q
    q_rope: torch.Tensor | None = None
    k_rope: torch.Tensor | None = None
    # With slots, a second cache, which has keys of the same rows: as k, k_rope, the page table and kv_lens
    extra_k: torch.Tensor | None = None
    extra_k_rope: torch.Tensor | None = None
    extra_slots: torch.Tensor | None = None  # (T, K) int32
    extra_lens: torch.Tensor | None = None

    @property
    def dim_qk(self) -> int:
        return self.q.shape[2] + (0 if self.q_rope is None else self.q_rope.shape[2])

    @property
    def dim_vo(self) -> int:
        if self.record:
            return self.q.shape[2]
        return self.v.shape[3] * (2 if self.v.dtype is torch.uint8 else 1)

    @property
    def kv_scales(self) -> str:
        """Return how elements of K and V share scale factors, a key of `cute_kernels.attention.spec.SCALE_LAYOUTS`; ""
        means the only layout of the dtype."""
        return "token" if self.k_scales is not None and self.k_scales.dtype is torch.float32 else ""

    @property
    def custom(self) -> str:
        """Return the kind of the mask that replaces causal, of `cute_kernels.attention.spec.CUSTOM_MASKS`."""
        return "bits" if self.custom_mask is not None else "ranges" if self.ranges is not None else ""

    @property
    def lse_columns(self) -> int:
        """Return the columns of the LSE."""
        return self.q.shape[1] * (2 if self.lse_form & LSE_MAX else 1)

    @property
    def result_dtype(self) -> torch.dtype | str:
        """Return the dtype of the output: out_dtype, else that of out, else that of q."""
        if self.out_dtype is not None:
            return self.out_dtype
        return self.q.dtype if self.out is None else self.out.dtype


OPTIONS = slice(AttentionCall._fields.index("scale"), AttentionCall._fields.index("out"))
OPTIONAL = slice(AttentionCall._fields.index("sinks"), None)


class TableLayout(NamedTuple):
    """How a signature passes the page table and lengths.

    name: the argument's name. shared: the table is (B, M), with K and V on the same entries; otherwise it is (B, 2, M).
    column: lengths may be (B, 1).
    """

    name: str = "block_tables"
    shared: bool = True
    column: bool = False


SHARED, SEPARATE = TableLayout(), TableLayout(shared=False)
MOST_NUMBERS = 4096
_numbers: dict[tuple[Any, ...], int] = {}  # shapes -> their number, which is never reused
_next = count()
_nothing: dict[torch.device, tuple[torch.Tensor, ...]] = {}  # a page table and lengths without elements
MOST_KEPT = 8  # a model with one full layer to five window layers has six tables in vLLM, seven with padding
_kept: tuple[tuple[Any, ...], ...] = ()  # calls of `sequences_of` and their results, the latest first


def sequences_of(
    table: Any, lens: Any, offsets: Any, plain: bool = True, layout: TableLayout = SHARED
) -> SequenceBatch:
    """Return the requests of a page table, lengths (int32 or uint32) and query offsets.

    Values may be of any type: those that do not fit stay unchanged for `checks`, and get a shape_id that no plan has.
    Only a table of another rank is refused here.

    plain: False if something traces the call. Then views must be made anew, and there is no shape_id.

    The results of the last few different calls are kept for the same tensors: within a step, all layers of a model that
    have a table in common pass the same objects, and new views cost 2.5 us. Sizes, strides and addresses are compared
    too, since an object may have been resized or given other memory. The tuple is replaced as a whole, so threads may
    lose a result but never find a wrong one. Nothing is kept of a captured call (`HostMachine.may_keep`).
    """
    global _kept
    if not plain:
        return _views(table, lens, offsets, layout)
    kept = _kept
    for at, (kept_table, kept_lens, kept_offsets, kept_layout, known) in enumerate(kept):
        if table is kept_table and lens is kept_lens and offsets is kept_offsets and layout is kept_layout:
            shape, stride, address, size, lens_memory, found = known
            same = (table.shape == shape and table.stride() == stride and table.data_ptr() == address
                    and lens.numel() == size
                    and (lens is found.kv_lens or (lens.data_ptr(), lens.stride()) == lens_memory)
                    and (offsets is None or offsets.numel() == size + 1))  # fmt: skip
            if same and not at:
                return found
            kept = kept[:at] + kept[at + 1 :]
            if same:
                _kept = ((table, lens, offsets, layout, known), *kept)
                return found
            break
    found = new_sequences(table, lens, offsets, layout)
    if found.batch < 0 or not machine.current.may_keep(table.device):
        return found
    if offsets is None or offsets.numel() == found.batch + 1:
        known = table.shape, table.stride(), table.data_ptr(), lens.numel(), (lens.data_ptr(), lens.stride()), found
        _kept = ((table, lens, offsets, layout, known), *kept[: MOST_KEPT - 1])
    return found


def new_sequences(table: Any, lens: Any, offsets: Any, layout: TableLayout) -> SequenceBatch:
    """Return the same as `sequences_of` for a call that nothing traces, and keep nothing."""
    made = _views(table, lens, offsets, layout)
    if made.batch < 0 or any(isinstance(t, FakeTensor) for t in (table, lens, offsets)):
        return made._replace(batch=-1, shape_id=next(_next))
    return _numbered(made, (made.page_table.shape, made.kv_lens.shape, None if offsets is None else offsets.shape))


def csr_sequences(
    qo_indptr: Any, kv_indptr: Any, indices: Any, last_page_len: Any, plain: bool = True
) -> SequenceBatch:
    """Return requests with pages that are stored one after another in indices (N,).

    The pages of request b are indices[kv_indptr[b]:kv_indptr[b + 1]]; the last of them holds last_page_len[b] rows. All
    tensors are int32; K and V share the pages. plain: as in `sequences_of`. The shape_id does not depend on N. Values
    may be of any type, as in `sequences_of`, but indices of another rank are refused.
    """
    if not _strided_all(kv_indptr, indices, last_page_len, qo_indptr):
        return SequenceBatch(
            indices, last_page_len, qo_indptr, -1, next(_next) if plain else None, False, kv_indptr, "csr"
        )
    if indices.dim() != 1:
        raise ValueError(f"paged_kv_indices: shape {tuple(indices.shape)}, must have 1 dimension")
    table = indices.as_strided((1, 2, indices.shape[0]), (0, 0, indices.stride(0)))
    return listed_sequences(table, last_page_len, qo_indptr, kv_indptr, "csr", plain)


def ragged_sequences(qo_indptr: Any, kv_indptr: Any, plain: bool = True) -> SequenceBatch:
    """Return requests with the keys kv_indptr[b]:kv_indptr[b + 1], int32 (B + 1,), of K and V without pages."""
    if not _strided_all(kv_indptr, kv_indptr, kv_indptr, qo_indptr):
        return SequenceBatch(
            kv_indptr, kv_indptr, qo_indptr, -1, next(_next) if plain else None, False, kv_indptr, "ragged"
        )
    nothing = _nothing.get(kv_indptr.device) if plain else None  # a trace must not depend on what is kept
    if nothing is None or kv_indptr.__class__ is not _Tensor:
        nothing = tuple(kv_indptr.new_empty(shape, dtype=torch.int32) for shape in ((1, 2, 0), (0,)))
        if plain and kv_indptr.__class__ is _Tensor:
            _nothing[kv_indptr.device] = nothing
    table, lens = nothing
    return listed_sequences(table, lens, qo_indptr, kv_indptr, "ragged", plain)


def slot_sequences(slots: Any, lens: Any, plain: bool = True) -> SequenceBatch:
    """Return requests, of equally many query tokens, with slots (B, K) int32 of the rows of the cache that are keys.

    Slots count rows from page to page; a slot that the cache does not have is no key. lens: (B / n,) int32, the slots
    that count of n requests in turn. plain: as in `sequences_of`. Values may be of any type, as there.
    """
    if (
        not isinstance(slots, _Tensor)
        or slots.dim() != 2
        or not isinstance(lens, _Tensor)
        or slots.layout is not _strided
    ):
        return SequenceBatch(slots, lens, None, -1, next(_next) if plain else None, form="slots")
    (tokens, width), (row, entry) = slots.shape, slots.stride()
    table = slots.as_strided((tokens, 2, width), (row, 0, entry))
    made = SequenceBatch(table, lens, None, tokens, None, form="slots")
    if not plain:
        return made
    if isinstance(slots, FakeTensor) or isinstance(lens, FakeTensor):
        return made._replace(batch=-1, shape_id=next(_next))
    return _numbered(made, ("slots", table.shape, lens.shape))


def listed_sequences(table: Any, lens: Any, offsets: Any, starts: Any, form: str, plain: bool = True) -> SequenceBatch:
    """Return requests of strided tensors in a form that has no table with a row per request."""
    made = SequenceBatch(
        table, lens, offsets, starts.shape[0] - 1 if starts.dim() == 1 else -1, None, False, starts, form
    )
    if not plain:
        return made
    if any(isinstance(t, FakeTensor) for t in (table, lens, offsets, starts)):
        return made._replace(batch=-1, shape_id=next(_next))
    shape_id = (form, table.shape[:2], lens.shape, starts.shape, None if offsets is None else offsets.shape)
    return _numbered(made, shape_id)


def renumbered(r: SequenceBatch) -> SequenceBatch:
    """Return the requests of a copy or of another process, in which their shape_id has another meaning."""
    if r.shape_id is None:
        return r
    if r.form == "table":
        return new_sequences(r.page_table, r.kv_lens, r.cu_seqlens_q, SEPARATE)._replace(unsigned=r.unsigned)
    if r.form == "slots":
        return slot_sequences(r.page_table[:, 0], r.kv_lens)
    return listed_sequences(r.page_table, r.kv_lens, r.cu_seqlens_q, r.kv_starts, r.form)


def _strided_all(starts: Any, table: Any, lens: Any, offsets: Any) -> bool:
    given = (starts, table, lens) if offsets is None else (starts, table, lens, offsets)
    return all(isinstance(t, _Tensor) and t.layout is _strided for t in given)


def _numbered(made: SequenceBatch, shape_id: tuple[Any, ...]) -> SequenceBatch:
    if len(_numbers) >= MOST_NUMBERS:  # a caller may vary shapes for ever
        _numbers.clear()
    return made._replace(shape_id=_numbers.setdefault(shape_id, next(_next)))


def _views(table: Any, lens: Any, offsets: Any, layout: TableLayout) -> SequenceBatch:
    """Return requests without a shape_id; batch is -1 if a value is not a strided tensor."""
    given = isinstance(table, _Tensor) and isinstance(lens, _Tensor) and isinstance(offsets, (_Tensor, type(None)))
    if not given or not lens.dim() or lens.layout is not _strided or table.layout is not _strided:
        return SequenceBatch(table, lens, offsets, -1, None)
    if table.dim() != (2 if layout.shared else 3):
        raise ValueError(f"{layout.name}: shape {tuple(table.shape)}, must have {2 if layout.shared else 3} dimensions")
    if layout.column and lens.dim() == 2 and lens.shape[1] == 1:
        lens = lens.squeeze(1)
    unsigned = lens.dtype == torch.uint32
    if unsigned:
        lens = lens.view(torch.int32)
    if layout.shared:
        (batch, width), (row, entry) = table.shape, table.stride()
        table = table.as_strided((batch, 2, width), (row, 0, entry))
    return SequenceBatch(table, lens, offsets, lens.shape[0], None, unsigned)
