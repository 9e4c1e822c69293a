"""The torch operators of latent caches and of indexers record everything that a call depends on."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.support.layout_calls import CALLS, FUNCTION
from tests.support.layouts import CPU, placed, values_of
from wrappers.own.registry import INDEXER, LATENT, LATENT_READ, row_of

RECORDED = [
    (function, call) for function, call in CALLS if row_of(FUNCTION[function]).family in (INDEXER, LATENT, LATENT_READ)
]


def tensors_of(value):
    return [t for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("function, call", RECORDED, ids=[", ".join(names) for names in RECORDED])
def test_a_traced_call_gives_what_a_plain_one_gives(function, call):
    given, found = CALLS[function, call](), []
    for traced in (False, True):
        flat, form = tree_flatten(placed(given, CPU))

        def run(*tensors, flat=flat, form=form):
            left = iter(tensors)
            own = [next(left) if isinstance(x, torch.Tensor) else x for x in flat]
            return tensors_of(FUNCTION[function](**tree_unflatten(own, form)))

        tensors = tensors_of(flat)
        step = make_fx(run)(*tensors_of(placed(given, CPU))) if traced else run
        returned = step(*tensors)
        found.append((values_of(tuple(returned)), values_of(tuple(tensors))))
    assert found[0] == found[1]
