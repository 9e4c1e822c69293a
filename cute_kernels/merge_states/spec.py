"""Static facts of the kernels that merge states: the compile key, the artifact's name and the test id.

Everything else is an argument of the launch (`args.MergeArgs`): head_dim, heads, the number of states and strides."""

from dataclasses import dataclass

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}  # per element of V
VECTOR_BYTES = 16  # the widest access


@dataclass(frozen=True)
class MergeSpec:
    """A kernel that merges states.

    dtype: of V. pair: the states are two tensors, of which the first may be the output; else one tensor has all."""

    dtype: str = "bf16"
    pair: bool = False

    @property
    def elements(self) -> int:
        """Elements of a row in a vector."""
        return VECTOR_BYTES // BYTES[self.dtype]

    @property
    def name(self) -> str:
        """A short readable identifier, unique among shipped specs."""
        return f"{self.dtype}_{'pair' if self.pair else 'states'}"
