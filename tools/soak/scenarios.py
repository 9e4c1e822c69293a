"""Scenarios of long use, of many callers and of shortage. Each returns its figures in words, or raises."""

import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

import wrappers
from bench.cases.cache_write import copied
from tools.fuzz.check import bits
from wrappers.host import machine

from . import memory
from .engine import MODELS, ServingEngine
from .pool import Wrong
from .probe import Probe, digest

THREADS = 64
COUNT, FEW = 32, 10  # calls of a probe; in scenarios that repeat them often


class CannotRun(Exception):
    """A scenario that this machine cannot run. The message is the reason."""


class Soak(NamedTuple):
    """The options of a scenario. device: "cuda" or "cpu". seconds: of serving. steps: 0, or its number of steps."""

    device: torch.device
    seed: int
    seconds: float
    steps: int

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def gpu(s: Soak) -> None:
    """Raise `CannotRun` without a GPU."""
    if not s.on_gpu:
        raise CannotRun("needs a GPU")


# ---- long use


def serving(s: Soak) -> str:
    """Random requests arrive, grow and leave. Memory stays flat, results are right, a fixed step keeps its bits."""
    probe = Probe(s.device, s.seed, COUNT)
    first = probe.digest()
    engines = [ServingEngine(model, s.device, s.seed) for model in MODELS]
    for engine in engines:
        engine.capture()
    samples: list[memory.Sample] = []
    start, step = time.monotonic(), 0
    every = s.steps / 24 if s.steps else s.seconds / 60  # of a sample, in steps or in seconds
    while (spent := step if s.steps else time.monotonic() - start) < (s.steps or s.seconds):
        for engine in engines:
            engine.step(check=step % 25 == 0)
        step += 1
        if spent >= len(samples) * every:
            samples.append(memory.sample(step, s.device))
            print(f"serving: {step} steps, {samples[-1]}", flush=True)
            if len(samples) in ((3, 12) if s.steps else (5, 30)):  # the first time warms up, too
                probe.compare(first, "in the middle")
    probe.compare(first, "at the end")
    if wrong := memory.grown(samples):
        raise Wrong(wrong)
    counts = {name: sum(engine.count[name] for engine in engines) for name in engines[0].count}
    growths = ", ".join(f"{name} {size:+.1f}" for name, size in memory.growth(samples).items())
    return (
        f"{', '.join(f'{n} {name}' for name, n in counts.items())}; growth in MiB: {growths}; "
        f"{len(first)} fixed calls with equal bits at the start, in the middle and at the end"
    )


def small(device: torch.device, rows: int = 2) -> dict[str, Any]:
    """Return the arguments of a small decode call."""
    gen = torch.Generator(device).manual_seed(rows)
    kv = torch.randn(8, 2, 2, 16, 64, generator=gen, device=device).bfloat16()
    q = torch.randn(rows, 4, 64, generator=gen, device=device).bfloat16()
    table = torch.arange(8, dtype=torch.int32, device=device).view(1, 8).repeat(rows, 1)
    lens = torch.full((rows,), 100, dtype=torch.int32, device=device)
    return {
        "query": q, "kv_cache": kv, "workspace_buffer": None, "block_tables": table, "seq_lens": lens,
        "max_seq_len": 128, "bmm1_scale": 0.125,
    }  # fmt: skip


