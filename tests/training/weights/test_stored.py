"""Where rectangles of tensors lie: parts by dims, parts of flat buffers, stacked layers."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path
from random import Random

import numpy as np
import pytest

from echelon.training.weights.stored import (
    StoredBlock,
    StoredTensor,
    cut_blocks,
    flat_blocks,
    layers_of,
    matrix,
    same_values,
    whole,
)


def filled(file: Path, shape: tuple[int, ...], blocks: Iterable[StoredBlock]) -> np.ndarray:
    """Return a tensor put together from blocks of float32; what none holds is -1."""
    made = np.full(matrix(shape), -1.0, dtype=np.float32)
    for one in blocks:
        data = np.fromfile(file, np.float32, one.height * one.width, offset=one.start)
        rows, columns = slice(one.row, one.row + one.height), slice(one.column, None)
        made[rows, columns][:, : one.width] = data.reshape(one.height, one.width)
    return made.reshape(shape)


@pytest.mark.parametrize("seed", range(8))
def test_parts_lie_where_their_dims_say(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    shape = tuple(random.randrange(1, 5) for _ in range(random.randrange(1, 5)))
    places = [sorted(random.sample(range(size + 1), 2)) for size in shape]
    cut = tuple(slice(low, high) for low, high in places)
    tensor = np.arange(prod(shape), dtype=np.float32).reshape(shape)
    tensor[cut].tofile(tmp_path / "a")
    offset, size = [one.start for one in cut], [one.stop - one.start for one in cut]
    expected = np.full(shape, -1.0, dtype=np.float32)
    expected[cut] = tensor[cut]
    blocks = cut_blocks(tmp_path / "a", 0, 4, shape, offset, size)
    assert np.array_equal(filled(tmp_path / "a", shape, blocks), expected)


@pytest.mark.parametrize(("first", "count"), [(0, 15), (3, 9), (7, 2), (4, 6), (1, 13), (5, 5)])
def test_elements_of_a_flat_buffer_are_parts_of_rows(
    first: int, count: int, tmp_path: Path
) -> None:
    np.arange(15, dtype=np.float32)[first : first + count].tofile(tmp_path / "a")
    expected = np.full(15, -1.0, dtype=np.float32)
    expected[first : first + count] = np.arange(first, first + count)
    blocks = flat_blocks(tmp_path / "a", 0, 4, (3, 5), first, count)
    assert np.array_equal(filled(tmp_path / "a", (3, 5), blocks).ravel(), expected)


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 5)])
def test_stacked_layers_are_taken_apart(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = np.arange(prod(shape), dtype=np.float32).reshape(shape)
    tensor.tofile(tmp_path / "a")
    for layer, one in enumerate(layers_of(whole(tmp_path / "a", 0, "F32", shape))):
        assert one.lacking == 0
        assert np.array_equal(filled(tmp_path / "a", one.shape, one.blocks), tensor[layer])


def test_tensors_in_other_pieces_are_compared(tmp_path: Path) -> None:
    tensor = np.arange(12, dtype=np.float32).reshape(4, 3)
    tensor.tofile(tmp_path / "one")
    one = whole(tmp_path / "one", 0, "F32", (4, 3))

    def in_pieces(values: np.ndarray) -> StoredTensor:
        file = tmp_path / "two"
        np.concatenate((values[:, :1].ravel(), values[:, 1:].ravel())).tofile(file)
        blocks = [
            *cut_blocks(file, 0, 4, (4, 3), (0, 0), (4, 1)),
            *cut_blocks(file, 16, 4, (4, 3), (0, 1), (4, 2)),
        ]
        return StoredTensor(dtype="F32", shape=(4, 3), blocks=tuple(blocks))

    assert same_values(one, in_pieces(tensor), 4)
    other = tensor.copy()
    other[3, 2] = 5
    assert not same_values(one, in_pieces(other), 4)
    assert same_values(one, in_pieces(other), 3)
