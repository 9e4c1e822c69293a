"""Measure low-precision prefill against ours in wider types, and skip-softmax against ours without it: on one case, and
over threshold factors."""

from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from wrappers import trtllm_batch_context_with_kv_cache as context

from . import family, prefill, sparsity
from .cases import precision as cases
from .cases.attention import AttentionCase
from .harness import Ceilings, Measurement, Setup, calls_of
from .results import Environment, SkipRow
from .timing import Call, exactly, interleave
from .workload import Inputs, check, shape_of

CASES = cases.PRECISION | {case.name: case for case in (cases.SKIP, cases.SKIP_NONE)}
TARGET = 0.75  # share of blocks that the skip75 case leaves out
SETTLE_US = 100_000  # run before each sample: a type's power decides its clock, which interleaved types would share
FACTORS = (1e-30, 1.0, 10.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0)
FACTOR = "skip_softmax_threshold_scale_factor"


def collect(name: str, inputs: Inputs) -> dict[str, Call]:
    """Return our call under `name` if its result passes the check, else nothing."""
    return calls_of(name, lambda: partial(context, **inputs), partial(check, inputs))


def flashinfer(inputs: Inputs) -> family.Run:
    """Return the call of flashinfer's fa3 kernel on the same pages, with one scale per head."""
    return family.scaled(inputs, family.flashinfer("Paged"))


def measure(case: AttentionCase, top: Ceilings, setup: Setup) -> list[Measurement]:
    """Measure a case of CASES: ours in its types and in wider ones, interleaved, and flashinfer if it has kernels for
    them.

    flash-attn-4 has FP8 only on Blackwell. The floor is the number of operations over the rate of the MMA's type.
    """
    print(case.name, flush=True)
    kind = cases.kind_of(case.name)
    if kind not in cases.KINDS:
        return measure_skip(case, setup)
    inputs = cases.make_inputs(case, setup.device)
    calls = collect("ours", inputs) if "ours" in setup.providers else {}
    if calls:
        for name, types in cases.WIDER[kind].items():
            calls |= collect(name, cases.make_inputs(cases.typed(case, types), setup.device))
    if "flashinfer" in setup.providers and kind == "fp8":
        calls |= calls_of("flashinfer", partial(flashinfer, inputs), partial(check, inputs))
    if not calls:
        return []
    flops = shape_of(inputs).flops
    times = interleave(calls, setup.clock, 1, setup.rounds, target_us=SETTLE_US / 5, settle_us=SETTLE_US)
    found = [Measurement(case.name, p, t, flops / t.median / 1e6) for p, t in times.items()]
    rate = top.fp8_tflops if cases.KINDS[kind].q == "fp8" and case.kv_dtype != "nvfp4" else top.tflops
    floor = flops / rate / 1e6 if rate else 0.0
    return [*found, Measurement(case.name, "floor", exactly(floor), rate)] if rate else found


def own_output(inputs: Inputs, **change: Any) -> Inputs:
    """Return the same call with its own output."""
    return inputs | {"out": torch.full_like(inputs["out"], torch.nan)} | change


def with_factor(case: AttentionCase, inputs: Inputs) -> tuple[Inputs, str]:
    """Return the call of a skip-softmax case, with an output of its own, and its factor and sparsity in words.
    inputs: the call without a factor.

    The factor is the one with which the rule leaves out TARGET of the blocks, or none.
    """
    maxima, keys = sparsity.maxima_of(inputs), case.kv_lens[0]
    none = case.name == cases.SKIP_NONE.name
    factor = FACTORS[0] if none else sparsity.factor_of(TARGET, maxima, keys)
    note = f"factor {factor:.4g}, {sparsity.share(maxima, factor / keys):.1%} of blocks left out"
    return own_output(inputs, **{FACTOR: factor}), note


def measure_skip(case: AttentionCase, setup: Setup) -> list[Measurement]:
    """Measure ours with skip-softmax, ours without it, and the dense peers that the run chose, on heavy-tailed data."""
    inputs = cases.concentrated(case, setup.device, "heavy-tailed")
    skipping, note = with_factor(case, inputs)
    calls = collect("ours", skipping) if "ours" in setup.providers else {}
    if calls:
        calls |= collect("own-bf16", inputs)
    calls |= prefill.collect([inputs], tuple(p for p in setup.providers if p != "ours"))
    if not calls:
        return []
    found = prefill.best(interleave(calls, setup.clock, 1, setup.rounds, target_us=SETTLE_US / 5, settle_us=SETTLE_US))
    notes = {p: variant for p, (_, variant) in found.items()} | {"ours": note}
    return [Measurement(case.name, p, t, note=notes[p]) for p, (t, _) in found.items()]


def study(case: AttentionCase, setup: Setup, env: Environment, factors: tuple[float, ...] = FACTORS) -> list[SkipRow]:
    """Measure time and error over threshold factors on each data set.

    The errors are relative to ours without skip-softmax, in units of the RMS of its output. The share of blocks left
    out comes from the rule, for tiles of sparsity.ROWS x sparsity.KEYS.
    """
    rows: list[SkipRow] = []
    for data in cases.DATA:
        print(f"{case.name}, {data}", flush=True)
        inputs, keys = cases.concentrated(case, setup.device, data), case.kv_lens[0]
        maxima = sparsity.maxima_of(inputs)
        shares = {f: sparsity.share(maxima, f / keys) for f in factors}
        del maxima
        calls, outs = collect("dense", inputs), {}
        for factor in factors if calls else ():
            own = own_output(inputs, **{FACTOR: factor})
            run = collect(f"{factor:g}", own)
            if not run:
                break
            calls |= run
            outs[factor] = errors(own["out"], inputs["out"])
        if not outs:
            continue
        times = interleave(calls, setup.clock, 1, setup.rounds)
        dense = times["dense"].median
        for factor, error in outs.items():
            time = times[f"{factor:g}"].median
            rows.append(SkipRow(
                **asdict(env), case=case.name, data=data, factor=factor, left_out=shares[factor], time_us=time,
                dense_us=dense, max_error=error[0], rms_error=error[1],
            ))  # fmt: skip
            said = f"{shares[factor]:6.1%} left out, {time:8.1f} us, {dense / time:.2f} of the dense speed"
            print(f"  factor {factor:<6g} {said}, error at most {error[0]:.2g}, RMS {error[1]:.2g}", flush=True)
    return rows


def errors(out: torch.Tensor, dense: torch.Tensor) -> tuple[float, float]:
    """Return the largest and the RMS difference from `dense`, in units of the RMS of `dense`."""
    difference, unit = out.float() - dense.float(), dense.float().square().mean().sqrt()
    return float(difference.abs().max() / unit), float(difference.square().mean().sqrt() / unit)
