"""Attention for many query rows on Blackwell (tcgen05): prefill, and decode of more than 16 rows.

No device has run it: it compiles, and the simulator runs it. This file is plain Python: it says what the kernel can do
(`supports`), which tile it takes, and which kernels are shipped. It imports no DSL, because a process that runs a
bundle has none.
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

ARCHS = archs.having(archs.TCGEN05)


@dataclass(frozen=True)
class Sm100TileConfig:
    """A tile of m query rows x n keys. m is two halves of 128 rows, or one half.

    stages, q_stages: K, and as many V, tiles in flight; Q tiles. raw_stages: of K and V as stored, if they are
    dequantised; 0 means `stages`. load_warps: warps that fill a stage together. ex2_emu: of 16 exponentials, those that
    do without the special function unit in blocks that need no mask. has_half_tiles: requests of at most 128 rows get
    tiles of one half.
    """

    m: int = 256
    n: int = 128
    stages: int = 2
    q_stages: int = 1
    raw_stages: int = 0
    load_warps: int = 1
    ex2_emu: int = 0
    has_half_tiles: bool = False
    head_dim_steps: ClassVar[tuple[int, int]] = (32, 64)  # padded dims are multiples: of the first in 16 bits
    dequant_pieces: ClassVar[int] = 2  # pieces of rows that a lane dequantises at a time
    l2_bytes: ClassVar[int] = 32 << 20  # bytes of K and V in use at a time; L2 is 126 MB in two halves
    per_tile_pack_gqa: ClassVar[bool] = True  # see `work.WorkTileInfo`
    pdl_prologue: ClassVar[bool] = False  # see `pdl`
    alternates_m_blocks: ClassVar[bool] = False  # with split keys, tiles come in ascending order
    counters_per_split: ClassVar[int] = 1  # per part of a split tile
    end_blocks: ClassVar[int] = 0  # see `stream_k.end_units`
    loops_over_boxes: ClassVar[bool] = False  # the code of loading TMA boxes is unrolled
    e2m1: ClassVar[bool] = True  # the architecture converts e2m1 codes

    @property
    def m_choices(self) -> tuple[int, ...]:
        """Return the numbers of rows that a tile may have."""
        return (self.m // 2, self.m) if self.has_half_tiles else (self.m,)

    @property
    def name(self) -> str:
        return f"m{self.m}n{self.n}s{self.stages}" + (f"e{self.ex2_emu}" if self.ex2_emu else "")


Spec = AttentionSpec[Sm100TileConfig]

# Shared memory, 227 KiB, must hold `q_stages` stages of Q and `stages` stages each of K and V.
TILES = {  # padded (head_dim_qk, head_dim_vo) -> tile
    (32, 32): Sm100TileConfig(stages=4),
    (64, 64): Sm100TileConfig(stages=4),
    (96, 96): Sm100TileConfig(stages=3),
    (128, 128): Sm100TileConfig(stages=2),
    (160, 160): Sm100TileConfig(m=128, n=96),
    (192, 128): Sm100TileConfig(n=64, stages=3),
    (192, 192): Sm100TileConfig(m=128, n=96),
    (256, 256): Sm100TileConfig(m=128, n=64),
}
FP8_TILES = {  # 8-bit Q, K and V
    (64, 64): Sm100TileConfig(stages=6, q_stages=2),
    (128, 128): Sm100TileConfig(stages=5),
    (192, 128): Sm100TileConfig(stages=4),
    (192, 192): Sm100TileConfig(m=128, stages=3),
    (256, 256): Sm100TileConfig(m=128, stages=3),
}
QUANTISED_TILES = {  # quantised K and V: fewer keys, because softmax gives up registers to the prepare warpgroup
    (64, 64): Sm100TileConfig(n=96, stages=3, raw_stages=4),
    (128, 128): Sm100TileConfig(n=96, raw_stages=2),
    (192, 128): Sm100TileConfig(n=64, raw_stages=2),
    (192, 192): Sm100TileConfig(m=128, n=64, stages=1, raw_stages=2),
    (256, 256): Sm100TileConfig(m=128, n=64, stages=1, raw_stages=2),
}
E4M3_QUERY_TILES = {  # quantised K and V with e4m3 Q, which is in shared memory as loaded and as fp16
    (64, 64): Sm100TileConfig(n=96, stages=3, raw_stages=4),
    (128, 128): Sm100TileConfig(n=96, raw_stages=1),
    (192, 128): Sm100TileConfig(n=64, stages=1, raw_stages=1),
    (192, 192): Sm100TileConfig(m=128, n=64, stages=1, raw_stages=2),
    (256, 256): Sm100TileConfig(m=128, n=64, stages=1, raw_stages=2),
}
SHARED_TILES = {  # kernels in which CTAs share the keys of a request
    (64, 64): Sm100TileConfig(m=128, stages=6),
    (128, 128): Sm100TileConfig(m=128, n=96, stages=3),  # 128 keys take 688 bytes too many
}
SHARED_ROWS = 16  # up to so many rows per request and KV head, `decode` reads keys as fast and computes less
HALF = 128  # with more columns of O, a tile has one half of the rows: two O do not fit in tensor memory
USUAL = ((64, 64), (128, 128))
WIDE = ((192, 128), (256, 256))
FP8 = "e4m3"
QUANTISED = ("e4m3", "e5m2", "nvfp4")  # types of quantised caches
EX2_EMU = {"sm_100a": 4}  # emulated of 16 exponentials; sm_103a's special function unit has twice the rate


def tiles_of(q: str, kv: str) -> dict[tuple[int, int], Sm100TileConfig]:
    """Return padded head dims -> tile of kernels of these types."""
    return (FP8_TILES if q == FP8 else TILES) if q == kv else E4M3_QUERY_TILES if q == FP8 else QUANTISED_TILES


def tile_of(q: str, kv: str, dims: tuple[int, int], arch: str) -> Sm100TileConfig:
    """Return the tile of a prefill kernel, or None if there is none for these head dims."""
    dims = padded_dims(kv, dims, Sm100TileConfig.head_dim_steps)
    tile = tiles_of(q, kv).get(dims)
    ex2_emu = EX2_EMU.get(arch, 0) if dims[1] <= HALF else 0  # beyond, MMAs take longer than exponentials
    return cast(Sm100TileConfig, tile and replace(tile, ex2_emu=ex2_emu))


def sharing(p: KernelRequest) -> Spec:
    """Return the spec of a kernel that splits keys. Its tile is None if the request has too few rows or another
    head_dim; `shares` refuses that, and everything else that the kernel cannot do."""
    modified = p.window or p.soft_cap
    tile = SHARED_TILES.get((p.head_dim_qk, p.head_dim_vo)) if p.packed_rows > SHARED_ROWS else None
    mask = MaskSpec("always" if p.causal else "never", modified, p.drafts, p.custom_mask)
    logits = LogitsSpec(modified, p.skip, p.alibi, p.head_scales)
    out = (p.out,) if p.out in DTYPES else outputs(p.q, p.out)
    kv = KVSpec(p.kv, kv_source(p))
    return AttentionSpec(
        p.q, kv, out, p.head_dim_qk, p.head_dim_vo, mask, logits, "stream_k", cast(Sm100TileConfig, tile)
    )


def candidate(request: KernelRequest, arch: str, split: bool = False) -> Spec:
    """Return the spec that would serve a request, with whole tiles or with split keys, if `supports` accepts it."""
    if split:
        return sharing(request)
    p, dims = request, (request.head_dim_qk, request.head_dim_vo)
    mask, logits = MaskSpec("always" if p.causal else "never"), LogitsSpec()
    plain = p.out in DTYPES and not (p.window or p.soft_cap or p.drafts or p.custom_mask or p.alibi)
    out = (p.out,) if plain else outputs(p.q, p.out)[: 1 if p.out in DTYPES and p.q in DTYPES else 3]
    if not plain:
        mask, logits = MaskSpec("value", window=True, tree=p.drafts, custom=p.custom_mask), LogitsSpec(soft_cap=True)
    logits = replace(logits, skip=p.skip, alibi=p.alibi)
    kv, tile = KVSpec(p.kv, kv_source(p)), tile_of(p.q, p.kv, dims, arch)
    if tile is not None and tile.m == 256 and not p.skip:  # the rule of skipping depends on the blocks before
        tile = replace(tile, has_half_tiles=True)
    return AttentionSpec(p.q, kv, out, *dims, mask, logits, tile=tile)


def supports(spec: Spec) -> Refusal | None:
    """Return None if the kernel runs `spec`, else the reason why not. Nothing else says what the kernel can do."""
    if spec.schedule == "stream_k":
        return shares(spec)
    if spec.q not in (*DTYPES, FP8):
        return Refusal("q", f"{spec.q}: the kernel has {', '.join((*DTYPES, FP8))}")
    if spec.kv.dtype not in (spec.q, *QUANTISED):
        return Refusal("kv", f"{spec.kv.dtype}: the kernel has {', '.join(dict.fromkeys((spec.q, *QUANTISED)))}")
    if spec.out not in [out[:count] for out in (outputs(spec.q, t) for t in DTYPES) for count in (1, 3)]:
        return Refusal("out", f"{', '.join(spec.out)}: the kernel has {', '.join((*DTYPES, 'e4m3', 'nvfp4'))}")
    dims = padded_dims(spec.kv.dtype, spec.dims, Sm100TileConfig.head_dim_steps)
    if refusal := refuse_dims(spec, dims, tiles_of(spec.q, spec.kv.dtype)):
        return refusal
    if spec.mask.tree:
        return Refusal("drafts", "True: the kernel has no tree mask")
    if spec.logits.head_scales:
        return Refusal("head_scales", "True: must be False, since every kernel takes scales per head")
    t, m = spec.tile, 256 if dims[1] <= HALF else 128
    if t is None or t.m != m or t.n not in (64, 96, 128) or t.load_warps != 1:
        return Refusal("tile", f"{t}: m must be {m}, n 64, 96 or 128, and load_warps 1")
    if t.has_half_tiles and (m < 256 or spec.logits.skip):
        return Refusal("tile", f"{t}: has_half_tiles needs m = 256 and no skip-softmax")
    if spec.kv.dtype != spec.q and t.q_stages != 1:  # else row scales may be overwritten before softmax reads them
        return Refusal("tile", f"{t}: q_stages must be 1 over a quantised cache")
    return None


def shares(spec: Spec) -> Refusal | None:
    """Do the same as `supports` for a kernel in which CTAs share keys."""
    if spec.tile is None or spec.dims not in SHARED_TILES:
        dims = " and ".join(str(dim) for dim, _ in SHARED_TILES)
        return Refusal("rows", f"split: serves more than {SHARED_ROWS} rows per request, with head_dim {dims}")
    if spec.q not in DTYPES or spec.kv != KVSpec(spec.q) or spec.out != (spec.q,):
        return Refusal("rows", "split: serves 16-bit queries, caches and outputs of one type, pages that TMA fetches")
    if spec.mask != MaskSpec("always", spec.mask.window) or spec.logits != LogitsSpec(spec.logits.soft_cap):
        return Refusal("rows", "split: serves causal masks, windows and soft caps")
    if spec.tile.m != 128 or spec.tile.n not in (64, 96, 128) or spec.tile.load_warps != 1 or spec.tile.has_half_tiles:
        return Refusal("tile", f"{spec.tile}: m must be 128, n 64, 96 or 128, and load_warps 1")
    return None


def shipped(arch: str) -> list[Spec]:
    """Return the specs that are compiled ahead of time; others are compiled at their first call.

    - bf16 with `USUAL` and `WIDE` head dims, fp16 and e4m3 with the usual ones: a spec per mask (causal, full) without
      modifiers, and one that takes the other modifiers as values. That of e4m3 has all outputs.
    - bf16 and fp16 with the usual head dims: pages of any size (causal, modifiers), a custom mask, causal with
      skip-softmax, and two in which CTAs share keys (causal, modifiers).
    - bf16 over quantised K and V (e4m3, nvfp4) with the usual head dims: causal, modifiers.
    """
    found = []
    for q, dims in (*product(("bf16",), (*USUAL, *WIDE)), *product(("fp16", FP8), USUAL)):
        request = KernelRequest(q, q, outputs(q)[0], *dims)
        some = replace(request, causal=True), replace(request, causal=False), replace(request, window=True)
        found += [candidate(one, arch) for one in some]
    for q, dims in product(DTYPES, USUAL):
        request = KernelRequest(q, q, q, *dims)
        gathered = replace(request, page_size=1), replace(request, page_size=1, window=True)
        others = replace(request, causal=False, custom_mask=True), replace(request, skip=True)
        found += [candidate(one, arch) for one in (*gathered, *others)]
    for kv, dims in product(("e4m3", "nvfp4"), USUAL):
        request = KernelRequest("bf16", kv, "bf16", *dims)
        found += [candidate(replace(request, causal=True), arch), candidate(replace(request, window=True), arch)]
    for q, (dim, _) in product(DTYPES, USUAL):
        request = KernelRequest(q, q, q, dim, dim)
        found += [candidate(request, arch, True), candidate(replace(request, window=True), arch, True)]
    return found if arch in ARCHS else []
