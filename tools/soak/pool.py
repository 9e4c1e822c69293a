"""Requests that arrive, grow and leave, the tensors of their calls, and the comparison of results with plain ones."""

from random import Random
from typing import NamedTuple

import torch

SLOTS = (4, 8, 16)  # requests of a captured step
ROWS = 2560  # of the pool of pages
LONGEST_PROMPT, LONGEST = 180, 448  # keys of a request; the second number is a multiple of all page sizes
TOLERANCE = 1e-2  # rtol = atol of 16-bit outputs, as in `bench.cases.attention`

Values = dict[str, torch.Tensor]  # tensors by name


class Wrong(Exception):
    """A result that is not right, or bits that changed."""


def compare(what: str, found: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor | None = None) -> None:
    """Raise `Wrong` if values are further apart than allowed, which is the tolerance of 16-bit outputs if None."""
    apart = (found.float() - want).abs() - (TOLERANCE * (1 + want.abs()) if allowed is None else allowed)
    if not bool((apart <= 0).all()):
        at = int(apart.flatten().argmax())
        pair = f"{float(found.flatten()[at]):.5g}, must be {float(want.flatten()[at]):.5g}"
        raise Wrong(f"{what}: {int((~(apart <= 0)).sum())} values are off, the worst is {pair}")


class Prompts(NamedTuple):
    """The tensors of requests that arrive: their pages, their lengths, and their first tokens in the batch."""

    counts: list[int]  # the lengths, for the host
    table: torch.Tensor  # (B, columns)
    lens: torch.Tensor  # (B,)
    starts: torch.Tensor  # (B + 1,)


class DecodeStep(NamedTuple):
    """The tensors of a decode step, at addresses that a graph keeps."""

    places: torch.Tensor  # rows of the pool, -1: none
    table: torch.Tensor
    lens: torch.Tensor
    given: Values  # random values, in the place of those that a model would compute
    made: Values  # what the calls write; "out" is the output of attention


class Request:
    """A request that is running. length: keys in the cache. end: the length at which it leaves."""

    def __init__(self, pages: list[int], prompt: int, end: int):
        self.pages, self.length, self.end = pages, prompt, end


class RequestPool:
    """The running requests, and the pages of `page` rows that they share.

    On the CPU they are few, because the reference computes one after another.
    """

    def __init__(self, rng: Random, page: int, device: torch.device):
        self.rng, self.page, self.device = rng, page, device
        self.most = max(SLOTS) if device.type == "cuda" else min(SLOTS)  # requests
        self.free = list(range(ROWS // page))
        self.running: list[Request] = []

    def leave(self) -> int:
        """Let requests leave that are at their end, and some others. Return how many."""
        found = [r for r in self.running if r.length >= r.end or self.rng.random() < 0.01]
        for request in found:
            self.running.remove(request)
            self.free += request.pages
        return len(found)

    def arrive(self) -> list[Request]:
        """Return new requests with pages for all of their keys. They do not run yet."""
        found: list[Request] = []
        while len(self.running) + len(found) < self.most and self.rng.random() < 0.4:
            prompt = self.rng.choice((1, self.page, self.page + 1, self.rng.randint(1, LONGEST_PROMPT)))
            end = min(LONGEST, prompt + self.rng.randint(1, 120))
            need = -(-end // self.page)
            if need > len(self.free):
                break
            self.rng.shuffle(self.free)
            found.append(Request([self.free.pop() for _ in range(need)], prompt, end))
        return found

    def prompts(self, requests: list[Request]) -> Prompts:
        """Return the tensors of requests that have arrived."""
        counts = [r.length for r in requests]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        tensors = self._table(requests, len(requests)), self._ints(counts, len(counts)), starts
        return Prompts(counts, *(t.to(self.device) for t in tensors))

    def new_step(self, slots: int, given: Values, made: Values) -> DecodeStep:
        """Return a step without requests."""
        lens = torch.zeros(slots, dtype=torch.int32, device=self.device)
        return DecodeStep(lens - 1, self._table([], slots).to(self.device), lens, given, made)

    def grow(self, step: DecodeStep) -> None:
        """Give each request a token, and a step their places; slots without a request have no keys."""
        slots, running, page = len(step.lens), self.running, self.page
        for request in running:
            request.length += 1
        rows = [r.pages[(r.length - 1) // page] * page + (r.length - 1) % page for r in running]
        step.places.copy_(self._ints(rows, slots, -1))
        step.table.copy_(self._table(running, slots))
        step.lens.copy_(self._ints([r.length for r in running], slots))

    def _table(self, requests: list[Request], slots: int) -> torch.Tensor:
        table = torch.zeros(slots, LONGEST // self.page, dtype=torch.int32)
        for row, request in zip(table, requests):
            row[: len(request.pages)] = torch.tensor(request.pages)
        return table

    def _ints(self, values: list[int], slots: int, rest: int = 0) -> torch.Tensor:
        return torch.tensor([*values, *[rest] * (slots - len(values))], dtype=torch.int32)


def random_rows(shapes: dict[str, tuple[int, ...]], gen: torch.Generator) -> Values:
    """Return normal values in bf16, by name."""
    return {name: torch.randn(shape, generator=gen, device=gen.device).bfloat16() for name, shape in shapes.items()}
