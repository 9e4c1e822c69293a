"""Decode: few query rows per sequence, on any architecture with mma.sync and TMA; on `ALONE` ones also prefill.

This file is plain Python: it states what the kernel can do (`supports`) and which spec serves a request (`candidate`).
`tile_table` has the tiles and the head dims. Neither imports the DSL: a process that runs a bundle has none.
"""

from dataclasses import replace
from typing import Any

from ... import archs
from ..request import KernelRequest, Refusal
from ..spec import (
    AttentionSpec,
    KVSpec,
    LogitsSpec,
    MaskSpec,
    exact_mask,
    kv_source,
    kv_spec,
    outputs,
    padded_dims,
    refuse_dims,
    refuse_types,
)
from .tile_table import (
    ANY,
    CTA_PER_TPC,
    DIMS_OF_KIND,
    FEW_ROWS,
    MANY,
    NARROW,
    WINDOW_KEYS,
    DecodeTileConfig,
    TileKey,
    kind_of,
    least_bytes,
    many_from,
    measured,
    tiles_of,
    with_row_bytes,
)
from .tile_table import (
    HEAD_DIMS as HEAD_DIMS,
)
from .tile_table import (
    MANY_PER_SM as MANY_PER_SM,
)

ARCHS = archs.NAMES
ALONE = archs.lacking(archs.WGMMA, archs.TCGEN05)  # architectures without a kernel of prefill: decode's serves it
Spec = AttentionSpec[DecodeTileConfig]


def padded(kv: str, dims: tuple[int, int]) -> tuple[int, int]:
    """Return the head dims with which a kernel over K and V of type `kv` computes."""
    return padded_dims(dims, DIMS_OF_KIND[kind_of(kv)])


def spec_of(q: str, kv: str, dim: int, rows: int, arch: str, work: str = ANY) -> Spec:
    """Return the spec of these types with every modifier. Its tile has `rows` rows per warp and serves calls of `work`,
    as in `TileKey`; if there is none, the tile serves all calls; if there is none of `rows`, it has `FEW_ROWS`."""
    tiles, key = tiles_of(arch), TileKey(kind_of(kv), padded(kv, (dim, dim))[0], rows, work)
    plain = key._replace(work=ANY)
    tile = tiles.get(key) or tiles.get(plain) or tiles.get(plain._replace(rows=FEW_ROWS))
    mask, logits = MaskSpec("always", True, True), LogitsSpec(True, True)
    return AttentionSpec(q, KVSpec(kv), outputs(q), dim, dim, mask, logits, "stream_k", tile)


def is_narrow(request: KernelRequest) -> bool:
    """Return whether the tokens of a request see at most `WINDOW_KEYS` keys."""
    return request.visible_keys <= WINDOW_KEYS


def work_of(request: KernelRequest) -> str:
    """Return the work of a request, as in `TileKey`. The last bits of its results depend on it."""
    if request.split_kv not in ("auto", "always") or kv_source(request) != "tma" or request.kv_scales:
        return ANY
    if is_narrow(request):
        return NARROW
    dim = padded(request.kv, (request.head_dim_qk, request.head_dim_vo))[0]
    many = request.kv_heads >= request.sms * many_from(kind_of(request.kv), dim)
    return MANY if request.split_kv == "auto" and many else ANY


def one_cta_per_tpc(spec: AttentionSpec[Any]) -> bool:
    """Return whether one CTA for each TPC, a pair of SMs, reads K and V as fast as the memory allows (`CTA_PER_TPC`).

    This was measured on an H200, for tiles of 8 rows per warp.
    """
    t = spec.tile
    if not isinstance(t, DecodeTileConfig) or t.blackwell or t.ctas_per_sm > 1 or t.rows_per_warp > FEW_ROWS:
        return False
    return padded(spec.kv.dtype, spec.dims)[0] in CTA_PER_TPC[kind_of(spec.kv.dtype)]


def for_all_calls(spec: Spec, arch: str) -> Spec:
    """Return the spec with the tile that serves all calls."""
    dim, rows = padded(spec.kv.dtype, spec.dims)[0], spec.tile.rows_per_warp if spec.tile else FEW_ROWS
    return beside_scales(replace(spec, tile=tiles_of(arch).get(TileKey(kind_of(spec.kv.dtype), dim, rows))), arch)


