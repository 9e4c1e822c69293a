"""Attention for many query rows on Hopper, with WGMMA: prefill, and decode of more rows than `decode` has in a warp.

This file is plain Python: what the kernel can do (`supports`, and the constants that `dispatch` reads), which tile it
takes, and which kernels are shipped. It imports no DSL, because a process that runs a bundle has none.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar, cast

from ... import archs
from ..request import KernelRequest, Refusal
from ..spec import (
    DTYPES,
    AttentionSpec,
    KVSpec,
    LogitsSpec,
    MaskSpec,
    kv_source,
    outputs,
    padded_dims,
    refuse_dims,
)

ARCHS = archs.having(archs.WGMMA)
FP8 = "e4m3"
QUANTISED = ("e4m3", "e5m2", "nvfp4")  # quantised KV cache types


@dataclass(frozen=True)
class Sm90TileConfig:
    """Tile of a CTA: m query rows x n keys, with `o_parts` mma warpgroups per 64 rows.

    stages: stages of K, and of V, in flight. q_stages: stages of Q. q_in_regs: Q is a register operand of Q K^T, which
    saves a third of the reads of shared memory. raw_stages: stages of K and V as they are stored, if they are prepared;
    0: `stages`. load_warps: warps each for K and for V that fill a stage together, because issuing a TMA takes a warp
    tens of cycles. promote_interval: KV blocks after which O is added to fp32 sums in shared memory, 0: never. Hopper's
    8-bit MMAs add to O in 14 bits, rounding towards zero: without promotion, the mean of 2,048 equal values comes out
    1.4 % short, that of 8,192 values 8 % (simulated, with sums that have the bits of an H200's). o_parts: warpgroups
    that have the same 64 rows, all of S, and a part each of the columns of O: 512 columns of 64 rows would take all
    registers of a warpgroup.
    """

    m: int = 128
    n: int = 128
    stages: int = 2
    q_stages: int = 1
    q_in_regs: bool = False

    raw_stages: int = 0
    load_warps: int = 2
    promote_interval: int = 0
    o_parts: int = 1
    per_tile_pack_gqa: ClassVar[bool] = True  # `WorkTileInfo` says whether a tile's rows are packed
    pdl_prologue: ClassVar[bool] = False  # see `pdl`
    alternates_m_blocks: ClassVar[bool] = False  # with split keys, tiles come in ascending order
    counters_per_split: ClassVar[int] = 1  # counters per split of a tile
    end_blocks: ClassVar[int] = 0  # see `stream_k.end_units`
    loops_over_boxes: ClassVar[bool] = False  # the code of loading TMA boxes is unrolled
    e2m1: ClassVar[bool] = False  # the architecture has no conversion of e2m1 codes
    head_dim_steps: ClassVar[tuple[int, int]] = (32, 64)  # padded dims are multiples: of the first in 16 bits
    l2_bytes: ClassVar[int] = 16 << 20  # bytes of K and V in use at a time; Hopper's L2 is 50 MB in two halves

    @property
    def warpgroups(self) -> int:
        return self.m // 64 * self.o_parts

    @property
    def dequant_pieces(self) -> int:
        """Return the pieces of rows that a lane dequantises at a time: as many as registers leave room for."""
        return 2 if self.q_in_regs else 4

    @property
    def m_choices(self) -> tuple[int, ...]:
        """Return the numbers of rows that a tile may have."""
        return (self.m,)

    @property
    def name(self) -> str:
        parts = f"o{self.o_parts}" if self.o_parts > 1 else ""
        return f"m{self.m}n{self.n}s{self.stages}" + ("r" if self.q_in_regs else "") + parts


Spec = AttentionSpec[Sm90TileConfig]

# 227 KiB of shared memory hold `q_stages` of Q, `stages` of K and of V; the 232 registers of a thread (160 with three
# mma warpgroups) hold S, P, O and, with q_in_regs, Q. n depends on the head dims only: the rounding of a row depends on
# n, and the result of a sequence must depend on that sequence alone.
TILES = {  # padded (head_dim_qk, head_dim_vo) -> tile of kernels that take every modifier
    (32, 32): Sm90TileConfig(128, 128, 4),
    (64, 64): Sm90TileConfig(128, 128, 4),
    (96, 96): Sm90TileConfig(128, 128, 3),
    (128, 128): Sm90TileConfig(128, 128, 2),
    (160, 160): Sm90TileConfig(128, 96, 3),
    (192, 128): Sm90TileConfig(128, 128, 2),
    (192, 192): Sm90TileConfig(128, 96, 2),
    (256, 256): Sm90TileConfig(128, 80, 2),
    (512, 512): Sm90TileConfig(64, 48, 1, o_parts=2),
}
USUAL = ((64, 64), (128, 128))
WIDE = ((192, 128), (256, 256))
FP8_TILES = {  # 8-bit Q, K and V; V is transposed by warps that do not load
    (64, 64): Sm90TileConfig(128, 128, 4, load_warps=1, promote_interval=16),
    (128, 128): Sm90TileConfig(128, 96, 3, load_warps=1, promote_interval=21),
    (192, 128): Sm90TileConfig(128, 128, 2, load_warps=1, promote_interval=16),
    (192, 192): Sm90TileConfig(128, 64, 2, load_warps=1, promote_interval=32),
    (256, 256): Sm90TileConfig(64, 64, 3, load_warps=1, promote_interval=32),
}
FP8_HEADLINE_TILES = FP8_TILES | {
    (64, 64): Sm90TileConfig(192, 128, 4, 2, load_warps=1, promote_interval=16),
    (128, 128): Sm90TileConfig(192, 96, 3, raw_stages=2, load_warps=1, promote_interval=21),
}
QUANTISED_TILES = {  # quantised K and V, dequantised by a prepare warpgroup
    (64, 64): Sm90TileConfig(128, 128, 3, raw_stages=3, load_warps=1),
    (128, 128): Sm90TileConfig(128, 128, 2, raw_stages=2, load_warps=1),
    (192, 128): Sm90TileConfig(128, 80, 2, raw_stages=2, load_warps=1),
    (192, 192): Sm90TileConfig(128, 64, 2, raw_stages=2, load_warps=1),
    (256, 256): Sm90TileConfig(64, 48, 2, raw_stages=2, load_warps=1),
}
QUANTISED_HEADLINE_TILES = QUANTISED_TILES | {
    (64, 64): Sm90TileConfig(128, 128, 3, 1, True, raw_stages=3, load_warps=1),
    (128, 128): Sm90TileConfig(128, 128, 2, 1, True, raw_stages=2, load_warps=1),
}
NVFP4_HEADLINE_TILES = QUANTISED_TILES  # conversion is the bottleneck: it needs the registers that Q would take
SHARED_TILES = {  # (KV cache type, head_dim) -> tile of stream_k kernels: CTAs share the keys of a sequence
    ("16-bit", 64): Sm90TileConfig(64, 128, 6, load_warps=1),
    ("16-bit", 128): Sm90TileConfig(64, 128, 3, load_warps=1),
    ("16-bit", 512): Sm90TileConfig(64, 32, 2, load_warps=1, o_parts=2),
    ("e4m3", 64): Sm90TileConfig(64, 128, 4, raw_stages=4, load_warps=1),
    ("e4m3", 128): Sm90TileConfig(64, 128, 2, raw_stages=2, load_warps=1),
    ("nvfp4", 64): Sm90TileConfig(64, 128, 4, raw_stages=4, load_warps=1),
    ("nvfp4", 128): Sm90TileConfig(64, 128, 2, raw_stages=3, load_warps=1),
}
SHARED_ROWS = 16  # stream_k serves more rows; up to this many, `decode` reads keys as fast and computes less
DECODE_DIM = 256  # stream_k serves any number of rows with a larger head_dim, which `decode` does not have
HEADLINE_TILES = TILES | {  # kernels that take no modifier
    (32, 32): Sm90TileConfig(192, 128, 4, 2),
    (64, 64): Sm90TileConfig(192, 128, 4, 2),
    (96, 96): Sm90TileConfig(128, 128, 4, 1, True),
    (512, 512): Sm90TileConfig(64, 48, 1, 2, o_parts=2),
    (128, 128): Sm90TileConfig(128, 128, 3, 1, True),
}


def tiles_of(q: str, kv: str, plain: bool) -> dict[tuple[int, int], Sm90TileConfig]:
    """Return padded head dims -> tile of kernels of these types. plain: of kernels that take no modifier."""
    if q != kv:
        plainest = NVFP4_HEADLINE_TILES if kv == "nvfp4" else QUANTISED_HEADLINE_TILES
        tiles = plainest if plain else QUANTISED_TILES
        fewer = q == FP8 and kv == "e5m2"  # shared memory holds Q twice, as loaded and as fp16
        return {dims: replace(tile, raw_stages=1) for dims, tile in tiles.items()} if fewer else tiles
    if q == FP8:
        return FP8_HEADLINE_TILES if plain else FP8_TILES
    return HEADLINE_TILES if plain else TILES


def tile_of(q: str, kv: str, dims: tuple[int, int], plain: bool) -> Sm90TileConfig:
    """Return the tile of a kernel, of `tiles_of`; None if there is none for these head dims."""
    return cast(Sm90TileConfig, tiles_of(q, kv, plain).get(padded_dims(kv, dims, Sm90TileConfig.head_dim_steps)))


def headline(q: str, kv: str, dims: tuple[int, int], causal: bool) -> Spec:
    """Return the spec of a kernel that takes one mask, causal or none, and no modifier."""
    mask, tile = MaskSpec("always" if causal else "never"), tile_of(q, kv, dims, True)
    return AttentionSpec(q, KVSpec(kv), outputs(q)[:1], *dims, mask, tile=tile)


def general(q: str, kv: str, dims: tuple[int, int]) -> Spec:
    """Return the spec of a kernel that takes every modifier as a value.

    With 16-bit queries its output is 16-bit. A call that asks for e4m3 or NVFP4 output gets a spec with all `outputs`,
    which is compiled at that call.
    """
    mask, logits, tile = MaskSpec("value", window=True), LogitsSpec(soft_cap=True), tile_of(q, kv, dims, False)
    out = outputs(q) if q == FP8 else outputs(q)[:1]
    return AttentionSpec(q, KVSpec(kv), out, *dims, mask, logits, tile=tile)


def shared(q: str, kv: str, dim: int) -> Spec:
    """Return the stream_k spec with a causal mask. Its tile is None for types that `SHARED_TILES` does not have."""
    kind = "16-bit" if q == kv and q in DTYPES else kv if q == "bf16" else ""
    tile = SHARED_TILES.get((kind, dim))
    mask = MaskSpec("always")
    return AttentionSpec(
        q, KVSpec(kv), outputs(q)[:1], dim, dim, mask, schedule="stream_k", tile=cast(Sm90TileConfig, tile)
    )


def sharing(p: KernelRequest) -> Spec:
    """Return the stream_k spec that would serve a request; `shares` refuses modifiers that it cannot serve.

    Its tile is None if `decode` serves the request: at most SHARED_ROWS rows, and a head_dim up to DECODE_DIM.
    """
    spec, serves = shared(p.q, p.kv, p.head_dim_qk), p.packed_rows > SHARED_ROWS or p.head_dim_qk > DECODE_DIM
    mask = MaskSpec("always" if p.causal else "never", p.window, p.drafts, p.custom_mask)
    logits = LogitsSpec(p.soft_cap, p.skip, p.alibi, p.head_scales)
    out = (p.out,) if p.out in DTYPES else outputs(p.q, p.out)
    kv, tile = KVSpec(p.kv, kv_source(p)), cast(Sm90TileConfig, spec.tile if serves else None)
    return replace(spec, kv=kv, out=out, head_dim_vo=p.head_dim_vo, mask=mask, logits=logits, tile=tile)


def candidate(request: KernelRequest, arch: str, split: bool = False) -> Spec:
    """Return the spec that would serve a request, with whole tiles or with split keys, if `supports` accepts it."""
    if split:
        return sharing(request)
    p, dims = request, (request.head_dim_qk, request.head_dim_vo)
    plain = p.out in DTYPES and not (p.window or p.soft_cap or p.drafts or p.custom_mask or p.alibi)
    spec = headline(p.q, p.kv, dims, p.causal) if plain else general(p.q, p.kv, dims)
    mask = replace(spec.mask, tree=p.drafts, custom=p.custom_mask)
    logits = replace(spec.logits, skip=p.skip, alibi=p.alibi, head_scales=p.head_scales and p.kv in DTYPES)
    out = outputs(p.q, p.out) if len(spec.out) > 1 or p.out not in DTYPES else (p.out,)
    few = p.skip and p.kv not in DTYPES  # registers are scarce, and votes need some
    tile = tile_of(p.q, p.kv, dims, False) if few else spec.tile
    return replace(spec, kv=KVSpec(p.kv, kv_source(p)), out=out, mask=mask, logits=logits, tile=tile)


def supports(spec: Spec) -> Refusal | None:
    """Return None if the kernel can run `spec`, else the reason. Nothing else states what the kernel can do."""
    if spec.schedule == "stream_k":
        return shares(spec)
    if spec.q not in (*DTYPES, FP8):
        return Refusal("q", f"{spec.q}: the kernel has {', '.join((*DTYPES, FP8))}")
    if spec.kv.dtype not in (spec.q, *QUANTISED):
        return Refusal("kv", f"{spec.kv.dtype}: the kernel has {', '.join(dict.fromkeys((spec.q, *QUANTISED)))}")
    if spec.out not in [out[:count] for out in (outputs(spec.q, t) for t in DTYPES) for count in (1, 3)]:
        return Refusal("out", f"{', '.join(spec.out)}: the kernel has {', '.join((*DTYPES, 'e4m3', 'nvfp4'))}")
    dims = padded_dims(spec.kv.dtype, spec.dims, Sm90TileConfig.head_dim_steps)
    if refusal := refuse_dims(spec, dims, tiles_of(spec.q, spec.kv.dtype, False)):
        return refusal
    if spec.mask.tree:
        return Refusal("drafts", "True: the kernel has no tree mask")
    if spec.logits.head_scales:
        return Refusal("head_scales", "True: the kernel has one scale for all heads")
    t = spec.tile
    if t is None:
        return Refusal("tile", "None: must be the op's TileConfig")
    if t.o_parts > 1 and spec.logits.skip:
        return Refusal("skip", f"True: the kernel has no skip-softmax with head_dim {spec.head_dim_vo}")
    if t.o_parts > 1 and len(spec.out) > 1:
        return Refusal("out", f"{', '.join(spec.out)}: the kernel has 16 bits alone with head_dim {spec.head_dim_vo}")
    if t.o_parts > 1 and t.m != 64:
        return Refusal("tile", f"{t}: m must be 64 with o_parts")
    if t.m % 64 or not 64 <= t.m <= 192 or t.n % 16:
        return Refusal("tile", f"{t}: m must be 64, 128 or 192, and n a multiple of 16")
    if spec.kv.dtype != spec.q and t.m > 128:
        return Refusal("tile", f"{t}: m must be 64 or 128 over quantised K and V")
    if spec.logits.soft_cap and (t.q_in_regs or t.q_stages > 1):  # no MMA may be in flight when `mma` branches
        return Refusal("tile", f"{t}: with a soft cap, q_stages must be 1 and q_in_regs False")
    if spec.kv.dtype == spec.q != FP8 and t.load_warps != 2:
        return Refusal("tile", f"{t}: load_warps must be 2 unless K or V is prepared")
    return None


def shares(spec: Spec) -> Refusal | None:
    """Return the answer of `supports` for a stream_k spec."""
    own = shared(spec.q, spec.kv.dtype, spec.head_dim_qk)
    if spec.tile is None:
        types = ", ".join(f"{kind} head_dim {dim}" for kind, dim in SHARED_TILES)
        return Refusal("rows", f"split: serves more than {SHARED_ROWS} rows per request, over caches of {types}")
    if spec != replace(own, tile=spec.tile) or spec.tile.m != 64:
        return Refusal("rows", "split: serves a causal mask alone, pages that TMA fetches, outputs of the query's type")
    return None


def shipped(arch: str) -> list[Spec]:
    """Return the specs that a bundle holds; all others are compiled at their first call.

    - bf16, `USUAL` and `WIDE` head dims: two headline specs (causal, full) and the general one
    - fp16 and e4m3, head dims 64 and 128: the same
    - bf16 and fp16, 64 and 128: the causal headline and the general spec with gathered pages of any size; the general
      one with a custom mask; the causal headline with skip-softmax
    - bf16 over e4m3 and NVFP4 K and V, 64 and 128: the causal headline and the general spec
    - stream_k: bf16 and fp16, and bf16 over e4m3 and NVFP4, 64 and 128
    """
    found = []
    for q, dims in (*product(("bf16",), (*USUAL, *WIDE)), *product(("fp16", FP8), USUAL)):
        found += [*(headline(q, q, dims, causal) for causal in (True, False)), general(q, q, dims)]
    for q, dims in product(DTYPES, USUAL):
        causal, whole = headline(q, q, dims, True), general(q, q, dims)
        found += [replace(s, kv=KVSpec(q, "gather")) for s in (causal, whole)]
        found.append(replace(whole, mask=replace(whole.mask, custom=True)))
        found.append(replace(causal, logits=LogitsSpec(skip=True)))
    for kv, dims in product(("e4m3", "nvfp4"), USUAL):
        found += [headline("bf16", kv, dims, True), general("bf16", kv, dims)]
    found += [shared(q, q, dim) for q, (dim, _) in product(DTYPES, USUAL)]
    found += [shared("bf16", kv, dim) for kv, dim in SHARED_TILES if kv != "16-bit"]
    return found if arch in ARCHS else []
