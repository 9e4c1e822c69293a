"""A layer of a small model that serves random requests: they arrive, grow and leave a paged cache."""

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch

import wrappers
from tools.fuzz import plain
from tools.fuzz.check import bits
from wrappers.own.registry import call_of

SLOTS = (4, 8, 16)  # requests of a captured step
COLUMNS, PAGE = 28, 16  # of the page table; rows of a page
LONGEST_PROMPT, LONGEST = 180, COLUMNS * PAGE
VOCABULARY, CHOSEN = 5000, 40
TOLERANCE = 1e-2  # rtol = atol of 16-bit outputs, as in `bench.cases.attention`


class Model(NamedTuple):
    """A layer. cache: dtype of K and V, which other caches than bf16 store divided by `scale`."""

    heads_q: int
    heads_kv: int
    dim: int
    cache: torch.dtype
    scale: float = 1.0


MODELS = (Model(8, 2, 128, torch.bfloat16), Model(8, 1, 64, torch.float8_e4m3fn, 0.25))


class Wrong(Exception):
    """A result that is not right, or bits that changed."""


class Request:
    """A request that is running. length: keys in the cache. end: the length at which it leaves."""

    def __init__(self, pages: list[int], prompt: int, end: int):
        self.pages, self.length, self.end = pages, prompt, end


