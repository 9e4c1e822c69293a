"""Make a drawn call and check all that it must hold: results, memory around them, equal bits."""

import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .call import Call, Refused, Results, Work
from .families import FAMILIES
from .machine import OnDemand, chosen
from .memory import Memory

RIGHT, REFUSED, SKIPPED, ON_DEMAND, FAILED = "right", "refused", "skipped", "on demand", "failed"
REFUSALS = (NotImplementedError, ValueError, TypeError)
UNBUILT = "the call cannot be built"  # a fault of the fuzzer
STREAMS, ROUNDS = 3, 4  # of calls side by side


@dataclass(frozen=True)
class Verdict:
    """The outcome of a call: one of the five words above, and its reason."""

    word: str
    reason: str = ""


class Broken(Exception):
    """A call that failed, with the first thing that was wrong."""


class DeviceLost(Exception):
    """An error of CUDA after which the process can make no more calls."""


def is_fatal(error: BaseException) -> bool:
    """Return whether the device is lost, as after an illegal address."""
    text = f"{type(error).__name__}: {error}"
    return "CUDA error" in text or "AcceleratorError" in text or "cudaError" in text or "CUDA_ERROR" in text


def bits(t: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements, as a copy."""
    return t.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


class Checker:
    """Checks calls on one device, one after another, in memory that is reused."""

    def __init__(self, device: torch.device, compiles: bool = False):
        self.device = device
        self.compiles = compiles
        self.memory = Memory(device)
        self.streams: list[Any] = []

    def check(self, call: Call) -> Verdict:
        """Make a call and return its verdict. Raise `DeviceLost` if the device makes no more calls."""
        try:
            with chosen(call.choice, self.compiles, self.device.type == "cuda"):
                return self._checked(call)
        except OnDemand as found:
            return Verdict(ON_DEMAND, str(found))
        except Broken as found:
            return Verdict(FAILED, str(found))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return Verdict(SKIPPED, "out of memory")
        except Exception as error:
            if is_fatal(error):
                raise DeviceLost(f"{type(error).__name__}: {error}") from error
            last = traceback.extract_tb(error.__traceback__)[-1]
            return Verdict(
                FAILED, f"{type(error).__name__}: {error} ({last.filename.rsplit('/', 1)[-1]}:{last.lineno})"
            )

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _checked(self, call: Call) -> Verdict:
        try:
            work: Work = FAMILIES[call.family].builds.build(call, self.device)
        except Refused as found:
            return Verdict(SKIPPED, str(found))
        except Exception as error:
            if is_fatal(error):
                raise
            return Verdict(FAILED, f"{UNBUILT}: {type(error).__name__}: {error}")
        tree = self.memory.place(work.variants[0], work.written)
        images = [self.memory.image(variant) for variant in work.variants]
        try:
            results = self._run(work, tree, images[0], 0)
        except REFUSALS as error:
            if is_fatal(error):
                raise
            self.wait()
            if left := self.memory.changed(images[0], everything=True):
                raise Broken(f"refused ({error}), but {left}") from error
            return Verdict(REFUSED, f"{type(error).__name__}: {error}")
        self.wait()
        first = self._judged(work, tree, images[0], 0, results)
        again = self._made(work, tree, images, 0)
        self._equal(first, again, "a second call")
        if self.device.type == "cuda" and call.mode == "graph":
            self._replayed(work, tree, images)
        elif call.mode == "graph":
            self._made(work, tree, images, 1)
        if self.device.type == "cuda" and call.mode == "threads":
            self._side_by_side(work, images, first)
        return Verdict(RIGHT)

    def _run(self, work: Work, tree: Any, image: torch.Tensor, variant: int) -> Results:
        self.memory.restore(image)
        if work.prepare is not None:
            work.prepare(tree, variant)
        return work.call(tree)

    def _bits(self, work: Work, tree: Any, results: Results) -> list[torch.Tensor]:
        return [bits(t) for t in (*results.values(), *work.written(tree))]

    def _made(self, work: Work, tree: Any, images: list[torch.Tensor], variant: int) -> list[torch.Tensor]:
        """Make the call with the values of a variant, check it, and return the bits of its results."""
        results = self._run(work, tree, images[variant], variant)
        self.wait()
        return self._judged(work, tree, images[variant], variant, results)

    def _judged(self, work: Work, tree: Any, image: torch.Tensor, variant: int, results: Results) -> list[torch.Tensor]:
        if wrong := self.memory.changed(image):
            raise Broken(wrong)
        found = self._bits(work, tree, results)
        if wrong := work.judge(variant, tree, results):
            raise Broken(wrong)
        return found

    def _equal(self, first: list[torch.Tensor], again: list[torch.Tensor], what: str) -> None:
        for number, (a, b) in enumerate(zip(first, again, strict=True)):
            if a.shape != b.shape or not torch.equal(a, b):
                count = int((a != b).sum()) if a.shape == b.shape else len(a)
                raise Broken(f"{what}: {count} of {len(a)} bytes of result {number} differ")

    def _replayed(self, work: Work, tree: Any, images: list[torch.Tensor]) -> None:
        """Capture the call with the first values and replay it with the others, and with the first again."""
        wanted = self._made(work, tree, images, 1), self._made(work, tree, images, 0)
        self.memory.restore(images[0])
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = work.call(tree)
        for variant, want in ((1, wanted[0]), (0, wanted[1])):
            self.memory.restore(images[variant])
            if work.prepare is not None:
                work.prepare(tree, variant)
            graph.replay()
            self.wait()
            found = self._judged(work, tree, images[variant], variant, results)
            self._equal(want, found, f"a replay with values {variant}")

    def _side_by_side(self, work: Work, images: list[torch.Tensor], want: list[torch.Tensor]) -> None:
        """Make the call on several streams at once, each thread with tensors of its own."""
        memories = [Memory(self.device) for _ in range(STREAMS)]
        trees = [memory.place(work.variants[0], work.written) for memory in memories]
        while len(self.streams) < STREAMS:
            self.streams.append(torch.cuda.Stream(self.device))
        if work.prepare is not None:
            work.prepare(trees[0], 0)
        self.wait()
        errors: list[BaseException] = []

        def repeat(number: int) -> None:
            try:
                with torch.cuda.stream(self.streams[number]):
                    for _ in range(ROUNDS):
                        memories[number].restore(images[0])
                        found = self._bits(work, trees[number], work.call(trees[number]))
                        self.streams[number].synchronize()
                        self._equal(want, found, f"stream {number} of {STREAMS}")
            except BaseException as error:  # noqa: BLE001 - the main thread raises it
                errors.append(error)

        threads = [threading.Thread(target=repeat, args=(n,)) for n in range(STREAMS)]
        run_all(threads)
        if errors:
            raise errors[0]
        for number, memory in enumerate(memories):
            if wrong := memory.changed(images[0]):
                raise Broken(f"stream {number} of {STREAMS}: {wrong}")


def run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


Check = Callable[[Call], Verdict]
