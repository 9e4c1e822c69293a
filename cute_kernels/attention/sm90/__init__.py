"""Attention for many query rows on Hopper, with WGMMA: prefill, and decode of more rows than `decode` has in a warp.

This file is plain Python: it states what the kernel can do (`supports`) and which spec serves a request (`candidate`).
`tile_table` has the tiles and the head dims. Neither imports the DSL, because a process that runs a bundle has none.
"""

from dataclasses import replace

from ... import archs
from ...records import INDEX, RECORDS
from ..request import KernelRequest, Refusal
from ..spec import (
    DTYPES,
    AttentionSpec,
    KVSpec,
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
    QUANTISED_HEAD_DIMS,
    SPLIT_CACHES,
    Sm90TileConfig,
    column,
    kind_of,
    resources,
    split_tile_of,
    tile_of,
)

ARCHS = archs.having(archs.WGMMA)
SPLIT_ROWS = 16  # stream_k serves more rows; up to this many, `decode` reads keys as fast and computes less
PAIR_ROWS = 64  # more rows with V in K are computed by two CTAs, each of which loads half of the keys for both
GATHERING = 3  # warps that copy rows of a block with V in K, beside the one that finds tiles
DECODE_DIM = 256  # stream_k serves any number of rows with a larger head_dim, since `decode` then reads K twice
Spec = AttentionSpec[Sm90TileConfig]


def padded(kv: str, dims: tuple[int, int]) -> tuple[int, int]:
    """Return the head dims with which a kernel over K and V of type `kv` computes."""
    return padded_dims(dims, HEAD_DIMS if kv in DTYPES else QUANTISED_HEAD_DIMS)


def headline(q: str, kv: str, dims: tuple[int, int], causal: bool) -> Spec:
    """Return the spec of a kernel that takes one mask, causal or none, and no modifier."""
    mask, tile = MaskSpec("always" if causal else "never"), tile_of(q, kv, padded(kv, dims), True, shared=True)
    return AttentionSpec(q, KVSpec(kv), outputs(q)[:1], *dims, mask, tile=tile)


def general(q: str, kv: str, dims: tuple[int, int]) -> Spec:
    """Return the spec of a kernel that takes every modifier as a value.

    With 16-bit queries its output is 16-bit. A call that asks for e4m3 or NVFP4 output gets a spec with all `outputs`,
    which is compiled at that call.
    """
    mask, logits = MaskSpec("value", window=True), LogitsSpec(soft_cap=True)
    tile = tile_of(q, kv, padded(kv, dims), False, shared=True)
    out = outputs(q) if q == FP8 else outputs(q)[:1]
    return AttentionSpec(q, KVSpec(kv), out, *dims, mask, logits, tile=tile)


def split_keys(q: str, kv: KVSpec, dims: tuple[int, int]) -> Spec:
    """Return the stream_k spec with a causal mask. Its tile is None if `tile_table` has none for these types."""
    mask = MaskSpec("always")
    tile = split_tile_of(kv.dtype if kv.record else q, kv.dtype, dims, kv.shares_v)
    return AttentionSpec(q, kv, outputs(q)[:1], *dims, mask, schedule="stream_k", tile=tile)


def split_candidate(p: KernelRequest) -> Spec:
    """Return the stream_k spec that would serve a request; `supports_split` refuses modifiers that it cannot serve.

    Its tile is None if `decode` serves the request: at most SPLIT_ROWS rows, and a head_dim up to DECODE_DIM.
    """
    spec = split_keys(p.q, kv_spec(p), (p.head_dim_qk, p.head_dim_vo if p.shares_v else p.head_dim_qk))
    serves = p.packed_rows > SPLIT_ROWS or p.head_dim_qk > DECODE_DIM
    out = (p.out,) if p.out in DTYPES else outputs(p.q, p.out)
    kv, tile = kv_spec(p), spec.tile if serves else None
    if tile and p.shares_v:
        tile = replace(gathering(tile, kv), cluster=2 if p.packed_rows > PAIR_ROWS and kv.source == "tma" else 1)
    mask, logits = exact_mask(p), exact_logits(p)
    if p.shares_v and not is_plain(p):
        mask, logits = general_mask(p), replace(logits, soft_cap=True)
    return replace(spec, kv=kv, out=out, head_dim_vo=p.head_dim_vo, mask=mask, logits=logits, tile=tile)


