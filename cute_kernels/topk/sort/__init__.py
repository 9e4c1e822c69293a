"""Sort what was selected. This file is plain Python: what the kernel can do, and what a launch takes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..spec import BITS

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
CAPACITIES = (2048, 4096)
EACH = 4  # elements of a thread
PARTS = 2  # bins for each element
FEW = 12  # elements of a bin that are put in order by comparing all of them


@dataclass(frozen=True)
class SortSpec:
    """capacity: elements of a row, at most."""

    dtype: str = "fp32"
    capacity: int = 2048

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.capacity // EACH

    @property
    def name(self) -> str:
        """A short readable identifier, unique among shipped specs."""
        return f"{self.dtype}_sort{self.capacity}"


Spec = SortSpec


class SortArgs(NamedTuple):
    """Dynamic facts of a launch: the only statement of its ABI."""

    values: Any  # (R, k)    floats; last stride 1
    indices: Any  # (R, k)   int64, in [0, 2^31), ascending in each row; last stride 1
    enable_pdl: Any  # Int32   launch with programmatic stream serialisation


def supports(spec: SortSpec) -> str | None:
    """None where the kernel runs `spec`, else the reason why not."""
    if spec.dtype not in BITS:
        return f"dtype {spec.dtype}: the kernel has {', '.join(BITS)}"
    if spec.capacity not in CAPACITIES:
        return f"capacity {spec.capacity}: the kernel has {', '.join(map(str, CAPACITIES))}"
    return None
