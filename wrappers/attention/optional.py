"""The tensors that an attention call may lack: what each must be, and how a launch takes it.

A tensor that only needs a dtype and a shape is one row of `OPTIONAL_TENSORS` beside its field in `AttentionCall` and
its argument in `cute_kernels.attention.args`: checks, plans and the torch operator follow from the row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..host.checks import check_operand, check_shape
from .call import AttentionCall

# Bound of the bytes of a custom mask, or of an output's scale factors, which kernels count in int32.
MOST_MASK = 1 << 31


def _whole(t: Any) -> Any:
    return t.dtype, t.shape


def _row(t: Any) -> Any:
    return t.dtype, t.shape[1:]


def per_token(present: Any) -> tuple[str, ...]:
    """Return those of some fields whose tensors have a row per token, which is not part of a plan's key."""
    return tuple(field for field in present if OPTIONAL_TENSORS[field].shape[:1] == ("tokens",))


def _as_bytes(t: torch.Tensor) -> torch.Tensor:
    return (t if t.ndim == 4 else t.unsqueeze(-1)).view(torch.uint8)


def _flat(t: torch.Tensor) -> torch.Tensor:
    return t if t.ndim == 1 else t.reshape(-1)


def between_words(mask: torch.Tensor | None) -> bool:
    """Return whether a custom mask begins inside a word of 4 bytes. Kernels read whole words."""
    return mask is not None and mask.data_ptr() % 4 != 0


def _mask_words(mask: torch.Tensor) -> torch.Tensor:
    if mask.shape[0] >= MOST_MASK:
        raise NotImplementedError(f"custom_mask: {mask.shape[0]} bytes, must be less than {MOST_MASK} on CUDA")
    return mask.clone() if between_words(mask) else mask


class OptionalTensor(NamedTuple):
    """A tensor that a call may lack.

    fact: what of it the plan depends on. argument: its name in `args`. view: what is passed in its place. dtype, shape,
    why: what it must be; shape holds numbers and the names "tokens", "batch" and "heads". No dtype: `checks` has rules
    of its own for it. excludes: fields of a call that cannot be given beside it. needs_causal: the call's mask must be
    causal.
    """

    fact: Callable[[Any], Any]
    argument: str
    view: Callable[[torch.Tensor], torch.Tensor] | None = None
    dtype: torch.dtype | None = None
    shape: tuple[Any, ...] = ()
    why: str = ""
    excludes: tuple[str, ...] = ()
    needs_causal: bool = False


OPTIONAL_TENSORS = {  # the last fields of AttentionCall, in their order
    "sinks": OptionalTensor(_whole, "sink", None, torch.float32, ("heads",), "one value per query head"),
    "scale_tensor": OptionalTensor(_whole, "softmax_scale_ptr", _flat),
    "out_scale_tensor": OptionalTensor(_whole, "out_scale_ptr", _flat),
    "k_scales": OptionalTensor(_whole, "k_scales", _as_bytes),
    "v_scales": OptionalTensor(_whole, "v_scales", _as_bytes),
    "drafts": OptionalTensor(_row, "tree_mask"),
    "custom_mask": OptionalTensor(_row, "custom_mask", _mask_words, excludes=("drafts",)),
    "mask_starts": OptionalTensor(_whole, "mask_starts"),
    "ranges": OptionalTensor(
        _row, "ranges", None, torch.int32, ("tokens", 2), "the query's rows, first and last key",
        ("custom_mask", "drafts", "chunk"), needs_causal=True,
    ),
    "prefix_lens": OptionalTensor(
        _whole, "prefix_lens", None, torch.int32, ("batch",), "one length per request",
        ("custom_mask", "drafts", "ranges", "chunk"),
    ),
    "alibi_slopes": OptionalTensor(_whole, "alibi_slopes", None, torch.float32, ("heads",), "one slope per query head"),
    "q_rope": OptionalTensor(_row, "q_rope", shape=("tokens",)),
    "k_rope": OptionalTensor(_whole, "k_rope"),
    "extra_k": OptionalTensor(_whole, "extra_k"),
    "extra_k_rope": OptionalTensor(_whole, "extra_k_rope"),
    "extra_slots": OptionalTensor(_whole, "extra_slots"),
    "extra_lens": OptionalTensor(_whole, "extra_lens"),
}  # fmt: skip
NONE = 1 << 30  # the argument of a bound that is off, if the kernel has it
BOUNDS = {  # argument of `args` and field of a call that bounds the keys of a token -> whether a value turns it on
    "window_left": lambda value: value >= 0,
    "range_left": lambda value: value >= 0,
    "chunk": lambda value: value > 0,
}
NEEDED_BY = {"range_left": "ranges"}  # bound -> the tensor without which it means nothing


def bounds(call: AttentionCall) -> dict[str, int]:
    """Return the arguments of a launch that bound the keys of a token."""
    return {
        field: min(getattr(call, field), NONE) if on(getattr(call, field)) else NONE for field, on in BOUNDS.items()
    }


def check_optional(call: AttentionCall, name: Callable[[str], str]) -> None:
    """Raise on the first optional tensor that is not what its row says. name: from a field to the caller's name."""
    for field, tensor in NEEDED_BY.items():
        if BOUNDS[field](getattr(call, field)) and getattr(call, tensor) is None:
            raise ValueError(f"{name(field)}: {getattr(call, field)}, must be off without {name(tensor)}")
    sizes = {"tokens": call.q.shape[0], "batch": call.requests.batch, "heads": call.q.shape[1]}
    for field, row in OPTIONAL_TENSORS.items():
        given = getattr(call, field)
        if given is not None and row.dtype is not None:
            check_operand(name(field), given, len(row.shape), (row.dtype,), call.q.device)
            check_shape(name(field), given, tuple(sizes.get(size, size) for size in row.shape), row.why)
        if given is not None:
            for other in row.excludes:
                value = getattr(call, other)
                if value is not None and not isinstance(value, int):
                    raise ValueError(f"{name(other)}: given, must be None with {name(field)}")
                if value:
                    raise NotImplementedError(f"{name(other)}: {value}, must be 0 with {name(field)}: not supported")
            if row.needs_causal and not call.causal:
                raise ValueError(f"{name('causal')}: False, must be True with {name(field)}, which extend that mask")
