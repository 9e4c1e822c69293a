"""Convert and check argument values of the prefill family: names, types, scales, modifiers of logits, masks, copies.

Nothing here reads a value on a device. Nothing waits for one, except when a device's first ALiBi slopes are made.
"""

from operator import sub
from typing import Any, NamedTuple

import torch

from ..attention.call import Rope
from ..attention.checks import CACHES, OUTPUTS, QUERIES
from ..attention.optional import MOST_MASK
from ..host import machine
from ..host.checks import (
    UnknownName,
    check_flag,
    check_integer,
    check_one_of,
    check_operand,
    check_shape,
    check_strided,
    listed,
)
from ..host.plain import recorded
from ..host.scalars import integer, number, times
from ..host.scratch import kept
from .quantization import pack_segments

BACKENDS = ("auto", "fa2", "fa3", "cudnn", "cutlass", "trtllm-gen", "cute-dsl")  # upstream's; a hint here
MODES = ("NONE", "ROPE_LLAMA", "ALIBI")
NAMES = {  # field of `AttentionCall` -> its name in all functions of the family, unless these say otherwise
    "out_scale": "v_scale", "soft_cap": "logits_soft_cap", "scales": "kv_cache_sf", "k_scales": "kv_cache_sf (K)",
    "v_scales": "kv_cache_sf (V)", "interleaved": "v_scales_interleaved", "out_dtype": "o_data_type",
    "skip": "skip_softmax_threshold_scale_factor", "ranges": "bidirectional_ranges", "range_left": "range_window_left",
    "mask_starts": "custom_mask", "alibi_slopes": "pos_encoding_mode", "rope": "pos_encoding_mode",
    "scale": "sm_scale x q_scale x k_scale",
}  # fmt: skip
PAGED_KV = {"kv": "paged_kv_cache", "k": "paged_kv_cache (K)", "v": "paged_kv_cache (V)"}
_Tensor = torch.Tensor
_slopes: dict[tuple[torch.device, int], torch.Tensor] = {}


class HeadShape(NamedTuple):
    """Numbers of heads, their dimensions, and rows of a page (0 without pages)."""

    qo: int
    kv: int
    dim_qk: int
    dim_vo: int
    page_size: int


class TensorTypes(NamedTuple):
    """Dtypes of queries, of the cache and of the output."""

    q: torch.dtype
    kv: torch.dtype
    out: torch.dtype


class LogitsModifiers(NamedTuple):
    """Modifiers of the logits. soft_cap: 0.0 is off. sm_scale None: 1 / sqrt(head_dim)."""

    causal: bool
    mode: str
    sm_scale: float | None
    window_left: int
    soft_cap: float
    rope: Rope | None


def either(name: str, value: Any, alias: str, other: Any) -> Any:
    """Return the value of an argument with two names, None if neither is given."""
    if other is None:
        return value
    if value is not None:
        raise ValueError(f"{alias}: another name of {name}, only one of the two may be given")
    return other


def check_name(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise UnknownName(f"{name}: {value!r}, must be one of {listed(allowed)}")


def refuse(**given: Any) -> None:
    """Raise on the first argument that is given: each asks for something that nothing here supports."""
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name}: {type(value).__name__}, must be None: not supported")


def shape_of(qo: Any, kv: Any, dim_qk: Any, dim_vo: Any, page_size: Any) -> HeadShape:
    """Return a checked `HeadShape`. dim_vo None: dim_qk. page_size: an int that is already checked."""
    if dim_vo is None:
        dim_vo = dim_qk
    if (not qo.__class__ is kv.__class__ is dim_qk.__class__ is dim_vo.__class__ is int
            or qo < 0 or kv < 1 or dim_qk < 1 or dim_vo < 1):  # fmt: skip
        qo = check_integer("num_qo_heads", integer(qo), 0)
        kv = check_integer("num_kv_heads", integer(kv), 1)
        dim_qk = check_integer("head_dim", integer(dim_qk), 1)
        dim_vo = check_integer("head_dim_vo", integer(dim_vo), 1)
    if qo % kv:
        raise ValueError(f"num_qo_heads: {qo}, must be a multiple of num_kv_heads, {kv}")
    return HeadShape(qo, kv, dim_qk, dim_vo, page_size)


def dtype_of(name: str, value: Any) -> torch.dtype:
    """Return a dtype that is given as itself or by its name in torch."""
    if value.__class__ is torch.dtype:
        return value
    found = getattr(torch, value, None) if isinstance(value, str) else None
    if isinstance(found, torch.dtype):
        return found
    if isinstance(value, str):
        raise UnknownName(f"{name}: {value!r}, must be a dtype of torch")
    raise TypeError(f"{name}: {value!r}, must be a torch.dtype or its name")


