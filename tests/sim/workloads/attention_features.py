"""The covering set of features of prefill, decode and xqa.

Every promise of the support table and of the docstrings has a scenario that fails if the feature is wrong. The
kernels are those that serve the calls; shapes are as small as possible while every pipeline still wraps around."""

from dataclasses import replace
from typing import Any

from bench.cases.attention import AttentionCase
from bench.cases.planted import KEPT, STEP, STEP_SCALE

from .attention import SHARED_SMS, Scenario

MANY = 70  # requests: the scheduler looks at 32 at a time


def spread(count: int, tokens: dict[int, int]) -> tuple[int, ...]:
    """Return lengths of `count` requests: those in `tokens`, 0 for the others."""
    return tuple(tokens.get(i, 0) for i in range(count))


def dims(case: AttentionCase, dim: int, **change: Any) -> AttentionCase:
    """Return the case with a head_dim of `dim`."""
    return replace(case, head_dim_qk=dim, head_dim_vo=dim, **change)


def prefill() -> list[Scenario]:
    packed = AttentionCase(
        "", q_lens=(5, 0, 2), kv_lens=(1190, 9, 83), heads_q=6, heads_kv=2, data="needles", sink=True
    )
    plain = replace(packed, q_lens=(3, 150), kv_lens=(61, 333), heads_q=2)
    wide = replace(plain, head_dim_qk=128, head_dim_vo=128, q_lens=(130, 1), kv_lens=(817, 35), heads_q=1, heads_kv=1)
    found = [
        # tails of V at every TMA box size, all layouts and caches; the packed one fills every stage twice
        replace(packed, name="page 8, packed, NHD, separate tables", page_size=8, layout="NHD", separate_tables=True),
        replace(plain, name="page 16, strided, stacked", page_size=16, cache="stacked", layout="NHD", strided_q=True),
        replace(wide, name="page 32, head_dim 128", page_size=32),
        replace(plain, name="page 64, full, window", page_size=64, causal=False, window_left=101),
        replace(plain, name="page 128, cap, window", page_size=128, window_left=90, soft_cap=9.0),
        replace(packed, name="page 256, shared, device scales", page_size=256, cache="shared", device=("scale", "out"),
                out_scale=-1.7, kv_lens=(400, 9, 83)),
        # scores of any size
        replace(packed, name="scale 1", scale=1.0, data="normal", kv_lens=(700, 9, 83), sink=30.0),
        replace(packed, name="scale 1, fp16", scale=1.0, data="normal", kv_lens=(700, 9, 83), dtype="fp16"),
        replace(wide, name="scale 1, head_dim 128", scale=1.0, data="normal", fresh=True, strided_q=True),
        # rows and tiles without keys
        replace(plain, name="no keys, sink", q_lens=(3, 200, 7), kv_lens=(0, 9, 2)),
        replace(packed, name="no keys", q_lens=(3, 40, 7), kv_lens=(0, 9, 2), sink=False),
        replace(packed, name="window 0, 5 heads", window_left=0, heads_q=5, heads_kv=1, uint32_lens=True),
        # requests beyond those that the scheduler looks at together
        replace(packed, name="70 requests", q_lens=spread(MANY, {0: 1, 31: 2, 32: 1, 33: 2, 63: 1, 64: 2, 69: 1}),
                kv_lens=spread(MANY, {0: 5, 20: 9, 31: 40, 32: 130, 33: 7, 64: 33, 69: 12})),
        replace(packed, name="far", far=True, heads_q=4, kv_lens=(40, 9, 83)),
        dims(plain, 512, name="head_dim 512", q_lens=(3, 70), kv_lens=(61, 133)),
        # K and V of both heads leave L2, so tiles go by sections of heads; lengths of several buckets
        replace(plain, name="window, a long sequence", q_lens=(130, 300, 5), kv_lens=(300, 33_000, 40), page_size=128,
                window_left=90, data="normal", heads_q=4),
    ]  # fmt: skip
    # dependencies of a plan: calls that differ in one parameter, and at last one equal to the first
    first = replace(packed, name="first", q_lens=(5, 2, 3), kv_lens=(40, 83, 9), heads_q=4, page_size=8)
    rows, one = replace(first, name="many rows", q_lens=(70, 2, 3)), {"q_lens": (1, 2, 1)}
    facts: list[dict[str, Any]] = [
        {"dtype": "fp16"}, {"soft_cap": 6.0}, {"soft_cap": 6.0, "causal": False}, {"layout": "NHD"},
        {"device": ("scale", "out")}, one, one | {"function": "decode"},
    ]  # fmt: skip
    turns = [first, *(replace(first, name=str(fact), **fact) for fact in facts)]
    turns += [rows, replace(rows, name="window", window_left=20), first]
    scenarios = [Scenario(case.name, (case,)) for case in found]
    return [*scenarios, Scenario("calls in turn", tuple(turns))]


