"""The tensors of an attention call in one form, whatever its signature. Nothing here looks at values or checks them."""

from itertools import count
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensor

from ..checks import UnknownName, check_strided
from ..fp4 import FP4Tensor

_Tensor = torch.Tensor  # module globals: an attribute look-up saved is 20 ns
_strided = torch.strided
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


class Requests(NamedTuple):
    """Where the tokens of each request are. form: "table", a row of pages for each request; "csr", the pages of all
    requests one after another (`csr_requests`); "ragged", K and V without pages (`ragged_requests`)."""

    page_table: torch.Tensor  # (B, 2, M) int32: [:, 0] pages of K, [:, 1] pages of V; csr: (1, 2, N); ragged: (1, 2, 0)
    kv_lens: torch.Tensor  # (B,) int32: keys; csr: keys in the last page; ragged: (0,)
    cu_seqlens_q: torch.Tensor | None  # (B + 1,) int32; None: every request has max_q_len tokens
    batch: int
    facts: int | None  # a number for all that a plan depends on: shapes, dtypes; None: something traces the call
    unsigned: bool = False  # the caller's lengths are uint32
    kv_starts: torch.Tensor | None = None  # (B + 1,) int32: each one's entries of page_table, or rows of K; table: None
    form: str = "table"


class Rope(NamedTuple):
    """Rotary embedding of Q and K on the whole head_dim D, in halves: dimension d turns with d + D / 2, a token at
    position x by x / scale * theta ** (-2 d / D); rounded to 16 bits before Q K^T."""

    scale: float = 1.0
    theta: float = 1e4


class Problem(NamedTuple):
    """An attention call. k and v hold values of 16 bits, e4m3 or e5m2, or packed e2m1 (uint8, last dimension D / 2)
    with k_scales and v_scales. None stands for what is absent."""

    signature: str  # the public function that was called, of `checks.SIGNATURES`
    phase: str  # "prefill"; "decode": few query tokens a request
    q: torch.Tensor  # (T, Hq, Dqk)
    k: torch.Tensor  # (pages, Hkv, P, Dqk); ragged: (1, Hkv, rows, Dqk)
    v: torch.Tensor  # (pages, Hkv, P, Dvo), of as many pages or not; ragged: (1, Hkv, rows, Dvo)
    requests: Requests
    max_q_len: int  # bound of query lengths; steers the schedule
    scale: float  # factor on the logits, natural units
    scale_tensor: torch.Tensor | None  # fp32, one element, or in the prefill family one a query head: another factor;
    # the host's only where something traces the call
    out_scale: float  # factor on the normalised output
    out_scale_tensor: torch.Tensor | None  # likewise
    causal: bool = True
    window_left: int = -1  # negative: off
    soft_cap: float | None = None  # 0: off
    sinks: torch.Tensor | None = None  # (Hq,) fp32, natural-log units
    k_scales: torch.Tensor | None = None  # (pages, Hkv, P, Dqk / 16) e4m3
    v_scales: torch.Tensor | None = None  # (pages, Hkv, P, Dvo / 16) e4m3
    interleaved: bool = False  # v_scales are, as `fp4.deinterleave_v_scales` describes
    drafts: torch.Tensor | None = None  # (T, W) int32, instead of causal: bit t of a token's row, it sees draft t
    skip: float | None = None  # skip-softmax: threshold times kv_len; 0: off
    out: torch.Tensor | FP4Tensor | None = None  # (T, Hq, Dvo)
    out_dtype: torch.dtype | str | None = None  # "nvfp4", or a dtype; None: that of out, else that of q
    out_sf_scale: float | None = None  # NVFP4's forward scale
    lse: torch.Tensor | None = None  # (T, Hq) fp32, base 2, sink included
    return_lse: bool = False
    batch_invariant: bool = False  # a request's bits do not depend on the rest of its batch
    enable_pdl: bool | None = None  # None: on
    custom_mask: torch.Tensor | None = None  # (N,) uint8, instead of causal: bits of (query row, key), lowest first
    mask_starts: torch.Tensor | None = None  # (B + 1,) int32: byte of custom_mask where a request's bits begin
    alibi_slopes: torch.Tensor | None = None  # (Hq,) fp32: slope * (key - query row) joins a logit, before the cap
    rope: Rope | None = None  # of Q and K, which are stored without

    @property
    def dim_vo(self) -> int:
        return self.v.shape[3] * (1 if self.k_scales is None else 2)

    @property
    def result_dtype(self) -> torch.dtype | str:
        """The output's: out_dtype, else out's, else the query's."""
        if self.out_dtype is not None:
            return self.out_dtype
        return self.q.dtype if self.out is None else self.out.dtype


