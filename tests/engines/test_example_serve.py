"""The serving example on the CPU: what it decodes, what it gives back, and what it refuses."""

import pytest
import torch

from examples import decoder, serve

pytestmark = pytest.mark.slow

SIZES = serve.CPU | {"requests": 10, "budget": 48, "outputs": (1, 24)}


def served(**changes):
    sizes = SIZES | changes
    model, tokens, requests, pool = serve.make("cpu", 3, sizes)
    steps = serve.serve(model, tokens, requests, pool, sizes["budget"])
    assert sorted(pool.free) == list(range(pool.size)) and not any(r.pages for r in requests)
    return model, tokens, requests, steps


@pytest.fixture(scope="module")
def found():
    return served()


def outputs(tokens, requests):
    return [tokens[r.index, : r.total].tolist() for r in requests]


def computed_again(requests, steps):
    return sum(n for step in steps for _, n in step.work) - sum(r.total - 1 for r in requests)


def test_steps_mix_decodes_and_chunks_within_the_budget(found):
    _, _, _, steps = found
    assert any(0 < step.decodes < len(step.work) for step in steps)
    assert max(sum(n for _, n in step.work) for step in steps) == SIZES["budget"]


def test_same_tokens_as_each_request_alone(found):
    model, tokens, requests, _ = found
    for r in requests:
        _, fresh, _, pool = serve.make("cpu", 3, SIZES | {"pages": 40})
        serve.serve(model, fresh, [serve.Request(r.index, 0, r.prompt, r.total)], pool, 1000)
        assert fresh[r.index, : r.total].tolist() == tokens[r.index, : r.total].tolist()


def test_same_tokens_as_dense_attention(found, monkeypatch):
    """Every output token is what follows from all before it, without pages, chunks or a cache."""
    model, tokens, requests, _ = found

    def dense(q, k, v, batch, kv):
        q, k, v = (t.to(kv.dtype).float().transpose(0, 1) for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(0, 1)

    monkeypatch.setattr(decoder, "attention", dense)
    kv = torch.empty(len(model.layers), 0, dtype=torch.bfloat16)
    for r in requests:
        places = torch.arange(r.total - 1)
        batch = decoder.Batch(*[places] * 7, 0, 0)
        said = model(tokens[r.index, : r.total - 1], batch, kv).argmax(-1)
        assert said[r.prompt - 1 :].tolist() == tokens[r.index, r.prompt : r.total].tolist()


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_a_tiny_pool_ends_the_same(found, page_size):
    """Of 160 tokens, the longest request has 106: some are sent back and computed again."""
    _, tokens, requests, _ = found
    _, tight, again, steps = served(pages=160 // page_size, page_size=page_size)
    assert outputs(tight, again) == outputs(tokens, requests)
    assert computed_again(again, steps) > 0


def test_what_cannot_end_is_refused(found):
    with pytest.raises(ValueError, match="pool: 2 pages of 16 tokens"):
        served(pages=2)
    with pytest.raises(ValueError, match="budget: 0"):
        served(budget=0)
