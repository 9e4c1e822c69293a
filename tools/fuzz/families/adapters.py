"""Arguments of each attention function for a problem, and its results as (out, lse or None), the LSE in base 2."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import wrappers
from bench.cases import attention as cases
from bench.cases.attention import DTYPES, AttentionCase
from bench.cases.family import within
from wrappers.attention.bound import LayerLaunch, StepTensors, tensors_of
from wrappers.attention.call import AttentionCall
from wrappers.own.registry import call_of

from ..call import Call, Tree

LN2 = math.log(2)
SPARE = 3  # unused rows before and after those of ragged K and V
PLANNED = (
    "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper",
    "BatchAttentionWithAttentionSinkWrapper", "BatchPrefillWithRaggedKVCacheWrapper",
)  # fmt: skip


class Adapted(NamedTuple):
    """A call's arguments (one tree per variant), the call, its outputs in a tree, and what precedes a call."""

    variants: list[Tree]
    run: Callable[[Tree], tuple[Any, torch.Tensor | None]]
    outputs: Callable[[Tree], Any]
    prepare: Callable[[Tree, int], None] | None = None


def planned(function: str) -> bool:
    """Return whether a function's scales are arguments of `run` or of one request's function."""
    return function in PLANNED or function.startswith("single_prefill")


def _outputs(tree: Tree) -> Any:
    return [tree[name] for name in ("out", "output", "lse") if tree.get(name) is not None]


def _again(tree: Tree) -> Tree:
    """Return the arguments with new index tensors of equal values, as a model's next layer or step has them."""
    names = [name for name in ("block_tables", "seq_lens", "cum_seq_lens_q") if tree.get(name) is not None]
    return tree | {name: tree[name].clone() for name in names}


def _by_mode(call: Call, function: Any, query: str) -> Callable[[Tree], Any]:
    """Return the way to make a call: directly, through `bind`, or as a layer that keeps its launch."""

    def bound(tree: Tree) -> Any:
        layer = wrappers.bind(function, **tree)
        outputs = {name: tree[name] for name in ("out", "lse") if tree.get(name) is not None}
        for _ in range(2):
            found = layer.run(tree[query], **outputs)
        return found

    def repeated(tree: Tree) -> Any:
        launch = LayerLaunch() if _is_layers(function, tree) else None
        for _ in range(4):
            step = _again(tree)
            found = function(**step) if launch is None else _step(launch, function, step)
        return found

    return {"bind": bound, "repeat": repeated}.get(call.mode, lambda tree: function(**tree))


def _is_layers(function: Any, tree: Tree) -> bool:
    """Return whether `LayerLaunch` serves a call: its requests have one table of K and V, and it writes no LSE."""
    tables = wrappers.trtllm_batch_context_with_kv_cache, wrappers.trtllm_batch_decode_with_kv_cache
    return function in tables and tree["block_tables"].dim() == 2 and tree.get("lse") is None and "mask" not in tree


def _step(launch: LayerLaunch, function: Any, step: Tree) -> Any:
    """Return the result of a step of a layer."""
    names = ("query", "block_tables", "seq_lens", "cum_seq_lens_q", "out")
    asked = step.get("max_q_len"), step.get("q_len_per_req")
    own = [value for name, value in step.items() if name not in names]
    return launch.serve(
        StepTensors(*map(step.get, names)), asked, tuple(tensors_of(own)), lambda: call_of(function, **step)
    )


def _split(found: Any, lse: bool) -> tuple[Any, torch.Tensor | None]:
    return found if lse else (found, None)


# ---- functions that take a page table


def _dtype(case: AttentionCase) -> dict[str, Any]:
    """Return the argument for the dtype of an output that the function makes."""
    named = case.fresh and case.out_dtype not in ("", "nvfp4")
    return {"out_dtype": DTYPES[case.out_dtype]} if named else {}


