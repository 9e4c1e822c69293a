"""Draw attention calls. Most need only kernels that a bundle for Hopper holds."""

from random import Random
from typing import Any

from bench.cases import hostile
from bench.cases.attention import INT8_SCALES, TOKEN_SCALES, AttentionCase

from ..call import Call, Options, changed_fields
from .adapters import PLANNED

TMA_PAGES = (8, 16, 16, 32, 64, 64, 128, 256)
ANY_PAGES = (1, 1, 2, 3, 5, 24, 48, 100)
HEADS = ((1, 1), (2, 1), (4, 4), (4, 2), (6, 2), (8, 1), (8, 2), (5, 1), (7, 1), (16, 2), (16, 1), (24, 8), (40, 8))
USUAL = (64, 128)  # head dims of most kernels
BLOCKS = (32, 64, 80, 96, 128, 192, 256, 384, 512)  # keys per stage of kernels
LOGITS, SMALL = 3 << 23, 1 << 18  # most logits of a call
DECODE = {
    "trtllm_batch_decode_with_kv_cache": 35, "xqa": 15, "xqa_batch_decode_with_kv_cache": 12,
    "BatchDecodeWithPagedKVCacheWrapper": 20, "flash_attn_with_kvcache": 18,
}  # fmt: skip
PREFILL = {
    "trtllm_batch_context_with_kv_cache": 28, "trtllm_fmha_v2_prefill": 8, "flash_attn_varlen_func": 16,
    "flash_attn_func": 8, "BatchPrefillWithPagedKVCacheWrapper": 16, "BatchAttentionWithAttentionSinkWrapper": 6,
    "BatchPrefillWithRaggedKVCacheWrapper": 10, "single_prefill_with_kv_cache": 8,
    "trtllm_ragged_attention_deepseek": 8,
}  # fmt: skip
LAYERS = {
    "trtllm_batch_decode_with_kv_cache": 3, "trtllm_batch_context_with_kv_cache": 3,
    "xqa_batch_decode_with_kv_cache": 1, "BatchDecodeWithPagedKVCacheWrapper": 1, "trtllm_ragged_attention_deepseek": 1,
    "BatchPrefillWithPagedKVCacheWrapper": 1, "single_prefill_with_kv_cache": 1, "xqa": 1, "flash_attn_func": 1,
    "flash_attn_varlen_func": 1, "flash_attn_with_kvcache": 1,
}  # fmt: skip
BOUND = [name for name in LAYERS if not name.startswith("Batch")]
SPLIT, PAGED, SINKS, RAGGED = PLANNED
SINGLE, CONTEXT, TRTLLM = (
    "single_prefill_with_kv_cache",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
)
RAGGED_MLA = "trtllm_ragged_attention_deepseek"
TABLES = (TRTLLM, CONTEXT, "xqa")
NO_LSE = ("xqa", "xqa_batch_decode_with_kv_cache", "trtllm_fmha_v2_prefill")


