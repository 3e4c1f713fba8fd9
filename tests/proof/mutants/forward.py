"""Bugs in the forward pass, products of 8-bit numbers, the data and the optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.plan import Plan
from echelon.models.batch import TokenBatch
from echelon.models.rotary import rotary_tables
from echelon.parallel import fp8_linear, rank_model
from echelon.parallel.kernels import fp8
from echelon.parallel.kernels.fp8 import Fp8Matrix
from echelon.parallel.operations import RankOperations
from echelon.parallel.pipeline import PipelineExecutor
from echelon.parallel.storage import weights
from echelon.training import engine, subject
from echelon.training.optimizer import SliceOptimizer
from tests.proof.layouts import Changes
from tests.proof.mutants.planting import LAST, Told, mutant


def _on_block(patch: pytest.MonkeyPatch, layer: int, run: Any) -> None:
    chosen = rank_model.RecomputingRunner

    def runner(*made_with: Any) -> Any:
        usual = chosen(*made_with)

        def run_block(block: Any, x: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
            return run(block, x, batch) if block.index == layer else usual(block, x, batch)

        return run_block

    patch.setattr(rank_model, "RecomputingRunner", runner)


@mutant(
    Told("prove-nothing-dropped", LAST, "zero", "pp", plan={"pp": 2}),
)
def block_not_run(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Leave out the last block."""
    _on_block(patch, plan.model.layers - 1, lambda block, x, batch: x)


