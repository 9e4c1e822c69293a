"""Steps that a test gives to torch.compile: every public function and class on a device, with new and other inputs.

A step takes the arguments of its function, which hold no output, allocates what the function writes, and returns
tensors. It doubles the first argument and halves the result, which is exact, so that the compiler has kernels of its
own before and behind the function.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config as inductor
from torch.fx.experimental import _config as shapes
from torch.utils._pytree import tree_leaves

import wrappers
from bench.cases import attention, family, indexer, mla, topk
from bench.cases.family import FamilyCase
from tests.support.host_work import Seen
from wrappers.flashinfer import values
from wrappers.host import machine

Given = dict[str, Any]
Results = tuple[torch.Tensor, ...]
# The inputs of a step have two sizes, 0 and 1: the second has other numbers of requests, tokens, pages and scores.
LENS = (((1, 1), (19, 37)), ((1, 1, 1), (40, 3, 200)))  # (query lengths, lengths) of decoding requests, by size
CHUNKS = (((5, 37), (19, 37)), ((1, 9, 20), (40, 9, 50)))  # of requests with several query tokens
DENSE = ((2, 5, 48), (3, 7, 80))  # requests, query tokens and keys of each, by size
PLANNED = (FamilyCase(q_lens=(5, 33), kv_lens=(40, 33)), FamilyCase(q_lens=(1, 20, 7), kv_lens=(9, 50, 7)))
SCORES = ({"rows": 6, "width": 50}, {"rows": 9, "width": 300})
BASE = replace(attention.EDGE["plain"], lse=False)


# ---- inputs: of a device, a size and a seed


def table_inputs(function: str, lens: Any, **changes: Any) -> Callable[..., Given]:
    def make(device: Any, size: int, seed: int) -> Given:
        q_lens, kv_lens = lens[size]
        case = replace(BASE, function=function, q_lens=q_lens, kv_lens=kv_lens, **changes)
        given = attention.FUNCTIONS[function][1](case, attention.make_call(case, device, seed))
        return {name: value for name, value in given.items() if name not in ("out", "lse", "output")}

    return make


def xqa_decode_inputs(device: Any, size: int, seed: int) -> Given:
    given = table_inputs("decode", LENS, layout="NHD")(device, size, seed)
    names = ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len", "bmm1_scale", "sinks")
    return {name: given[name] for name in names}


def fmha_inputs(device: Any, size: int, seed: int) -> Given:
    given = table_inputs("context", CHUNKS, cache="stacked")(device, size, seed)
    names = ("workspace_buffer", "seq_lens", "max_q_len", "max_kv_len", "bmm1_scale", "bmm2_scale", "batch_size",
             "cum_seq_lens_q", "cum_seq_lens_kv", "block_tables", "sinks")  # fmt: skip
    return {name: given[name] for name in names} | {
        "qkv": (given["query"], given["kv_cache"]),
        "input_layout": "Q_PAGED_KV_HND",
    }


def mla_inputs(function: str) -> Callable[..., Given]:
    """function: as in `MlaCase`."""

    def make(device: Any, size: int, seed: int) -> Given:
        made = mla.make(mla.MlaCase(lens=LENS[size][1], rows=2, heads=4, page_size=16), "cpu", seed)
        names = ("q", "k_cache", "block_table", "cache_seqlens")
        if function == "trtllm":
            names = ("query", "kv_cache", "block_tables", "seq_lens")
        cache = made.cache if function == "trtllm" else made.cache.unsqueeze(2)
        given: Given = {name: t.to(device) for name, t in zip(names, (made.q, cache, made.table, made.lens))}
        if function == "trtllm":
            return given | {"workspace_buffer": None, "qk_nope_head_dim": 128, "kv_lora_rank": 512,
                            "qk_rope_head_dim": 64, "max_seq_len": 256, "bmm1_scale": 0.1}  # fmt: skip
        return given | {"head_dim_v": 512, "causal": True}

    return make


def single_inputs(device: Any, size: int, seed: int) -> Given:
    rows, keys = CHUNKS[size]
    case = FamilyCase(form="single", q_lens=rows[1:2], kv_lens=keys[1:2])
    q, k, v = family.placed(case, family.make(case, seed), device)
    return {"q": q, "k": k[: keys[1]], "v": v[: keys[1]], "causal": True, "pos_encoding_mode": "ALIBI"}


def flash_inputs(device: Any, size: int, seed: int) -> Given:
    batch, rows, keys = DENSE[size]
    draw = torch.Generator().manual_seed(seed)
    shapes = ((batch, rows, 4, 64), (batch, keys, 2, 64), (batch, keys, 2, 64))
    q, k, v = (torch.randn(shape, generator=draw).bfloat16().to(device) for shape in shapes)
    return {"q": q, "k": k, "v": v, "causal": True}


def single_decode_inputs(device: Any, size: int, seed: int) -> Given:
    given = flash_inputs(device, size, seed)
    return {"q": given["q"][0, -1], "k": given["k"][0], "v": given["v"][0]}


def varlen_inputs(device: Any, size: int, seed: int) -> Given:
    batch, rows, keys = DENSE[size]
    given = flash_inputs(device, size, seed)
    starts = [torch.arange(batch + 1, dtype=torch.int32, device=device) * n for n in (rows, keys)]
    flat = {name: given[name].flatten(0, 1) for name in ("q", "k", "v")}
    return flat | {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "max_seqlen_q": rows, "causal": True}


def kvcache_inputs(device: Any, size: int, seed: int) -> Given:
    batch, _, keys = DENSE[size]
    given = flash_inputs(device, size, seed)
    lens = torch.arange(keys - batch, keys, dtype=torch.int32, device=device) - seed
    return {"q": given["q"][:, :1], "k_cache": given["k"], "v_cache": given["v"], "cache_seqlens": lens}


_planned: dict[tuple[str, str], Any] = {}  # (class, device type) -> its object, which a step uses and inputs plan anew


def class_inputs(form: str) -> Callable[..., Given]:
    """form: as in `FamilyCase`, or "decode"."""

    def make(device: Any, size: int, seed: int) -> Given:
        case = replace(PLANNED[size], form="paged" if form == "decode" else form)
        if form == "decode":
            q_lens, kv_lens = LENS[size]
            case = replace(case, q_lens=q_lens, kv_lens=kv_lens)
        t, key = family.make(case, seed), (form, torch.device(device).type)
        arguments = family.placed(case, t, device)
        if form == "decode":
            if key not in _planned:
                _planned[key] = wrappers.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device=device))
            shape = case.heads_q, case.heads_kv, case.head_dim_qk, case.page_size
            _planned[key].plan(t.kv_starts, t.indices, t.last, *shape, q_data_type=torch.bfloat16)
        else:
            if key not in _planned:
                _planned[key] = family.wrapper_of(case, device)
            family.plan(case, _planned[key], t)
        given = {"arguments": arguments} | ({} if t.sinks is None else {"sinks": t.sinks.to(device)})
        return given

    return make


def topk_inputs(function: str) -> Callable[..., Given]:
    def make(device: Any, size: int, seed: int) -> Given:
        case = replace(topk.PLAIN[function], given=False, **SCORES[size])
        found = topk.make_inputs(case, torch.device(device), seed)
        return {name: value for name, value in found.items() if name != "indices"}

    return make


def vllm_inputs(device: Any, size: int, seed: int) -> Given:
    given = topk_inputs(topk.PREFILL)(device, size, seed)
    width = given["logits"].shape[1]
    return {"logits": given["logits"], "lengths": given["row_ends"], "workspace": None, "k": 7, "max_seq_len": width}


def states_inputs(count: int) -> Callable[..., Given]:
    """count: of states in one tensor, or 0 for two tensors."""

    def make(device: Any, size: int, seed: int) -> Given:
        draw, tokens = torch.Generator().manual_seed(seed), DENSE[size][1]
        shapes = [(tokens, count, 3, 64)] if count else [(tokens, 3, 64)] * 2
        v = [torch.randn(shape, generator=draw).bfloat16().to(device) for shape in shapes]
        s = [torch.randn(shape[:-1], generator=draw).to(device) for shape in shapes]
        return {"v": v[0], "s": s[0]} if count else {"v_a": v[0], "s_a": s[0], "v_b": v[1], "s_b": s[1]}

    return make


def rows_inputs(device: Any, size: int, seed: int) -> Given:
    draw, tokens = torch.Generator().manual_seed(seed), DENSE[size][1]
    packed = torch.randn(tokens, 8, 64, generator=draw).bfloat16().to(device)
    slots = torch.randperm(40, generator=draw)[:tokens].to(device)
    return {"packed": packed, "slots": slots, "cache": torch.zeros(5, 2, 8, 2, 64).bfloat16().to(device)}


def latent_inputs(device: Any, size: int, seed: int) -> Given:
    draw, tokens = torch.Generator().manual_seed(seed), DENSE[size][1]
    rows = torch.randn(tokens, 704, generator=draw).bfloat16().to(device)
    slots, table = torch.randperm(40, generator=draw)[:tokens].to(device), torch.randn(40, 64, generator=draw)
    caches = torch.zeros(5, 8, 656, dtype=torch.uint8), torch.zeros(5, 8, 132, dtype=torch.uint8)
    return {"rows": rows, "slots": slots, "table": table.to(device), "caches": [cache.to(device) for cache in caches]}


# ---- steps


def returning(function: Callable[..., Any], first: str) -> Callable[[Given], Results]:
    """Return the step of a function that returns one or two tensors."""

    def step(given: Given) -> Results:
        found = function(**given | {first: given[first] * 2})
        o, *others = found if isinstance(found, tuple) else (found,)
        return (o * 0.5 if o.is_floating_point() else o + 1, *others)

    return step


def writing(function: Callable[..., Any], first: str, output: str) -> Callable[[Given], Results]:
    """Return the step of a function that writes the k indices of each row, or attention of the query's shape."""

    def step(given: Given) -> Results:
        doubled = given[first] * 2
        if first == "q":
            out = torch.empty_like(doubled)
        else:
            out = torch.empty(doubled.shape[0], 7, dtype=torch.int32, device=doubled.device)
        function(**given | {first: doubled, output: out})
        return (out * 0.5 if first == "q" else out + 1,)

    return step