def decode() -> list[Scenario]:
    few = AttentionCase(
        "", q_lens=(1, 1, 1), kv_lens=(1300, 0, 83), heads_q=6, heads_kv=2, data="needles", sink=True,
        function="decode",
    )  # fmt: skip
    many = replace(few, q_lens=(4, 0, 3), kv_lens=(1030, 40, 83))
    d128 = replace(few, head_dim_qk=128, head_dim_vo=128, heads_q=3, heads_kv=1)
    e4m3, nvfp4 = replace(few, kv_dtype="fp8", dtype="fp16", heads_q=3, heads_kv=1), replace(d128, kv_dtype="nvfp4")
    skip = replace(few, name="skip", scale=STEP_SCALE, data="steps", q_lens=(1,), kv_lens=(1536,), sink=False)
    below, above = (1536 * 2 ** -(STEP + step) for step in (0.2, -0.2))
    found = [
        replace(few, name="page 8, NHD", page_size=8, layout="NHD"),
        replace(many, name="page 16, window, separate tables", page_size=16, window_left=600, separate_tables=True),
        replace(few, name="page 128, fp16, stacked NHD", page_size=128, dtype="fp16", cache="stacked", layout="NHD"),
        replace(d128, name="page 32, strided, NVFP4 output, uint32", page_size=32, strided_q=True, uint32_lens=True,
                out_dtype="nvfp4"),
        replace(few, name="page 256, shared NHD", page_size=256, cache="shared", layout="NHD", kv_lens=(900, 0, 83)),
        replace(many, name="cap, device scales", soft_cap=5.0, device=("log2", "out"), out_scale=-0.3, o_scale=7.0),
        replace(few, name="scale 1", scale=1.0, data="normal", sink=30.0),
        replace(many, name="scale 1, 12 rows", scale=1.0, data="normal", fresh=True),
        replace(e4m3, name="e4m3, e4m3 output", out_dtype="fp8", out_scale=300.0, o_scale=3.0, page_size=8),
        replace(e4m3, name="e4m3, 12 rows", dtype="bf16", q_lens=(4, 1), kv_lens=(1100, 300), page_size=64, o_scale=2.0,
                sink=False),
        replace(e4m3, name="e4m3, scale 1", q_lens=(2, 1), kv_lens=(700, 300), scale=1.0, data="normal"),
        replace(nvfp4, name="nvfp4", page_size=8),
        replace(nvfp4, name="nvfp4, interleaved, e4m3 output", q_lens=(4, 1), kv_lens=(1100, 300), page_size=16,
                interleaved=True, out_dtype="fp8", separate_tables=True),
        replace(nvfp4, name="nvfp4, head_dim 64, interleaved, NHD", head_dim_qk=64, head_dim_vo=64, page_size=64,
                interleaved=True, layout="NHD"),
        replace(many, name="no keys", q_lens=(2, 4, 3), kv_lens=(0, 4, 300), sink=False),
        replace(few, name="70 requests", kv_lens=spread(MANY, {0: 5, 31: 40, 32: 300, 33: 7, 63: 1, 64: 133, 69: 12}),
                q_lens=spread(MANY, {0: 1, 20: 1, 31: 2, 32: 1, 33: 2, 64: 2, 69: 1})),
        replace(many, name="drafts", drafts=True, q_lens=(40, 3), kv_lens=(256, 60), heads_q=2, heads_kv=1),
        replace(few, name="far", far=True, kv_lens=(140, 0, 83)),
        replace(nvfp4, name="nvfp4, far", far=True, kv_lens=(140, 0, 83)),
        replace(few, name="invariant", invariant=True, kv_lens=(4300, 0, 83), q_lens=(1, 2, 3)),
        replace(few, name="invariant, window", invariant=True, kv_lens=(5000, 0, 83), heads_q=3, heads_kv=1,
                window_left=4400, out_dtype="fp8", device=("out",), out_scale=4.0),
        replace(e4m3, name="e4m3, large queries", dtype="bf16", q_unit=2.0**20, scale=2.0**-21, data="normal",
                q_lens=(4, 1, 1), kv_lens=(300, 0, 83)),
    ]  # fmt: skip
    first = replace(few, name="first", q_lens=(1, 1), kv_lens=(130, 300), heads_q=4, page_size=8)
    facts: list[dict[str, Any]] = [
        {"dtype": "fp16"}, {"out_dtype": "fp8"}, {"dtype": "fp16", "kv_dtype": "fp8"}, {"layout": "NHD"},
        {"device": ("scale",)}, {"q_lens": (1, 7)}, {"head_dim_qk": 128, "head_dim_vo": 128},
        {"dtype": "fp16", "kv_dtype": "fp8", "out_dtype": "fp8"}, {"q_lens": (2, 2)}, {"kv_dtype": "nvfp4"},
        {"kv_dtype": "nvfp4", "interleaved": True}, {"drafts": True}, {"lse": False, "scale": 0.2},
        {"out_dtype": "nvfp4"}, {"dtype": "fp8", "out_dtype": "bf16"}, {"dtype": "fp8", "out_dtype": "nvfp4"},
    ]  # fmt: skip
    turns = [replace(first, name=str(fact), **fact) for fact in facts]
    rows = (  # K and V without pages, of which CTAs share the keys
        few, replace(many, window_left=600), replace(e4m3, page_size=64), replace(e4m3, dtype="fp8", out_dtype="bf16"),
        replace(few, head_dim_qk=256, head_dim_vo=256, kv_lens=(300, 0, 83)),
        replace(d128, q_lens=(9, 0, 20), kv_lens=(900, 40, 283), heads_q=6, heads_kv=2),
        replace(e4m3, dtype="bf16", q_lens=(9, 0, 20), kv_lens=(900, 40, 283)),
    )  # fmt: skip
    parts = replace(few, name="40 parts", q_lens=(1,), kv_lens=(5000,), heads_q=8, heads_kv=1, scale=1.0, data="normal")
    return [
        *(Scenario(case.name, (case,), SHARED_SMS) for case in found),
        Scenario("calls in turn", (first, *turns, first), SHARED_SMS),
        Scenario("rows without pages", rows, SHARED_SMS, ("ragged",)),
        Scenario("40 parts", (parts,), 40),
        Scenario("skip", (
            replace(skip, skip=above, kept=KEPT), replace(skip, skip=below),
            replace(skip, data="steps-mixed", skip=above, heads_q=3, heads_kv=1),
            replace(skip, skip=above, kept=KEPT, heads_q=12, heads_kv=1),
            replace(skip, skip=below, kept=KEPT, soft_cap=100.0, heads_q=3, heads_kv=1, scale=1.4 * STEP_SCALE),
        ), 1),
    ]  # fmt: skip