def types_of(q: Any, kv: Any, out: Any) -> TensorTypes:
    """Return checked `TensorTypes`. kv and out default to q."""
    q = dtype_of("q_data_type", q)
    check_one_of("q_data_type:", q, QUERIES)
    kv = q if kv is None else dtype_of("kv_data_type", kv)
    out = q if out is None else dtype_of("o_data_type", out)
    check_one_of("o_data_type:", out, OUTPUTS)
    check_one_of("kv_data_type:", kv, CACHES[q])
    return TensorTypes(q, kv, out)


def modifiers_of(
    causal: Any, mode: Any, sm_scale: Any, window_left: Any, soft_cap: Any, rope_scale: Any, rope_theta: Any
) -> LogitsModifiers:
    check_flag("causal", causal)
    if mode != "NONE":
        check_name("pos_encoding_mode", mode, MODES)
    if sm_scale is not None:
        sm_scale = number("sm_scale", sm_scale)
    if window_left.__class__ is not int:
        window_left = -1 if window_left is None else check_integer("window_left", integer(window_left))
    if soft_cap is None:
        soft_cap = 0.0
    else:
        soft_cap = max(number("logits_soft_cap", soft_cap), 0.0)
    rope_scale = 1.0 if rope_scale is None else number("rope_scale", rope_scale, positive=True)
    rope_theta = 1e4 if rope_theta is None else number("rope_theta", rope_theta, positive=True)
    rope = Rope(rope_scale, rope_theta) if mode == "ROPE_LLAMA" else None
    return LogitsModifiers(causal, mode, sm_scale, window_left, soft_cap, rope)


def split_of(size: Any, disabled: Any) -> str:
    """Return `AttentionCall.split_kv` of a prefill plan's fixed_split_size and disable_split_kv."""
    check_flag("disable_split_kv", disabled)
    size = -1 if size is None else check_integer("fixed_split_size", integer(size))
    return "never" if disabled or size > 0 else "auto"


def range_left(window: Any) -> int:
    """Return `AttentionCall.range_left` of range_window_left, which bounds distances from above; not positive: off."""
    if window.__class__ is not int:
        window = check_integer("range_window_left", integer(window))
    return window - 1 if window > 0 else -1


def check_rope(rope: Rope | None, types: TensorTypes) -> None:
    if rope is not None and (types.q.itemsize == 1 or types.kv is not types.q):
        both = f"queries of {types.q} and keys of {types.kv}"
        raise NotImplementedError(f"pos_encoding_mode: ROPE_LLAMA with {both}, must both be float16 or bfloat16")


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """Return the ALiBi slopes of `heads` heads, fp32 (heads,).

    They are 2 ** (-8 (h + 1) / n) for the first n heads, n being the largest power of two in `heads`, then the odd
    powers of 2 ** (-4 / n). They are kept per device and number of heads, unless a graph is being captured, which owns
    the memory.
    """
    found = _slopes.get((device, heads))
    if found is not None:
        return found
    if recorded() or machine.current.uncaptured_stream(device) is None:
        return _new_slopes(heads, device)
    made = _slopes[device, heads] = kept(lambda: _new_slopes(heads, device), device, wait=True)
    return made


def _new_slopes(heads: int, device: torch.device) -> torch.Tensor:
    whole = 1 << max(heads, 1).bit_length() - 1
    h = torch.arange(heads, dtype=torch.float64, device=device)
    return torch.exp2(-torch.where(h < whole, 8 * (h + 1), 4 * (2 * (h - whole) + 1)) / whole).to(torch.float32)


def combine_scales(
    scale: float, q_scale: Any, k_scale: Any, v_scale: Any, device: torch.device, heads: Any
) -> tuple[Any, torch.Tensor | None, Any, torch.Tensor | None]:
    """Return (scale, scale_tensor, out_scale, out_scale_tensor) of an `AttentionCall`. heads: (Hq, Hkv, ...)."""
    tensor = out_tensor = None
    out_scale = 1.0
    if q_scale is not None:
        scale, tensor = times("q_scale", q_scale, device, scale, tensor, heads, 0)
    if k_scale is not None:
        scale, tensor = times("k_scale", k_scale, device, scale, tensor, heads, 1)
    if v_scale is not None:
        out_scale, out_tensor = times("v_scale", v_scale, device, out_scale, out_tensor, heads, 1)
    return scale, tensor, out_scale, out_tensor


def bounds(size: Any, device: torch.device) -> torch.Tensor:
    """Return int32 (2,), [0, size], without a copy from the host, so it can be captured."""
    if size == 0:
        return torch.zeros(2, dtype=torch.int32, device=device)
    return torch.arange(0, 2 * size, size, dtype=torch.int32, device=device)


SMALL_LIST = 128  # up to this many numbers, Python's lists take a third of the time of torch's operations


