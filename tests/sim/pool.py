"""Processes that simulate: spawned, because torch's threads do not survive a fork, with one thread each."""

import gc
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

BEHIND = 5  # by how much processes that compile and simulate are nicer than pytest, which runs its tests one by one


def pool(jobs: int = 0) -> ProcessPoolExecutor:
    """Return a pool of `jobs` processes; 0 means one per core that this process may use."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs or len(os.sched_getaffinity(0)), spawn, initializer=_one_thread)


def _one_thread() -> None:
    import torch

    os.nice(BEHIND)
    gc.freeze()  # what was imported stays, and what a simulation makes is seldom part of a cycle
    gc.set_threshold(50_000, 20, 20)
    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # before numpy's BLAS starts its own threads
