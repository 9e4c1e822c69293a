"""Rows, tokens and heads of a tile, and lengths of a sequence. Plain arithmetic: tested on ints, traced in kernels.

Without PackGQA, a tile's rows are the query tokens of one query head, and the tile's head is that query head. With
PackGQA, its rows are (token, query head) of one KV head, with the head fastest: row = token * qhead_per_kvhead + head,
and the tile's head is the KV head. pack_factor is the number of rows per token: qhead_per_kvhead if packed, else 1.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from ..device import copy
from ..device.clamp import clamp
from ..device.divisor import SHIFT, Divisor, Quotient, magic_of, quotient_params
from .args import AttentionArgs, pack
from .operands import tensors
from .schedule import policy
from .spec import EXTRA_UNIT, PACK_GQA_MAX_GROUP, PACK_GQA_MAX_Q


class LaunchGeometry(NamedTuple):
    """Numbers that follow from the shapes of a launch. The host part computes them, since a division takes a warp of
    the kernel about 150 cycles, and a CTA has nothing to do before its first tile is found.

    qhead_per_kvhead, group_magic: query heads per KV head, and its magic number for `Divisor`. q_heads, kv_heads: the
    multiplier and the shift of the number of query and of KV heads, for `Quotient`. l2_keys: the most keys of a
    sequence for which K and V of all heads fit in `tile.l2_bytes`; None where the order of tiles does not depend on it
    (`policy.groups_heads_by_l2`). per_length: with slots, the multiplier and the shift of the number of rows of the
    page table for which an entry of kv_lens counts.
    """

    qhead_per_kvhead: Int32
    group_magic: Int32
    q_heads: Any
    kv_heads: Any
    l2_keys: Any
    per_length: Any = None


class Sequence(NamedTuple):
    """All that kernels read from the device about one sequence of the batch, clamped to what the tensors hold.

    q_start: its first query token. q_len: query tokens. kv_len: keys. prefix: keys that all tokens see, whatever the
    causal mask says. extra: keys in the first of two caches; those of the second one begin at a multiple of
    `EXTRA_UNIT` behind them, and kv_len counts them and what lies between. Whatever else a spec says a sequence has is
    a further field, None in kernels without it. `load_sequence` alone reads them, and everything that describes
    work holds the record whole: roles and schedules pass on a value that a mask needs without naming it.
    """

    q_start: Int32
    q_len: Int32
    kv_len: Int32
    prefix: Any = None
    extra: Any = None


# block of `args` -> its tensors with values of single sequences, all of which `load_sequence` reads
SEQUENCE_ARGS = {
    "query": ("cu_seqlens_q",),
    "kv": ("kv_lens", "kv_starts", "extra_lens", "union_lens"),
    "mask": ("prefix_lens",),
}


def launch_args(spec, flat):
    """Return the arguments of a launch, in the order of `args.fields`, with its `LaunchGeometry`. Called on the
    host."""
    a = pack(spec, flat)
    heads, kv_heads = a.query.q.shape[1], cutlass.max(a.kv.k.shape[1], 1)
    group, l2_keys = cutlass.max(heads // kv_heads, 1), None
    if policy.groups_heads_by_l2(spec):
        l2_keys = spec.tile.l2_bytes // (kv_row_bytes(spec) * kv_heads)
    quotients = quotient_params(cutlass.max(heads, 1)), quotient_params(kv_heads)
    per_length = None
    if spec.kv.source == "slots":
        entries = a.kv.page_table.shape[0] if spec.kv.union else batch_size(a)
        per_length = quotient_params(cutlass.max(entries // cutlass.max(a.kv.kv_lens.shape[0], 1), 1))
    return a._replace(launch=LaunchGeometry(group, magic_of(group), *quotients, l2_keys, per_length))


@dataclass(frozen=True)
class KernelParams:
    """Parameters of an attention kernel, made by the host part. kv: per operand of the main loop (`operands`), that of
    its source: TMA descriptors or a tensor to gather from. The others are None in kernels without them."""

    args: AttentionArgs
    kv: tuple[Any, ...]
    q: copy.TmaOperand | None = None
    mma_qk: cute.TiledMma | None = None
    mma_pv: cute.TiledMma | None = None


def launch(spec, kernel, warps, a, stream):
    """Launch an attention kernel with its parameters: CTAs of `warps` warps, `tile.ctas_per_sm` on an SM, in clusters
    of `tile.cluster`. Called on the host."""
    how: dict[str, Any] = {"min_blocks_per_mp": spec.tile.ctas_per_sm, "use_pdl": a.schedule.enable_pdl}
    if spec.tile.ctas_per_sm > 1:
        how["preferred_smem_carveout"] = 100  # percent; otherwise the DSL asks a GPU, which a build may lack
    if spec.tile.cluster > 1:
        how["cluster"] = [spec.tile.cluster, 1, 1]
    kernel.launch(grid=[a.schedule.grid * spec.tile.cluster, 1, 1], block=[32 * warps, 1, 1], stream=stream, **how)


def kv_row_bytes(spec):
    """Return the bytes of a key's K and V of one head."""
    return sum(spec.dims[which] for which in tensors(spec.kv)) * spec.kv.bits // 8


