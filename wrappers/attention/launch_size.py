"""How many CTAs a launch with split keys has, and how they share equal tiles."""

from typing import Any

from cute_kernels.attention import decode
from cute_kernels.attention.request import KernelRequest
from cute_kernels.attention.schedule import policy


def ctas(request: KernelRequest, spec: Any, most: int, blocks: int) -> int:
    """Return the number of CTAs of a launch with split keys: all that the GPU has room for or, if nearly all SMs still
    work, a multiple of the number of tiles. If lengths are equal, no CTA then has the end of one tile and the begin of
    the next. Tiles of few keys, of which an SM has several, are not split as long as there are CTAs for all. Nor are
    tiles that are nearly as many as TPCs, pairs of SMs, if one CTA for each TPC keeps the memory busy: a split would
    add the time of a merge."""
    tiles = _most_tiles(request, spec)
    if blocks or not policy.is_split_kv(spec) or not tiles:
        return most
    if spec.tile.ctas_per_sm > 1 and decode.is_narrow(request):
        return min(tiles, most)
    tpcs = most // 2
    if decode.one_cta_per_tpc(spec) and tiles <= tpcs and _nearly_all(tiles, tpcs):
        return tiles
    whole = most // tiles * tiles
    return whole if _nearly_all(whole, most) else most


def whole_shares(request: KernelRequest, spec: Any, most: int, blocks: int) -> tuple[int, int]:
    """Return `ScheduleArgs.whole_ctas` and `whole_tiles` of a launch of `most` CTAs. They are 0 if there are no more
    tiles than CTAs (`ctas`), or if no number of CTAs that is nearly `most` divides the tiles."""
    tiles = _most_tiles(request, spec)
    if blocks or not policy.prefers_whole_tiles(spec) or tiles <= most:
        return 0, 0
    each = -(-tiles // most)
    whole, rest = divmod(tiles, each)
    return (whole, each) if rest == 0 and _nearly_all(whole, most) else (0, 0)


def _most_tiles(request: KernelRequest, spec: Any) -> int:
    """Return the most tiles that a launch with split keys has."""
    return int(request.kv_heads * -(-request.packed_rows // spec.tile.m_choices[-1]) * spec.tile.o_tiles)


def _nearly_all(count: int, places: int) -> bool:
    """Return whether `count` CTAs leave few of the places for CTAs idle."""
    return 16 * count >= 15 * places
