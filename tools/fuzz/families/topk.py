"""Top-k: drawn calls of all functions, and a second implementation that sorts whole rows."""

from dataclasses import replace
from random import Random
from typing import Any

import torch

import wrappers
from bench.cases import topk as cases
from bench.cases.topk import DECODE, FUNCTIONS, PREFILL, RAGGED, TOP_K, TopKCase

from ..call import Call, Options, Results, Work, case_of, changed_fields

VLLM = ("persistent_topk", "cooperative_topk")
DATA = tuple(cases.DATA)
WIDTHS = (1, 7, 50, 700, 3000, 16_384, 16_385, 40_000, 70_000, 130_000)
LONG = 760_000  # longer than a cluster holds
INDICES = ("lengths", "row_starts", "row_ends", "seq_lens", "offsets", "src_page_table", "row_to_batch",
           "page_table_row_starts")  # fmt: skip


def draw(family: str, rng: Random, options: Options) -> Call:
    function = rng.choice((*FUNCTIONS, *FUNCTIONS, *VLLM))
    own = PREFILL if function in VLLM else function
    long = rng.random() < 0.03 and not options.small
    width = LONG if long else rng.choice(WIDTHS) if rng.random() < 0.5 else rng.randint(1, 9000)
    rows = rng.randint(1, 3 if long else 9 if width > 20_000 else 40)
    if options.small:
        width, rows = min(width, 5000), min(rows, 6)
    k = rng.choice((1, 2, 7, 64, 512, 700, 2048, 2048, rng.randint(1, 3000)))
    if own == TOP_K:
        k = min(k, width)
    data = rng.choice(DATA) if rng.random() < 0.6 else tuple(rng.choices(DATA, k=3))
    next_n = rng.choice((1, 2, 3))
    rows = -(-rows // next_n) * next_n if own == DECODE else rows
    changes: dict[str, Any] = {
        "dtype": rng.choice(("fp32", "fp32", "bf16", "fp16")), "rows": rows, "width": width, "k": k, "data": data,
        "lengths": rng.choice(("full", "mixed", "mixed", "wild")), "starts": rng.random() < 0.4,
        "pad": rng.choice((0, 0, 1, 5, 64)), "shift": rng.choice((0, 0, 0, 1, 3)),
        "stride": 2 if own in (PREFILL, DECODE) and width < 20_000 and rng.random() < 0.1 else 1,
        "page_size": rng.choice((1, 1, 4, 64, 3)), "pad_table": rng.choice((0, 3)), "batch_map": rng.random() < 0.5,
        "next_n": next_n if own == DECODE else 1, "tie_break": rng.choice((0, 1, 2)), "sorted": rng.random() < 0.5,
        "given": rng.random() < 0.6, "pad_out": rng.choice((0, 0, 5)), "each_row": rng.random() < 0.3,
    }  # fmt: skip
    extra: dict[str, Any] = {}
    if own != TOP_K and rng.random() < 0.15:
        extra["hostile"] = True
    mode = rng.choices(("eager", "graph", "threads"), (76, 16, 8))[0]
    case = TopKCase(own, **changes)
    fields = changed_fields(case, "function")
    return Call(family, function, rng.randrange(1 << 30), mode, "shape", fields, extra)


# ---- the right results


def whole(scores: torch.Tensor) -> torch.Tensor:
    """Return the bit patterns of scores. torch's own copies of a NaN may have other bits."""
    return scores.contiguous().view(torch.int32 if scores.element_size() == 4 else torch.int16)


def order(scores: torch.Tensor) -> torch.Tensor:
    """Return int64 numbers in the order of the scores' bit patterns, +NaN being the largest."""
    bits = whole(scores).long()
    most = 0x7FFFFFFF if scores.element_size() == 4 else 0x7FFF
    return torch.where(bits < 0, -(bits & most) - 1, bits)  # sign and magnitude; -0 lies below +0


def picked(scores: torch.Tensor, k: int, start: torch.Tensor, end: torch.Tensor, large: bool) -> torch.Tensor:
    """Return the selected positions of each row's [start, end), counted from start, ascending, then -1: (R, k)."""
    rows, width = scores.shape
    column = torch.arange(width, device=scores.device)
    inside = (column >= start[:, None]) & (column < end[:, None])
    keys = torch.where(inside, order(scores), torch.iinfo(torch.int64).min)
    if large:
        ranked = width - 1 - keys.flip(1).sort(dim=1, descending=True, stable=True).indices
    else:
        ranked = keys.sort(dim=1, descending=True, stable=True).indices
    count = end - start
    most = min(k, width)
    place = torch.arange(most, device=scores.device)
    few = (count <= k)[:, None]
    found = torch.where(few, place.expand(rows, -1), ranked[:, :most] - start[:, None])
    empty = place >= count.clamp(max=k)[:, None]
    found = found.masked_fill(empty, 1 << 40).sort(1).values
    found = torch.where(found == 1 << 40, -1, found)
    return torch.nn.functional.pad(found, (0, k - most), value=-1)


def right(function: str, a: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the results of a call by name."""
    scores = a["logits" if "logits" in a else "input"]
    k = a["top_k"] if "top_k" in a else a["k"]
    rows, width = scores.shape
    device = scores.device

    def at(name: str) -> torch.Tensor:
        return torch.zeros(rows, dtype=torch.long, device=device) if a.get(name) is None else a[name].long()

    start = at("row_starts").clamp(0, width)
    if function in VLLM:
        end = a["lengths"].flatten().long()
    elif function == PREFILL:
        end = at("row_ends")
    elif function == DECODE and a["seq_lens"].dim() == 2:
        end = a["seq_lens"].flatten().long()
    elif function == DECODE:
        end = a["seq_lens"].long().repeat_interleave(a["next_n"]) - a["next_n"] + 1
        end = end + torch.arange(rows, device=device) % a["next_n"]
    else:
        end = start.new_full((rows,), width) if function == TOP_K else start + a["lengths"].long()
    end = torch.maximum(end, start).clamp(max=width)
    raw = picked(scores, k, start, end, a.get("tie_break") == 2)
    if function == TOP_K:
        if a["sorted"]:
            chosen = order(scores).gather(1, raw)
            raw = raw.gather(1, chosen.sort(dim=1, descending=True, stable=True).indices)
        return {"values": whole(scores).gather(1, raw).view(scores.dtype), "indices": raw}
    if function in (PREFILL, DECODE, *VLLM):
        return {"indices": raw.int()}
    if function == RAGGED:
        return {"out": torch.where(raw < 0, -1, raw + a["offsets"].long()[:, None]).to(torch.int32)}
    table, size = a["src_page_table"].long(), a["page_size"]
    batch = torch.arange(rows, device=device) if a.get("row_to_batch") is None else a["row_to_batch"].long()
    begin = at("page_table_row_starts")
    if a.get("page_table_row_starts") is None and size == 1:
        begin = at("row_starts")
    column = begin[:, None] + raw.div(size, rounding_mode="floor")
    good = (raw >= 0) & (batch >= 0)[:, None] & (batch < len(table))[:, None]
    good &= (column >= 0) & (column < table.shape[1])
    if not table.numel():
        return {"out": torch.full_like(raw, -1).int()}
    page = table[batch.clamp(0, len(table) - 1)[:, None], column.clamp(0, table.shape[1] - 1)]
    entry = page if size == 1 else torch.where(page < 0, -1, page * size + raw % size)
    found = {"out": torch.where(good, entry, -1).to(torch.int32)}
    return found | ({"out_raw_indices": raw.int()} if a.get("out_raw_indices") is not None else {})


# ---- the call


def _arguments(call: Call, case: TopKCase, seed: int) -> dict[str, Any]:
    a = cases.make_inputs(case, torch.device("cpu"), seed)
    if call.extra.get("hostile"):
        gen = torch.Generator().manual_seed(seed)
        for name in INDICES:
            if a.get(name) is not None:
                t = a[name]
                wild = torch.randint(-(1 << 31), 1 << 31, t.shape, generator=gen)
                near = torch.randint(-5, 2000, t.shape, generator=gen)
                a[name] = torch.where(torch.rand(t.shape, generator=gen) < 0.5, wild, near).to(t.dtype)
    if call.function in VLLM:
        return {"logits": a["logits"], "lengths": a["row_ends"], "output": a["indices"], "workspace": None,
                "k": case.k, "max_seq_len": case.width}  # fmt: skip
    return a


def build(call: Call, device: torch.device) -> Work:
    case = case_of(TopKCase, call, function=PREFILL if call.function in VLLM else call.function)
    function = getattr(wrappers, call.function)
    names = ("output",) if call.function in VLLM else cases.OUTPUTS[call.function]
    variants = [_arguments(call, case, call.seed + i) for i in range(2 if call.mode == "graph" else 1)]

    def run(tree: Any) -> Results:
        returned = function(**tree)
        found = {name: tree[name] for name in names if tree.get(name) is not None}
        if call.function in VLLM:
            return {"indices": found["output"]}
        if call.function == TOP_K:
            return {"values": returned[0], "indices": returned[1]}
        return found | ({} if returned is None else {"out": returned})

    def judge(variant: int, tree: Any, results: Results) -> str:
        want = right(call.function, {k: v.to(device) if isinstance(v, torch.Tensor) else v
                                     for k, v in variants[variant].items()})  # fmt: skip
        for name, t in want.items():
            got = results[name]
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
            apart = got.contiguous().view(bits) != t.contiguous().view(bits)
            if apart.any():
                at = apart.nonzero()[0].tolist()
                pair = f"{got[tuple(at)].item()}, must be {t[tuple(at)].item()}"
                return f"{name}: {int(apart.sum())} of {apart.numel()} values are wrong, the first at {at}: {pair}"
        return ""

    def written(tree: Any) -> list[torch.Tensor]:
        return [tree[name] for name in names if tree.get(name) is not None]

    return Work(variants, run, written, judge)


def smaller(call: Call) -> list[dict[str, Any]]:
    own = PREFILL if call.function in VLLM else call.function
    case, found = case_of(TopKCase, call, function=own), []
    for field, least in (("rows", case.next_n), ("width", 1), ("k", 1)):
        value = getattr(case, field)
        for less in (value // 2, value - (case.next_n if field == "rows" else 1)):
            if field == "rows":
                less = less // case.next_n * case.next_n
            if least <= less < value and not (own == TOP_K and field == "width" and less < case.k):
                found.append(replace(case, **{field: less}))
    if isinstance(case.data, tuple):
        found += [replace(case, data=one) for one in dict.fromkeys(case.data)]
    return [changed_fields(one, "function") for one in found]
