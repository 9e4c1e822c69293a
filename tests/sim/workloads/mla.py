"""Simulated kernels of attention in which V lies in K."""

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from ptxsim.runner import RunResult

from bench.cases import mla as cases
from bench.cases.mla import MlaCase
from cute_kernels.attention import latent
from cute_kernels.attention.latent import tile_table as few_rows
from cute_kernels.attention.latent.tile_table import LatentTileConfig

from .common import SMS, Outcome, outcome, simulated


@dataclass(frozen=True)
class MlaScenario:
    """Calls on a device of `sms` SMs."""

    name: str
    calls: tuple[MlaCase, ...]
    sms: int = SMS


def mla_cases(spec: Any) -> list[MlaScenario]:
    """Return scenarios for the kernel `spec`, with split keys."""
    if isinstance(spec.tile, LatentTileConfig):
        return few_prompts(spec) if serves_prompts(spec) else few_cases(spec)
    if spec.kv.union:
        return shared_cases(spec)
    if spec.kv.source == "slots":
        return chosen_cases(spec)
    more = more_heads(spec)
    base = MlaCase(
        dtype=spec.smem_q, dim=spec.head_dim_qk, causal=spec.mask.causal != "never", window=190 * spec.mask.window,
        page_size=3 if spec.kv.source == "gather" else 64, record=spec.kv.record, q8=spec.q == "e4m3",
        heads=16 + more,
    )  # fmt: skip
    base = base if base.causal else replace(base, rows=2)  # a single row sees all keys under either mask
    base = replace(base, function="qv" if base.window else "flash_mla")
    other = "qv" if base.window else "trtllm" if base.causal and base.record in ("", "e4m3") else "flash_mla"
    if spec.tile.cluster > 1:
        return pair_cases(spec, base)
    first: tuple[MlaCase, ...] = (
        replace(
            base,
            lens=(65, 0, 9),
            heads=1 + more,
            rows=3,
            page_size=32 if spec.kv.source == "tma" else 2,
            function="qv"
            if base.window
            else "wrapper"
            if not base.record
            else "trtllm"
            if base.record == "e4m3"
            else "flash_mla",
        ),
        replace(base, lens=(70, 0, 130), rows=8, heads=5, strided=True, sink=True, invariant=not base.window),
        replace(base, lens=(330,), heads=5, rows=8, cap=4.0 * spec.mask.window),
        replace(
            base, lens=(200,), heads=60 // base.rows if spec.kv.source == "tma" else 80, data="peaks", function=other
        ),
    )
    many = replace(base, lens=(29 * 64 + 3,), heads=8 + more, page_size=1 if spec.kv.source == "gather" else 16, gap=2)
    if spec.mask.window:
        first = *first, replace(base, lens=(330, 70), heads=5, rows=8, causal=False, cap=4.0)
        many = replace(many, window=4000)
    few = replace(base, lens=(64, 1), page_size=base.page_size if spec.kv.source == "gather" else 8)
    return [
        MlaScenario("tiles", first), MlaScenario("many splits", (many,), 30),
        MlaScenario("a block", (few, replace(few, lens=(3, 2, 1, 0, 65) * 7))),
    ]  # fmt: skip


def serves_prompts(spec: Any) -> bool:
    """Return whether the kernel `spec` has few query rows over rows of 16 bits: it serves prompts, not decode."""
    return isinstance(spec.tile, LatentTileConfig) and not spec.kv.record


def more_heads(spec: Any) -> int:
    """Return the heads that make a call have too many rows for the kernels with few rows, if these serve the record."""
    return few_rows.MOST_ROWS if spec.kv.record in few_rows.PITCH else 0


