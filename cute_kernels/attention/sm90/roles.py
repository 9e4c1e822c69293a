"""The table of warp roles, from which warp ranges, arrival counts and register budgets follow. See `forward`."""

from typing import Any

from ...device.roles import Role, Roles
from ..kv import scales
from ..schedule import policy
from . import precision

# Registers per thread of the (load, prepare, mma) warpgroups, by the number of mma warpgroups
REGISTERS = {1: (40, 232), 2: (40, 232), 3: (32, 160)}  # (load, mma), without a prepare warpgroup
DEQUANTISING = {1: (40, 80, 232), 2: (32, 64, 208)}
Q_IN_REGISTERS = (32, 32, 224)  # dequantising with two mma warpgroups that hold Q in registers
TRANSPOSING = {1: (40, 40, 232), 2: (32, 40, 216)}
WIDE_LOAD = (48, 48, 208)  # dequantising with two mma warpgroups, if these have the same rows, or scales are narrow
TRANSPOSING_PARTS = (56, 224)  # (load, mma) with two mma warpgroups that have the same rows
SHARED_SCORES = (56, 224)  # (load, mma) with mma warpgroups that have a part each of the scores
SPLIT_KV = {1: (72, 72, 232), 2: (72, 72, 216)}  # tiles may be split among CTAs
SCORES_APART = (40, 88, 192)
CONVERTING = (24, 72, 208)  # the same over packed records, which the mma warps load and convert
ALTERNATING = (56, 224)  # (load, mma) with mma warpgroups that have the scores of blocks in turn
WARPS = 4  # warps per warpgroup


def has_prepare_warpgroup(spec):
    """Report whether the prepare roles have their own warpgroup, one warp on each of the SM's four schedulers.

    Three mma warpgroups leave no registers for it, and neither do two that have 256 columns of O each and promote them.
    """
    promotes_wide = precision.transposes_v(spec) and spec.tile.o_parts > 1
    return precision.prepares_any(spec) and spec.tile.warpgroups < 3 and not promotes_wide


def needs_wide_load(spec):
    """Report whether the load roles need more registers than others of kernels that dequantise: for the addresses of
    head_dim 512, or for scale factors that go through registers."""
    return precision.of(spec).converts_kv and (spec.tile.o_parts > 1 or scales.has_narrow_rows(spec))


def roles(spec) -> Roles:
    """Return the roles of a CTA's warps: load warpgroup, prepare warpgroups if any, mma warpgroups."""
    t, split_kv = spec.tile, policy.is_split_kv(spec)
    sf_warps, schedule_warps = scales.load_warps(spec), policy.schedule_warps(spec)
    operands = precision.operands(spec)
    prepared = [x for x in operands if x.prepared]
    loading: dict[str, int] = {x.load_role: t.load_warps for x in operands} | {"schedule": schedule_warps}
    preparing: dict[str, int] = {}
    spare = WARPS - sum(loading.values())
    if t.scores_apart:
        loading |= {"prefetch" if spec.kv.record else "idle": spare}
        each: Any = loading, {"score": WARPS}, {"mma": WARPS * t.warpgroups}
        table = (
            Role(name, warps, n)
            for n, group in zip(CONVERTING if spec.kv.record else SCORES_APART, each)
            for name, warps in group.items()
        )
        return Roles.of(*table)
    if has_prepare_warpgroup(spec):
        registers = (TRANSPOSING if precision.transposes_v(spec) else DEQUANTISING)[t.warpgroups]
        registers = WIDE_LOAD if t.warpgroups > 1 and needs_wide_load(spec) else registers
        registers = SPLIT_KV[1] if split_kv else registers
        registers = Q_IN_REGISTERS if t.q_in_regs else registers
        loading |= {"load_scales": sf_warps, "idle": spare - sf_warps}
        # With split KV there is one mma warpgroup, and its MMAs would wait for a single prepare warpgroup.
        warps = 2 * WARPS if split_kv else WARPS
        preparing |= {x.prepare_role: warps // len(prepared) for x in prepared}
    else:
        load, mma = SPLIT_KV[t.warpgroups][::2] if split_kv else REGISTERS[t.warpgroups]
        load, mma = TRANSPOSING_PARTS if precision.prepares_any(spec) and t.o_parts > 1 else (load, mma)
        load, mma = SHARED_SCORES if t.s_parts > 1 else ALTERNATING if t.alternates else (load, mma)
        registers = load, load, mma
        loading |= {"prepare_v" if precision.prepares_any(spec) else "idle": spare}
    each = loading, preparing, {"mma": WARPS * t.warpgroups}
    table = (Role(name, warps, n) for n, group in zip(registers, each, strict=True) for name, warps in group.items())
    return Roles.of(*table)