def gathering(tile: Sm90TileConfig, kv: KVSpec) -> Sm90TileConfig:
    """Return a tile with V in K for a source. `GATHERING` warps copy rows of a block; of packed records, the mma
    warps do. Over rows of 16 bits by slots, warpgroups compute scores in turn."""
    turns = kv.source == "slots" and not kv.record
    loads = 1 if kv.source == "tma" or kv.record else GATHERING
    return replace(tile, load_warps=loads, scores_apart=not turns, alternates=turns)


def leaves_registers(request: KernelRequest, tile: Sm90TileConfig | None) -> bool:
    """Return whether a tile for kernels without modifiers leaves registers for those that such kernels may have:
    skip-softmax, the words of a custom mask, the slopes of ALiBi."""
    p, some = request, bool(request.custom_mask) + request.alibi
    if p.kv not in DTYPES:
        return not (p.skip or some)
    return not some or some == 1 and (tile is None or tile.warpgroups <= 2)


def can_share_scores(kv: KVSpec, mask: MaskSpec) -> bool:
    """Return whether warpgroups that have the same rows can have a part each of the scores."""
    return kv.source == "tma" and kv.dtype in DTYPES and not mask.custom


def candidate(request: KernelRequest, arch: str, split: bool = False) -> Spec:
    """Return the spec that would serve a request, with whole tiles or with split keys, if `supports` accepts it."""
    if split:
        return split_candidate(request)
    p, dims = request, (request.head_dim_qk, request.head_dim_vo)
    plain = is_plain(replace(p, custom_mask="", alibi=False, window=exact_mask(p).window))
    spec = headline(p.q, p.kv, dims, p.causal) if plain else general(p.q, p.kv, dims)
    mask = exact_mask(p) if plain else general_mask(p)
    logits = replace(spec.logits, skip=p.skip, alibi=p.alibi, head_scales=p.head_scales and p.kv in DTYPES)
    out = outputs(p.q, p.out) if len(spec.out) > 1 or p.out not in DTYPES else (p.out,)
    tile = spec.tile
    if not can_share_scores(kv_spec(p), mask):
        tile = tile_of(p.q, p.kv, padded(p.kv, dims), plain)
    if not leaves_registers(p, tile):
        tile = tile_of(p.q, p.kv, padded(p.kv, dims), False)
    if p.shares_v:
        tile = tile_of(p.q, p.kv, padded(p.kv, dims), plain, shares_v=True)
        tile = tile and gathering(tile, kv_spec(p))
    return replace(spec, kv=kv_spec(p), out=out, mask=mask, logits=logits, tile=tile)


