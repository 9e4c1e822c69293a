"""Layers of small models that serve random requests: they arrive, grow and leave paged caches."""

from random import Random
from typing import Any, Protocol

import torch

from tools.fuzz.check import bits

from .grouped import GroupedModel, GroupedServingLayer
from .latent import LatentModel, LatentServingLayer
from .pool import SLOTS, DecodeStep, Prompts, RequestPool, Values, Wrong

Results = tuple[torch.Tensor, ...]
MODELS: tuple[GroupedModel | LatentModel, ...] = (
    GroupedModel(8, 2, 128, torch.bfloat16),
    GroupedModel(8, 1, 64, torch.float8_e4m3fn, 0.25),
    LatentModel(16, "656", 64, selected=64),  # DeepSeek V3.2 on one GPU of 8
    LatentModel(8, "rows", 16),  # Kimi K2 on one GPU of 8
)


class ServingLayer(Protocol):
    """A layer of a model, and its caches. `decode` can be captured: it makes no copy to the host."""

    caches: tuple[torch.Tensor, ...]

    def tensors(self, tokens: int) -> tuple[Values, Values]: ...
    def prefill(self, p: Prompts, check: bool) -> None: ...
    def decode(self, step: DecodeStep) -> Results: ...
    def check(self, step: DecodeStep, results: Results) -> None: ...


def layer_of(model: GroupedModel | LatentModel, gen: torch.Generator) -> ServingLayer:
    """Return the layer of a model on the device of a generator."""
    if isinstance(model, LatentModel):
        return LatentServingLayer(model, gen)
    return GroupedServingLayer(model, gen)


class ServingEngine:
    """Serves requests of one model on one device. Everything follows from the seed."""

    def __init__(self, model: GroupedModel | LatentModel, device: torch.device, seed: int):
        self.model, self.device, self.rng = model, device, Random(f"soak {seed} {model}")
        self.gen = torch.Generator(device).manual_seed(seed)
        self.layer = layer_of(model, self.gen)
        self.pool = RequestPool(self.rng, model.page, device)
        self.graphs: dict[int, tuple[Any, DecodeStep, Results]] = {}
        self.count = dict.fromkeys(("steps", "replays", "arrived", "left", "checked"), 0)

    def new_step(self, slots: int) -> DecodeStep:
        return self.pool.new_step(slots, *self.layer.tensors(slots))

    def fill(self, step: DecodeStep) -> None:
        """Give a step the next tokens of the requests."""
        self.pool.grow(step)
        for t in step.given.values():
            t.copy_(torch.randn(t.shape, generator=self.gen, device=self.device))

    def capture(self) -> None:
        """Capture a step of each size. Replays serve steps of any lengths."""
        for slots in SLOTS if self.device.type == "cuda" else ():
            step = self.new_step(slots)
            self.layer.decode(step)
            torch.cuda.synchronize(self.device)
            # torch's own stream for captures belongs to the device that captured first
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
            with torch.cuda.graph(graph, stream=stream):
                results = self.layer.decode(step)
            self.graphs[slots] = graph, step, results

    def step(self, check: bool) -> None:
        """Serve one step: some requests leave, some arrive, all others get a token. check: also compare the results
        with the plain implementation, and a replay's bits with an eager call's. Raise `Wrong`."""
        self.count["left"] += self.pool.leave()
        arrived = self.pool.arrive()
        self.count["arrived"] += len(arrived)
        if arrived:
            self.layer.prefill(self.pool.prompts(arrived), check)
        self.pool.running += arrived
        self.count["steps"] += 1
        if not self.pool.running:
            return
        slots = next(n for n in SLOTS if n >= len(self.pool.running))
        if slots in self.graphs and self.rng.random() < 0.7:
            graph, own, results = self.graphs[slots]
            self.fill(own)
            graph.replay()
            self.count["replays"] += 1
            if check:
                self._repeat(own, results)
        else:
            own = self.new_step(slots)
            self.fill(own)
            results = self.layer.decode(own)
        if check:
            self.layer.check(own, results)
            self.count["checked"] += 1

    def _repeat(self, step: DecodeStep, results: Results) -> None:
        """Compare the bits of a replay with those of an eager call of the same values."""
        want = [bits(t) for t in results]
        step.made["out"].fill_(float("nan"))
        again = self.layer.decode(step)
        if not all(torch.equal(bits(t), right) for t, right in zip(again, want, strict=True)):
            raise Wrong("an eager call and a replay differ in their bits")
