"""Refusals of the writers of caches of latent attention: nothing is written, and a message names the argument."""

import inspect
import math
import re
from contextlib import nullcontext

import pytest
import torch

import wrappers
from tests.support import good_calls, layout_calls
from tests.support.bad_values import contents
from tests.support.emulated import emulation
from tests.support.latent_rows import (
    BF16,
    BYTE,
    E4M3,
    FP16,
    QUARTER,
    WIDTHS,
    full,
    ints,
    randn,
)
from wrappers import (
    BlockTable,
    LatentCache,
    LatentQuery,
    PageLists,
    append_latent,
)
from wrappers.latent import checks, gather
from wrappers.latent.call import LatentCall
from wrappers.own.registry import made_by

# ---- refusals


def of(name, **fields):
    """Return the change of fields of an argument; a field may be a function of the old value."""

    def change(given):
        old = given[name]
        return {name: old._replace(**{f: v(getattr(old, f)) if callable(v) else v for f, v in fields.items()})}

    return change


def all_of(*changes):
    """Return a change that makes several, one after the other."""

    def change(given):
        made = {}
        for one in changes:
            made |= one(given | made) if callable(one) else one
        return made

    return change


def rows_of(record, latent, rotated=64, /, **fields):
    """Return a change to another record, without norm, query and rotated_out."""
    width = WIDTHS.get(record, latent + rotated)
    made = {
        "latent": randn(3, latent), "rotated": randn(3, rotated) if rotated else None, "norm": None, "query": None,
        "rope": None, "rotated_out": None,
    }  # fmt: skip
    return lambda given: made | {"cache": LatentCache(torch.zeros(6, 4, width, dtype=BYTE), record)._replace(**fields)}


def strided(t):
    """Return the same values, two elements apart."""
    return torch.stack([t.view(BYTE) if t.dtype == E4M3 else t] * 2, -1)[..., 0]


def meta(t):
    return t.to("meta")


def less(t):
    return t[:-1]


def narrow(t):
    return t[..., :-1]


def grad(t):
    return t.clone().requires_grad_()


def alone(**fields):
    """Return a change to the rows of an indexer alone."""
    made = {"latent": None} | dict.fromkeys(("rotated", "cache", "norm", "rope", "query", "rotated_out"))
    return lambda given: made | {"index": given["index"]._replace(**fields)}


def lists(**fields):
    good = PageLists(ints(0, 0, 2), ints(0, 1, 2), ints(0, 1, 2), ints(0, 1, 2, 3))
    return {"places": good._replace(**fields)}


def table(**fields):
    return {"places": BlockTable(ints([0, 1], [2, 3]), ints(3, 3), ints(0, 1, 3))._replace(**fields)}


def odd_cache(width, offset=0, step=None):
    """Return a cache of bytes at an offset, with `step` bytes from row to row."""
    step = step or width
    memory = torch.zeros(6 * (4 * step + 4) + offset, dtype=BYTE)
    return memory.as_strided((6, 4, width), (4 * step + 4, step, 1), offset)


