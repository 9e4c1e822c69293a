"""The kernel that makes the unions of the keys of neighbouring tokens, in the simulator: entry by entry."""

import pytest
import torch

from cute_kernels.attention.spec import tokens_of_union
from tests.conftest import ARCH, ROOT
from tests.sim.workloads import simulated
from wrappers import flash_mla_sparse_fwd
from wrappers.attention.sharing import SharedKeys

pytestmark = pytest.mark.kernels
MEMORY = ROOT / "build" / "simulated"
STEP = 8  # elements between rows, which overlap: a cache of many rows is small, and all of them differ
HOSTILE = [-(1 << 31), -1, 114514, (1 << 31) - 1]


def rows_of(count):
    return torch.randn(count * STEP + 576, generator=torch.Generator().manual_seed(0)).bfloat16().as_strided(
        (count, 1, 576), (STEP, STEP, 1)
    )  # fmt: skip


def union(slots, lens, rows):
    """Return the entries (slot, bits of tokens) of the union of the lists of a group, as the kernel orders them.

    Ranges of rows begin at the lowest slot; in each, first the distinct rows come, then all that repeat an earlier one.
    """
    from cute_kernels.attention.key_union import ROWS

    counted = [own[: min(max(n, 0), len(own))] for own, n in zip(slots, lens, strict=True)]
    lists = [[slot for slot in own if 0 <= slot < rows] for own in counted]
    found, low = [], min((min(own) for own in lists if own), default=0)
    for start in range(low, max((max(own) for own in lists if own), default=-1) + 1, ROWS):
        tokens, again = {}, []
        for t, own in enumerate(lists):
            for slot in own:
                if start <= slot < start + ROWS:
                    bits = tokens.get(slot, 0)
                    again += [(slot, 1 << t)] if bits >> t & 1 else []
                    tokens[slot] = bits | 1 << t
        found += sorted(tokens.items()) + again
    return found


def neighbours(tokens, keys, rows, seed=0):
    """Return lists of distinct rows in which neighbours have nine in ten in common."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    return order[(torch.arange(tokens)[:, None] * max(keys // 10, 1) + torch.arange(keys)) % rows].int()


def repeated():
    """Return lists with rows that come twice and more, within 32 entries and far apart, among numbers that are none."""
    gen = torch.Generator().manual_seed(1)
    slots = torch.randint(90, (6, 150), generator=gen).int()
    slots[:, ::7] = torch.tensor(HOSTILE).int()[torch.randint(4, slots[:, ::7].shape, generator=gen)]
    slots[0, 7] = 90  # right behind the rows
    slots[1] = 5
    slots[4, 3:] = -1
    return slots


CASES = {  # heads, slots (T, K), counts (T,) or None, rows of the cache
    "neighbours": (16, neighbours(9, 200, 700), None, 700),
    "repeated": (8, repeated(), None, 90),
    "counts": (32, neighbours(5, 70, 100), torch.tensor([70, 0, -3, 99, 1]), 100),
    "ranges": (24, torch.tensor([[3, 150_000, 70_000, 3], [65_538, 65_539, -1, 149_999]]), None, 150_001),
    "one list": (16, neighbours(1, 2100, 3000), None, 3000),
    "no keys": (16, torch.full((4, 3), -1), None, 9),
}


@pytest.mark.parametrize(("name", "mode"), [*((name, "eager") for name in CASES), ("repeated", "random")])
def test_every_entry(name, mode, monkeypatch):
    heads, slots, counts, rows = CASES[name]
    made = []
    scratch = SharedKeys.scratch
    monkeypatch.setattr(SharedKeys, "scratch", lambda self, device: made.append(scratch(self, device)) or made[-1])
    q = torch.randn(len(slots), heads, 576, generator=torch.Generator().manual_seed(2)).bfloat16()
    given = q, rows_of(rows), slots.int()[:, None], 0.05
    lens = None if counts is None else counts.int()
    with simulated(ARCH, [], 2, mode=mode, memory=MEMORY):
        results = flash_mla_sparse_fwd(*given, topk_length=lens, share_keys=True)
    (of_launch,), size = made, tokens_of_union(heads)
    each = [slots.shape[1]] * len(slots) if counts is None else counts.tolist()
    for group, count in enumerate(of_launch["union_lens"].tolist()):
        own = slice(group * size, (group + 1) * size)
        got = zip(*(of_launch[part][group, :count].tolist() for part in ("union_slots", "union_tokens")), strict=True)
        assert list(got) == union(slots[own].tolist(), each[own], rows)
    lens = lens if lens is None else lens.clamp(0)  # the reference refuses others
    for got, want in zip(results, flash_mla_sparse_fwd(*given, topk_length=lens), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)
