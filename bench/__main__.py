"""python -m bench attention | topk | append | indexer | accuracy | engine | engine-error | engine-profile | server |
serve | sparsity | plots | readme"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import pages, readme, results

if TYPE_CHECKING:
    from .harness import Ceilings, Measurement, Setup


class Family(NamedTuple):
    """The parts in which the benchmarks of attention, of top-k and of rows written to caches differ."""

    cases: tuple[str, ...]
    sweep: str  # prefix of the cases that --sweep adds
    providers: tuple[str, ...]
    measure: "Callable[[str, Ceilings, Setup], list[Measurement]]"  # measures one case
    rest: "Callable[[Setup, list[str]], list[Measurement]]"  # runs after all cases; gets their names
    ceilings: str  # prefix of the ceilings that become rows


def attention() -> Family:
    from bench.cases import attention as cases
    from bench.cases import serving as shapes

    from . import decode, family, mla, precision, prefill, serving

    headlines = cases.PREFILL_BF16 | shapes.PREFILL | prefill.sweep_cases()
    known: dict[str, Any] = {name: (case, prefill.measure) for name, case in headlines.items()}
    for found, one in (
        (precision.CASES, precision.measure),
        (decode.CASES, decode.measure),
        (serving.CASES, serving.measure),
        (family.CASES, family.measure),
    ):
        known |= {name: (case, one) for name, case in found.items()}
    known |= {name: (case, partial(mla.measure, name)) for name, case in mla.CASES.items()}

    def measured(name: str, top: "Ceilings", setup: "Setup") -> "list[Measurement]":
        case, one = known[name]
        return one(case, top, setup)

    def rest(setup: "Setup", chosen: list[str]) -> "list[Measurement]":
        kinds = {name.partition("-")[0] for name in chosen}
        found = prefill.host(prefill.host_case(), setup) if headlines.keys() & set(chosen) else []
        found += decode.host(setup) if "decode" in kinds else []
        return found + (family.host(setup) if "family" in kinds else [])

    return Family(
        cases=tuple(known),
        sweep="sweep-bf16-",
        providers=tuple(prefill.PROVIDERS),
        measure=measured,
        rest=rest,
        ceilings="ceiling-",
    )


def topk() -> Family:
    from . import topk as bench

    return Family(
        cases=bench.HEADLINE + bench.SORTED + bench.SWEEP,
        sweep="sweep-",
        providers=tuple(bench.PROVIDERS),
        measure=bench.measure,
        rest=lambda setup, _: bench.outputs(bench.OUTPUTS, setup) + bench.host(setup),
        ceilings="ceiling-copy",
    )


def indexer() -> Family:
    from . import indexer as bench
    from . import layer

    return Family(
        cases=(*bench.CASES, *layer.CASES),
        sweep="indexer-",
        providers=tuple(bench.PROVIDERS | layer.PROVIDERS),
        measure=lambda name, *how: (layer if name in layer.CASES else bench).measure(name, *how),
        rest=lambda setup, _: [],
        ceilings="ceiling-",
    )


def append() -> Family:
    from . import append as bench

    return Family(
        cases=bench.CASES,
        sweep="append-",
        providers=tuple(bench.PROVIDERS),
        measure=bench.measure,
        rest=lambda setup, _: bench.host(setup),
        ceilings="ceiling-copy",
    )


def chosen_of(cases: Iterable[str], prefixes: str, *more: str) -> list[str]:
    """Return the cases that begin with one of the comma-separated prefixes, or with one of `more`. Raise SystemExit if
    none begins with one of the former."""
    every = tuple(prefixes.split(","))
    for prefix in every:
        if not any(name.startswith(prefix) for name in cases):
            raise SystemExit(f"no case begins with {prefix!r}; there are: {', '.join(cases)}")
    return [name for name in cases if name.startswith((*every, *more))]


def each_of(cases: Iterable[str], prefixes: str) -> Iterator[str]:
    """Yield the cases of engines that have these comma-separated names, or else those that begin so, and print each."""
    for name in engines_of(cases, prefixes):
        print(name, flush=True)
        yield name


def engines_of(cases: Iterable[str], prefixes: str) -> list[str]:
    """Return the cases of engines that have these comma-separated names, or else those that begin so."""
    each = ([prefix] if prefix in cases else chosen_of(cases, prefix) for prefix in prefixes.split(","))
    return list(dict.fromkeys(name for own in each for name in own))


def providers_of(args: argparse.Namespace, default: Iterable[str] = ()) -> tuple[str, ...]:
    return tuple(args.providers.split(",")) if args.providers else tuple(default)


def environment() -> results.Environment:
    """Return the environment of a run. Raise SystemExit if this machine has no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("the benchmark needs a CUDA device")
    return results.environment()