def supports(spec: Spec) -> Refusal | None:
    """Return None if the kernel can run `spec`, else the reason. Nothing else states what the kernel can do."""
    if spec.kv.extra and spec.kv.source != "slots":
        return Refusal("extra", "True: the kernel reads a second cache only by slots")
    if spec.kv.union and (spec.kv.source != "slots" or spec.kv.extra or spec.schedule != "stream_k"):
        return Refusal("share_keys", "True: the kernel shares keys that tokens choose from one cache, with split keys")
    if spec.kv.record or spec.kv.extra_record:
        if refusal := refuse_record(spec):
            return refusal
    if spec.kv.source == "slots":
        if not spec.kv.shares_v:
            return Refusal("source", "slots: the kernel reads keys that a token chooses only if V lies in K")
        if (spec.mask, spec.logits) != (MaskSpec("never"), LogitsSpec()):
            return Refusal("source", "slots: the kernel has no mask but the keys that a token chooses, and no soft cap")
    if spec.kv.shares_v and (spec.kv.dtype not in DTYPES or spec.smem_q != spec.kv.dtype):
        return Refusal(
            "shares_v", f"True over {spec.kv.dtype}: the kernel has Q and K of one 16-bit type, if V lies in K"
        )
    if spec.kv.scales and spec.q not in DTYPES:
        return Refusal("kv_scales", f"{spec.kv.scales}: the kernel has factors of rows with 16-bit queries")
    if spec.schedule == "stream_k":
        return supports_split(spec)
    if refusal := refuse_types(spec):
        return refusal
    if refusal := refuse_dims(
        spec, padded(spec.kv.dtype, spec.dims), column(kind_of(spec.q, spec.kv.dtype, spec.kv.shares_v))
    ):
        return refusal
    if spec.mask.tree:
        return Refusal("drafts", "True: the kernel has no tree mask")
    if spec.logits.head_scales:
        return Refusal("head_scales", "True: the kernel has one scale for all heads")
    t = spec.tile
    if t is None:
        return Refusal("tile", "None: must be the op's TileConfig")
    if spec.kv.shares_v and (spec.mask.custom or spec.logits.alibi):
        field = "custom_mask" if spec.mask.custom else "alibi"
        return Refusal(field, f"{spec.mask.custom or True}: the kernel has neither custom masks nor ALiBi with V in K")
    if t.o_parts > 1 and spec.logits.skip:
        return Refusal("skip", f"True: the kernel has no skip-softmax with head_dim {spec.head_dim_vo}")
    if refusal := refuse_pieces(spec, t):
        return refusal
    if refusal := refuse_turns(spec, t):
        return refusal
    if t.o_parts > 1 and t.m != 64:
        return Refusal("tile", f"{t}: m must be 64 with o_parts")
    if t.cluster > 1:
        return Refusal("tile", f"{t}: cluster must be 1, unless CTAs share keys and V lies in K")
    if t.m % 64 or not 64 <= t.m <= 192 or t.n % 16:
        return Refusal("tile", f"{t}: m must be 64, 128 or 192, and n a multiple of 16")
    if spec.kv.dtype != spec.q and t.m > 128:
        return Refusal("tile", f"{t}: m must be 64 or 128 over quantised K and V")
    if spec.logits.soft_cap and (t.q_in_regs or t.q_stages > 1):  # no MMA may be in flight when `mma` branches
        return Refusal("tile", f"{t}: with a soft cap, q_stages must be 1 and q_in_regs False")
    one = t.pieces > 1 or spec.kv.shares_v and spec.kv.source == "tma"
    loads = 1 if one else GATHERING if spec.kv.shares_v else 2
    if spec.kv.dtype == spec.q != FP8 and t.load_warps != loads:
        return Refusal("tile", f"{t}: load_warps must be {loads}, unless K or V is prepared")
    return resources(spec, t, padded(spec.kv.dtype, spec.dims)).refusal(t)


def refuse_record(spec: Spec) -> Refusal | None:
    """Return the refusal of packed records, if the kernel cannot read them."""
    records = (spec.kv.record, *((spec.kv.extra_record,) if spec.kv.extra else ()))
    if not spec.kv.shares_v or spec.kv.source == "tma" or spec.schedule != "stream_k" or spec.kv.dtype != "bf16":
        return Refusal("record", f"{spec.kv.record}: the kernel makes bf16 of records, with V in K and split keys")
    if spec.q != "bf16" and (spec.q != FP8 or any(RECORDS[record].packed for record in records if record in RECORDS)):
        return Refusal("q", f"{spec.q} over {spec.kv.record}: the kernel has bf16, or e4m3 over e4m3 with one scale")
    for record in records:
        if columns_of(record) not in (0, spec.head_dim_qk):
            found = ", ".join(name for name in RECORDS if columns_of(name) == spec.head_dim_qk)
            return Refusal("record", f"{record}: with head_dim {spec.head_dim_qk}, the kernel has {found}")
    return None


