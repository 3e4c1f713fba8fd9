"""Bugs that begin after some steps, blocks, microbatches or pieces: a small proof has as many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.piece_sizes import TRAINING_PIECES, PieceSizes
from echelon.core.plan import Optimizer, Plan
from echelon.layout.attention_tiles import FULL
from echelon.models.decoder import Decoder
from echelon.parallel.context import attention
from echelon.parallel.kernels import fused, low_precision
from echelon.parallel.kernels.low_precision import row_chunks
from echelon.parallel.offload.file_store import FileOffloadStore
from echelon.proof.shrink import stages_of
from echelon.training import engine
from echelon.training.engine import TrainEngine
from echelon.training.optimizer import muon, step
from echelon.training.optimizer.elementwise import AdamW
from tests.proof.layouts import BF16, layout
from tests.proof.mutants.planting import Told, mutant


def deep(*, counts: Sequence[int], **chosen: Any) -> Plan:
    """Return a plan of so many blocks in each stage."""
    plan = layout(**chosen)
    pipeline = replace(plan.layout.pipeline, stages=stages_of(counts))
    model = replace(plan.model, layers=sum(counts))
    mathematics = replace(plan.mathematics, model=model)
    return replace(plan, mathematics=mathematics, layout=replace(plan.layout, pipeline=pipeline))


FALLING = {"schedule": "linear", "total_steps": 100}
LATE = {"schedule": "wsd", "total_steps": 100, "decay_steps": 20}


def _other_schedule(patch: pytest.MonkeyPatch, change: Any) -> None:
    """Take the learning rate from `change(optimizer)`."""
    right = engine.learning_rate
    patch.setattr(engine, "learning_rate", lambda optimizer, step: right(change(optimizer), step))


@mutant(
    Told("prove-clipped-update", "embedding.weight", "number", step=3, plan={"optimizer": FALLING}),
)
def decay_twice_as_fast(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let the learning rate fall twice as fast."""

    def faster(optimizer: Optimizer) -> Optimizer:
        start = optimizer.warmup_steps
        return replace(optimizer, total_steps=start + (optimizer.total_steps - start) // 2)

    _other_schedule(patch, faster)


@mutant(
    Told("prove-clipped-update", "embedding.weight", "number", step=3, plan={"optimizer": LATE}),
)
def decay_starts_with_the_flat_phase(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Leave out the phase between warm-up and decay."""

    def early(optimizer: Optimizer) -> Optimizer:
        return replace(optimizer, decay_steps=optimizer.total_steps - optimizer.warmup_steps)

    _other_schedule(patch, early)


@mutant(Told("prove-clipped-update", "embedding.weight", "number"))
def warmup_a_step_longer(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let the warm-up take a step more."""
    _other_schedule(patch, lambda one: replace(one, warmup_steps=one.warmup_steps + 1))


def _count(patch: pytest.MonkeyPatch, change: Any) -> None:
    """Tell AdamW that an update is number `change(number)`."""
    start = AdamW.start_update
    patch.setattr(AdamW, "start_update", lambda self, count: start(self, change(count)))


@mutant(Told("prove-clipped-update", "embedding.weight", "update count"))
def adam_counts_from_two(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Correct the bias of the first update as if it were the second."""
    _count(patch, lambda count: count + 1)


@mutant(Told("prove-clipped-update", "embedding.weight", "update count", step=3))
def adam_count_begins_anew(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Count from one again after three updates, the moments kept."""
    _count(patch, lambda count: count if count <= 3 else count - 3)


@mutant(
    Told(
        "prove-clipped-update",
        "layers.0.mlp.gate.weight",
        "local scale",
        "tp",
        plan={"tp": 2, "optimizer": {"kind": "muon"}, "model": {"ffn": 352}},
    ),
)
def muon_scale_of_the_slice(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Scale an orthogonal update by the longer side of the tensor slice."""
    step, size = muon.Muon._step, muon.step_size

    def local(self: Any, matrix: Any, flat: torch.Tensor) -> torch.Tensor:
        return step(self, matrix, flat) * (size(matrix.local_shape) / size(matrix.shape))

    patch.setattr(muon.Muon, "_step", local)


@mutant(
    Told(
        "prove-activations",
        "layers.2",
        "order of blocks",
        plan={"pp": 4, "counts": (2, 2, 2, 2)},
        of=deep,
    ),
)
def blocks_of_a_stage_reversed(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Run the blocks of each stage from the last to the first."""
    hidden = Decoder.hidden

    def reversed_blocks(self: Decoder, x: Any, batch: Any) -> torch.Tensor:
        kept = self.layers
        self.layers = torch.nn.ModuleDict(dict(reversed(list(kept.items()))))
        try:
            return hidden(self, x, batch)
        finally:
            self.layers = kept

    patch.setattr(Decoder, "hidden", reversed_blocks)


@mutant(Told("prove-token-count", "token count", "number", plan={"accumulation": 6}))
def fourth_microbatch_replaced(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Run the first microbatch again where the fourth should run."""
    take = TrainEngine.step

    def repeated(self: TrainEngine, batches: Any, number: int, **rest: Any) -> Any:
        given = [*batches]
        given[3:4] = given[:1] if len(given) > 3 else []
        return take(self, given, number, **rest)

    patch.setattr(TrainEngine, "step", repeated)


NVME = {
    "dp": 2,
    "counts": (12,),
    "zero": {"stage": 1, "optimizer_offload": "nvme", "offload_dir": "given by the proof"},
}


@mutant(
    Told(
        "prove-clipped-update",
        "layers.8.attention_norm.weight",
        "another's state",
        plan=NVME,
        of=deep,
    ),
)
def files_read_in_the_order_of_text(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Read a bucket from the place that it had if names were in the order of text."""
    read = FileOffloadStore._read

    def by_text(self: FileOffloadStore, transfer: Any) -> None:
        own = self._extents[transfer.key]
        alike = [key for key, one in self._extents.items() if one.numel == own.numel]
        place = self._extents[sorted(alike)[alike.index(transfer.key)]]
        read(self, replace(transfer, start=transfer.start - own.start + place.start))

    patch.setattr(FileOffloadStore, "_read", by_text)


@mutant(
    Told(
        "prove-clipped-update",
        "layers.0.attention_norm.weight",
        "stale",
        step=1,
        plan=NVME,
        of=deep,
    ),
)
def last_piece_of_a_file_not_written(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Leave the last piece of a tensor in the file as it was, where it has several."""
    write = FileOffloadStore._write

    def all_but_last(self: FileOffloadStore, transfer: Any, complete: Any) -> None:
        place = self._extents[transfer.key]
        ends = transfer.start + len(transfer.memory) == place.start + place.span_bytes
        if not ends or transfer.start == place.start:
            write(self, transfer, complete)

    patch.setattr(FileOffloadStore, "_write", all_but_last)


@mutant(Told("prove-gradient-norm", "gradient norm", "number"))
def last_run_not_in_the_norm(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Leave the last run of a tensor out of the norm, where it is cut into several."""
    runs = step._runs

    def fewer(bucket: Any, parts: Any, elements: int) -> Any:
        for part in parts:
            found = [*runs(bucket, [part], elements)]
            yield from found[:-1] if len(found) > 1 else found

    patch.setattr(step, "_runs", fewer)


def _last(x: torch.Tensor, pieces: PieceSizes) -> slice | None:
    """Return the last of several pieces of the rows of x."""
    *before, last = row_chunks(x, pieces)
    return last if before else None


@mutant(Told("prove-activations", "layers.0.attention", "positions"))
def last_rows_not_turned(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Leave the last piece of queries and keys without their positions."""
    right = fused.rotate_half_pairs

    def turned(x: torch.Tensor, cos: Any, sin: Any, pieces: Any, *, direction: int) -> torch.Tensor:
        out, rows = right(x, cos, sin, pieces, direction=direction), _last(x, pieces)
        if rows is not None:
            out[rows] = x[rows]
        return out

    patch.setattr(fused, "rotate_half_pairs", turned)


@mutant(
    Told(
        "prove-gradients",
        "norm.weight",
        "rows missing",
        plan={"precision": BF16},
        own_precision=True,
    ),
)
def last_rows_not_in_a_norm(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Leave the last piece of rows out of the gradient of a norm's weight, in bfloat16."""
    right = low_precision.rms_norm_backward

    def fewer(dy: torch.Tensor, x: Any, inverse: Any, weight: Any, pieces: Any) -> Any:
        dx, dweight = right(dy, x, inverse, weight, pieces)
        rows = _last(x, pieces)
        if rows is not None:
            without = dy.clone()
            without[rows] = 0.0
            dweight = right(without, x, inverse, weight, pieces)[1]
        return dx, dweight

    patch.setattr(low_precision, "rms_norm_backward", fewer)


@mutant(
    Told("prove-activations", "layers.0.attention", "not masked", plan={"model": {"window": 5}}),
)
def last_tile_not_masked(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let all rows of the last of several tiles of a window meet all its keys."""
    right = attention.tiles_between

    def unmasked(*arguments: Any) -> Any:
        *tiles, last = right(*arguments)
        return (*tiles, replace(last, band=FULL) if tiles else last)

    patch.setattr(attention, "tiles_between", unmasked)


@mutant(
    Told(
        "prove-clipped-update",
        "layers.4.attention.q.weight",
        "stale",
        step=1,
        plan={"dp": 2, "counts": (12,), "optimizer": {"kind": "muon"}},
        of=deep,
    ),
)
def late_buckets_of_muon_without_momentum(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Forget the momentum of what is sent when no more buckets may be on their way."""
    send = muon.Muon.send_parts
    sent: list[str] = []

    def forgetful(self: Any, bucket: Any, gradient: Any, momentum: Any, factor: float) -> None:
        if bucket.name in sent:
            sent.clear()
        sent.append(bucket.name)
        if len(sent) > TRAINING_PIECES.muon_buckets:
            momentum.zero_()
        send(self, bucket, gradient, momentum, factor)

    patch.setattr(muon.Muon, "send_parts", forgetful)
