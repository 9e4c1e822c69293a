"""What a call asks of an attention kernel, in static terms. No kernel word in it: dispatch decides what runs."""

from dataclasses import dataclass
from typing import NamedTuple


class Refusal(NamedTuple):
    """Why a kernel does not serve a problem. field: of the problem, or "arch"."""

    field: str
    why: str

    def __str__(self) -> str:
        return f"{self.field} {self.why}"


@dataclass(frozen=True)
class KernelRequest:
    """Types: "fp16", "bf16", "e4m3", of q and kv also "e5m2", of kv and out also "nvfp4" (packed e2m1 with an e4m3
    scale factor per 16).

    phase: "prefill", or "decode": few query tokens a request, whose keys are worth sharing among CTAs. rows: upper
    bound of the query tokens of one request. group: query heads of a KV head. drafts: a mask of bits says which of the
    request's last tokens a token sees. skip: keys that hardly count may be left out. interleaved: V's scale factors
    are, of 4 tokens each. batch_invariant: a request's bits must not depend on the rest of its batch. source: of K and
    V, "paged", or "ragged": rows of one tensor, without pages (page_size 0). custom_mask: a mask of bits, instead of
    causal, says which keys a token sees. alibi: logits get a bias that grows with the key's distance. head_scales: the
    factor on the logits or on the output is one a query head.
    """

    q: str = "bf16"
    kv: str = "bf16"
    out: str = "bf16"
    head_dim_qk: int = 128
    head_dim_vo: int = 128
    page_size: int = 16
    qhead_per_kvhead: int = 1
    rows: int = 1 << 30
    phase: str = "prefill"
    causal: bool = True
    window: bool = False
    drafts: bool = False
    soft_cap: bool = False
    skip: bool = False
    interleaved: bool = False
    batch_invariant: bool = False
    source: str = "paged"
    custom_mask: bool = False
    alibi: bool = False
    head_scales: bool = False
