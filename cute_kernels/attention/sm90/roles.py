"""The roles of prefill's warps: a table from which ranges, arrival counts and register budgets follow."""

from ...device.roles import Role, Roles
from ..prepare import dequantises, mma_dtype
from ..schedule import work

REGISTERS = {1: (40, 232), 2: (40, 232), 3: (32, 160)}  # math warpgroups -> (load, math) registers a thread
DEQUANTISING = {1: (40, 80, 232), 2: (32, 64, 208)}  # math warpgroups -> (load, prepare, math) registers
Q_IN_REGISTERS = (32, 32, 224)  # the same of two, where the math has Q, too
TRANSPOSING = {1: (40, 40, 232), 2: (32, 40, 216)}  # the same
SHARING = (72, 72, 232)  # the same, where CTAs share the keys of requests
WARPS = 4  # warps of a warpgroup


def fp8(spec):
    """Whether the MMAs multiply numbers of 8 bits."""
    return mma_dtype(spec) == "e4m3"


def prepared(spec):
    """Whether stages of (K, V) are made from what was loaded: dequantised, or, WGMMA takes an 8-bit V only so,
    transposed."""
    return dequantises(spec), dequantises(spec) or fp8(spec)


def scaled_rows(spec):
    """Whether each row has a score scale of its own."""
    return any(prepared(spec))


def has_prepare_warpgroup(spec):
    """Whether those that prepare have a warpgroup of their own, a warp for each of the SM's four schedulers. Three math
    warpgroups leave no registers for it."""
    return any(prepared(spec)) and spec.tile.warpgroups < 3


def roles(spec) -> Roles:
    t, scales, keys = spec.tile, int(spec.kv.block_scaled), 0 if fp8(spec) else WARPS // 2
    shares = int(work.is_split_kv(spec))
    loading: dict[str, int] = {"load_k": t.load_warps, "load_v": t.load_warps, "schedule": shares}
    preparing: dict[str, int] = {}
    spare = WARPS - 2 * t.load_warps - shares
    if has_prepare_warpgroup(spec):
        registers = SHARING if shares else (TRANSPOSING if fp8(spec) else DEQUANTISING)[t.warpgroups]
        registers = Q_IN_REGISTERS if t.q_in_regs else registers
        loading |= {"load_scales": scales, "idle": spare - scales}
        groups = 1 + shares  # of these warps: with one of math, MMAs wait for them
        preparing |= {"prepare_k": groups * keys, "prepare_v": groups * (WARPS - keys)}
    else:
        load, mma = SHARING[::2] if shares else REGISTERS[t.warpgroups]
        registers = load, load, mma
        loading |= {"prepare_v" if fp8(spec) else "idle": spare}
    each = loading, preparing, {"mma": WARPS * t.warpgroups}
    table = (Role(name, warps, n) for n, group in zip(registers, each, strict=True) for name, warps in group.items())
    return Roles.of(*table)
