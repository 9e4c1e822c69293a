"""Samples of host and device memory, and whether they stay flat."""

import ctypes
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

MIB = 1 << 20
WARM_UP = 0.25  # share of the samples that is left out
# The most by which the maximum of the last third may exceed that of the first one, in MiB. torch's blocks are 2 MiB.
LIMITS = {"host": 16.0, "allocated": 1.0, "reserved": 6.0, "driver": 8.0}


class Sample(NamedTuple):
    """Memory in MiB after a number of steps. host: anonymous memory of the process, resident or swapped out, without
    freed memory. allocated, reserved: torch's on the device. driver: what the driver has lent to all processes."""

    step: int
    host: float
    allocated: float = 0.0
    reserved: float = 0.0
    driver: float = 0.0


def sample(step: int, device: torch.device) -> Sample:
    """Return the memory in use, without what torch and the C library only keep for later: a leak that is served from
    freed memory would not be seen. Only glibc can be told to give it back."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    host = sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap")) / 1024
    if device.type != "cuda":
        return Sample(step, host)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), total - free
    return Sample(step, host, *(size / MIB for size in own))


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """Return by how many MiB each kind of memory grew after the warm-up, from the first third to the last one. Raise
    ValueError for fewer than eight samples."""
    if len(samples) < 8:
        raise ValueError(f"samples: {len(samples)}, must be at least 8")
    kept = samples[int(WARM_UP * len(samples)) :]
    third = len(kept) // 3
    return {
        name: max(getattr(s, name) for s in kept[-third:]) - max(getattr(s, name) for s in kept[:third])
        for name in LIMITS
    }


def grown(samples: Sequence[Sample]) -> str:
    """Return "" if memory is flat, else what grew."""
    found = {name: size for name, size in growth(samples).items() if size > LIMITS[name]}
    return ", ".join(f"{name} memory grew by {size:.1f} MiB, limit {LIMITS[name]}" for name, size in found.items())
