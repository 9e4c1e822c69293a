"""Which kernels of Blackwell the tests compile and simulate: no device runs them."""

from typing import Any

from cute_kernels import catalog
from tools.ptxsim import workloads

SPILLED = 24  # bytes, of a tile's values: what prefill's largest tiles may spill, outside of what a block costs
BLACKWELL = [(arch, op, spec) for arch in ("sm_100a", "sm_103a") for op, spec in catalog.shipped(arch)]


def covering() -> list[tuple[str, str, Any]]:
    """Of the kernels in BLACKWELL, one of each structure, for one architecture or the other."""
    found = []
    for op in dict.fromkeys(op for _, op, _ in BLACKWELL):
        archs = list(dict.fromkeys(arch for arch, other, _ in BLACKWELL if other == op))
        for number, arch in enumerate(archs):
            specs = [spec for *where, spec in BLACKWELL if where == [arch, op]]
            chosen = workloads.STRUCTURES[op.split(".")[0]](specs)
            found += [(arch, op, spec) for spec in chosen[number :: len(archs)]]
    return found


COVERING = covering()
