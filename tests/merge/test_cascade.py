"""Merged states against attention over all their keys at once."""

import pytest
import torch

from wrappers.flashinfer import cascade

N, H, D = 5, 3, 16
INF = float("inf")
NAN = float("nan")


def states(*sizes, dtype=torch.float32):
    """States of keys split so, as (V, S), and the state of all keys. V of no keys is NaN."""
    rng = torch.Generator().manual_seed(sum(sizes))
    logits = 20 * torch.randn(N, H, sum(sizes), generator=rng).double()
    values = torch.randn(N, H, sum(sizes), D, generator=rng).double()

    def state(x, v):
        if not x.shape[-1]:
            return torch.full((N, H, D), NAN, dtype=dtype), torch.full((N, H), -INF)
        out = (x.softmax(-1).unsqueeze(-1) * v).sum(-2)
        return out.to(dtype), (x.logsumexp(-1) / torch.tensor(2.0).log()).float()

    return [state(x, v) for x, v in zip(logits.split(sizes, -1), values.split(sizes, -2))], state(logits, values)


def same(found, wanted, dtype=torch.float32):
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert found[0].dtype == dtype and found[1].dtype == torch.float32
    torch.testing.assert_close(found[0], wanted[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(7, 9), (1, 30), (0, 4), (4, 0)])
def test_two_states(sizes, dtype):
    (a, b), wanted = states(*sizes, dtype=dtype)
    before = [t.clone() for t in (*a, *b)]
    same(cascade.merge_state(*a, *b), wanted, dtype)
    torch.testing.assert_close([*a, *b], before, rtol=0, atol=0, equal_nan=True)
    assert cascade.merge_state_in_place(*a, *b) is None
    same(a, wanted, dtype)


@pytest.mark.parametrize("sizes", [(5,), (3, 8, 1), (0, 4, 0, 2)])
def test_many_states(sizes):
    parts, wanted = states(*sizes)
    v, s = torch.stack([v for v, _ in parts], 1), torch.stack([s for _, s in parts], 1)
    same(cascade.merge_states(v, s), wanted)
    same(cascade.merge_states(v.transpose(0, 2).contiguous().transpose(0, 2), s), wanted)  # of other strides


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_rows_that_are_not_merged_stay(dtype):
    (a, b), wanted = states(4, 6)
    before = a[0].clone(), a[1].clone()
    mask = torch.tensor([1, 0, 0, 1, 1]).to(dtype)
    wide = torch.zeros(N, H, 2 * D)[..., ::2]
    wide.copy_(a[0])
    cascade.merge_state_in_place(wide, a[1], *b, mask)
    rows = mask.bool()
    torch.testing.assert_close((wide[rows], a[1][rows]), (wanted[0][rows], wanted[1][rows]))
    assert wide[~rows].equal(before[0][~rows]) and a[1][~rows].equal(before[1][~rows])
