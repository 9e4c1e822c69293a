"""Prefill on Blackwell: many query rows, tcgen05. No device has run it: it compiles, and the simulator runs it. This
file is plain Python, see `sm90`.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar, cast

from ..problem import Problem, Refusal
from ..spec import DTYPES, AttentionSpec, KVSpec, LogitsSpec, MaskSpec, source_of

ARCHS = ("sm_100a", "sm_103a")
PHASE = "prefill"


@dataclass(frozen=True)
class Tile:
    """m query rows, two halves of 128, x n keys a CTA; `stages` K and as many V tiles in flight, `q_stages` Q tiles.
    loaders: warps that fill a stage together. emulated: of 16 exponentials, those without the special function unit,
    where no key is hidden."""

    m: int = 256
    n: int = 128
    stages: int = 2
    q_stages: int = 1
    loaders: int = 1
    emulated: int = 0
    promote: ClassVar[int] = 0
    raw_stages: ClassVar[int] = 0
    l2_bytes: ClassVar[int] = 32 << 20  # of K and V at work at a time; L2 is 126 MB in two halves

    @property
    def heights(self) -> tuple[int, ...]:
        """Rows that a tile may have."""
        return (self.m,)

    @property
    def name(self) -> str:
        return f"m{self.m}n{self.n}s{self.stages}" + (f"e{self.emulated}" if self.emulated else "")


Spec = AttentionSpec[Tile]

# 227 KiB of shared memory hold `q_stages` of Q, `stages` of K and of V.
TILES = {(64, 64): Tile(stages=4), (128, 128): Tile(stages=2)}  # (head_dim_qk, head_dim_vo) -> tile
EMULATED = {"sm_100a": 4}  # sm_103a has twice the exponentials a clock


def tile_of(dims: tuple[int, int], arch: str) -> Tile:
    """None where the kernel has no such head_dim."""
    tile = TILES.get(dims)
    return cast(Tile, tile and replace(tile, emulated=EMULATED.get(arch, 0)))


def candidate(problem: Problem, arch: str) -> Spec:
    """The spec that would serve a problem, if `supports` lets it."""
    p, dims = problem, (problem.head_dim_qk, problem.head_dim_vo)
    out = (p.out,) if p.out in DTYPES else (p.out, "")
    kv, tile = KVSpec(p.kv, source_of(p)), tile_of(dims, arch)
    if p.window or p.soft_cap or p.drafts or p.custom_mask or p.alibi:
        mask = MaskSpec("value", window=True, bits=p.drafts, custom=p.custom_mask)
        logits = LogitsSpec(soft_cap=True, alibi=p.alibi)
    else:
        mask, logits = MaskSpec("always" if p.causal else "never"), LogitsSpec()
    logits = replace(logits, skip=p.skip, head_scales=p.head_scales)
    return AttentionSpec(p.q, kv, out, *dims, mask, logits, tile=tile)


def supports(spec: Spec) -> Refusal | None:
    """None where the kernel runs `spec`, else the reason why not: the only statement of what the kernel can do."""
    if spec.q not in DTYPES:
        return Refusal("q", f"{spec.q}: the kernel has {', '.join(DTYPES)}")
    if spec.kv.dtype != spec.q:
        return Refusal("kv", f"{spec.kv.dtype}: the kernel has {spec.q}, the query's")
    if spec.out not in [(t,) for t in DTYPES]:
        return Refusal("out", f"{spec.out[0]}: the kernel has {', '.join(DTYPES)}")
    if spec.dims not in TILES:
        return Refusal("head_dim", f"{spec.dims}: the kernel has {', '.join(map(str, TILES))}")
    if spec.kv.source != "tma":
        return Refusal("page_size", "pages of any size: the kernel fetches boxes of 8 rows and more")
    for field, has in (("drafts", spec.mask.bits), ("custom_mask", spec.mask.custom), ("alibi", spec.logits.alibi),
                       ("skip", spec.logits.skip), ("head_scales", spec.logits.head_scales)):  # fmt: skip
        if has:
            return Refusal(field, "True: the kernel has none")
    if spec.pack_gqa or spec.schedule != "tiles":
        return Refusal("schedule", "packed rows or parts of tiles: the kernel has whole tiles of one head")
    if spec.tile is None or spec.tile.m != 256 or spec.tile.n != 128 or spec.tile.loaders != 1:
        return Refusal("tile", f"{spec.tile}: m is 256, n 128, a warp fills a stage")
    return None


def shipped(arch: str) -> list[Spec]:
    """Of each type and head_dim one spec a mask, and one that takes the other modifiers as values."""
    masks = [(MaskSpec("always"), LogitsSpec()), (MaskSpec("never"), LogitsSpec())]
    masks.append((MaskSpec("value", window=True), LogitsSpec(soft_cap=True)))
    found = [
        AttentionSpec(q, KVSpec(q), (q,), *dims, mask, logits, tile=tile_of(dims, arch))
        for q, dims, (mask, logits) in product(DTYPES, TILES, masks)
    ]
    return found if arch in ARCHS else []
