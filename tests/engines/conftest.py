"""A check at each step of each engine: if a layer repeats a launch, it must be the one that the step asks for."""

from typing import Any

import pytest
import torch

from wrappers.attention.bound import BoundLaunch, LayerLaunch
from wrappers.attention.call import SequenceBatch

OF_A_STEP = torch.Tensor, SequenceBatch


@pytest.fixture(autouse=True)
def repeated_launches_are_asked_for(monkeypatch):
    """Compare the call of a launch that a layer has kept with the call of the step."""
    serve, launch, repeated = LayerLaunch.serve, BoundLaunch.launch, []

    def launched(self: Any, *given: Any) -> Any:
        repeated.append(self.call)
        return launch(self, *given)

    def served(self: Any, step: Any, asked: Any, tensors: Any, make: Any) -> Any:
        repeated.clear()
        found = serve(self, step, asked, tensors, make)
        while repeated:
            known = repeated.pop()
            for name, value in make()._replace(out=None, lse=None)._asdict().items():
                kept = getattr(known, name)
                alike = isinstance(kept, OF_A_STEP) if isinstance(value, OF_A_STEP) else kept == value
                assert alike, f"{name}: a launch with {kept} is repeated, asked for was {value}"
        return found

    monkeypatch.setattr(LayerLaunch, "serve", served)
    monkeypatch.setattr(BoundLaunch, "launch", launched)