ABSENT = (None,) * 4  # a problem's last fields, where a call has none of them
# `make_problem(Problem, (...) + ABSENT)` is `Problem(...)`, less 0.4 us: no dict, and a display of at most 30 elements,
# beyond which Python makes a list of them first
make_problem = tuple.__new__


class Form(NamedTuple):
    """How a signature gives its requests. name: of its page table. shared: that is (B, M), K and V on the same entries,
    else (B, 2, M). column: lengths may be (B, 1)."""

    name: str = "block_tables"
    shared: bool = True
    column: bool = False


SHARED, SEPARATE = Form(), Form(shared=False)
_numbers: dict[tuple[Any, ...], int] = {}  # facts -> their number, which has one meaning for ever
_next = count()
_nothing: dict[torch.device, tuple[torch.Tensor, ...]] = {}  # a page table and lengths without elements


_last: tuple[Any, ...] = (None,) * 10


def requests_of(table: Any, lens: Any, offsets: Any, plain: bool = True, form: Form = SHARED) -> Requests:
    """lens: int32 or uint32. Of any values: what does not fit stays as it is, for `checks`, and gives facts that no
    plan has; but a table of another rank is refused.

    plain: False where something traces the call: then views must be made anew, and there are no facts.

    The last result is kept, for the same tensors: all layers of a model pass the same objects in a step, and new views
    cost 2.5 us. Sizes, strides and addresses are compared too: an object may have been resized, or given other memory.
    """
    global _last
    if not plain:
        return _views(table, lens, offsets, form)
    last_table, last_lens, last_offsets, last_form, shape, stride, address, size, lens_address, found = _last
    if (table is last_table and lens is last_lens and offsets is last_offsets and form is last_form
            and table.shape == shape and table.stride() == stride and table.data_ptr() == address
            and lens.numel() == size and (lens is found.kv_lens or lens.data_ptr() == lens_address)
            and (offsets is None or offsets.numel() == size + 1)):  # fmt: skip
        return found
    found = new_requests(table, lens, offsets, form)
    if found.batch >= 0 and (offsets is None or offsets.numel() == found.batch + 1):
        size, stride, address = table.shape, table.stride(), table.data_ptr()
        _last = (table, lens, offsets, form, size, stride, address, lens.numel(), lens.data_ptr(), found)
    return found


def new_requests(table: Any, lens: Any, offsets: Any, form: Form) -> Requests:
    """As `requests_of`, of a call that nothing traces; nothing is kept."""
    made = _views(table, lens, offsets, form)
    if made.batch < 0 or any(isinstance(t, FakeTensor) for t in (table, lens, offsets)):
        return made._replace(batch=-1, facts=next(_next))
    return _numbered(made, (made.page_table.shape, made.kv_lens.shape, None if offsets is None else offsets.shape))


def csr_requests(qo_indptr: Any, kv_indptr: Any, indices: Any, last_page_len: Any, plain: bool = True) -> Requests:
    """Requests whose pages lie one after another in indices (N,): kv_indptr[b]:kv_indptr[b + 1] are those of request
    b, the last of which holds last_page_len[b] rows. All int32; K and V share the pages. plain: as in `requests_of`.

    Facts do not depend on N. Of any values, as `requests_of`; but indices of another rank are refused.
    """
    if not _strided_all(kv_indptr, indices, last_page_len, qo_indptr):
        return Requests(indices, last_page_len, qo_indptr, -1, next(_next) if plain else None, False, kv_indptr, "csr")
    if indices.dim() != 1:
        raise ValueError(f"paged_kv_indices: shape {tuple(indices.shape)}, must have 1 dimension")
    table = indices.as_strided((1, 2, indices.shape[0]), (0, 0, indices.stride(0)))
    return listed_requests(table, last_page_len, qo_indptr, kv_indptr, "csr", plain)


