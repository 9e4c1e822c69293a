"""A layer with latent attention (MLA): append, and attention to all keys or to those that an indexer selects."""

from typing import NamedTuple

import torch

import wrappers
from bench.cases.indexer import tolerance
from bench.cases.mla import SCALE, VALUES, values
from cute_kernels.records import INDEX
from cute_kernels.records import ROWS as UNPACKED
from wrappers import BlockTable, IndexerRows, LatentCache, LatentQuery, reference

from .pool import LONGEST, ROWS, DecodeStep, Prompts, Values, Wrong, compare, random_rows

ROTATED, INDEX_DIM, INDEX_ROW = 64, 128, 132  # columns of a key beside those of V; columns, and bytes, of the indexer's
PART = 64  # tokens that the plain implementation computes at a time


class LatentModel(NamedTuple):
    """A layer. record: of its cache's rows, see `LatentCache`. page: rows of a page. selected: keys that a token
    attends to, 0 for all. index_heads: of the indexer that selects them."""

    heads: int
    record: str
    page: int
    selected: int = 0
    index_heads: int = 64


class LatentServingLayer:
    """The layer of a `LatentModel` on the device of a generator, with its caches."""

    def __init__(self, model: LatentModel, gen: torch.Generator):
        self.model, self.gen = model, gen
        shape, width = (ROWS // model.page, model.page), VALUES + ROTATED
        self.packed = model.record != UNPACKED
        if self.packed:
            cache = torch.zeros(*shape, int(model.record), dtype=torch.uint8, device=gen.device)
        else:
            cache = torch.zeros(*shape, width, dtype=torch.bfloat16, device=gen.device)
        index = torch.zeros(*shape, INDEX_ROW, dtype=torch.uint8, device=gen.device)
        self.caches: tuple[torch.Tensor, ...] = (cache, index) if model.selected else (cache,)
        self.target = LatentCache(cache, model.record)
        self.weight_scale = (INDEX_DIM * model.index_heads) ** -0.5

    def tensors(self, tokens: int) -> tuple[Values, Values]:
        """Return random values for tokens, and memory for what their calls write."""
        m, device = self.model, self.gen.device
        shapes: dict[str, tuple[int, ...]] = {
            "latent": (tokens, VALUES), "rotated": (tokens, ROTATED), "q": (tokens, m.heads, VALUES),
            "q_rotated": (tokens, m.heads, ROTATED),
        }  # fmt: skip
        query = torch.zeros(tokens, 1, m.heads, VALUES + ROTATED, dtype=torch.bfloat16, device=device)
        made = {"query": query, "out": torch.zeros_like(query[..., :VALUES])}
        if not m.selected:
            return random_rows(shapes, self.gen), made
        shapes |= {"index_k": (tokens, INDEX_DIM), "index_q": (tokens, m.index_heads, INDEX_DIM)}
        given = random_rows(shapes, self.gen)
        given["weights"] = torch.randn(tokens, m.index_heads, generator=self.gen, device=device)
        made["index_q"] = torch.zeros_like(given["index_q"], dtype=torch.uint8).view(torch.float8_e4m3fn).unsqueeze(1)
        made["index_weights"] = torch.zeros_like(given["weights"])
        made["slots"] = torch.full((tokens, 1, m.selected), -1, dtype=torch.int32, device=device)
        return given, made

    def _append(self, given: Values, places: torch.Tensor | BlockTable, made: Values) -> None:
        """Write the rows of tokens to the caches, and their queries to `made`."""
        index = None
        if self.model.selected:
            index = IndexerRows(
                given["index_k"], self.caches[1], q=given["index_q"], weights=given["weights"],
                weight_scale=self.weight_scale, q_out=made["index_q"].squeeze(1), weights_out=made["index_weights"],
            )  # fmt: skip
        query = LatentQuery(given["q"], given["q_rotated"], made["query"].squeeze(1))
        wrappers.append_latent(given["latent"], given["rotated"], self.target, places, query=query, index=index)

    # ---- decode

    def decode(self, step: DecodeStep) -> tuple[torch.Tensor, ...]:
        """Write the step's rows, select keys if the model does, and attend. Return the output, its LSE and the slots of
        the selected keys."""
        m, made, cache = self.model, step.made, self.caches[0].unsqueeze(2)
        self._append(step.given, step.places, made)
        if not m.selected:
            return wrappers.flash_mla_with_kvcache(
                made["query"], cache, step.table, step.lens, VALUES, softmax_scale=SCALE, causal=True, out=made["out"]
            )
        slots = wrappers.select_slots(
            made["index_q"], self.caches[1].unsqueeze(2), made["index_weights"], step.lens, step.table, m.selected,
            out=made["slots"],
        )  # fmt: skip
        out, lse = wrappers.flash_mla_with_kvcache(
            made["query"], cache, None, None, VALUES, softmax_scale=SCALE, is_fp8_kvcache=True, indices=slots,
            out=made["out"],
        )  # fmt: skip
        return out, lse, slots

    def check(self, step: DecodeStep, results: tuple[torch.Tensor, ...]) -> None:
        """Raise `Wrong` if the results of a step, or the rows that it has written, are not right."""
        made, logits, slots = step.made, None, None
        if self.model.selected:
            slots = results[2].squeeze(1)
            logits = wrappers.fp8_paged_mqa_logits(
                made["index_q"], self.caches[1].unsqueeze(2), made["index_weights"], step.lens, step.table, None,
                LONGEST,
            )  # fmt: skip
        found = Found("flash_mla_with_kvcache", step.places.long(), results[0].squeeze(1), logits, slots)
        self._check(step.given, made, self._keys(step.table, step.lens), found)

    # ---- prompts

    def prefill(self, p: Prompts, check: bool) -> None:
        """Write the rows of prompts, and attend to all earlier ones or to those that the indexer selects."""
        total, longest, device = sum(p.counts), max(p.counts), self.gen.device
        given, made = self.tensors(total)
        query, out = made["query"].squeeze(1), made["out"].squeeze(1)
        self._append(given, BlockTable(p.table, p.lens, p.starts), made)
        request = torch.arange(len(p.counts), device=device).repeat_interleave(p.lens.long(), output_size=total)
        tokens = torch.arange(total, dtype=torch.int32, device=device)
        first = p.starts[request]
        if self.model.selected:
            function, gathered = "flash_mla_sparse_fwd", self._gather(p)
            scores = made["index_q"].squeeze(1), gathered[1:], made["index_weights"], first, tokens + 1
            rows = wrappers.select_rows(*scores, self.model.selected, out=made["slots"].squeeze(1))
            wrappers.flash_mla_sparse_fwd(
                query, gathered[0][:, None], rows[:, None], SCALE, out=out,
                share_keys=total % 2 == 0,  # both forms of the function have their turn
            )  # fmt: skip
        else:
            function, cache = "flash_attn_varlen_func", self.caches[0].unsqueeze(2)
            v, k, qv, q = (part for t in (cache, query) for part in t.split([VALUES, ROTATED], -1))
            wrappers.flash_attn_varlen_func(
                q, k, v, p.starts, None, longest, longest, seqused_k=p.lens, block_table=p.table, qv=qv, causal=True,
                softmax_scale=SCALE, out=out,
            )  # fmt: skip
        if not check:
            return
        keys, logits, slots = self._keys(p.table[request], tokens - first + 1), None, None
        if self.model.selected:
            own = (first[:, None] + torch.arange(LONGEST, device=device)).clamp(max=total - 1)
            logits = wrappers.fp8_mqa_logits(*scores).gather(1, own)
            slots = taken(keys, torch.where(rows < 0, -1, rows - first[:, None]))
        places = taken(keys, (tokens - first)[:, None])[:, 0]
        self._check(given, made, keys, Found(function, places, out, logits, slots))

    def _gather(self, p: Prompts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rows of prompts, dequantised, the keys of their indexer, and the scales of these."""
        total, device = sum(p.counts), self.gen.device
        rows = torch.empty(total, VALUES + ROTATED, dtype=torch.bfloat16, device=device)
        index_k = torch.empty(total, INDEX_DIM, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty(total, device=device)
        wrappers.gather_latent(self.target, p.table, p.starts, rows)
        wrappers.cp_gather_indexer_k_quant_cache(self.caches[1], index_k, scales, p.table, p.starts)
        return rows, index_k, scales

    # ---- the plain implementation

    def _keys(self, table: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """Return the slots of the keys of tokens by position, (T, LONGEST), -1 behind the last one.

        table: (T, columns). lens: (T,)."""
        position, page = torch.arange(LONGEST, device=table.device), self.model.page
        slots = table.long()[:, position // page] * page + position % page
        return torch.where(position < lens[:, None], slots, -1)

    def _check(self, given: Values, made: Values, keys: torch.Tensor, found: "Found") -> None:
        """Raise `Wrong` if something is not right. keys: what `_keys` returns for the tokens."""
        there, query = found.places >= 0, made["query"].squeeze(1)
        places = found.places[there]
        own = values(self.model.record if self.packed else "", self.caches[0]).flatten(0, 1)
        rows = torch.cat([given["latent"], given["rotated"]], 1)[there].float()
        allowed = rounding(rows)
        allowed[:, VALUES if self.packed else 0 :] = 0.0
        compare("append_latent, rows of the cache", own[places], rows, allowed)
        joined = torch.cat([given["q"], given["q_rotated"]], 2)[there].float()
        compare("append_latent, queries", query[there], joined, torch.zeros_like(joined))
        if found.logits is not None and found.slots is not None:
            index_q, weights = made["index_q"].squeeze(1).float(), made["index_weights"]
            index = reference.latent_values(INDEX, self.caches[1]).flatten(0, 1)
            rows, own_q = given["index_k"][there].float(), given["index_q"][there].float()
            compare("append_latent, rows of the indexer", index[places], rows, rounding(rows))
            factors = given["weights"][there, :, None] * self.weight_scale
            weighed = index_q[there] * weights[there, :, None]  # the weights hold the scales of the queries
            compare("append_latent, queries of the indexer", weighed, own_q * factors, rounding(own_q) * factors.abs())
            logits = torch.where(keys < 0, -torch.inf, found.logits)
            want, allowed = scored(index_q, weights, index, keys)
            compare("the indexer", logits.masked_fill(keys < 0, 0.0), want.masked_fill(keys < 0, 0.0), allowed)
            best = taken(keys, largest(logits, self.model.selected))
            if wrong := int((found.slots != best).any(1).sum()):
                raise Wrong(f"{wrong} tokens have selected other keys than those with the largest logits")
            keys = best
        compare(found.function, found.out, attended(query, own, keys))


class Found(NamedTuple):
    """The results of a batch of tokens. function: of its attention. places: slots of its rows. out: (T, H, Dv).
    logits: (T, LONGEST), of the keys by position. slots: of the selected keys, (T, K)."""

    function: str
    places: torch.Tensor
    out: torch.Tensor
    logits: torch.Tensor | None
    slots: torch.Tensor | None


def rounding(x: torch.Tensor) -> torch.Tensor:
    """Return the most that e4m3 with a scale of its row changes normal values."""
    return 2.0**-4 * x.abs() + 2.0**-9


def taken(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the slots of the keys at these positions, -1 for a position of -1."""
    return torch.where(positions < 0, -1, keys.gather(1, positions.long().clamp(min=0)))


def largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the positions of the largest logits, ascending, then -1: of equal ones the first, and none of -inf."""
    best = logits.sort(dim=1, descending=True, stable=True).indices[:, :count]
    behind = logits.shape[1]
    best = best.masked_fill(logits.gather(1, best) == -torch.inf, behind).sort(1).values
    return torch.where(best == behind, -1, best)


def scored(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the keys in these slots, and how far each may be off."""
    logits, bounds = [], []
    for some, factors, own in zip(q.split(PART), weights.split(PART), slots.split(PART)):
        picked = keys[own.clamp(min=0)].transpose(1, 2)
        logits.append((factors[:, None] @ (some @ picked).relu()).squeeze(1))
        magnitudes = (factors.abs()[:, None] @ (some.abs() @ picked.abs())).squeeze(1)
        bounds.append(tolerance(q.shape[1], logits[-1], magnitudes))
    return torch.cat(logits), torch.cat(bounds)


def attended(q: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return attention to the rows in these slots, 0 for a token without one."""
    found = []
    for some, own in zip(q.split(PART), slots.split(PART)):
        picked = rows[own.clamp(min=0)].float()
        logits = (some.float() @ picked.transpose(1, 2) * SCALE).masked_fill(own[:, None] < 0, -torch.inf)
        found.append(logits.softmax(-1).nan_to_num(0.0) @ picked[..., :VALUES])
    return torch.cat(found)
