"""Logits of an indexer: drawn calls, judged by the reference on the CPU."""

from dataclasses import replace
from random import Random
from typing import Any

import torch

import wrappers
from bench.cases import indexer as cases
from bench.cases.indexer import PAGED, PAGED_FP4, RAGGED, RAGGED_FP4, SEGMENTS, LogitsCase

from ..call import Call, Options, Results, Work, case_of, changed_fields

METADATA, SLOTS, ROWS = "get_paged_mqa_logits_metadata", "select_slots", "select_rows"
OF = {SLOTS: PAGED, ROWS: RAGGED, METADATA: PAGED}  # functions that take the arguments of others


def draw(family: str, rng: Random, options: Options) -> Call:
    function = rng.choice((RAGGED, RAGGED_FP4, PAGED, PAGED, PAGED_FP4, METADATA, SLOTS, ROWS, SEGMENTS))
    most, paged = 90 if options.small else 3000, function not in (RAGGED, RAGGED_FP4, ROWS, SEGMENTS)
    lens: tuple[int, ...] = (rng.choice((1, 2, 5, 9, 33)), rng.randrange(most))
    if paged:
        lens = tuple(rng.choice((0, 1, 2, 65, rng.randrange(most))) for _ in range(rng.choice((1, 2, 5, 40))))
    case = LogitsCase(
        OF.get(function, function),
        lens,
        heads=rng.choice((64, 32, 16, 8) if options.small is False else (64, 8)),
        dim=rng.choice((128, 128, 64, 32)),
        dtype=rng.choice(("fp32", "bf16")) if function in (RAGGED_FP4, PAGED_FP4) else "fp32",
        clean=rng.random() < 0.7,
        windows=rng.choice(("causal", "random", "hostile")),
        compressed=0 if paged else rng.choice((0, 0, 7, 100)),
        next_n=rng.choice((1, 1, 2, 4, 8)) if paged else 1,
        own=paged and rng.random() < 0.4,
        page_size=rng.choice((64, 64, 1, 3, 16, 48, 256)),
        gap=rng.choice((0, 0, 4, 32)),
        more=rng.choice((1, 3, 100)),
        hostile=paged and rng.random() < 0.3,
        shift=rng.choice((0, 0, 4, 16)),
        strided=rng.random() < 0.3,
        data=rng.choice(("normal", "normal", "zeros", "large")),
    )
    mode = rng.choices(("eager", "graph", "threads"), (76, 16, 8))[0]
    extra = {"top_k": rng.choice((1, 16, 100)), "scratch_bytes": rng.choice((0, 1 << 16, 1 << 28))}
    fields = changed_fields(case, "function")
    return Call(
        family,
        function,
        rng.randrange(1 << 30),
        mode,
        "shape",
        fields,
        extra if function in (SLOTS, ROWS, SEGMENTS) else {},
    )


def build(call: Call, device: torch.device) -> Work:
    case = case_of(LogitsCase, call, function=OF.get(call.function, call.function))
    if call.function in (SLOTS, ROWS, SEGMENTS):
        return build_selection(call, case)
    if call.function == METADATA:
        return build_metadata(call, case)
    variants = [cases.make_inputs(case, "cpu", call.seed + i) for i in range(2 if call.mode == "graph" else 1)]

    def run(tree: Any) -> Results:
        return {"logits": written(case, tree) if case.clean else seen(case, written(case, tree), tree)}

    def judge(variant: int, tree: Any, results: Results) -> str:
        error = cases.error(case, results["logits"], cases.expected(case, variants[variant]))
        return f"the error is {error:.3g} times the tolerance" if error > 1 else ""

    return Work(variants, run, lambda tree: [], judge)


def build_metadata(call: Call, case: LogitsCase) -> Work:
    """Return the work of a call that returns a placeholder."""
    lens = [{"lens": torch.zeros(len(case.lens), dtype=torch.int32)} for _ in range(2)]

    def run(tree: Any) -> Results:
        return {"metadata": wrappers.get_paged_mqa_logits_metadata(tree["lens"], 64, 132)}

    def judge(variant: int, tree: Any, results: Results) -> str:
        return "not zeros" if results["metadata"].any() else ""

    return Work(lens, run, lambda tree: [], judge)


def build_selection(call: Call, case: LogitsCase) -> Work:
    """Return the work of a selection, which is judged by the logits of the same device: they have the same bits."""
    made = [cases.selectable(case, call.seed + i) for i in range(2 if call.mode == "graph" else 1)]
    case, variants, count = made[0][0], [given for _, given in made], call.extra["top_k"]

    def run(tree: Any) -> Results:
        logits = written(case, tree)
        if case.function != SEGMENTS:
            return {"chosen": cases.select(case, tree, **call.extra), "logits": logits}
        chosen, scores = cases.select_segment(tree, count)
        return {"chosen": chosen, "logits": logits, "scores": scores}

    def judge(variant: int, tree: Any, results: Results) -> str:
        logits = results["logits"].cpu()
        want = cases.chosen(case, variants[variant], logits, count)
        wrong = (results["chosen"].cpu() != want).any(1).nonzero()
        if len(wrong):
            return f"token {int(wrong[0])} gets other keys"
        if "scores" not in results:
            return ""
        padded = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)  # -1, no key, is its last column
        right = torch.equal(results["scores"].cpu(), padded.gather(1, want.long() % padded.shape[1]))
        return "" if right else "other scores"

    return Work(variants, run, lambda tree: [], judge)


def written(case: LogitsCase, tree: Any) -> torch.Tensor:
    """Return the logits of a call without the padding of their rows, which no kernel writes."""
    return cases.run(case, tree).contiguous()


def seen(case: LogitsCase, logits: torch.Tensor, tree: Any) -> torch.Tensor:
    """Return logits with -inf where a call may leave anything, which would differ from run to run."""
    clean = cases.run(replace(case, clean=True), tree | {"clean_logits": True})
    return torch.where(clean == -torch.inf, clean, logits)


def smaller(call: Call) -> list[dict[str, Any]]:
    case, found = case_of(LogitsCase, call, function=OF.get(call.function, call.function)), []
    for i, count in enumerate(case.lens):
        if case.paged and len(case.lens) > 1:
            found.append(replace(case, lens=case.lens[:i] + case.lens[i + 1 :]))
        if count > 1:
            found.append(replace(case, lens=(*case.lens[:i], count // 2, *case.lens[i + 1 :])))
    found += [replace(case, **{field: 0}) for field in ("gap", "shift", "compressed") if getattr(case, field)]
    found += [replace(case, next_n=1)] * (case.next_n > 1) + [replace(case, heads=8)] * (case.heads > 8)
    return [changed_fields(one, "function") for one in found]
