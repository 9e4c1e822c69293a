"""Results of earlier launches: a launch of equal code on equal memory by an equal simulator is not repeated.

The bytes that it wrote are restored instead, so callers still compare them. Entries hold whole results; faults
are not stored. A launch is equal if these are: the kernel (PTX, host function), how it runs, the simulator's
code, and every argument with its storage's bytes, offset in the storage, shape, strides and type."""

import hashlib
import os
import pickle
import time
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import ptxsim
import torch
from ptxsim.runner import RunResult

from cute_kernels import manifest

UNUSED_DAYS = 14  # entries not used for this long are deleted
LARGEST = 1 << 26  # bytes; launches on more memory are not stored, since reading it takes longer


def recall(folder: Path, facts: Any, args: Sequence[Any], simulate: Callable[[], RunResult]) -> RunResult:
    """Return `simulate()`, which works on `args` in place, or its stored result. facts: all else that it depends on,
    as values with distinct reprs."""
    storages = {s.data_ptr(): s for s in (arg.untyped_storage() for arg in args if isinstance(arg, torch.Tensor))}
    memory = [torch.empty(0, dtype=torch.uint8).set_(s).numpy() for s in storages.values()]  # type: ignore[arg-type]
    if sum(part.size for part in memory) > LARGEST:
        return simulate()
    before = [_digest(part) for part in memory]
    shapes = [_describe(arg, dict(zip(storages, before))) for arg in args]
    path = folder / manifest.digest(repr((simulator(), facts, shapes)).encode())
    if path.exists():
        os.utime(path)
        result, changed = pickle.loads(zlib.decompress(path.read_bytes()))
        for index, data in changed.items():
            memory[index][:] = np.frombuffer(data, np.uint8)
        return result
    result = simulate()
    changed = {i: part.tobytes() for i, part in enumerate(memory) if _digest(part) != before[i]}
    folder.mkdir(parents=True, exist_ok=True)
    manifest.write_atomic(path, zlib.compress(pickle.dumps((result, changed)), 1))
    return result


def _describe(arg: Any, digests: dict[int, str]) -> Any:
    """Return an argument as comparable values; tensors of one storage name it alike. digests: by the storage's
    address."""
    if not isinstance(arg, torch.Tensor):
        return type(arg).__name__, arg
    storage = arg.untyped_storage().data_ptr()
    place = list(digests).index(storage)
    return place, digests[storage], arg.storage_offset(), tuple(arg.shape), arg.stride(), str(arg.dtype)


def _digest(memory: np.ndarray) -> str:
    return hashlib.blake2b(memory.data, digest_size=16).hexdigest()


@cache
def simulator() -> str:
    """Return the digest of the simulator's own code, and of what launches it here."""
    files = [*sorted(Path(ptxsim.__file__).parent.glob("*.py")), Path(__file__).with_name("launcher.py")]
    return manifest.digest("".join(manifest.source(file)[0] for file in files).encode())


def prune(folder: Path) -> None:
    """Delete entries that no run has used lately."""
    oldest = time.time() - UNUSED_DAYS * 86400
    for path in folder.glob("*"):
        if path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)