def _tables(call: Call, problems: list[Any], device: torch.device) -> Adapted:
    """Adapt the functions of `cases.FUNCTIONS`."""
    function, arguments = cases.FUNCTIONS[problems[0].case.function]
    trees = [arguments(problem.case, problem.p) | _dtype(problem.case) for problem in problems]
    lse = problems[0].case.lse
    if call.function == "xqa":
        made = _by_mode(call, function, "q")
        return Adapted(trees, lambda tree: (made(tree), tree["output"])[1:] + (None,), _outputs)
    if call.extra.get("alibi"):
        trees = [tree | {"alibi_slopes": problem.p.alibi_slopes} for tree, problem in zip(trees, problems)]
    made = _by_mode(call, function, "query")
    return Adapted(trees, lambda tree: _split(made(tree), lse), _outputs)


def _xqa_batch(call: Call, problems: list[Any], device: torch.device) -> Adapted:
    trees = []
    for problem in problems:
        tree = cases.decode_arguments(problem.case, problem.p)
        if "cum_seq_lens_q" in tree:
            tree["q_cu_seq_lens"], tree["q_len_per_req"] = tree.pop("cum_seq_lens_q"), tree.pop("max_q_len")
        for name in ("return_lse", "lse", "logits_soft_cap", "uses_shared_paged_kv_idx", "v_scales_interleaved",
                     "out_dtype", "o_sf_scale"):  # fmt: skip
            tree.pop(name, None)
        trees.append(tree)
    made = _by_mode(call, wrappers.xqa_batch_decode_with_kv_cache, "query")
    return Adapted(trees, lambda tree: (made(tree), None), _outputs)


def _fmha(call: Call, problems: list[Any], device: torch.device) -> Adapted:
    trees = []
    for problem in problems:
        tree = cases.context_arguments(problem.case, problem.p)
        layout = tree.pop("kv_layout")
        kept = ("workspace_buffer", "block_tables", "seq_lens", "max_q_len", "max_kv_len", "bmm1_scale", "bmm2_scale",
                "batch_size", "cum_seq_lens_q", "cum_seq_lens_kv", "out", "sinks", "window_left")  # fmt: skip
        found = {name: tree.get(name) for name in kept}
        found |= {"qkv": (tree["query"], tree["kv_cache"]), "input_layout": f"Q_PAGED_KV_{layout}"}
        found |= {"logits_soft_cap_scale": tree["logits_soft_cap"]} | _dtype(problem.case)
        window = problem.case.window_left >= 0
        found["mask_mode"] = "padding" if not problem.case.causal else "sliding_window" if window else "causal"
        trees.append(found)
    return Adapted(trees, lambda tree: (wrappers.trtllm_fmha_v2_prefill(**tree), None), _outputs)


def _chosen(call: Call, problems: list[Any], device: torch.device) -> Adapted:
    trees = []
    for case, p, _ in problems:
        tree = cases.decode_arguments(case, p)
        names = ("kv_cache", "kv_layout", "sinks", "return_lse", "lse", "out", "bmm1_scale", "bmm2_scale",
                 "logits_soft_cap")  # fmt: skip
        found = {name: tree[name] for name in names if name in tree}
        found |= {"q": tree["query"], "batch_invariant": case.invariant} | _dtype(case)
        if case.out_dtype == "nvfp4":
            found |= {"o_sf_scale": tree["o_sf_scale"], "out_dtype": tree["out_dtype"]}
        found |= {"indices": p.requests.page_table[:, 0].contiguous(), "counts": p.requests.kv_lens}
        trees.append(found)
    made, lse = _by_mode(call, wrappers.sparse_paged_attention, "q"), problems[0].case.lse
    return Adapted(trees, lambda tree: _split(made(tree), lse), _outputs)


def _ragged_mla(call: Call, problems: list[Any], device: torch.device) -> Adapted:
    trees = []
    for case, p, _ in problems:
        tree = cases.context_arguments(case, p)
        names = ("query", "workspace_buffer", "seq_lens", "max_q_len", "max_kv_len", "bmm1_scale", "bmm2_scale",
                 "batch_size", "window_left", "cum_seq_lens_q", "return_lse", "out", "lse")  # fmt: skip
        found = {name: tree[name] for name in names if name in tree}
        found["key"], found["value"] = _laid(case, p.k, p.v)
        trees.append(found | {
            "o_sf_scale": 1.0, "enable_pdl": None, "is_causal": case.causal, "attention_sinks": p.sinks,
            "cum_seq_lens_kv": p.requests.kv_starts,
        })  # fmt: skip
    made, lse = _by_mode(call, wrappers.trtllm_ragged_attention_deepseek, "query"), problems[0].case.lse
    return Adapted(trees, lambda tree: _split(made(tree), lse), _outputs)


