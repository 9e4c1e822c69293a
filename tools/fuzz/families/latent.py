"""Rows of latent attention and of its indexer: drawn calls, judged by `append_latent`'s reference on the CPU."""

from dataclasses import replace
from random import Random
from typing import Any

import torch

import wrappers
from bench.cases import latent as cases
from bench.cases.cache_write import copied
from bench.cases.latent import DTYPES, LatentCase, of_record
from cute_kernels.records import INDEX, RECORDS, ROWS
from wrappers.host.machine import HostMachine, override

from ..call import Call, Options, Results, Work, case_of, changed_fields

OWN, JOIN, TWO = "append_latent", "concat_mla_q", "append_paged_mla_kv_cache"
JOIN_K, QUANTISE, PAGED = "concat_mla_k", "mla_rope_quantize_fp8", "rope_quantize_fp8_append_paged_kv_cache"
WRITE, FUSED, INDEXER = "concat_and_cache_mla", "concat_and_cache_mla_rope_fused", "indexer_k_quant_and_cache"
VLLM = {ROWS: "auto", "e4m3": "fp8", "656": "fp8_ds_mla", "352": "nvfp4_ds_mla"}  # record -> kv_cache_dtype
PLAIN: dict[str, Any] = {"norm": "", "rope": "", "index": -1, "heads": 0, "in_place": False, "apart": False}
SIZES: dict[str, Any] = {"latent": 512, "rotated": 64}
QUANTISED: dict[str, Any] = {"apart": True, "norm": "", "rope": "fp32", "positions": True, "index": -1, "q8": True,
                             "in_place": False, "scale_tensor": False}  # fmt: skip
# Functions of other libraries fix these fields; the rest is drawn as for `append_latent`.
HAVE: dict[str, dict[str, Any]] = {
    OWN: {},
    WRITE: PLAIN | SIZES | {"places": "slots", "power_of_two": True, "scale_tensor": True},
    FUSED: PLAIN | SIZES | {"places": "slots", "power_of_two": True, "scale_tensor": True, "positions": True,
                            "nope": False, "in_place": True, "q8": False},
    JOIN: PLAIN | {"hostile": False},
    JOIN_K: PLAIN | {"hostile": False, "q8": False},
    QUANTISE: QUANTISED | {"places": "rows", "pages": 1},
    PAGED: QUANTISED | {"places": "lists"},
    INDEXER: PLAIN | {"places": "slots", "index": 0},
    TWO: PLAIN | {"places": "lists", "apart": True, "scale_tensor": False},
}  # fmt: skip


def draw(family: str, rng: Random, options: Options) -> Call:
    function = rng.choice((OWN, OWN, OWN, *HAVE))
    record = {JOIN: ROWS, JOIN_K: ROWS, INDEXER: INDEX, TWO: rng.choice((ROWS, "e4m3"))}.get(function, "")
    if function in (QUANTISE, PAGED):
        record = "e4m3"
    if not record:
        record = rng.choice(tuple(VLLM) if function in (WRITE, FUSED) else (*RECORDS, ROWS, "e4m3", INDEX))
    fields = drawn(record, rng) | HAVE[function]
    if function in (FUSED, JOIN, JOIN_K, QUANTISE, PAGED):
        fields["heads"] = rng.choice((1, 3, 16))
    if function == FUSED:
        fields["rope"] = rng.choice(("fp32", "rows"))
    if function in (QUANTISE, PAGED):
        fields["rotated"] = rng.choice((16, 48, 64))
    if function == QUANTISE:
        fields["page_size"] = fields["tokens"]
    if function == TWO:
        fields["rotated"] = fields.get("rotated") or 64
    mode = rng.choices(("eager", "graph", "threads"), (76, 16, 8))[0]
    return Call(
        family, function, rng.randrange(1 << 30), mode, "shape", changed_fields(of_record(record, **fields), "")
    )


