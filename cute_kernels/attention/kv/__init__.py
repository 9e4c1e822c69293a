"""Where the rows of a KV block come from.

pages    a row of a request -> its page
tma      the source of pages of 8, 16, 32, ... rows, and of rows without pages
gather   the source of pages of any size
scales   the factors of block-scaled caches, in the stages that a source fills

A source owns the lookup, the fill, its warps and their arrivals (`arrivals`).
"""

from . import gather, tma

SOURCE = {"tma": tma, "gather": gather}
LANES = 32  # of a warp that copies by cp.async: each arrives


def arrivals(spec, roles):
    """Arrivals that fill a stage of K or V: one of each loading warp, or of each of its lanes where these copy, and one
    of each lane that copies scale factors."""
    each = LANES if spec.kv.source == "gather" else 1
    return each * roles.warps("load_k") + LANES * roles.warps("load_scales")


def source(spec):
    return SOURCE[spec.kv.source]