def fmha_step(given: Given) -> Results:
    q, cache = given["qkv"]
    return (wrappers.trtllm_fmha_v2_prefill(**given | {"qkv": (q * 2, cache)}) * 0.5,)


def class_step(form: str) -> Callable[[Given], Results]:
    def step(given: Given) -> Results:
        q, *cache = given["arguments"]
        extra = {"sinks": given["sinks"]} if form == "sinks" else {}
        o, lse = _planned[form, q.device.type].run(q * 2, *cache, **extra, return_lse=True)
        return o * 0.5, lse

    return step


def in_place_step(given: Given) -> Results:
    v, s = given["v_a"] * 2, given["s_a"] + 0.0
    wrappers.merge_state_in_place(v, s, given["v_b"], given["s_b"])
    return v * 0.5, s


def append_step(given: Given) -> Results:
    """Rotate Q and K, and write K and V."""
    q, k, v = (given["packed"] * 2).split([4, 2, 2], 1)
    cache, rope = given["cache"] + 0.0, wrappers.RotaryEmbedding(given["slots"])
    q = wrappers.append_qkv(q, k, v, wrappers.KVCacheTarget(cache), given["slots"], rope=rope)
    assert q is not None
    return q * 0.5, cache * 0.5


def gather_step(given: Given) -> Results:
    """Gather rows that were written before."""
    latent, rotated, _ = (given["rows"] * 2).split([512, 64, 128], 1)
    cache, tokens = wrappers.LatentCache(given["caches"][0] + 0, "656"), latent.shape[0]
    wrappers.append_latent(latent, rotated, cache, given["slots"])
    out, table = torch.zeros_like(given["rows"][:, :576]), torch.arange(5, device=latent.device)[None]
    wrappers.gather_latent(cache, table, tokens * torch.arange(2, device=latent.device), out)
    return (out * 0.5,)


