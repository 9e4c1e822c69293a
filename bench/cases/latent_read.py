"""Calls that gather rows of latent attention, their inputs, and what must be written.

The cache holds rows that `append_latent` wrote. Unused rows, page tails and what lies between the rows of an output
hold arbitrary bytes, and nothing but rows of requests may change.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

import wrappers
from cute_kernels.records import INDEX, RECORDS, ROWS
from wrappers import LatentCache
from wrappers.host.machine import HostMachine, override

from . import latent
from .latent import DTYPES, WORST, of_record

BYTE, FILL = torch.uint8, 0x5A
DTYPE_NAMES = {ROWS: "auto", "e4m3": "fp8", "656": "fp8_ds_mla", "352": "nvfp4_ds_mla"}  # of vLLM
OWN, COPY, DEQUANT = "gather_latent", "cp_gather_cache", "gather_and_maybe_dequant_cache"
UPCONVERT, UPCONVERT_NVFP4 = "cp_gather_and_upconvert_fp8_kv_cache", "cp_gather_and_upconvert_nvfp4_kv_cache"
INDEXER = "cp_gather_indexer_k_quant_cache"
RECORDS_OF = {  # function -> the records that it reads
    OWN: tuple(name for name in RECORDS if name != INDEX), COPY: (ROWS, "656"), DEQUANT: tuple(DTYPE_NAMES),
    UPCONVERT: ("656",), UPCONVERT_NVFP4: ("352",), INDEXER: (INDEX,),
}  # fmt: skip


@dataclass(frozen=True)
class ReadCase:
    """One call.

    lens: rows of each request. starts: positions of their first rows are given. hostile: some pages, offsets and
    positions name no row. gap: bytes behind each page. shift: elements before rows of the output. int32: the dtype of
    index tensors, which otherwise is int64. mixed: bit i says that number i of the table, the offsets and the positions
    has the other dtype. wide: values of a "rows" or "e4m3" row. fp32_scales: an indexer's scales are fp32.
    """

    function: str = OWN
    record: str = "656"
    dtype: str = "bf16"
    lens: tuple[int, ...] = (5, 0, 13, 2)
    page_size: int = 4
    starts: bool = False
    hostile: bool = False
    gap: int = 0
    shift: int = 0
    int32: bool = False
    mixed: int = 0
    wide: int = 576
    fp32_scales: bool = False
    data: str = "normal"


def make_inputs(case: ReadCase, device: "torch.device | str" = "cpu", seed: int = 0) -> dict[str, Any]:
    """Return the arguments of a function, with outputs of arbitrary bytes."""
    gen, form = torch.Generator().manual_seed(seed), RECORDS[case.record]
    batch, rows = len(case.lens), sum(case.lens)
    firsts = torch.randint(3 * case.page_size, (batch,), generator=gen) * case.starts
    columns = -(-max(case.lens) // case.page_size) + 3 * case.starts + 1
    pages = batch * columns + 1
    fields: dict[str, Any] = {"latent": case.wide - 64, "rotated": 64} if not form.latent else {}
    tokens = pages * case.page_size
    made = of_record(
        case.record, tokens=tokens, pages=pages, page_size=case.page_size, gap=case.gap, data=case.data,
        dtype=case.dtype, **fields, **({"index": 0} if case.record == INDEX else {}),
    )  # fmt: skip
    given = latent.make_inputs(made, "cpu", seed)
    with override(HostMachine()):
        latent.run(given)
    cache = given["index"].cache if case.record == INDEX else given["cache"].cache
    table = torch.randperm(pages, generator=gen)[: batch * columns].view(batch, columns)
    offsets = torch.tensor([0, *case.lens]).cumsum(0)
    if case.hostile:
        table[::2, 0] = torch.tensor(WORST)[torch.randint(len(WORST), (len(table[::2]),), generator=gen)]
        table[0, 0] = pages
        firsts[-1:] = WORST[0] if case.starts else firsts[-1:]
    typed = replace(made, int32=case.int32, mixed=case.mixed)
    table, offsets, firsts = map(typed.ints, range(3), (table, offsets, firsts))
    found = _arguments(case, cache, given, (table, offsets, firsts if case.starts else None), rows)
    return {name: latent.moved(value, torch.device(device)) for name, value in found.items()}


def _filled(case: ReadCase, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an output of arbitrary bytes; two rows belong to no request."""
    wide = columns + case.shift + 8
    whole = torch.full(((rows + 2) * wide * dtype.itemsize,), FILL, dtype=BYTE).view(dtype).view(rows + 2, wide)
    return whole[:, case.shift : case.shift + columns]


