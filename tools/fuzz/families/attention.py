"""Attention: the problem of a drawn call, its arguments by function, and the judgement of its results."""

import math
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any, NamedTuple

import torch

from bench.cases import attention as cases
from bench.cases import forms, hostile
from bench.cases.attention import MANY_KEYS, SOFT_CAP_TOLERANCE, AttentionCase
from bench.cases.outputs import rounded
from wrappers import FP4Tensor, fp4
from wrappers.attention.call import AttentionCall, Rope

from .. import plain
from ..call import Call, Results, Work, case_of, changed_fields
from ..memory import mapped, tensors_of
from . import adapters

ROPE = Rope(2.0, 5e3)
LOOSE_LSE = 1e-2  # of the LSE if Q and K are rounded after a rotation


class Problem(NamedTuple):
    """A call's case and its problem on the CPU. mask: of a custom mask, the bools of each request."""

    case: AttentionCase
    p: AttentionCall
    mask: list[torch.Tensor]


def case_from(call: Call) -> AttentionCase:
    return case_of(AttentionCase, call, name="fuzz")


def _varied(case: AttentionCase, p: AttentionCall, rng: Random) -> AttentionCall:
    """Return a problem with a page table, with other lengths, pages and queries in tensors of the same shapes."""
    gen = torch.Generator().manual_seed(rng.randrange(1 << 30))
    lens = torch.tensor([rng.choice((n, rng.randint(0, n), rng.randint(n // 2, n))) for n in case.kv_lens]).int()
    fields: dict[str, Any] = {"q": p.q[torch.randperm(len(p.q), generator=gen)]}
    table = p.requests.page_table.clone()
    if not case.separate_tables and len(p.k) == len(p.v):
        order = torch.randperm(len(p.k), generator=gen)
        back = order.argsort().int()
        inside = (table >= 0) & (table < len(order))
        table = torch.where(inside, back[table.long().clamp(0, len(order) - 1)], table)
        for field in ("k", "v", "k_scales", "v_scales"):
            t = getattr(p, field)
            if t is not None:
                fields[field] = (t.view(torch.uint8)[order].view(t.dtype)) if t.element_size() == 1 else t[order]
        if p.v is p.k:
            fields["v"] = fields["k"]
    if case.strided_q:  # the query stays a slice of a wider tensor
        wide = p.q.new_zeros(p.q.shape[0], 2 * p.q.shape[1], p.q.shape[2])
        wide[:, ::2] = fields["q"]
        fields["q"] = wide[:, ::2]
    return p._replace(requests=p.requests._replace(page_table=table, kv_lens=lens), **fields)


def _masked(p: AttentionCall, case: AttentionCase, lens: list[int], rng: Random) -> tuple[AttentionCall, list[Any]]:
    """Add a random custom mask that hides all keys from some rows."""
    gen = torch.Generator().manual_seed(rng.randrange(1 << 30))
    masks, packed, starts = [], [], [0]
    for m, n in zip(case.q_lens, lens):
        bits = torch.rand(m, n, generator=gen) < rng.choice((0.1, 0.5, 0.9))
        bits[: rng.randint(0, 1)] = False
        masks.append(bits)
        flat = torch.nn.functional.pad(bits.flatten(), (0, -m * n % 8)).view(-1, 8)
        packed.append((flat * 2 ** torch.arange(8)).sum(1).to(torch.uint8))
        starts.append(starts[-1] + len(flat))
    p = p._replace(custom_mask=torch.cat(packed), mask_starts=torch.tensor(starts).int(), causal=True)
    return p, masks


def _slopes(heads: int) -> torch.Tensor:
    """Return ALiBi's slopes for a number of heads."""
    whole = 2 ** int(math.log2(heads))
    first = [2.0 ** (-8 * (h + 1) / whole) for h in range(whole)]
    return torch.tensor(first + [2.0 ** (-4 * (2 * h + 1) / whole) for h in range(heads - whole)])


def _scaled(call: Call, case: AttentionCase, p: AttentionCall, rng: Random) -> AttentionCall:
    """Give a problem the scales of a call: "heads": one per head; "descale": FlashAttention's, equal for all heads."""
    kind, group = call.extra.get("scales", ""), case.heads_q // case.heads_kv
    device_scale, device_out = "scale" in case.device or "log2" in case.device, "out" in case.device
    if kind == "heads":
        q, k, v = (torch.rand(n, generator=torch.Generator().manual_seed(rng.randrange(1 << 30))) + 0.5
                   for n in (case.heads_q, case.heads_kv, case.heads_kv))  # fmt: skip
        return p._replace(scale_tensor=q * k.repeat_interleave(group), out_scale_tensor=v.repeat_interleave(group))
    if kind == "descale" or adapters.planned(call.function) and (device_scale or device_out):
        return p._replace(scale_tensor=torch.tensor([0.75]), out_scale_tensor=torch.tensor([1.25]))
    return p


def problem_of(call: Call, variant: int = 0) -> Problem:
    """Return the problem of a call. Variant 1 has other values in tensors of the same shapes."""
    case, rng = case_from(call), Random(f"{call.seed} {variant}")
    in_forms = tuple(f for f in (call.extra.get("form", "table"),) if f != "table")
    spoils = call.extra.get("hostile", "")
    if spoils:
        p = hostile.made(case, in_forms, "cpu", call.seed + variant)
        p = hostile.spoilt(case, p, spoils, call.seed + variant)
        return Problem(case, p, [])
    p = cases.make_call(case, "cpu", call.seed)
    if variant:
        p = _varied(case, p, rng)
    lens = p.requests.kv_lens.tolist()
    if "ragged" in in_forms:
        lens = list(case.kv_lens)
        p = p._replace(requests=p.requests._replace(kv_lens=torch.tensor(lens).int()))
    p = forms.apply(p, in_forms, call.seed)
    p = _scaled(call, case, p, rng)
    masks: list[torch.Tensor] = []
    custom = call.extra.get("custom")
    if custom in ("ranges", "prefix"):
        p = forms.with_lengths(p, custom, lens, call.seed + variant)
    elif custom:
        p, masks = _masked(p, case, lens, rng)
    if call.extra.get("alibi"):
        p = p._replace(alibi_slopes=_slopes(case.heads_q))
    return Problem(case, p._replace(rope=ROPE if call.extra.get("rope") else None), masks)


def tolerance_of(call: Call, case: AttentionCase) -> float:
    """Return rtol = atol of an output, by the rules of `bench.cases`, without what e4m3 probabilities add."""
    loose = call.extra.get("alibi") or call.extra.get("rope")
    own = replace(case, dtype="bf16").tolerance if case.dtype == "fp8" else case.tolerance
    return max(SOFT_CAP_TOLERANCE if loose else 0.0, own)


def judge(call: Call, problem: Problem, answer: plain.RightAttention, results: Results, device: torch.device) -> str:
    """Return "" if the results are right, else the first difference."""
    case, p = problem.case, mapped(problem.p, lambda t: t.to(device))
    tolerance = tolerance_of(call, case)
    o, own = answer.o, answer.owners == 1
    out_type = case.out_dtype or case.dtype
    if out_type == "fp8":
        o = o.clamp(-fp4.E4M3_MAX, fp4.E4M3_MAX)
    skip = case.skip if case.skip < 1 else 0.0
    factor = p.out_scale if p.out_scale_tensor is None else abs(p.out_scale) * float(p.out_scale_tensor.abs().max())
    # as `AttentionCase.atol`: if n keys weigh alike, outputs and errors shrink as n^-0.5; half a step of small e4m3
    shrunk = (answer.keys.clamp(min=MANY_KEYS) / MANY_KEYS) ** -0.5
    limit = (
        (tolerance * abs(factor) * shrunk)[:, None, None]
        + tolerance * o.abs()
        + rounded(o, out_type)
        + (2.0**-10 if out_type == "fp8" else 0.0)
    )
    if case.dtype == "fp8":
        limit = limit + answer.e4m3_error
    if skip:  # keys of at most `skip` of the largest probability's weight are left out
        values = p.v.float().nan_to_num() if p.v_scales is None else torch.full((1,), 6.0 * 448, device=device)
        limit = limit + 2 * skip * abs(factor) * (values.abs().max() if len(values) else 0.0)
    got = results["out"].float()
    wrong = ~((got - o).abs() <= limit) & (got != o)
    wrong[~own] = False
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        text = f"{float(got[tuple(at)]):.6g}, must be {float(o[tuple(at)]):.6g} within {float(limit[tuple(at)]):.3g}"
        return f"out: {int(wrong.sum())} of {wrong.numel()} values are off, the first at {at}: {text}"
    given = results.get("given") is not None and out_type != "nvfp4"
    if given and not got[answer.owners == 0].isnan().all():
        return "out: a row of no request was written"
    return _judge_lse(call, case, results, answer, skip)


def _judge_lse(call: Call, case: AttentionCase, results: Results, answer: plain.RightAttention, skip: float) -> str:
    if "lse" not in results:
        return ""
    limit = LOOSE_LSE if call.extra.get("rope") else case.lse_tolerance
    got, want, own = results["lse"], answer.lse, answer.owners == 1
    room = limit + limit * want.abs()
    low = want + math.log2(1 - min(skip, 0.5)) if skip else want
    right = (got == want) | (got <= want + room) & (got >= low - room)
    right |= ~own[:, None]
    if right.all():
        return ""
    at = (~right).nonzero()[0].tolist()
    pair = f"{float(got[tuple(at)]):.6g}, must be {float(want[tuple(at)]):.6g}"
    return f"lse: {int((~right).sum())} of {right.numel()} values are off, the first at {at}: {pair}"


def build(call: Call, device: torch.device) -> Work:
    """Return the work of a call."""
    count = 2 if call.mode == "graph" else 1
    problems = [problem_of(call, variant) for variant in range(count)]
    adapter = adapters.ADAPTERS[call.function]
    made = adapter(call, problems, device)

    def results_of(tree: Any) -> Results:
        o, lse = made.run(tree)
        if isinstance(o, FP4Tensor):
            o = fp4.load(o, cases.SF_SCALE)
        found = {"out": o.reshape(-1, *o.shape[-2:])}
        if lse is not None:
            found["lse"] = lse
        if made.outputs(tree):
            found["given"] = found["out"]
        return found

    @cache
    def answer(variant: int) -> plain.RightAttention:
        return plain.attention(mapped(problems[variant].p, lambda t: t.to(device)))

    def verdict(variant: int, tree: Any, results: Results) -> str:
        return judge(call, problems[variant], answer(variant), results, device)

    def written(tree: Any) -> list[torch.Tensor]:
        return tensors_of(made.outputs(tree))

    def repeated(variant: int, tree: Any, results: Results) -> list[torch.Tensor]:
        """Rows that belong to no request, or to several, may hold anything."""
        own = answer(variant).owners == 1
        if own.all():
            return [*results.values(), *written(tree)]
        return [results[name][own] for name in ("out", "lse") if name in results]

    checked = bool(call.extra.get("hostile")) or call.mode == "graph"
    return Work(made.variants, results_of, written, verdict, made.prepare, checked, repeated)


# ---- smaller calls


def smaller(call: Call) -> list[dict[str, Any]]:
    """Return changes of a call's `case` that make it smaller, the largest steps first."""
    case, found = case_from(call), []

    def with_(**changes: Any) -> None:
        found.append(replace(case, **changes))

    q, n = case.q_lens, case.kv_lens
    if len(q) > 1:
        half = len(q) // 2
        for part in (slice(None, half), slice(half, None), *(slice(b, b + 1) for b in range(min(len(q), 8)))):
            with_(q_lens=q[part], kv_lens=n[part])
    equal = len(set(q)) == 1
    if any(x > 1 for x in n):
        with_(kv_lens=tuple(x // 2 if equal or x // 2 else x for x in n))
        with_(kv_lens=tuple(max(0, x - 1) for x in n))
    if any(x > 1 for x in q):
        with_(q_lens=tuple((x + 1) // 2 for x in q))
    if case.heads_kv > 1:
        with_(heads_q=case.heads_q // case.heads_kv, heads_kv=1)
    if case.heads_q > case.heads_kv:
        with_(heads_q=case.heads_kv)
    return [changed_fields(changed, "name") for changed in found]
