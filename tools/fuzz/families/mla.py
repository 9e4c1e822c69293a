"""Attention over caches of latent attention (MLA) (judged in fp64) and appends of NVFP4 latents beside a reference."""

from dataclasses import replace
from random import Random
from typing import Any

import torch

import wrappers
from bench.cases import mla as cases
from bench.cases.cache_write import copied
from bench.cases.mla import MlaCase, MlaInputs
from cute_kernels.attention.spec import UNION_HEADS
from wrappers.host.machine import HostMachine, override

from ..call import Call, Options, Results, Work, case_of, changed_fields

FLASH_MLA, TRTLLM = "flash_mla_with_kvcache", "trtllm_batch_decode_with_kv_cache_mla"
WRAPPER, QV, XQA = "BatchMLAPagedAttentionWrapper", "flash_attn_with_kvcache", "xqa_batch_decode_with_kv_cache_mla"
SPARSE = "flash_mla_sparse_fwd"
DSA, DSA_VARLEN = "dsa_sparse_attention", "dsa_sparse_attention_varlen"
NAMES = {FLASH_MLA: "flash_mla", TRTLLM: "trtllm", WRAPPER: "wrapper", QV: "qv", XQA: "xqa", SPARSE: "sparse_fwd",
         DSA: "dsa", DSA_VARLEN: "dsa_varlen"}  # fmt: skip
METADATA, APPEND = "get_mla_metadata", "nvfp4_quantize_append_paged_mla_kv_cache"
BYTE = torch.uint8


RECORDS_OF = {  # (function, columns of K) -> records, of which "e4m3" also without chosen keys
    ("flash_mla", 576): ("e4m3", "656", "352"), ("flash_mla", 512): ("e4m3", "584", "528"),
    ("trtllm", 576): ("e4m3", "656"), ("trtllm", 512): ("e4m3", "528_fp32"),
    ("sparse_fwd", 576): ("e4m3", "656", "352"), ("sparse_fwd", 512): ("e4m3", "528", "584"),
}  # fmt: skip
FUNCTIONS, WEIGHTS = (*NAMES, APPEND, METADATA), (6, 4, 4, 4, 1, 3, 1, 1, 2, 2)


def draw(family: str, rng: Random, options: Options) -> Call:
    function = rng.choices(FUNCTIONS, WEIGHTS)[0]
    most = 150 if options.small else 3000
    lens = tuple(rng.choice((0, 1, 63, 64, 65, rng.randrange(most))) for _ in range(rng.choice((1, 2, 3, 9, 40))))
    mode = rng.choices(("eager", "graph", "threads"), (76, 16, 8))[0]
    if function == WRAPPER and mode == "graph":  # `plan`, which is a part of the call, cannot be captured
        mode = "eager"
    if function in (APPEND, METADATA):
        case: dict[str, Any] = {"lens": lens, "page_size": rng.choice((1, 3, 16, 64))}
        case |= {"latent": rng.choice((512, 512, 48)), "rotated": rng.choice((64, 64, 20)), "gap": rng.choice((0, 8))}
        return Call(family, function, rng.randrange(1 << 30), "eager" if function == METADATA else mode, "shape", case)
    few = lens[:3] if options.small else lens
    drawn = MlaCase(
        NAMES[function], rng.choice(("bf16", "bf16", "fp16")), few,
        rng.choice((1, 1, 1, 2, 4, 8, 70)), rng.choice((1, 3, 8, 16, 16, 64, 128)), rng.choice((576, 576, 512)),
        rng.choice((1, 2, 3, 8, 16, 64, 64, 64)), function == TRTLLM or rng.random() < 0.7, sink=rng.random() < 0.4,
        gap=rng.choice((0, 0, 1, 5)), strided=rng.random() < 0.3, data=rng.choice(("normal", "normal", "peaks")),
        chosen=rng.choice((0, 0, 1, 63, 64, 65, rng.randrange(1, most))), counted=rng.random() < 0.4,
    )  # fmt: skip
    drawn = replace(drawn, invariant=function == FLASH_MLA and rng.random() < 0.2)
    if function in (WRAPPER, QV, XQA):
        drawn = replace(drawn, chosen=0, counted=False, causal=function == XQA or rng.random() < 0.7)
    if function == SPARSE:
        drawn = replace(drawn, chosen=max(drawn.chosen, 1), strided=False, gap=0)
    if function in (DSA, DSA_VARLEN):
        drawn = replace(drawn, dim=576, chosen=max(drawn.chosen, 1), strided=False, gap=0, sink=False)
    if function == WRAPPER:
        drawn = replace(drawn, sink=False)
    if function == QV:
        window, cap = rng.choice((0, 1, 63, 64, 300)), rng.choice((0.0, 0.0, 5.0))
        drawn = replace(drawn, dim=576, window=window, cap=cap)
    if drawn.chosen and function in (FLASH_MLA, SPARSE) and rng.random() < 0.4:
        drawn = replace(drawn, second=rng.choice((1, 64, rng.randrange(1, most))))
    if function == SPARSE and drawn.heads in UNION_HEADS and not drawn.second:
        drawn = replace(drawn, share=rng.random() < 0.5)
    if function in (FLASH_MLA, TRTLLM, SPARSE) and drawn.dtype == "bf16" and rng.random() < 0.5:
        drawn = _with_records(drawn, rng)
    return Call(family, function, rng.randrange(1 << 30), mode, "shape", changed_fields(drawn, "function"))