def measure(args: argparse.Namespace) -> None:
    """Measure the chosen cases on this machine's GPU, append the rows to the csv, print the table."""
    import torch

    from . import harness

    env, family = environment(), args.family()
    chosen = chosen_of(family.cases, args.cases, *[family.sweep] * args.sweep)
    path = args.results or results.FOLDER / f"{env.gpu}.csv"
    setup = harness.Setup(providers_of(args, family.providers), args.rounds)
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


def serve(args: argparse.Namespace) -> None:
    """Measure the steps of a request trace and append them to bench/results/<gpu>.csv."""
    from . import harness, prefill, trace

    env = environment()
    path = args.results or results.FOLDER / f"{env.gpu}.csv"
    setup = harness.Setup(providers_of(args, prefill.PROVIDERS))
    found = trace.measure(setup, replace(trace.TRACE, requests=args.requests))
    rows = harness.rows_of(found, env)
    results.append(path, rows)
    for row in rows:
        print(f"{row.case:44} {row.provider:13} {row.time_us:10.1f} us  {row.ratio_to_ours or 1.0:6.3f}")
    print(f"{len(rows)} rows -> {path}")


def engine(args: argparse.Namespace) -> None:
    """Measure whole engines under loads of requests: vLLM and SGLang with our attention backend and with their own.
    Append to bench/results/<gpu>.csv and bench/results/engines/<gpu>.csv."""
    from . import engine as bench

    env = environment()
    folder, run = args.results or results.FOLDER, bench.Workers(args.logs)
    for name in each_of(bench.CASES, args.cases):
        with bench.exit_on_sigterm():
            rows, figures = bench.measure(name, providers_of(args), env, args.passes, args.rounds, run, args.together)
        results.append(folder / f"{env.gpu}.csv", rows)
        results.append(folder / "engines" / f"{env.gpu}.csv", figures)
        for row in rows:
            print(f"  {row.provider:16} {row.time_us:9.1f} us per token   {row.ratio_to_ours or 0.0:.3f} of ours")


def engine_error(args: argparse.Namespace) -> None:
    """Compare the log probabilities of engines' answers with those of the same model in fp32, and count the answers
    that come again. Append to engine_errors/<gpu>.csv and engine_answers/<gpu>.csv of bench/results."""
    from . import engine_error as bench
    from .engine import Workers

    env, folder = environment(), args.results or results.FOLDER
    names, run = engines_of(bench.CASES, args.cases), Workers(args.logs)
    for errors, answers in bench.measure(names, providers_of(args), env, run, args.jobs):
        results.append(folder / "engine_errors" / f"{env.gpu}.csv", errors)
        results.append(folder / "engine_answers" / f"{env.gpu}.csv", answers)


def engine_profile(args: argparse.Namespace) -> None:
    """List the kernels of vLLM's steps, ours marked. Append to bench/results/engine_profiles/<gpu>.csv."""
    from . import engine_profile as bench

    env = environment()
    path = args.results or results.file_of(results.ProfileRow, env.gpu)
    for name in each_of(bench.CASES, args.cases):
        results.append(path, bench.measure(name, providers_of(args), env))


def server(args: argparse.Namespace) -> None:
    """Put vLLM's HTTP server under load, with our attention backend and with its own. Append to
    bench/results/servers/<gpu>.csv."""
    from . import server as bench

    env = environment()
    path = args.results or results.file_of(results.ServerRow, env.gpu)
    for name in each_of(bench.SERVERS, args.cases):
        for row in bench.measure(name, providers_of(args), env, args.logs):
            results.append(path, [row])


def sparsity(args: argparse.Namespace) -> None:
    """Measure skip-softmax over threshold factors: blocks left out, time, error. Append to
    bench/results/sparsity/<gpu>.csv."""
    from . import harness, precision

    env = environment()
    path = args.results or results.file_of(results.SkipRow, env.gpu)
    rows = precision.study(precision.cases.SKIP, harness.Setup(("ours",), args.rounds), env)
    results.append(path, rows)
    print(f"{len(rows)} rows -> {path}")


