"""Problems for the attention kernels: small ones for every shipped kernel, and a covering set of features.

A scenario is one or more calls of public functions on the same device, one after the other. Unused memory,
scratch and outputs hold NaN; results are compared with the fp32 reference of the same data, and with those of an
equal call before."""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from ptxsim.faults import Fault
from ptxsim.runner import RunResult

from bench.cases import attention as cases
from bench.cases import forms
from bench.cases.attention import AttentionCase
from bench.cases.choice import by_shape
from bench.cases.planted import LEVEL_KEYS, STEP_SCALE
from cute_kernels.attention.decode import FEW_ROWS, tile_table
from cute_kernels.attention.latent.tile_table import LatentTileConfig
from wrappers import fp4
from wrappers.attention.call import AttentionCall
from wrappers.attention.op import serve

from .common import SMS, Outcome, digest, distance, outcome, simulated
from .mla import MlaScenario, mla_cases, run_mla

Results = tuple[torch.Tensor, torch.Tensor | None]  # out (T, Hq, Dvo), lse
SHARED_SMS = 7  # when CTAs share the keys of a request
MANY_SMS = 5  # fewer than the tiles of a call of three requests
PARTS = 26  # splits of a long request, one per SM
# (bits of K and V, padded head_dim) for which decode has tiles of more rows per warp than `FEW_ROWS`
BITS = {"half": 16, "e4m3": 8, "nvfp4": 4}
WIDE = {(BITS[key.kind], key.head_dim) for key in tile_table.measured(False) if key.rows > FEW_ROWS}

CACHES = {("e4m3", ""): "fp8", ("e4m3", "token"): cases.TOKEN_SCALES}  # (dtype, scales) of K and V -> name in cases
DECODE_STRUCTURES = {  # (KV dtype, head_dim, 8 rows per warp): every type, head_dim and number of rows
    ("", 64, True), ("", 64, False), ("", 128, True), ("", 256, True), ("fp8", 64, False),
    ("nvfp4", 64, True), ("nvfp4", 128, True), ("nvfp4", 128, False), (cases.TOKEN_SCALES, 64, True),
}  # fmt: skip
GATHER_STRUCTURES = {("", 64, True)}
# (query dtype, KV dtype, head_dim) of decode kernels with prefill's code, with keys shared by CTAs
SHARED_STRUCTURES = {("bf16", "bf16", 128), ("bf16", "e4m3", 64), ("bf16", "nvfp4", 128), ("e4m3", "e4m3", 128)}
# (KV dtype, head_dim, general) of prefill over quantised caches
PREPARED_STRUCTURES = {("e4m3", 128, False), ("nvfp4", 64, True)}
WIDE_STRUCTURES = {(192, False), (256, False)}  # (head_dim, general) of prefill beyond 128


@dataclass(frozen=True)
class Scenario:
    """Calls on a device of `sms` SMs; equal cases get the same data. forms: names of `bench.cases.forms` to apply to
    their problems. chosen_by_shape: the kernel is chosen as for users."""

    name: str
    calls: tuple[AttentionCase, ...]
    sms: int = SMS
    forms: tuple[str, ...] = ()
    chosen_by_shape: bool = False

    @property
    def choice(self) -> AbstractContextManager[None]:
        """Return a context in which the kernel is chosen."""
        return by_shape() if self.chosen_by_shape else nullcontext()


@dataclass(frozen=True)
class KernelTraits:
    """The properties of a kernel's spec that the cases depend on."""

    decodes: bool
    shares: bool  # decode with prefill's code
    few_rows: int  # query rows per request from which another kernel serves it; 0: none does
    wide: bool  # decode of more rows; on Blackwell it serves them if a call skips blocks
    window: bool
    work: str  # of decode's tile
    cap: bool
    general: bool  # causal or full, as the call requests
    gathers: bool  # pages of any size
    custom: str  # the kind of its custom mask, or "prefix"
    skips: bool  # prefill that skips blocks
    several: bool  # output types
    block: int  # keys per stage
    keys: int  # of all stages
    promoted: int  # blocks after which sums are promoted, 0: never
    several_tiles: bool  # for few rows and for many
    same: dict[str, Any]  # common arguments of its cases