class DecodeStep(NamedTuple):
    """The tensors of a decode step of `slots` requests, at addresses that a graph keeps."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    places: torch.Tensor  # rows of the pool, -1: none
    table: torch.Tensor
    lens: torch.Tensor
    scores: torch.Tensor
    out: torch.Tensor


class ServingEngine:
    """Serves requests of one model on one device. Everything follows from the seed."""

    def __init__(self, model: Model, device: torch.device, seed: int, pages: int = 160):
        self.model, self.device, self.rng = model, device, Random(f"soak {seed} {model}")
        self.gen = torch.Generator(device).manual_seed(seed)
        shape = pages, 2, model.heads_kv, PAGE, model.dim
        self.kv = torch.zeros(shape, dtype=torch.uint8 if model.cache.itemsize == 1 else model.cache, device=device)
        self.kv = self.kv.view(model.cache)
        self.target = wrappers.KVCacheTarget(self.kv, "HND", None, model.scale, model.scale)
        self.free = list(range(pages))
        self.requests: list[Request] = []
        self.graphs: dict[int, tuple[Any, DecodeStep, torch.Tensor]] = {}
        self.workspace = torch.zeros(1, dtype=torch.uint8, device=device)
        self.count = dict.fromkeys(("steps", "replays", "arrived", "left", "checked"), 0)

    # ---- requests

    def _leave(self) -> None:
        for request in [r for r in self.requests if r.length >= r.end or self.rng.random() < 0.01]:
            self.requests.remove(request)
            self.free += request.pages
            self.count["left"] += 1

    def _arrive(self) -> list[Request]:
        found: list[Request] = []
        while len(self.requests) + len(found) < max(SLOTS) and self.rng.random() < 0.4:
            prompt = self.rng.choice((1, PAGE, PAGE + 1, self.rng.randint(1, LONGEST_PROMPT)))
            end = min(LONGEST, prompt + self.rng.randint(1, 120))
            need = -(-end // PAGE)
            if need > len(self.free):
                break
            self.rng.shuffle(self.free)
            found.append(Request([self.free.pop() for _ in range(need)], prompt, end))
            self.count["arrived"] += 1
        return found

    def _table(self, requests: list[Request], slots: int) -> torch.Tensor:
        table = torch.zeros(slots, COLUMNS, dtype=torch.int32)
        for row, request in zip(table, requests):
            row[: len(request.pages)] = torch.tensor(request.pages)
        return table

    def _ints(self, values: list[int], slots: int, rest: int = 0) -> torch.Tensor:
        return torch.tensor([*values, *[rest] * (slots - len(values))], dtype=torch.int32)

    # ---- calls

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.gen, device=self.device).bfloat16()

    def _prefill(self, requests: list[Request]) -> dict[str, Any]:
        """Write the prompts' keys, and return the arguments of their attention."""
        m, lens = self.model, [r.length for r in requests]
        total = sum(lens)
        q, k, v = (self._random(total, n, m.dim) for n in (m.heads_q, m.heads_kv, m.heads_kv))
        starts = torch.tensor([0, *lens]).cumsum(0).int().to(self.device)
        table = self._table(requests, len(requests)).to(self.device)
        seq_lens = self._ints(lens, len(lens)).to(self.device)
        places = wrappers.BlockTable(table, seq_lens, starts)
        wrappers.append_qkv(None, k, v, cache=self.target, places=places)
        return {
            "query": q, "kv_cache": self.kv, "workspace_buffer": self.workspace, "block_tables": table,
            "seq_lens": seq_lens, "max_q_len": max(lens), "max_kv_len": max(lens), "bmm2_scale": m.scale,
            "bmm1_scale": m.scale * m.dim**-0.5, "batch_size": len(lens), "cum_seq_lens_q": starts,
            "cum_seq_lens_kv": starts, "kv_layout": "HND",
        }  # fmt: skip

    def new_step(self, slots: int) -> DecodeStep:
        m, device = self.model, self.device
        shapes = (slots, m.heads_q, m.dim), (slots, m.heads_kv, m.dim), (slots, m.heads_kv, m.dim)
        q, k, v = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in shapes)
        ints = torch.zeros(slots, dtype=torch.int32, device=device)
        table = torch.zeros(slots, COLUMNS, dtype=torch.int32, device=device)
        scores = torch.zeros(slots, VOCABULARY, device=device)
        return DecodeStep(q, k, v, ints - 1, table, ints, scores, torch.zeros_like(q))

    def fill(self, step: DecodeStep) -> None:
        """Give a step the next tokens of the requests; slots without a request have no keys."""
        slots, running = len(step.q), self.requests
        for request in running:
            request.length += 1
        rows = [r.pages[(r.length - 1) // PAGE] * PAGE + (r.length - 1) % PAGE for r in running]
        step.places.copy_(self._ints(rows, slots, -1))
        step.table.copy_(self._table(running, slots))
        step.lens.copy_(self._ints([r.length for r in running], slots))
        for t in (step.q, step.k, step.v, step.scores):
            t.copy_(torch.randn(t.shape, generator=self.gen, device=self.device))

    def decode_arguments(self, step: DecodeStep) -> dict[str, Any]:
        m = self.model
        return {
            "query": step.q, "kv_cache": self.kv, "workspace_buffer": self.workspace, "block_tables": step.table,
            "seq_lens": step.lens, "max_seq_len": LONGEST, "bmm1_scale": m.scale * m.dim**-0.5, "bmm2_scale": m.scale,
            "out": step.out, "kv_layout": "HND",
        }  # fmt: skip

    def decode(self, step: DecodeStep) -> torch.Tensor:
        """Write the step's keys, attend into `step.out`, and return the chosen tokens."""
        wrappers.append_qkv(None, step.k, step.v, cache=self.target, places=step.places)
        wrappers.trtllm_batch_decode_with_kv_cache(**self.decode_arguments(step))
        return wrappers.top_k(step.scores, CHOSEN)[1]

    def capture(self) -> None:
        """Capture a step of each size. Replays serve steps of any lengths."""
        for slots in SLOTS if self.device.type == "cuda" else ():
            step = self.new_step(slots)
            self.decode(step)
            torch.cuda.synchronize(self.device)
            # torch's own stream for captures belongs to the device that captured first
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
            with torch.cuda.graph(graph, stream=stream):
                chosen = self.decode(step)
            self.graphs[slots] = graph, step, chosen

    # ---- a step

    def step(self, check: bool) -> None:
        """Serve one step: some requests leave, some arrive, all others get a token. check: also compare the results
        with the plain implementation, and a replay's bits with an eager call's. Raise `Wrong`."""
        self._leave()
        arrived = self._arrive()
        if arrived:
            given = self._prefill(arrived)
            out = wrappers.trtllm_batch_context_with_kv_cache(**given)
            if check:
                self._compare(wrappers.trtllm_batch_context_with_kv_cache, given, out)
        self.requests += arrived
        self.count["steps"] += 1
        if not self.requests:
            return
        slots = next(n for n in SLOTS if n >= len(self.requests))
        if slots in self.graphs and self.rng.random() < 0.7:
            graph, own, chosen = self.graphs[slots]
            self.fill(own)
            graph.replay()
            self.count["replays"] += 1
            if check:
                self._repeat(own, chosen)
        else:
            own = self.new_step(slots)
            self.fill(own)
            chosen = self.decode(own)
        if check:
            self._compare(wrappers.trtllm_batch_decode_with_kv_cache, self.decode_arguments(own), own.out)
            found = own.scores.gather(1, chosen).sort(1, descending=True).values
            if not torch.equal(found, own.scores.topk(CHOSEN).values):
                raise Wrong("top_k chose other scores than torch.topk")
            self.count["checked"] += 1

    def _repeat(self, step: DecodeStep, chosen: torch.Tensor) -> None:
        """Compare the bits of a replay with those of an eager call of the same values."""
        want, tokens = bits(step.out), chosen.clone()
        step.out.fill_(float("nan"))
        again = self.decode(step)
        if not torch.equal(bits(step.out), want) or not torch.equal(again, tokens):
            raise Wrong("an eager call and a replay differ in their bits")

    def _compare(self, function: Callable[..., Any], given: dict[str, Any], out: torch.Tensor) -> None:
        want = plain.attention(call_of(function, **given)).o
        apart = (out.float() - want).abs() - TOLERANCE * (1 + want.abs())
        if not bool((apart <= 0).all()):
            at = int(apart.flatten().argmax())
            pair = f"{float(out.flatten()[at]):.5g}, must be {float(want.flatten()[at]):.5g}"
            raise Wrong(f"{function.__name__}: {int((apart > 0).sum())} values are off, the worst is {pair}")