def latent_step(given: Given, queries: bool = True) -> Results:
    """Rotate the key and the query, join the query, and write the rows of the latent and of an indexer. queries: of the
    indexer too, which are e4m3."""
    latent, rotated, k = (given["rows"] * 2).split([512, 64, 128], 1)
    cache, indexed = (t + 0 for t in given["caches"])
    rope = wrappers.RotaryEmbedding(given["slots"], given["table"])
    query = wrappers.LatentQuery(latent[:, None], rotated[:, None])
    index = wrappers.IndexerRows(k, indexed, rope=rope)
    if queries:
        index = index._replace(q=k[:, None], weights=rotated[:, :1].float())
    target = wrappers.LatentCache(cache, "656")
    found = wrappers.append_latent(latent, rotated, target, given["slots"], None, rope, query, index)
    assert found.query is not None
    results = found.query * 0.5, cache + 1, indexed + 1
    if found.index_q is None or found.index_weights is None:
        return results
    return *results, found.index_q.float(), found.index_weights


def sparse_fwd_inputs(device: Any, size: int, seed: int) -> Given:
    """Tokens that have chosen rows of latent attention."""
    gen, (_, tokens, keys) = torch.Generator().manual_seed(seed), DENSE[size]
    q, kv = (torch.randn(*shape, 576, generator=gen).bfloat16() for shape in ((tokens, 4), (keys, 1)))
    rows = torch.randint(-3, keys + 3, (tokens, 1, 16), generator=gen).int()
    return {"q": q.to(device), "kv": kv.to(device), "indices": rows.to(device), "sm_scale": 0.1}