# ---- FlashAttention's functions


def _options(call: Call, case: AttentionCase, p: AttentionCall) -> dict[str, Any]:
    """Return the arguments that FlashAttention's functions share."""
    found: dict[str, Any] = {
        "softmax_scale": p.scale, "causal": case.causal, "window_size": (case.window_left, -1),
        "softcap": case.soft_cap, "num_splits": 1 if call.extra.get("split") else 0,
        "return_softmax_lse": case.lse, ("s_aux", "sinks", "learnable_sink")[call.seed % 3]: p.sinks,
    }  # fmt: skip
    if call.extra.get("scales") == "descale":
        shape = len(case.q_lens), case.heads_kv
        found |= {"k_descale": torch.tensor([[0.75]]).expand(shape), "v_descale": torch.tensor([[1.25]]).expand(shape)}
    return found


def _new_out(case: AttentionCase, shape: tuple[int, ...], name: str = "") -> torch.Tensor:
    """Return an output of NaN in the case's dtype; a slice of a wider tensor if its query is one."""
    out = torch.full(shape, math.nan).to(DTYPES[name or case.out_dtype or case.dtype])
    return within(out) if case.strided_q and out.element_size() > 1 and len(shape) == 3 else out


def _flash(call: Call, problems: list[Any], device: torch.device) -> Adapted:
    function, trees = getattr(wrappers, call.function), []
    case = problems[0].case
    batch, rows, n = len(case.q_lens), case.q_lens[0], case.kv_lens[0]
    dense = call.function == "flash_attn_func"
    equal = dense or call.function == "flash_attn_with_kvcache" and len(set(case.q_lens)) == 1
    for case, p, _ in problems:
        tree, r = _options(call, case, p), p.requests
        q = p.q.unflatten(0, (batch, rows)) if equal else p.q
        shape = *q.shape[:-1], case.head_dim_vo
        if r.form == "ragged":
            k, v = (t[0].transpose(0, 1) for t in (p.k, p.v))
            if dense:
                k, v = (t[SPARE:-SPARE].unflatten(0, (batch, n)) for t in (k, v))
        else:
            k, v = cases._laid_out(replace(case, layout="NHD", cache="tuple"), p.k, p.v)
        if call.function == "flash_attn_with_kvcache":
            table = r.page_table[:, 0].contiguous()
            tree |= {"k_cache": k, "v_cache": v, "cache_seqlens": r.kv_lens, "block_table": table}
            if not equal:
                tree |= {"cu_seqlens_q": r.cu_seqlens_q, "max_seqlen_q": max(case.q_lens)}
        else:
            tree |= {"k": k, "v": v}
        if call.function == "flash_attn_varlen_func":
            tree |= {"cu_seqlens_q": r.cu_seqlens_q, "max_seqlen_q": max([0, *case.q_lens])}
            if r.form == "ragged":
                tree["cu_seqlens_k"] = r.kv_starts
            else:
                tree |= {"seqused_k": r.kv_lens, "page_table": r.page_table[:, 0].contiguous()}
        trees.append(tree | {"q": q, "out": None if case.fresh else _new_out(case, shape)})

    made = _by_mode(call, function, "q")

    def run(tree: Tree) -> tuple[Any, torch.Tensor | None]:
        o, lse = _split(made(tree), case.lse)
        if lse is not None:
            lse = (lse.transpose(1, 2).flatten(0, 1) if equal else lse.T) / LN2
        return (o.flatten(0, 1) if equal else o), lse

    return Adapted(trees, run, _outputs)


# ---- functions without pages or with page lists


def _laid(case: AttentionCase, *rows: torch.Tensor) -> list[torch.Tensor]:
    """Return ragged K and V (1, Hkv, rows, D) as (rows, Hkv, D) or (Hkv, rows, D), slices of wider tensors or not."""
    nhd = [t[0].transpose(0, 1).contiguous() for t in rows]
    found = nhd if case.layout == "NHD" else [t.transpose(0, 1).contiguous() for t in nhd]
    return [within(t) if case.strided_q and t.element_size() > 1 else t for t in found]