def _arguments(case: ReadCase, cache: torch.Tensor, given: dict[str, Any], where: Any, rows: int) -> dict[str, Any]:
    table, offsets, firsts = where
    dtype, form = DTYPES[case.dtype], RECORDS[case.record]
    if case.function == INDEXER:
        scales = _filled(case, rows, 1, torch.float32)[:, 0] if case.fp32_scales else _filled(case, rows, 4, BYTE)
        return {"kv_cache": cache, "dst_k": _filled(case, rows, 128, BYTE), "dst_scale": scales, "block_table": table,
                "cu_seq_lens": offsets}  # fmt: skip
    apart = 0 if form.rotated_as == "codes" else form.rotated
    columns = form.latent + apart if form.vec else case.wide
    if case.function == OWN:
        target = LatentCache(cache, case.record, scale=given["cache"].scale)
        return {"cache": target, "block_table": table, "cu_seqlens": offsets,
                "out": _filled(case, rows, columns, dtype), "seq_starts": firsts}  # fmt: skip
    if case.function == COPY:
        out = _filled(case, rows, cache.shape[2], cache.dtype)
        return {"src_cache": cache, "dst": out, "block_table": table, "cu_seq_lens": offsets,
                "batch_size": len(case.lens), "seq_starts": firsts}  # fmt: skip
    common = {"src_cache": cache, "dst": _filled(case, rows, columns, dtype), "block_table": table}
    if case.function == DEQUANT:
        requests = torch.repeat_interleave(torch.arange(len(case.lens)), torch.tensor(case.lens))
        scale = torch.full((1,), float(given["cache"].scale))
        return common | {"cu_seq_lens": offsets, "token_to_seq": requests.to(table.dtype), "num_tokens": rows,
                         "kv_cache_dtype": DTYPE_NAMES[case.record], "scale": scale, "seq_starts": firsts}  # fmt: skip
    common |= {"dst": common["dst"][:rows], "workspace_starts": offsets[:-1].clone(), "batch_size": len(case.lens)}
    return common if case.function == UPCONVERT_NVFP4 else common | {"seq_starts": firsts}


def run(case: ReadCase, given: dict[str, Any]) -> None:
    getattr(wrappers, case.function)(**given)


def outputs(given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what a call may write."""
    return {name: given[name] for name in ("out", "dst", "dst_k", "dst_scale") if name in given}


def difference(got: dict[str, Any], want: dict[str, Any], whole: bool = True) -> str:
    """Return what is wrong with the outcome of a call, given that of the reference; "" if it is right. Values that are
    no numbers have no certain bits. whole: bytes that belong to no element are compared, too."""
    wrong = []
    for name, theirs in outputs(want).items():
        ours, theirs = outputs(got)[name].cpu(), theirs.cpu()
        same = ours.contiguous().view(BYTE) == theirs.contiguous().view(BYTE)
        if theirs.dtype.is_floating_point and theirs.dtype.itemsize > 1:
            same = same.unflatten(-1, (-1, theirs.dtype.itemsize)).all(-1) | ours.isnan() & theirs.isnan()
        if not same.all():
            wrong.append(f"{name}: {int((~same).sum())} other elements")
        elif whole:
            between = [torch.empty(0, dtype=BYTE, device=t.device).set_(t.untyped_storage()).cpu().clone()
                       for t in (outputs(got)[name], outputs(want)[name])]  # fmt: skip
            for memory in between:
                own = torch.empty(0, dtype=theirs.dtype).set_(
                    memory.untyped_storage(), outputs(want)[name].storage_offset(), theirs.shape,
                    outputs(want)[name].stride(),
                )  # fmt: skip
                own.zero_()
            if not torch.equal(*between):
                wrong.append(f"{name}: bytes that belong to no element")
    return ", ".join(wrong)
