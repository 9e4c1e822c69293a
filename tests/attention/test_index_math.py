"""The functions that a kernel traces, run on ints against brute force. No GPU, no compilation."""

import ast
import heapq
import inspect
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="index functions take min and max from the DSL")

from cutlass import Int32

from cute_kernels.attention import decode, geometry, mask, precision, prepare, sm90, sm100
from cute_kernels.attention.decode import layout
from cute_kernels.attention.kv import pages, tma
from cute_kernels.attention.schedule import stream_k, tiles
from cute_kernels.attention.sm90 import precision as sm90_precision
from cute_kernels.attention.sm100 import roles as sm100_roles
from cute_kernels.attention.spec import PACK_GQA_MAX_Q, AttentionSpec, KVSpec, MaskSpec
from cute_kernels.device import layout as shared
from cute_kernels.device.divisor import Divisor, Quotient, magic_of, quotient_params
from cute_kernels.device.roles import Role, Roles
from tests.conftest import specs_of

SPECS = st.builds(
    lambda causal, window, custom, m, n: AttentionSpec(
        mask=MaskSpec(causal, window, custom=custom), tile=sm90.Sm90TileConfig(m, n)
    ),
    st.sampled_from(["always", "never", "value"]),
    st.booleans(),
    st.sampled_from(["", "bits"]),
    st.sampled_from([64, 128, 192]),
    st.sampled_from([64, 80, 128]),
)
LENGTHS = st.builds(mask.SeqlenInfo, st.integers(1, 400), st.integers(0, 700), st.integers(0, 500), st.integers(0, 1))
EARLY_AND_FEW = list(product((0, 2), (False, True)))
DECODE = specs_of("attention.decode", "sm_90a")[0]
BLACKWELL = specs_of("attention.sm100", "sm_100a")[0]


def causal(spec: AttentionSpec, n: mask.SeqlenInfo) -> bool:
    """Whether positions bound what tokens see."""
    return {"always": True, "never": False, "value": n.non_causal == 0}[spec.mask.causal]


def sees(spec: AttentionSpec, token: int, key: int, n: mask.SeqlenInfo) -> bool:
    """spec.md 3.0, key by key."""
    position = token + n.kv_len - n.q_len
    return (
        0 <= key < n.kv_len
        and (not causal(spec, n) or key <= position)
        and (not spec.mask.window or key >= position - n.window_left)
    )


@given(SPECS, LENGTHS, st.integers(0, 399))
def test_visible_is_the_set_of_keys_a_token_sees(spec, n, token):
    lo, hi = mask.visible(spec, token, n)
    assert set(range(lo, hi)) == {j for j in range(n.kv_len) if sees(spec, token, j, n)}


