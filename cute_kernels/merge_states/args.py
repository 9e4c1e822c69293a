"""Arguments of a launch that merges states: the only statement of the kernels' launch ABI.

A kernel takes the fields that its spec has (`fields`); on the device the others are None. An absent mask has size 0.
The tensors have an element at least.

Shapes: N tokens, S states, H heads, D elements of a row. Strides are any; the last one of V is 1. S is fp32 and in base
2."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .. import families


class MergeArgs(NamedTuple):
    """The arguments of a launch."""

    v: Any  # (N, S, H, D)       spec.dtype; pair: (N, H, D)
    s: Any  # (N, S, H)          fp32; pair: (N, H)
    v_out: Any  # (N, H, D)      spec.dtype; pair: may be v
    s_out: Any  # (N, H)         fp32; pair: may be s
    lanes_log2: Any  # Int32     log2 of the lanes per row: 0 to 5
    enable_pdl: Any  # Int32     launch with programmatic stream serialisation
    # pair
    v_other: Any = None  # (N, H, D)  spec.dtype: the second state
    s_other: Any = None  # (N, H)
    mask: Any = None  # (N | 0,)  uint8: tokens with 0 keep the bytes of v_out and s_out


PAIR = ("v_other", "s_other", "mask")
OPTIONAL: dict[str, Callable[[Any], bool]] = {  # field -> whether a spec has it; every spec has the fields not listed
    **dict.fromkeys(PAIR, lambda spec: spec.pair),
}


def fields(spec: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a kernel of `spec`, in launch order."""
    return families.fields(MergeArgs, OPTIONAL, spec)


def pack(spec: Any, flat: Sequence[Any]) -> MergeArgs:
    """Put the arguments of a launch, in the order of `fields`, under their names."""
    return families.pack(MergeArgs, fields(spec), flat)
