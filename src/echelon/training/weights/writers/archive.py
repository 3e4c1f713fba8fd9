# SPDX-License-Identifier: Apache-2.0
"""A file of torch.save whose tensors are written one at a time, after all that is around them.

torch leaves room for the bytes of tensors and writes none (`skip_data`); where that room is, the
reader of such files says (`pickles.py`). So whoever writes holds one tensor, however many are in
the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from echelon.core.disk import disk_errors, flush_file
from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.training.checkpoint.shard_file import tensor_bytes
from echelon.training.weights.pickles import PickledTensor, read_archive

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""The tensors of a file in order, with shape and dtype."""


class OpenArchive:
    """Write tensors into a file of torch.save that has all but their values."""

    def __init__(
        self,
        file: Path,
        shapes: Shapes,
        around: Callable[[dict[str, Any]], Any],
        within: Callable[[Any], Mapping[str, Any]],
        pieces: PieceSizes = TRAINING_PIECES,
    ) -> None:
        """Write the file without values.

        `around` puts the tensors into what is saved, `within` finds them in it again.
        EnvironmentProblem where the disk refuses.
        """
        self._pieces = pieces
        # Memory that nobody writes to is not taken: these are shapes.
        empty = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in shapes.items()}
        self._file = file
        with disk_errors(f"to write into {file.parent}"):
            with torch.serialization.skip_data():
                torch.save(around(dict(empty)), file)
            self._places: Mapping[str, PickledTensor] = within(read_archive(file))

    def write(self, key: str, *values: torch.Tensor) -> None:
        """Write the values of a tensor, or of parts of it that follow one another.

        What does not lie in one piece is copied some rows at a time.
        """
        place = self._places[key]
        count = sum(value.numel() for value in values)
        assert count == place.numel, f"{key} has the shape that was promised"
        with disk_errors(f"to write into {self._file.parent}"), self._file.open("r+b") as stream:
            stream.seek(place.start)
            for value in values:
                rows = value.shape[0] if value.is_contiguous() else self._rows_at_once(value)
                for part in value.split(max(1, rows)):
                    stream.write(tensor_bytes(part))

    def flush(self) -> None:
        """Wait until the disk has the file."""
        with disk_errors(f"to write into {self._file.parent}"), self._file.open("rb") as stream:
            flush_file(stream.fileno())

    def _rows_at_once(self, value: torch.Tensor) -> int:
        return self._pieces.buffer_bytes // (value[0].numel() * value.element_size())


def save_archive(
    file: Path,
    tensors: Mapping[str, Callable[[], torch.Tensor]],
    shapes: Shapes,
    around: Callable[[dict[str, Any]], Any],
    within: Callable[[Any], Mapping[str, Any]],
) -> None:
    """Write a file of torch.save, making one tensor at a time."""
    archive = OpenArchive(file, shapes, around, within)
    for key, make in tensors.items():
        archive.write(key, make())
    archive.flush()