SHIFTED = randn(4, 2, 64)  # three tokens from the first, and three from the second
E4M3_ROWS = rows_of("e4m3", 512, 0, cache=torch.zeros(6, 4, 512, dtype=BYTE))
BAD_TYPES = {  # beginning of a message -> what is wrong with the arguments of `full`
    "latent: list, must be a torch.Tensor": {"latent": [1]},
    "latent: dtype torch.float32, must be one of": lambda i: {"latent": i["latent"].float()},
    "rotated: list, must": {"rotated": [1]},
    "rotated: dtype torch.float32, must": lambda i: {"rotated": i["rotated"].float()},
    "rotated: dtype torch.float16, must be that of latent": lambda i: {"rotated": i["rotated"].half()},
    "rotated_out: dtype torch.float16, must be": lambda i: {"rotated_out": i["rotated_out"].half()},
    "rotated_out: list, must": {"rotated_out": [1]},
    "cache: Tensor, must be a LatentCache": lambda i: {"cache": i["cache"].cache},
    "cache: NoneType, must be a LatentCache": {"cache": None},
    "cache.cache: list, must": of("cache", cache=[1]),
    "cache.cache: dtype torch.float32, must be one of": of("cache", cache=torch.zeros(6, 4, 656)),
    "cache.cache: dtype torch.float16, must be torch.bfloat16": rows_of(
        "rows", 512, cache=torch.zeros(6, 4, 576, dtype=FP16)),
    "cache.rotated: list, must": rows_of("e4m3", 512, cache=torch.zeros(6, 4, 512, dtype=BYTE), rotated=[1]),
    "cache.rotated: dtype torch.int8, must be that of cache.cache": rows_of(
        "e4m3", 512, cache=torch.zeros(6, 4, 512, dtype=BYTE), rotated=torch.zeros(6, 4, 64, dtype=torch.int8)),
    "cache.power_of_two: 1, must be True or False": of("cache", power_of_two=1),
    "cache.scale: '1', must be a float": of("cache", scale="1"),
    "cache.scale: None, must be a float": of("cache", scale=None),
    "cache.scale: dtype torch.float64, must be torch.float32": of("cache", scale=torch.ones(1).double()),
    "index.rope: int, must be": of("index", rope=3),
    "places: list, must be a torch.Tensor, PageLists or BlockTable": {"places": [1]},
    "places: NoneType, must be": {"places": None},
    "places: dtype torch.float32, must be one of": {"places": torch.zeros(3)},
    "places.kv_indptr: NoneType, must": lists(kv_indptr=None),
    "places.kv_indices: NoneType, must": lists(kv_indices=None),
    "places.batch_indices: dtype torch.int16, must": lists(batch_indices=torch.zeros(3).short()),
    "places.positions: list, must": lists(positions=[1]),
    "places.block_table: dtype torch.float32, must": table(block_table=torch.zeros(2, 2)),
    "places.seq_lens: NoneType, must": table(seq_lens=None),
    "places.cu_seqlens_q: NoneType, must": table(cu_seqlens_q=None),
    "norm: Tensor, must be a LatentNorm": lambda i: {"norm": i["norm"].weight},
    "norm.weight: dtype torch.float32, must be torch.bfloat16": of("norm", weight=torch.ones(512)),
    "norm.eps: None, must be a float": of("norm", eps=None),
    "norm.offset: '1', must be a float": of("norm", offset="1"),
    "rope: Tensor, must be a RotaryEmbedding": {"rope": QUARTER},
    "rope.interleaved: 1, must be True or False": of("rope", interleaved=1),
    "rope.cos_sin_cache: list, must": of("rope", cos_sin_cache=[1]),
    "rope.cos_sin_cache: dtype torch.float16, must": of("rope", cos_sin_cache=QUARTER.half()),
    "rope.positions: dtype torch.float32, must": of("rope", positions=torch.zeros(3)),
    "query: Tensor, must be a LatentQuery": lambda i: {"query": i["query"].rotated},
    "query.rotated: NoneType, must": of("query", rotated=None),
    "query.rotated: dtype torch.float32, must": of("query", rotated=torch.Tensor.float),
    "query.rotated: dtype torch.float16, must be that of latent": of("query", rotated=torch.Tensor.half),
    "query.nope: list, must": of("query", nope=[1]),
    "query.nope: dtype torch.float16, must be that of latent": of("query", nope=torch.Tensor.half),
    "query.out: list, must": of("query", out=[1]),
    "query.out: dtype torch.float16, must be one of": of("query", out=torch.Tensor.half),
    "query.dtype torch.float16, must be one of": of("query", out=None, dtype=FP16),
    "query.dtype: torch.float8_e4m3fn, must be None or that of query.out": of("query", dtype=E4M3),
    "query.scale: '1', must be a float": of("query", scale="1"),
    "index: Tensor, must be": lambda i: {"index": i["index"].k},
    "index.k: list, must": of("index", k=[1]),
    "index.k: dtype torch.float32, must be one of": of("index", k=torch.Tensor.float),
    "index.k: dtype torch.float16, must be torch.bfloat16": of("index", k=torch.Tensor.half, q=None, weights=None,
                                                               q_out=None, weights_out=None, weight=None, bias=None,
                                                               weight_scale=1.0),
    "index.cache: NoneType, must": of("index", cache=None),
    "index.cache: dtype torch.bfloat16, must be one of": of("index", cache=torch.zeros(6, 4, 132).bfloat16()),
    "index.power_of_two: 1, must be True or False": of("index", power_of_two=1),
    "index.places: list, must": of("index", places=[1]),
    "index.places: dtype torch.float32, must": of("index", places=torch.zeros(3)),
    "index.weight: dtype torch.float32, must": of("index", weight=torch.ones(128)),
    "index.bias: dtype torch.float32, must": of("index", bias=torch.ones(128)),
    "index.eps: '1', must be a float": of("index", eps="1"),
    "index.rope.interleaved: 0, must be True or False": of("index", rope=lambda r: r._replace(interleaved=0)),
    "index.rope.cos_sin_cache: dtype torch.float16, must": of(
        "index", rope=lambda r: r._replace(cos_sin_cache=QUARTER.half())),
    "index.rope.positions: dtype torch.float32, must": of("index", rope=lambda r: r._replace(positions=torch.zeros(3))),
    "index.q: list, must": of("index", q=[1]),
    "index.q: dtype torch.float16, must be that of index.k": of("index", q=torch.Tensor.half),
    "index.weights: NoneType, must": of("index", weights=None),
    "index.weights: dtype torch.bfloat16, must be torch.float32": of("index", weights=torch.Tensor.bfloat16),
    "index.weights_out: dtype torch.bfloat16, must be torch.float32": of("index", weights_out=torch.Tensor.bfloat16),
    "index.q_out: dtype torch.bfloat16, must be torch.float8_e4m3fn": of("index", q_out=torch.Tensor.bfloat16),
    "index.weight_scale: '1', must be a float": of("index", weight_scale="1"),
}  # fmt: skip
BAD_VALUES = {
    "rotated: Tensor, must be None without latent": {"latent": None},
    "cache: LatentCache, must be None without latent": {"latent": None, "rotated": None},
    "norm: LatentNorm, must be None without latent": {"latent": None, "rotated": None, "cache": None},
    "rope: RotaryEmbedding, must be None without latent": lambda i: alone()(i) | {"rope": i["rope"]},
    "query: LatentQuery, must be None without latent": lambda i: alone()(i) | {"query": i["query"]},
    "rotated_out: Tensor, must be None without latent": lambda i: alone()(i) | {"rotated_out": i["rotated_out"]},
    "latent: shape (3, 1, 512), must have 2 dimensions": lambda i: {"latent": i["latent"][:, None]},
    "latent: strides (1024, 2), the last must be 1": lambda i: {"latent": strided(i["latent"])},
    "latent: layout torch.sparse_coo": lambda i: {"latent": i["latent"].to_sparse()},
    "latent: shape (3, 448), must be (3, 512)": rows_of("656", 448),
    "latent: shape (3, 512), must be (3, 448)": rows_of("584", 512),
    "latent: 512 values, 64 of them rotated apart": rows_of("528", 512),
    "latent: 448 values, 0 of them rotated apart": rows_of("288", 448, 0),
    "latent: 3 rows, must be at least the 4 of places": {"places": ints(1, 2, 3, 4)},
    "rotated: shape (3, 1, 64), must have 2 dimensions": lambda i: {"rotated": i["rotated"][:, None]},
    "rotated: shape (2, 64), must be (3, 64) (rows of latent)": lambda i: {"rotated": less(i["rotated"])},
    "rotated: strides (128, 2), the last must be 1": lambda i: {"rotated": strided(i["rotated"])},
    "rotated: device meta, must be that of latent": lambda i: {"rotated": meta(i["rotated"])},
    "rotated: shape (3, 32), must have 0 or 64 columns in record 656": rows_of("656", 512, 32),
    "rotated: shape (3, 64), must have 0 columns in record 528_fp32": rows_of("528_fp32", 512),
    "rotated: shape (3, 64), must have the 32 columns of rope.cos_sin_cache": of("rope", cos_sin_cache=QUARTER[:, :32]),
    "rotated_out: given, must be None: record 656": {"rotated": None},
    "rotated_out: given, must be None: record 528": all_of(rows_of("528", 448), {"rotated_out": randn(3, 64)}),
    "rotated_out: shape (3, 63), must be (3, 64)": lambda i: {"rotated_out": narrow(i["rotated_out"])},
    "rotated_out: strides (128, 2), the last must be 1": lambda i: {"rotated_out": strided(i["rotated_out"])},
    "rotated_out: device meta": lambda i: {"rotated_out": meta(i["rotated_out"])},
    "rotated_out: strides (0, 1) of shape (3, 64), elements must not overlap": lambda i: {
        "rotated_out": i["rotated_out"][:1].expand(3, 64)},
    "rotated_out: shape (3, 64), overlaps the memory of latent": lambda i: {"rotated_out": i["latent"][:, :64]},
    "cache.record: '999', must be one of rows, e4m3, 656": of("cache", record="999"),
    "cache.record: None, must be one of": of("cache", record=None),
    "cache.record: '132', must be one of": lambda i: rows_of("132", 128, 0)(i) | {"index": None},
    "cache.cache: shape (24, 656), must have 3 dimensions": of("cache", cache=torch.zeros(24, 656, dtype=BYTE)),
    "cache.cache: shape (6, 4, 2, 656), must have one head": of("cache", cache=torch.zeros(6, 4, 2, 656, dtype=BYTE)),
    "cache.cache: shape (6, 4, 655), must be (6, 4, 656)": of("cache", cache=narrow),
    "cache.cache: shape (6, 4, 576), must be (6, 4, 512)": all_of(
        rows_of("e4m3", 512, 0), of("cache", cache=torch.zeros(6, 4, 576, dtype=BYTE))),
    "cache.cache: device meta, must be that of latent": of("cache", cache=meta),
    "cache.cache: strides (5248, 1312, 2), the last must be 1": of("cache", cache=strided),
    "cache.cache: strides (2652, 662, 1), rows must begin at multiples of 4 bytes": of(
        "cache", cache=odd_cache(656, step=662)),
    "cache.cache: strides (2628, 656, 1), rows must begin at multiples of 4 bytes": of(
        "cache", cache=odd_cache(656, offset=2)),
    "cache.cache: strides (2340, 584, 1), rows must begin at multiples of 2 bytes": rows_of(
        "584", 448, cache=odd_cache(584, offset=1)),
    "cache.cache: strides (2348, 586, 1), rows of a page of record 584 must be dense": rows_of(
        "584", 448, cache=odd_cache(584, step=586)),
    "cache.cache: strides (2332, 584, 1), rows of a page of record 584 must be dense": rows_of(
        "584", 448, cache=torch.zeros(20000, dtype=BYTE).as_strided((6, 4, 584), (2332, 584, 1))),
    "cache.cache: strides (0, 656, 1) of shape (6, 4, 656), elements must not overlap": of(
        "cache", cache=lambda t: t[:1].expand(6, 4, 656)),
    "cache.rotated: given, must be None: record 656 has both parts": of("cache", rotated=torch.zeros(6, 4, 64)),
    "cache.rotated: shape (6, 4, 32), must be (6, 4, 64)": rows_of(
        "e4m3", 512, cache=torch.zeros(6, 4, 512, dtype=BYTE), rotated=torch.zeros(6, 4, 32, dtype=BYTE)),
    "cache.rotated: shape (5, 4, 64), must be (6, 4, 64)": rows_of(
        "e4m3", 512, cache=torch.zeros(6, 4, 512, dtype=BYTE), rotated=torch.zeros(5, 4, 64, dtype=BYTE)),
    "cache.rotated: shape (6, 4, 64), must be (6, 4, 0)": all_of(
        E4M3_ROWS, of("cache", rotated=torch.zeros(6, 4, 64, dtype=BYTE))),
    "cache.rotated: strides (512, 128, 2), the last must be 1": rows_of(
        "e4m3", 512, cache=torch.zeros(6, 4, 512, dtype=BYTE), rotated=strided(torch.zeros(6, 4, 64, dtype=BYTE))),
    "cache.rotated: shape (6, 4, 64), overlaps the memory of cache.cache": all_of(
        rows_of("e4m3", 512, cache=torch.zeros(6, 4, 512, dtype=BYTE)),
        lambda i: of("cache", rotated=i["cache"].cache[..., :64])(i)),
    "cache.record: ['656'], must be one of": of("cache", record=["656"]),
    "rope.scale: Tensor, must be 1.0": of("rope", scale=torch.ones(2)),
    "cache.scale: 0.5, must be 1.0 with record 656": of("cache", scale=0.5),
    "query.scale: 0.5, must be 1.0 for a query of 16 bits": of("query", scale=0.5),
    "index.weight_scale: 0.3, must be 1.0 without index.q": of(
        "index", q=None, weights=None, q_out=None, weights_out=None),
    "cache.scale: 0.0, must be positive": of("cache", scale=0.0),
    "cache.scale: nan, must be positive": of("cache", scale=math.nan),
    "cache.scale: shape (2,), must have one element": of("cache", scale=torch.ones(2)),
    "places: shape (3, 1), must have 1 dimensions": {"places": torch.zeros(3, 1).long()},
    "places: strides (2,), the last must be 1": {"places": strided(torch.tensor([5, -1, 9]))},
    "places: device meta, must be that of latent": lambda i: {"places": meta(i["places"])},
    "places.batch_indices: shape (2,), must be (3,)": lists(batch_indices=ints(0, 0)),
    "places.positions: shape (2,), must be (3,)": lists(positions=ints(0, 0)),
    "places.kv_indptr: shape (0,), must have at least 1 element": lists(kv_indptr=ints()),
    "places.kv_indices: shape (3, 1), must have 1 dimensions": lists(kv_indices=ints([0], [1], [2])),
    "places.block_table: shape (2,), must have 2 dimensions": table(block_table=ints(0, 1)),
    "places.cu_seqlens_q: shape (2,), must be (3,)": table(cu_seqlens_q=ints(0, 3)),
    "places.seq_lens: shape (3,), must be (2,)": table(seq_lens=ints(3, 3, 3)),
    "places.seq_lens: device meta, must be": table(seq_lens=meta(ints(3, 3))),
    "norm.weight: shape (511,), must be (512,) or (576,)": of("norm", weight=narrow),
    "norm.weight: shape (576,), must be (512,)": all_of(of("norm", weight=randn(576)), {"rotated": None,
                                                                                         "rotated_out": None}),
    "norm.weight: shape (1, 512), must have 1 dimensions": of("norm", weight=lambda t: t[None]),
    "norm.weight: strides (2,), the last must be 1": of("norm", weight=strided),
    "norm.eps: -1.0, must be at least 0": of("norm", eps=-1.0),
    "norm.eps: inf, must be finite": of("norm", eps=math.inf),
    "norm.offset: nan, must be finite": of("norm", offset=math.nan),
    "rope.rotary_dim: 64, must be None": of("rope", rotary_dim=64),
    "rope.scale: 2.0, must be 1.0": of("rope", scale=2.0),
    "rope.theta: 500000.0, must be 10000.0": of("rope", theta=5e5),
    "rope.llama31: (1.0, 4.0, 8192), must be None": of("rope", llama31=(1.0, 4.0, 8192)),
    "rope.cos_sin_cache: shape (0, 64), must have rows": of("rope", cos_sin_cache=QUARTER[:0]),
    "rope.cos_sin_cache: shape (64,), must have 2 dimensions": of("rope", cos_sin_cache=QUARTER[0]),
    "rope.cos_sin_cache: strides (128, 2), the last must be 1": of("rope", cos_sin_cache=strided),
    "rope.cos_sin_cache: device meta, must be that of latent": of("rope", cos_sin_cache=meta),
    "rope.positions: None, required with rope.cos_sin_cache": of("rope", positions=None),
    "rope.positions: shape (2,), must be (3,)": of("rope", positions=less),
    "rope.positions: device meta, must be": of("rope", positions=meta),
    "query.rotated: shape (3, 64), must have 3 dimensions": of("query", rotated=lambda t: t[:, 0]),
    "query.rotated: shape (2, 2, 64), must be (3, 2, 64) (rows of latent)": of("query", rotated=less),
    "query.rotated: shape (3, 2, 62), must have the 64 columns": of("query", rotated=lambda t: t[..., :62], out=None),
    "query.rotated: strides (256, 128, 2), the last must be 1": of("query", rotated=strided),
    "query.rotated: device meta, must be that of latent": of("query", rotated=meta),
    "query.nope: shape (3, 512), must have 3 dimensions": of("query", nope=lambda t: t[:, 0]),
    "query.nope: shape (2, 2, 512), must be (3, 2, 512)": of("query", nope=less, out=None),
    "query.nope: shape (3, 1, 512), must be (3, 2, 512)": of("query", nope=lambda t: t[:, :1], out=None),
    "query.nope: strides (2048, 1024, 2), the last must be 1": of("query", nope=strided),
    "query.out: shape (3, 2, 575), must be (3, 2, 576)": of("query", out=narrow),
    "query.out: shape (3, 1152), must have 3 dimensions": of("query", out=lambda t: t.flatten(1)),
    "query.out: strides (2304, 1152, 2), the last must be 1": of("query", out=strided),
    "query.out: strides (1152, 0, 1) of shape (3, 2, 576), elements must not overlap": of(
        "query", out=lambda t: t[:, :1].expand(3, 2, 576)),
    "query.out: shape (3, 2, 64), overlaps the memory of query.rotated": {
        "query": LatentQuery(None, SHIFTED[:3], SHIFTED[1:])},
    "query.scale: -1.0, must be positive": of("query", scale=-1.0),
    "query.scale: shape (2,), must have one element": of("query", scale=torch.ones(2)),
    "index.k: shape (2, 128), must be (3, 128) (rows of latent)": of("index", k=less),
    "index.k: shape (3, 64), must be (3, 128)": of("index", k=lambda t: t[:, :64]),
    "index.k: shape (3, 1, 128), must have 2 dimensions": of("index", k=lambda t: t[:, None]),
    "index.k: strides (256, 2), the last must be 1": of("index", k=strided),
    "index.k: device meta, must be that of latent": of("index", k=meta),
    "index.k: 3 rows, must be at least the 4 of index.places": of("index", places=ints(1, 2, 3, 4)),
    "index.cache: shape (6, 4, 128), must be (6, 4, 132)": of("index", cache=lambda t: t[..., :128]),
    "index.cache: shape (6, 4, 2, 132), must have one head": of("index", cache=torch.zeros(6, 4, 2, 132, dtype=BYTE)),
    "index.cache: strides (548, 136, 1), rows of a page of record 132 must be dense": of(
        "index", cache=odd_cache(132, step=136)),
    "index.cache: strides (532, 132, 1), rows must begin at multiples of 4 bytes": of(
        "index", cache=odd_cache(132, offset=2)),
    "index.cache: shape (3, 4, 132), overlaps the memory of cache.cache": all_of(
        of("cache", cache=torch.zeros(6, 4, 656, dtype=BYTE)),
        lambda i: of("index", cache=i["cache"].cache.flatten()[: 12 * 132].view(3, 4, 132))(i)),
    "index.places: shape (3, 1), must have 1 dimensions": of("index", places=lambda t: t[:, None]),
    "index.weight: shape (64,), must be (128,)": of("index", weight=lambda t: t[:64]),
    "index.bias: shape (64,), must be (128,)": of("index", bias=lambda t: t[:64]),
    "index.bias: given, must be None without index.weight": of("index", weight=None),
    "index.eps: -1.0, must be at least 0": of("index", eps=-1.0),
    "index.rope.theta: 500000.0, must be 10000.0": of("index", rope=lambda r: r._replace(theta=5e5)),
    "index.rope.cos_sin_cache: shape (9, 48), must have rows, of 16, 32, 64, 128 values": of(
        "index", rope=lambda r: r._replace(cos_sin_cache=QUARTER[:, :48])),
    "index.rope.positions: None, required with index.rope.cos_sin_cache": of(
        "index", rope=lambda r: r._replace(positions=None)),
    "index.rope.positions: shape (2,), must be (3,)": of("index", rope=lambda r: r._replace(positions=ints(1, 2))),
    "index.q: shape (3, 128), must have 3 dimensions": of("index", q=lambda t: t[:, 0]),
    "index.q: shape (2, 4, 128), must be (3, 4, 128)": of("index", q=less),
    "index.q: shape (3, 4, 64), must be (3, 4, 128)": of("index", q=lambda t: t[..., :64], q_out=None),
    "index.q: strides (1024, 256, 2), the last must be 1": of("index", q=strided),
    "index.weights: given, must be None without index.q": of("index", q=None),
    "index.q_out: given, must be None without index.q": of("index", q=None, weights=None),
    "index.weights_out: given, must be None without index.q": of("index", q=None, weights=None, q_out=None),
    "index.weights: shape (3,), must have 2 dimensions": of("index", weights=lambda t: t[:, 0]),
    "index.weights: shape (3, 3), must be (3, 4)": of("index", weights=narrow),
    "index.weights_out: shape (2, 4), must be (3, 4)": of("index", weights_out=less),
    "index.weights_out: shape (3, 4), overlaps the memory of index.weights": lambda i: of(
        "index", weights_out=i["index"].weights)(i),
    "index.q_out: shape (3, 3, 128), must be (3, 4, 128)": of("index", q_out=lambda t: t[:, :3]),
    "index.weight_scale: inf, must be finite": of("index", weight_scale=math.inf),
}  # fmt: skip
BAD_OTHERS = {
    NotImplementedError: {
        "rope.cos_sin_cache: None, must be a table": of("rope", cos_sin_cache=None),
        "index.rope.cos_sin_cache: None, must be a table": of("index", rope=lambda r: r._replace(cos_sin_cache=None)),
    },
    RuntimeError: {  # there is no backward
        "latent: requires grad": lambda i: {"latent": grad(i["latent"])},
        "norm.weight: requires grad": of("norm", weight=grad),
        "rope.cos_sin_cache: requires grad": of("rope", cos_sin_cache=grad),
        "query.nope: requires grad": of("query", nope=grad),
        "query.out: requires grad": of("query", out=grad),
        "index.k: requires grad": of("index", k=grad),
        "index.weights: requires grad": of("index", weights=grad),
    },
}  # fmt: skip


