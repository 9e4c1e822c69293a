"""Functions of FlashInfer's `utils` that engines import together with its attention functions."""

import torch

from ..fp4 import FP4Tensor, round_up
from ..host import machine
from ..host.checks import check_integer
from ..host.scalars import integer

__all__ = ["FP4Tensor", "get_device_sm_count", "get_trtllm_gen_multi_ctas_kv_counter_bytes"]


def get_device_sm_count(device: torch.device) -> int:
    """Return the number of SMs of a CUDA device."""
    if not isinstance(device, torch.device):
        raise TypeError(f"device: {device!r}, must be a torch.device")
    device_info = machine.current.device_info(device)
    if device_info is None:
        raise ValueError(f"device: {device}, must be a CUDA device")
    return device_info[1]


def get_trtllm_gen_multi_ctas_kv_counter_bytes(batch_size: int, num_qo_heads: int, sm_count: int) -> int:
    """Return the size in bytes of the multi_ctas_kv_counter_buffer that engines allocate; the buffer is a hint here.

    The size is one int32 for each query head of each request, or for each SM if these are more, rounded up to 8 of
    them.
    """
    given = {"batch_size": batch_size, "num_qo_heads": num_qo_heads, "sm_count": sm_count}
    batch, heads, sms = (check_integer(name, integer(value), 0) for name, value in given.items())
    return round_up(max(batch * heads, sms), 8) * 4
