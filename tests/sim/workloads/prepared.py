"""Small calls of kernels that write rows, as functions of attention make them before their own launch."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from ptxsim.runner import RunResult

from bench.cases import cache_write as cases
from bench.cases.cache_write import CacheWriteCase
from cute_kernels.cache_write.args import FROM_FIRST, INTERLEAVED
from cute_kernels.cache_write.spec import CacheWriteSpec
from wrappers import nvfp4_dequantize
from wrappers.attention import rope
from wrappers.attention.call import AttentionCall, Rope, SequenceBatch
from wrappers.cache_write.call import PAGES, ROWS, CacheWriteCall, QueryTransform
from wrappers.cache_write.checks import KVCACHE
from wrappers.cache_write.op import serve
from wrappers.host import machine
from wrappers.host.machine import HostMachine, override

from .common import SMS, Outcome, SimulatedMachine, outcome


@dataclass(frozen=True)
class GatherCase:
    """An attention call with rotary embedding, of which Q and K are rotated. form: "table", "csr" or "ragged". queries,
    keys: of each request. heads: of Q and of K. separate: V has pages of its own. hostile: some values of index tensors
    are extreme."""

    form: str
    page_size: int = 1
    dim: int = 64
    layout: str = "NHD"
    queries: tuple[int, ...] = (3, 0, 5)
    keys: tuple[int, ...] = (9, 1, 4)
    heads: tuple[int, int] = (4, 2)
    separate: bool = False
    hostile: bool = False
    theta: float = 1e4


@dataclass(frozen=True)
class KeyAppendCase:
    """Rows that `flash_attn_with_kvcache` appends and rotates. old, counts: keys of each request before, and new ones.
    heads: of Q and of K. rotary_dim: 0 for no rotation. queries: Q has a launch of its own, which writes no K."""

    counts: tuple[int, ...] = (2, 2, 2)
    old: tuple[int, ...] = (5, 0, 11)
    page_size: int = 4
    dim: int = 64
    heads: tuple[int, int] = (4, 2)
    rotary_dim: int = 64
    interleaved: bool = True
    queries: bool = False
    hostile: bool = False


@dataclass(frozen=True)
class DequantizeCase:
    """Codes and scale factors of a tensor of `shape`. scale: the global scale; given in a tensor if `in_tensor` is set.
    strided: codes and factors are not contiguous. shift: bytes by which both are off an aligned address."""

    shape: tuple[int, ...]
    scale: float = 1.0
    in_tensor: bool = False
    strided: bool = False
    shift: int = 0


@dataclass(frozen=True)
class PreparedScenario:
    """Calls, one after the other. Bytes that no row is written to must stay equal."""

    name: str
    calls: "tuple[GatherCase | KeyAppendCase | DequantizeCase, ...]"


def key_append_cases() -> list[PreparedScenario]:
    """Return problems of a kernel that transforms rows of 16 bits."""
    base = KeyAppendCase()
    calls = (
        base,
        replace(base, counts=(3, 0, 1), interleaved=False, dim=128, rotary_dim=96, page_size=16),
        replace(base, rotary_dim=16, dim=80, heads=(2, 1), interleaved=False),
        replace(base, heads=(0, 2), rotary_dim=0),
        replace(base, queries=True, heads=(3, 1), interleaved=False),
        replace(base, counts=(5, 0, 9), hostile=True),
    )
    return [PreparedScenario("keys", calls)]


def gather_cases() -> list[PreparedScenario]:
    """Return problems of a kernel that rotates Q and K of attention calls."""
    tables = (
        GatherCase("table", 4, 128, separate=True),
        GatherCase("table", 16, 16, "HND", heads=(3, 1), keys=(20, 0, 2)),
        GatherCase("table", 5, 256, heads=(2, 2), queries=(2, 2, 2), theta=500.0),
        GatherCase("table", 4, 64, hostile=True),
    )
    lists = (
        GatherCase("csr", 1, 64, "HND"),
        GatherCase("csr", 5, 192, heads=(2, 1)),
        GatherCase("csr", 4, 64, hostile=True),
        GatherCase("ragged", 1, 128),
        GatherCase("ragged", 1, 64, hostile=True),
    )
    return [PreparedScenario("tables", tables), PreparedScenario("lists", lists)]


def dequantize_cases() -> list[PreparedScenario]:
    """Return problems of the kernel that dequantises: scales that it divides by with and without the slow path."""
    usual = (
        DequantizeCase((16,)),
        DequantizeCase((257, 16), 300.0, True),
        DequantizeCase((3, 5, 7, 48), 1 / 3, strided=True),
        DequantizeCase((33, 1040), 6e3, shift=1),
    )
    scales = (2.0**-64, 2.0**64, 2.0**-65, 2.0**65, 3e38, 1e-39, 1e-45, 0.0, -0.7, math.inf, math.nan)
    slow = tuple(DequantizeCase((257, 16), scale, True) for scale in scales)
    return [PreparedScenario("usual scales", usual), PreparedScenario("any scales", slow)]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_call(case: GatherCase, dtype: str) -> AttentionCall:
    """Return the call of a case. Q is a view of a wider tensor; one page id is outside the cache."""
    gen, size, kind = torch.Generator().manual_seed(0), case.page_size, cases.DTYPES[dtype]
    batch, counts = len(case.keys), [-(-n // size) for n in case.keys]
    offsets = torch.tensor([0, *case.queries]).cumsum(0).int()
    q = torch.randn(sum(case.queries), case.heads[0], case.dim + 8, generator=gen).to(kind)[..., : case.dim]
    pages, columns = sum(counts) + 1, max(counts) + 1
    ids = torch.randperm(pages, generator=gen).int()
    starts = torch.tensor([0, *(case.keys if case.form == "ragged" else counts)]).cumsum(0).int()
    lens = ints(*case.keys) if case.form == "table" else ints(*((n - 1) % size + 1 for n in case.keys))
    if case.form == "table":
        table = torch.full((batch, 2, columns), -1, dtype=torch.int32)
        for b, count in enumerate(counts):
            table[b, :, :count] = ids[int(starts[b]) :][:count]
        table[:, 1] += int(case.separate)
        table[0, 0, 1] = pages
    else:
        table = torch.cat([ids[:-1], ints(-3)])[None, None].expand(1, 2, -1)
    if case.form == "ragged":
        table, lens, pages, size = torch.empty(1, 2, 0, dtype=torch.int32), ints(), 1, sum(case.keys) + 2
    given = None if case.form == "table" else starts
    if case.hostile:
        offsets, lens = cases.spoil(offsets, gen), cases.spoil(lens, gen)
        table = table if case.form == "ragged" else cases.spoil(table[:, :1], gen).expand_as(table)
        given = None if given is None else cases.spoil(given, gen)
    inner = (size, case.heads[1]) if case.layout == "NHD" else (case.heads[1], size)
    k = torch.randn(pages, *inner, case.dim + 16, generator=gen).to(kind)[..., 16:]
    k = k.transpose(1, 2) if case.layout == "NHD" else k
    equal = len(set(case.queries)) == 1
    requests = SequenceBatch(table, lens, None if equal else offsets, batch, None, False, given, case.form)
    by = Rope(2.0, case.theta)
    return AttentionCall("", q, k, k, requests, max(case.queries), scale=1.0, rope=by)


def rotation_of(case: GatherCase, dtype: str, device: Any) -> tuple[Callable[[], None], Any]:
    """Return a function that rotates Q and K of a call, and the poisoned tensors that it writes."""
    call = cases.copied(make_call(case, dtype), device)
    out = rope.new_tensors(call)
    for t in out:
        t.view(torch.uint8).fill_(cases.POISON)
    return lambda: rope.rotate(call, call.rope, out), out


def append_of(case: KeyAppendCase, dtype: str, device: Any) -> tuple[Callable[[], None], Any]:
    """Return a function that appends rows, and the poisoned tensors that it writes. Some positions have no row in the
    tables of cosines and sines."""
    gen, kind, size = torch.Generator().manual_seed(1), cases.DTYPES[dtype], case.page_size
    batch, tokens, (hq, h) = len(case.counts), sum(case.counts), case.heads
    columns = -(-(max(case.old) + max(case.counts)) // size)
    table = torch.randperm(batch * columns, generator=gen).int().view(batch, columns)
    starts, lens = torch.tensor([0, *case.counts]).cumsum(0).int(), ints(*case.old)
    if case.hostile:
        starts[0], starts[-1] = -cases.FAR, cases.FAR
        lens, table = (cases.spoil(t, gen) for t in (lens, table))
    packed = torch.randn(tokens, hq + 2 * h, case.dim, generator=gen).to(kind)
    q, k, v = packed.split([hq, h, h], 1)
    caches = [cases.poisoned(batch * columns, size, h, case.dim, dtype=kind, device="cpu") for _ in range(2)]
    angle = torch.rand(max(case.old) + 2, case.rotary_dim // 2, generator=gen) * 6
    out, total = cases.poisoned(tokens, hq, case.dim, dtype=kind, device="cpu"), torch.full((batch,), 99).int()
    transform = QueryTransform(rope=FROM_FIRST | (INTERLEAVED if case.interleaved else 0), kv_lens_out=total)
    if case.rotary_dim:
        transform = transform._replace(rope_cos=angle.cos().to(kind), rope_sin=angle.sin().to(kind))
    if hq:
        transform = transform._replace(q=q, q_out=out)
    where: Any = dict(cu_seqlens=starts, kv_lens=lens, transform=transform)
    call = CacheWriteCall(KVCACHE, k, v, caches[0], caches[1], True, PAGES, page_table=table, **where)
    if case.queries:
        none, cache = q[:, :0], q[None, :, :0]
        call = CacheWriteCall(KVCACHE, none, none, cache, cache, True, ROWS, **where)
    given = cases.copied(call, device)
    return lambda: serve(given), (given.k_cache, given.v_cache, given.transform.q_out, given.transform.kv_lens_out)


def dequantized_of(case: DequantizeCase, device: Any) -> tuple[Callable[[], None], Any]:
    """Return a function that dequantises a tensor, and the poisoned tensor that it fills. NaN becomes a number there,
    so that bytes can be compared."""
    gen = torch.Generator().manual_seed(math.prod(case.shape))

    def drawn(each: int) -> torch.Tensor:
        shape = (*case.shape[:-1], (1 + case.strided) * case.shape[-1] // each)
        found = torch.randint(256, (math.prod(shape) + case.shift,), generator=gen).to(torch.uint8)
        return found[case.shift :].view(shape)[..., : case.shape[-1] // each]

    out, tensor = cases.poisoned(*case.shape, dtype=torch.float32, device="cpu"), torch.tensor([case.scale])
    data, sf, tensor, out = cases.copied((drawn(2), drawn(16), tensor, out), device)

    def run() -> None:
        if machine.current.device_info(data.device) is None:
            found = nvfp4_dequantize(data, sf) / tensor
        else:
            found = nvfp4_dequantize(data, sf, tensor if case.in_tensor else case.scale)
        out.copy_(found.nan_to_num(77.0, math.inf, -math.inf))

    return run, out


def prepared(
    case: GatherCase | KeyAppendCase | DequantizeCase, dtype: str, device: Any = "cpu"
) -> tuple[Callable[[], None], Any]:
    """Return a function that makes a call, and the poisoned tensors that it writes."""
    if isinstance(case, DequantizeCase):
        return dequantized_of(case, device)
    return rotation_of(case, dtype, device) if isinstance(case, GatherCase) else append_of(case, dtype, device)


def compared(case: GatherCase | KeyAppendCase | DequantizeCase, dtype: str) -> CacheWriteCase:
    """Return a case of which `cases.difference` allows what the results of a call may differ by."""
    return CacheWriteCase(dtype, dtype, rope="" if isinstance(case, DequantizeCase) else "angles")


def run_prepared(spec: CacheWriteSpec, case: PreparedScenario, arch: str, **how: Any) -> Outcome:
    launches: list[RunResult] = []
    simulated = SimulatedMachine(arch, launches, SMS, spec, how)

    def run_call(one: GatherCase | KeyAppendCase | DequantizeCase) -> tuple[float, list[torch.Tensor]]:
        (run, out), (expect, wanted) = (prepared(one, spec.dtype) for _ in range(2))
        with override(HostMachine()):
            expect()
        with override(simulated):
            run()
        return cases.difference(compared(one, spec.dtype), out, wanted), cases.storages(out)

    return outcome(case.calls, run_call, launches)
