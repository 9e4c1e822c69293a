"""Rows gathered from caches of latent attention and of an indexer: drawn calls, judged by the reference on the CPU."""

from dataclasses import replace
from random import Random
from typing import Any

import torch

from bench.cases import latent_read as cases
from bench.cases.cache_write import copied
from bench.cases.latent_read import INDEXER, OWN, RECORDS_OF, UPCONVERT_NVFP4, ReadCase
from wrappers.host.machine import HostMachine, override

from ..call import Call, Options, Results, Work, case_of, changed_fields


def draw(family: str, rng: Random, options: Options) -> Call:
    function = rng.choice((OWN, OWN, *RECORDS_OF))
    record, most = rng.choice(RECORDS_OF[function]), 40 if options.small else 400
    lens = tuple(rng.choice((0, 1, 2, 7, rng.randrange(most))) for _ in range(rng.choice((1, 2, 5, 9))))
    case = ReadCase(
        function, record, rng.choice(("bf16", "fp16")) if record in ("rows", "e4m3") else "bf16", lens,
        rng.choice((1, 2, 3, 16, 64)), rng.random() < 0.5 and function not in (INDEXER, UPCONVERT_NVFP4),
        rng.random() < 0.3, rng.choice((0, 0, 16, 528)), rng.choice((0, 0, 1, 4)), rng.random() < 0.5,
        rng.choice((0, 0, 1, 2, 4)),
        rng.choice((576, 576, 80, 600)) if record in ("rows", "e4m3") else 576,
        function == INDEXER and rng.random() < 0.5, rng.choice(("normal", "normal", "special")),
    )  # fmt: skip
    mode = rng.choices(("eager", "graph", "threads"), (76, 16, 8))[0]
    return Call(family, function, rng.randrange(1 << 30), mode, "shape", changed_fields(case, "function"))


def build(call: Call, device: torch.device) -> Work:
    case = case_of(ReadCase, call, function=call.function)
    variants = [cases.make_inputs(case, "cpu", call.seed + i) for i in range(2 if call.mode == "graph" else 1)]
    wanted = []
    with override(HostMachine()):
        for given in variants:
            wanted.append(copied(given, "cpu"))
            cases.run(case, wanted[-1])

    def run(tree: Any) -> Results:
        cases.run(case, tree)
        return {}

    def judge(variant: int, tree: Any, results: Results) -> str:
        return cases.difference(tree, wanted[variant], whole=False)

    return Work(variants, run, lambda tree: [*cases.outputs(tree).values()], judge)


def smaller(call: Call) -> list[dict[str, Any]]:
    case, found = case_of(ReadCase, call, function=call.function), []
    for i, count in enumerate(case.lens):
        if len(case.lens) > 1:
            found.append(replace(case, lens=case.lens[:i] + case.lens[i + 1 :]))
        if count:
            found.append(replace(case, lens=(*case.lens[:i], count // 2, *case.lens[i + 1 :])))
    found += [replace(case, **{field: 0}) for field in ("gap", "shift") if getattr(case, field)]
    return [changed_fields(one, "function") for one in found]