def plans(s: Soak) -> str:
    """More forms of calls than plans are kept: plans go and are made anew; calls, bound calls and graphs go on."""
    here, decode = machine.current, wrappers.trtllm_batch_decode_with_kv_cache
    given = small(s.device)
    if here.device_info(s.device) is None:
        raise CannotRun("needs a GPU")
    want = bits(decode(**given))
    bound = wrappers.bind(decode, **given)
    graph = None
    if s.on_gpu:
        graph, captured = torch.cuda.CUDAGraph(), torch.empty_like(given["query"])
        with torch.cuda.graph(graph):
            decode(**given, out=captured)
    rounds, evictions, most, samples = 4, 0, 0, []
    for number in range(rounds):
        for form in range(here.max_plans + 50):
            before = len(here.plans)
            decode(**given | {"bmm1_scale": 0.125 + 1e-6 * (1 + form)})
            evictions += len(here.plans) < before
            most = max(most, len(here.plans))
        samples.append(memory.sample(number, s.device))
        results = {"a call": decode(**given), "a bound call": bound.run(given["query"])}
        if graph is not None:
            captured.fill_(float("nan"))
            graph.replay()
            results["a replay"] = captured
        for what, found in results.items():
            if not torch.equal(bits(found), want):
                raise Wrong(f"{what} has other bits after {evictions} evictions")
    if most > here.max_plans or evictions < rounds:
        raise Wrong(f"{most} plans of at most {here.max_plans} were kept, and {evictions} evictions seen")
    grew = {name: getattr(samples[-1], name) - getattr(samples[1], name) for name in memory.LIMITS}
    if over := [f"{name} {size:.1f} MiB" for name, size in grew.items() if size > memory.LIMITS[name]]:
        raise Wrong(f"memory grew in the last two rounds of plans: {', '.join(over)}")
    forms = rounds * (here.max_plans + 50)
    kept = "call, bound call and replay" if graph is not None else "call and bound call"
    return f"{forms} forms, at most {most} plans kept, {evictions} evictions, equal bits of {kept}"


# ---- many callers


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run work(0), ... in threads that begin together. Raise the first error."""
    gate = threading.Barrier(count)

    def begin(number: int) -> None:
        gate.wait()
        work(number)

    with ThreadPoolExecutor(count) as pool:
        for task in [pool.submit(begin, number) for number in range(count)]:
            task.result()


def threads(s: Soak) -> str:
    """Many threads meet every function at once for the first time, on streams of their own."""
    probe = Probe(s.device, s.seed, FEW)
    wanted = dict(probe.run())
    works = [[probe.made(call)[0] for call in probe.calls] for _ in range(THREADS)]  # a class serves one thread
    fresh = type(probe.machine)() if s.on_gpu else machine.current
    rounds = 3

    def repeat(number: int) -> None:
        stream = torch.cuda.Stream(s.device) if s.on_gpu else None
        with machine.current.on_stream(stream):
            for turn in range(rounds):
                for index in range(len(probe.calls)):
                    at = (index + number) % len(probe.calls)
                    work, call = works[number][at], str(probe.calls[at])
                    found = probe.results(work, copied(work.variants[0], s.device))
                    _same(wanted[call], found, f"thread {number}, round {turn}, {call}")

    if s.on_gpu:
        torch.cuda.synchronize(s.device)
    with machine.override(fresh):
        in_threads(THREADS, repeat)
    return f"{THREADS} threads, {rounds} rounds of {len(probe.calls)} calls, equal bits"


def _same(want: list[torch.Tensor], found: list[torch.Tensor], what: str) -> None:
    for a, b in zip(want, found, strict=True):
        if not torch.equal(a, b.to(a.device)):
            raise Wrong(f"{what}: other bits")


def devices(s: Soak) -> str:
    """Two GPUs serve at once and give equal bits, whichever is current."""
    gpu(s)
    if torch.cuda.device_count() < 2:
        raise CannotRun("needs two GPUs")
    if len({torch.cuda.get_device_name(index) for index in (0, 1)}) > 1:
        raise CannotRun("needs two GPUs of one type")
    wanted = digest("cuda:0", s.seed, FEW)
    with torch.cuda.device(0):
        Probe(torch.device("cuda:1"), s.seed, FEW).compare(wanted, "the second device while the first is current")
    engines = [ServingEngine(MODELS[0], torch.device("cuda", index), s.seed) for index in (0, 1)]
    for index in (0, 1):
        with torch.cuda.device(index):
            engines[index].capture()

    def work(index: int) -> None:
        with torch.cuda.device(index):
            for step in range(100):
                engines[index].step(check=step % 10 == 0)
            torch.cuda.synchronize(index)

    in_threads(2, work)
    first, second = ([bits(cache) for cache in engine.layer.caches] for engine in engines)
    _same(first, second, "the caches after equal requests")
    return f"{len(wanted)} calls and 100 steps on each, equal bits"


def _forked(device: str, seed: int) -> str:
    """Return how a call ends in a process that was forked after its parent had used CUDA."""
    cpu = digest("cpu", seed, 3)
    try:
        wrappers.trtllm_batch_decode_with_kv_cache(**small(torch.device(device)))
    except Exception as error:
        return f"{len(cpu)} calls on the CPU; on the device {type(error).__name__}"
    return "no error"


def processes(s: Soak) -> str:
    """Forked and spawned processes: before CUDA is used all give equal bits; after it a forked one gets an error."""
    name = "cuda:0" if s.on_gpu else "cpu"
    task = name, s.seed, FEW
    with multiprocessing.get_context("fork").Pool(2) as pool:
        forked = pool.starmap(digest, [task] * 2)
    own = digest(*task)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        spawned = pool.starmap(digest, [task] * 2)
    if any(found != own for found in (*forked, *spawned)):
        raise Wrong("another process has other bits")
    said = f"2 forked and 2 spawned processes, {len(own)} calls, equal bits"
    if not s.on_gpu:
        return said
    with multiprocessing.get_context("fork").Pool(1) as pool:
        late = pool.apply_async(_forked, (name, s.seed)).get(120)
    if late == "no error":
        raise Wrong("a process that was forked after CUDA was used made a call without an error")
    Probe(s.device, s.seed, FEW).compare(own, "after the forked process")
    return f"{said}; forked after CUDA was used: {late}"


# ---- shortage


def fill(device: torch.device, spare: int) -> list[torch.Tensor]:
    """Allocate all memory of a device, and leave about `spare` bytes."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    found, size = [], torch.cuda.mem_get_info(device)[0]
    hole = torch.empty(spare, dtype=torch.uint8, device=device) if spare else None
    while size >= 512:
        try:
            found.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size //= 2
    del hole
    return found


