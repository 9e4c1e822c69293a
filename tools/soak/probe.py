"""A fixed set of calls of all families, and the bits of their results."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from bench.cases.cache_write import copied
from tools.fuzz.call import Call, Refused, Work
from tools.fuzz.check import REFUSALS, bits
from tools.fuzz.draw import draw
from tools.fuzz.families import FAMILIES, indexer, mla
from tools.fuzz.machine import OnDemand, Shipped
from wrappers.host import machine

from .pool import Wrong

TRIES = 100  # draws in which a call of each kind is looked for


class ProbedKind(NamedTuple):
    """A kind of calls. has: whether a call of its family is one."""

    name: str
    family: str
    has: Callable[[Call], bool]

    def of(self, call: Call) -> bool:
        """Return whether a call is of this kind."""
        return call.family == self.family and self.has(call)


KINDS = (
    ProbedKind("latent attention", "mla", lambda call: call.function in mla.NAMES and not call.case.get("chosen")),
    ProbedKind("sparse attention", "mla", lambda call: call.function in mla.NAMES and call.case.get("chosen", 0) > 1),
    ProbedKind("logits of an indexer", "indexer", lambda call: call.function in (indexer.RAGGED, indexer.PAGED)),
    ProbedKind("selection of keys", "indexer", lambda call: call.function in (indexer.SLOTS, indexer.ROWS)),
)


class Probe:
    """Calls that the fuzzer draws, those of them that the device serves with kernels of a bundle.

    The machine of its calls has the plans and the scratch memory of its calls alone. families: to draw from; none: all,
    and at least one call of each of `KINDS`.
    """

    def __init__(self, device: torch.device, seed: int, count: int, families: tuple[str, ...] = ()):
        self.device = device
        self.machine = Shipped() if device.type == "cuda" else machine.current
        drawn = [draw(seed, index, families, small=True) for index in range(count)]
        # rows of hostile calls may belong to several requests, and then hold anything
        self.calls = [call for call in drawn if not call.extra.get("hostile") and self.served(call)]
        if not families:
            self.calls += [self._one(kind, seed) for kind in KINDS if not any(map(kind.of, self.calls))]

    def _one(self, kind: ProbedKind, seed: int) -> Call:
        """Return the first call of a kind that is served."""
        for index in range(TRIES):
            call = draw(seed, index, (kind.family,), small=True)
            if kind.of(call) and self.served(call):
                return call
        raise Wrong(f"{kind.name}: none of {TRIES} drawn calls is served")

    def served(self, call: Call) -> bool:
        try:
            with machine.override(self.machine):
                self.results(*self.made(call))
        except (OnDemand, Refused, *REFUSALS):
            return False
        return True

    def made(self, call: Call) -> tuple[Work, Any]:
        """Return a call's work, and its arguments in new memory of the device."""
        work = FAMILIES[call.family].builds.build(call, self.device)
        return work, copied(work.variants[0], self.device)

    def results(self, work: Work, tree: Any) -> list[torch.Tensor]:
        """Make a call and return the bits of its results."""
        if work.prepare is not None:
            work.prepare(tree, 0)
        found = work.call(tree)
        return [bits(t) for t in (*found.values(), *work.written(tree))]

    def run(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Yield each call with its bits."""
        with machine.override(self.machine):
            for call in self.calls:
                yield str(call), self.results(*self.made(call))

    def digest(self) -> dict[str, str]:
        """Return a hash of the bits of each call's results, by the call."""
        return {call: _hash(found) for call, found in self.run()}

    def compare(self, want: dict[str, str], what: str) -> None:
        """Make the calls again. Raise `Wrong` if the bits of one differ."""
        for name, found in self.digest().items():
            if found != want[name]:
                raise Wrong(f"{what}: the bits of a call changed: {name}")


def _hash(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for t in tensors:
        found.update(t.cpu().numpy().tobytes())
    return found.hexdigest()


def digest(device: str, seed: int, count: int, families: tuple[str, ...] = ()) -> dict[str, str]:
    """Return `Probe.digest`, for another process: on the CPU, bits follow from the number of threads."""
    torch.set_num_threads(1)
    return Probe(torch.device(device), seed, count, families).digest()
