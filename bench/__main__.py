"""python -m bench attention | topk [--cases PREFIX] [--sweep] | sparsity | plots | readme"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from . import readme, results

if TYPE_CHECKING:
    from .harness import Ceilings, Result, Setup


class Family(NamedTuple):
    """In what the benchmarks of the operators differ."""

    cases: tuple[str, ...]
    providers: tuple[str, ...]
    measure: "Callable[[str, Ceilings, Setup], list[Result]]"  # of a case
    rest: "Callable[[Setup, list[str]], list[Result]]"  # after all cases, which it is told
    ceilings: str  # prefix of the ceilings that get rows


def attention(sweep: bool) -> Family:
    from bench.cases import attention as cases

    from . import decode, family, precision, prefill

    own = cases.PREFILL_BF16 | (prefill.sweep_cases() if sweep else {})
    known = own | precision.CASES | decode.CASES | family.CASES
    others = {"decode": decode.measure, "family": family.measure}

    def one(name: str, top: "Ceilings", setup: "Setup") -> "list[Result]":
        prefills = precision.measure if name in precision.CASES else prefill.measure
        return others.get(name.partition("-")[0], prefills)(known[name], top, setup)

    def rest(setup: "Setup", chosen: list[str]) -> "list[Result]":
        kinds = {name.partition("-")[0] for name in chosen}
        found = prefill.host(prefill.host_case(), setup) if own.keys() & set(chosen) else []
        found += decode.host(setup) if "decode" in kinds else []
        return found + (family.host(setup) if "family" in kinds else [])

    return Family(
        cases=tuple(known),
        providers=tuple(prefill.PROVIDERS),
        measure=one,
        rest=rest,
        ceilings="ceiling-",
    )


def topk(sweep: bool) -> Family:
    from . import topk as bench

    return Family(
        cases=bench.HEADLINE + (bench.SWEEP if sweep else ()),
        providers=tuple(bench.PROVIDERS),
        measure=bench.measure,
        rest=lambda setup, _: bench.outputs(bench.OUTPUTS, setup) + bench.host(setup),
        ceilings="ceiling-copy",
    )


def measure(args: argparse.Namespace) -> None:
    """Measure on the GPU of this machine, append to the csv, print the table."""
    import torch

    from . import harness

    if not torch.cuda.is_available():
        raise SystemExit("the benchmark needs a CUDA device")
    family: Family = args.family(args.sweep)
    chosen = [name for name in family.cases if name.startswith((args.cases, "sweep-"))]
    if not chosen:
        raise SystemExit(f"no case begins with {args.cases!r}; there are: {', '.join(family.cases)}")
    env = results.environment()
    path = args.results or results.FOLDER / f"{env.gpu}.csv"
    setup = harness.Setup(tuple(args.providers.split(",")) if args.providers else family.providers, args.rounds)
    top, found = harness.ceilings(setup)
    found = [r for r in found if r.case.startswith(family.ceilings)]
    for name in chosen:
        found += family.measure(name, top, setup)
        torch.cuda.empty_cache()
    found += family.rest(setup, chosen)
    rows = harness.rows_of(found, env)
    results.append(path, rows)
    print(harness.table(found, rows, top))
    print(f"{len(rows)} rows -> {path}")


def sparsity(args: argparse.Namespace) -> None:
    """Measure skip-softmax over factors: blocks left out, time, error; append to bench/results/sparsity/<gpu>.csv."""
    import torch

    from . import harness, precision

    if not torch.cuda.is_available():
        raise SystemExit("the benchmark needs a CUDA device")
    env = results.environment()
    path = args.results or results.SPARSITY / f"{env.gpu}.csv"
    rows = precision.study(precision.cases.SKIP, harness.Setup(("ours",), args.rounds), env)
    results.append(path, rows)
    print(f"{len(rows)} rows -> {path}")


def plots(args: argparse.Namespace) -> None:
    """Draw bench/results/*.png from the csv."""
    from . import plots as draw

    for path in draw.draw_all(results.read_all()) + draw.draw_sparsity(results.read_sparsity()):
        print(path)


def fill(args: argparse.Namespace) -> None:
    """Fill README's measured tables."""
    readme.update()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    verbs = parser.add_subparsers(required=True)
    for name, prefix, family in (("attention", "prefill-bf16", attention), ("topk", "topk", topk)):
        one = verbs.add_parser(name, help=f"measure {name}")
        one.add_argument("--cases", default=prefix, help="prefix of the cases' names")
        one.add_argument("--providers", default="", help="comma-separated; default: all that run here")
        one.add_argument("--sweep", action="store_true", help="also over lengths")
        one.add_argument("--rounds", type=int, default=15)
        one.add_argument("--results", type=Path, help="csv to append to; default bench/results/<gpu>.csv")
        one.set_defaults(run=measure, family=family)
    one = verbs.add_parser("sparsity", help=sparsity.__doc__)
    one.add_argument("--rounds", type=int, default=15)
    one.add_argument("--results", type=Path, help="csv to append to; default bench/results/sparsity/<gpu>.csv")
    one.set_defaults(run=sparsity)
    verbs.add_parser("plots", help=plots.__doc__).set_defaults(run=plots)
    verbs.add_parser("readme", help=fill.__doc__).set_defaults(run=fill)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
