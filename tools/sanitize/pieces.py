"""The calls that run under compute-sanitizer, in pieces of a few small calls: one piece for each structure of a kernel.

racecheck takes some hundred times the time of a kernel, and each tool takes seconds to patch a kernel when it loads, so
a piece launches at most a few kernels with few tiles. The calls are those of the fuzzer (`tools.fuzz.call.Call`), which
makes their arguments and judges their results.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bench.cases.attention import TOKEN_SCALES
from bench.cases.latent import of_record
from bench.cases.latent_read import ReadCase
from bench.cases.topk import DECODE as ROW_DECODE
from bench.cases.topk import PAGE_TABLE, RAGGED, TOP_K
from bench.cases.topk import PREFILL as ROW_PREFILL
from tools.fuzz.call import Call, changed_fields
from tools.fuzz.families.chosen import SPARSE
from wrappers import TopKTieBreak

CONTEXT, DECODE, XQA = "trtllm_batch_context_with_kv_cache", "trtllm_batch_decode_with_kv_cache", "xqa"
PAGED = "BatchPrefillWithPagedKVCacheWrapper"
FEW = {"q_lens": (37, 3, 130), "kv_lens": (67, 40, 333), "heads_q": 2, "data": "needles", "sink": 1.0}
PACKED = FEW | {"q_lens": (5, 0, 2), "kv_lens": (1190, 9, 83), "heads_q": 6}
ONE = {"q_lens": (1, 1, 1), "kv_lens": (1300, 0, 83), "heads_q": 6, "data": "needles", "sink": 1.0}
MANY = {"q_lens": (0, 1, 0, 2) * 18, "kv_lens": (5, 9, 0, 40) * 18}
SHARED = {"q_lens": (40, 3), "kv_lens": (1300, 60), "heads_q": 2, "heads_kv": 1, "data": "needles", "sink": 1.0}
DIMS = {"d64": (64, 64), "d128": (128, 128), "d192x128": (192, 128), "d256": (256, 256), "d512": (512, 512)}
USUAL = ("d64", "d128")
WINDOW, CAP = {"window_left": 50}, {"soft_cap": 9.0}
FULL = {"causal": False}
FP8 = {"dtype": "fp8", "out_dtype": "bf16", "sink": 0.0, "data": "normal"}
CACHES: dict[str, dict[str, Any]] = {"bf16": {}, "e4m3": {"kv_dtype": "fp8"}, "nvfp4": {"kv_dtype": "nvfp4"}}
BY_TOKEN = {"kv_dtype": TOKEN_SCALES}


def attend(function: str, base: dict[str, Any], *changes: dict[str, Any], dims: str = "d64", **extra: Any) -> Call:
    """Return a call of an attention function. changes: of the fields of `base`; later ones win."""
    qk, vo = DIMS[dims]
    case: dict[str, Any] = base | {"head_dim_qk": qk, "head_dim_vo": vo}
    case["function"] = {DECODE: "decode", XQA: "xqa"}.get(function, "context")
    for change in changes:
        case |= change
    family = "prefill" if case["function"] == "context" else "decode"
    return Call(family, function, 7, "eager", "function", case, extra)


def _prefill() -> Iterator[tuple[str, tuple[Call, ...]]]:
    masks: tuple[dict[str, Any], ...] = ({}, FULL, FULL | WINDOW)
    for name in DIMS:
        yield f"prefill-bf16-{name}", tuple(attend(CONTEXT, FEW, mask, dims=name) for mask in masks)
    for name in USUAL:
        yield f"prefill-e4m3-{name}", tuple(attend(CONTEXT, FEW, FP8, mask, dims=name) for mask in masks)
    for kind in ("e4m3", "nvfp4"):
        calls = [attend(CONTEXT, FEW, CACHES[kind], mask, dims=d) for d in USUAL for mask in ({}, WINDOW)]
        yield f"prefill-prepared-{kind}", tuple(calls)
    sources = ({"page_size": 3}, {"page_size": 1} | WINDOW)
    yield "prefill-gather", tuple(attend(CONTEXT, FEW, source, dims=d) for d in USUAL for source in sources)
    plain = {"sink": 0.0, "data": "normal"}
    masked = [(d, kind, change) for d, kind in zip(USUAL, ("bool", "packed")) for change in ({}, WINDOW)]
    yield (
        "prefill-custom-mask",
        tuple(attend(PAGED, FEW, plain, change, dims=d, form="csr", custom=kind) for d, kind, change in masked),
    )
    for custom in ("ranges", "prefix"):
        yield f"prefill-{custom}", tuple(attend(PAGED, FEW, plain, dims=d, form="csr", custom=custom) for d in USUAL)
    by_token = [attend(CONTEXT, FEW, BY_TOKEN, mask, dims=d) for d in USUAL for mask in ({}, WINDOW)]
    yield "prefill-prepared-e4m3-by-token", tuple(by_token)
    yield "prefill-skip", tuple(attend(CONTEXT, FEW, plain, {"skip": 1e-3}, dims=d) for d in USUAL)
    yield "prefill-fp16", (attend(CONTEXT, FEW, {"dtype": "fp16"}), attend(CONTEXT, FEW, {"dtype": "fp16"}, CAP))
    yield "split-bf16", tuple(attend(DECODE, SHARED, dims=d) for d in USUAL)
    yield "split-e4m3", tuple(attend(DECODE, SHARED, CACHES["e4m3"], dims=d) for d in USUAL)
    yield "split-nvfp4", tuple(attend(DECODE, SHARED, CACHES["nvfp4"], dims=d) for d in USUAL)
    yield (
        "prefill-pages",
        (
            attend(CONTEXT, PACKED, {"page_size": 8, "layout": "NHD", "separate_tables": True}),
            attend(CONTEXT, FEW, {"page_size": 16, "cache": "stacked", "layout": "NHD", "strided_q": True}),
            attend(CONTEXT, FEW, {"page_size": 128, "window_left": 90}, CAP),
            attend(
                CONTEXT, PACKED, {"page_size": 256, "cache": "shared", "device": ("scale", "out"), "out_scale": -1.7}
            ),
        ),
    )
    yield (
        "prefill-requests",
        (
            attend(CONTEXT, FEW, {"q_lens": (3, 200, 7), "kv_lens": (0, 9, 2)}),
            attend(CONTEXT, PACKED, {"q_lens": (3, 40, 7), "kv_lens": (0, 9, 2), "sink": 0.0}),
            attend(CONTEXT, PACKED, {"window_left": 0, "heads_q": 5, "heads_kv": 1, "uint32_lens": True}),
            attend(CONTEXT, PACKED, MANY),
        ),
    )
    lengths = {"q_lens": (140,) * 10, "kv_lens": (150,) * 10, "heads_q": 16, "heads_kv": 8}
    yield "prefill-tiles", (attend(CONTEXT, FEW, lengths),)


def _decode() -> Iterator[tuple[str, tuple[Call, ...]]]:
    rows: dict[int, dict[str, Any]] = {8: {"heads_q": 6}, 16: {"heads_q": 12, "heads_kv": 1}}
    for kind, cache in CACHES.items():
        for count, fields in rows.items():
            calls = [attend(DECODE, ONE, cache, fields, dims=d) for d in USUAL]
            yield f"decode-{kind}-{count}-rows", (*calls, attend(DECODE, ONE, cache, fields, {"window_left": 600}, CAP))
    by_token = [attend(DECODE, ONE, BY_TOKEN, fields, dims=d) for fields in rows.values() for d in USUAL]
    yield "decode-e4m3-by-token", tuple(by_token)
    narrow = {"window_left": 200}
    quantised = [attend(DECODE, ONE, CACHES[kind], narrow, rows[8], dims="d128") for kind in ("e4m3", "nvfp4")]
    yield "decode-windows", (*(attend(DECODE, ONE, cache, narrow, rows[8]) for cache in CACHES.values()), *quantised)
    tiles: dict[str, Any] = {"q_lens": (1,) * 33, "kv_lens": (300, 9, 600) * 11, "heads_q": 8, "heads_kv": 4}
    shared = [attend(DECODE, ONE, tiles, cache) for cache in CACHES.values()]  # a tile for each of Hopper's 132 SMs
    yield "decode-tiles", tuple(replace(call, choice="shape") for call in shared)
    yield "decode-d256", tuple(attend(DECODE, ONE, cache, dims="d256") for cache in CACHES.values())
    few = zip(rows.values(), USUAL)
    yield "decode-e4m3-queries", tuple(attend(DECODE, ONE, FP8, fields, dims=d) for fields, d in few)
    for (count, fields), d in zip(rows.items(), USUAL):
        gathered = [attend(DECODE, ONE, CACHES[kind], fields, {"page_size": 3}, dims=d) for kind in ("bf16", "e4m3")]
        yield f"decode-gather-{count}-rows", tuple(gathered)
    by_slots = [attend(DECODE, ONE, FULL, fields, dims=d, form="slots") for fields, d in zip(rows.values(), USUAL)]
    by_slots.append(replace(by_slots[0], case=by_slots[1].case | rows[8]))
    yield "decode-slots", tuple(replace(call, family="chosen", function=SPARSE) for call in by_slots)
    many: dict[str, Any] = {"q_lens": (1,) * 40, "kv_lens": (300, 9, 1, 60) * 10, "heads_kv": 4}
    yield (
        "decode-many",
        (
            attend(DECODE, ONE, many, {"heads_q": 8}),
            attend(DECODE, ONE, many, {"heads_q": 40, "window_left": 200, "skip": 1e-30}),
            attend(DECODE, ONE, MANY),
        ),
    )
    yield (
        "decode-invariant",
        tuple(attend(DECODE, ONE, {"invariant": True, "kv_lens": (5000, 0, 83)}, changes) for changes in ({}, CAP)),
    )
    yield (
        "decode-pages",
        (
            attend(DECODE, ONE, {"page_size": 8, "layout": "NHD"}),
            attend(DECODE, ONE, {"page_size": 16, "window_left": 600, "separate_tables": True, "q_lens": (4, 0, 3)}),
            attend(DECODE, ONE, {"page_size": 32, "strided_q": True, "uint32_lens": True}, dims="d128"),
            attend(DECODE, ONE, {"page_size": 256, "cache": "shared"}),
        ),
    )
    yield (
        "decode-outputs",
        (
            attend(DECODE, ONE, CACHES["e4m3"], {"out_dtype": "fp8", "out_scale": 300.0, "o_scale": 3.0}),
            attend(DECODE, ONE, CACHES["nvfp4"], {"out_dtype": "fp8", "interleaved": True, "separate_tables": True}),
            attend(DECODE, ONE, CACHES["nvfp4"], {"out_dtype": "nvfp4", "data": "normal"}),
            attend(DECODE, ONE, {"q_lens": (3, 3, 3), "kv_lens": (900, 3, 83), "drafts": True}),
            attend(
                DECODE, ONE, {"device": ("log2", "out"), "out_scale": -0.3, "o_scale": 7.0, "q_lens": (4, 0, 3)}, CAP
            ),
        ),
    )
    flat = {"kv_lens": (600, 0, 83), "lse": False, "layout": "NHD", "uint32_lens": True}
    yield "xqa", (
        attend(XQA, ONE, flat, {"cache": "flat", "window_left": 300, "out_scale": 0.7, "zero_page": True}),
        attend(XQA, ONE, flat, CACHES["e4m3"], {
            "q_lens": (5, 5), "kv_lens": (512, 83), "drafts": True, "out_dtype": "fp8", "o_scale": 30.0,
        }),
        attend(XQA, ONE, flat, CACHES["nvfp4"], {"interleaved": True, "page_size": 32, "dtype": "fp16"}),
    )  # fmt: skip


def choose(function: str, rows: int, width: int, k: int, **fields: Any) -> Call:
    return Call("topk", function, 7, case=dict(rows=rows, width=width, k=k, **fields))


def _top_k() -> Iterator[tuple[str, tuple[Call, ...]]]:
    """Yield calls of all functions on rows of one width, with ties, for 32-bit and 16-bit keys."""
    for name, rows, width in (("cta", 5, 3000), ("cluster-4", 3, 20_001), ("cluster-16", 3, 70_001)):
        for dtype in ("fp32", "bf16"):
            own = rows, width, 300
            mixed: dict[str, Any] = {"dtype": dtype, "lengths": "mixed"}
            yield (
                f"topk-{name}-{dtype}",
                (
                    choose(PAGE_TABLE, *own, data=("shelf", "special"), page_size=16, batch_map=True, **mixed),
                    choose(RAGGED, *own, starts=True, tie_break=int(TopKTieBreak.LARGE), **mixed),
                    choose(TOP_K, *own, dtype=dtype, data="257 ties"),
                    choose(ROW_PREFILL, *own, data="low bits", starts=True, **mixed),
                    choose(ROW_DECODE, *own, next_n=rows, **mixed),
                ),
            )
    long = ((140, 50_003), (1, 1_600_003))
    yield (
        "topk-streamed",
        tuple(
            choose(function, *shape, 64, dtype=dtype, lengths="mixed", page_size=16 if function == PAGE_TABLE else 1)
            for shape in long
            for function, dtype in ((PAGE_TABLE, "fp32"), (RAGGED, "bf16"))
        ),
    )
    yield (
        "topk-sort",
        tuple(
            choose(TOP_K, 3, 9000, k, dtype=dtype, data=("special", "normal"), sorted=True)
            for dtype, k in (("fp32", 300), ("bf16", 300), ("fp16", 3000))
        ),
    )


def write(function: str, **fields: Any) -> Call:
    return Call("cache", function, 7, case=fields)


def joined(record: str, **fields: Any) -> Call:
    """Return a call of `append_latent`."""
    return Call("latent", "append_latent", 7, case=changed_fields(of_record(record, **fields), ""))


def latent(**fields: Any) -> Call:
    """Return a call of attention in which V lies in K."""
    case = {"lens": (70, 0, 330), "rows": 2, "heads": 5, "gap": 1, "sink": True} | fields
    return Call("mla", "flash_attn_with_kvcache" if "window" in case else "flash_mla_with_kvcache", 7, case=case)


def prompt_latent(**fields: Any) -> Call:
    """Return a call of attention of prompts, of which each token chooses its keys."""
    return replace(latent(chosen=300, gap=0, **fields), function="flash_mla_sparse_fwd")


def shared_latent(**fields: Any) -> Call:
    """Return a call of attention in which neighbouring tokens share the keys that they have chosen."""
    return prompt_latent(heads=16, share=True, **fields)


def trtllm_latent(**fields: Any) -> Call:
    """Return a call of FlashInfer's function over a latent cache."""
    return replace(latent(**fields), function="trtllm_batch_decode_with_kv_cache_mla")