@mutant(
    Told("prove-activations", LAST, "zero", "pp"),
)
def block_without_effect(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Run block 1 and throw its output away."""

    def run(block: Any, x: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        return x + 0 * block(x, batch)

    _on_block(patch, 1, run)


@mutant(
    Told(
        "prove-initial-weights",
        "layers.0.attention.k.weight",
        "shards permuted",
        "tp",
        step=-1,
        plan={"tp": 2},
    ),
)
def initial_slice_of_the_next_rank(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Fill the key projection of each tensor rank with the heads of the next one."""
    initial_values = weights.initial_values

    def rolled(
        shape: Any, spec: Any, seed: int, *, offset: Any, into: Any, **rest: Any
    ) -> torch.Tensor:
        if spec.name.endswith("attention.k.weight"):
            offset = ((offset[0] + len(into)) % spec.shape[0], *offset[1:])
        return initial_values(shape, spec, seed, offset=offset, into=into, **rest)

    patch.setattr(weights, "initial_values", rolled)


@mutant(
    Told("prove-activations", "layers.0.attention.k.weight", "wrong heads", "tp", plan={"tp": 2}),
)
def wrong_key_value_head(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Give query head h the key/value head h mod K of its rank, not h divided by the ratio."""
    attend = RankOperations.attend

    def wrong(self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Any:
        repeats = q.shape[2] // k.shape[2]
        return attend(self, q, k.repeat(1, 1, repeats, 1), v.repeat(1, 1, repeats, 1), *rest)

    patch.setattr(RankOperations, "attend", wrong)


@mutant(
    Told("prove-microbatch-loss", "head.weight", "padding", "tp", plan={"tp": 2}),
)
def padding_not_masked(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let the ids that pad the vocabulary take part in the softmax."""
    init = RankOperations.__init__

    def padded(self: RankOperations, split: Any, vocab: int, *rest: Any, **named: Any) -> None:
        init(self, split, vocab + -vocab % plan.mesh.tp, *rest, **named)

    patch.setattr(RankOperations, "__init__", padded)


@mutant(
    Told(
        "prove-activations",
        "layers.0.attention.q.weight",
        "positions",
        "tp",
        plan={"tp": 2, "sequence_parallel": True},
    ),
)
def positions_of_the_slice(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Count rotary positions from the start of each tensor rank's slice of the sequence."""

    def tables(self: Any, shape: Any, batch: TokenBatch, like: torch.Tensor) -> Any:
        slice_length = batch.num_positions // plan.mesh.tp
        return rotary_tables(shape, torch.arange(batch.num_positions) % slice_length, like.dtype)

    patch.setattr(RankOperations, "rotary_tables", tables)


@mutant(
    Told(
        "prove-activations",
        LAST,
        "order",
        "pp",
        plan={"pp": 2, "schedule": "gpipe"},
    ),
)
def labels_in_another_order(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let the last stage take the labels of the microbatches backwards."""
    run = PipelineExecutor.run

    def backwards(self: Any, schedule: Any, batches: Any, scale: float) -> Any:
        last = any(stage.last for stage in self.stages.values())
        return run(self, schedule, list(batches)[::-1] if last else batches, scale)

    patch.setattr(PipelineExecutor, "run", backwards)


@mutant(
    Told(
        "prove-activations",
        LAST,
        "stale",
        "pp",
        plan={"pp": 2, "schedule": "gpipe"},
    ),
)
def buffer_reused_in_flight(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Receive every activation into one buffer, while later ones are already on their way."""
    post, take = PipelineExecutor._post_receive, PipelineExecutor._take
    shared: dict[tuple[int, ...], torch.Tensor] = {}

    def into_one(self: Any, state: Any, message: Any, batch: TokenBatch) -> None:
        post(self, state, message, batch)
        buffer, pending = state.arriving[message]
        shared.setdefault(tuple(buffer.shape), buffer)
        state.arriving[message] = (buffer, pending)

    def late(self: Any, state: Any, step: Any) -> torch.Tensor | None:
        if step.receive is None or step.receive.source_rank > step.receive.target_rank:
            return take(self, state, step)
        # What the wire would do: everything that is posted has landed, the last one on top.
        forward = [m for m in state.arriving if m.source_rank < m.target_rank]
        for message in forward:
            state.arriving[message][1].wait()
        newest = state.arriving[max(forward, key=lambda m: m.microbatch)][0]
        one = shared[tuple(newest.shape)]
        one.copy_(newest)
        take(self, state, step)
        return one.clone()

    patch.setattr(PipelineExecutor, "_post_receive", into_one)
    patch.setattr(PipelineExecutor, "_take", late)


@mutant(
    Told("prove-nothing-dropped", "samples of rank 1", "same data", "dp", plan={"dp": 2}),
)
def same_data_on_every_replica(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Give every replica the samples of the first."""
    rank_batches = subject.rank_batches
    patch.setattr(
        subject,
        "rank_batches",
        lambda plan, batch, rank, step, **rest: rank_batches(plan, batch, 0, step, **rest),
    )


@mutant(
    Told("prove-clipped-update", "embedding.weight", "weight decay"),
)
def decay_applied_twice(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Decay weights once outside of the optimizer as well."""
    init = SliceOptimizer.__init__

    def doubled(self: SliceOptimizer, buckets: Any, plan: Plan, **rest: Any) -> None:
        init(self, buckets, plan, **rest)
        settings = plan.mathematics.optimizer
        self._settings = replace(settings, weight_decay=2 * settings.weight_decay)

    patch.setattr(SliceOptimizer, "__init__", doubled)


@mutant(
    Told("prove-clipped-update", "embedding.weight", "2"),
)
def learning_rate_of_the_next_step(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Be one step ahead in the learning rate."""
    rate = engine.learning_rate
    patch.setattr(engine, "learning_rate", lambda optimizer, step: rate(optimizer, step + 1))


FP8: Changes = {"precision": {"matmul": "fp8", "fp8_block": 8}}
TP: Changes = {**FP8, "tp": 2, "sequence_parallel": True}


@mutant(Told("prove-activations", "layers.0.attention", "none", plan=TP))
def scale_inverted(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Divide what codes stand for by the scale of its tile."""
    numbers = Fp8Matrix.numbers

    def divided(self: Fp8Matrix, dtype: torch.dtype) -> torch.Tensor:
        return numbers(replace(self, scales=1 / self.scales), dtype)

    patch.setattr(Fp8Matrix, "numbers", divided)


@mutant(Told("prove-activations", "layers.0.attention", "none", plan=FP8))
def five_bits_of_exponent_forward(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Round to e5m2, which has two bits after the first."""
    rounded = fp8.rounded_to_fp8

    def coarse(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        return rounded(rounded(x, torch.float8_e5m2).to(x.dtype), kind)

    patch.setattr(fp8, "rounded_to_fp8", coarse)


@mutant(Told("prove-activations", "layers.1.mlp", "slice", "tp", plan=TP))
def scales_of_rank_rows(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take one scale for all numbers of a row that a rank holds: another one for each layout."""
    quantised = fp8_linear.quantised_rows

    def of_rows(x: torch.Tensor, block: int, *pieces: Any) -> Fp8Matrix:
        whole = quantised(x, x.shape[1], *pieces)
        scales = whole.scales.expand(-1, x.shape[1] // block).contiguous()
        return replace(whole, scales=scales, block=block)

    patch.setattr(fp8_linear, "quantised_rows", of_rows)


@mutant(Told("prove-gradients", "layers.1.mlp_norm", "none", plan=FP8))
def weight_scales_upside_down_in_backward(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Multiply the rows of a weight by the scales of others, in backward alone."""
    multiply = fp8_linear.multiply

    def mixed(x: Fp8Matrix, weight: Fp8Matrix, *rest: Any, **options: Any) -> torch.Tensor:
        if options.get("transposed"):
            weight = replace(weight, scales=weight.scales.flip(0))
        return multiply(x, weight, *rest, **options)

    patch.setattr(fp8_linear, "multiply", mixed)


@mutant(Told("prove-activations", "layers.0.attention", "none", plan=FP8))
def rounded_towards_zero(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Round to the number nearer to zero, not to the nearest."""
    rounded = fp8.rounded_to_fp8

    def truncated(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        near = rounded(x, kind)
        back = near.to(x.dtype)
        down = (back.abs() > x.abs()) & (back != 0)
        return (near.view(torch.uint8) - down.to(torch.uint8)).view(near.dtype)

    patch.setattr(fp8, "rounded_to_fp8", truncated)