def refused(kind, message, function, make, change):
    """A call is refused on the CPU and where a kernel has no plan yet, or that of the good call. Nothing is written."""
    good = make()
    given = good | (change(good) if callable(change) else change)
    before = contents(given)
    for host in ("cpu", "new", "known"):
        with (nullcontext if host == "cpu" else emulation)() as machine:
            if host == "known":
                function(**make())
            count = len(machine.launches) if machine else 0
            assert not machine or count == (host == "known")
            with pytest.raises(kind, match=f"^{re.escape(message)}"):
                function(**given)
            assert not machine or len(machine.launches) == count
    assert contents(given) == before


REFUSED = [
    pytest.param(kind, message, change, id=message)
    for kind, group in ((TypeError, BAD_TYPES), (ValueError, BAD_VALUES), *BAD_OTHERS.items())
    for message, change in group.items()
]


@pytest.mark.parametrize("kind,message,change", REFUSED)
def test_refusals(kind, message, change):
    refused(kind, message, append_latent, full, change)


def only_index():
    """Return arguments that write the rows of an indexer alone."""
    return full() | alone()(full())


BAD_ALONE = {  # there are no places of a latent beside those of the indexer
    "places: list, must be a torch.Tensor, PageLists or BlockTable": {"places": [1]},
    "places: dtype torch.float32, must be one of": all_of(of("index", places=None), {"places": torch.zeros(3)}),
    "index.places: dtype torch.float32, must be one of": of("index", places=torch.zeros(3)),
    "index.k: 3 rows, must be at least the 4 of index.places": of("index", places=ints(1, 2, 3, 4)),
    "index.cache: device meta, must be that of index.k": of("index", cache=meta),
    "index.weight: device meta, must be that of index.k": of("index", weight=meta),
    "index.q: dtype torch.float16, must be that of index.k": of("index", q=torch.Tensor.half),
    "index.rope.positions: shape (2,), must be (3,)": of("index", rope=lambda r: r._replace(positions=ints(1, 2))),
    "index.k: requires grad": of("index", k=grad),
    "index.q_out: requires grad": lambda i: of("index", q_out=i["index"].q_out.detach().requires_grad_())(i),
    "index.weights_out: strides (0, 1) of shape (3, 4), elements must not overlap": of(
        "index", weights_out=lambda t: t[:1].expand(3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("message", [*BAD_ALONE])
def test_refusals_of_an_indexer_alone(message):
    refused((TypeError, ValueError, RuntimeError), message, append_latent, only_index, BAD_ALONE[message])


CONCAT, FUSED, PAGED = "concat_and_cache_mla", "concat_and_cache_mla_rope_fused", "append_paged_mla_kv_cache"
JOIN, INDEXER = "concat_mla_q", "indexer_k_quant_and_cache"


def other(name, change):
    """Return a change of one argument."""
    return lambda given: {name: change(given[name]) if callable(change) else change}


MORE_SLOTS = {"slot_mapping": ints(0, 1, 2, 3)}
BAD_ELSEWHERE = [  # function, error, beginning of the message, change; names that differ from those of `append_latent`
    (CONCAT, TypeError, "kv_c: dtype torch.float32, must", other("kv_c", torch.Tensor.float)),
    (CONCAT, ValueError, "kv_c: shape (3, 448), must be (3, 512)", other("kv_c", lambda t: t[:, :448])),
    (CONCAT, ValueError, "kv_c: 3 rows, must be at least the 4 of slot_mapping", MORE_SLOTS),
    (CONCAT, TypeError, "k_pe: dtype torch.float16, must be that of kv_c", other("k_pe", torch.Tensor.half)),
    (CONCAT, ValueError, "k_pe: shape (3, 2, 32), must have 2", other("k_pe", lambda t: t.view(3, 2, 32))),
    (CONCAT, ValueError, "k_pe: shape (2, 64), must be (3, 64)", other("k_pe", less)),
    (CONCAT, ValueError, "kv_cache: shape (6, 4, 655), must be (6, 4, 656)", other("kv_cache", narrow)),
    (CONCAT, TypeError, "slot_mapping: dtype torch.float32, must", other("slot_mapping", torch.zeros(3))),
    (CONCAT, TypeError, "scale: None, must be a float", other("scale", None)),
    (CONCAT, ValueError, "scale: shape (2,), must have one", other("scale", torch.ones(2))),
    (CONCAT, TypeError, "skip_scale: 1, must be True or False", {"skip_scale": 1}),
    (CONCAT, NotImplementedError, "skip_scale: True, not supported", {"skip_scale": True}),
    (CONCAT, ValueError, "kv_cache: shape (6, 4, 656), overlaps the memory of kv_c", lambda i: {
        "kv_c": i["kv_cache"].flatten()[:3072].view(BF16).view(3, 512)}),
    *((name, error, f"kv_cache_dtype: {bad!r}, must be one of auto", {"kv_cache_dtype": bad})
      for name in (CONCAT, FUSED) for error in (KeyError, ValueError) for bad in ("fp8_e5m2", None, ["auto"])),
    (FUSED, ValueError, "positions: shape (2,), must be (3,)", other("positions", less)),
    (FUSED, TypeError, "positions: NoneType, must", other("positions", None)),
    (FUSED, TypeError, "q_pe: NoneType, must", other("q_pe", None)),
    (FUSED, ValueError, "q_pe: shape (3, 2, 32), must have the 64 columns", other("q_pe", lambda t: t[..., :32])),
    (FUSED, ValueError, "q_pe: strides (64, 0, 1) of shape (3, 2, 64), elements must not overlap", other(
        "q_pe", lambda t: t[:, 0].contiguous()[:, None].expand(3, 2, 64))),
    (FUSED, ValueError, "k_pe: shape (3, 64), overlaps the memory of kv_c", lambda i: {"k_pe": i["kv_c"][:, :64]}),
    (FUSED, ValueError, "cos_sin_cache: shape (0, 64), must have rows", other("cos_sin_cache", lambda t: t[:0])),
    (FUSED, TypeError, "cos_sin_cache: dtype torch.float16, must", other("cos_sin_cache", torch.Tensor.half)),
    (FUSED, TypeError, "is_neox: 1, must be True or False", {"is_neox": 1}),
    (FUSED, TypeError, "kv_cache_scale: None, must be a float", other("kv_cache_scale", None)),
    (FUSED, ValueError, "kv_c: 3 rows, must be at least the 4 of slot_mapping", MORE_SLOTS),
    (JOIN, TypeError, "ql_nope: dtype torch.float32, must", other("ql_nope", torch.Tensor.float)),
    (JOIN, TypeError, "q_pe: dtype torch.float16, must be that of ql_nope", other("q_pe", torch.Tensor.half)),
    (JOIN, ValueError, "ql_nope: shape (3, 1, 512), must be (3, 2, 512)", other("ql_nope", lambda t: t[:, :1])),
    (JOIN, ValueError, "q_out: shape (3, 2, 575), must be (3, 2, 576)", other("q_out", narrow)),
    (JOIN, ValueError, "q_out: shape (3, 1, 576), must be (3, 2, 576)", other("q_out", lambda t: t[:, :1])),
    (JOIN, TypeError, "q_out: NoneType, must be a torch.Tensor", other("q_out", None)),
    (JOIN, ValueError, "q_out: shape (3, 2, 576), overlaps the memory of q_pe", lambda i: {
        "q_pe": i["q_out"][..., :64]}),
    (JOIN, RuntimeError, "q_pe: requires grad", other("q_pe", grad)),
    (INDEXER, TypeError, "k: dtype torch.float32, must", other("k", torch.Tensor.float)),
    (INDEXER, ValueError, "k: shape (3, 64), must be (3, 128)", other("k", lambda t: t[:, :64])),
    (INDEXER, ValueError, "k: 3 rows, must be at least the 4 of slot_mapping", MORE_SLOTS),
    (INDEXER, ValueError, "kv_cache: shape (6, 4, 131), must be (6, 4, 132)", other("kv_cache", narrow)),
    (INDEXER, TypeError, "kv_cache_dtype: None, must be a str", {"kv_cache_dtype": None}),
    (INDEXER, NotImplementedError, "kv_cache_dtype: 'mxfp8', not supported", {"kv_cache_dtype": "mxfp8"}),
    (INDEXER, TypeError, "quant_block_size: 128.0, must be an int", {"quant_block_size": 128.0}),
    (INDEXER, NotImplementedError, "quant_block_size: 64, must be 128", {"quant_block_size": 64}),
    (PAGED, TypeError, "append_ckv: dtype torch.float32, must", other("append_ckv", torch.Tensor.float)),
    (PAGED, TypeError, "append_kpe: dtype torch.float16, must be that of append_ckv", other(
        "append_kpe", torch.Tensor.half)),
    (PAGED, ValueError, "ckv_cache: shape (6, 4, 511), must be (6, 4, 512)", other("ckv_cache", narrow)),
    (PAGED, TypeError, "kpe_cache: dtype torch.float16, must be that of ckv_cache", other(
        "kpe_cache", torch.Tensor.half)),
    (PAGED, ValueError, "kpe_cache: shape (5, 4, 64), must be (6, 4, 64)", other("kpe_cache", less)),
    (PAGED, ValueError, "batch_indices: shape (2,), must be (3,)", other("batch_indices", less)),
    (PAGED, TypeError, "kv_indptr: NoneType, must", other("kv_indptr", None)),
    (PAGED, ValueError, "kv_last_page_len: shape (9,), must be", other("kv_last_page_len", torch.zeros(9).int())),
]  # fmt: skip


@pytest.mark.parametrize("name,kind,message,change", BAD_ELSEWHERE)
def test_refusals_of_other_functions(name, kind, message, change):
    refused(kind, message, getattr(wrappers, name), lambda: good_calls.latent(name), change)


@pytest.mark.parametrize("latent,rotated", [(24, 64), (528, 64), (512, 66), (512, 5)])
def test_sizes_without_a_kernel(latent, rotated):
    """NotImplementedError says the size. Nothing is written."""
    ckv, kpe = torch.zeros(1, 4, latent).half(), torch.zeros(1, 4, rotated).half()
    rows, pe = torch.ones(2, latent).half(), torch.ones(2, rotated).half()
    wrong = f"latent {latent}: must be a multiple of 16, at most 512"
    wrong = f"rotated {rotated}: must be even, at most 64" if rotated != 64 else wrong
    calls = (
        lambda: append_latent(rows, pe, LatentCache(ckv, rotated=kpe), ints(0, 1)),
        lambda: append_latent(rows, None, LatentCache(ckv), ints(0, 1), query=LatentQuery(rows[:, None], pe[:, None])),
        lambda: wrappers.concat_mla_q(ckv, kpe, torch.zeros(1, 4, latent + rotated).half()),
    )
    with emulation() as machine:
        for call in calls:
            with pytest.raises(NotImplementedError, match=re.escape(wrong)):
                call()
    assert not machine.launches and not ckv.any() and not kpe.any()


@pytest.mark.parametrize("nope,rotated", [(24, 64), (512, 5)])
def test_sizes_of_a_query_without_a_kernel(nope, rotated):
    """Rows that a kernel serves do not hide sizes of their query that none does."""
    query = LatentQuery(randn(2, 1, nope), randn(2, 1, rotated), dtype=E4M3)
    cache = LatentCache(torch.zeros(1, 4, 656, dtype=BYTE), "656")
    with emulation(), pytest.raises(NotImplementedError, match=f"{nope}|{rotated}: must be"):
        append_latent(randn(2, 512), randn(2, 64), cache, ints(0, 1), query=query)


# ---- names


def calls_in(made):
    """Yield the calls of latent caches in what a function of `registry` makes, those of an indexer's rows too."""
    if isinstance(made, LatentCall | gather.GatherCall):
        yield made
    if isinstance(made, LatentCall):
        yield from calls_in(made.index)
    elif isinstance(made, tuple) and not isinstance(made, gather.GatherCall):
        for each in made:
            yield from calls_in(each)


def test_every_tensor_has_the_name_of_an_argument():
    """A field that `NAMES` lacks is called by its own name, which must be an argument of the function, too."""
    alone, seen = dict.fromkeys(("latent", "rotated", "cache")), set()
    alone |= {"index": layout_calls.indexer()._replace(places=None), "places": layout_calls.SLOTS}
    calls = [(name, make()) for (name, _), make in layout_calls.CALLS.items() if name in good_calls.NAMES]
    for name, given in [*calls, ("append_latent", alone)]:
        function = layout_calls.FUNCTION[name]
        for call in calls_in(made_by(function, **given)):
            module = checks if isinstance(call, LatentCall) else gather
            seen.add(call.function)
            for field in call._fields:
                if isinstance(getattr(call, field), torch.Tensor):
                    argument = re.split(r"[. ]", module.name_of(call, field))[0]
                    assert argument in inspect.signature(function).parameters, (name, field)
    assert seen == {*checks.NAMES, *gather.NAMES}