def sequence_queries(a, b):
    """Return (first query token, number of query tokens) of sequence b, clamped to the rows of q."""
    tokens = a.query.q.shape[0]
    start, end = clamp(a.query.cu_seqlens_q[b], 0, tokens), clamp(a.query.cu_seqlens_q[b + 1], 0, tokens)
    return start, cutlass.max(end - start, 0)


def ragged(a):
    """Return whether K and V are rows of one tensor, without pages. Meaningful only if there are kv_starts."""
    return a.kv.kv_lens.shape[0] == 0


def table_keys(length, columns, page_size):
    """Return `length`, clamped to the room in a row of the page table."""
    return clamp(length, 0, columns * page_size)


def page_keys(pages, last, page_size):
    """Return the number of keys in `pages` pages with `last` keys in the last one."""
    return cutlass.max((cutlass.max(pages, 0) - 1) * page_size + clamp(last, 0, page_size), 0)


@cute.jit
def kv_start(a, b: Int32):
    """Return the start of sequence b, clamped: its first entry of the page table or, if ragged, its first row. There
    must be kv_starts."""
    room = a.kv.page_table.shape[2]
    if ragged(a):
        room = a.kv.k.shape[2]
    return clamp(a.kv.kv_starts[b], 0, room)


def slots_that_count(a, row):
    """Return how many of the slots in a row of the page table count, clamped to the room in the row."""
    return table_keys(a.kv.kv_lens[row // Quotient(Int32(1), *a.launch.per_length)], a.kv.page_table.shape[2], 1)


@cute.jit
def sequence_keys(a, b: Int32):
    """Return the number of keys of sequence b, clamped to the room in the page table or in the rows of k and v; 0 if
    the cache has no pages."""
    page_size, keys = a.kv.k.shape[2], Int32(0)
    if const_expr(a.kv.union_lens is not None):
        keys = table_keys(a.kv.union_lens[b], a.kv.union_slots.shape[1], 1)
    elif const_expr(a.launch.per_length is not None):
        keys = slots_that_count(a, b)
    elif a.kv.kv_starts.shape[0] == 0:
        keys = table_keys(a.kv.kv_lens[b], a.kv.page_table.shape[2], page_size)
    else:
        keys = cutlass.max(kv_start(a, b + 1) - kv_start(a, b), 0)
        if const_expr(a.out.lse_form is not None):  # V lies in K
            keys = table_keys(a.kv.kv_lens[b], keys, page_size)
        elif not ragged(a):
            keys = page_keys(keys, a.kv.kv_lens[b], page_size)
    return keys * cutlass.min(cutlass.min(a.kv.k.shape[0], a.kv.v.shape[0]), 1)


def sequence_fields(spec):
    """Return the names of the fields that a sequence has in kernels of `spec`."""
    has = {"prefix": spec.mask.prefix, "extra": spec.kv.extra}
    return [field for field in Sequence._fields if has.get(field, True)]


def sequence_of(spec, words):
    """Return the sequence whose fields, in kernels of `spec`, have these values."""
    return Sequence(**dict(zip(sequence_fields(spec), words)))


def no_sequence(spec):
    """Return a sequence without tokens and keys."""
    return sequence_of(spec, (Int32(0),) * len(sequence_fields(spec)))


@cute.jit
def load_sequence(a, b: Int32):
    """Return sequence b, which must be one of the batch."""
    q_start, q_len = sequence_queries(a, b)
    sequence = Sequence(q_start, q_len, sequence_keys(a, b))
    if const_expr(a.mask.prefix_lens is not None):
        sequence = sequence._replace(prefix=clamp(a.mask.prefix_lens[b], 0, sequence.kv_len))
    if const_expr(a.kv.extra_lens is not None):
        extra = table_keys(a.kv.extra_lens[b // Quotient(Int32(1), *a.launch.per_length)], a.kv.extra_slots.shape[1], 1)
        extra *= cutlass.min(a.kv.extra_k.shape[0], 1)
        sequence = sequence._replace(extra=sequence.kv_len, kv_len=extra_start(sequence.kv_len) + extra)
    return sequence


def extra_start(keys):
    """Return where the keys of the second cache begin, behind `keys` of the first one."""
    return (keys + EXTRA_UNIT - 1) // EXTRA_UNIT * EXTRA_UNIT


@cute.jit
def differs(sequence: Sequence, other: Sequence):
    """Return whether any value of two sequences differs."""
    changed = sequence.q_start != other.q_start
    for value, before in zip(sequence[1:], other[1:]):
        if const_expr(value is not None):
            changed = changed or value != before
    return changed


def batch_size(a):
    """Return the number of sequences."""
    return a.query.cu_seqlens_q.shape[0] - 1


def qhead_per_kvhead(a):
    """Return the number of query heads per KV head."""
    return a.launch.qhead_per_kvhead


def group_divisor(a):
    """Return the number of query heads per KV head as a `Divisor`."""
    return Divisor(a.launch.qhead_per_kvhead, a.launch.group_magic)


def pack_factor(spec, a, q_len):
    """Return the number of rows per token for a sequence of q_len tokens: qhead_per_kvhead if its tiles are packed,
    else 1."""
    if policy.packs_all_tiles(spec):
        return qhead_per_kvhead(a)
    # few = 1 if q_len <= PACK_GQA_MAX_Q and qhead_per_kvhead <= PACK_GQA_MAX_GROUP, else 0
    few = cutlass.min(cutlass.max(PACK_GQA_MAX_Q + 1 - q_len, 0), 1) * cutlass.min(
        cutlass.max(PACK_GQA_MAX_GROUP + 1 - qhead_per_kvhead(a), 0), 1
    )
    return 1 + few * (qhead_per_kvhead(a) - 1)


def pack_magic(pack_gqa, magic):
    """Return the magic number of pack_factor for `Divisor`. pack_gqa: 1 if packed, else 0. magic: of
    qhead_per_kvhead."""
    whole = 1 << SHIFT
    return whole + pack_gqa * (magic - whole)


def pack_divisor(w):
    """Return the tile's pack_factor as a `Divisor`."""
    return Divisor(w.pack_factor, w.pack_magic)


def num_tile_heads(a, pack_gqa):
    """Return the number of tile heads: KV heads if packed (pack_gqa 1), else query heads."""
    heads = a.query.q.shape[1]
    return heads + pack_gqa * (a.kv.k.shape[1] - heads)


def tile_heads_quotient(a, pack_gqa):
    """Return `num_tile_heads` as a `Quotient`."""
    (magic, shift), (packed_magic, packed_shift) = a.launch.q_heads, a.launch.kv_heads
    magic += Uint32(pack_gqa) * (packed_magic - magic)  # modulo 2^32
    return Quotient(num_tile_heads(a, pack_gqa), magic, shift + pack_gqa * (packed_shift - shift))


def num_rows(q_len, pack_factor):
    """Return the number of rows of a sequence."""
    return q_len * pack_factor


def tile_m(spec, rows):
    """Return the rows per tile of a sequence with `rows` rows: the smallest of the tile's m_choices that holds all of
    them, or the largest choice."""
    m_choices = spec.tile.m_choices
    m = m_choices[0]
    for less, more in pairwise(m_choices):
        m += cutlass.min(cutlass.max(rows - less, 0), 1) * (more - less)
    return m


def tile_tokens(m_block, m, q_len, pack_factor):
    """Return the first and the last query token of a tile of m rows."""
    first = m_block * m
    return first // pack_factor, (cutlass.min(first + m, num_rows(q_len, pack_factor)) - 1) // pack_factor


def token_of(row, pack_factor):
    """Return the query token of a row."""
    return row // pack_factor


def head_of(row, head, pack_factor):
    """Return the query head of a row in a tile of `head`."""
    return head * pack_factor + row % pack_factor


def kv_head_of(spec, a, w):
    """Return the KV head of a tile."""
    return w.head_idx if policy.packs_all_tiles(spec) else w.head_idx * w.pack_factor // group_divisor(a)