def beside_scales(spec: Spec, arch: str) -> Spec:
    """Return the spec with a tile that leaves room for factors of rows, for which the table has no tiles."""
    if spec.tile is None or not spec.kv.layout.of_rows:
        return spec
    key = TileKey(kind_of(spec.kv.dtype), padded(spec.kv.dtype, spec.dims)[0], spec.tile.rows_per_warp)
    return replace(spec, tile=with_row_bytes(key, spec.tile, 2 * spec.kv.layout.factor_bytes, arch))


def candidate(request: KernelRequest, arch: str, split: bool = True) -> Spec:
    """Return the spec that would serve a request; `supports` says whether the kernel can. It always splits keys."""
    p, alone = request, arch in ALONE
    # rows: the maximum over the batch, on which the bits of a request must not depend with "never" and "fixed"
    more = p.split_kv in ("auto", "always") and p.packed_rows > FEW_ROWS or alone and p.split_kv == "never"
    full = "value" if alone else "never"  # elsewhere, other kernels serve calls without a causal mask
    spec = spec_of(p.q, p.kv, p.head_dim_qk, 2 * FEW_ROWS if more else FEW_ROWS, arch, work_of(p))
    mask = replace(exact_mask(p), causal="always" if p.causal else full, window=True, tree=True)
    logits = replace(spec.logits, alibi=p.alibi, head_scales=p.head_scales)
    out = outputs(p.q, p.out)
    if p.source == "slots":
        mask = MaskSpec("never")
    spec = replace(spec, kv=kv_spec(p), head_dim_vo=p.head_dim_vo, mask=mask, logits=logits, out=out)
    return beside_scales(spec, arch)


def supports(spec: Spec) -> Refusal | None:
    """Return None if the kernel runs `spec`, else the reason why not: the only statement of what the kernel can do."""
    if spec.kv.shares_v:
        return Refusal("shares_v", "True: the kernel loads V as a tensor of its own")
    if refusal := refuse_types(spec, (3,)):
        return refusal
    if spec.head_dim_qk != spec.head_dim_vo:
        return Refusal("head_dim", f"{spec.dims}: must be equal")
    known = [
        (key.head_dim,) * 2 for key in measured(False) if (key.kind, key.rows) == (kind_of(spec.kv.dtype), FEW_ROWS)
    ]
    if refusal := refuse_dims(spec, padded(spec.kv.dtype, spec.dims), known):
        return refusal
    if spec.kv.source == "slots":
        if refusal := refuse_slots(spec):
            return refusal
    elif spec.mask.causal == "never":
        return Refusal("causal", "False: the kernel is causal, or as the argument says")
    if spec.mask.custom:
        return Refusal("custom_mask", f"{spec.mask.custom}: the kernel has the tree mask only")
    if spec.mask.prefix:
        return Refusal("prefix", "True: the kernel has no prefix that all tokens see")
    if spec.logits.alibi:
        return Refusal("alibi", "True: the kernel has no ALiBi")
    if spec.logits.head_scales:
        return Refusal("head_scales", "True: the kernel has one scale for all heads")
    if spec.schedule != "stream_k":
        return Refusal("schedule", f"{spec.schedule}: the kernel has stream_k")
    if not (spec.logits.soft_cap and spec.logits.skip):
        return Refusal("logits", f"{spec.logits}: the kernel takes a soft cap and skip-softmax as values, off or not")
    t = spec.tile
    if t is None:
        least = least_bytes(TileKey(kind_of(spec.kv.dtype), padded(spec.kv.dtype, spec.dims)[0], FEW_ROWS))
        return Refusal("head_dim", f"{spec.dims}: the smallest tile needs {least} bytes of shared memory")
    if t.rows_per_warp not in (FEW_ROWS, 2 * FEW_ROWS) or t.m not in t.m_choices:
        return Refusal("tile", f"{t}: m must be rows_per_warp (8 or 16) times a divisor of {t.warps} warps")
    if t.n % (16 * t.warps):
        return Refusal("tile", f"{t}: n must be a multiple of 16 keys times {t.warps} warps")
    return None


def refuse_slots(spec: Spec) -> Refusal | None:
    """Return the refusal of keys that a token chooses one by one, if the kernel cannot read them."""
    if spec.kv.extra:
        return Refusal("extra", "True: the kernel reads one cache")
    if spec.kv.union:
        return Refusal("share_keys", "True: the kernel reads the keys of each token")
    if spec.kv.layout.exists:
        return Refusal("kv_scales", "given: the kernel has no factors of keys that a token chooses")
    if spec.mask != MaskSpec("never"):
        return Refusal("source", "slots: the kernel has no mask but the keys that a token chooses")
    return None