def xqa() -> list[Scenario]:
    one = AttentionCase(
        "", q_lens=(1, 1, 1), kv_lens=(600, 0, 83), heads_q=6, heads_kv=2, data="needles", sink=True, lse=False,
        function="xqa", layout="NHD", uint32_lens=True,
    )  # fmt: skip
    found = [
        replace(one, name="flat, window", cache="flat", window_left=300, out_scale=0.7, zero_page=True),
        replace(one, name="drafts, e4m3 output", q_lens=(5, 5), kv_lens=(512, 83), drafts=True, kv_dtype="fp8",
                out_dtype="fp8", o_scale=30.0, device=("scale", "out"), out_scale=1.5, window_left=500),
        replace(one, name="ragged drafts", q_lens=(3, 0, 5), kv_lens=(140, 9, 83), drafts=True, layout="HND",
                o_scale=30.0, page_size=128),
        replace(one, name="nvfp4, interleaved", kv_dtype="nvfp4", interleaved=True, page_size=32, zero_page=True),
    ]  # fmt: skip
    return [Scenario(case.name, (case,), SHARED_SMS) for case in found]


def of_other_kernels() -> list[Scenario]:
    """Return scenarios of kernels that no bundle holds: of more head dims, and of a prefill that skips blocks with a
    window and a cap. `pytest --all` runs them."""
    prompts = AttentionCase(
        "", q_lens=(3, 150), kv_lens=(61, 333), heads_q=2, heads_kv=2, data="needles", sink=True, kv_dtype="nvfp4"
    )
    plain = replace(prompts, kv_dtype="")
    packed = replace(plain, q_lens=(5, 0, 2), kv_lens=(133, 9, 0), heads_q=6, dtype="fp8")
    few = replace(prompts, q_lens=(1, 1, 1), kv_lens=(300, 0, 83), interleaved=True, function="decode")
    small: dict[str, Any] = {"q_unit": 2.0**-20, "scale": 2.0**17, "data": "normal", "sink": False}
    gathered = replace(plain, q_lens=(5, 0, 2), kv_lens=(1190, 9, 83), heads_q=6, page_size=3)
    many = replace(few, q_lens=(4, 0, 3), kv_lens=(1030, 40, 83), heads_q=6, interleaved=False, page_size=3)
    found = [
        dims(gathered, 112, name="head_dim 112, pages of 3"),
        dims(many, 112, name="head_dim 112, e4m3, NVFP4 output", kv_dtype="fp8", out_dtype="nvfp4"),
        # rows of 80 bytes, which TMA loads, and 10 factors
        dims(prompts, 160, name="head_dim 160, NVFP4 cache", q_lens=(3, 70), kv_lens=(61, 133)),
        dims(prompts, 80, name="head_dim 80, NVFP4 cache"),
        dims(prompts, 160, name="head_dim 160, e4m3 cache", kv_dtype="fp8"),
        dims(prompts, 512, name="head_dim 512, NVFP4 cache", q_lens=(3, 70), kv_lens=(61, 133)),
        dims(plain, 192, name="head_dim 192", q_lens=(130, 1)),
        dims(packed, 80, name="head_dim 80, e4m3, NVFP4 output", out_dtype="nvfp4", kv_lens=(400, 9, 0)),
        dims(packed, 512, name="head_dim 512, e4m3, NVFP4 output", out_dtype="nvfp4"),
        dims(few, 112, name="head_dim 112, nvfp4, interleaved", heads_q=3, heads_kv=1, kv_lens=(500, 0, 83)),
        dims(few, 160, name="head_dim 160, shared heads", kv_dtype="", interleaved=False, heads_q=9, heads_kv=1),
        dims(few, 192, name="head_dim 192, nvfp4, interleaved"),
        dims(few, 256, name="head_dim 256, nvfp4, interleaved"),
        dims(few, 512, name="head_dim 512, nvfp4, interleaved", page_size=12, window_left=200, out_dtype="nvfp4"),
        dims(few, 48, name="head_dim 48, e4m3", kv_dtype="", dtype="fp8", out_dtype="bf16", interleaved=False),
        dims(few, 208, name="head_dim 208, e4m3 cache", kv_dtype="fp8", interleaved=False),
        dims(few, 96, name="head_dim 96, e4m3 cache, 12 rows", kv_dtype="fp8", interleaved=False, q_lens=(4, 1, 1)),
        *(
            replace(one, name=f"small queries, {function}, {kind}", kv_dtype=kind, interleaved=False, **small)
            for function, one in (("prefill", prompts), ("decode", few))
            for kind in ("e5m2", "int8-token")
        ),
    ]
    one = replace(few, kv_dtype="", interleaved=False, heads_q=6)
    found += [  # head dims that TMA, or a warp that copies rows, pads with zeros
        dims(plain, 80, name="head_dim 80", page_size=8, strided_q=True),
        dims(one, 80, name="head_dim 80, NVFP4 output", out_dtype="nvfp4", scale=1.0, data="normal",
             kv_lens=(1300, 0, 83)),
        dims(one, 512, name="head_dim 512", q_lens=(1, 1, 9)),
    ]  # fmt: skip
    levels = replace(  # some blocks are skipped
        plain, data="levels", scale=STEP_SCALE, heads_q=6, q_lens=(5, 0, 30), kv_lens=(1190, 9, 700), skip=160.0,
        soft_cap=30.0,
    )  # fmt: skip
    skips = (
        replace(levels, window_left=800),
        replace(levels, heads_q=2, q_lens=(3, 150), kv_lens=(61, 600), causal=False),
    )
    return [*(Scenario(case.name, (case,), SHARED_SMS) for case in found), Scenario("skip", skips)]


def attention_features() -> list[Scenario]:
    return [
        replace(scenario, name=f"{part.__name__}: {scenario.name}")
        for part in (prefill, decode, xqa)
        for scenario in part()
    ]
