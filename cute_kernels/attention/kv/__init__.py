"""The sources of KV blocks: how the rows of a block reach shared memory.

pages    a row of a sequence -> its page
tma      the source for pages of 8, 16, 32, ... 256 rows, and for ragged rows (no pages)
gather   the source for pages of any size, and for slots: rows that are named one by one
packed   the same for packed records of latent attention, which are converted on the way
scales   the scale factors beside a cache, of blocks or of rows, loaded into the stages that a source fills
rings    the operands in shared memory: rings of stages with their pipelines

A source is a module with `operand`, `page_id_cache`, `prefetch_pages`, `fill` and `fence_before_mma`; `load.load_kv`
calls them.
"""

from . import gather, packed, tma

SOURCE = {"tma": tma, "gather": gather, "slots": gather}


def source(spec):
    """Return the module that loads the K and V of a spec."""
    return packed if spec.kv.record else SOURCE[spec.kv.source]
