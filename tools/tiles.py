"""Propose tiles for a head dim: what a new row of a `tile_table` may begin with, before anything is measured.

    python -m tools.tiles 224          head_dim_qk = head_dim_vo = 224
    python -m tools.tiles 192 128      head_dim_qk = 192, head_dim_vo = 128 (decode has none)

A line per op and column of its table: the tile that the table has, or a proposed one, and what it takes of an SM. The
numbers are counted, not compiled.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from cute_kernels import archs
from cute_kernels.attention.decode import tile_table as decode
from cute_kernels.attention.sm90 import tile_table as sm90
from cute_kernels.attention.sm100 import tile_table as sm100
from cute_kernels.attention.spec import AttentionSpec, KVSpec
from cute_kernels.attention.tile import Resources

COLUMNS = {  # (op, column of its table) -> (type of queries, type of the cache)
    (sm90, "half"): ("bf16", "bf16"),
    (sm90, "fp8"): ("e4m3", "e4m3"),
    (sm90, "quantised"): ("bf16", "e4m3"),
    (sm90, "nvfp4"): ("bf16", "nvfp4"),
    (sm100, "half"): ("bf16", "bf16"),
    (sm100, "fp8"): ("e4m3", "e4m3"),
    (sm100, "quantised"): ("bf16", "e4m3"),
    (sm100, "e4m3_query"): ("e4m3", "e5m2"),
}


def described(where: str, tile: Any, known: bool, taken: Resources | None) -> str:
    """Return a line of the output."""
    if tile is None or taken is None:
        return f"{where} no tile fits"
    tmem = f", {taken.tmem} of {taken.tmem_limit} columns of tensor memory" if taken.tmem else ""
    resources = f"{taken.smem} of {taken.smem_limit} bytes, {taken.registers} of {taken.register_limit} registers{tmem}"
    return f"{where} {'' if known else 'proposed '}{tile}: {resources}"


def lines(dims: tuple[int, int]) -> Iterator[str]:
    """Return the lines of the output for padded (head_dim_qk, head_dim_vo)."""
    for (op, kind), (q, kv) in COLUMNS.items():
        measured = {row.dims: getattr(row, kind) for row in op.TABLE}.get(dims)
        tile = getattr(measured, "general", measured) or op.propose(q, kv, dims)
        spec: Any = AttentionSpec(q, KVSpec(kv), (q,), *dims)
        taken = op.resources(replace(spec, tile=tile), tile, dims) if tile else None
        yield described(f"{op.__name__.removeprefix('cute_kernels.').removesuffix('.tile_table')} {kind}:",
                        tile, measured is not None, taken)  # fmt: skip
    smem = max(arch.smem_per_cta for arch in archs.TABLE)
    for kind in ("half", "e4m3", "nvfp4") if dims[0] == dims[1] else ():
        for rows in (decode.FEW_ROWS, 2 * decode.FEW_ROWS):
            key = decode.TileKey(kind, dims[0], rows)
            known = decode.measured(False).get(key)
            found = known or decode.propose(key, smem)
            taken = decode.resources(key, found, smem) if found else None
            yield described(f"attention.decode {kind}: {rows} rows per warp:", found, known is not None, taken)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.tiles", description=__doc__.splitlines()[0])
    parser.add_argument("head_dim_qk", type=int)
    parser.add_argument("head_dim_vo", type=int, nargs="?")
    given = parser.parse_args(arguments)
    print("\n".join(lines((given.head_dim_qk, given.head_dim_vo or given.head_dim_qk))))


if __name__ == "__main__":
    main()
