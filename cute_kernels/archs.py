"""The table of GPU architectures. Everything else that lists architectures follows from it. No torch, no DSL.

A new architecture is a row. The kernels that need only what all rows have (`MMA_SYNC`, TMA, clusters) serve it then. A
change of this file changes every artifact key.
"""

from typing import NamedTuple

WGMMA, TCGEN05, MMA_SYNC = "wgmma", "tcgen05", "mma.sync"
CVT_E2M1 = "cvt.e2m1x2"  # converts two e2m1 codes
KIB = 1024


class Arch(NamedTuple):
    """One architecture.

    name: the compiler's target. product: a GPU that has it. capability: the compute capability. sms: SMs of the
    product, used where no such GPU is present. sms_per_gpc: SMs of a GPC, in which a cluster lies. max_cluster: CTAs of
    the largest cluster. smem_per_cta: bytes of shared memory that a CTA can have. smem_per_sm: bytes for the CTAs of an
    SM, each of which takes 1024 more than it asks for. instructions: of those that only some architectures have.
    """

    name: str
    product: str
    capability: tuple[int, int]
    sms: int
    sms_per_gpc: int
    max_cluster: int
    smem_per_cta: int
    smem_per_sm: int
    instructions: tuple[str, ...]


_B200 = Arch("sm_100a", "B200", (10, 0), 148, 18, 16, 227 * KIB, 228 * KIB, (TCGEN05, MMA_SYNC, CVT_E2M1))
_SM120 = Arch("sm_120a", "RTX PRO 6000", (12, 0), 188, 16, 8, 99 * KIB, 100 * KIB, (MMA_SYNC, CVT_E2M1))
TABLE = (
    Arch("sm_90a", "Hopper", (9, 0), 132, 18, 16, 227 * KIB, 228 * KIB, (WGMMA, MMA_SYNC)),
    _B200,
    _B200._replace(name="sm_103a", product="B300", capability=(10, 3)),
    _SM120,
    _SM120._replace(name="sm_121a", product="DGX Spark", capability=(12, 1), sms=48),
)
BY_NAME = {arch.name: arch for arch in TABLE}
NAMES = tuple(BY_NAME)


def having(instruction: str) -> tuple[str, ...]:
    """Return the names of the architectures that have an instruction."""
    return tuple(arch.name for arch in TABLE if instruction in arch.instructions)


def lacking(*instructions: str) -> tuple[str, ...]:
    """Return the names of the architectures that have none of these instructions."""
    return tuple(arch.name for arch in TABLE if not set(instructions) & set(arch.instructions))


def of(name: str) -> Arch:
    """Return the row of an architecture. Raise ValueError for a name without a row, which no kernel serves."""
    if name not in BY_NAME:
        raise ValueError(f"arch: {name!r}, must be one of {', '.join(NAMES)}")
    return BY_NAME[name]
