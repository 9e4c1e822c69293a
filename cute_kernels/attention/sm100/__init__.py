"""Many query rows on Blackwell, tcgen05: prefill, and decode of more rows than a warp has. No device has run it: it
compiles, and the simulator runs it. This file is plain Python, see `sm90`.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar, cast

from ..request import KernelRequest, Refusal
from ..spec import DTYPES, AttentionSpec, KVSpec, LogitsSpec, MaskSpec, kv_source, outputs

ARCHS = ("sm_100a", "sm_103a")
PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class Sm100TileConfig:
    """m query rows x n keys a CTA: halves of 128 rows, or one, whose KV blocks two warpgroups of softmax have in turn.
    few: such are the tiles of requests of at most 128 rows. `stages` K and as many V tiles in flight, `q_stages` Q
    tiles. raw_stages: of K and V as they are stored, where they are prepared, 0: as many. load_warps: warps that fill a
    stage together. ex2_emu: of 16 exponentials, those without the special function unit, where no key is hidden."""

    m: int = 256
    n: int = 128
    stages: int = 2
    q_stages: int = 1
    raw_stages: int = 0
    load_warps: int = 1
    ex2_emu: int = 0
    has_half_tiles: bool = False
    dequant_pieces: ClassVar[int] = 2  # of rows, that a lane dequantises at a time
    l2_bytes: ClassVar[int] = 32 << 20  # of K and V at work at a time; L2 is 126 MB in two halves
    per_tile_pack_gqa: ClassVar[bool] = True  # of `work.WorkTileInfo`
    pdl_prologue: ClassVar[bool] = False  # see `pdl`
    counters_per_split: ClassVar[int] = 1  # of a part of a tile
    e2m1: ClassVar[bool] = True  # the architecture converts such codes

    @property
    def m_choices(self) -> tuple[int, ...]:
        """Rows that a tile may have."""
        return (self.m // 2, self.m) if self.has_half_tiles else (self.m,)

    @property
    def name(self) -> str:
        return f"m{self.m}n{self.n}s{self.stages}" + (f"e{self.ex2_emu}" if self.ex2_emu else "")


Spec = AttentionSpec[Sm100TileConfig]

# 227 KiB of shared memory hold `q_stages` of Q, `stages` of K and of V.
TILES = {  # (head_dim_qk, head_dim_vo) -> tile
    (64, 64): Sm100TileConfig(stages=4),
    (128, 128): Sm100TileConfig(stages=2),
    (192, 128): Sm100TileConfig(n=64, stages=3),
    (256, 256): Sm100TileConfig(m=128, n=64),
}
FP8_TILES = {  # of 8-bit Q, K and V
    (64, 64): Sm100TileConfig(stages=6, q_stages=2),
    (128, 128): Sm100TileConfig(stages=5),
    (192, 128): Sm100TileConfig(stages=4),
    (256, 256): Sm100TileConfig(m=128, stages=3),
}
QUANTISED_TILES = {  # of quantised K and V, for whose warpgroup softmax gives up registers: fewer keys
    (64, 64): Sm100TileConfig(n=96, stages=3, raw_stages=4),
    (128, 128): Sm100TileConfig(n=96, raw_stages=2),
    (192, 128): Sm100TileConfig(n=64, raw_stages=2),
    (256, 256): Sm100TileConfig(m=128, n=64, stages=1, raw_stages=2),
}
E4M3_QUERY_TILES = {  # of e4m3 Q over those, as it is loaded and as fp16
    (64, 64): Sm100TileConfig(n=96, stages=3, raw_stages=4),
    (128, 128): Sm100TileConfig(n=96, raw_stages=1),
    (192, 128): Sm100TileConfig(n=64, stages=1, raw_stages=1),
    (256, 256): Sm100TileConfig(m=128, n=64, stages=1, raw_stages=2),
}
SHARED_TILES = {  # of kernels whose CTAs share the keys of a request
    (64, 64): Sm100TileConfig(m=128, stages=6),
    (128, 128): Sm100TileConfig(m=128, n=96, stages=3),  # 128 keys leave 688 bytes too few
}
SHARED_ROWS = 16  # more than so many rows of a request: up to there `decode` reads keys as fast, and computes less
ROWS = {dims: tile.m for dims, tile in TILES.items()}  # of a tile: O of two halves of head_dim 256 has no room
USUAL = ((64, 64), (128, 128))
FP8 = "e4m3"
QUANTISED = ("e4m3", "e5m2", "nvfp4")  # types of caches
EX2_EMU = {"sm_100a": 4}  # of 16 exponentials; sm_103a's special function unit has twice the rate


def tile_of(q: str, kv: str, dims: tuple[int, int], arch: str) -> Sm100TileConfig:
    """None where the kernel has no such head_dim."""
    tiles = (FP8_TILES if q == FP8 else TILES) if q == kv else E4M3_QUERY_TILES if q == FP8 else QUANTISED_TILES
    tile = tiles.get(dims)
    ex2_emu = EX2_EMU.get(arch, 0) if dims != (256, 256) else 0  # whose MMAs take twice the time of exponentials
    return cast(Sm100TileConfig, tile and replace(tile, ex2_emu=ex2_emu))


def sharing(p: KernelRequest) -> Spec:
    """The spec that would serve decode, without a tile for few rows. What else the request asks `shares` refuses."""
    modified = p.window or p.soft_cap
    many = p.rows * p.qhead_per_kvhead > SHARED_ROWS and not p.batch_invariant
    tile = SHARED_TILES.get((p.head_dim_qk, p.head_dim_vo)) if many else None
    mask = MaskSpec("always" if p.causal else "never", modified, p.drafts, p.custom_mask)
    logits = LogitsSpec(modified, p.skip, p.alibi, p.head_scales)
    out = (p.out,) if p.out in DTYPES else outputs(p.q, p.out)
    kv = KVSpec(p.kv, kv_source(p))
    return AttentionSpec(
        p.q, kv, out, p.head_dim_qk, p.head_dim_vo, mask, logits, "stream_k", cast(Sm100TileConfig, tile)
    )


def candidate(request: KernelRequest, arch: str) -> Spec:
    """The spec that would serve a request, if `supports` lets it."""
    if request.phase == "decode":
        return sharing(request)
    p, dims = request, (request.head_dim_qk, request.head_dim_vo)
    mask, logits = MaskSpec("always" if p.causal else "never"), LogitsSpec()
    plain = p.out in DTYPES and not (p.window or p.soft_cap or p.drafts or p.custom_mask or p.alibi)
    out = (p.out,) if plain else outputs(p.q, p.out)[: 1 if p.out in DTYPES and p.q in DTYPES else 3]
    if not plain:
        mask, logits = MaskSpec("value", window=True, tree=p.drafts, custom=p.custom_mask), LogitsSpec(soft_cap=True)
    logits = replace(logits, skip=p.skip, alibi=p.alibi)
    kv, tile = KVSpec(p.kv, kv_source(p)), tile_of(p.q, p.kv, dims, arch)
    if tile is not None and tile.m == 256 and not p.skip:  # whose rule depends on the blocks before
        tile = replace(tile, has_half_tiles=True)
    return AttentionSpec(p.q, kv, out, *dims, mask, logits, tile=tile)


def supports(spec: Spec) -> Refusal | None:
    """None where the kernel runs `spec`, else the reason why not: the only statement of what the kernel can do."""
    if spec.schedule == "stream_k":
        return shares(spec)
    if spec.q not in (*DTYPES, FP8):
        return Refusal("q", f"{spec.q}: the kernel has {', '.join((*DTYPES, FP8))}")
    if spec.kv.dtype not in (spec.q, *QUANTISED):
        return Refusal("kv", f"{spec.kv.dtype}: the kernel has {', '.join(dict.fromkeys((spec.q, *QUANTISED)))}")
    if spec.out not in [out[:count] for out in (outputs(spec.q, t) for t in DTYPES) for count in (1, 3)]:
        return Refusal("out", f"{', '.join(spec.out)}: the kernel has {', '.join((*DTYPES, 'e4m3', 'nvfp4'))}")
    if spec.dims not in TILES:
        return Refusal("head_dim", f"{spec.dims}: the kernel has {', '.join(map(str, TILES))}")
    if spec.mask.tree:
        return Refusal("drafts", "True: the kernel has no mask of bits")
    if spec.logits.head_scales:
        return Refusal("head_scales", "True: no other kernel, each takes factors a head")
    t, m = spec.tile, ROWS[spec.dims]
    if t is None or t.m != m or t.n not in (64, 96, 128) or t.load_warps != 1:
        return Refusal("tile", f"{t}: m is {m}, n 64, 96 or 128, a warp fills a stage")
    if t.has_half_tiles and (m < 256 or spec.logits.skip):
        return Refusal("tile", f"{t}: tiles of 128 rows too, where m is 256, without skip-softmax")
    return None


def shares(spec: Spec) -> Refusal | None:
    """`supports` of a kernel whose CTAs share keys. Its field is the phase: what it refuses `decode` may serve."""
    if spec.tile is None or spec.dims not in SHARED_TILES:
        dims = " and ".join(str(dim) for dim, _ in SHARED_TILES)
        return Refusal("phase", f"decode: serves more than {SHARED_ROWS} rows a request, of head_dim {dims}")
    if spec.q not in DTYPES or spec.kv != KVSpec(spec.q) or spec.out != (spec.q,):
        return Refusal("phase", "decode: serves 16-bit queries, caches and outputs of one type, pages that TMA fetches")
    if spec.mask != MaskSpec("always", spec.mask.window) or spec.logits != LogitsSpec(spec.logits.soft_cap):
        return Refusal("phase", "decode: serves causal masks, windows and soft caps")
    if spec.tile.m != 128 or spec.tile.n not in (64, 96, 128) or spec.tile.load_warps != 1 or spec.tile.has_half_tiles:
        return Refusal("phase", f"decode: {spec.tile}: m is 128, n 64, 96 or 128, a warp fills a stage")
    return None


def shipped(arch: str) -> list[Spec]:
    """Of bf16 and each head_dim a headline spec a mask, and one that takes the other modifiers as values; that of e4m3
    has all outputs. Of the usual head dims: the same in fp16 and e4m3; of 16 bits, pages of any size, a custom mask and
    a causal one with skip-softmax, and two whose CTAs share keys, of a causal mask and of modifiers; of bf16 over
    quantised K and V, a causal one and that of modifiers. Others are compiled at their first call."""
    found = []
    for q, dims in (*product(("bf16",), TILES), *product(("fp16", FP8), USUAL)):
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
        decode = KernelRequest(q, q, q, dim, dim, phase="decode")
        found += [candidate(decode, arch), candidate(replace(decode, window=True), arch)]
    return found if arch in ARCHS else []