def _scales(call: Call, case: AttentionCase, p: AttentionCall) -> dict[str, Any]:
    """Return q_scale, k_scale and v_scale of a planned call."""
    if p.scale_tensor is None or p.out_scale_tensor is None:
        return {"v_scale": case.out_scale} if case.out_scale != 1.0 else {}
    group = case.heads_q // case.heads_kv
    if call.extra.get("scales") == "heads":
        return {"q_scale": p.scale_tensor, "v_scale": p.out_scale * p.out_scale_tensor[::group]}
    return {"k_scale": p.scale_tensor, "v_scale": p.out_scale * p.out_scale_tensor}


def _mask(call: Call, problem: Any) -> dict[str, Any]:
    kind = call.extra.get("custom")
    if not kind or problem.p.custom_mask is None:
        return {}
    if kind == "packed":
        return {"packed_custom_mask": problem.p.custom_mask}
    return {"custom_mask": torch.cat([bits.flatten() for bits in problem.mask])}


def _modifiers(call: Call, case: AttentionCase, p: AttentionCall) -> dict[str, Any]:
    mode = "ALIBI" if call.extra.get("alibi") else "ROPE_LLAMA" if p.rope else "NONE"
    found: dict[str, Any] = {
        "pos_encoding_mode": mode, "window_left": case.window_left, "logits_soft_cap": case.soft_cap or None,
        "sm_scale": p.scale,
    }  # fmt: skip
    return found | ({"rope_scale": p.rope.scale, "rope_theta": p.rope.theta} if p.rope else {})


def _single(call: Call, problems: list[Any], device: torch.device) -> Adapted:
    trees = []
    for problem in problems:
        case, p = problem.case, problem.p
        k, v = _laid(case, p.k[:, :, SPARE:-SPARE], p.v[:, :, SPARE:-SPARE])
        tree = {"q": p.q, "k": k, "v": v, "kv_layout": case.layout, "return_lse": case.lse, "causal": case.causal}
        if p.q.element_size() == 1:
            tree["o_dtype"] = DTYPES[case.out_dtype or case.dtype]
        trees.append(tree | _mask(call, problem) | _modifiers(call, case, p) | _scales(call, case, p))
    made = _by_mode(call, wrappers.single_prefill_with_kv_cache, "q")
    return Adapted(trees, lambda tree: _split(made(tree), problems[0].case.lse), lambda tree: [])


