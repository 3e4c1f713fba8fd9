"""Bugs in constants: of the optimizer, of norms, of what is decayed and counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.core.plan import Plan, Precision
from echelon.models.batch import TokenBatch
from echelon.parallel.operations import RankOperations
from echelon.training import engine
from echelon.training.optimizer import step as optimizer_step
from echelon.training.optimizer.adamw import AdamW
from tests.parallel.layouts import DEEPSEEK
from tests.proof.layouts import FP16
from tests.proof.mutants.expert_layouts import BIAS, in_routes
from tests.proof.mutants.planting import LAST, Told, mutant


@mutant(Told("prove-clipped-update", "layers.0.attention_norm.weight", "undue decay"))
def norms_decay(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take weight decay from vectors, too."""
    ranges = optimizer_step.trained_ranges
    patch.setattr(
        optimizer_step, "trained_ranges", lambda bucket: [(one, True) for one, _ in ranges(bucket)]
    )


@mutant(
    Told(
        "prove-clipped-update",
        "embedding.weight",
        "undue decay",
        plan={"dp": 2, "optimizer": {"decay": "blocks"}, "zero": {"stage": 2}},
    ),
)
def embeddings_decay(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Decay the embedding and the head, which are matrices of no block."""
    norms_decay.plant(patch, plan)


def _count_by(patch: pytest.MonkeyPatch, change: Any) -> None:
    start = AdamW.start_update
    patch.setattr(AdamW, "start_update", lambda self, count: start(self, change(count)))


@mutant(Told("prove-clipped-update", "embedding.weight", "update count"))
def count_one_ahead(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Correct the bias of the moments by the number of the next update."""
    _count_by(patch, lambda count: count + 1)


@mutant(Told("prove-clipped-update", "embedding.weight", "update count", step=1))
def count_stays(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Correct the bias of the moments in every update as in the first."""
    _count_by(patch, lambda count: 1)


@mutant(Told("prove-clipped-update", "embedding.weight", "epsilon"))
def other_adam_epsilon(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Divide by the root of the second moment and a hundredth of epsilon."""
    init = AdamW.__init__

    def changed(self: AdamW, settings: Any) -> None:
        init(self, replace(settings, eps=settings.eps / 100))

    patch.setattr(AdamW, "__init__", changed)


@mutant(Told("prove-clipped-update", "embedding.weight", "betas swapped", step=1))
def betas_swapped(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Take each beta for the other."""
    init = AdamW.__init__

    def changed(self: AdamW, settings: Any) -> None:
        init(self, replace(settings, beta1=settings.beta2, beta2=settings.beta1))

    patch.setattr(AdamW, "__init__", changed)


@mutant(
    in_routes(
        "not skipped",
        "",
        tensor="layers.1.mlp.router.weight",
        step=1,
        rule="prove-router-biases",
        model=DEEPSEEK,
        balance=BIAS,
        precision=Precision(**FP16),
    ),
)
def bias_moves_on_a_skipped_step(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Move the biases of routers whether the step is taken or not."""
    step = engine.TrainEngine.step

    def moving(self: Any, *args: Any, **named: Any) -> Any:
        result = step(self, *args, **named)
        if result.skipped:
            self.model.balancer.update()
        return result

    patch.setattr(engine.TrainEngine, "step", moving)


@mutant(
    Told("prove-activations", "layers.0.attention_norm.weight", "epsilon"),
    Told(
        "prove-activations",
        "layers.0.attention_norm.weight",
        "epsilon",
        plan={"tp": 2, "sequence_parallel": True, "model": {"norm": "layernorm"}},
    ),
)
def other_norm_epsilon(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Add ten times the epsilon in every norm."""
    norm = RankOperations.norm

    def changed(self: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float) -> torch.Tensor:
        return norm(self, x, weight, bias, 10 * eps)

    patch.setattr(RankOperations, "norm", changed)


@mutant(Told("prove-activations", "layers.0.attention_norm.weight", "norm kind"))
def means_subtracted(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Subtract the mean in a norm that only divides."""
    norm = RankOperations.norm

    def changed(self: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return norm(self, x - x.mean(-1, keepdim=True), *rest)

    patch.setattr(RankOperations, "norm", changed)


DROPOUT: dict[str, Any] = {"model": {"dropout": 0.2}}


def _drop_by(patch: pytest.MonkeyPatch, change: Any) -> None:
    dropout = RankOperations.dropout

    def changed(self: Any, x: Any, probability: float, site: str, batch: TokenBatch) -> Any:
        return dropout(self, x, probability, site, change(self, batch))

    patch.setattr(RankOperations, "dropout", changed)


@mutant(
    Told("prove-activations", "embedding.weight", "dropout", "dp", plan={"dp": 2, **DROPOUT}),
)
def masks_shared_by_replicas(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Key what is dropped by the row of a microbatch: every replica drops the same."""

    def change(_: Any, batch: TokenBatch) -> TokenBatch:
        return replace(batch, sample_ids_B=torch.arange(batch.num_sequences))

    _drop_by(patch, change)


@mutant(
    Told("prove-activations", "embedding", "dropout", "tp", plan={"tp": 2, **DROPOUT}),
)
def masks_differ_between_copies(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let each tensor rank, which has a copy of the stream, drop what it likes."""

    def change(operations: Any, batch: TokenBatch) -> TokenBatch:
        return replace(batch, seed=batch.seed + operations.split.group.index)

    _drop_by(patch, change)


@mutant(
    Told(
        "prove-activations",
        "layers.0.attention",
        "documents off by one",
        plan={"documents": "separate"},
    ),
)
def documents_one_late(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let each document begin at its second token."""
    cut = TokenBatch.cut

    def late(self: TokenBatch, runs: Any, documents: Any = None) -> TokenBatch:
        moved = documents and tuple((0, *(s + 1 for s in starts[1:])) for starts in documents)
        return cut(self, runs, moved)

    patch.setattr(TokenBatch, "cut", late)


@mutant(
    Told("prove-activations", f"{LAST}", "order of blocks", plan={"zero": {"stage": 3}, "dp": 2}),
)
def blocks_reversed(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Run the blocks of a stage from the last to the first."""
    apply = engine.apply_plan

    def changed(*args: Any, **named: Any) -> Any:
        model = apply(*args, **named)
        for stage in model.stages.values():
            stage.layers = torch.nn.ModuleDict(dict(reversed(list(stage.layers.items()))))
        return model

    patch.setattr(engine, "apply_plan", changed)
