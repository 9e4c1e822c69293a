"""The table of warp roles, from which warp ranges, arrival counts and register budgets follow. See `forward`."""

from ...device.roles import Role, Roles
from ..prepare import dequantises, mma_dtype
from ..schedule import work

# Registers per thread of the (load, prepare, mma) warpgroups, by the number of mma warpgroups
REGISTERS = {1: (40, 232), 2: (40, 232), 3: (32, 160)}  # (load, mma), without a prepare warpgroup
DEQUANTISING = {1: (40, 80, 232), 2: (32, 64, 208)}
Q_IN_REGISTERS = (32, 32, 224)  # dequantising with two mma warpgroups that hold Q in registers
TRANSPOSING = {1: (40, 40, 232), 2: (32, 40, 216)}
STREAM_K = {1: (72, 72, 232), 2: (72, 72, 216)}  # schedule "stream_k": tiles may be split among CTAs
WARPS = 4  # warps per warpgroup


def fp8(spec):
    """Report whether the MMAs multiply 8-bit numbers."""
    return mma_dtype(spec) == "e4m3"


def prepared(spec):
    """Report, for (K, V), whether operand stages are made from loaded stages: dequantised, or transposed, since WGMMA
    takes an 8-bit V only K-major."""
    return dequantises(spec), dequantises(spec) or fp8(spec)


def scaled_rows(spec):
    """Report whether each row has its own score scale."""
    return any(prepared(spec))


def has_prepare_warpgroup(spec):
    """Report whether the prepare roles have their own warpgroup, one warp on each of the SM's four schedulers.

    Three mma warpgroups leave no registers for it.
    """
    return any(prepared(spec)) and spec.tile.warpgroups < 3


def roles(spec) -> Roles:
    """Return the roles of a CTA's warps: load warpgroup, prepare warpgroups if any, mma warpgroups."""
    t, scales, keys = spec.tile, int(spec.kv.block_scaled), 0 if fp8(spec) else WARPS // 2
    split_kv = int(work.is_split_kv(spec))  # 1 with schedule "stream_k", else 0
    loading: dict[str, int] = {"load_k": t.load_warps, "load_v": t.load_warps, "schedule": split_kv}
    preparing: dict[str, int] = {}
    spare = WARPS - 2 * t.load_warps - split_kv
    if has_prepare_warpgroup(spec):
        registers = STREAM_K[1] if split_kv else (TRANSPOSING if fp8(spec) else DEQUANTISING)[t.warpgroups]
        registers = Q_IN_REGISTERS if t.q_in_regs else registers
        loading |= {"load_scales": scales, "idle": spare - scales}
        groups = 1 + split_kv  # warpgroups: with one mma warpgroup, MMAs would wait for a single one
        preparing |= {"prepare_k": groups * keys, "prepare_v": groups * (WARPS - keys)}
    else:
        load, mma = STREAM_K[t.warpgroups][::2] if split_kv else REGISTERS[t.warpgroups]
        registers = load, load, mma
        loading |= {"prepare_v" if fp8(spec) else "idle": spare}
    each = loading, preparing, {"mma": WARPS * t.warpgroups}
    table = (Role(name, warps, n) for n, group in zip(registers, each, strict=True) for name, warps in group.items())
    return Roles.of(*table)
