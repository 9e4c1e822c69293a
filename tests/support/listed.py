"""A one-warp kernel that lists the tiles of a launch in their order."""

import cutlass
import cutlass.cute as cute

from cute_kernels.attention import args, geometry
from cute_kernels.attention.schedule import tiles


@cute.kernel
def listing(spec: cutlass.Constexpr, a: args.AttentionArgs, found: cute.Tensor):
    order = tiles.allocate(spec, cutlass.utils.SmemAllocator())
    tiles.begin(spec, a, order)
    for tile in cutlass.range(found.shape[0], unroll=1):
        w, _ = tiles.find(spec, a, tile, order)
        for i, value in enumerate(
            (w.is_valid, w.batch_idx, w.head_idx, w.m_block, w.pack_factor, w.n_block_min, w.n_block_max)
        ):
            if cute.arch.lane_idx() == 0:
                found[tile, i] = value


@cute.jit
def forward(spec: cutlass.Constexpr, stream, found: cute.Tensor, *flat):
    listing(spec, geometry.launch_args(spec, flat), found).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)