def weighted(rng: Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def length(rng: Random, most: int, page: int = 16) -> int:
    """Return a length: near an edge of pages and tiles, small, or any."""
    edges = [n + d for n in (0, page, 2 * page, 64, 80, 96, 128, 192, 256, 512, 640, 1024) for d in (-1, 0, 1)]
    n = rng.choices((rng.choice(edges), rng.randint(0, 40), rng.randint(0, most)), (4, 2, 4))[0]
    return max(0, min(n, most))


def _types(rng: Random, decode: bool, function: str, onto: dict[str, Any]) -> None:
    """Draw dtypes and head dims."""
    flash, fmha = function.startswith("flash"), function == "trtllm_fmha_v2_prefill"
    q = rng.choices(("bf16", "fp16", "fp8"), (60, 28, 12))[0]
    if q == "fp8" and function.startswith("xqa"):
        q = "bf16"
    dim = rng.choices((64, 128, 256), (38, 50, 12))[0] if q == "bf16" else rng.choice(USUAL)
    dims = (dim, dim)
    if not decode and q == "bf16" and rng.random() < (0.5 if function == RAGGED_MLA else 0.06) and not fmha:
        dims = (192, 128)
    kv = ""
    if q != "fp8" and rng.random() < 0.4 and (decode or q == "bf16" and dim in USUAL and dims[0] == dims[1]):
        kv = rng.choice(("fp8", "fp8", "nvfp4"))
    if kv == "nvfp4" and (flash or fmha or function in (RAGGED, SINGLE, RAGGED_MLA)):
        kv = "fp8"
    if kv == "fp8" and function in (TRTLLM, CONTEXT) and rng.random() < 0.4:
        kv = rng.choice((TOKEN_SCALES, TOKEN_SCALES, INT8_SCALES))
    onto |= {"dtype": q, "kv_dtype": kv, "head_dim_qk": dims[0], "head_dim_vo": dims[1]}
    if q == "fp8":
        onto["out_dtype"] = "bf16" if rng.random() < 0.7 or flash else "fp8"
        if onto["out_dtype"] == "fp8":
            onto["out_scale"] = 30.0
    elif decode and rng.random() < 0.15 and not flash:
        onto["out_dtype"] = "fp8"
        onto["out_scale"] = rng.choice((1.0, 30.0))
    if function in (TRTLLM, CONTEXT) and (decode or q == "fp8") and rng.random() < 0.12:
        onto |= {"out_dtype": "nvfp4", "out_scale": 1.0}
    if kv == "nvfp4" and rng.random() < 0.4 and function not in ("xqa_batch_decode_with_kv_cache",):
        onto["interleaved"] = True


def _lengths(rng: Random, call: dict[str, Any], decode: bool, function: str, heads_q: int) -> None:
    """Draw the lengths of requests within the budget of logits."""
    page = call["page_size"]
    batch = rng.choices((1, 2, 3, 4, 7, 16, 33), (20, 20, 20, 15, 12, 8, 5))[0]
    if function == SINGLE:
        batch = 1
    equal = function in (SPLIT, "flash_attn_func") or rng.random() < (0.75 if decode else 0.1)
    if decode:
        tokens = rng.choices((1, 2, 3, 4, 8, 16, 33), (55, 10, 8, 8, 8, 7, 4))[0]
        q = [tokens] * batch if equal else [rng.randint(0, tokens) for _ in range(batch)]
        most = rng.choice((300, 1200, 5000 if batch < 8 else 1200))
    else:
        few = rng.random() < 0.3
        most = rng.choice((200, 700, 1500 if batch < 5 else 300))
        q = [length(rng, 16 if few else min(most, 600), page) for _ in range(batch)]
        q = [max(1, q[0])] * batch if equal else q
    n = [length(rng, most, page) for _ in range(batch)]
    if rng.random() < 0.8:  # as engines call: the tokens of a request are the last of its keys
        n = [max(own, rows) for own, rows in zip(n, q)]
    if function == "flash_attn_func":
        n = [max(1, n[0])] * batch
    if function == SINGLE:
        n[0] = max(n[0], q[0], 1)
    while sum(a * b for a, b in zip(q, n)) * heads_q > LOGITS or sum(n) > (20_000 if heads_q <= 64 else 2000):
        n = [max(rows, x // 2) if x > rows else x for x, rows in zip(n, q)]
        if all(x <= rows for x, rows in zip(n, q)):
            q = [-(-x // 2) if not equal else max(1, q[0] // 2) for x in q]
            n = [min(x, rows) if function != "flash_attn_func" else x for x, rows in zip(n, q)]
            n = [max(x, 1) if function in (SINGLE, "flash_attn_func") else x for x in n]
    if not sum(q):
        q[0] = 1
    tma = call["dtype"] == "fp8" or call["kv_dtype"] or call["head_dim_qk"] not in USUAL or rng.random() < 0.5
    if function == "flash_attn_func" and tma:  # its rows are pages of 8, 16, 32 or 64 rows
        n = [max(8, n[0] // 8 * 8)] * batch
    call |= {"q_lens": q, "kv_lens": n}


def _window(rng: Random, c: dict[str, Any]) -> int:
    """Draw a window: of any size, or one that begins, in a row which may begin a tile, at the edge of a block of keys,
    a key before it, or a key behind it."""
    if rng.random() < 0.4:
        return rng.choice((0, 1, 15, 64, 127, 128, 500, 1 << 20))
    rows, keys = rng.choice(list(zip(c["q_lens"], c["kv_lens"])))
    position = keys - rows + rng.choice([row for row in (0, 0, 64, 128, 192, 256) if row < max(rows, 1)])
    block = rng.choice(BLOCKS)
    edge = block * rng.randint(0, max(position, 0) // block) + rng.choice((-1, 0, 1))
    return max(0, position - edge)


def _magnitudes(rng: Random, c: dict[str, Any], extra: dict[str, Any], function: str) -> None:
    """Draw queries of any magnitude that their type has, a scale that gives scores of any use, and outputs of any
    magnitude."""
    if c["dtype"] == "fp8" or c["data"] != "normal" or extra.get("rope") or extra.get("hostile") or c.get("skip"):
        return
    if rng.random() < 0.25:
        power = rng.randint(-30, 30) if c["dtype"] == "bf16" else rng.randint(-8, 6)
        c["q_unit"], c["scale"] = 2.0**power, 2.0 ** (rng.choice((-3, -2, 0)) - power)
    elif rng.random() < 0.15:
        c["scale"] = 2.0 ** rng.randint(-30, 1)
    if c["dtype"] == "bf16" and not c.get("out_dtype") and not c.get("device") and "scales" not in extra and (
        function in (TRTLLM, CONTEXT) and rng.random() < 0.15
    ):  # fmt: skip
        c["out_scale"] = 2.0 ** rng.randint(-30, 30)


def _modifiers(rng: Random, c: dict[str, Any], extra: dict[str, Any], decode: bool, function: str, tma: bool) -> None:
    """Draw masks, modifiers of logits, scales and skip-softmax."""
    usual = c["head_dim_qk"] in USUAL and c["head_dim_vo"] in USUAL
    bits16, classes = c["dtype"] != "fp8", function in (PAGED, SINKS, RAGGED, SINGLE)
    headline = tma and function != "flash_attn_func" and not c["kv_dtype"]  # has a kernel for full attention
    c["causal"] = decode or rng.random() < 0.6 or not headline
    if function in ("flash_attn_with_kvcache",) and max(c["q_lens"]) > 1:
        c["causal"] = True
    if function == SINGLE and c["causal"] and c["kv_lens"][0] < c["q_lens"][0]:
        c["causal"] = False
    if rng.random() < 0.1 and usual and bits16 and not c.get("kv_dtype") and tma and c["causal"] and not decode and (
        function in (CONTEXT, PAGED)
    ):  # fmt: skip
        c["skip"] = rng.choice((1e-30, 1e-3, 1e-2, 0.1))
        return
    if rng.random() < 0.3:
        c["window_left"] = _window(rng, c)
        if function == "trtllm_fmha_v2_prefill":
            c["causal"] = True
    if rng.random() < 0.22 and function not in ("xqa", "xqa_batch_decode_with_kv_cache", RAGGED_MLA):
        c["soft_cap"] = rng.choice((2.0, 9.0, 30.0))
    if rng.random() < 0.3 and function not in (RAGGED, SINGLE) or function == SINKS:
        c["sink"] = rng.choice((1.0, 1.0, 3.0))
    if classes and tma and usual and bits16 and not c.get("kv_dtype") and rng.random() < 0.2:
        masks = ("bool", "packed") if function == SINGLE else ("bool", "packed", "ranges", "prefix")
        extra["custom"] = rng.choice(masks)
        c["causal"] = True  # the mask replaces it
    elif classes and bits16 and not c.get("kv_dtype") and rng.random() < 0.12 and c["head_dim_qk"] == c["head_dim_vo"]:
        extra["rope"] = True
    if decode and function in (TRTLLM, SPLIT) and rng.random() < 0.08:
        c["skip"] = rng.choice((1e-30, 1e-3, 1e-2, 0.1))
    drafts = decode and function in (TRTLLM, "xqa", "xqa_batch_decode_with_kv_cache")
    if drafts and max(c["q_lens"]) > 1 and (function == "xqa" or rng.random() < 0.35):
        c["drafts"] = True
    if decode and function in (TRTLLM, "xqa") and rng.random() < 0.12:
        c["invariant"] = True
    quantised = c.get("kv_dtype") or c["dtype"] == "fp8"
    if function in (*TABLES, RAGGED_MLA) and rng.random() < 0.25:
        choices = [("scale",), ("out",), ("scale", "out")] + ([("log2", "out")] if function == TRTLLM else [])
        c["device"] = rng.choice(choices)
    elif classes and c.get("kv_dtype") and rng.random() < 0.3:
        extra["scales"] = "heads"
    elif (classes or function == SPLIT) and rng.random() < 0.2:
        c["device"] = ("scale", "out")
    elif function.startswith("flash") and quantised and rng.random() < 0.5:
        extra["scales"] = "descale"
    if (
        "scales" not in extra
        and not (c.get("device") and function not in (*TABLES, RAGGED_MLA))
        and not c.get("out_dtype")
    ):
        if not function.startswith("flash") and rng.random() < 0.2:
            c["out_scale"] = rng.choice((0.3, 2.0))
    if classes or function.startswith("flash") or function == SPLIT:
        extra["split"] = rng.random() < 0.15


def _form(rng: Random, c: dict[str, Any], extra: dict[str, Any], function: str) -> None:
    """Draw the form of the cache, the layout and the outputs."""
    if function in (SPLIT, PAGED, SINKS):
        extra["form"] = "csr"
    elif (
        function in (RAGGED, SINGLE, RAGGED_MLA, "flash_attn_func")
        or function == "flash_attn_varlen_func"
        and rng.random() < 0.4
    ):
        extra["form"] = "ragged"
    c["layout"] = rng.choice(("NHD", "HND"))
    if function.startswith("flash") or function == RAGGED_MLA:
        c["layout"] = "NHD"
    equal_dims = c["head_dim_qk"] == c["head_dim_vo"]
    forms = ["tuple"] + (["stacked"] if equal_dims else [])
    if function in (TRTLLM, CONTEXT) and equal_dims and not c.get("interleaved"):
        forms.append("shared")
    c["cache"] = rng.choice(forms) if extra.get("form", "table") != "ragged" else "tuple"
    if function == "trtllm_fmha_v2_prefill":
        c["cache"] = "stacked"
    if function == "xqa":
        c["cache"] = "flat" if c["layout"] == "NHD" and rng.random() < 0.5 else "tuple"
    if function in (TRTLLM, CONTEXT) and c["cache"] != "shared" and rng.random() < 0.15:
        c["separate_tables"] = True
    if function in TABLES and rng.random() < 0.2:
        c["uint32_lens"] = True
    c["strided_q"] = rng.random() < 0.25 and function != "xqa"
    c["fresh"] = rng.random() < 0.3 and function != "xqa"
    if c["dtype"] == "fp8" and function in (TRTLLM, CONTEXT) and c.get("out_dtype") != "nvfp4":
        c["fresh"] = False
    if function == "xqa_batch_decode_with_kv_cache" and c.get("out_dtype"):
        c["fresh"] = False
    if function == RAGGED_MLA and c.get("out_dtype") == "fp8":  # the default is bf16
        c["fresh"] = False
    c["lse"] = function not in NO_LSE and rng.random() < 0.55
    extra["on_device"] = rng.random() < 0.4
    if function == SPLIT:
        extra["fast"] = rng.random() < 0.3
    c["spare_pages"] = rng.choice((0, 1, 3, 9))


def _hostile(rng: Random, c: dict[str, Any], extra: dict[str, Any], function: str) -> None:
    """Make some calls hostile: index tensors that hold anything."""
    if function not in TABLES or rng.random() > 0.16 or c.get("cache") == "flat" or c.get("skip"):
        return
    equal = function != CONTEXT and len(set(c["q_lens"])) == 1
    kinds = (hostile.LENGTHS + hostile.PAGES) if equal else hostile.kinds()
    if c["cache"] in ("stacked", "shared"):
        kinds = tuple(kind for kind in kinds if kind != "fewer pages of V")
    extra["hostile"] = rng.choice(kinds)


def draw(family: str, rng: Random, options: Options) -> Call:
    """Draw a call of "decode", "prefill" or "layers"."""
    function = weighted(rng, {"decode": DECODE, "prefill": PREFILL, "layers": LAYERS}[family])
    decode = function in DECODE
    c: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    _types(rng, decode, function, c)
    gathers = c["head_dim_qk"] in USUAL and c["head_dim_vo"] in USUAL and c["dtype"] != "fp8" and (
        not c["kv_dtype"] or decode and c["kv_dtype"] == "fp8"
    )  # fmt: skip
    tma = not gathers or rng.random() > 0.2 or c.get("interleaved", False)
    c["page_size"] = rng.choice(TMA_PAGES if tma else ANY_PAGES)
    c["heads_q"], c["heads_kv"] = rng.choice(HEADS)
    if c.get("out_dtype") == "nvfp4" and c["heads_q"] * c["head_dim_vo"] % 64:
        c["heads_q"], c["heads_kv"] = 4, 2
    _lengths(rng, c, decode, function, 8 * LOGITS // SMALL if options.small else c["heads_q"])
    _form(rng, c, extra, function)
    if extra.get("form") == "ragged":
        tma = True
    _modifiers(rng, c, extra, decode, function, tma)
    if options.compiles and rng.random() < 0.1:
        extra["alibi"] = function in (CONTEXT, PAGED, RAGGED, SINGLE) and not extra.get("rope")
        c["page_size"] = rng.choice(ANY_PAGES + TMA_PAGES) if not c.get("interleaved") else c["page_size"]
    c["data"] = rng.choices(("normal", "needles", "peaks"), (80, 10, 10))[0]
    if extra.get("custom") or extra.get("rope") or c.get("drafts") or c.get("skip", 0) or c.get("soft_cap"):
        c["data"] = "normal"
    if family != "layers":
        _hostile(rng, c, extra, function)
    _magnitudes(rng, c, extra, function)
    mode = rng.choices(("eager", "graph", "threads"), (76, 16, 8))[0]
    if family == "layers":
        mode = "bind" if function in BOUND and rng.random() < 0.5 else "repeat"
        extra.pop("hostile", None)
    if mode == "graph" and (extra.get("form") == "ragged" and function != RAGGED or c.get("skip")):
        mode = "eager"
    if mode == "graph" and (c["cache"] == "shared" or extra.get("hostile")):
        mode = "eager"
    if mode == "graph" and c.get("out_dtype") == "nvfp4" or mode == "threads" and function in PLANNED:
        mode = "eager"  # dequantised in torch, with a copy from the host; or one object for all threads
    choice = rng.choice(("shape", "function"))
    seed = rng.randrange(1 << 30)
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in c.items()}
    kind = "xqa" if function == "xqa" else "decode" if decode else "context"
    case = AttentionCase("fuzz", **values | {"function": kind})
    fields = changed_fields(case, "name")
    return Call(family, function, seed, mode, choice, fields, {k: v for k, v in extra.items() if v})
