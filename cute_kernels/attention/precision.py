"""The precision of a kernel: in which types its MMAs run, and how Q, K and V get there from the types of the spec.

Roles ask `of(spec)` what to do and test no types themselves. The decisions of one architecture (the layout of V, the
range of P) are in `sm90.precision` and `sm100.precision`. A new type of K and V needs a row of
`dtypes.TABLE`, a place in `spec.QUANTISED`, and its conversion (`quant`). This file changes only if MMAs read the type
as it is stored.
"""

from dataclasses import dataclass
from typing import Any

from .. import abi
from ..device import warp
from ..dtypes import BITS
from . import quant


@dataclass(frozen=True)
class Precision:
    """How a kernel computes with the types of its spec.

    mma_dtype: operand type of both MMAs, and so of P. kv_format: how K and V are stored and converted. converts_kv:
    the prepare role converts K and V in shared memory, because MMAs read them there in another type than the stored
    one. q_dtype: type in which Q is loaded.
    """

    mma_dtype: str
    kv_format: quant.KVFormat
    converts_kv: bool
    q_dtype: str

    @property
    def mma_type(self) -> Any:
        """The CuTe type of `mma_dtype`."""
        return abi.DTYPES[self.mma_dtype]

    @property
    def operand_bytes(self) -> int:
        """Bytes of an element of Q, K, V and P as MMAs read them."""
        return BITS[self.mma_dtype] // 8

    @property
    def dequant_scale(self) -> float:
        """The factor by which S and O must be multiplied: K and V may be converted to numbers that are too small."""
        return self.kv_format.dequant_scale

    @property
    def converts_q(self) -> bool:
        """Whether Q must be converted before MMAs read it."""
        return self.q_dtype != self.mma_dtype

    @property
    def widens_q(self) -> bool:
        """Whether Q is loaded in fewer bits than MMAs read: it cannot be converted in place."""
        return BITS[self.q_dtype] < BITS[self.mma_dtype]

    @property
    def scales_q_rows(self) -> bool:
        """Whether each row of Q is divided by a power of two, since fp16 lacks the range of bf16. Scores must be
        multiplied by it."""
        return self.q_dtype == "bf16" and self.mma_dtype == "fp16"

    @property
    def is_8bit(self) -> bool:
        """Whether the MMAs multiply 8-bit numbers: P then has little range, and V may need another layout."""
        return self.operand_bytes == 1

    def pack_p(self, values: list[Any]) -> list[Any]:
        """Return neighbouring values of a row of P in the MMAs' type, as 32-bit words."""
        if self.is_8bit:
            return [warp.pack_e4m3(values[i : i + 4]) for i in range(0, len(values), 4)]
        return [warp.pack_16bit(self.mma_type, *values[i : i + 2]) for i in range(0, len(values), 2)]


def of(spec: Any) -> Precision:
    """Return the precision of a kernel whose MMAs read K and V from shared memory (WGMMA, tcgen05): they read the
    type of Q if K and V are stored in it, else fp16, which holds all values of quantised K and V. With a factor per
    row, K and V have any magnitudes, and become 16-bit numbers of Q's type."""
    of_rows = spec.kv.layout.of_rows
    q = spec.smem_q
    stored = q == spec.kv.dtype and not of_rows
    own = stored or of_rows and BITS[q] == 16
    return Precision(q if own else "fp16", quant.kv_format(spec), not stored, q)


def of_mma_sync(spec: Any) -> Precision:
    """Return the precision of a kernel with `mma.sync`, which multiplies 16 bits: quantised K and V are converted to
    fp16 in registers."""
    return Precision(spec.q if spec.kv.bits == 16 else "fp16", quant.kv_format(spec), False, spec.q)