def traits_of(spec: Any) -> KernelTraits:
    """Return the traits of a spec; nothing else here reads specs."""
    decodes = spec.schedule == "stream_k"
    shares = decodes and spec.tile.per_tile_pack_gqa
    # decode converts e4m3 like any cache
    own = spec.kv.dtype == spec.smem_q and (shares or not decodes or spec.q != "e4m3")
    narrow = decodes and not shares and spec.tile.rows_per_warp == FEW_ROWS
    narrow = narrow and (spec.kv.bits, spec.padded_qk) in WIDE
    out = spec.out[0] if spec.q == "e4m3" else ""
    if len(spec.out) > 1 and not decodes and not out:  # another kernel serves outputs of the queries' type
        out = "fp8"
    same: dict[str, Any] = {
        "function": "decode" if decodes else "context",
        "dtype": {"e4m3": "fp8"}.get(spec.q, spec.q),
        "out_dtype": out,
        "head_dim_qk": spec.head_dim_qk,
        "head_dim_vo": spec.head_dim_vo,
        "causal": spec.mask.causal != "never" or spec.mask.custom == "ranges",
        "kv_dtype": "" if own else CACHES.get((spec.kv.dtype, spec.kv.scales), spec.kv.dtype),
    }
    stages = max(spec.tile.stages, getattr(spec.tile, "raw_stages", 0)) if shares else spec.tile.stages
    block, few, wide = spec.tile.n, FEW_ROWS if narrow else 0, decodes and not (shares or narrow)
    general = not decodes and spec.mask.causal == "value"
    mask, gathers = spec.mask, spec.kv.source == "gather"
    cap, skips = spec.logits.soft_cap, spec.logits.skip and not decodes
    several, custom = len(spec.out) > 1, mask.custom or "prefix" * mask.prefix
    work = next((key.work for key, tile in tile_table.tiles_of("sm_90a").items() if tile == spec.tile), tile_table.ANY)
    promoted = getattr(spec.tile, "promote_interval", 0)  # of Hopper's prefill
    return KernelTraits(
        decodes, shares, few, wide, mask.window or mask.custom == "ranges", work, cap, general, gathers, custom, skips,
        several, block, block * stages, promoted, not decodes and len(spec.tile.m_choices) > 1, same,
    )  # fmt: skip


def structure(spec: Any) -> Any:
    """Return a key of the kernel's code apart from types, masks and modifiers, which one mode covers; None if
    another head dimension stands for it."""
    if isinstance(spec.tile, LatentTileConfig):
        few = {  # rows by pages, planar factors by slots, and two records, one of which has codes of e2m1
            (16, "gather", "656", ""), (8, "slots", "584", "584"), (16, "slots", "528", "288")
        }  # fmt: skip
        read = spec.tile.m, spec.kv.source, spec.kv.record, spec.kv.extra_record
        return ("latent", "few", read) if read in few else None
    if spec.kv.union:  # a kernel in front, which test_ptxsim_key_union.py runs, and words of rows of a tile
        return None
    if spec.kv.record:  # the mma warps load, too; other records have other sections of a row
        return ("latent", "packed") if (spec.kv.record, spec.kv.source) == ("656", "slots") else None
    if spec.kv.shares_v:
        if spec.kv.source == "tma":  # either head dimension stands for both
            return (
                ("latent", spec.tile.cluster) if (spec.tile.cluster, spec.head_dim_qk) in ((1, 576), (2, 512)) else None
            )
        if spec.kv.source == "slots":  # P lies in K with 576 columns
            return ("latent", "slots", spec.kv.extra) if spec.kv.extra == (spec.head_dim_qk == 512) else None
        return ("latent", spec.kv.source, spec.kv.extra)
    k, dim = traits_of(spec), spec.head_dim_qk
    if spec.kv.scales == "token" and not k.decodes:  # the prepare role multiplies rows as it does blocks
        return None
    if k.shares:
        key = spec.q, spec.kv.dtype, dim
        return ("shares", *key, k.window) if key in SHARED_STRUCTURES else None
    if k.work != tile_table.ANY:  # the code of the kernel for any call, in another tile
        return "narrow" if (k.work, k.same["kv_dtype"], dim) == (tile_table.NARROW, "", 64) else None
    if k.decodes:
        key = k.same["kv_dtype"], dim, spec.tile.rows_per_warp == FEW_ROWS
        if spec.kv.source == "slots":  # no role waits or signals otherwise than in kernels that gather
            return None
        if k.gathers:
            return (*key, "gathers") if key in GATHER_STRUCTURES else None
        return key if key in DECODE_STRUCTURES else None
    if k.custom:  # tree-mask bits are read like any operand
        return None
    if spec.kv.dtype != spec.q:
        return (spec.kv.dtype, dim) if (spec.kv.dtype, dim, k.general) in PREPARED_STRUCTURES else None
    if spec.q == "e4m3":
        return "fp8" if (dim, k.general) == (128, False) else None
    if k.skips:
        return "skips" if dim == 64 else None
    if k.gathers:
        return "gathers" if dim == 64 and k.general else None
    if dim > 128 and (dim, k.general) not in WIDE_STRUCTURES or (dim, k.general) == (128, True):
        return None
    return dim, k.general


