"""Attention over latents, most of them packed, for few query rows: keys are the M side of the MMAs, so that 8 heads
cost 8.

This file is plain Python: it states what the kernel can do (`supports`) and which spec serves a request (`candidate`).
`tile_table` has the tiles. Neither imports the DSL, because a process that runs a bundle has none.
"""

from dataclasses import replace

from ... import archs
from ..request import KernelRequest, Refusal
from ..spec import DTYPES, AttentionSpec, LogitsSpec, MaskSpec, exact_logits, exact_mask, kv_spec
from .tile_table import DIMS, MOST_ROWS, PITCH, PLAIN, LatentTileConfig, records, smem_bytes, tile_of
from .tile_table import HEAD_DIMS as HEAD_DIMS

ARCHS = archs.having(archs.WGMMA)
Spec = AttentionSpec[LatentTileConfig]
TOKENS_PER_SM = 4  # beyond which a batch has so many tiles that no keys need to be split


def candidate(request: KernelRequest, arch: str, split: bool = True) -> Spec:
    """Return the spec that would serve a request; `supports` says whether the kernel can. Its tile is None if it has
    too many rows, or if bits may not depend on their number. With slots, that is the number of heads in any batch.
    Rows of 16 bits are faster here only if there are many tokens, each with keys of its own."""
    p = request
    if p.record:
        serves = p.source == "slots" or p.split_kv in ("auto", "always")
    else:
        many = p.split_kv == "auto" and p.kv_heads > TOKENS_PER_SM * p.sms
        serves = p.source == "slots" and (many or p.split_kv == "never")
    tile = tile_of(p.packed_rows, p.record) if serves and split and p.packed_rows <= MOST_ROWS else None
    out = (p.out,) if p.out in DTYPES else ("bf16",)
    mask, logits = exact_mask(p), exact_logits(p)
    return AttentionSpec(p.q, kv_spec(p), out, p.head_dim_qk, p.head_dim_vo, mask, logits, "stream_k", tile)


def supports(spec: Spec) -> Refusal | None:
    """Return None if the kernel runs `spec`, else the reason why not: the only statement of what the kernel can do."""
    kv = spec.kv
    for record in records(spec):
        if not kv.shares_v or record not in PITCH or kv.dtype != "bf16" or kv.source == "tma":
            return Refusal("record", f"{record or 'rows'}: the kernel reads {', '.join(PITCH)}, with V in K")
        if spec.q != "bf16" and (spec.q, record) != ("e4m3", "e4m3"):
            return Refusal("q", f"{spec.q} over {record}: the kernel has bf16, or e4m3 over e4m3 with one scale")
        if spec.dims not in DIMS[record]:
            return Refusal("head_dim", f"{spec.dims}: over {record}, the kernel has {DIMS[record]}")
    if spec.tile is None:
        return Refusal("rows", f"the kernel has up to {MOST_ROWS}, and bits depend on their number")
    if spec.out[0] not in DTYPES or len(spec.out) > 1:
        return Refusal("out", f"{', '.join(spec.out)}: the kernel has {', '.join(DTYPES)}")
    if replace(spec.mask, causal="always") != MaskSpec() or spec.mask.causal == "value":
        return Refusal("mask", f"{spec.mask}: the kernel has the causal mask, or none")
    if spec.logits != LogitsSpec():
        return Refusal("logits", f"{spec.logits}: the kernel has no soft cap, and one scale for all heads")
    if kv.union:
        return Refusal("share_keys", "True: the kernel reads the keys of each token")
    if kv.extra and (kv.source != "slots" or PLAIN in records(spec)):
        return Refusal("extra", "True: the kernel reads a second cache only by slots, and only of packed rows")
    if spec.schedule != "stream_k":
        return Refusal("schedule", f"{spec.schedule}: the kernel has stream_k")
    known = tile_of(spec.tile.m, kv.record)
    if spec.tile != known:
        return Refusal("tile", f"{spec.tile}: must be {known}")
    return smem_bytes(spec).refusal(spec.tile)
