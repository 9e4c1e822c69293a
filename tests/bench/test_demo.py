"""The demo: its steps agree with torch on the committed data, and each of its checks refuses what is wrong."""

import numpy as np
import pytest
import torch

from tests.support.fake_machine import FakeMachine
from tools import demo, demo_data, demo_kernels, demo_latent, demo_steps
from wrappers.host import machine

WRONG = (
    lambda right: right * 1.02, lambda right: right.roll(1, 0), torch.zeros_like,
    lambda right: torch.where(right == right.max(), torch.nan, right),
)  # fmt: skip


@pytest.fixture(scope="module")
def data():
    with np.load(demo_data.EXTRACT) as held:
        return dict(held)


@pytest.mark.slow
def test_the_demo_agrees_with_torch_and_draws(data, tmp_path, capsys):
    assert demo_data.EXTRACT.stat().st_size < 2_000_000
    batch, latent = demo_steps.batch_of(data), demo_latent.batch_of(data)
    results = demo.run(demo_steps.STEPS, batch, "reference"), demo.run(demo_latent.STEPS, latent, "reference")
    assert capsys.readouterr().out.count("agrees with torch") == 5
    assert "picture" in demo.draw(batch, latent, *results, tmp_path / "demo.png")


def few(data, batch_of, heads, tokens=(33, 7)):
    """Return a batch of the first tokens of the text."""
    rows = {name: data[name][: sum(tokens), :heads] for name in "qkv"}
    latent = {"hidden": data["hidden"][: sum(tokens)], "absorbed": data["absorbed"][: len(tokens), :heads]}
    return batch_of(rows | latent | {"lengths": np.array(tokens)})


@pytest.mark.parametrize("wrong", WRONG)
def test_the_demo_refuses_wrong_attention(data, wrong):
    right = demo_steps.expected(few(data, demo_steps.batch_of, 2))
    assert demo_steps.compare(right, right)
    with pytest.raises(AssertionError):
        demo_steps.compare(wrong(right), right)


def test_the_demo_refuses_a_wrong_top_k(data):
    step, batch = demo_steps.STEPS[2], few(data, demo_steps.batch_of, 2)
    assert step.check(step.call(batch), step.want(batch))
    with pytest.raises(AssertionError, match="torch selects"):
        step.check(step.call(batch).roll(1, 0), step.want(batch))


@pytest.fixture(scope="module")
def latent(data):
    return demo_latent.batch_of(data)


@pytest.mark.parametrize("wrong", WRONG)
def test_the_demo_refuses_wrong_latent_attention(latent, wrong):
    """Latent attention is held against itself in torch, and against the layer's attention with Q and K."""
    step = demo_latent.STEPS[0]
    same, own = step.want(latent)
    for want in ((wrong(same), own), (same, wrong(own))):
        with pytest.raises(AssertionError):
            step.check(same, want)


@pytest.fixture(scope="module")
def selected(latent):
    return demo_latent.attend_to_selected(latent)


@pytest.mark.parametrize("wrong", WRONG)
def test_the_demo_refuses_wrong_attention_to_selected_keys(latent, selected, wrong):
    out, slots = selected
    with pytest.raises(AssertionError):
        demo_latent.check_selected((wrong(out), slots), latent)


@pytest.mark.parametrize("keys", ["another", "twice", "missing", "of another request"])
def test_the_demo_refuses_a_wrong_selection(latent, selected, keys):
    """The result is that of torch for the wrong keys, so that the selection alone is wrong."""
    slots, (_, _, _, of_tokens) = selected[1].clone(), demo_latent.placed(latent)
    own = slots[0, 0]
    if keys == "another":
        own[0] = next(slot for slot in of_tokens[: latent.lengths[0]].tolist() if slot not in own.tolist())
    elif keys == "twice":
        own[0] = own[1]
    elif keys == "missing":
        own[-1] = -1
    else:
        own[-1] = of_tokens[latent.lengths[0]]
    rows = demo_latent.tokens_at(latent, slots).sort(1).values
    slots[0, 0] = torch.cat((of_tokens[rows[0][rows[0] >= 0]], own[own < 0]))  # by ascending position, then -1
    out = demo_latent.over(latent, [chosen[chosen >= 0] for chosen in rows])
    with pytest.raises(AssertionError, match="request 0: "):
        demo_latent.check_selected((out, slots), latent)


def test_kernels_that_the_demo_builds_serve_its_calls(data, latent):
    """The simulator refuses a call that another kernel serves."""
    specs = []
    with machine.override(FakeMachine(lambda op, spec: specs.append(spec) or (lambda *args: None))):
        for step in demo_steps.STEPS:
            step.call(few(data, demo_steps.batch_of, demo_kernels.SIMULATED))
        demo_latent.attend(latent)
        demo_latent.attend_to_selected(latent)
    assert {spec.name for spec in specs} == set(demo_kernels.kernels())