def structures(specs: Iterable[Any]) -> list[Any]:
    """Return a shipped spec of every structure, bf16 if there is one, with all types of outputs if there is one: these
    also run in other modes than `eager`."""
    found: dict[Any, Any] = {}
    for spec in sorted(specs, key=lambda spec: traits_of(spec).same["dtype"]):
        key = structure(spec)
        if key and (key not in found or len(spec.out) > len(found[key].out)):
            found[key] = spec
    return list(found.values())


def skipping_cases(k: KernelTraits) -> list[Scenario]:
    """Return scenarios of a prefill kernel with skip-softmax: some blocks are skipped by one warpgroup and not by
    another, or by none."""
    some = AttentionCase(
        "some blocks", q_lens=(9, 210, 2, 3), kv_lens=(0, 700, 0, 61), heads_q=2, heads_kv=1, sink=True, data="levels",
        scale=STEP_SCALE, skip=160.0, device=("scale", "out"), **k.same,
    )  # fmt: skip
    none = replace(
        some, name="none", q_lens=(9, 1), kv_lens=(300, 40), heads_q=4, heads_kv=2, page_size=64, skip=1e-30, lse=False
    )
    three = replace(some, name="three levels", q_lens=(9, 2), kv_lens=(700, 61), data="levels-three", sink=False)
    boxes = [Scenario(f"page {size}", (replace(none, page_size=size),), SMS, ("csr",)) for size in (8, 32)]
    nothing = replace(none, name="nothing", kv_lens=(0, 0))
    late = replace(  # blocks that are kept without a vote, some of which a vote would leave out, then votes again
        some, name="late", q_lens=(70,), kv_lens=(139 * LEVEL_KEYS - 30,), heads_q=1, sink=False, data="levels-late",
        scale=STEP_SCALE / 2, skip=7300.0,
    )  # fmt: skip
    lates = [Scenario("late", (late,))] if k.same["head_dim_qk"] == 64 else []
    return [Scenario("skip", (some, none, three, nothing)), *lates, *boxes]


def sharing_cases(k: KernelTraits) -> list[Scenario]:
    """Return scenarios of a kernel with CTAs that share the keys of requests with more rows than one warp has: parts
    of tiles that see no key, tiles of one CTA, of two and of many, requests of several tiles, rows of one head."""
    most = k.keys + 2 * k.block + 20
    ragged = AttentionCase(
        "ragged", q_lens=(1, 9, 0, 45, 2, 3), kv_lens=(0, 19, 7, most, 2 * k.block + 1, 0), heads_q=6, heads_kv=2,
        page_size=16, sink=True, data="peaks", layout="NHD", strided_q=True, device=("scale", "out"), out_scale=0.5,
        window_left=2 * k.block + 30 if k.window else -1, **k.same,
    )  # fmt: skip
    short = replace(
        ragged, name="short", q_lens=(8, 3), kv_lens=(most, 40), sink=False, lse=False, data="needles", window_left=-1,
        soft_cap=12.0 if k.cap else 0.0,
    )  # fmt: skip
    boxes = [replace(short, page_size=page, lse=True) for page in (8, 32, 64)]
    # keys: a CTA has more tiles than two rounds of the pipe that publishes them, and of that of Q over quantised caches
    few = (9,) * 10 if k.same["kv_dtype"] else (0,) * 4
    boxes[0] = replace(boxes[0], q_lens=(*short.q_lens, *(1,) * len(few)), kv_lens=(*short.kv_lens, *few))
    idle = (0,) * 127
    many = replace(short, name="many", q_lens=(*idle, 7, 0, 1), kv_lens=(*idle, k.block + 40, 7, 9), lse=True)
    one = replace(short, name="one", heads_q=70, heads_kv=1, q_lens=(3,), kv_lens=(2 * k.block,), lse=True)
    nothing = replace(ragged, name="nothing", q_lens=(9, 20), kv_lens=(0, 0))
    prompt = 3 * k.block + 30  # parts of its first tiles see no key
    whole = replace(short, name="whole", q_lens=(prompt,), kv_lens=(prompt,), lse=True, window_left=ragged.window_left)
    single = replace(short, name="single", heads_q=2, q_lens=(20, 1), kv_lens=(k.block + 30, 9), lse=True)
    return [
        Scenario("ragged", (ragged,), SHARED_SMS, ("csr",)),
        Scenario("short", (short, nothing), 3),
        Scenario("boxes", tuple(boxes), SMS),
        Scenario("many", (many, one, single), SHARED_SMS),
        Scenario("whole", (whole,), SHARED_SMS),
    ]


