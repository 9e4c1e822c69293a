"""What the GPU tests of both operator families do with a call."""

import threading
from collections.abc import Callable
from typing import Any

import torch


def captured(function: Callable[..., Any], inputs: dict[str, Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of one call, and the result that a replay writes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(**inputs)
    return graph, result


def in_threads(work: Callable[[int], None], count: int) -> None:
    """work(0) ... work(count - 1) side by side, each on a stream of its own; raises the first error."""
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                work(index)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
