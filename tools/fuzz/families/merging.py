"""Merged states of attention: drawn calls, and their results in fp64."""

import math
from dataclasses import replace
from random import Random
from typing import Any

import torch

from bench.cases import merge_states as cases
from bench.cases.merge_states import DTYPES, IN_PLACE, PAIR, STATES, MergeCase

from ..call import Call, Options, Results, Work, case_of, changed_fields


def draw(family: str, rng: Random, options: Options) -> Call:
    function = rng.choice((STATES, STATES, PAIR, IN_PLACE))
    case = MergeCase(
        function, rng.choice(tuple(DTYPES)), rng.choice((1, 2, 5, 33, 130)), rng.choice((1, 2, 3, 7, 40)),
        rng.choice((1, 3, 8)), rng.choice((8, 40, 64, 128, 192, 256, 512)),
        rng.choice(("packed", "strided", "columns")),
        rng.choice((0, 0, 1)), rng.choice(((0, 1), (0,), (1,))),
        rng.choice(("", "bool", "uint8")) if function == IN_PLACE else "",
        rng.choice(("normal", "normal", "special")), rng.choice((1.0, 3.0, 30.0)),
    )  # fmt: skip
    mode = rng.choices(("eager", "graph", "threads"), (76, 16, 8))[0]
    fields = changed_fields(case, "function")
    return Call(family, function, rng.randrange(1 << 30), mode, "shape", fields)


def merged(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the state of V (n, states, H, D) and S (n, states, H) in fp64. A state without keys counts for nothing."""
    v, s = v.double(), s.double()
    there = s != -math.inf
    top = s.amax(1, keepdim=True)
    weight = torch.exp2(s - top.masked_fill(top == -math.inf, 0.0)).masked_fill(~there, 0.0)
    total = weight.sum(1)
    kept = v.masked_fill(~there[..., None], 0.0)
    out = (kept * weight[..., None]).sum(1) / total.masked_fill(total == 0, 1.0)[..., None]
    return out, top.squeeze(1) + total.log2()


def right(function: str, a: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    if function == STATES:
        return merged(a["v"], a["s"])
    names = ("v_a", "v_b", "s_a", "s_b") if function == PAIR else ("v", "v_other", "s", "s_other")
    v, s = torch.stack([a[names[0]], a[names[1]]], 1), torch.stack([a[names[2]], a[names[3]]], 1)
    out, total = merged(v, s)
    if a.get("mask") is not None:
        on = a["mask"].bool()
        out = torch.where(on[:, None, None], out, v[:, 0].double())
        total = torch.where(on[:, None], total, s[:, 0].double())
    return out, total


def build(call: Call, device: torch.device) -> Work:
    case = case_of(MergeCase, call, function=call.function)
    variants = [cases.make_inputs(case, "cpu", call.seed + i) for i in range(2 if call.mode == "graph" else 1)]

    def run(tree: Any) -> Results:
        out, total = cases.run(case, tree)
        return {"v": out, "s": total}

    def judge(variant: int, tree: Any, results: Results) -> str:
        want = right(call.function, {k: t.to(device) for k, t in variants[variant].items()})
        error = cases.difference(case, (results["v"], results["s"]), want)
        return f"the error is {error:.3g} times the tolerance" if error > 1 else ""

    def written(tree: Any) -> list[torch.Tensor]:
        return [tree["v"], tree["s"]] if call.function == IN_PLACE else []

    return Work(variants, run, written, judge)


def smaller(call: Call) -> list[dict[str, Any]]:
    case, found = case_of(MergeCase, call, function=call.function), []
    for field in ("tokens", "states", "heads"):
        value = getattr(case, field)
        found += [replace(case, **{field: less}) for less in (value // 2, value - 1) if 1 <= less < value]
    if case.dim > 8:
        found.append(replace(case, dim=max(8, case.dim // 16 * 8)))
    return [changed_fields(one, "function") for one in found]