def shortage(s: Soak) -> str:
    """The device's memory ends in the middle of a call: the call raises, and everything works when memory is free."""
    gpu(s)
    probe = Probe(s.device, s.seed, COUNT)
    wanted = dict(probe.run())
    spares, failed, served = (0, 1 << 12, 1 << 16, 1 << 21, 3 << 21, 1 << 25), 0, 0
    for spare in spares:
        here = type(probe.machine)()  # without plans and scratch, so that calls allocate them too
        made = [(str(call), probe.made(call)) for call in probe.calls]
        blocks, done = fill(s.device, spare), []
        with machine.override(here):
            for name, (work, tree) in made:
                try:
                    done.append((name, probe.results(work, tree)))
                except RuntimeError as error:
                    if "out of memory" not in str(error):
                        raise Wrong(f"{name}: {type(error).__name__}: {error}") from error
                    failed += 1
            del blocks
            torch.cuda.synchronize(s.device)
            torch.cuda.empty_cache()
            for name, results in done:  # a comparison allocates
                _same(wanted[name], results, f"with {spare} bytes left, {name}")
            served += len(done)
            for call in probe.calls:
                results = probe.results(*probe.made(call))
                _same(wanted[str(call)], results, f"after {spare} bytes were left, {call}")
    if not failed:
        raise Wrong("no call ran out of memory")
    return f"{failed} calls raised, {served} were served; then all {len(spares) * len(probe.calls)} had equal bits"


def capture_shortage(s: Soak) -> str:
    """Memory ends while a call is captured: the capture fails, and later calls and captures work."""
    gpu(s)
    decode, given = wrappers.trtllm_batch_decode_with_kv_cache, small(s.device, 64)
    want = bits(decode(**given))
    blocks, said = fill(s.device, 0), "no error"
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            decode(**given)
    except RuntimeError as error:
        said = type(error).__name__
    del blocks
    torch.cuda.synchronize(s.device)
    torch.cuda.empty_cache()
    _same([want], [bits(decode(**given))], "a call after a capture that failed")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(**given)
    graph.replay()
    _same([want], [bits(out)], "a replay after a capture that failed")
    return f"the capture ended with {said}; then a call and a replay had equal bits"
