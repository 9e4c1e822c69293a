"""The lists of KV blocks that tiles visit under a custom mask (`attention.mask_blocks`), written in the simulator."""

from dataclasses import replace

import pytest
import torch

from bench.cases import family
from bench.cases.family import FamilyCase
from tests.conftest import ARCH, ROOT
from tests.sim.workloads import simulated
from wrappers.attention.plan import MaskLists

pytestmark = pytest.mark.kernels
TILE = 128  # rows and keys of the kernel's tile
CASE = FamilyCase(q_lens=(300, 5, 0, 70), kv_lens=(900, 500, 7, 1), heads_q=4, page_size=16, custom=True, blocks=True)


def lists_of(case, monkeypatch):
    """Run a case in the simulator and return its tensors and the lists that the kernel has written."""
    made, empty = [], MaskLists.empty
    monkeypatch.setattr(MaskLists, "empty", lambda *args: made.append(empty(*args)) or made[-1])
    t = family.make(case)
    with simulated(ARCH, [], 2, memory=ROOT / "build" / "simulated"):
        family.plan(case, family.wrapper_of(case, "cpu"), t).run(*family.placed(case, t, "cpu"))
    return t, made[-1]


def expected(case, t):
    """Return row of the lists -> (blocks that need no mask, masked blocks), both ascending, from the mask itself."""
    found, start, group = {}, 0, case.heads_q // case.heads_kv
    for request, (rows, keys) in enumerate(zip(case.q_lens, case.kv_lens)):
        mask = t.mask[start : start + rows * keys].view(rows, keys)
        start += rows * keys
        if case.window_left >= 0:
            distance = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
            mask = mask & (distance <= case.window_left)
        tokens = TILE // group if rows <= 64 else TILE
        for tile, first in enumerate(range(0, rows, tokens)):
            part = mask[first : first + tokens]
            blocks = [part[:, key : key + TILE] for key in range(0, keys, TILE)]
            full = [i for i, block in enumerate(blocks) if block.shape[1] == TILE and block.all()]
            masked = [i for i, block in enumerate(blocks) if block.any() and i not in full]
            found[int(t.starts[request]) * group // TILE + request + tile] = full, masked
    return found


@pytest.mark.parametrize("window", [-1, 300])
def test_lists(monkeypatch, window):
    """Hidden blocks are in no list, and blocks that all rows see are among those that need no mask."""
    case = replace(CASE, window_left=window)
    t, lists = lists_of(case, monkeypatch)
    want = expected(case, t)
    for row, (full, masked) in want.items():
        count, num_full, _, *entries = lists[row].tolist()
        assert (entries[:num_full], entries[len(entries) - (count - num_full) :][::-1]) == (full, masked)
    blocks = sum(-(-case.kv_lens[0] // TILE) for row in range(3))
    assert 0 < sum(len(full) for full, _ in want.values()) and sum(len(a) + len(b) for a, b in want.values()) < blocks
