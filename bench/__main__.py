"""python -m bench attention | topk [--cases PREFIX] [--sweep] | plots | readme"""

import argparse
from pathlib import Path

from . import readme, results


def attention(args: argparse.Namespace) -> None:
    """Measure on the GPU of this machine, append to the csv, print the table."""
    import torch

    from tests import cases

    from . import attention as bench

    if not torch.cuda.is_available():
        raise SystemExit("the benchmark needs a CUDA device")
    known = cases.PREFILL_BF16 | (bench.sweep_cases() if args.sweep else {})
    chosen = {n: c for n, c in known.items() if n.startswith((args.cases, "sweep-"))}
    if not chosen:
        raise SystemExit(f"no case begins with {args.cases!r}; there are: {', '.join(known)}")
    env = results.environment()
    path = args.results or results.FOLDER / f"{env.gpu}.csv"
    providers = tuple(args.providers.split(",")) if args.providers else tuple(bench.PROVIDERS)
    setup = bench.Setup(providers, args.rounds)
    top, found = bench.ceilings(setup)
    for case in chosen.values():
        found += bench.measure(case, top, setup)
        torch.cuda.empty_cache()
    found += bench.host(bench.host_case(), setup)
    rows = bench.rows_of(found, env)
    results.append(path, rows)
    print(bench.table(found, rows, top))
    print(f"{len(rows)} rows -> {path}")


def topk(args: argparse.Namespace) -> None:
    """Measure on the GPU of this machine, append to the csv, print the table."""
    import torch

    from . import attention as bench
    from . import topk

    if not torch.cuda.is_available():
        raise SystemExit("the benchmark needs a CUDA device")
    known = topk.HEADLINE + (topk.SWEEP if args.sweep else ())
    chosen = [name for name in known if name.startswith((args.cases, "sweep-"))]
    if not chosen:
        raise SystemExit(f"no case begins with {args.cases!r}; there are: {', '.join(known)}")
    env = results.environment()
    path = args.results or results.FOLDER / f"{env.gpu}.csv"
    setup = bench.Setup(tuple(args.providers.split(",")) if args.providers else tuple(topk.PROVIDERS), args.rounds)
    top, found = bench.ceilings(setup)
    found = [r for r in found if r.case == "ceiling-copy"]
    for name in chosen:
        found += topk.measure(name, top, setup)
        torch.cuda.empty_cache()
    found += topk.outputs(topk.OUTPUTS, setup) + topk.host(setup)
    rows = bench.rows_of(found, env)
    results.append(path, rows)
    print(bench.table(found, rows, top))
    print(f"{len(rows)} rows -> {path}")


def plots(args: argparse.Namespace) -> None:
    """Draw bench/results/*.png from the csv."""
    from . import plots as draw

    for path in draw.draw_all(results.read_all()):
        print(path)


def fill(args: argparse.Namespace) -> None:
    """Fill README's measured table."""
    readme.update()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    verbs = parser.add_subparsers(required=True)
    for name, prefix, run in (("attention", "prefill-bf16", attention), ("topk", "topk", topk)):
        one = verbs.add_parser(name, help=f"measure {name}")
        one.add_argument("--cases", default=prefix, help="prefix of the cases' names")
        one.add_argument("--providers", default="", help="comma-separated; default: all that run here")
        one.add_argument("--sweep", action="store_true", help="also over lengths")
        one.add_argument("--rounds", type=int, default=15)
        one.add_argument("--results", type=Path, help="csv to append to; default bench/results/<gpu>.csv")
        one.set_defaults(run=run)
    verbs.add_parser("plots", help=plots.__doc__).set_defaults(run=plots)
    verbs.add_parser("readme", help=fill.__doc__).set_defaults(run=fill)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
