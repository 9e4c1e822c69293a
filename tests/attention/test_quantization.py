"""Packed bits against numpy's, and segments against a loop over them."""

import numpy as np
import pytest
import torch

from wrappers.flashinfer import quantization


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float16])
def test_packbits_is_numpys(count, bitorder, dtype):
    x = torch.from_numpy(np.random.default_rng(count).integers(-1, 2, 2 * count)).to(dtype)[::2]
    expected = np.packbits(x.numpy() != 0, bitorder=bitorder)
    np.testing.assert_array_equal(quantization.packbits(x, bitorder).numpy(), expected)


def pieces(bits, offsets, bitorder):
    return [np.packbits(bits.numpy()[a:b], bitorder=bitorder) for a, b in zip(offsets, offsets[1:])]


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 4, 7, 11], [0, 0, 16, 16, 17, 40, 40], [3, 12, 30]])
def test_segments_are_packed_one_by_one(offsets, bitorder):
    bits = torch.rand(40, generator=torch.Generator().manual_seed(0)) < 0.5
    packed, starts = quantization.segment_packbits(bits, torch.tensor(offsets), bitorder)
    expected = pieces(bits, offsets, bitorder)
    assert packed.tolist() == [byte for piece in expected for byte in piece]
    assert starts.tolist() == np.cumsum([0, *map(len, expected)]).tolist() and starts.dtype == torch.int32


@pytest.mark.parametrize("last", [True, False])
def test_segments_go_where_they_are_told(last):
    bits = torch.rand(40, generator=torch.Generator().manual_seed(1)) < 0.5
    offsets, starts = [0, 9, 9, 20, 40], [2, 5, 5, 8, 20]
    expected = np.zeros(16, dtype=np.uint8)
    for start, piece in zip(starts, pieces(bits, offsets, "little")):
        expected[start : start + len(piece)] = piece
    out = torch.full((18,), 255, dtype=torch.uint8)
    byte_starts = torch.tensor(starts if last else starts[:-1], dtype=torch.int32)
    found = quantization.pack_segments(bits, torch.tensor(offsets, dtype=torch.int32), byte_starts, 16, out[1:17])
    assert found.tolist() == expected.tolist()
    assert out[0] == out[17] == 255 and found.data_ptr() == out[1:].data_ptr()
    longer = quantization.pack_segments(bits, torch.tensor(offsets), byte_starts, 19)
    assert longer[11:].tolist() == [0] * 8  # behind the last segment
    shorter = quantization.pack_segments(bits, torch.tensor(offsets), byte_starts, 9)
    assert shorter.tolist() == expected[:9].tolist()


def test_hostile_offsets_read_nothing_outside():
    bits = torch.ones(12, dtype=torch.bool)

    def packed(elements, starts):
        return quantization.pack_segments(bits, torch.tensor(elements), torch.tensor(starts), 4).tolist()

    assert packed([0, 1 << 40], [0]) == [255, 15, 0, 0]
    assert packed([-(1 << 40), 12], [0]) == [255, 15, 0, 0]
    assert packed([9, 4], [0]) == [0, 0, 0, 0]
    assert packed([0, 12], [1 << 62]) == [0, 0, 0, 0]
    packed([-(1 << 63), (1 << 63) - 1, -5], [(1 << 63) - 1, -(1 << 63)])
    packed([7, -1, 99, 3], [3, -9, 2])
    assert quantization.pack_segments(bits[:0], torch.tensor([0, 5]), torch.tensor([0]), 2).tolist() == [0, 0]