def accuracy(args: argparse.Namespace) -> None:
    """Compare attention and the indexer with fp64, and count the calls that repeat their bits. Append to
    accuracy/<gpu>.csv and determinism/<gpu>.csv of bench/results."""
    import torch

    from . import accuracy as kv
    from . import harness
    from . import latent_accuracy as latent

    env, folder = environment(), args.results or results.FOLDER
    setup = harness.Setup(providers_of(args, (*kv.PROVIDERS, *latent.PROVIDERS)))
    for name in chosen_of((*kv.CASES, *latent.CASES), args.cases):
        bench: Any = latent if name in latent.CASES else kv
        rows, runs = bench.measure(bench.CASES[name], setup, env)
        results.append(folder / "accuracy" / f"{env.gpu}.csv", rows)
        counts = bench.determinism(bench.CASES[name], runs, setup, env)
        results.append(folder / "determinism" / f"{env.gpu}.csv", counts)
        print(name, *(f"{r.provider} {r.rms_error:.2g} ({r.max_error:.2g})" for r in rows), sep="  ", flush=True)
        print("   ", *(f"{r.provider} {r.kind} {r.equal:.0f}/{r.count:.0f}" for r in counts), sep="  ", flush=True)
        del runs
        torch.cuda.empty_cache()


def plots(args: argparse.Namespace) -> None:
    """Draw bench/results/*.png from the csv files."""
    from . import plots as draw

    for path in draw.draw_all(results.read_all()) + draw.draw_all(results.read_sparsity(), (draw.sparsity,)):
        print(path)


def fill(args: argparse.Namespace) -> None:
    """Fill the measured sections of README and docs/."""
    pages.command(readme.sections(), args.check)


Options = dict[str, tuple[Any, str]]  # name -> (default, help)
CASES = "comma-separated list of cases, or of beginnings of their names"
LOGS: Options = {"logs": ("", "folder for what each process prints; default: none")}
PROVIDERS: Options = {"providers": ("", "comma-separated list; default: all that run on this machine")}
ROUNDS: Options = {"rounds": (15, "times that each provider runs in turn")}
VERBS: dict[str, tuple[Callable[[argparse.Namespace], None], Options]] = {  # name -> (function, its options)
    "serve": (serve, PROVIDERS | {"requests": (200, "of the trace")}),
    "engine": (engine, PROVIDERS | LOGS | {
        "cases": ("engine-vllm-llama8b-b64-c8k-bf16", CASES), "passes": (3, "timed passes of each process"),
        "rounds": (1, "processes of each provider; odd rounds in the reverse order"),
        "together": (1, "engines that start side by side and then have their passes in turn"),
    }),
    "engine-error": (engine_error, PROVIDERS | LOGS | {
        "cases": ("engine-vllm-tiny-llama-bf16", CASES), "jobs": (1, "processes that run side by side"),
    }),
    "engine-profile": (engine_profile, {
        "cases": ("engine-vllm-llama8b-b64-c8k-bf16", CASES),
        "providers": ("ours", "comma-separated list of backends of vLLM"),
    }),
    "server": (server, LOGS | {
        "cases": ("server-vllm-llama8b-", CASES), "providers": ("ours", "comma-separated list of backends of vLLM"),
    }),
    "sparsity": (sparsity, ROUNDS),
    "accuracy": (accuracy, PROVIDERS | {"cases": ("accuracy-", "measure the cases that begin with these prefixes")}),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    verbs = parser.add_subparsers(required=True)

    def add(name: str, run: Callable[[argparse.Namespace], None], options: Options, about: str | None) -> Any:
        one = verbs.add_parser(name, help=about)
        for option, (default, what) in options.items():
            one.add_argument(f"--{option}", default=default, type=type(default), help=what)
        one.add_argument("--results", type=Path, help="csv, or folder of several, to append to; default: bench/results")
        one.set_defaults(run=run)
        return one

    for name, prefix, family in (
        ("attention", "prefill-bf16", attention),
        ("topk", "topk", topk),
        ("append", "", append),
        ("indexer", "", indexer),
    ):
        own = {"cases": (prefix, "measure the cases that begin with these prefixes")} | PROVIDERS | ROUNDS
        one = add(name, measure, own, f"measure {name}")
        one.add_argument("--sweep", action="store_true", help="also measure the sweep over lengths")
        one.set_defaults(family=family)
    for name, (run, options) in VERBS.items():
        add(name, run, options, run.__doc__)
    verbs.add_parser("plots", help=plots.__doc__).set_defaults(run=plots)
    one = verbs.add_parser("readme", help=fill.__doc__)
    one.add_argument("--check", action="store_true", help=pages.CHECK)
    one.set_defaults(run=fill)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