def scored(function: str, **fields: Any) -> Call:
    """Return a call that computes logits of an indexer."""
    return Call("indexer", function, 7, case=fields)


def gathered(case: ReadCase) -> Call:
    """Return a call that reads rows of requests, some of which have no page."""
    fields = changed_fields(replace(case, hostile=True, gap=528), "function")
    return Call("gather", case.function, 7, case=fields)


def _rows() -> Iterator[tuple[str, tuple[Call, ...]]]:
    """Yield calls that write caches, of rows of K and V and of latent attention, quantise, rotate and merge states."""
    own: dict[str, Any] = {"heads": (0, 2), "pages": 6}
    lists, wide = {"places": "lists"}, {"tokens": 31, "page_size": 16, "pages": 9}
    yield (
        "cache-append",
        (
            write("append_paged_kv_cache", **own, **lists),
            write("append_paged_kv_cache", **own, **lists, dtype="uint8", cache="uint8", dims=(72, 40), stacked=False),
            write("append_qkv", **own, dtype="bf16", cache="e4m3", layout="HND", scales="heads"),
            write("append_qkv", **own, dtype="bf16", cache="nvfp4", places="table"),
            write("append_qkv", **own, dtype="fp16", cache="nvfp4", interleaved_sf=True, hostile=True),
        ),
    )
    roped = {"heads": (8, 2), "rope": "cache"} | wide
    yield (
        "cache-transform",
        (
            write("append_qkv", **roped, norm="heads", places="table"),
            write("append_qkv", **roped, cache="e4m3", norm="k", scales="tensor", q8=True),
            write("append_qkv", **(roped | {"rope": "llama31"}), dtype="fp16", cache="nvfp4", rotary_dim=16),
            write("apply_rope_pos_ids_inplace", **(roped | {"rope": "angles"}), places="rows"),
        ),
    )
    yield (
        "cache-gather",
        tuple(
            attend(PAGED, FEW, {"sink": 0.0, "data": "normal", "dtype": dtype}, form="csr", rope=True)
            for dtype in ("bf16", "fp16")
        ),
    )
    case = {"n": 33, "m": 8, "dtype": "fp32", "scale": 0.37, "dim": 4, "device": True, "strided": False}
    yield "cache-dequantise", (Call("small", "nvfp4_dequantize", 7, case=case | {"special": False}),)
    yield (
        "latent-rows",
        (
            joined("rows", heads=3, norm="latent", rope="fp32", hostile=True, shift=1),
            joined("e4m3", heads=2, q8=True, rope="rows", places="table", apart=True, gap=16),
            joined("rows", heads=2, rope="fp32", index=3, norm="both"),
        ),
    )
    packed = {"tokens": 13, "page_size": 3, "pages": 9, "gap": 528}
    for name, records in (("scaled", ("656", "528_fp32", "528")), ("planar", ("528_planar", "584", "132"))):
        yield f"latent-{name}", tuple(joined(record, **packed, hostile=True) for record in records)
    yield (
        "latent-others",
        (
            joined("352", **packed, norm="both"),
            joined("288", **packed, data="special"),
            joined("656", index=2, heads=1, places="lists"),
            joined("rows", dtype="fp16", heads=1),
            joined("132", dtype="fp16", rope="fp32", norm="both"),
        ),
    )
    fp16 = gathered(ReadCase(record="e4m3", dtype="fp16", starts=True))
    yield "latent-gather", (fp16, *(gathered(ReadCase(record=name)) for name in ("e4m3", "656", "528_fp32", "528")))
    others = (ReadCase("cp_gather_cache", "rows"), ReadCase("cp_gather_indexer_k_quant_cache", "132"))
    planar = (ReadCase(record=name) for name in ("528_planar", "584", "352", "288"))
    yield "latent-gather-others", tuple(map(gathered, (*others, *planar)))
    yield (
        "attention-latent",
        (
            latent(strided=True), latent(lens=(2000,), heads=50), latent(page_size=3), latent(dim=512),
            latent(causal=False), latent(window=100, cap=4.0),
        ),
    )  # fmt: skip
    yield (
        "attention-latent-pairs",
        (
            latent(lens=(2000, 70), heads=80, sink=True), latent(heads=70, dim=512, page_size=8),
            latent(heads=70, causal=False), latent(heads=50, rows=3, window=100, cap=4.0),
        ),
    )  # fmt: skip
    yield (
        "attention-latent-slots",
        (
            latent(chosen=1000, counted=True), latent(chosen=65, dim=512, heads=80), latent(chosen=65, second=130),
            latent(chosen=700, counted=True, second=65, dim=512),
        ),
    )  # fmt: skip
    over_records = shared_latent(record="656"), shared_latent(record="e4m3", strided=True)
    yield "attention-latent-shared-slots", (shared_latent(counted=True), *over_records)
    many: dict[str, Any] = {"heads": 40}  # up to 16 rows over records are computed by kernels of their own, below
    of_584: dict[str, Any] = {"record": "584", "dim": 512, "chosen": 65, **many}
    of_528: dict[str, Any] = {"record": "528", "dim": 512, "chosen": 65, **many}
    yield (
        "attention-latent-records",
        (
            latent(record="e4m3", **many), latent(record="656", page_size=3, **many),
            latent(record="e4m3", chosen=65, **many), latent(record="656", chosen=1000, counted=True, **many),
            latent(record="352", chosen=65, **many),
        ),
    )  # fmt: skip
    no_rope: dict[str, Any] = {"record": "528_fp32", "dim": 512, "chosen": 65}
    yield (
        "attention-latent-two-records",
        (
            latent(**of_584, second=130, second_record="584"), latent(**of_528, second=130, second_record="528"),
            latent(**of_528, second=130, second_record="288"), trtllm_latent(**no_rope, **many),
        ),
    )  # fmt: skip
    q8: dict[str, Any] = {"record": "e4m3", "q8": True}
    yield (
        "attention-latent-more-records",
        (latent(**of_584), latent(**of_528), latent(**q8, **many), latent(**q8, chosen=65, **many)),
    )
    states = ({"dtype": "bf16"}, {"dtype": "fp16", "layout": "strided"}, {"dtype": "fp32", "data": "special"})
    yield "merge-states", tuple(Call("merge", "merge_states", 7, case=fields) for fields in states)
    yield (
        "merge-pair",
        (
            *(Call("merge", "merge_state", 7, case=fields) for fields in states),
            Call("merge", "merge_state_in_place", 7, case={"mask": "bool", "shift": 1}),
        ),
    )


