"""Logits of an indexer on Hopper: host part, shared memory, kernel entry.

CTAs are persistent: each finds its share of all blocks of keys (`schedule`), and computes it tile by tile. A tile has
the queries of up to `rows` tokens, so that a key is read once for all of them, and (token, head) pairs are columns of
the MMAs, in which rows are keys. Start reading the computation at `scores`.

| role | warps | registers | waits for | signals |
| --- | --- | --- | --- | --- |
| keys | 2 or 4 | 40 | work_pipe full, k_pipe empty | k_pipe full, q_pipe empty |
| queries | 1 | 40 | q_pipe empty | work_pipe full, q_pipe full |
| clean | 1 | 40 | | |
| mma | 8 | 232 or 216 | work_pipe, q_pipe, k_pipe full | k_pipe, q_pipe empty |

While the previous kernel may still run, the clean warp fetches into the L2 what the CTA will probably read (`hints`).

- work_pipe (2 stages): which blocks of which tile come next. Its stages are freed with those of q_pipe.
- q_pipe (2 stages): queries and weights of a tile.
- k_pipe (8 stages, 4 of keys in bf16): 64 keys and their scales, for one of two mma warpgroups.

Shared memory: 2 x (rows H x D + weights), 8 or 4 x (64 x D + scales), 1024-byte aligned, records of tiles, barriers.
Queries and keys are e4m3 or bf16. The TMA copies of keys are in `boxes`, those by cp.async in `load`.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, const_expr

from ... import abi
from ...device.divisor import quotient_params
from ..args import IndexerArgs, fields, pack
from . import boxes, hints, load, schedule, scores
from .output import clean
from .roles import roles, threads


def fake_args(spec) -> dict[str, Any]:
    out, kind = abi.DTYPES[spec.out], abi.DTYPES[spec.keys]
    found: dict[str, Any] = {
        "q": abi.tensor(kind, (None, None, spec.dim), align=16, stride_divisibility=128 // kind.width),
        "k": abi.tensor(Uint8, (None, None, None), align=4, stride_divisibility=4),
        "k_scale": abi.tensor(Float32, (None,), align=4, last_stride_one=False),
        "weights": abi.tensor(Float32, (None, None), align=4),
        "table": abi.tensor(Int32, (None, None), align=4),
        "starts": abi.tensor(Int32, (None,), align=4),
        "ends": abi.tensor(Int32, (None,), align=4),
        "out": abi.tensor(out, (None, None), align=out.width // 8),
    }
    return {name: found.get(name, Int32(0)) for name in fields(spec)}


@dataclass(frozen=True)
class LogitsParams:
    """The kernel's parameters. page_size: `quotient_params` of the keys of a page."""

    args: IndexerArgs
    page_size: Any
    boxes: boxes.KeyBoxes


@cute.jit
def forward(spec: cutlass.Constexpr, stream, *flat):
    a = pack(spec, flat)
    plan = LogitsParams(a, quotient_params(cutlass.max(a.k.shape[1], 1)), boxes.make(spec, a))
    kernel(spec, plan).launch(
        grid=[a.ctas, 1, 1],
        block=[const_expr(threads(spec)), 1, 1],
        stream=stream,
        use_pdl=a.enable_pdl,
        min_blocks_per_mp=1,
    )


@cute.kernel
def kernel(spec: cutlass.Constexpr, plan: LogitsParams):
    """Find the CTA's share, then run each warp's role with the registers of its warpgroup."""
    a, smem = plan.args, cutlass.utils.SmemAllocator()
    s, found = load.allocate(spec, smem), schedule.allocate(spec, smem)
    cute.arch.mbarrier_init_fence()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        boxes.prefetch(plan.boxes)
    if warp != roles(spec).first("clean"):
        cute.arch.griddepcontrol_wait()  # with PDL: roles read what the previous kernel wrote
        schedule.find_share(spec, a, found)
    if warp < roles(spec).first("mma"):
        cute.arch.setmaxregister_decrease(roles(spec).registers("keys"))
        if warp < roles(spec).first("queries"):
            load.load_keys(spec, plan, s, warp)
        elif warp == roles(spec).first("queries"):
            load.load_queries(spec, a, s, schedule.share_of(found))
        elif warp == roles(spec).first("clean"):
            cute.arch.griddepcontrol_launch_dependents()
            if const_expr(spec.keys == "e4m3"):  # keys in bf16 have no pages
                hints.prefetch(spec, plan)
            cute.arch.griddepcontrol_wait()
            clean(spec, a)
    else:
        cute.arch.setmaxregister_increase(roles(spec).registers("mma"))
        scores.compute(spec, a, s)
