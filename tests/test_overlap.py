"""Memory in common, against the addresses of every element."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wrappers import overlap


def addresses(t):
    """Of every byte."""
    places = {t.data_ptr()}
    for size, stride in zip(t.shape, t.stride(), strict=True):
        places = {p + i * stride * t.element_size() for p in places for i in range(size)}
    return {p + byte for p in places for byte in range(t.element_size())}


@st.composite
def views(draw):
    """A view of 400 bytes, of elements of 1 to 4."""
    dtype = draw(st.sampled_from((torch.uint8, torch.int16, torch.int32)))
    shape = draw(st.lists(st.integers(0, 5), min_size=0, max_size=3))
    strides = draw(st.lists(st.integers(0, 12), min_size=len(shape), max_size=len(shape)))
    return dtype, shape, strides, draw(st.integers(0, 20))


@settings(max_examples=1500, deadline=None)
@given(views(), views())
def test_every_pair_of_views(first, second):
    memory = torch.zeros(1024, dtype=torch.uint8)
    a, b = (memory.view(dtype).as_strided(shape, strides, at) for dtype, shape, strides, at in (first, second))
    assert overlap.overlap(a, b) == bool(addresses(a) & addresses(b))
    if not overlap.folded(a):
        assert len(addresses(a)) == a.numel() * a.element_size()


def test_columns_of_one_buffer_are_apart():
    """Queries, keys, values and the output as slices of one matrix; pages of K and V in one pool."""
    fused = torch.zeros(8192, 4, 8, 128, dtype=torch.bfloat16)
    parts = fused.unbind(1)
    assert not any(overlap.overlap(a, b) for a in parts for b in parts if a is not b)
    assert overlap.overlap(parts[0], fused[5:6]) and not overlap.overlap(fused[:4000], fused[4000:])
    assert overlap.overlap(fused[:4001], fused[4000:]) and not any(map(overlap.folded, (fused, *parts)))


def test_what_is_folded():
    t = torch.zeros(4, 6)
    assert overlap.folded(t[:, :1].expand(4, 6)) and overlap.folded(t.as_strided((3, 6), (4, 1)))
    assert not any(overlap.folded(x) for x in (t, t.T, t[:, ::2], t[:1].expand(1, 6), t[:0].expand(0, 6), t[0, 0]))
