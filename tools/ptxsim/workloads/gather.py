"""Small attention calls with rotary embedding, of which a kernel that writes rows rotates Q and K before the launch."""

import hashlib
import time
from dataclasses import dataclass
from typing import Any

import torch

from bench.cases import cache_write as cases
from bench.cases.cache_write import CacheWriteCase
from cute_kernels.cache_write.spec import CacheWriteSpec
from wrappers.attention import rope
from wrappers.attention.call import AttentionCall, Rope, SequenceBatch
from wrappers.machine import HostMachine, override

from ..run import RunResult
from .common import SMS, Outcome, SimulatedMachine


@dataclass(frozen=True)
class GatherCase:
    """An attention call. form: "table", "csr" or "ragged". queries, keys: of each request. heads: of Q and of K.
    separate: V has pages of its own. hostile: some values of index tensors are extreme."""

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
class GatherScenario:
    """Calls, one after the other. Bytes that no row is written to must stay equal."""

    name: str
    calls: tuple[GatherCase, ...]


def gather_cases() -> list[GatherScenario]:
    """Return problems that a kernel can run."""
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
    return [GatherScenario("tables", tables), GatherScenario("lists", lists)]


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


def make_inputs(case: GatherCase, dtype: str) -> tuple[AttentionCall, rope.RotatedCall]:
    """Return the call of a case and poisoned tensors to write."""
    call = make_call(case, dtype)
    out = rope.new_tensors(call)
    for t in out:
        t.view(torch.uint8).fill_(cases.POISON)
    return call, out


def run_gather(spec: CacheWriteSpec, case: GatherScenario, arch: str, **how: Any) -> Outcome:
    results, digest, error, seconds = RunResult(), hashlib.sha256(), 0.0, 0.0
    launches: list[RunResult] = []
    simulated = SimulatedMachine(arch, launches, SMS, spec, how)
    for one in case.calls:
        call, out = make_inputs(one, spec.dtype)
        by = call.rope or Rope()
        wanted = rope.RotatedCall(*(t.clone() for t in out))
        with override(HostMachine()):
            rope.rotate(call, by, wanted)
        with override(simulated):
            start = time.perf_counter()
            rope.rotate(call, by, out)
            seconds += time.perf_counter() - start
        compared = CacheWriteCase(spec.dtype, spec.cache, rope="angles")
        error = max(error, cases.difference(compared, out, wanted))
        for flat in cases.storages(out):
            digest.update(flat.numpy().tobytes())
    for result in launches:
        results.add(result)
    return Outcome(error, digest.hexdigest(), seconds, results)
