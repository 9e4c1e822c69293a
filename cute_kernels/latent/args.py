"""Arguments of a launch that writes rows of latent attention: the only statement of the kernels' launch ABI.

An absent optional tensor has size 0 in its first mode; it is never None. A kernel takes the fields that its spec has
(`fields`); on the device the others are None. Index tensors are as in `cache_write.args`, and have the same names.

Shapes: N tokens, D latent values, R rotated ones, Hq query heads, P rows per page, B requests, L positions of a table.
Rows may have any strides but the last, which is 1.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .. import families
from ..records import INDEX

INTERLEAVED = 1  # bit of `rope`, as in `cache_write.args`


class LatentArgs(NamedTuple):
    """The arguments of a launch."""

    kv: Any  # (N | 0, D)             spec.dtype; no rows: nothing is written to the cache
    pe: Any  # (N | 0, R)             spec.dtype; the rotated part; index: (0, R), it is the first part of kv
    cache: Any  # (pages, P, bytes)   uint8; any strides of pages and rows, last 1; planar records: rows are dense
    pe_cache: Any  # (pages | 0, P, bytes)  uint8; ROWS and e4m3: the rotated part goes here instead of behind kv
    places: Any  # Int32              SLOTS, PAGES or ROWS, as in `cache_write.args`
    wide: Any  # Int32                bit i: the i-th of `cache_write.args.INDICES` holds int64 values
    slots: Any  # (N,)
    batch_indices: Any  # (N | 0,)
    positions: Any  # (N | 0,)
    page_table: Any  # (B | 0, M)
    kv_indices: Any  # (M | 0,)
    kv_indptr: Any  # (B + 1 | 0,)
    cu_seqlens: Any  # (B + 1 | 0,)
    kv_lens: Any  # (B | 0,)
    weight: Any  # (D | D + R | 0,)   spec.dtype: weights of the RMS norm of kv, or of kv and pe together; index: those
    #                                 of its layer norm
    norm_eps: Any  # Float32
    norm_offset: Any  # Float32       added to the weights
    rope_table: Any  # (L | 0, R)     fp32: cosines, then sines of R / 2 pairs at each position
    rope_rows: Any  # (L | 0, R)      spec.dtype: the same, instead of rope_table
    rope: Any  # Int32                INTERLEAVED: pairs are neighbours, not halves
    rope_positions: Any  # (N | 0,)   position in the table; absent: that in the request
    q: Any  # (N | 0, Hq, Dq | 0)     spec.dtype: the part of the query that is not rotated; index: all of it
    q_pe: Any  # (N | 0, Hq, R)       spec.dtype; index: (N, Hq, 0)
    q_out: Any  # (N | 0, Hq, Dq + R) spec.dtype, or
    q_fp8: Any  # (N | 0, Hq, Dq + R) e4m3
    ctas: Any  # Int32                of the grid: warps take rows in turn
    enable_pdl: Any  # Int32          launch with programmatic stream serialisation
    # records other than the indexer's
    pe_out: Any = None  # (N | 0, R)  spec.dtype: receives the rotated part, too; may be pe
    scale: Any = None  # Float32      e4m3: values are divided by it
    scale_ptr: Any = None  # (1 | 0,) fp32, replaces scale
    q_scale: Any = None  # Float32    an 8-bit query is divided by it
    q_scale_ptr: Any = None  # (1 | 0,)
    # records with fp32 factors
    power_of_two: Any = None  # Int32  1: factors are rounded up to powers of two
    # the indexer's
    bias: Any = None  # (D | 0,)      spec.dtype: of the layer norm; absent: weight is that of an RMS norm
    weights: Any = None  # (N | 0, Hq)  fp32: weights of the query's heads
    weights_out: Any = None  # (N | 0, Hq)  fp32: weights times the scales of the rows of q_fp8 times weight_scale
    weight_scale: Any = None  # Float32
    # joined: the rows of an indexer besides; i_x is what x is in the indexer's own kernel
    i_kv: Any = None  # (N, 128)
    i_cache: Any = None
    i_places: Any = None  # Int32     SLOTS: i_slots; PAGES: as for the latent
    i_wide: Any = None
    i_slots: Any = None
    i_weight: Any = None
    i_bias: Any = None
    i_norm_eps: Any = None
    i_rope_table: Any = None
    i_rope_rows: Any = None
    i_rope: Any = None
    i_rope_positions: Any = None
    i_q: Any = None
    i_q_fp8: Any = None
    i_power_of_two: Any = None


JOINED = tuple(name for name in LatentArgs._fields if name.startswith("i_"))
OPTIONAL: dict[str, Callable[[Any], bool]] = {  # field -> whether a spec has it; every spec has the fields not listed
    **dict.fromkeys(("pe_out", "scale", "scale_ptr", "q_scale", "q_scale_ptr"), lambda spec: not spec.index),
    "power_of_two": lambda spec: spec.form.factor == "fp32",
    "bias": lambda spec: spec.index,
    **dict.fromkeys(("weights", "weights_out", "weight_scale"), lambda spec: spec.index or spec.joined),
    **dict.fromkeys(JOINED, lambda spec: spec.joined),
}


def fields(spec: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a kernel of `spec`, in launch order."""
    return families.fields(LatentArgs, OPTIONAL, spec)


def indexer_args(a: LatentArgs) -> LatentArgs:
    """Return the arguments of the indexer's rows of a joined launch, under the names of its own kernel."""
    own = {name[2:]: getattr(a, name) for name in JOINED}
    return a._replace(**own)


def pack(spec: Any, flat: Sequence[Any]) -> LatentArgs:
    """Put the arguments of a launch, in the order of `fields`, under their names."""
    return families.pack(LatentArgs, fields(spec), flat)


READ_INDICES = ("page_table", "starts", "firsts")  # index tensors, in the order of the bits of `wide`


class ReadArgs(NamedTuple):
    """The arguments of a launch that reads rows. S: rows of the output, W: its columns."""

    cache: Any  # (pages, P, bytes)   as in `LatentArgs`
    out: Any  # (S, W)                spec.dtype
    page_table: Any  # (B, M)
    starts: Any  # (B | B + 1,)       the first row of each request in out, and the end of the last one
    firsts: Any  # (B | 0,)           the position of that row in its request; absent: 0
    wide: Any  # Int32                bit i: the i-th of READ_INDICES holds int64 values
    rows: Any  # Int32                rows of out that requests have, at most
    ctas: Any  # Int32                of the grid
    enable_pdl: Any  # Int32          launch with programmatic stream serialisation
    scales: Any = None  # (S, 4)      index: uint8, receives the scales
    scale: Any = None  # Float32      e4m3: codes are multiplied by it
    scale_ptr: Any = None  # (1 | 0,) fp32, replaces scale


READ_OPTIONAL: dict[str, Callable[[Any], bool]] = {
    "scales": lambda spec: spec.record == INDEX,
    **dict.fromkeys(("scale", "scale_ptr"), lambda spec: spec.record == "e4m3"),
}


def read_fields(spec: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a kernel of a `ReadSpec`, in launch order."""
    return families.fields(ReadArgs, READ_OPTIONAL, spec)


def pack_read(spec: Any, flat: Sequence[Any]) -> ReadArgs:
    """Put the arguments of a launch, in the order of `read_fields`, under their names."""
    return families.pack(ReadArgs, read_fields(spec), flat)