def drawn(record: str, rng: Random) -> dict[str, Any]:
    """Return the fields of a call of `append_latent`."""
    form, fields = RECORDS[record], sizes(record, rng)
    index, rotated = record == INDEX, fields.get("rotated", form.rotated)
    places, heads = rng.choice(("slots", "slots", "lists", "table")), 0 if index else rng.choice((0, 0, 1, 3, 16))
    tokens, page = rng.choice((1, 2, 5, 13, 40)), rng.choice((1, 2, 3, 8, 16, 64))
    return fields | {
        "dtype": rng.choice(tuple(DTYPES)), "tokens": tokens, "page_size": page, "pages": -(-tokens // page) * 5 + 2,
        "apart": not form.vec and rotated > 0 and rng.random() < 0.5, "places": places, "int32": rng.random() < 0.5,
        "hostile": rng.random() < 0.3, "gap": rng.choice((0, 0, 16, 528)), "shift": rng.choice((0, 0, 1, 4)),
        "norm": rng.choice(("", "latent", "both")),
        "rope": rng.choice(("", "fp32", "rows")) if rotated or index else "",
        "interleaved": rng.random() < 0.5, "positions": places == "slots" or rng.random() < 0.5, "heads": heads,
        "in_place": form.rotated_as != "codes" and rotated > 0 and not index and rng.random() < 0.3,
        "q8": heads > 0 and rng.random() < 0.5, "scale_tensor": rng.random() < 0.5, "power_of_two": rng.random() < 0.7,
        "index": rng.choice((0, 1, 3, 64)) if index or rng.random() < 0.25 else -1,
        "data": rng.choice(("normal", "normal", "special")),
    }  # fmt: skip


def sizes(record: str, rng: Random) -> dict[str, Any]:
    """Return the sizes of both parts, where a record lets them be chosen."""
    form = RECORDS[record]
    if not form.latent:
        other = {"latent": rng.choice((16, 64, 128, 400, 512)), "rotated": rng.choice((0, 2, 34, 64))}
        return SIZES if rng.random() < 0.5 else other
    if record == INDEX or rng.random() < 0.8:
        return {}
    return {"latent": form.latent, "rotated": 0}


def arguments(function: str, given: dict[str, Any], case: LatentCase) -> dict[str, Any]:
    """Return the arguments of a function, for those of `append_latent`."""
    cache, places = given["cache"], given["places"]
    query: Any = given.get("query")
    if function == JOIN:
        return {"ql_nope": query.nope, "q_pe": query.rotated, "q_out": query.out}
    if function == JOIN_K:
        return {"k": query.out, "k_nope": query.nope, "k_rope": query.rotated[:, :1]}
    if function == QUANTISE:
        return cases.mla_arguments(given)
    if function == PAGED:
        names = {name: t for name, t in cases.mla_arguments(given).items() if name not in ("k_rope_out", "k_nope_out")}
        caches = (cache.cache.view(torch.float8_e4m3fn), cache.rotated.view(torch.float8_e4m3fn))
        return names | {"v": None, "paged_kv_cache": caches, "page_size": case.page_size, **places._asdict()}
    if function == INDEXER:
        name = "ue8m0" if case.power_of_two else "fp32"
        slots = given["index"].places if given["index"].places is not None else places
        return {"k": given["index"].k, "kv_cache": given["index"].cache, "slot_mapping": slots,
                "quant_block_size": 128, "kv_cache_dtype": name}  # fmt: skip
    if function == TWO:
        kind = DTYPES[case.dtype] if cache.record == ROWS else torch.float8_e4m3fn
        return {"append_ckv": given["latent"], "append_kpe": given["rotated"], "ckv_cache": cache.cache.view(kind),
                "kpe_cache": cache.rotated.view(kind), "kv_last_page_len": places.kv_indptr[1:],
                **places._asdict()}  # fmt: skip
    names = {"kv_c": given["latent"], "k_pe": given["rotated"], "kv_cache": cache.cache, "slot_mapping": places,
             "kv_cache_dtype": VLLM[cache.record]}  # fmt: skip
    scale = cache.scale if isinstance(cache.scale, torch.Tensor) else torch.ones(1)
    if function == WRITE:
        return names | {"scale": scale}
    rope = given["rope"]
    return names | {
        "kv_cache_scale": scale, "positions": rope.positions, "q_pe": query.rotated, "is_neox": not rope.interleaved,
        "cos_sin_cache": rope.cos_sin_cache,
    }  # fmt: skip


def tree_of(case: LatentCase, function: str, seed: int) -> dict[str, Any]:
    """Return the arguments of `append_latent`, without the scales that the function lacks."""
    given = cases.make_inputs(case, "cpu", seed)
    if function == TWO:
        given["cache"] = given["cache"]._replace(scale=1.0)
    query: Any = given.get("query")
    if function == JOIN:
        given["query"] = query._replace(scale=1.0)
    if function == JOIN_K:
        given["query"] = query._replace(rotated=query.rotated[:, :1].expand_as(query.rotated))
    return given


def build(call: Call, device: torch.device) -> Work:
    case = case_of(LatentCase, call)
    count = 2 if call.mode == "graph" else 1
    variants = [tree_of(case, call.function, call.seed + i) for i in range(count)]
    wanted = []
    with override(HostMachine()):
        for given in variants:
            before = copied(given, "cpu")
            wanted.append(copied(given, "cpu"))
            cases.run(wanted[-1])
            if call.function in (JOIN, JOIN_K):  # no cache is written
                wanted[-1]["cache"] = before["cache"]

    def run(tree: Any) -> Results:
        function: Any = getattr(wrappers, call.function)
        function(**(tree if call.function == OWN else arguments(call.function, tree, case)))
        return {}

    def judge(variant: int, tree: Any, results: Results) -> str:
        return cases.difference(case, tree, wanted[variant], whole=False)

    return Work(variants, run, lambda tree: [*cases.outputs(tree).values()], judge)


def smaller(call: Call) -> list[dict[str, Any]]:
    case, found = case_of(LatentCase, call), []
    found += [replace(case, tokens=n) for n in (case.tokens // 2, case.tokens - 1) if 1 <= n < case.tokens]
    found += [replace(case, **{field: 0}) for field in ("gap", "shift") if getattr(case, field)]
    if case.heads > 1 or case.index > 1:
        found.append(replace(case, heads=min(case.heads, 1), index=min(case.index, 1)))
    if call.function == OWN:
        found += [replace(case, heads=0)] * (case.heads > 0)
        found += [replace(case, index=-1)] * (case.index >= 0 and case.record != INDEX)
        found += [replace(case, **{field: ""}) for field in ("norm", "rope") if getattr(case, field)]
    return [changed_fields(one, "") for one in found]
