"""The Blackwell kernels that the tests compile and simulate; no device runs them."""

from typing import Any

from cute_kernels import catalog
from cute_kernels.attention import sm90, sm100
from tests.sim import workloads

SPILLED = 24  # bytes that prefill's largest tiles may spill: values of a tile, outside the loop over blocks
BLACKWELL = [(arch, op, spec) for arch in catalog.ARCHS if arch not in sm90.ARCHS for op, spec in catalog.shipped(arch)]


def covering() -> list[tuple[str, str, Any]]:
    """Return one kernel of each structure in BLACKWELL, for sm_100a or sm_103a. test_sm120.py has those of others."""
    found = []
    for op in dict.fromkeys(op for arch, op, _ in BLACKWELL if arch in sm100.ARCHS):
        for number, arch in enumerate(archs := sm100.ARCHS):
            specs = [spec for *where, spec in BLACKWELL if where == [arch, op]]
            chosen = workloads.STRUCTURES[op.split(".")[0]](specs)
            found += [(arch, op, spec) for spec in chosen[number :: len(archs)]]
    return found


COVERING = covering()

# The kernels of COVERING that run, without --all, in a second simulator mode besides `eager`: (case, mode), 4 to 11
# seconds each; `random` takes three times as long. They cover pipelines with two halves, with alternating blocks and
# with blocks shared among CTAs, and one group with two slots for S.
ORDERED = {
    ("sm_100a", "bf16_d128_causal_tma_m256n128s2e4"): ("few", "late"),
    ("sm_100a", "bf16_d128_causal_tma_m128n96s3"): ("boxes", "newest"),
    ("sm_103a", "bf16_d256_anyw_cap_tma_m128n64s2"): ("ragged", "newest"),
}