def _few_rows() -> Iterator[tuple[str, tuple[Call, ...]]]:
    """Yield calls with few query rows over latents."""
    q8: dict[str, Any] = {"record": "e4m3", "q8": True}
    no_rope: dict[str, Any] = {"record": "528_fp32", "dim": 512, "chosen": 65}
    long: dict[str, Any] = {"lens": (2000, 0, 70), "sink": True}
    yield (
        "attention-latent-few",
        tuple(
            latent(record=record, **long, **fields)
            for record in ("e4m3", "656")
            for fields in ({"heads": 4, "rows": 2, "page_size": 3}, {"heads": 8, "chosen": 700, "counted": True})
        ),
    )
    yield (
        "attention-latent-few-heads",
        tuple(
            latent(record=record, **long, **fields)
            for record in ("e4m3", "656")
            for fields in ({"heads": 5, "rows": 3}, {"heads": 16, "chosen": 700, "strided": True})
        ),
    )
    yield (
        "attention-latent-few-others",
        (
            latent(**q8, **long, heads=4, rows=2), latent(**q8, **long, heads=5, rows=3),
            latent(**q8, **long, heads=3, chosen=130), latent(**q8, **long, heads=9, chosen=130),
            trtllm_latent(**no_rope, heads=8), trtllm_latent(**no_rope, heads=13, lens=(900, 70)),
        ),
    )  # fmt: skip
    of_584: dict[str, Any] = {"record": "584", "dim": 512, "chosen": 130, **long}
    of_528: dict[str, Any] = {"record": "528", "dim": 512, "chosen": 130, **long}
    yield (
        "attention-latent-few-records",
        tuple(
            latent(**fields, heads=heads)
            for fields in (of_584, of_528, {"record": "352", "chosen": 700, **long})
            for heads in (8, 16)
        ),
    )
    prompts = (prompt_latent(heads=heads, counted=True, sink=True) for heads in (5, 16))
    yield "attention-latent-few-prompts", (*prompts, prompt_latent(heads=8, strided=True))
    yield (
        "attention-latent-few-two-records",
        tuple(
            latent(**fields, second=70, second_record=record, heads=heads)
            for fields, record in ((of_584, "584"), (of_528, "288"), (of_528, "528"))
            for heads in (3, 13)
        ),
    )


