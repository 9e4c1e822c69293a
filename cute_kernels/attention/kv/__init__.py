"""The sources of KV blocks: how the rows of a block reach shared memory.

pages    a row of a sequence -> its page
tma      the source for pages of 8, 16, 32, ... 256 rows, and for ragged rows (no pages)
gather   the source for pages of any size, and for slots: rows that are named one by one
bulk     the same rows of packed records, as they are stored
packed   the same rows for packed records of latent attention: no load warp fills stages, but the mma warps convert
record_rows  the sections of a packed row, and where in its cache it is, for `bulk` and `packed`
scales   the scale factors beside a cache, of blocks or of rows, loaded into the stages that a source fills
rings    the operands in shared memory: rings of stages with their pipelines

A source is a module with `operand` and `fence_before_mma` and, called by `load.load_kv`, `page_id_cache`,
`prefetch_pages` and `fill`; those of `packed` are called by `sm90.scoring`.
"""

from . import bulk, gather, packed, tma

SOURCE = {"tma": tma, "gather": gather, "slots": gather}


def source(spec):
    """Return the module that loads the K and V of a spec."""
    if spec.tile.bulk_rows:
        return bulk
    return packed if spec.kv.record else SOURCE[spec.kv.source]
