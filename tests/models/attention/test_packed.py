"""Documents and windows in few calls of flash attention: the reference, and how few they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.core.attention_mask import AttentionMask, Band, PositionRun
from echelon.layout.attention_tiles import AttentionTile, tiles_between
from echelon.models.attention import fused, local, packed
from echelon.models.attention.flash import FlashArguments, FlashAttention, starts_of, window_of
from echelon.models.attention.fused import FusedGpuKernel
from echelon.models.attention.interface import SavedAttention
from echelon.models.attention.local import attend_tiles, backward_tiles, takes_any_band
from echelon.models.attention.packed import packed_calls
from tests.models.attention.cases import MASKS, RUNS, SEQUENCES, case, expected
from tests.models.attention.flash_reference import ReferenceFlash

CAUSAL = AttentionMask()


class Names(TorchDispatchMode):
    """Note the name of each operator that is called."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a call, and make it."""
        self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


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


LENGTH = 40
BATCHES = {
    "one sequence": ((0, 3, 21),),
    "the same in each": ((0, 3, 21), (0, 3, 21)),
    "others in each": ((0, 3, 21), (0, 1, 2, 30), (0,)),
}
MANY: dict[str, tuple[AttentionMask, tuple[PositionRun, ...]]] = {
    "causal": (CAUSAL, (PositionRun(0, 1, LENGTH),)),
    "a window": (AttentionMask(window=5), (PositionRun(0, 1, LENGTH),)),
    "both directions": (AttentionMask(causal=False), (PositionRun(0, 1, LENGTH),)),
    "rows that lie apart": (CAUSAL, (PositionRun(0, 1, 10), PositionRun(30, 1, 10))),
    "rows of the end": (CAUSAL, (PositionRun(20, 1, 20),)),
}


def _plainly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden_BTS: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("tbhd,sbhd->bhts", q, keys) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(hidden_BTS[:, None], float("-inf"))
    return torch.einsum("bhts,sbhd->tbhd", scores.softmax(-1), values), scores.logsumexp(-1)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("case", MANY)
@pytest.mark.parametrize("in_qkv", [False, True])
def test_documents_of_a_batch_are_attention(
    case: str, batch: str, in_qkv: bool, flash: ReferenceFlash
) -> None:
    (mask, runs), starts = MANY[case], BATCHES[batch]
    generator = torch.Generator().manual_seed(8)
    rows = torch.cat([torch.arange(run.start, run.position(run.count)) for run in runs])
    keys = (PositionRun(0, 1, LENGTH),)
    # Keys of all positions as parts of one tensor: those of a sequence are not beside the next.
    made = torch.randn(LENGTH, len(starts), 8, 8, generator=generator, dtype=torch.float64)
    q, k, v = (x if in_qkv else x.contiguous() for x in made.split((4, 2, 2), dim=2))
    q = q[rows] if len(rows) < LENGTH else q
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    documents_BT = torch.stack(
        [torch.bucketize(torch.arange(LENGTH), torch.tensor(one), right=True) for one in starts]
    )
    ahead_TS = rows[:, None] - torch.arange(LENGTH)
    hidden_BTS = documents_BT[:, rows, None] != documents_BT[:, None]
    hidden_BTS |= (ahead_TS < 0) & mask.causal
    if mask.window is not None:
        hidden_BTS |= ahead_TS >= mask.window
    pieces = tiles_between(runs, keys, mask, starts, None)
    out, lse = attend_tiles(q.detach(), k.detach(), v.detach(), pieces).result()
    wanted_out, wanted_lse = _plainly(q, k, v, hidden_BTS)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    found = backward_tiles(dout, SavedAttention(q, k, v, out, lse), pieces)
    wanted = torch.autograd.grad(wanted_out, (q, k, v), dout)
    torch.testing.assert_close(
        (out, lse, *found), (wanted_out, wanted_lse, *wanted), rtol=0.0, atol=1e-12
    )
    assert len(flash.calls) <= 2 * len(pieces)


@pytest.mark.parametrize(("batch", "copies"), [("the same in each", 0), ("others in each", 12)])
def test_a_block_copies_no_rows_where_all_sequences_have_the_same_documents(
    batch: str, copies: int
) -> None:
    """Else forward q, k, v and out; backward these, the gradient of out, and those of q, k, v."""
    starts, run = BATCHES[batch], (PositionRun(0, 1, LENGTH),)
    pieces = tiles_between(run, run, CAUSAL, starts, None)
    meta, dtype = torch.device("meta"), torch.bfloat16
    q, dout = (torch.empty(LENGTH, len(starts), 4, 8, device=meta, dtype=dtype) for _ in range(2))
    k, v = (torch.empty(LENGTH, len(starts), 2, 8, device=meta, dtype=dtype) for _ in range(2))
    attend_tiles(q, k, v, pieces)  # The device learns where documents start.
    with Names() as seen:
        out, lse = attend_tiles(q, k, v, pieces).result()
        backward_tiles(dout, SavedAttention(q, k, v, out, lse), pieces)
    calls = [name for name in seen.names if "flash_attention" in name]
    assert calls == ["_flash_attention_forward", "_flash_attention_backward"]
    assert len([name for name in seen.names if name in {"clone", "copy_", "index"}]) == copies
    views = {"view", "slice", "transpose", "alias", "_unsafe_view", "empty", "new_empty"}
    assert set(seen.names) <= {*calls, *views, *({"clone", "copy_"} if copies else ())}


def test_what_a_batch_needs_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    found = packed.packed_calls

    def counted(tiles: Sequence[AttentionTile], num_sequences: int) -> list[packed.PackedCall]:
        read.append(num_sequences)
        return found(tiles, num_sequences)

    monkeypatch.setattr(packed, "packed_calls", counted)
    run = (PositionRun(0, 1, LENGTH),)
    q = torch.empty(LENGTH, 2, 4, 8, device="meta", dtype=torch.bfloat16)
    for starts in (((0, 5), (0, 6)), ((0, 5), (0, 7)), ((0, 5), (0, 6))):
        pieces = tiles_between(run, run, CAUSAL, starts, None)
        for _ in range(3):
            attend_tiles(q, q, q, pieces)
    assert read == [2, 2]


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
