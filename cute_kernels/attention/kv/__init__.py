"""The sources of KV blocks: how the rows of a block reach shared memory.

pages    a row of a sequence -> its page
tma      the source for pages of 8, 16, 32, ... 256 rows, and for ragged rows (no pages)
gather   the source for pages of any size
scales   the scale factors of block-scaled caches, loaded into the stages that a source fills

A source is a module with `operand`, `page_id_cache`, `prefetch_pages`, `fill` and `fence_before_mma`; `load.load_kv`
calls them. `arrivals` says how many arrivals of its warps complete a stage.
"""

from . import gather, tma

SOURCE = {"tma": tma, "gather": gather}
LANES = 32  # per warp that copies by cp.async: each lane arrives


def arrivals(spec, roles):
    """Return the arrivals that complete a stage of K or V: one per load warp (TMA) or per lane of it (gather), and one
    per lane that copies scale factors."""
    each = LANES if spec.kv.source == "gather" else 1
    return each * roles.warps("load_k") + LANES * roles.warps("load_scales")


def stage_columns(spec, x, dim):
    """Return the columns of a stage of K or V for a padded head dim, in elements of x as they are stored."""
    return dim * spec.kv.bits // x.element_type.width


def source(spec):
    """Return the module that loads the K and V of a spec."""
    return SOURCE[spec.kv.source]