def columns_of(record: str) -> int:
    """Return the columns that the kernel makes of a packed record; 0 for rows of any number, -1 for other records."""
    form = RECORDS.get(record)
    if form is None or not form.codes or record == INDEX:
        return -1
    return form.columns


def refuse_pieces(spec: Spec, t: Sm90TileConfig) -> Refusal | None:
    """Return the refusal of a tile that loads blocks in pieces, if the kernel cannot; None if it can or need not."""
    if t.pieces == 1:
        return None
    if t.o_parts == 1 or not can_share_scores(spec.kv, spec.mask):
        return Refusal("tile", f"{t}: pieces need o_parts, and 16-bit K and V that TMA loads, without a custom mask")
    if t.pieces % (2 * t.stages) or t.n % (16 * t.pieces):
        return Refusal("tile", f"{t}: pieces must be a multiple of twice the stages, and have 16 keys or more")
    return None


def refuse_turns(spec: Spec, t: Sm90TileConfig) -> Refusal | None:
    """Return the refusal of a tile in which warpgroups take turns, if the kernel cannot; None if it can or need not."""
    if not t.alternates:
        return None
    if spec.kv.source != "slots" or spec.kv.record:
        return Refusal("tile", f"{t}: alternates needs rows of 16 bits that are found by slots")
    if t.scores_apart or (t.m, t.n, t.stages, t.q_stages, t.o_parts, t.cluster) != (64, 64, 2, 1, 2, 1):
        return Refusal("tile", f"{t}: alternates needs m 64, n 64, two stages, one of Q, o_parts 2 and nothing else")
    return None


def supports_split(spec: Spec) -> Refusal | None:
    """Return the answer of `supports` for a stream_k spec."""
    if spec.tile is None:
        kinds = {"16-bit": "bf16"} | {kv: kv for kv in SPLIT_CACHES}
        found = (
            (kind, dims[0])
            for kind, kv in kinds.items()
            for dims in column(kind_of("bf16", kv))
            if split_tile_of("bf16", kv, dims)
        )
        types = ", ".join(f"{kind} head_dim {dim}" for kind, dim in found)
        return Refusal("rows", f"split: serves more than {SPLIT_ROWS} rows per request, over caches of {types}")
    if spec.kv.shares_v:
        return supports_latent_split(spec)
    own = split_keys(spec.q, KVSpec(spec.kv.dtype), (spec.head_dim_qk, spec.head_dim_qk))
    if spec != replace(own, tile=spec.tile) or spec.tile.m != 64:
        return Refusal("rows", "split: serves a causal mask alone, pages that TMA fetches, outputs of the query's type")
    return resources(spec, spec.tile, padded(spec.kv.dtype, spec.dims)).refusal(spec.tile)


def supports_latent_split(spec: Spec) -> Refusal | None:
    """Return the answer of `supports` for a stream_k spec in which V lies in K."""
    if spec.tile and spec.tile.cluster > 1 and spec.kv.source != "tma":
        return Refusal("tile", f"{spec.tile}: cluster must be 1, unless TMA fetches pages")
    if refusal := spec.tile and refuse_turns(spec, spec.tile):
        return refusal
    own, mask = split_keys(spec.q, spec.kv, spec.dims), MaskSpec(spec.mask.causal, spec.mask.window)
    logits = LogitsSpec(spec.logits.soft_cap)
    if spec != replace(own, tile=spec.tile, mask=mask, logits=logits) or spec.tile is None or spec.tile.m != 64:
        return Refusal("rows", "split: serves causal masks, windows and soft caps alone, outputs of the query's type")
    return resources(spec, spec.tile, spec.dims).refusal(spec.tile)