def ragged_requests(qo_indptr: Any, kv_indptr: Any, plain: bool = True) -> Requests:
    """Requests whose keys are rows kv_indptr[b]:kv_indptr[b + 1], int32 (B + 1,), of K and V without pages."""
    if not _strided_all(kv_indptr, kv_indptr, kv_indptr, qo_indptr):
        return Requests(kv_indptr, kv_indptr, qo_indptr, -1, next(_next) if plain else None, False, kv_indptr, "ragged")
    nothing = _nothing.get(kv_indptr.device)
    if nothing is None or not plain or kv_indptr.__class__ is not _Tensor:
        nothing = tuple(kv_indptr.new_empty(shape, dtype=torch.int32) for shape in ((1, 2, 0), (0,)))
        if plain and kv_indptr.__class__ is _Tensor:
            _nothing[kv_indptr.device] = nothing
    table, lens = nothing
    return listed_requests(table, lens, qo_indptr, kv_indptr, "ragged", plain)


def listed_requests(table: Any, lens: Any, offsets: Any, starts: Any, form: str, plain: bool = True) -> Requests:
    """Requests of a form without rows of a table, of strided tensors."""
    made = Requests(table, lens, offsets, starts.shape[0] - 1 if starts.dim() == 1 else -1, None, False, starts, form)
    if not plain:
        return made
    if any(isinstance(t, FakeTensor) for t in (table, lens, offsets, starts)):
        return made._replace(batch=-1, facts=next(_next))
    facts = (form, table.shape[:2], lens.shape, starts.shape, None if offsets is None else offsets.shape)
    return _numbered(made, facts)


def _strided_all(starts: Any, table: Any, lens: Any, offsets: Any) -> bool:
    given = (starts, table, lens) if offsets is None else (starts, table, lens, offsets)
    return all(isinstance(t, _Tensor) and t.layout is _strided for t in given)


def _numbered(made: Requests, facts: tuple[Any, ...]) -> Requests:
    if len(_numbers) >= 4096:  # shapes may vary for ever
        _numbers.clear()
    return made._replace(facts=_numbers.setdefault(facts, next(_next)))


def _views(table: Any, lens: Any, offsets: Any, form: Form) -> Requests:
    """Without facts; of a batch of -1 where a value is no strided tensor."""
    given = isinstance(table, _Tensor) and isinstance(lens, _Tensor) and isinstance(offsets, (_Tensor, type(None)))
    if not given or not lens.dim() or lens.layout is not _strided or table.layout is not _strided:
        return Requests(table, lens, offsets, -1, None)
    if table.dim() != (2 if form.shared else 3):
        raise ValueError(f"{form.name}: shape {tuple(table.shape)}, must have {2 if form.shared else 3} dimensions")
    if form.column and lens.dim() == 2 and lens.shape[1] == 1:
        lens = lens.squeeze(1)
    unsigned = lens.dtype == torch.uint32
    if unsigned:
        lens = lens.view(torch.int32)
    if form.shared:
        (batch, width), (row, entry) = table.shape, table.stride()
        table = table.as_strided((batch, 2, width), (row, 0, entry))
    return Requests(table, lens, offsets, lens.shape[0], None, unsigned)


def pair(name: str, value: Any, layout: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as (pages, Hkv, P, D) views, one torch operation each. value: (k, v), each of that shape "HND", or
    (pages, P, Hkv, D) "NHD"; or one tensor (pages, 1 or 2, ...) of both."""
    if layout != "HND" and layout != "NHD":
        raise UnknownName(f"kv_layout: {layout!r}, must be 'HND' or 'NHD'")
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise ValueError(f"{name}: a tuple of {len(value)}, must be (k, v)")
        k, v = value
        if layout == "NHD" and not (isinstance(k, _Tensor) and isinstance(v, _Tensor) and k.dim() == v.dim() == 4):
            check_strided(f"{name} (K)", k, 4)
            check_strided(f"{name} (V)", v, 4)
        return (k, v) if layout == "HND" else (k.transpose(1, 2), v.transpose(1, 2))
    shape = value.shape if isinstance(value, _Tensor) else ()
    if len(shape) != 5 or shape[1] not in (1, 2) or value.layout is not _strided:
        check_strided(name, value, 5)
        raise ValueError(f"{name}: shape {tuple(value.shape)}, the second dimension must be 1 or 2")
    if _is_dynamo_compiling():  # it sees no storage offsets
        value = value.transpose(2, 3) if layout == "NHD" else value
        return value[:, 0], value[:, -1]
    pages, both, a, b, dim = shape
    s_page, s_both, s_a, s_b, s_dim = value.stride()
    size, stride = (pages, a, b, dim), (s_page, s_a, s_b, s_dim)
    if layout == "NHD":
        size, stride = (pages, b, a, dim), (s_page, s_b, s_a, s_dim)
    k = value.as_strided(size, stride)
    return k, k if both == 1 else value.as_strided(size, stride, value.storage_offset() + s_both)