def _indexer() -> Iterator[tuple[str, tuple[Call, ...]]]:
    """Yield calls that compute logits of an indexer."""
    for heads in (64, 32):
        wide: dict[str, Any] = {"heads": heads, "lens": (70, 0, 330), "gap": 4, "strided": True}
        prompt: dict[str, Any] = {"heads": heads, "lens": (21, 330), "windows": "random"}
        yield (
            f"indexer-{heads}-heads",
            (
                scored("fp8_paged_mqa_logits", **wide), scored("fp8_paged_mqa_logits", **wide, next_n=2, page_size=3),
                scored("fp8_paged_mqa_logits", **wide, next_n=4, own=True, page_size=16),
                scored("fp8_paged_mqa_logits", **wide, next_n=8, hostile=True), scored("fp8_mqa_logits", **prompt),
            ),
        )  # fmt: skip
        yield (
            f"indexer-{heads}-heads-others",
            (
                scored("fp8_fp4_paged_mqa_logits", **wide, dtype="bf16"),
                scored("fp8_fp4_mqa_logits", **prompt, dtype="bf16", compressed=100),
                scored("fp8_mqa_logits", **prompt, dim=64), scored("fp8_mqa_logits", **prompt, dim=32, shift=4),
            ),
        )  # fmt: skip
        segment = Call("indexer", "dsa_indexer_topk", 7, case=prompt, extra={"top_k": 16})
        yield f"indexer-{heads}-heads-bf16", (segment,)


ON_DEMAND = ("prefill-bf16-d512",)  # pieces that compile their kernels: no bundle holds shared scores
PIECES: dict[str, tuple[Call, ...]] = dict((*_prefill(), *_decode(), *_top_k(), *_rows(), *_few_rows(), *_indexer()))
