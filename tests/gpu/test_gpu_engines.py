"""Whole engines on a Hopper GPU: models of two layers answer with our backend as with the engine's own."""

from importlib.util import find_spec

import pytest
import torch

from bench import engine, server
from bench.cases.engine import CASES
from bench.engine_backends import BESIDE, has_backend
from bench.results import Environment

TINY = [name for name, case in CASES.items() if "-tiny-" in name and not case.invariant]
INVARIANT = [name for name, case in CASES.items() if case.invariant and has_backend(case, "ours")]
PEERS = {
    ("vllm", "gqa"): "vllm-flash-attn", ("vllm", "mla"): "vllm-flash-attn-mla", ("vllm", "dsa"): "vllm-flashmla-sparse",
    ("sglang", "gqa"): "sglang-triton", ("sglang", "mla"): "sglang-fa3", ("sglang", "dsa"): "sglang-dsa",
}  # fmt: skip
# Least share of the tokens before the answers part
COMMON = {"bf16": 0.1, "fp8": 0.1, "nvfp4": 0.02, "fp8_ds_mla": 0.1, "nvfp4_ds_mla": 0.02}
ENV = Environment("2026-01-01T00:00:00+00:00", "0" * 40, "some-gpu", "1", "2")


def needs(name):
    """Skip the test of a case if its engine or its GPUs are not here."""
    case = CASES[name]
    if find_spec(case.engine) is None:
        pytest.skip(f"{case.engine} is not installed")
    if torch.cuda.device_count() < case.gpus:
        pytest.skip(f"needs {case.gpus} GPUs")


@pytest.mark.parametrize("name", TINY)
def test_an_engine_answers_as_with_its_own_backend(name):
    """`engine.measure` gives our backend a row only if its log probabilities agree with the reference's."""
    needs(name)
    case = CASES[name]
    peer = BESIDE.get(case.kv, PEERS[case.engine, case.attention])
    _, figures = engine.measure(name, ("ours", peer), ENV, passes=1)
    ours = next((row for row in figures if row.provider == "ours"), None)
    assert ours is not None, "no row: see what was printed"
    assert ours.reference == peer and ours.common > COMMON[case.kv]


@pytest.mark.parametrize("name", INVARIANT)
def test_answers_do_not_depend_on_the_batch(name):
    """The engine's own layers, which see to that in their parts, belong to the test. A small cache lets it preempt
    requests, which then have the bits that they have alone."""
    needs(name)
    result = engine.Workers()(name, "ours", 0)
    assert result is not None, "see what was printed"
    assert result["repeats"] == dict.fromkeys(("again", "alone", "mixed", "resumed"), len(CASES[name].checked))
    assert not CASES[name].preempts or result["preempted"] > 0


@pytest.mark.parametrize("kv", ["bf16", "fp8", "nvfp4"])
def test_a_server_answers_all_requests(kv):
    """Other processes on the GPU would count as growth of its memory: run these tests alone."""
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    (row,) = server.measure(f"server-vllm-tiny-llama-{kv}", ("ours",), ENV)
    assert row.abandoned > 0 and row.device_growth_mib < 64