def chosen_cases(k: KernelTraits) -> list[Scenario]:
    """Return scenarios of a kernel of decode with tokens that choose their keys, some of which do not exist."""
    tokens, each = (2, 1) if k.few_rows else (5, 3)  # of three rows
    most = k.keys + k.block  # every stage is filled again
    ragged = AttentionCase(
        "ragged", q_lens=(tokens,) * 5, kv_lens=(0, 19, most, 7, 0), heads_q=6, heads_kv=2, page_size=3, sink=True,
        data="peaks", layout="NHD", strided_q=True, device=("scale", "out"), out_scale=0.5, **k.same,
    )  # fmt: skip
    short = replace(
        ragged, name="short", q_lens=(each, each), kv_lens=(k.block + 40, 9), sink=False, lse=False, page_size=64,
        soft_cap=12.0, cache="stacked", out_dtype="fp8",
    )  # fmt: skip
    crowd = replace(ragged, name="crowd", q_lens=(each,) * 9, kv_lens=tuple(37 * i % 131 for i in range(9)))
    long = replace(ragged, name="long", q_lens=(each,), kv_lens=(PARTS * k.block * 2 // 3,), heads_q=3, heads_kv=1)
    return [
        Scenario("ragged", (ragged,), SMS, ("slots",)),
        Scenario("crowd", (crowd, short), SHARED_SMS, ("slots",)),
        Scenario("long", (long,), PARTS, ("slots",)),
    ]


def promoting_calls(k: KernelTraits, short: AttentionCase) -> list[AttentionCase]:
    """Return calls in which sums are promoted: below a block that one request sees whole and the other in part; with
    a cap and without, each with an output type that `short` does not combine with it. Some maxima grow two blocks
    before the end, so that the promoted sums are rescaled and blocks follow."""
    n = k.block
    long = replace(
        short, q_lens=(9, 2, 9, 9), kv_lens=(0, (k.promoted + 3) * n + 2, (k.promoted + 3) * n, 0),
        heads_q=short.heads_q // 2, heads_kv=1, window_left=k.promoted * n + n // 2 if k.window else -1,
    )  # fmt: skip
    if not k.several:
        return [long]
    return [replace(long, soft_cap=0.0, out_dtype="nvfp4"), replace(long, soft_cap=12.0, out_dtype="fp8")]


def edge_call(k: KernelTraits, short: AttentionCase) -> AttentionCase:
    """Return a call of tiles of 256 rows. In the first row, the window begins with the last key of a block, with the
    first one, and with the second. On Blackwell, the halves of a tile begin in different blocks, and one is full for
    the first half alone. Few keys matter, so that each counts."""
    rows, left = 256, 3 * k.block + 5
    lens = tuple(rows + left + k.block + by for by in (-1, 0, 1))
    return replace(
        short, name="edges", q_lens=(rows,) * 3, kv_lens=lens, heads_q=1, heads_kv=1, window_left=left, soft_cap=0.0,
        data="normal", scale=0.0 if short.dtype == "fp8" else 1.0, lse=True,
    )  # fmt: skip


def with_small_queries(k: KernelTraits, scenarios: list[Scenario]) -> list[Scenario]:
    """Return scenarios in which one call over a quantised cache has bf16 queries that fp16 lacks: MMAs get them divided
    by a power of two for each row."""
    if not k.same["kv_dtype"] or k.same["dtype"] != "bf16":
        return scenarios
    small: dict[str, Any] = {"q_unit": 2.0**-30, "scale": 2.0**27, "data": "normal", "sink": False}
    return [
        replace(one, calls=(*one.calls[:-1], replace(one.calls[-1], **small))) if one.name == "boxes" else one
        for one in scenarios
    ]


def attention_cases(spec: Any, thorough: bool = False) -> list[Scenario]:
    """Return scenarios for the kernel `spec`. thorough: every box size too."""
    if spec.kv.shares_v:
        return mla_cases(spec)  # type: ignore[return-value]
    k = traits_of(spec)
    if spec.kv.source == "slots":
        return chosen_cases(k)
    return with_small_queries(k, cases_of(k, structure(spec) is None, spec.head_dim_qk, thorough))


def cases_of(k: KernelTraits, alike: bool, dim: int, thorough: bool) -> list[Scenario]:
    """Return scenarios for a kernel. alike: whether another kernel stands for its structure. dim: its head_dim_qk.

    Kernels that gather, and prefill over quantised caches, share the rest of their code with other kernels; only
    those in `structures` get all scenarios."""
    if k.skips:
        return skipping_cases(k)
    if k.shares:
        return sharing_cases(k)
    twin = (k.gathers or bool(k.same["kv_dtype"]) and not k.decodes) and alike
    wider = k.general or k.decodes and k.work != tile_table.NARROW  # a narrower window is served by another kernel
    window = (300 if wider else 75) if k.window else -1
    other = -1 if k.cap or k.decodes else window  # a kernel with a window serves calls without one
    first, second = ((5, 0, 40), (2, 1, 3)) if k.decodes else ((3, 0, 150), (9, 1, 197))
    if k.few_rows:
        first, second = (2, 0, 1), (1, 2, 1)
    elif twin or k.custom and dim == 64:
        first = first[0], 0, 40
    heads: dict[str, Any] = {"heads_q": 6 if k.decodes else 2, "heads_kv": 2}
    same = k.same | heads | {"data": "needles"} | ({"skip": 1e-30} if k.wide else {})
    stacked = "stacked" if k.same["head_dim_vo"] == dim else "tuple"
    page_size = 16 if k.same["dtype"] == "bf16" and not twin else 8  # with 64 below, every size of TMA box
    pages, larger = ((1, 5, 24), 100) if k.gathers else ((8, 16, 32), 64)
    in_forms = {"": (), "bits": ("csr", "mask"), "ranges": ("csr", "ranges"), "prefix": ("csr", "prefix")}[k.custom]
    if k.gathers:
        page_size, in_forms = pages[0], ("csr",)
    box_forms = () if k.gathers else in_forms or ("csr",)
    empty = 1 if k.decodes else 9  # rows without keys
    most = k.keys + 2 * k.block + 20  # every stage is filled again, and the diagonal crosses the end of a block
    ragged = AttentionCase(  # requests without keys too: the first one, and later ones
        "ragged", q_lens=(empty, *first, empty), kv_lens=(0, 19, 7, most, 0), page_size=page_size, sink=True,
        window_left=window, layout="NHD", strided_q=True, device=("scale", "out"), out_scale=0.5, **same,
    )  # fmt: skip
    if not k.decodes:  # scores that exceed those of the blocks before by more than P's type can hold
        ragged = replace(ragged, data="peaks", heads_q=4)  # some requests have packed rows, some not
    short = AttentionCase(
        "short", q_lens=second, kv_lens=(300 if k.custom else 256, 0, 140), page_size=larger, lse=False, cache=stacked,
        window_left=other, soft_cap=12.0 if k.cap else 0.0, **same,
    )  # fmt: skip
    sms = SHARED_SMS if k.decodes else SMS
    keys = k.block + 40  # so that several CTAs have a share
    other_boxes = [
        replace(short, page_size=page, kv_lens=(keys, 0, 9), lse=True, sink=True) for page in pages if page != page_size
    ]
    if k.several:
        other_boxes[-1] = replace(other_boxes[-1], out_dtype="nvfp4")
    if k.several_tiles:  # every key matters, so that a key from a wrong place shows
        other_boxes = [replace(box, data="normal", sink=False) for box in other_boxes]
    if k.several and not k.decodes:
        other_boxes = [replace(box, q_lens=(empty, *second), kv_lens=(0, keys, 0, 9)) for box in other_boxes]
        other_boxes[0] = replace(other_boxes[0], out_dtype="fp8", soft_cap=0.0)
    idle = (0,) * 127  # requests without queries: a warp looks at 32 at a time
    many = replace(short, q_lens=(*idle, 2 if k.few_rows else 3, 0, 1), kv_lens=(*idle, keys, 7, 9), lse=True)
    if k.decodes:
        many = replace(many, drafts=True, skip=1e-30, soft_cap=0.0)
    else:
        many = replace(many, heads_q=6, q_lens=(*idle, 30, 0, 29))  # packed tiles of more than 64 rows
        other_boxes[-1] = replace(other_boxes[-1], heads_kv=1)
    if k.decodes:  # tiles of more splits than a warp loads at once, more requests than a window holds
        each = 1 if k.few_rows else 3
        long = replace(short, name="long", q_lens=(each,), kv_lens=(PARTS * k.block - 7,), heads_q=3, heads_kv=1)
        lens = tuple(37 * i % 131 for i in range(40))
        crowd = replace(short, name="crowd", q_lens=(each,) * len(lens), kv_lens=lens, heads_q=3, heads_kv=1)
        parts = Scenario("long", (long,), PARTS), Scenario("crowd", (crowd,), sms)
    if k.work != tile_table.ANY:
        box, *others = (replace(call, window_left=window) for call in (other_boxes[-1], many, crowd))
        many_tiles = k.work == tile_table.MANY  # of each call: as many as SMs, or more
        pair = box, replace(others[1], page_size=8)
        return [
            Scenario("ragged", (ragged,), SMS, in_forms, many_tiles),
            Scenario("boxes", pair, MANY_SMS if many_tiles else sms, box_forms, many_tiles),
            Scenario("many", tuple(others), sms, (), many_tiles),
        ]
    if twin and k.decodes:
        return [Scenario("ragged", (ragged,), SMS, in_forms), Scenario("boxes", (other_boxes[-1], many), sms), *parts]
    if twin:
        box = replace(ragged, soft_cap=30.0) if k.general else other_boxes[-1]
        box = replace(box, page_size=pages[-1], q_lens=(*idle, *box.q_lens), kv_lens=(*idle, *box.kv_lens))
        boxes = (box,) if k.gathers else (*other_boxes[:-1], box)
        return [Scenario("ragged", (ragged,), SMS, in_forms), Scenario("boxes", boxes, sms, box_forms)]
    found = [
        Scenario("ragged", (ragged,), SMS, in_forms),
        Scenario("short", (short,), sms, in_forms if k.custom else ()),
    ]
    if k.general:  # code of its own with a cap, and a mask as the call requests
        calls = [replace(short, causal=False), replace(ragged, soft_cap=30.0)]
        calls += (
            [replace(short, soft_cap=0.0, window_left=400)] if k.custom else []
        )  # blocks that need no mask, without a cap
        found[1] = Scenario("short", tuple(calls), sms, in_forms if k.custom else ())
    found.append(Scenario("boxes", tuple(other_boxes), sms, box_forms))
    if not k.gathers and not k.custom and not k.same["kv_dtype"]:
        in_forms = ("ragged",)
    nothing = replace(many, name="nothing", q_lens=(9, 70), kv_lens=(0, 0))  # the first tile of a CTA sees no key
    one = replace(short, name="one", q_lens=(150,), kv_lens=(keys,), sink=True)  # one request: no search for tiles
    one = replace(one, nan=not k.same["kv_dtype"])  # its rows of the first head are NaN
    calls = [many] if k.decodes else [many, nothing, one]
    if k.cap and not k.decodes:  # code of its own without a cap
        calls.append(replace(many, soft_cap=0.0, window_left=window))
    found.append(Scenario("many", tuple(calls), sms, in_forms))
    if k.decodes:
        found += parts
    if k.several_tiles:  # one to three rounds of blocks in turn, beside a tile of many rows; needles first
        lens = 5 * k.block + 9, k.block - 8, 4 * k.block, k.block, 2 * k.block - 9
        few = replace(ragged, name="few", q_lens=(40, 150, 1, 3, 2), kv_lens=lens, soft_cap=9.0 if k.cap else 0.0)
        found.append(Scenario("few", (few,), SMS, in_forms))
    if k.window and not (k.decodes or k.custom or k.gathers):
        found.append(Scenario("edges", (edge_call(k, short),), sms, in_forms))
    if k.promoted:
        found.append(Scenario("promoted", tuple(promoting_calls(k, short)), sms))
    if thorough and not (k.gathers or k.custom):
        window = 600 if k.window and not k.decodes else -1  # without a window, another kernel may serve the call
        more = replace(ragged, kv_lens=(0, 1000, 0, 700, 0), window_left=window, sink=False)
        found += [Scenario(f"page {p}", (replace(more, page_size=p),), sms) for p in (8, 16, 64)]
    return found


def listed(case: AttentionCase, problem: AttentionCall) -> Results:
    """Run a problem that the case's function cannot express through `serve`, as the public classes do; return (out,
    lse)."""
    shape = len(problem.q), case.heads_q, case.head_dim_vo
    lse = torch.full(shape[:2], math.nan)
    if case.out_dtype == "nvfp4":
        packed = serve(problem._replace(out_dtype="nvfp4", out_sf_scale=cases.SF_SCALE, lse=lse))
        return fp4.load(packed, cases.SF_SCALE), lse
    out = torch.full(shape, math.nan).to(cases.DTYPES[case.out_dtype or case.dtype])
    serve(problem._replace(out=out, lse=lse))
    return out, lse


def data_of(out: Any) -> Any:
    return out.data if isinstance(out, fp4.FP4Tensor) else out


def launched(case: AttentionCase, problem: AttentionCall) -> Results:
    """Call the case's function; return (out (T, Hq, Dvo), lse or None)."""
    function, arguments = cases.FUNCTIONS[case.function]
    inputs = arguments(case, problem)
    result = function(**inputs)
    out, lse = result if case.lse else (result, None)
    if case.function == "xqa":
        if result is not None:
            raise Fault("xqa returns something")
        out = inputs["output"]
    elif not case.fresh and (data_of(out) is not data_of(inputs["out"]) or lse is not inputs.get("lse")):
        raise Fault("the results are not the tensors that the call gave for them")
    if isinstance(out, fp4.FP4Tensor):
        base: Any = out.data._base
        if case.strided_q and not case.fresh and not (base[:, 1::2] == 0x7F).all():
            raise Fault("the call writes beside its output")
        return fp4.load(out, cases.SF_SCALE), lse
    if case.strided_q and not case.fresh and not out._base[:, 1::2].isnan().all():
        raise Fault("the call writes beside its output")
    return out.reshape(len(problem.q), case.heads_q, case.head_dim_vo), lse


def call(case: AttentionCase, in_forms: tuple[str, ...] = ()) -> tuple[Results, float]:
    """Run a call; return (results, error). If the bits may not depend on the batch, also call its first request
    alone."""
    problem = forms.apply(cases.make_call(case), in_forms)
    want, want_lse = cases.expected(case, problem)
    out, lse = listed(case, problem) if in_forms else launched(case, problem)
    error = distance(out, want, 0.0, case.limit(want))
    if lse is not None:
        error = max(error, distance(lse, want_lse, case.lse_tolerance))
    if case.invariant:
        m, first = case.q_lens[0], launched(*cases.alone(case, problem))
        if digest(first) != digest((out[:m], None if lse is None else lse[:m])):
            raise Fault("the bits of the first request depend on the rest of its batch")
    return (out, lse), error


def run_attention(spec: Any, scenario: Scenario, arch: str, **how: Any) -> Outcome:
    """Run the scenario's calls; return their largest error and the bits of all of them. spec: the kernel that they
    must run."""
    if isinstance(scenario, MlaScenario):
        return run_mla(spec, scenario, arch, **how)
    launches: list[RunResult] = []
    bits: dict[AttentionCase, str] = {}
    results_of: list[tuple[AttentionCase, Results]] = []

    def run(case: AttentionCase) -> tuple[float, Results]:
        tensors, error = call(case, scenario.forms)
        results_of.append((case, tensors))
        if bits.setdefault(case, digest(tensors)) != digest(tensors):
            raise Fault(f"{case.name}: an equal call gives other bits")
        return error, tensors

    with simulated(arch, launches, scenario.sms, spec, **how), scenario.choice:
        found = outcome(scenario.calls, run, launches)
    for case, tensors in results_of:
        if digest(tensors) != bits[case]:
            raise Fault(f"{case.name}: a later call changes the results")
    return found