def last_of(name: str, starts: torch.Tensor) -> int:
    """Return the last of the offsets (B + 1,) on the host; raise if one is negative or below the one before it."""
    if starts.shape[0] <= SMALL_LIST:
        numbers = starts.tolist()
        good = numbers == sorted(numbers)
    else:
        numbers = [int(starts[0]), int(starts[-1])]
        good = int(starts.diff().min()) >= 0
    if numbers[0] < 0 or not good:
        before = torch.cat([starts[:1] * 0, starts[:-1]])
        at = int((starts < before).nonzero()[0])
        raise ValueError(f"{name}[{at}]: {starts[at]}, must be at least {before[at]}, the entry before it")
    return numbers[-1]


def longest(starts: torch.Tensor) -> int:
    """Return the largest difference of neighbouring offsets (B + 1,) on the host; 0 if there is none."""
    if starts.shape[0] > SMALL_LIST:
        return int(starts.diff().max())
    numbers = starts.tolist()
    return max(map(sub, numbers[1:], numbers), default=0)


STAGED = 1 << 16  # up to this many bytes of unpinned memory, the driver copies them before the call returns


def moved(tensors: tuple[torch.Tensor, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return tensors (N,) of one dtype on `device`; those of the host are moved by one copy.

    The current stream orders the copy. Its source is memory that is allocated for it, so the caller may write the
    tensors as soon as this returns.
    """
    if device.type == "cpu":
        return tensors
    host = [t for t in tensors if t.is_cpu]
    if not host:
        return tensors
    staged = torch.cat(host)
    if device.type == "cuda" and staged.nbytes > STAGED:
        staged = staged.pin_memory()
    copies = iter(staged.to(device, non_blocking=True).split([t.shape[0] for t in host]))
    return tuple(next(copies) if t.is_cpu else t for t in tensors)


class MaskOffsets(NamedTuple):
    """Where the bits of each request begin, in elements and in bytes: int64 (B + 1,), on one device."""

    elements: torch.Tensor
    bytes: torch.Tensor


def offsets_of(qo_indptr: torch.Tensor, keys: torch.Tensor) -> MaskOffsets:
    """Return the offsets of masks (query rows, keys), stored by rows, each from a byte of its own. keys: int64 (B,)."""
    bits = qo_indptr.to(torch.int64).diff().clamp(min=0) * keys
    elements, size = bits.cumsum(0), ((bits + 7) // 8).cumsum(0)
    return MaskOffsets(torch.nn.functional.pad(elements, (1, 0)), torch.nn.functional.pad(size, (1, 0)))


class CustomMask(NamedTuple):
    """The caller's mask, checked; the packed one if two are given."""

    name: str
    given: torch.Tensor  # (N,): bools, or bytes
    packed: bool
    non_blocking: bool  # of a copy from the host

    def size(self, batch: int) -> int:
        """Return an upper bound of the size of the packed mask in bytes."""
        return self.given.shape[0] if self.packed else (self.given.shape[0] + 7) // 8 + batch

    def check(self, elements: int, size: int) -> None:
        """Raise unless the mask has `elements` elements, or `size` bytes if it is packed."""
        need = size if self.packed else elements
        if self.given.shape[0] != need:
            what = "query rows x keys" + (", in whole bytes for each request" if self.packed else "")
            raise ValueError(f"{self.name}: {self.given.shape[0]} elements, must be {need} ({what})")

    def pack(self, at: MaskOffsets, size: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the packed mask, uint8 (size,), on the device of `at`; written to `out` if that is given."""
        given = self.given.to(at.bytes.device, non_blocking=self.non_blocking)
        if not self.packed:
            return pack_segments(given.to(torch.bool), at.elements, at.bytes, size, out)
        return given if out is None else out.copy_(given)


def mask_of(
    custom: Any, packed: Any, device: torch.device, non_blocking: bool = False, shape: tuple[int, int] | None = None
) -> CustomMask | None:
    """Return the mask of a batch, which has one dimension unless it is of one request and has its `shape`."""
    if custom is None and packed is None:
        return None
    name = "custom_mask" if packed is None else "packed_custom_mask"
    mask = check_strided(name, custom if packed is None else packed)
    if mask.device != device and not mask.is_cpu:
        raise ValueError(f"{name}: device {mask.device}, must be cpu or the workspace's, {device}")
    if packed is not None:
        check_operand(name, mask, 1, (torch.uint8,), None)
    elif mask.ndim != 1 and shape is None:
        raise ValueError(
            f"{name}: shape {tuple(mask.shape)}, must be (N,): query rows x keys, one request after another"
        )
    elif mask.ndim != 1 and shape is not None and mask.numel() == shape[0] * shape[1]:  # `check` refuses another size
        check_shape(name, mask, shape, f"query rows, keys; or ({mask.numel()},)")
    if mask.numel() >= MOST_MASK * (1 if packed is not None else 7):
        raise NotImplementedError(f"{name}: {mask.numel()} elements, must be fewer than {MOST_MASK} bytes when packed")
    return CustomMask(name, mask.reshape(-1), packed is not None, non_blocking)