def _buffers(call: Call, problem: Any, device: torch.device) -> dict[str, Any]:
    """Return the constructor's arguments for CUDA graphs."""
    batch, bits = problem.p.requests.batch, problem.p.custom_mask
    pages = 0 if problem.p.requests.form == "ragged" else problem.p.requests.page_table.shape[2]

    def zeros(n: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(n, dtype=dtype, device=device)

    last = "_buffer" if call.function.startswith("BatchDecode") else "_buf"
    names = ["paged_kv_indptr"] if pages or problem.p.requests.form == "csr" else ["kv_indptr"]
    if last == "_buf":
        names.append("qo_indptr")
    found: dict[str, Any] = {name + last: zeros(batch + 1) for name in names}
    if problem.p.requests.form == "csr":
        found |= {"paged_kv_indices" + last: zeros(2 * pages + 64), "paged_kv_last_page_len" + last: zeros(batch)}
    if bits is not None:
        size = sum(-(-m * n // 8) for m, n in zip(problem.case.q_lens, problem.case.kv_lens)) + 64
        found |= {"custom_mask_buf": zeros(size, torch.uint8), "mask_indptr_buf": zeros(batch + 1)}
    return found | {"use_cuda_graph": True}


def _wrapped(call: Call, problems: list[Any], device: torch.device) -> Adapted:
    """Adapt the classes with plan and run. Index tensors are on the host, or, without graphs, on the device."""
    case, first = problems[0].case, problems[0].p
    decode, ragged = call.function == PLANNED[0], first.requests.form == "ragged"
    on_device = bool(call.extra.get("on_device")) and call.mode != "graph"
    trees, index, masks = [], [], []
    for problem in problems:
        p, r = problem.p, problem.p.requests
        tensors = [r.kv_starts] if decode else [r.cu_seqlens_q, r.kv_starts]
        if ragged:
            kv: Any = _laid(case, p.k, p.v)
            tree = {"q": p.q, "k": kv[0], "v": kv[1]}
        else:
            tensors += [r.page_table[0, 0].contiguous(), r.kv_lens]
            tree = {"q": p.q, "paged_kv_cache": cases._laid_out(case, p.k, p.v)}
            if p.k_scales is not None:
                tree |= {"kv_cache_sf": cases._laid_out(case, p.k_scales, p.v_scales)}
                tree["v_scales_interleaved"] = case.interleaved
        tree |= {"return_lse": case.lse} | _scales(call, case, p)
        if case.skip:
            tree["skip_softmax_threshold_scale_factor"] = case.skip
        if p.sinks is not None:
            tree["sinks"] = p.sinks
        if p.ranges is not None:
            tree |= {"bidirectional_ranges": p.ranges, "range_window_left": p.range_left + 1}
        if p.prefix_lens is not None:
            tree["prefix_lens"] = p.prefix_lens
        if not case.fresh:
            shape = *p.q.shape[:2], case.head_dim_vo
            tree["out"] = _new_out(case, shape)
            if case.lse:
                tree["lse"] = torch.full(shape[:2], math.nan)
        mask = _mask(call, problem)
        trees.append(tree | ({"index": tensors, "mask": mask} if on_device else {}))
        index.append(tensors)
        masks.append(mask)
    workspace = torch.zeros(64, dtype=torch.uint8, device=device)
    buffers = _buffers(call, problems[0], device) if call.mode == "graph" and device.type == "cuda" else {}
    wrapper = getattr(wrappers, call.function)(workspace, case.layout, **buffers)

    def prepare(tree: Tree, variant: int) -> None:
        p, types = problems[variant].p, {"q_data_type": first.q.dtype, "kv_data_type": first.k.dtype}
        types["o_data_type"] = DTYPES[case.out_dtype or case.dtype]
        given = _modifiers(call, case, p) | types | (tree["mask"] if on_device else masks[variant])
        if call.extra.get("split"):
            given["disable_split_kv"] = True
        heads: tuple[int, ...] = (case.heads_q, case.heads_kv)
        places = tree["index"] if on_device else index[variant]
        if decode:
            shape = *heads, case.head_dim_qk, case.page_size
            given["q_len_per_req"] = case.q_lens[0]
            wrapper.plan(*places, *shape, **given)
            if call.extra.get("fast"):
                given.pop("o_data_type")
                wrappers.fast_decode_plan(wrapper, *places, *shape, **given)
            return
        given |= {"causal": case.causal, "head_dim_qk": case.head_dim_qk, "head_dim_vo": case.head_dim_vo}
        wrapper.plan(*places, *heads, **given, **({} if ragged else {"page_size": case.page_size}))

    def run(tree: Tree) -> tuple[Any, torch.Tensor | None]:
        given = {name: value for name, value in tree.items() if name not in ("index", "mask")}
        for _ in range(3 if call.mode == "repeat" else 1):
            found = wrapper.run(**given)
        return _split(found, case.lse)

    return Adapted(trees, run, _outputs, prepare)


ADAPTERS: dict[str, Callable[[Call, list[Any], torch.device], Adapted]] = {
    "trtllm_batch_decode_with_kv_cache": _tables,
    "trtllm_batch_context_with_kv_cache": _tables,
    "xqa": _tables,
    "xqa_batch_decode_with_kv_cache": _xqa_batch,
    "trtllm_fmha_v2_prefill": _fmha,
    "sparse_paged_attention": _chosen,
    "trtllm_ragged_attention_deepseek": _ragged_mla,
    "flash_attn_func": _flash,
    "flash_attn_varlen_func": _flash,
    "flash_attn_with_kvcache": _flash,
    "single_prefill_with_kv_cache": _single,
    **dict.fromkeys(PLANNED, _wrapped),
}
