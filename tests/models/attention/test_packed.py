"""Documents and windows in few calls of flash attention: the reference, and how few they are."""

from __future__ import annotations

import pytest
import torch

from echelon.core.attention_mask import AttentionMask, Band, PositionRun
from echelon.layout.attention_boxes import AttentionTile
from echelon.layout.attention_tiles import tiles_between
from echelon.models.attention import fused, local
from echelon.models.attention.flash import FlashArguments, FlashAttention, starts_of, window_of
from echelon.models.attention.fused import FusedGpuKernel
from echelon.models.attention.interface import SavedAttention
from echelon.models.attention.local import attend_tiles, backward_tiles, takes_any_band
from echelon.models.attention.packed import packed_calls
from tests.models.attention.cases import MASKS, RUNS, SEQUENCES, case, expected
from tests.models.attention.flash_reference import ReferenceFlash

CAUSAL = AttentionMask()


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> ReferenceFlash:
    """Let all attention be that of flash attention's calls, and give them to the reference."""
    made = ReferenceFlash()
    monkeypatch.setattr(local, "kernel_for", lambda *_: FusedGpuKernel(made))
    monkeypatch.setattr(fused, "_square", lambda *_: False)
    return made


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("runs", RUNS)
def test_calls_with_their_arguments_are_attention(
    runs: str, mask: str, heads: tuple[int, int], flash: ReferenceFlash
) -> None:
    one = case(runs, mask, heads)
    pieces = tiles_between(*RUNS[runs], *MASKS[mask], None)
    out, lse = attend_tiles(one.q, one.k, one.v, pieces).result()
    attended = SavedAttention(one.q, one.k, one.v, out, lse)
    found = (out, lse, *backward_tiles(one.dout, attended, pieces))
    torch.testing.assert_close(found, expected(one), rtol=0.0, atol=1e-12)
    assert len(flash.calls) <= 2 * len(pieces)


@pytest.mark.parametrize(
    ("mask", "starts", "calls", "in_one"),
    [
        (CAUSAL, ((0, 3, 4, 21, 30),), 1, (-1, 0)),
        (CAUSAL, ((0, 3, 21), (0, 1, 2, 30)), 1, (-1, 0)),
        (AttentionMask(window=5), ((0, 3, 21, 24),), 1, (4, 0)),
        (AttentionMask(window=5), ((0, 3, 21), (0, 39)), 1, (4, 0)),
        (AttentionMask(causal=False), ((0, 3, 21),), 1, (-1, -1)),
        (AttentionMask(causal=False, window=5), ((0, 3, 21), (0, 9)), 1, (4, 4)),
    ],
)
def test_all_documents_of_a_batch_are_one_call(
    mask: AttentionMask,
    starts: tuple[tuple[int, ...], ...],
    calls: int,
    in_one: tuple[int, int],
    flash: ReferenceFlash,
) -> None:
    run = (PositionRun(0, 1, 40),)
    pieces = tiles_between(run, run, mask, starts, None)
    found = packed_calls(pieces, len(starts))
    assert [call.window for call in found] == [in_one] * calls
    documents = sum(map(len, starts))
    assert len(found[0].queries) == documents
    q, k, v = (torch.randn(40, len(starts), 2, 8, dtype=torch.float64) for _ in range(3))
    out, lse = attend_tiles(q, k, v, pieces).result()
    assert (len(flash.calls), flash.segments) == (1, documents)
    backward_tiles(q, SavedAttention(q, k, v, out, lse), pieces)
    assert (len(flash.calls), flash.segments) == (2, 2 * documents)


def test_rows_of_one_sequence_are_handed_on_without_a_copy(flash: ReferenceFlash) -> None:
    seen: list[torch.Tensor] = []
    forward = flash.forward

    def noted(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, told: FlashArguments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen.extend((q, k, v))
        return forward(q, k, v, told)

    flash.forward = noted  # type: ignore[method-assign]
    run = (PositionRun(0, 1, 40),)
    q, k, v = (torch.randn(40, 1, 2, 8, dtype=torch.float64) for _ in range(3))
    attend_tiles(q, k, v, tiles_between(run, run, CAUSAL, ((0, 3, 21),), None))
    for got, whole in zip(seen, (q, k, v), strict=True):
        assert got.data_ptr() == whole.data_ptr()
        assert got.shape == (40, 2, 8)


def test_a_window_is_one_box() -> None:
    run = (PositionRun(0, 1, 4096),)
    (box,) = tiles_between(run, run, AttentionMask(window=256), None, None)
    assert window_of(box) == (255, 0)
    assert len(tiles_between(run, run, AttentionMask(window=256), None)) > 1


@pytest.mark.parametrize(
    ("rows", "band", "window"),
    [
        ((8, 8), Band(0, None), (-1, 0)),
        ((8, 8), Band(None, None), (-1, -1)),
        ((8, 8), Band(0, 2), (2, 0)),
        ((4, 8), Band(-4, None), (-1, 0)),
        ((8, 4), Band(0, None), (-1, 4)),
        ((4, 8), Band(-5, 1), (5, 1)),
    ],
)
def test_a_window_counts_from_the_last_query_and_the_last_key(
    rows: tuple[int, int], band: Band, window: tuple[int, int]
) -> None:
    assert window_of(AttentionTile(slice(0, rows[0]), slice(0, rows[1]), band)) == window


def test_boxes_that_share_rows_or_keys_are_in_different_calls() -> None:
    def box(q: slice, k: slice) -> AttentionTile:
        return AttentionTile(q, k, Band(None, None), 0)

    rows = [box(slice(0, 4), slice(0, 4)), box(slice(0, 4), slice(8, 12))]
    keys = [box(slice(0, 4), slice(0, 4)), box(slice(4, 8), slice(0, 4))]
    assert packed_calls(rows, 1) == packed_calls(keys, 1) == []
    assert len(packed_calls([*rows, box(slice(4, 8), slice(12, 16))], 1)) == 2


def test_starts_are_whole_numbers_of_32_bits() -> None:
    found = starts_of((3, 1, 7), torch.device("cpu"))
    assert (found.tolist(), found.dtype) == ([0, 3, 4, 11], torch.int32)


@pytest.mark.parametrize("segments", [False, True])
def test_calls_fit_the_schemas_of_pytorch(segments: bool) -> None:
    meta = torch.device("meta")
    shape = (10, 4, 8) if segments else (2, 5, 4, 8)
    q, dout = (torch.empty(shape, dtype=torch.bfloat16, device=meta) for _ in range(2))
    k = q[..., :2, :]
    starts = starts_of((3, 7), meta) if segments else None
    told = FlashArguments(
        scale=0.5, left=3, right=0, most_q=7, most_k=7, starts_q=starts, starts_k=starts
    )
    out, lse = FlashAttention().forward(q, k, k, told)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (tuple(lse.shape), lse.dtype) == ((4, 10) if segments else (2, 4, 5), torch.float32)
    found = FlashAttention().backward(dout, (q, k, k), (out, lse), told)
    assert [one.shape for one in found] == [q.shape, k.shape, k.shape]


def test_which_queries_take_any_band() -> None:
    q = torch.empty(4, 1, 2, 8, device="meta")
    assert takes_any_band(q.bfloat16(), local.NO_CAP)
    assert not takes_any_band(q, local.NO_CAP)
    assert not takes_any_band(q.bfloat16(), local.AttentionRule(kernel="plain"))
    assert not takes_any_band(torch.empty(4, 1, 2, 8), local.NO_CAP)
    assert SEQUENCES == 2
