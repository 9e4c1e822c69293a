"""Attention for many query rows on Blackwell (tcgen05): prefill, and decode of more than 16 rows.

No device has run it: it compiles, and the simulator runs it. This file is plain Python: it says what the kernel can do
(`supports`), and which spec serves a request (`candidate`). `tile_table` has the tiles and the head dims. Neither
imports the DSL, because a process that runs a bundle has none.
"""

from dataclasses import replace

from ... import archs
from ..request import KernelRequest, Refusal
from ..spec import (
    DTYPES,
    AttentionSpec,
    LogitsSpec,
    MaskSpec,
    exact_logits,
    exact_mask,
    general_mask,
    is_plain,
    kv_spec,
    outputs,
    padded_dims,
    refuse_dims,
    refuse_types,
)
from .tile_table import (
    FP8,
    HEAD_DIMS,
    KEYS,
    MAX_TILE_VO,
    QUANTISED_HEAD_DIMS,
    SPLIT_TYPES,
    Sm100TileConfig,
    column,
    kind_of,
    num_groups,
    resources,
    split_tile_of,
    tile_of,
)

ARCHS = archs.having(archs.TCGEN05)
SPLIT_ROWS = 16  # up to so many rows per request and KV head, `decode` reads keys as fast and computes less
Spec = AttentionSpec[Sm100TileConfig]


def padded(kv: str, dims: tuple[int, int]) -> tuple[int, int]:
    """Return the head dims with which a kernel over K and V of type `kv` computes."""
    return padded_dims(dims, HEAD_DIMS if kv in DTYPES else QUANTISED_HEAD_DIMS)


def split_candidate(p: KernelRequest) -> Spec:
    """Return the spec of a kernel that splits keys. Its tile is None if the request has too few rows or another
    head_dim; `supports_split` refuses that, and everything else that the kernel cannot do."""
    modified = p.window or p.soft_cap
    dims = p.head_dim_qk, p.head_dim_vo
    tile = split_tile_of(p.q, p.kv, dims) if p.packed_rows > SPLIT_ROWS else None
    mask = replace(exact_mask(p), window=modified)
    logits = replace(exact_logits(p), soft_cap=modified)
    out = (p.out,) if p.out in DTYPES else outputs(p.q, p.out)
    return AttentionSpec(p.q, kv_spec(p), out, *dims, mask, logits, "stream_k", tile)


def candidate(request: KernelRequest, arch: str, split: bool = False) -> Spec:
    """Return the spec that would serve a request, with whole tiles or with split keys, if `supports` accepts it."""
    if split:
        return split_candidate(request)
    p, dims = request, (request.head_dim_qk, request.head_dim_vo)
    plain = is_plain(p)
    out = (p.out,) if plain else outputs(p.q, p.out)[: 1 if p.out in DTYPES and p.q in DTYPES else 3]
    mask = exact_mask(p) if plain else general_mask(p)
    logits = LogitsSpec(soft_cap=not plain, skip=p.skip, alibi=p.alibi)
    kv, tile = kv_spec(p), tile_of(p.q, p.kv, padded(p.kv, dims), arch)
    if tile is not None and tile.m == 256 and not p.skip:  # the rule of skipping depends on the blocks before
        tile = replace(tile, has_half_tiles=True)
    return AttentionSpec(p.q, kv, out, *dims, mask, logits, tile=tile)


def supports(spec: Spec) -> Refusal | None:
    """Return None if the kernel runs `spec`, else the reason why not. Nothing else says what the kernel can do."""
    if spec.kv.shares_v:
        return Refusal("shares_v", "True: the kernel loads V as a tensor of its own")
    if spec.kv.source == "slots":
        return Refusal("source", "slots: the kernel reads no keys that a token chooses")
    if spec.kv.scales and spec.q not in DTYPES:
        return Refusal("kv_scales", f"{spec.kv.scales}: the kernel has factors of rows with 16-bit queries")
    if spec.schedule == "stream_k":
        return supports_split(spec)
    if refusal := refuse_types(spec):
        return refusal
    dims = padded(spec.kv.dtype, spec.dims)
    if refusal := refuse_dims(spec, dims, column(kind_of(spec.q, spec.kv.dtype))):
        return refusal
    if spec.mask.tree:
        return Refusal("drafts", "True: the kernel has no tree mask")
    if spec.logits.head_scales:
        return Refusal("head_scales", "True: must be False, since every kernel takes scales per head")
    t, o_tiles = spec.tile, -(-dims[1] // MAX_TILE_VO)
    m = 128 * num_groups(dims[1] // o_tiles)
    if t is None or (t.m, t.o_tiles, t.load_warps) != (m, o_tiles, 1) or t.n not in KEYS:
        keys = ", ".join(map(str, KEYS))
        return Refusal("tile", f"{t}: m must be {m}, n one of {keys}, o_tiles {o_tiles} and load_warps 1")
    if t.has_half_tiles and (m < 256 or spec.logits.skip):
        return Refusal("tile", f"{t}: has_half_tiles needs m = 256 and no skip-softmax")
    if spec.kv.dtype != spec.q and t.q_stages != 1:  # else row scales may be overwritten before softmax reads them
        return Refusal("tile", f"{t}: q_stages must be 1 over a quantised cache")
    return resources(spec, t, padded(spec.kv.dtype, spec.dims)).refusal(t)


def supports_split(spec: Spec) -> Refusal | None:
    """Do the same as `supports` for a kernel in which CTAs share keys."""
    if spec.tile is None or split_tile_of(spec.q, spec.kv.dtype, spec.dims) is None:
        types = ", ".join(f"{q} over {kv}" for q, kv in SPLIT_TYPES)
        dims = " and ".join(str(dim) for dim, _ in column("split"))
        return Refusal("rows", f"split: serves more than {SPLIT_ROWS} rows per request, {types}, with head_dim {dims}")
    if spec.kv.source != "tma" or spec.out not in [(t,) for t in DTYPES if t == spec.q or spec.q == FP8]:
        return Refusal("rows", "split: serves 16-bit outputs, of the query's type if it has 16 bits, and pages of TMA")
    window, soft_cap = (spec.mask.window, spec.logits.soft_cap) if spec.kv.dtype in DTYPES else (False, False)
    if spec.mask != MaskSpec("always", window) or spec.logits != LogitsSpec(soft_cap):
        return Refusal("rows", "split: serves causal masks, and over 16-bit caches windows and soft caps")
    t = spec.tile
    if t.m != 128 or t.n not in KEYS or t.load_warps != 1 or t.has_half_tiles:
        return Refusal("tile", f"{t}: m must be 128, n one of {', '.join(map(str, KEYS))}, and load_warps 1")
    if spec.kv.dtype != spec.q and t.q_stages != 1:
        return Refusal("tile", f"{t}: q_stages must be 1 over a quantised cache")
    return resources(spec, t, padded(spec.kv.dtype, spec.dims)).refusal(t)
