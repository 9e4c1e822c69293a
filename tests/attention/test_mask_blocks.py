"""The lists of KV blocks that tiles visit under a custom mask (`attention.mask_blocks`), written in the simulator."""

from dataclasses import replace

import pytest
import torch

from bench.cases import family, hostile
from bench.cases.attention import AttentionCase
from bench.cases.family import FamilyCase
from tests.attention import test_ranges
from tests.conftest import ARCH, ROOT
from tests.sim.workloads import simulated
from wrappers.attention.plan import MaskLists

pytestmark = pytest.mark.kernels
TILE = 128  # rows and keys of the kernel's tile
CASE = FamilyCase(q_lens=(300, 5, 0, 70), kv_lens=(900, 500, 7, 1), heads_q=4, page_size=16, custom=True, blocks=True)


def watched(monkeypatch):
    """Return a list to which each later launch appends its lists of blocks."""
    made, empty = [], MaskLists.empty
    monkeypatch.setattr(MaskLists, "empty", lambda *args: made.append(empty(*args)) or made[-1])
    return made


def lists_of(case, monkeypatch):
    """Run a case in the simulator and return its tensors and the lists that the kernel has written."""
    made, t = watched(monkeypatch), family.make(case)
    with simulated(ARCH, [], 2, memory=ROOT / "build" / "simulated"):
        family.plan(case, family.wrapper_of(case, "cpu"), t).run(
            *family.placed(case, t, "cpu"), **family.run_options(case, t, "cpu")
        )
    return t, made[-1]


def expected(case, t):
    """Return row of the lists -> (blocks that need no mask, masked blocks), both ascending, from the mask itself."""
    found, start, group = {}, 0, case.heads_q // case.heads_kv
    for request, (rows, keys) in enumerate(zip(case.q_lens, case.kv_lens)):
        if case.ranges:
            first = int(t.starts[request])
            mask = test_ranges.seen(rows, keys, t.ranges[first : first + rows], case.window_left, case.range_window)
        else:
            mask = t.mask[start : start + rows * keys].view(rows, keys)
            start += rows * keys
        if case.window_left >= 0 and not case.ranges:
            distance = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
            mask = mask & (distance <= case.window_left)
        tokens = TILE // group if rows <= 64 else TILE
        first = int(t.starts[request]) * group // TILE + request
        found |= {first + tile: blocks for tile, blocks in enumerate(lists_of_mask(mask, tokens))}
    return found


def lists_of_mask(mask, tokens):
    """Return (blocks that need no mask, masked blocks) of each tile of `tokens` rows."""
    for first in range(0, len(mask), tokens):
        part = mask[first : first + tokens]
        blocks = [part[:, key : key + TILE] for key in range(0, mask.shape[1], TILE)]
        full = [i for i, block in enumerate(blocks) if block.shape[1] == TILE and block.all()]
        yield full, [i for i, block in enumerate(blocks) if block.any() and i not in full]


LAST_BITS = replace(CASE, q_lens=(33, 61), kv_lens=(101, 333))  # the mask ends inside a word
ALIGNED = replace(CASE, q_lens=(140, 3, 64), kv_lens=(512, 1024, 160))  # every row begins with a word of the mask
MANY = replace(CASE, q_lens=(1,) * 35 + (150, 2), kv_lens=(40,) * 35 + (300, 70))  # a warp reads 32 at a time
CASES = {
    "ragged": CASE, "window": replace(CASE, window_left=300), "last bits": LAST_BITS, "aligned": ALIGNED, "many": MANY,
    "aligned window": replace(ALIGNED, window_left=200), "ranges": replace(CASE, custom=False, ranges=True),
    "ranges, windows": replace(
        ALIGNED, q_lens=(400, 3, 64), custom=False, ranges=True, window_left=150, range_window=50
    ),
}  # fmt: skip


def blocks_of(row):
    """Return the blocks of a list: (those that need no mask, the masked ones), both ascending."""
    count, num_full, _, *entries = row.tolist()
    return entries[:num_full], entries[len(entries) - (count - num_full) :][::-1]


@pytest.mark.parametrize("name", CASES)
def test_lists(monkeypatch, name):
    """Hidden blocks are in no list, and blocks that all rows see are among those that need no mask."""
    case = CASES[name]
    t, lists = lists_of(case, monkeypatch)
    want = expected(case, t)
    assert {row: blocks_of(lists[row]) for row in want} == want
    tiles = [-(-rows // (TILE if rows > 64 else TILE * case.heads_kv // case.heads_q)) for rows in case.q_lens]
    assert len(want) == sum(tiles)
    listed = sum(len(full) + len(masked) for full, masked in want.values())
    assert 0 < listed < sum(n * -(-keys // TILE) for n, keys in zip(tiles, case.kv_lens))
    if name in ("ragged", "aligned", "ranges"):
        assert sum(len(full) for full, _ in want.values())


def test_the_last_of_overlapping_sequences_writes_a_shared_list(monkeypatch):
    """Three sequences of 300 rows have more tiles than 300 rows could, and some lists in common."""
    case = AttentionCase("hostile", q_lens=(300, 0, 0), kv_lens=(700, 9, 700), heads_q=2, heads_kv=2, spare_pages=0)
    offsets, keys = (0, 300, 40, 300), (700, 9, 700)
    p = hostile.made(case, ("csr", "mask"))
    starts = torch.tensor([0, 0, 64, 0], dtype=torch.int32)
    p = p._replace(mask_starts=starts, requests=p.requests._replace(cu_seqlens_q=torch.tensor(offsets).int()))
    made = watched(monkeypatch)
    with simulated(ARCH, [], 2):
        hostile.served(p)(**hostile.arguments(case, p))
    bits = (p.custom_mask[:, None] >> torch.arange(8) & 1).flatten().bool()
    want = {}
    for b in (0, 2):
        rows = offsets[b + 1] - offsets[b]
        mask = bits[8 * starts[b] :]
        mask = torch.nn.functional.pad(mask, (0, rows * keys[b]))[: rows * keys[b]].view(rows, keys[b])
        want |= {offsets[b] // TILE + b + i: found for i, found in enumerate(lists_of_mask(mask, TILE))}
    assert len(want) == 5  # of six tiles
    assert {row: blocks_of(made[0][row]) for row in want} == want
