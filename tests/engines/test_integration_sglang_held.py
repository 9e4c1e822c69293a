"""Objects of SGLang that the plugin holds, and that get other memory between two steps: the next result is right, or a
refusal names what does not fit."""

import pytest
import torch

from tests.engines.test_integration_sglang import CASES, Model, engine
from tests.support.bad_values import REFUSALS
from tests.support.emulated import emulation
from tests.support.untouched import WAYS, moved, prepared

__all__ = ["engine"]  # a fixture
HELD = {  # what is held -> a case that has it, and the tensors
    "kv_cache": ("bf16", lambda model: [*model.pool.k_buffer, *model.pool.v_buffer]),
    "k": ("e5m2", lambda model: [*model.pool.k_buffer]),
    "v": ("e5m2", lambda model: [*model.pool.v_buffer]),
    "req_to_token": ("bf16", lambda model: [model.req_to_token]),
    "to_window": ("sinks, windows in a pool of their own", lambda model: [model.to_window]),
}


@pytest.fixture
def server(engine):
    """The engine on the CPU, where kernels are emulated."""
    engine.device = torch.device("cpu")
    return engine


def bound_model(server, monkeypatch, name, of=lambda model: [], way=""):
    """Return a model that has made the steps after which its layers repeat their launches."""
    model = Model(server, CASES[name], monkeypatch)
    for t in of(model):
        prepared(t, way)
    model.step("EXTEND", {0: 20, 1: 5})
    for _ in range(3):
        model.step("DECODE", {0: 1, 1: 1})
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("held", HELD)
def test_other_memory(held, way, server, monkeypatch):
    name, of = HELD[held]
    with emulation():
        model = bound_model(server, monkeypatch, name, of, way)
        for t in of(model):
            moved(t, way)
        for _ in range(3):
            try:
                model.step("DECODE", {0: 1, 1: 1})
            except (*REFUSALS, RuntimeError) as error:
                assert "stride" in way and ("k_cache" in str(error) or "view" in str(error)), error
                return


def test_another_device(server, monkeypatch):
    """Of which the pools are, and nothing else."""
    model = Model(server, CASES["bf16"], monkeypatch)
    model.step("EXTEND", {0: 20, 1: 5})
    for buffers in (model.pool.k_buffer, model.pool.v_buffer):
        buffers[:] = [t.to("meta") for t in buffers]
    with pytest.raises(ValueError, match=r"^cache.kv \(K\): device meta, must be that of k, cpu"):
        model.step("DECODE", {0: 1, 1: 1})


@pytest.mark.parametrize("held", ["k_scale_float", "v_scale_float"])
def test_other_scales(held, server, monkeypatch):
    """Which SGLang keeps as numbers: those of the step that a launch was bound in are not repeated."""
    with emulation():
        model = bound_model(server, monkeypatch, "e5m2")
        batch = model.batch("DECODE", {0: 1, 1: 1})
        model.backend.init_forward_metadata(batch)
        given, layer = model.placed(model.inputs(2)), model.layers[0]
        layer(*given[0], batch)
        q, launch = given[0][0], model.backend._layers[0][2]

        def run():
            return layer(q, None, None, batch, save_kv_cache=False)

        before = run()
        assert launch._launch is not None
        setattr(layer, held, 2.0)
        found = run()
        launch.forget()
        assert torch.equal(found, run()) and not torch.equal(found, before)