def dsa_inputs(function: str) -> Callable[..., Given]:
    """The same in FlashInfer's form; of a varlen function, two documents."""

    def make(device: Any, size: int, seed: int) -> Given:
        given = sparse_fwd_inputs(device, size, seed)
        q, kv, rows = given["q"], given["kv"][:, 0], given["indices"][:, 0]
        made = {"q_latent": q[..., :512], "q_rope": q[..., 512:], "kv_latent": kv[:, :512], "k_rope": kv[:, 512:]}
        if not function.endswith("varlen"):
            return made | {"indices": rows}
        ends = {f"cu_seqlens_{x}": torch.tensor([0, n // 2, n], dtype=torch.int32, device=device)
                for x, n in (("q", len(q)), ("k", len(kv)))}  # fmt: skip
        return made | ends | {"gather_kv_indices": rows}

    return make


def sparse_paged_inputs(device: Any, size: int, seed: int) -> Given:
    """Tokens that have chosen keys of a paged cache."""
    gen, (_, tokens, keys) = torch.Generator().manual_seed(seed), DENSE[size]
    q, k, v = (torch.randn(*shape, 64, generator=gen).bfloat16().to(device)
               for shape in ((tokens, 4), (keys // 8, 8, 2), (keys // 8, 8, 2)))  # fmt: skip
    slots = torch.randint(-3, keys + 3, (tokens, 16), generator=gen).int()
    return {"q": q, "kv_cache": (k, v), "indices": slots.to(device)}


def ragged_mla_inputs(device: Any, size: int, seed: int) -> Given:
    """Two requests of rows without pages."""
    gen, (_, tokens, keys) = torch.Generator().manual_seed(seed), DENSE[size]
    q, k, v = (torch.randn(n, 4, dim, generator=gen).bfloat16().to(device)
               for n, dim in ((tokens, 192), (keys, 192), (keys, 128)))  # fmt: skip
    ends = {f"cum_seq_lens_{x}": torch.tensor([0, n // 2, n], dtype=torch.int32, device=device)
            for x, n in (("q", tokens), ("kv", keys))}  # fmt: skip
    return ends | {
        "query": q, "key": k, "value": v, "workspace_buffer": None, "seq_lens": None, "max_q_len": tokens,
        "max_kv_len": keys, "bmm1_scale": 0.07, "bmm2_scale": 1.0, "o_sf_scale": 1.0, "batch_size": 2,
        "window_left": -1, "enable_pdl": None, "is_causal": False, "return_lse": True,
    }  # fmt: skip


def segments_inputs(device: Any, size: int, seed: int) -> Given:
    """Two segments of tokens and keys."""
    gen, (_, tokens, keys) = torch.Generator().manual_seed(seed), DENSE[size]
    q, k = (torch.randn(*shape, 32, generator=gen).bfloat16().to(device) for shape in ((tokens, 4), (keys,)))
    ends = (torch.tensor([0, n // 2, n], dtype=torch.int32, device=device) for n in (tokens, keys))
    return {"q": q, "k": k, "w": torch.randn(tokens, 4, generator=gen).to(device), "ends": [*ends]}


def segments_step(given: Given) -> Results:
    indices, scores = wrappers.dsa_indexer_topk(given["q"] * 2, given["k"], given["w"], *given["ends"], top_k=16)
    return indices + 1, scores * 0.5


def logits_inputs(function: str) -> Callable[..., Given]:
    """Inputs of an indexer's functions. Torch does not multiply e4m3, so the steps double the weights."""

    def make(device: Any, size: int, seed: int) -> Given:
        kind = {"select_rows": indexer.RAGGED, "select_slots": indexer.PAGED}.get(function, function)
        lens = LENS[size][1] if "paged" in kind else DENSE[size][1:]
        given = indexer.make_inputs(indexer.LogitsCase(kind, lens, 32), device, seed)
        if kind == function:
            return given
        hints = "schedule_meta", "max_context_len", "clean_logits", "max_seqlen_k"
        return {name: value for name, value in given.items() if name not in hints} | {"top_k": 16}

    return make


TABLES: dict[str, tuple[Callable[[Given], Results], Callable[..., Given]]] = {  # name -> (step, inputs)
    "trtllm_batch_context_with_kv_cache": (
        returning(wrappers.trtllm_batch_context_with_kv_cache, "query"),
        table_inputs("context", CHUNKS, lse=True),
    ),
    "trtllm_batch_decode_with_kv_cache": (
        returning(wrappers.trtllm_batch_decode_with_kv_cache, "query"),
        table_inputs("decode", LENS),
    ),
    "xqa": (writing(wrappers.xqa, "q", "output"), table_inputs("xqa", LENS)),
    "xqa_batch_decode_with_kv_cache": (returning(wrappers.xqa_batch_decode_with_kv_cache, "query"), xqa_decode_inputs),
    "trtllm_fmha_v2_prefill": (fmha_step, fmha_inputs),
}
LATENT: dict[str, Any] = {
    "trtllm_batch_decode_with_kv_cache_mla": (
        returning(wrappers.trtllm_batch_decode_with_kv_cache_mla, "query"),
        mla_inputs("trtllm"),
    ),
    "xqa_batch_decode_with_kv_cache_mla": (
        returning(wrappers.xqa_batch_decode_with_kv_cache_mla, "query"),
        mla_inputs("trtllm"),
    ),
    "flash_mla_with_kvcache": (returning(wrappers.flash_mla_with_kvcache, "q"), mla_inputs("flash_mla")),
}
SPARSE: dict[str, Any] = {
    "flash_mla_sparse_fwd": (returning(wrappers.flash_mla_sparse_fwd, "q"), sparse_fwd_inputs),
    "trtllm_ragged_attention_deepseek": (
        returning(wrappers.trtllm_ragged_attention_deepseek, "query"),
        ragged_mla_inputs,
    ),
    "sparse_paged_attention": (returning(wrappers.sparse_paged_attention, "q"), sparse_paged_inputs),
    **{
        name: (returning(getattr(wrappers, name), "q_latent"), dsa_inputs(name))
        for name in ("dsa_sparse_attention", "dsa_sparse_attention_varlen")
    },
}
OTHERS: dict[str, Any] = {
    "single_prefill_with_kv_cache": (returning(wrappers.single_prefill_with_kv_cache, "q"), single_inputs),
    "single_decode_with_kv_cache": (returning(wrappers.single_decode_with_kv_cache, "q"), single_decode_inputs),
    "flash_attn_func": (returning(wrappers.flash_attn_func, "q"), flash_inputs),
    "flash_attn_varlen_func": (returning(wrappers.flash_attn_varlen_func, "q"), varlen_inputs),
    "flash_attn_with_kvcache": (returning(wrappers.flash_attn_with_kvcache, "q"), kvcache_inputs),
}
CLASSES: dict[str, Any] = {
    form: (class_step(form), class_inputs(form)) for form in ("paged", "sinks", "ragged", "decode")
}
TOP_K: dict[str, Any] = {
    **{name: (returning(getattr(wrappers, name), "input"), topk_inputs(name))
       for name in (topk.TOP_K, topk.PAGE_TABLE, topk.RAGGED)},
    **{name: (writing(getattr(wrappers, name), "logits", "indices"), topk_inputs(name)) for name in topk.PER_ROW},
    **{name: (writing(getattr(wrappers, name), "logits", "output"), vllm_inputs)
       for name in ("persistent_topk", "cooperative_topk")},
}  # fmt: skip
INDEXER: dict[str, Any] = {
    name: (returning(getattr(wrappers, name), "weights"), logits_inputs(name))
    for name in (indexer.RAGGED, indexer.RAGGED_FP4, indexer.PAGED, indexer.PAGED_FP4, "select_rows", "select_slots")
}
INDEXER["dsa_indexer_topk"] = (segments_step, segments_inputs)
CACHES: dict[str, Any] = {
    "append_qkv": (append_step, rows_inputs),
    "append_latent": (latent_step, latent_inputs),
    "append_latent of keys": (partial(latent_step, queries=False), latent_inputs),  # opcheck computes with no e4m3
    "gather_latent": (gather_step, latent_inputs),
    "merge_states": (returning(wrappers.merge_states, "v"), states_inputs(3)),
    "merge_state": (returning(wrappers.merge_state, "v_a"), states_inputs(0)),
    "merge_state_in_place": (in_place_step, states_inputs(0)),
}
GROUPS: dict[str, dict[str, Any]] = {
    "tables": TABLES, "latent": LATENT, "sparse": SPARSE, "others": OTHERS, "classes": CLASSES, "top-k": TOP_K,
    "indexer": INDEXER, "caches": CACHES,
}  # fmt: skip
EVERY = tuple(GROUPS)
# These functions have no graph of their own: another one of their group makes the same call, with more arguments.
SAME_CALL = {indexer.RAGGED, indexer.PAGED, "sinks", "dsa_sparse_attention", "trtllm_fmha_v2_prefill"}
SAME_CALL |= {"xqa_batch_decode_with_kv_cache", "xqa_batch_decode_with_kv_cache_mla", "append_latent of keys"}
GROUPS["first"] = {  # prefill, decode, offsets of equal lengths, constants, ALiBi slopes and top-k in one graph
    name: (TABLES | OTHERS | TOP_K)[name]
    for name in ("trtllm_batch_context_with_kv_cache", "trtllm_batch_decode_with_kv_cache",
                 "single_prefill_with_kv_cache", "flash_attn_func", topk.TOP_K)
}  # fmt: skip


# ---- running them


def inputs_of(group: str, device: Any, size: int, seed: int) -> dict[str, Given]:
    return {name: make(device, size, seed) for name, (_, make) in GROUPS[group].items()}


def group_step(group: str) -> Callable[[dict[str, Given]], dict[str, Results]]:
    """Return one function of all steps of a group that get inputs: a graph that torch compiles once."""
    steps = [(name, step) for name, (step, _) in GROUPS[group].items()]

    def step_of_all(given: dict[str, Given]) -> dict[str, Results]:
        return {name: step(given[name]) for name, step in steps if name in given}

    return step_of_all


def bits_of(found: Any) -> list[tuple[torch.dtype, torch.Size, list[int]]]:
    """Return the tensors of a result, on the host."""
    leaves = [t for t in tree_leaves(found) if isinstance(t, torch.Tensor)]
    return [(t.dtype, t.shape, t.cpu().contiguous().view(torch.uint8).flatten().tolist()) for t in leaves]


@contextmanager
def nothing_kept() -> Iterator[machine.HostMachine]:
    """Make the calls in the block the first of their process, as far as memory that is kept between calls goes."""
    slopes = dict(values._slopes)
    values._slopes.clear()
    try:
        with machine.override(machine.HostMachine()) as here:
            yield here
    finally:
        torch.compiler.reset()  # before the memory goes that its graphs read
        values._slopes.update(slopes)


def matches_eager(
    group: str, device: Any, around: Callable[[], Any] = nullcontext, runs: Sequence[tuple[int, int]] = (),
    without: Collection[str] = (), **how: Any
) -> Callable[..., Any]:  # fmt: skip
    """Compile a group, run it with several inputs, compare each result with the eager one bit by bit, and return it.

    around: a context of each call. runs: (size, seed) of each; by default new values, then other lengths, then the
    first ones again. without: steps that are left out. how: arguments of torch.compile. The compiled call comes first,
    so it makes what is kept. With dynamic=True, sizes that are equal by chance are no reason to compile again.
    """
    step = group_step(group)
    compiled = torch.compile(step, fullgraph=True, **how)
    for size, seed in runs or ((0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5), (0, 6)):
        given = {name: inputs for name, inputs in inputs_of(group, device, size, seed).items() if name not in without}
        with around(), shapes.patch(use_duck_shape=False):
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(given)
            found = {name: bits_of(each) for name, each in got.items()}
            del got
            want = {name: bits_of(each) for name, each in step(given).items()}
        wrong = [name for name, each in want.items() if found[name] != each]
        assert not wrong, f"{wrong}, size {size}, seed {seed}"
        assert found.keys() == want.keys()
    return compiled


def operators() -> set[str]:
    """Return the names of all operators that this package defines."""
    return {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("cute_kernels::")}


def operator_call(operator: str, group: str, name: str, device: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the call of an operator, with its arguments, that a step of a group makes."""
    step, make = GROUPS[group][name]
    with Seen() as seen:
        step(make(device, 0, 0))
    (found,) = [call for call in seen.calls if call[0].name() == operator]
    return found


def opcheck(operator: str, group: str, name: str, device: Any) -> None:
    """Let torch check the call of an operator that a step of a group makes. Torch cannot compare e4m3."""
    function, args, kwargs = operator_call(operator, group, name, device)
    e4m3 = any(getattr(value, "dtype", None) is torch.float8_e4m3fn for value in (*args, *kwargs.values()))
    parts = {"test_utils": ("test_autograd_registration", "test_faketensor")} if e4m3 else {}
    torch.library.opcheck(function, args, kwargs, **parts)


class DecodeLayer(torch.nn.Module):
    """A decode step with a weight for each element of a head of the query, over a paged cache."""

    def __init__(self, device: Any = "cpu") -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        weight = torch.randn(64, generator=draw).bfloat16().to(device)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lens: torch.Tensor
    ) -> torch.Tensor:
        call = wrappers.trtllm_batch_decode_with_kv_cache
        return call(q * self.weight, (k, v), None, table, lens, None, 0.125, kv_layout="HND")


def layer_inputs(device: Any, size: int = 0, seed: int = 0) -> tuple[torch.Tensor, ...]:
    given = table_inputs("decode", LENS)(device, size, seed)
    return given["query"], *given["kv_cache"], given["block_tables"], given["seq_lens"]


OPERATORS = (  # an operator, and the group and the step that calls it
    ("cute_kernels::attention", "tables", "trtllm_batch_context_with_kv_cache"),
    ("cute_kernels::attention", "classes", "ragged"),
    ("cute_kernels::top_k_rows", "top-k", "top_k"),
    ("cute_kernels::top_k_rows", "top-k", "top_k_per_row_decode"),
    ("cute_kernels::indexer_logits", "indexer", "fp8_paged_mqa_logits"),
    ("cute_kernels::write_rows", "caches", "append_qkv"),
    ("cute_kernels::write_latent", "caches", "append_latent of keys"),
    ("cute_kernels::read_latent", "caches", "gather_latent"),
    *((f"cute_kernels::{name}", "caches", name) for name in ("merge_states", "merge_state", "merge_state_in_place")),
)


# ---- what tests of both devices do


def first_call(device: str, mode: str, sizes: Sequence[int] = (0, 0, 0, 1), backend: str = "inductor") -> None:
    """Compile and run prefill, decode and top-k as the first calls of a process; print a word if results are right.

    sizes: of the calls. Another size compiles everything again."""
    matches_eager("first", device, mode=mode, runs=[*zip(sizes, range(len(sizes)))], backend=backend)
    print("equal")


def functional_call_matches(device: Any, **how: Any) -> None:
    layer = DecodeLayer(device)
    weights = {"weight": torch.nn.Parameter(layer.weight.flip(0), requires_grad=False)}

    def call(weights: dict[str, torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.func.functional_call(layer, weights, inputs)

    run = torch.compile(call, fullgraph=True, **how)
    for seed in (0, 1, 2):
        inputs = layer_inputs(device, 0, seed)
        torch.compiler.cudagraph_mark_step_begin()
        found = bits_of(run(weights, inputs))
        assert found == bits_of(call(weights, inputs)) != bits_of(layer(*inputs))


QUICK = {  # saves two thirds of the time of the C++ compiler
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
    "cpp_cache_precompile_headers": False,
}


def exported_matches(device: Any, path: Path | None = None) -> None:
    """Export a decode step and compare it with the eager step. path: of a package into which it is compiled ahead of
    time, and from which it is loaded."""
    layer = DecodeLayer(device)
    with torch.no_grad():
        program = torch.export.export(layer, layer_inputs(device))
        run = program.module()
        if path:
            with inductor.patch(QUICK):
                package = torch._inductor.aoti_compile_and_package(program, package_path=str(path))
            run = torch._inductor.aoti_load_package(package)
        for seed in (0, 1, 2):
            inputs = layer_inputs(device, 0, seed)
            assert bits_of(run(*inputs)) == bits_of(layer(*inputs))
