"""A layer with separate K and V: append, attention of prompts and of decode steps, and a choice of tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import wrappers
from tools.fuzz import plain
from wrappers.own.registry import call_of

from .pool import LONGEST, ROWS, DecodeStep, Prompts, Values, Wrong, compare, random_rows

VOCABULARY, CHOSEN = 5000, 40


class GroupedModel(NamedTuple):
    """A layer. cache: dtype of K and V, which other caches than bf16 store divided by `scale`. page: rows of a page."""

    heads_q: int
    heads_kv: int
    dim: int
    cache: torch.dtype
    scale: float = 1.0
    page: int = 16


class GroupedServingLayer:
    """The layer of a `GroupedModel` on the device of a generator, with its cache."""

    def __init__(self, model: GroupedModel, gen: torch.Generator):
        self.model, self.gen = model, gen
        shape = ROWS // model.page, 2, model.heads_kv, model.page, model.dim
        kv = torch.zeros(shape, dtype=torch.uint8 if model.cache.itemsize == 1 else model.cache, device=gen.device)
        self.caches: tuple[torch.Tensor, ...] = (kv.view(model.cache),)
        self.target = wrappers.KVCacheTarget(self.caches[0], "HND", None, model.scale, model.scale)
        self.workspace = torch.zeros(1, dtype=torch.uint8, device=gen.device)

    def _rows(self, tokens: int) -> Values:
        """Return random queries, keys and values."""
        m = self.model
        keys = tokens, m.heads_kv, m.dim
        return random_rows({"q": (tokens, m.heads_q, m.dim), "k": keys, "v": keys}, self.gen)

    def tensors(self, tokens: int) -> tuple[Values, Values]:
        """Return memory for the random values of a step, and for what its calls write."""
        given = self._rows(tokens)
        scores = torch.zeros(tokens, VOCABULARY, device=self.gen.device)
        return given | {"scores": scores}, {"out": torch.zeros_like(given["q"])}

    def _shared(self, query: torch.Tensor, table: torch.Tensor, lens: torch.Tensor) -> dict[str, Any]:
        """Return the arguments that prompts and decode steps have in common."""
        m = self.model
        return {
            "query": query, "kv_cache": self.caches[0], "workspace_buffer": self.workspace, "block_tables": table,
            "seq_lens": lens, "bmm1_scale": m.scale * m.dim**-0.5, "bmm2_scale": m.scale, "kv_layout": "HND",
        }  # fmt: skip

    def prefill(self, p: Prompts, check: bool) -> None:
        """Write the keys of prompts, and attend to them."""
        q, k, v = self._rows(sum(p.counts)).values()
        longest = max(p.counts)
        wrappers.append_qkv(None, k, v, cache=self.target, places=wrappers.BlockTable(p.table, p.lens, p.starts))
        given = self._shared(q, p.table, p.lens) | {
            "max_q_len": longest, "max_kv_len": longest, "batch_size": len(p.counts), "cum_seq_lens_q": p.starts,
            "cum_seq_lens_kv": p.starts,
        }  # fmt: skip
        out = wrappers.trtllm_batch_context_with_kv_cache(**given)
        if check:
            self._compare(wrappers.trtllm_batch_context_with_kv_cache, given, out)

    def decode_arguments(self, step: DecodeStep) -> dict[str, Any]:
        given = self._shared(step.given["q"], step.table, step.lens)
        return given | {"max_seq_len": LONGEST, "out": step.made["out"]}

    def decode(self, step: DecodeStep) -> tuple[torch.Tensor, ...]:
        """Write the step's keys, attend, and return the output and the chosen tokens."""
        given = step.given
        wrappers.append_qkv(None, given["k"], given["v"], cache=self.target, places=step.places)
        out = wrappers.trtllm_batch_decode_with_kv_cache(**self.decode_arguments(step))
        return out, wrappers.top_k(given["scores"], CHOSEN)[1]

    def check(self, step: DecodeStep, results: tuple[torch.Tensor, ...]) -> None:
        """Raise `Wrong` if the results of a step are not right."""
        out, chosen = results
        self._compare(wrappers.trtllm_batch_decode_with_kv_cache, self.decode_arguments(step), out)
        scores = step.given["scores"]
        found = scores.gather(1, chosen).sort(1, descending=True).values
        if not torch.equal(found, scores.topk(CHOSEN).values):
            raise Wrong("top_k chose other scores than torch.topk")

    def _compare(self, function: Callable[..., Any], given: dict[str, Any], out: torch.Tensor) -> None:
        compare(function.__name__, out, plain.attention(call_of(function, **given)).o)
