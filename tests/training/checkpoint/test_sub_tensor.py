"""Any part of a stored tensor is read into place, however small the buffer is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from echelon.core.piece_sizes import TRAINING_PIECES
from echelon.training.checkpoint.shard_file import own_memory, read_pieces, row_buffer

TENSORS = {
    "scalar": torch.tensor(3.0),
    "line": torch.arange(11, dtype=torch.int64),
    "matrix": torch.arange(7 * 5, dtype=torch.float32).view(7, 5),
    "experts": torch.arange(4 * 3 * 6, dtype=torch.float64).view(4, 3, 6),
    "half": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
}
CUTS = {
    "scalar": [()],
    "line": [(slice(0, 11),), (slice(4, 9),)],
    "matrix": [(slice(0, 7), slice(0, 5)), (slice(2, 6), slice(1, 4)), (slice(3, 4), slice(4, 5))],
    "experts": [
        (slice(1, 3), slice(0, 3), slice(0, 6)),
        (slice(0, 4), slice(1, 2), slice(2, 5)),
    ],
    "half": [(slice(1, 2), slice(0, 3)), (slice(0, 2), slice(2, 3))],
}


@pytest.mark.parametrize("bytes_at_once", [1, 50, 2**20])
@pytest.mark.parametrize("name", TENSORS)
def test_a_part_is_what_a_slice_is(name: str, bytes_at_once: int, tmp_path: Path) -> None:
    sizes = replace(TRAINING_PIECES, buffer_bytes=bytes_at_once)
    save_file(TENSORS, tmp_path / "a.safetensors")
    piece, whole = read_pieces(tmp_path / "a.safetensors")[name], TENSORS[name]
    for cut in CUTS[name]:
        # The target is a part of something larger, as the slice of a rank is.
        around = torch.full((*whole.shape, 2), 99).to(whole.dtype)
        target = around[(*cut, 1)] if cut else around[1]
        buffer: torch.Tensor | None = None
        with (tmp_path / "a.safetensors").open("rb", buffering=0) as stream:
            for rows in piece.rows(cut, target):
                buffer = row_buffer(rows, buffer, sizes)
                assert buffer.numel() <= max(bytes_at_once, rows.row_bytes)
                for part, block in rows.blocks(stream.fileno(), buffer):
                    part.copy_(block)
        assert torch.equal(target, whole[cut])
        assert (around[..., 0] == 99).all()


@pytest.mark.parametrize(
    "text", [b"", b"\xff" * 12, b"\x02\0\0\0\0\0\0\0[]", b"\x01\0\0\0\0\0\0\0{"]
)
def test_what_is_no_safetensors_file_is_said_so(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(text)
    with pytest.raises(ValueError):  # noqa: PT011 - the message is json's or ours
        read_pieces(tmp_path / "bad")


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "short").write_bytes(data[:-40])
    last = max(read_pieces(tmp_path / "short").values(), key=lambda one: one.start)
    with (tmp_path / "short").open("rb", buffering=0) as stream:
        rows = list(last.rows((slice(0, 2), slice(0, 3)), torch.zeros(2, 3, dtype=torch.bfloat16)))
        (one,) = rows
        with pytest.raises(OSError, match="ends at byte"):
            list(one.blocks(stream.fileno(), row_buffer(one, None)))


@pytest.mark.parametrize("shape", [(3,), (0, 4), (300, 200), (5, 100, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_it_is_a_tensor_of_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = own_memory(shape, dtype)
    assert (tuple(made.shape), made.dtype) == (shape, dtype)
    assert made.is_contiguous()
    assert not made.any()
    assert (made + 1).sum() == made.numel()


def test_it_is_given_back_at_once() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    held = own_memory((2**24,), torch.float32).fill_(1.0)
    with_it = resident()
    del held
    assert with_it - resident() >= 2**26 - 2**22