def _with_records(case: MlaCase, rng: Random) -> MlaCase:
    """Return a case over packed records that its function reads."""
    records = RECORDS_OF[case.function, case.dim]
    record = rng.choice(records if case.function == "flash_mla" or case.chosen else records[:1])
    second = record if record == "e4m3" else rng.choice([r for r in (*records, "288") if r not in ("e4m3", "")])
    if case.dim == 576 and second == "288":
        second = record
    return replace(
        case, q8=record == "e4m3" and rng.random() < 0.4, record=record, second_record=second if case.second else ""
    )


def _case(call: Call) -> MlaCase:
    return case_of(MlaCase, call, function=NAMES[call.function])


def _append(call: Call, seed: int) -> dict[str, Any]:
    """Return the arguments of an append of some rows of each request."""
    c, gen = call.case, torch.Generator().manual_seed(seed)
    size, latent, rotated = c["page_size"], c["latent"], c["rotated"]
    columns = [-(-n // size) for n in c["lens"]]
    pages, width = sum(columns) + 1, latent // 2 + latent // 16 + rotated + c["gap"]
    whole = torch.full((pages, size, width), 0x5A, dtype=BYTE)
    codes, factors, rest = whole[..., : width - c["gap"]].split([latent // 2, latent // 16, rotated], 2)
    tokens = [(b, position) for b, n in enumerate(c["lens"]) for position in range(max(n - 3, 0), n)]
    where = torch.tensor(tokens, dtype=torch.int32).view(-1, 2)
    rows = torch.randn(len(tokens), latent + rotated, generator=gen).bfloat16()
    e4m3 = torch.float8_e4m3fn
    return {
        "append_ckv": rows[:, :latent], "append_kpe": rows[:, latent:], "batch_indices": where[:, 0].contiguous(),
        "positions": where[:, 1].contiguous(), "ckv_cache": codes, "ckv_sf_cache": factors.view(e4m3),
        "kpe_cache": rest.view(e4m3), "kv_indices": torch.randperm(pages, generator=gen).int()[: sum(columns)],
        "kv_indptr": torch.tensor([0, *columns]).cumsum(0).int(),
        "kv_last_page_len": torch.tensor([(n - 1) % size + 1 if n else 0 for n in c["lens"]]).int(),
        "ckv_scale": 0.03, "kpe_scale": 0.02,
    }  # fmt: skip


def build(call: Call, device: torch.device) -> Work:
    seeds = [call.seed + i for i in range(2 if call.mode == "graph" else 1)]
    if call.function == METADATA:
        lens = torch.tensor(call.case["lens"], dtype=torch.int32)
        shape = lens.shape[0] + 1
        return Work(
            [{"lens": lens}], lambda tree: {"splits": wrappers.get_mla_metadata(tree["lens"], 16, 1)[1]},  # type: ignore
            lambda tree: [], lambda _, tree, found: "" if tuple(found["splits"].shape) == (shape,) else "a shape",
        )  # fmt: skip
    if call.function == APPEND:
        return _build_append([_append(call, seed) for seed in seeds])
    case = _case(call)
    variants = [{"inputs": cases.make(case, "cpu", seed)} for seed in seeds]

    def run(tree: Any) -> Results:
        return dict(zip(("out", "lse", "top"), cases.call(case, tree["inputs"])))

    def judge(variant: int, tree: Any, results: Results) -> str:
        given: MlaInputs = variants[variant]["inputs"]
        worst = cases.error(case, tuple(t.cpu() for t in results.values()), cases.expected(case, given))
        return "" if worst <= 1.0 else f"{worst:.2f} of the tolerance"

    return Work(variants, run, lambda tree: [], judge)


def _build_append(variants: list[dict[str, Any]]) -> Work:
    names, wanted = ("ckv_cache", "ckv_sf_cache", "kpe_cache"), [copied(tree, "cpu") for tree in variants]
    with override(HostMachine()):
        for tree in wanted:
            wrappers.nvfp4_quantize_append_paged_mla_kv_cache(**tree)

    def run(tree: Any) -> Results:
        wrappers.nvfp4_quantize_append_paged_mla_kv_cache(**tree)
        return {}

    def judge(variant: int, tree: Any, results: Results) -> str:
        wrong = [n for n in names if not torch.equal(tree[n].cpu().view(BYTE), wanted[variant][n].view(BYTE))]
        return f"{', '.join(wrong)}: other bytes" if wrong else ""

    return Work(variants, run, lambda tree: [tree[name] for name in names], judge)


def smaller(call: Call) -> list[dict[str, Any]]:
    lens = call.case.get("lens", MlaCase.lens)
    found = [lens[:i] + lens[i + 1 :] for i in range(len(lens)) if len(lens) > 1]
    found += [(*lens[:i], n // 2, *lens[i + 1 :]) for i, n in enumerate(lens) if n]
    if call.function in (APPEND, METADATA):
        return [call.case | {"lens": some} for some in found]
    case = _case(call)
    changed = [replace(case, lens=some) for some in found]
    changed += [replace(case, gap=0)] if case.gap else []
    changed += [replace(case, share=False)] if case.share else []
    changed += [replace(case, chosen=case.chosen // 2)] if case.chosen > 1 else []
    changed += [replace(case, second=case.second // 2)] if case.second else []
    return [changed_fields(one, "function") for one in changed]
