"""Static facts of an attention kernel: the compile key, the artifact's name and the test id.

Presence is static, values are dynamic: what a spec does not name (lengths, page size, strides, scales, the presence of
sinks and LSE, PDL) is an argument of every kernel, and what it says a kernel *has*, a window, a soft cap, may be off in
a call; see `args`.
"""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .request import KernelRequest

T = TypeVar("T")  # the op's own class of tiles

DTYPES = ("bf16", "fp16")  # of 16 bits
BITS = {"bf16": 16, "fp16": 16, "e4m3": 8, "e5m2": 8, "nvfp4": 4}  # of an element, as it is stored
SF_VEC_SIZE = 16  # elements that share a scale factor of NVFP4
TMA_PAGES = (8, 16, 32, 64, 128, 256)  # rows of the pages that TMA fetches in boxes
PACK_GQA_MAX_Q = 64  # query tokens of a request, up to which the query heads of a KV head are rows of one tile
PACK_GQA_MAX_GROUP = 1024  # of those heads: a row of such a tile, times rows a token, stays below 2^30, for `Divisor`


@dataclass(frozen=True)
class KVSpec:
    """dtype: of K and V as they are stored. source: "tma", pages of `TMA_PAGES` rows, or ragged rows, fetched in boxes;
    "gather", pages of any size, row by row."""

    dtype: str = "bf16"
    source: str = "tma"

    @property
    def bits(self) -> int:
        return BITS[self.dtype]

    @property
    def block_scaled(self) -> bool:
        """Whether blocks of `SF_VEC_SIZE` elements have a scale factor."""
        return self.dtype == "nvfp4"


@dataclass(frozen=True)
class MaskSpec:
    """causal: "always" (bottom-right aligned), "never", or "value": as the call says. window: has `window_left`. bits:
    has a mask of drafts. custom: has a mask of bits for all (query, key) of a request; with causal "value"."""

    causal: str = "always"
    window: bool = False
    tree: bool = False
    custom: bool = False

    @property
    def name(self) -> str:
        kind = {"always": "causal", "never": "full", "value": "any"}[self.causal]
        return kind + ("w" if self.window else "") + ("b" if self.tree else "") + ("m" if self.custom else "")


@dataclass(frozen=True)
class LogitsSpec:
    """What a kernel has: soft_cap, skip (skip-softmax), alibi (a slope of each query head), head_scales (the factors on
    the logits and on the output may be one a query head)."""

    soft_cap: bool = False
    skip: bool = False
    alibi: bool = False
    head_scales: bool = False


@dataclass(frozen=True)
class AttentionSpec(Generic[T]):
    """A forward attention kernel. q: type of Q, and of P. out: types that the call may choose from, the first is the
    default. schedule: "tiles", whole ones, each by one CTA; "stream_k": all CTAs get the same number of KV blocks,
    whatever tile these belong to, and `combine` merges the parts of a tile. Rows of a tile are (token, query head of
    the KV head's group) with "stream_k", and with "tiles" those of a request of up to `PACK_GQA_MAX_Q` query tokens."""

    q: str = "bf16"
    kv: KVSpec = field(default_factory=KVSpec)
    out: tuple[str, ...] = ("bf16",)
    head_dim_qk: int = 128
    head_dim_vo: int = 128
    mask: MaskSpec = field(default_factory=MaskSpec)
    logits: LogitsSpec = field(default_factory=LogitsSpec)
    schedule: str = "tiles"
    tile: T = None  # type: ignore[assignment]

    @property
    def dims(self) -> tuple[int, int]:
        return self.head_dim_qk, self.head_dim_vo

    @property
    def name(self) -> str:
        """A short readable identifier, unique among the shipped specs of an op."""
        parts = [
            self.q,
            f"kv{self.kv.dtype}" if self.kv.dtype != self.q else "",
            f"o{self.out[0]}" if self.out[0] != outputs(self.q)[0] else "",
            f"d{self.head_dim_qk}" + (f"x{self.head_dim_vo}" if self.head_dim_vo != self.head_dim_qk else ""),
            self.mask.name,
            "cap" if self.logits.soft_cap else "",
            "skip" if self.logits.skip else "",
            "alibi" if self.logits.alibi else "",
            "heads" if self.logits.head_scales else "",
            self.kv.source,
            self.tile.name,  # type: ignore[attr-defined]
        ]
        return "_".join(filter(None, parts))


def outputs(q: str, asked: str = "") -> tuple[str, ...]:
    """Types that calls of a kernel that has all of them may choose from, where q is the query's and `asked` the type
    that a call asks for: one of 16 bits, which is that of q if it can be, and those that are quantised."""
    usual = q if q in DTYPES else "bf16"
    return asked if asked in DTYPES else usual, "e4m3", "nvfp4"


def kv_source(request: KernelRequest) -> str:
    """The source of K and V that serves a request."""
    return "tma" if request.source == "ragged" or request.page_size in TMA_PAGES else "gather"
