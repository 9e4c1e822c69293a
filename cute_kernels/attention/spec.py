"""The static facts of an attention kernel: the compile key, the artifact's name and the test id.

Features are static, values are dynamic. Everything that a spec does not name (lengths, page size, strides, scales,
presence of sinks and LSE, PDL) is an argument of every kernel. A feature that a spec has, such as a window or a soft
cap, may be off in a call; see `args`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

from ..dtypes import BITS
from .request import KernelRequest, Refusal
from .tile import TileConfig

T = TypeVar("T", bound=TileConfig)

DTYPES = ("bf16", "fp16")  # of 16 bits
QUANTISED = ("e4m3", "e5m2", "int8", "nvfp4")  # types of K and V that kernels convert to fp16 (`quant`)
CACHES = {  # type of queries -> types of K and V
    "bf16": ("bf16", *QUANTISED),
    "fp16": ("fp16", *QUANTISED),
    "e4m3": ("e4m3", *(kv for kv in QUANTISED if kv != "e4m3")),
    "e5m2": ("e5m2",),
}
CUSTOM_MASKS = {"": "", "bits": "m", "ranges": "r"}  # kind of custom mask (`custom_mask`) -> letter in names; "": none
MASK_LIST_HEADER = 3  # words of a list of KV blocks before its blocks (`mask_blocks`)
SF_VEC_SIZE = 16  # elements that share a scale factor of NVFP4
TMA_PAGES = (8, 16, 32, 64, 128, 256)  # page sizes, in rows, that TMA loads
HEAD_DIM_UNIT = 16  # head dims are multiples of it: rows of TMA_BYTES in 8 bits, a scale factor of NVFP4
TMA_BYTES = 16  # strides of rows that TMA loads are multiples of it
MAX_PADDED_DIM = 256  # no smaller head dim is padded to a larger one than this
PACK_GQA_MAX_Q = 64  # PackGQA for sequences of at most this many query tokens,
PACK_GQA_MAX_GROUP = 1024  # and at most this many query heads per KV head: row * heads < 2^30, for `Divisor`


class ScaleLayout(NamedTuple):
    """How the elements of a row of K or V share scale factors, which lie in tensors beside the cache.

    vec: elements that share a factor; 0: there is none; ROW: the whole row. factor_bytes: of a factor. letter: in
    names.
    """

    vec: int
    factor_bytes: int
    letter: str = ""

    @property
    def exists(self) -> bool:
        """Whether factors lie beside the cache."""
        return self.vec > 0

    @property
    def of_rows(self) -> bool:
        """Whether a whole row shares a factor, so that it multiplies a column of scores, or of P."""
        return self.vec == ROW

    def row_bytes(self, dim: int) -> int:
        """Return the bytes of the factors of a row of `dim` elements."""
        return self.factor_bytes * (1 if self.of_rows else dim // self.vec) if self.exists else 0


# Bits of `args.OutArgs.lse_form`: natural logarithm; +inf for a row without keys; the sink does not count; behind the
# LSE of all heads there are the largest logits of all heads, in natural units, -inf for a row without keys
LSE_NATURAL, LSE_INF, LSE_OF_KEYS, LSE_MAX = 1, 2, 4, 8
UNION_TOKENS = 8  # the most tokens of a sequence that share their keys: each is a bit of a byte
UNION_ROWS = 64  # the most rows of these tokens, those of a tile
UNION_HEADS = (8, 16, 24, 32)  # their query heads: a token has whole groups of 8 rows, and two tokens fit in a tile
EXTRA_UNIT = 64  # keys of a second cache begin at a multiple of it, so that a KV block has keys of one cache
ROW = 1 << 30  # `ScaleLayout.vec`
SCALE_LAYOUTS = {  # of `KVSpec.scales`
    "": ScaleLayout(0, 0),  # none, or one for the whole cache or for each head, which a launch has as a value
    "block": ScaleLayout(SF_VEC_SIZE, 1),  # e4m3
    "token": ScaleLayout(ROW, 4, "t"),  # fp32, per token and head
}
DEFAULT_SCALES = {"nvfp4": "block"}  # type of the cache -> the only layout that it has


@dataclass(frozen=True)
class KVSpec:
    """The KV cache. dtype: storage type of K and V. source: "tma", pages of `TMA_PAGES` rows or ragged rows, loaded by
    TMA; "gather", pages of any size, loaded row by row; or "slots", rows that are named one by one. scales: a key of
    `SCALE_LAYOUTS`; "" means the only layout of the type. shares_v: V is the first head_dim_vo columns of K. extra:
    with slots, there is a second cache, with pages and slots of its own. record: a key of `records.RECORDS`, of
    which rows of `dtype` are made as they are loaded; "" if rows are stored in it. extra_record: that of the second
    cache. union: with slots, the tokens of a sequence read the union of their keys (`key_union`)."""

    dtype: str = "bf16"
    source: str = "tma"
    scales: str = ""
    shares_v: bool = False
    extra: bool = False
    record: str = ""
    extra_record: str = ""
    union: bool = False

    @property
    def bits(self) -> int:
        """Bits per stored element."""
        return BITS[self.dtype]

    @property
    def layout(self) -> ScaleLayout:
        """How elements share scale factors."""
        return SCALE_LAYOUTS[self.scales or DEFAULT_SCALES.get(self.dtype, "")]

    @property
    def name(self) -> str:
        """The cache's part of a spec's name, apart from its source."""
        extra = f"x{self.extra_record}" if self.extra else ""
        kind = f"kv{self.record or self.dtype}{self.layout.letter}" + ("v" if self.shares_v else "")
        return kind + "u" * self.union + extra


@dataclass(frozen=True)
class MaskSpec:
    """The mask. causal: "always" (bottom-right aligned), "never", or "value": the argument `causal` decides. window: a
    sliding window, `window_left`. tree: a tree mask for draft tokens. custom: a kind of `CUSTOM_MASKS`, which says for
    each token and key of a sequence whether it is seen; requires causal "value" or "never". chunk: a token sees no key
    before its own chunk of positions. prefix: all tokens see the first keys of their sequence, as many as `prefix_lens`
    says, whatever causal says."""

    causal: str = "always"
    window: bool = False
    tree: bool = False
    custom: str = ""
    chunk: bool = False
    prefix: bool = False

    @property
    def bounded_left(self) -> bool:
        """Whether a token may not see the first keys of its sequence."""
        return self.window or self.chunk

    @property
    def name(self) -> str:
        """The mask's part of a spec's name."""
        kind = {"always": "causal", "never": "full", "value": "any"}[self.causal]
        return (
            kind
            + ("w" if self.window else "")
            + ("b" if self.tree else "")
            + CUSTOM_MASKS[self.custom]
            + ("c" if self.chunk else "")
            + ("p" if self.prefix else "")
        )


@dataclass(frozen=True)
class LogitsSpec:
    """Features between Q K^T and the softmax. skip: skip-softmax. alibi: a slope per query head. head_scales: the
    scales of the logits and of the output may be per query head."""

    soft_cap: bool = False
    skip: bool = False
    alibi: bool = False
    head_scales: bool = False


@dataclass(frozen=True)
class AttentionSpec(Generic[T]):
    """A forward attention kernel.

    q: type of Q and of P. out: types that the call may choose from; the first is the default. schedule: "tiles", one
    CTA per tile; or "stream_k", all CTAs get the same number of KV blocks and `combine` merges the splits of a tile.
    With "stream_k" all tiles are packed (PackGQA); with "tiles", those of sequences of at most `PACK_GQA_MAX_Q` query
    tokens are. tile: the op's tile config; None in a spec that no kernel serves.
    """

    q: str = "bf16"
    kv: KVSpec = field(default_factory=KVSpec)
    out: tuple[str, ...] = ("bf16",)
    head_dim_qk: int = 128
    head_dim_vo: int = 128
    mask: MaskSpec = field(default_factory=MaskSpec)
    logits: LogitsSpec = field(default_factory=LogitsSpec)
    schedule: str = "tiles"
    tile: T | None = None

    @property
    def smem_q(self) -> str:
        """The type in which Q reaches shared memory. It is q, but over packed records the role that gathers Q converts
        it to the type of the converted rows."""
        return self.kv.dtype if self.kv.record else self.q

    @property
    def dims(self) -> tuple[int, int]:
        """(head_dim_qk, head_dim_vo)."""
        return self.head_dim_qk, self.head_dim_vo

    @property
    def padded_qk(self) -> int:
        """head_dim_qk as the kernel computes with it: TMA fills the columns past head_dim_qk with zeros."""
        return padded(self.head_dim_qk, self._head_dims)

    @property
    def padded_vo(self) -> int:
        """The columns of O that a tile computes: head_dim_vo or, with `tile.o_tiles`, its part of them. Columns past
        head_dim_vo are zeros, and are not stored."""
        return padded(self.head_dim_vo, self._head_dims) // self._tile.o_tiles

    @property
    def tile_vo(self) -> int:
        """The columns of O that a tile stores."""
        return self.head_dim_vo // self._tile.o_tiles

    @property
    def _head_dims(self) -> tuple[int, ...]:
        return self._tile.head_dims(self.kv.bits)

    @property
    def _tile(self) -> T:
        if self.tile is None:
            raise ValueError("tile: None, must be the op's tile config")
        return self.tile

    @property
    def name(self) -> str:
        """A short readable name, unique among the shipped specs of an op. Prefill kernels of 16-bit queries have one
        type of outputs, or all."""
        many = len(self.out) > 1 and self.schedule == "tiles" and self.q in DTYPES
        parts = [
            self.q,
            self.kv.name if self.kv.dtype != self.q or self.kv.scales or self.kv.shares_v else "",
            "oany" if many else f"o{self.out[0]}" if self.out[0] != outputs(self.q)[0] else "",
            f"d{self.head_dim_qk}" + (f"x{self.head_dim_vo}" if self.head_dim_vo != self.head_dim_qk else ""),
            self.mask.name,
            "cap" if self.logits.soft_cap else "",
            "skip" if self.logits.skip else "",
            "alibi" if self.logits.alibi else "",
            "heads" if self.logits.head_scales else "",
            self.kv.source,
            self.tile.name if self.tile else "",
        ]
        return "_".join(filter(None, parts))


def exact_mask(request: KernelRequest) -> MaskSpec:
    """Return the mask of a request, for a kernel without any other mask. Ranges have windows of their own."""
    p, window = request, request.window and request.custom_mask != "ranges"
    return MaskSpec("always" if p.causal else "never", window, p.drafts, p.custom_mask, p.chunk, p.prefix)


def general_mask(request: KernelRequest) -> MaskSpec:
    """Return the mask of a kernel that takes the causal mask and a window as values, with the request's other masks. A
    mask of ranges has both as values of its own."""
    own = exact_mask(request)
    return own if request.custom_mask == "ranges" else replace(own, causal="value", window=True)


def exact_logits(request: KernelRequest) -> LogitsSpec:
    """Return the features between Q K^T and the softmax of a request, for a kernel without any other."""
    return LogitsSpec(request.soft_cap, request.skip, request.alibi, request.head_scales)


def is_plain(request: KernelRequest) -> bool:
    """Return whether a kernel with one mask, causal or none, and a 16-bit output serves a request, apart from a prefix,
    skip-softmax and scales per head."""
    mask, logits = replace(exact_mask(request), causal="always", prefix=False), exact_logits(request)
    return request.out in DTYPES and mask == MaskSpec() and not (logits.soft_cap or logits.alibi)


def padded(head_dim: int, known: tuple[int, ...]) -> int:
    """Return the smallest of `known` that serves a head dim; 0 if there is none, or if `head_dim` is no multiple of
    `HEAD_DIM_UNIT`. known: the head dims that a kernel computes with, ascending."""
    fits = (dim for dim in known if head_dim == dim or head_dim <= dim <= MAX_PADDED_DIM)
    return next(fits, 0) if head_dim % HEAD_DIM_UNIT == 0 < head_dim else 0


def padded_dims(dims: tuple[int, int], known: tuple[int, ...]) -> tuple[int, int]:
    """Return `padded` of (head_dim_qk, head_dim_vo)."""
    return padded(dims[0], known), padded(dims[1], known)


def refuse_types(spec: AttentionSpec[T], outs: Iterable[int] = (1, 3)) -> Refusal | None:
    """Return the reason why no attention op has the types of `spec`, or None. outs: how many of `outputs` a kernel may
    have."""
    queries, caches = (*DTYPES, "e4m3"), tuple(dict.fromkeys((spec.q, *QUANTISED)))
    for name, dtype, known in (("q", spec.q, queries), ("kv", spec.kv.dtype, caches)):
        if dtype not in known:
            return Refusal(name, f"{dtype}: the kernel has {', '.join(known)}")
    if spec.out not in [outputs(spec.q, dtype)[:count] for dtype in DTYPES for count in outs]:
        return Refusal("out", f"{', '.join(spec.out)}: the kernel has {', '.join((*DTYPES, 'e4m3', 'nvfp4'))}")
    return None


def refuse_dims(spec: AttentionSpec[T], found: tuple[int, int], known: Iterable[tuple[int, int]]) -> Refusal | None:
    """Return the reason why no tile has the head dims of `spec`, or None. found: its `padded_dims`; known: those of the
    tiles."""
    each = dict.fromkeys(known)
    if found in each:
        return None
    dims = ", ".join(map(str, each))
    return Refusal("head_dim", f"{spec.dims}: must be multiples of {HEAD_DIM_UNIT} that can be padded to one of {dims}")


def outputs(q: str, asked: str = "") -> tuple[str, ...]:
    """Return the output types of a kernel with queries of type q: one 16-bit type and the quantised ones. The 16-bit
    type is `asked`, the type that a call wants, if it has 16 bits, else q's own, or bf16."""
    usual = q if q in DTYPES else "bf16"
    return asked if asked in DTYPES else usual, "e4m3", "nvfp4"


def tokens_of_union(heads: int) -> int:
    """Return how many consecutive tokens of so many query heads share their keys; 0: they cannot share them."""
    return min(UNION_TOKENS, UNION_ROWS // heads) if heads in UNION_HEADS else 0


def kv_spec(request: KernelRequest) -> KVSpec:
    """Return the cache of a request."""
    p = request
    return KVSpec(p.kv, kv_source(p), p.kv_scales, p.shares_v, p.extra, p.record, p.extra_record, p.share_keys)


def kv_source(request: KernelRequest) -> str:
    """Return the source of K and V that serves a request. Rows of NVFP4 may be too short for TMA."""
    if request.source == "slots":
        return "slots"
    if request.record:
        return "gather"
    short = any(dim * BITS[request.kv] // 8 % TMA_BYTES for dim in (request.head_dim_qk, request.head_dim_vo))
    return "tma" if request.source == "ragged" or request.page_size in TMA_PAGES and not short else "gather"