@settings(max_examples=200)
@given(SPECS, LENGTHS, st.integers(1, 7), st.booleans(), st.sampled_from(EARLY_AND_FEW), st.data())
def test_blocks_of_a_tile(spec, n, group, pack, cut, data):
    """Blocks outside the range hold no visible key; every key of a full block is visible to every row; the segments
    walk the range once, from high to low, and call nothing full that is not; at least `early` blocks begin a tile;
    where they are to be `few`, a window gives two, both masked."""
    early, few = cut
    fold, t = (group if pack else 1), spec.tile
    rows = geometry.num_rows(n.q_len, fold)
    m_block = data.draw(st.integers(0, (rows - 1) // t.m))
    first, last = geometry.tile_tokens(m_block, t.m, n.q_len, fold)
    tokens = {geometry.token_of(r, fold) for r in range(m_block * t.m, min((m_block + 1) * t.m, rows))}
    assert (first, last) == (min(tokens), max(tokens))

    lo, hi = mask.kv_range(spec, first, last, n)
    n_block_full_min, n_block_full_max = mask.full_range(spec, first, last, n)
    visible = {j for j in range(n.kv_len) if any(sees(spec, i, j, n) for i in tokens)}
    assert visible <= set(range(lo * t.n, hi * t.n))
    for j in range(max(n_block_full_min, 0), n_block_full_max):
        assert all(sees(spec, i, j * t.n + c, n) for i in (first, last) for c in (0, t.n - 1))
    if hi <= lo:
        assert not visible
        return

    if spec.mask.custom:  # positions in a list, the first of which are those of full blocks
        lo, n_block_full_min, n_block_full_max = 0, 0, data.draw(st.integers(0, hi))
    # the last block is the kernel's own, and always masked; segments take the rest
    walked, segments = [], mask.segments(spec, lo, hi - 1, n_block_full_min, n_block_full_max, early, few)
    if few and spec.mask.window and not spec.mask.custom:
        assert [part.masked for part in segments] == [True, True]
    for part in segments:
        for j in range(part.n_block_max - 1, part.n_block_min - 1, -1):
            walked.append(j)
            assert part.is_first or j < hi - 1 - early
            whole = all(sees(spec, i, j * t.n + c, n) for i in (first, last) for c in (0, t.n - 1))
            assert part.masked or (j < n_block_full_max if spec.mask.custom else whole)
    assert walked == list(range(hi - 2, lo - 1, -1))


@pytest.mark.parametrize(
    "keys, blocks", [(0, 2), (4096, 2), (8192, 2), (8193, 6), (16_384, 6), (16_385, 14), (1 << 20, 14)]
)
def test_blocks_with_exact_maxima(keys, blocks):
    """More where P of e4m3 is raised by more, none in 16 bits."""
    found = {spec.smem_q: sm90_precision.exact_max_blocks(spec, keys) for spec in specs_of("attention.sm90", "sm_90a")}
    assert found["e4m3"] == blocks and found["bf16"] == 0


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 64), st.integers(1, 20), st.integers(1, 5))
def test_order_visits_every_tile_once_longest_first(m_blocks, heads, section, ctas, requests):
    section, launch = min(section, heads), m_blocks * heads * requests
    whole = tiles.whole_sections(heads, section, ctas, launch)
    found = [tiles.lpt_order(i, m_blocks, heads, section, whole) for i in range(m_blocks * heads)]
    assert sorted(found) == [(m, h) for m in range(m_blocks) for h in range(heads)]
    parts = [min(h // section, whole) for _, h in found]
    assert parts == sorted(parts)
    for part in set(parts):
        blocks = [m for m, h in found if min(h // section, whole) == part]
        assert blocks == sorted(blocks, reverse=True)
    last = heads - whole * section
    rounds, more = tiles.WAVES * ctas, (section + 1) * m_blocks * requests
    assert last == heads or rounds <= last * m_blocks * requests < rounds + more


def ends(order, ctas):
    """When the last CTA ends, and the mean of all; a tile of causal attention costs its blocks and 1.3 for its ends."""
    free = [0.0] * ctas
    for m, _ in order:
        heapq.heapreplace(free, free[0] + m + 2.3)
    return max(free), sum(m + 2.3 for m, _ in order) / ctas


@pytest.mark.parametrize("m_blocks, heads, section", [(64, 16, 3), (64, 16, 2), (43, 32, 28), (64, 32, 3)])
def test_ctas_end_together(m_blocks, heads, section):
    """Such as head_dim (192, 128) without groups, whose last section was one head: its longest tile ended 15 % late."""
    whole = tiles.whole_sections(heads, section, 132, m_blocks * heads)
    last, mean = ends([tiles.lpt_order(i, m_blocks, heads, section, whole) for i in range(m_blocks * heads)], 132)
    assert last < 1.02 * mean


@given(st.integers(0, 1 << 20), st.integers(1, 64), st.integers(1, 16))
def test_a_section_fits_the_cache_or_is_one_head(kv_len, kv_heads, fold):
    row_bytes, l2_bytes = 512, 16 << 20
    heads = tiles.l2_section(kv_len, row_bytes, kv_heads, fold, l2_bytes)
    assert heads % fold == 0 and 1 <= heads // fold <= kv_heads
    assert heads == fold or heads // fold * kv_len * row_bytes <= l2_bytes
    assert heads // fold == kv_heads or (heads // fold + 1) * kv_len * row_bytes > l2_bytes


@given(st.integers(0, 500), st.integers(0, 15), st.integers(1, 16))
def test_packed_rows_are_token_and_head(row, kv_head, group):
    token, head = geometry.token_of(row, group), geometry.head_of(row, kv_head, group)
    assert token * group + head % group == row and head // group == kv_head
    assert geometry.token_of(row, 1) == row and geometry.head_of(row, kv_head, 1) == kv_head
    for schedule, of, pack_factor in (("tiles", head, 1), ("tiles", kv_head, group), ("stream_k", kv_head, None)):
        w, a = (
            SimpleNamespace(head_idx=of, pack_factor=pack_factor, pack_magic=magic_of(group)),
            arguments(16 * group, 16),
        )
        assert geometry.kv_head_of(SimpleNamespace(schedule=schedule), a, w) == kv_head


@given(st.integers(1, (1 << 31) - 1), st.data())
def test_tiles_of_both_kinds_are_spread(total, data):
    """Every tile is of one kind, the n-th of it, and any stretch has its share of both, to one."""
    part, some = data.draw(st.integers(0, total)), data.draw(st.lists(st.integers(0, total - 1), max_size=20))
    share = tiles.packed_ratio(part, total) if 0 < part < total else part // total * tiles.RATIO_ONE
    before = [int(tiles.interleave(tile, share)) for tile in some]
    after = [int(tiles.interleave(tile + 1, share)) for tile in some]
    assert all(y - x in (0, 1) for x, y in zip(before, after))
    assert all(abs(x - tile * part / total) <= 1 for x, tile in zip(before, some))
    assert tiles.interleave(0, share) == 0 and tiles.interleave(total, share) == part


@pytest.mark.parametrize("n", [64, 80, 96, 128, 160, 176])
def test_boxes_fill_a_tile(n):
    assert tma.boxes(n) and all(n % b == 0 for b in tma.boxes(n)) and n // tma.boxes(n)[0] <= 32
    assert all(any(page % b == 0 for b in tma.boxes(n)) for page in (8, 16, 32, 64, 128, 256))


class Tensor(NamedTuple):
    shape: tuple[int, ...]


def arguments(heads_q, heads_kv):
    query, kv = SimpleNamespace(q=Tensor((9, heads_q, 64))), SimpleNamespace(k=Tensor((5, heads_kv, 16, 64)))
    group = heads_q // heads_kv
    return SimpleNamespace(query=query, kv=kv, launch=geometry.LaunchGeometry(group, magic_of(group), None, None, None))


@pytest.mark.parametrize(
    "schedule, q_len, heads, rows",
    [
        ("tiles", PACK_GQA_MAX_Q, 2, 4),
        ("tiles", 1, 2, 4),
        ("tiles", PACK_GQA_MAX_Q + 1, 2, 1),
        ("tiles", 1, 8, 1),
        ("stream_k", 99, 2, 4),
    ],
)
def test_rows_per_token(schedule, q_len, heads, rows):
    a = arguments(8, heads)
    found = geometry.pack_factor(SimpleNamespace(schedule=schedule), a, q_len)
    assert found == rows and geometry.num_tile_heads(a, int(rows > 1)) == 8 // rows


def test_a_group_of_very_many_heads_is_not_packed():
    """A row times its rows a token stays below 2^30, for `Divisor`."""
    most = geometry.PACK_GQA_MAX_GROUP
    found = [geometry.pack_factor(SimpleNamespace(schedule="tiles"), arguments(n, 1), 1) for n in (most, most + 1)]
    assert found == [most, 1] and (PACK_GQA_MAX_Q * most + 256) * most < 1 << 30


@given(st.integers(1, 300), st.integers(1, 128), st.integers(1, 16), st.booleans())
def test_all_heads_in_one_section(m_blocks, kv_heads, group, packed):
    """The order of tiles is then a division by the number of tile heads, for which the host has the multiplier."""
    a, heads = arguments(kv_heads * group, kv_heads), kv_heads if packed else kv_heads * group
    quotients = [quotient_params(Int32(n)) for n in (kv_heads * group, kv_heads)]
    a.launch = a.launch._replace(q_heads=quotients[0], kv_heads=quotients[1])
    found = geometry.tile_heads_quotient(a, int(packed))
    for tile in {0, heads - 1, heads * m_blocks // 2, heads * m_blocks - 1}:
        place = m_blocks - 1 - int(Int32(tile) // found), int(Int32(tile) % found)
        assert place == tiles.lpt_order(tile, m_blocks, heads, heads, 0)


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 60), st.integers(0, 3))
def test_shares_of_a_split_and_who_merges(each_tile, ctas, ends):
    """Shares differ by one unit at most. A tile of which several CTAs have blocks is merged by the one that has its
    begin, as the last tile of its share, which finds the slots in which the parts are; no two parts share a slot.
    ends: the units of a tile behind its blocks; a share that begins among them begins with the next tile."""
    units = sum(each_tile) + ends * len(each_tile)
    starts = [stream_k.first_unit(units, c, ctas) for c in range(ctas + 1)]
    sizes = {b - a for a, b in zip(starts, starts[1:])}
    assert starts[0] == 0 and starts[-1] == units and max(sizes) - min(sizes) <= 1
    taken, first = set(), 0
    for blocks in each_tile:
        parts = [c for c in range(ctas) if max(starts[c], first) < min(starts[c + 1], first + blocks)]
        assert [stream_k.cta_of_unit(u, units, ctas) for u in (first, first + blocks - 1)] == [parts[0], parts[-1]]
        assert parts == list(range(parts[0], parts[-1] + 1))
        if len(parts) > 1:
            assert first <= starts[parts[0] + 1] - 1 < first + blocks
            slots = [stream_k.split_slot(c, max(starts[c], first) - first, ctas) for c in parts]
            assert slots == [stream_k.split_slot(c, c - parts[0], ctas) for c in parts]
            assert not taken & set(slots) and max(slots) < 2 * ctas
            taken |= set(slots)
        first += blocks + ends


@given(st.integers(0, 2**31 - 1), st.integers(1, 132), st.integers(0, 132))
def test_ctas_without_a_share_begin_at_the_end(units, ctas, more):
    """A product of their number may not fit in 32 bits, and a search from a unit below 0 has no end."""
    shares = [stream_k.share_of(c, units, ctas) for c in range(ctas + more)]
    assert [begin for begin, _ in shares] + [units] == [0, *(end for _, end in shares)]
    assert shares[ctas:] == [(units, units)] * more


def of_drafts(spec):
    """The spec with a mask of bits, causal but for that."""
    return replace(spec, mask=MaskSpec("always", spec.mask.window, tree=True))


@given(SPECS, LENGTHS, st.integers(0, 5), st.booleans())
def test_units_of_a_tile_hold_all_blocks_that_any_of_its_tokens_visits(spec, n, blocks_per_split, drafts):
    spec, n = of_drafts(spec), replace(n, tree=int(drafts))
    every = [mask.kv_range(spec, token, token, n) for token in range(n.q_len)]
    visited = {j for lo, hi in every for j in range(lo, hi)}
    lo = mask.kv_range(spec, 0, n.q_len - 1, n)[0]
    found = int(stream_k.blocks_per_tile(spec, n))
    if blocks_per_split:
        found = stream_k.units_of_blocks(found, blocks_per_split)
    assert found >= 1 and visited <= set(range(lo, lo + found * max(blocks_per_split, 1)))


@given(SPECS, LENGTHS)
def test_drafts_see_all_older_keys_and_may_see_each_other(spec, n):
    spec, n = of_drafts(spec), replace(n, tree=1)
    for token in range(n.q_len):
        lo, hi = mask.visible(spec, token, n)
        assert hi == n.kv_len and lo == mask.visible(spec, token, replace(n, tree=0))[0]
    full = mask.full_range(spec, 0, n.q_len - 1, n)
    assert full[1] * spec.tile.n <= max(0, n.kv_len - n.q_len)
    assert len(mask.segments(spec, 0, 9, 2, 5)) == (3 if spec.mask.window else 2), "blocks of drafts are masked"


@given(st.integers(0, 400), st.sampled_from([(64, 1), (64, 2), (32, 1), (48, 3)]), st.sampled_from([8, 16]))
def test_decode_tiles_are_as_small_as_their_rows_allow(rows, tile, each):
    """Warps are shared out evenly among groups of 8 rows, or 16."""
    most, warpgroups = tile
    spec = replace(DECODE, tile=decode.DecodeTileConfig(most, 128, 3, warpgroups, each))
    sizes = [each * n for n in range(1, 17) if 4 * warpgroups % n == 0 and each * n <= most]
    assert spec.tile.m_choices == tuple(sizes)
    m = geometry.tile_m(spec, rows)
    assert m == next((m for m in sizes if rows <= m), sizes[-1])
    assert stream_k.tiles_of_rows(spec, rows) == -(-rows // m)
    count, shares = spec.tile.warps, layout.warps_per_group(spec, m)
    assert shares * m == each * count
    assert [w * (m // each) // count for w in range(count)] == [w // shares for w in range(count)]


def test_prefill_tiles_have_one_height():
    spec = specs_of("attention.sm90", "sm_90a")[0]
    assert all(geometry.tile_m(spec, rows) == spec.tile.m for rows in (0, 1, 63, 10**6))


def test_groups_share_out_the_blocks_of_a_tile():
    """On Blackwell: of two halves each group has all blocks, of one half they have them in turn, of head_dim 256 the
    only group has all. Every group counts as many rounds."""
    whole, few, both = (
        (replace(BLACKWELL, tile=tile))
        for tile in (sm100.Sm100TileConfig(), sm100.Sm100TileConfig(m=128), sm100.Sm100TileConfig(has_half_tiles=True))
    )
    one = replace(few, head_dim_qk=256, head_dim_vo=256)
    cases = [(whole, 9, 1), (few, 999, 2), (both, 128, 2), (both, 129, 1), (both, 1, 2), (one, 9, 1)]
    for (spec, rows, n), blocks in product(cases, (1, 2, 5, 6)):
        w = SimpleNamespace(sequence=SimpleNamespace(q_len=rows), pack_factor=1, n_block_min=3, n_block_max=3 + blocks)
        assert sm100_roles.pingpong_groups(spec, w) == n
        assert sm100_roles.num_iterations(spec, w) == -(-blocks // n)
        assert sm100_roles.tile_q_stage(spec, w) == geometry.tile_m(spec, rows) // 128


def test_roles_are_a_table():
    """Warp ranges, counts and registers follow from it; a warpgroup of two budgets is refused."""
    roles = Roles.of(Role("load", 1, 40), Role("idle", 3, 40), Role("none", 0, 7), Role("mma", 8, 232))
    assert [roles.first(name) for name in ("load", "idle", "mma", "none")] == [0, 1, 4, 12]
    assert (roles.warps(), roles.warps("load", "mma"), roles.warps("none")) == (12, 9, 0)
    assert roles.registers("mma") == 232
    more = Role("load", 4, 48), Role("mma", 8, 232)  # 512 registers for a thread of each of three warpgroups have 504
    for table in ((Role("load", 3, 40),), (Role("load", 2, 40), Role("idle", 2, 48)), more):
        with pytest.raises(ValueError, match="roles"):
            Roles.of(*table)


@given(st.integers(1, 512), st.integers(0, 1 << 21))
def test_divisor(d, x):
    x %= (1 << 30) // d
    by = Divisor(Int32(d))
    assert (int(Int32(x) // by), int(Int32(x) % by), int(Int32(3) * by)) == (x // d, x % d, 3 * d)


@given(st.one_of(st.integers(1, 600), st.integers(1, (1 << 31) - 1)), st.integers(0, (1 << 31) - 1))
def test_quotient(d, x):
    by = Quotient(Int32(d))
    for at in (x, x // d * d, max(x // d * d - 1, 0), (1 << 31) - 1):
        assert (int(Int32(at) // by), int(Int32(at) % by)) == divmod(at, d)[:1] + (at % d,)


@pytest.mark.parametrize("width", [32, 64, 128])
def test_swizzle_is_that_of_shared_memory(width):
    """TMA's pattern: 16-byte pieces change places by the exclusive or with the number of their 128 bytes."""
    places = set()
    for row in range(16):
        for byte in range(width):
            linear = row * width + byte
            piece, line = linear // 16, linear // 128
            bits = width // 16
            want = (piece ^ line % bits) * 16 + byte % 16
            assert shared.swizzle(width, row, byte) == want
            places.add(want)
    assert places == set(range(16 * width))


@pytest.mark.parametrize("bits, dim", [(bits, dim) for bits in (8, 4) for dim in (64, 128, 192, 256)])
def test_lanes_dequantise_every_piece_of_a_row_without_bank_conflicts(bits, dim):
    p, n = prepare.DequantPieces.of(bits, dim), 16
    found = set()
    for turn in range(p.passes):
        for group in range(p.groups):
            loads = [p.raw(lane, turn, group) for lane in range(32)]
            stores = [p.operand(n, lane, turn) for lane in range(32)]
            each = 64 // bits  # lanes whose 16 or 8 bytes are loaded at a time
            if (bits, dim) != (4, 256):
                spread(loads, 2 * bits, each)
            for half in (0, 16):
                spread([at ^ half for at in stores], 16, 8)
            for box in range(p.boxes):
                for lane, (load, store) in enumerate(zip(loads, stores)):
                    row = p.row(lane, turn)
                    piece = (box * p.groups + group) * p.lanes + lane % p.lanes
                    byte = piece * 2 * bits
                    assert byte // p.width == box and load == shared.swizzle(p.width, row, byte % p.width)
                    store += (box * p.groups + group) * p.lanes // 4 * n * 128
                    assert store == piece // 4 * n * 128 + shared.swizzle(128, row, piece % 4 * 32)
                    found.add((row, piece))
    assert found == {(row, piece) for row in range(prepare.SWIZZLE_ROWS) for piece in range(dim // 16)}


def spread(addresses, size, lanes):
    """As many `lanes` as memory serves at a time find their bytes in banks of their own."""
    for i in range(0, 32, lanes):
        assert len({at % 128 // size for at in addresses[i : i + lanes]}) == lanes


@given(st.integers(0, 1 << 21))
def test_what_is_too_small_for_p_in_e4m3_adds_up_to_little(keys):
    """All keys of a request but one, each of half the smallest e4m3, which rounds to 0; P raised by as little as that
    allows, at most by 2^7, so that maxima may grow."""
    raised = 4 + sm90_precision.extra_offset(keys)
    lost = keys * 2.0 ** -(10 + raised)
    assert 4 <= raised <= 7 and (lost <= 0.25 or raised == 7) and (raised == 4 or 2 * lost > 0.25)


def test_p_in_e4m3_tells_where_it_is_full():
    def word(x):
        return int(torch.tensor(x).to(torch.float8_e4m3fn).view(torch.uint8)) + (sm90_precision.E4M3_TO_MSB & 0xFF)

    top = sm90_precision.MSB_MASK & 0xFF
    assert word(432.0) & top and word(float("nan")) & top and not word(431.9) & top and not word(0.0) & top
    full, room = 2**sm90_precision.P_MAX_LOG2_E4M3, 2**sm90_precision.P_MAX_LOG2
    assert full > 432 * (1 + 1e-4), "a row whose maximum follows is seen, however its exponential rounds"
    assert 2 * room < torch.finfo(torch.float16).max and sm90_precision.P_SUM_LIMIT < room * (1 - 1e-2)


@pytest.mark.parametrize(
    "q, kv, mma, converts_kv, widens_q, scales_q_rows, prepared",
    [
        ("bf16", "bf16", "bf16", False, False, False, (False, False)),
        ("e4m3", "e4m3", "e4m3", False, False, False, (False, True)),  # V is transposed
        ("bf16", "e4m3", "fp16", True, False, True, (True, True)),
        ("fp16", "e5m2", "fp16", True, False, False, (True, True)),
        ("e4m3", "nvfp4", "fp16", True, True, False, (True, True)),
    ],
)
def test_precision(q, kv, mma, converts_kv, widens_q, scales_q_rows, prepared):
    spec = AttentionSpec(q, KVSpec(kv), tile=sm90.Sm90TileConfig())
    p = precision.of(spec)
    assert (p.mma_dtype, p.converts_kv, p.converts_q) == (mma, converts_kv, q != mma)
    assert (p.widens_q, p.scales_q_rows) == (widens_q, scales_q_rows)
    assert tuple(sm90_precision.is_prepared(spec, which) for which in (pages.K, pages.V)) == prepared
    own = precision.of_mma_sync(spec)  # of mma.sync, which multiplies 16 bits and converts K and V in registers
    assert own.mma_dtype == ("fp16" if mma == "e4m3" else mma) and not own.converts_kv
    assert own.widens_q == (q == "e4m3")


def test_the_prologue_reads_all_values_of_sequences_past_the_cache():
    """Those that `load_sequence` reads are elements of tensors of `SEQUENCE_ARGS`, which another kernel may write."""
    tree = ast.parse(inspect.getsource(geometry))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    reached, read = ["load_sequence"], set()
    for name in reached:
        for node in ast.walk(functions[name]):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in functions.keys() - set(reached):
                reached.append(node.func.id)
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr != "shape":
                read.add((node.value.value.attr, node.value.attr))
    assert read == {(block, name) for block, names in geometry.SEQUENCE_ARGS.items() for name in names}
    assert {"sequence_queries", "sequence_keys", "kv_start"} <= set(reached)
