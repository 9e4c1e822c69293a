"""The static facts of an attention call, from which `dispatch` chooses a kernel. Nothing here depends on a kernel."""

from dataclasses import dataclass
from typing import NamedTuple


class Refusal(NamedTuple):
    """The reason why a kernel does not serve a request. field: of the request, or "arch"."""

    field: str
    why: str

    def __str__(self) -> str:
        return f"{self.field} {self.why}"


@dataclass(frozen=True)
class KernelRequest:
    """The static facts of a call.

    q, kv, out: "fp16", "bf16" or "e4m3"; q and kv also "e5m2"; kv also "int8"; kv and out also "nvfp4" (packed e2m1
    with an e4m3 scale factor per 16 elements). kv_scales: a key of `spec.SCALE_LAYOUTS`; "" means the only layout of
    kv. qhead_per_kvhead: query heads per KV head. rows: upper bound of the query tokens of a sequence. kv_heads: KV
    heads of all sequences together. keys: upper bound of the keys of a sequence, or of their mean if only that is
    known. visible_keys: upper bound of the keys that the tokens of a sequence see. sms: SMs of the GPU. split_kv:
    whether CTAs may share the keys of a sequence: "auto", if it pays; "always"; "fixed", at multiples of a fixed number
    of keys; "never". With the latter two, the result of a sequence does not depend, bit for bit, on the rest of its
    batch. drafts: a tree mask says which of the sequence's last tokens a token sees. skip: skip-softmax, keys with
    negligible weight may be left out. interleaved: V's scale factors are interleaved in groups of 4 tokens. source:
    "paged"; "ragged": K and V are rows of one tensor, without pages (page_size 0); or "slots": each query token has its
    own keys, rows of the cache in any order, some of which may not exist. custom_mask: a kind of
    `spec.CUSTOM_MASKS`, instead of causal. alibi: a bias that grows with the key's distance is added to the logits.
    head_scales: the scale of the logits or of the output is per query head. chunk: a token sees no key before its own
    chunk of positions; the mask is causal. prefix: all tokens of a sequence see its first keys. shares_v: V is the
    first columns of K. extra: with slots, a token also chooses keys of a second cache. record: how rows of the cache
    are packed, a key of `records.RECORDS`, of which rows of kv are made; "" if they are not. extra_record: that
    of the second cache. share_keys: with slots, the tokens of a sequence read the union of the keys that each of them
    has chosen.
    """

    q: str = "bf16"
    kv: str = "bf16"
    out: str = "bf16"
    head_dim_qk: int = 128
    head_dim_vo: int = 128
    page_size: int = 16
    qhead_per_kvhead: int = 1
    rows: int = 1 << 30
    kv_heads: int = 1
    keys: int = 1 << 30
    sms: int = 132
    split_kv: str = "auto"
    causal: bool = True
    window: bool = False
    drafts: bool = False
    soft_cap: bool = False
    skip: bool = False
    interleaved: bool = False
    source: str = "paged"
    custom_mask: str = ""
    alibi: bool = False
    head_scales: bool = False
    kv_scales: str = ""
    chunk: bool = False
    prefix: bool = False
    shares_v: bool = False
    extra: bool = False
    record: str = ""
    extra_record: str = ""
    share_keys: bool = False
    visible_keys: int = 1 << 30

    @property
    def packed_rows(self) -> int:
        """Upper bound of the query rows that share the keys of a KV head."""
        return self.rows * self.qhead_per_kvhead