def few_cases(spec: Any) -> list[MlaScenario]:
    """Return scenarios for a kernel with few query rows: of one head, of all rows of the tile, of several tokens; with
    more tiles of a CTA than the rings have stages."""
    m, slots, two = spec.tile.m, spec.kv.source == "slots", int(spec.kv.extra)
    record, fewest = spec.kv.record, 1 + spec.tile.m - few_rows.ROWS
    base = MlaCase(
        dtype=spec.smem_q, dim=spec.head_dim_qk, heads=m, page_size=7 if slots else 3, record=record,
        q8=spec.q == "e4m3", function="trtllm" if record == "528_fp32" else "flash_mla",
    )  # fmt: skip
    other = (
        "trtllm" if record in ("e4m3", "656", "528_fp32") and not two and (slots or record == "e4m3") else "flash_mla"
    )
    first: tuple[MlaCase, ...]
    if slots:
        base = replace(base, chosen=128, lens=(90, 30), second=70 * two, second_record=spec.kv.extra_record)
        first = (
            replace(base, chosen=65, heads=fewest, strided=True, function=other, sink=True),
            replace(base, rows=3, heads=m - 3, counted=True, lens=(40, 7, 9, 3), gap=1, exact=True),
            replace(base, chosen=300, data="peaks", page_size=64),
        )
        if record in ("656", "352", "528") and not two:  # with the largest logits
            first = *first, replace(base, function="sparse_fwd", rows=6, heads=m - 1, counted=True, chosen=130)
        many = replace(base, lens=(2000,), chosen=29 * 64 + 3, page_size=16, exact=True)
        blocks = (
            replace(base, chosen=64, rows=2, second=64 * two, exact=True),
            replace(base, lens=(5, 0, 1) * 12, chosen=3, counted=True, second=2 * two),
            replace(base, lens=(400,), chosen=150, heads=m - 7),  # two splits
        )
    else:  # tokens and heads share the rows of a tile
        first = (
            replace(base, lens=(65, 0, 9), heads=-(-fewest // 3), rows=3, page_size=2, function=other),
            replace(base, lens=(400, 7, 0, 70), heads=m // 2, rows=2, strided=True, sink=True, exact=True),
            replace(base, lens=(200,), data="peaks", page_size=64, gap=1, function=other),
        )
        if record == "e4m3" and not base.q8:  # rotated columns of keys in a tensor of their own
            first = *first, replace(base, lens=(70, 3), function="wrapper")
        many = replace(base, lens=(29 * 64 + 3,), heads=m - 3, page_size=1, gap=2, exact=True)
        few = replace(base, lens=(64, 1), heads=m - 7)
        blocks = few, replace(few, lens=(3, 2, 1, 0, 65) * 7), replace(few, lens=(0,) * 127 + (70, 0, 9))
    return [
        MlaScenario("tiles", first), MlaScenario("many splits", (many,), 30), MlaScenario("a block", blocks),
    ]  # fmt: skip


def few_prompts(spec: Any) -> list[MlaScenario]:
    """Return scenarios for a kernel with few query rows over rows of 16 bits, which serves prompts: rows in one tensor
    and in two, with more tiles of a CTA than the rings have stages, and with split keys."""
    m, fewest = spec.tile.m, 1 + spec.tile.m - few_rows.ROWS
    base = MlaCase("sparse_fwd", dim=spec.head_dim_qk, heads=m, page_size=7, chosen=128, lens=(90, 30))
    tiles = (
        replace(base, chosen=65, heads=fewest, strided=True, function="dsa"),
        replace(base, rows=3, heads=m - 3, counted=True, lens=(40, 7, 9, 3), gap=1),
        replace(base, chosen=300, data="peaks", page_size=64, sink=True),
    )
    many = replace(base, heads=m - 1, lens=(5, 0, 1, 30) * 9, chosen=70, counted=True)
    splits = replace(base, function="flash_mla", lens=(2000,), chosen=29 * 64 + 3, sink=True)
    few = replace(splits, lens=(400,), chosen=150, heads=fewest)
    return [
        MlaScenario("tiles", tiles), MlaScenario("many tokens", (many,)), MlaScenario("splits", (splits, few), 30),
    ]  # fmt: skip


def pair_cases(spec: Any, base: MlaCase) -> list[MlaScenario]:
    """Return scenarios for a kernel in which two CTAs compute a tile: of one token, of several with other masks, with
    rows for one of the CTAs only, whole and split."""
    other = "qv" if base.window else "trtllm" if base.causal else "flash_mla"
    first = (
        replace(base, lens=(65, 0, 9), heads=66, page_size=32),
        replace(base, lens=(70, 130), heads=43, rows=3, strided=True, sink=True, cap=4.0 * spec.mask.window),
        replace(base, lens=(330,), heads=65, page_size=8, data="peaks", function=other),
        replace(base, lens=(66, 1), heads=33, rows=4, page_size=256),  # tokens of a tile end in two blocks
        replace(base, lens=(1, 0, 65) * 11, heads=66),  # more requests than lanes
    )
    many = replace(base, lens=(27 * 64 + 3, 40), heads=80, page_size=16, gap=2, window=4000 * spec.mask.window)
    return [
        MlaScenario("tiles", first[:2]),
        MlaScenario("few keys", first[2:]),
        MlaScenario("splits", (many, replace(base, lens=(200,), heads=66)), 60),
    ]


def chosen_cases(spec: Any) -> list[MlaScenario]:
    """Return scenarios for the kernel `spec`, where each row chooses its keys."""
    more = more_heads(spec)
    base = MlaCase(
        dtype=spec.smem_q, dim=spec.head_dim_qk, page_size=7, chosen=128, lens=(90, 30), second=70 * spec.kv.extra,
        record=spec.kv.record, q8=spec.q == "e4m3", second_record=spec.kv.extra_record, heads=16 + more,
    )  # fmt: skip
    if spec.kv.record == "528_fp32":
        base = replace(base, function="trtllm")
    other = "trtllm" if spec.kv.record in ("", "e4m3", "656", "528_fp32") and not spec.kv.extra else "flash_mla"
    first: tuple[MlaCase, ...] = (
        replace(base, chosen=65, heads=3 + more, strided=True, function=other, sink=True),
        replace(base, rows=3, heads=5 + more, counted=True, lens=(40, 7, 9, 3), gap=1),
        replace(base, chosen=200, heads=80, data="peaks", page_size=64),
    )
    if spec.kv.record in ("", "656", "352", "528") and not spec.kv.extra:
        heads = 9 + few_rows.MOST_ROWS * (spec.dims in few_rows.DIMS.get(spec.kv.record or few_rows.PLAIN, []))
        prompt = replace(base, function="sparse_fwd", rows=6, heads=heads, sink=True, chosen=190)
        separate = "sparse_fwd" if spec.kv.record or base.dim == 512 else "dsa"
        first = (first[0], replace(first[1], heads=heads - 4, function=separate), first[2], prompt)
    many = replace(base, lens=(2000,), chosen=29 * 64 + 3, heads=8 + more, page_size=16)
    return [
        MlaScenario("tiles", first),
        MlaScenario("many splits", (many,), 30),
        MlaScenario(
            "a block",
            (
                replace(base, chosen=64, rows=2, second=64 * spec.kv.extra),
                replace(base, lens=(5, 0, 1) * 12, chosen=3, counted=True, second=2 * spec.kv.extra, heads=17 + more),
                replace(base, lens=(400,), chosen=150, heads=9 + more),  # two splits
            ),
        ),
    ]


def shared_cases(spec: Any) -> list[MlaScenario]:
    """Return scenarios for the kernel `spec`, where tokens share the keys that each of them chooses: with groups of 4,
    8 and 2 tokens, of which the last one is not full, with many groups, and with groups that several CTAs share."""
    base = MlaCase(
        "sparse_fwd", dtype=spec.smem_q, dim=spec.head_dim_qk, page_size=7, chosen=70, lens=(90, 30), rows=3,
        record=spec.kv.record, share=True,
    )  # fmt: skip
    tiles = (
        replace(base, data="peaks"),
        replace(base, heads=8, rows=5, counted=True, sink=True, chosen=130, lens=(40, 9), strided=True),
        replace(base, heads=32, chosen=20, lens=(300,), gap=int(not spec.kv.record)),
    )
    many = replace(base, heads=24, lens=(5, 0, 1, 30) * 17, rows=1, chosen=3, counted=True)
    split = replace(base, split=True, heads=32, rows=2, lens=(2000,), chosen=1100)
    few = replace(base, split=True, lens=(400,), chosen=70, sink=True)
    return [
        MlaScenario("tiles", tiles), MlaScenario("many groups", (many,)), MlaScenario("many splits", (split, few), 30),
    ]  # fmt: skip


def run_mla(spec: Any, scenario: MlaScenario, arch: str, **how: Any) -> Outcome:
    """Run the scenario's calls; return their largest error and the bits of all of them."""
    launches: list[RunResult] = []

    def run(case: MlaCase) -> tuple[float, Any]:
        given = cases.make(case)
        got = cases.call(case, given)
        return cases.error(case, got, cases.expected(case, given)), (got[0], got[1].flatten().clone())

    # Dispatch serves batches of few tokens with another kernel. Here this one serves them, too: to simulate its splits
    # with one token takes less time than with many.
    tokens = 0 if spec and serves_prompts(spec) else latent.TOKENS_PER_SM
    with simulated(arch, launches, scenario.sms, spec, **how), patch.object(latent, "TOKENS_PER_SM", tokens):
        return outcome(scenario.calls, run, launches)
