"""Arguments of a launch that computes logits of an indexer: the only statement of the kernels' launch ABI.

An absent optional tensor has size 0 in its first mode; it is never None.

Shapes: N query tokens, H heads, D elements of a head, B requests, M entries of a row of the page table, P keys per
page, W columns of the logits. The token with number n of a request is row `next_n` b + n."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import families


class IndexerArgs(NamedTuple):
    """The arguments of a launch."""

    q: Any  # (N, H, D)           spec.keys; rows at multiples of 16 bytes
    k: Any  # (pages, P, bytes)   uint8; without a table, P is 1 and pages are keys. A page has the values of its P keys
    #                             in spec.keys, then, unless k_scale is given, their P scales in fp32
    k_scale: Any  # (pages | 0,)  fp32; without a table
    weights: Any  # (N, H)        fp32
    table: Any  # (B | 0, M)      int32: pages of a request; absent: key j is page j, for all tokens
    starts: Any  # (N | 0,)       int32: the first key of a token; absent: 0
    ends: Any  # (N | B,)         int32: the end of its keys, or the keys of its request
    out: Any  # (N, W)            spec.out
    next_n: Any  # Int32          tokens of a request; N without a table
    causal: Any  # Int32          1: of ends of requests, the last token sees all keys, the one before it one less, ...
    wide_rows: Any  # Int32       1: rows of keys lie at multiples of 16 bytes, else of 4
    boxes: Any  # Int32           1: TMA copies blocks of 64 keys: pages have whole ones, and all rows, pages and scales
    #                             lie at multiples of 16 bytes
    compressed: Any  # Int32      1: column 0 of a token is its first key, not key 0
    clean: Any  # Int32           1: columns of other keys become -inf
    ctas: Any  # Int32            of the grid
    enable_pdl: Any  # Int32      launch with programmatic stream serialisation


def fields(spec: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a kernel of `spec`, in launch order."""
    return IndexerArgs._fields


def pack(spec: Any, flat: Sequence[Any]) -> IndexerArgs:
    """Put the arguments of a launch, in the order of `fields`, under their names."""
    return families.pack(IndexerArgs, fields(spec), flat)
