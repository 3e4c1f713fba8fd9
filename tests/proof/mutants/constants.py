"""Bugs in constants: of the optimizer, of norms, of what is decayed and counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import pi
from typing import Any

import pytest
import torch

from echelon.core.experts import Balance
from echelon.core.model_shape import Experts, RopeScaling
from echelon.core.plan import Plan, Precision
from echelon.models import rotary
from echelon.models.batch import TokenBatch
from echelon.models.decoder import Block
from echelon.parallel.expert.inner_activation import InnerActivation
from echelon.parallel.expert.router import Router
from echelon.parallel.operations import RankOperations
from echelon.training import engine
from echelon.training.optimizer import step as optimizer_step
from echelon.training.optimizer.elementwise import AdamW
from tests.models.latent_shapes import LATENT
from tests.parallel.layouts import DEEPSEEK, MIXTRAL, plan_of
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


STRETCHED: dict[str, Any] = {
    "rope_theta": 500_000.0,
    "rope_scaling": RopeScaling(
        kind="llama3",
        factor=8.0,
        original_positions=8192,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
    ),
}


@mutant(Told("prove-activations", "layers.0.attention", "slice", plan={"model": STRETCHED}))
def frequencies_are_not_blended(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Keep each frequency that is not low as it is, as if none lay between low and high."""

    def stepped(
        frequencies_E: torch.Tensor, scaling: RopeScaling, theta: float, length: int
    ) -> torch.Tensor:
        assert scaling.original_positions is not None
        turns_E = scaling.original_positions * frequencies_E / (2 * pi)
        return torch.where(turns_E < 1.0, frequencies_E / scaling.factor, frequencies_E)

    patch.setattr(rotary, "scale_frequencies", stepped)


CLAMPED: dict[str, Any] = {
    "model": replace(MIXTRAL, experts=Experts(num_experts=8, top_k=2, ffn=12, limit=7.0)),
    "dp": 2,
}


def _clamp_by(patch: pytest.MonkeyPatch, change: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """Clamp otherwise in experts: `change` makes the least and the largest number other ones."""

    def within(method: Any) -> Any:
        def changed(self: InnerActivation, *args: Any) -> Any:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(torch.Tensor, "clamp", clamp)
                inner.setattr(torch, "clamp", clamp)
                return method(self, *args)

        return changed

    def clamp(x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        least, most = change(*args) if args else change(None, named.pop("max"))
        return right(x, least, most, **named)

    right = torch.clamp
    for name in ("forward", "backward"):
        patch.setattr(InnerActivation, name, within(getattr(InnerActivation, name)))


@mutant(
    Told("prove-activations", "layers.0.mlp", "none", plan=CLAMPED, of=plan_of),
)
def no_least_number_of_an_expert(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Clamp what is gated from above alone."""
    _clamp_by(patch, lambda least, most: (None, most))


@mutant(
    Told("prove-activations", "layers.0.mlp", "none", plan=CLAMPED, of=plan_of),
)
def gate_of_an_expert_has_a_least_number(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Clamp gates from below, too, as what they gate."""
    _clamp_by(patch, lambda least, most: (-most, most))


@mutant(Told("prove-gradients", "layers.1.mlp_norm", "none", plan=CLAMPED, of=plan_of))
def gradient_beyond_a_clamp(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let gradients pass where gates are clamped."""
    backward = InnerActivation.backward

    def passing(self: InnerActivation, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(torch.Tensor, "masked_fill_", lambda x, mask, value: x)
            return backward(self, *args)

    patch.setattr(InnerActivation, "backward", passing)


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


@mutant(
    Told(
        "prove-gradients",
        "layers.1.attention.kv_down.weight",
        "missing sum",
        "tp",
        plan={"model": LATENT, "tp": 2},
        of=plan_of,
    ),
)
def latent_gradients_not_summed(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Leave each tensor rank with what its own heads make of the gradient of the latents."""
    patch.setattr(RankOperations, "share_among_heads", lambda self, x: x)


@mutant(
    Told(
        "prove-activations",
        "layers.0.mlp",
        "renormalised after drop",
        plan={"model": MIXTRAL, "balance": Balance(kind="aux", capacity_factor=0.5)},
        of=plan_of,
    ),
)
def gates_renormalised_after_the_drop(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let the gates of the experts that have room add up to one."""
    route = Router.route

    def renormalised(self: Any, *args: Any, **named: Any) -> Any:
        routed: Any = route(self, *args, **named)
        kept_nK = routed.gates_nK * routed.kept_nK
        total_n1 = kept_nK.sum(-1, keepdim=True)
        return replace(routed, gates_nK=kept_nK / total_n1.where(total_n1 > 0, 1.0))

    patch.setattr(Router, "route", renormalised)


@mutant(
    Told(
        "prove-activations",
        "layers.0.attention",
        "documents",
        plan={"documents": "separate", "tp": 2},
    ),
)
def documents_ignored(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let attention cross the documents of a sequence."""
    cut = TokenBatch.cut
    patch.setattr(TokenBatch, "cut", lambda self, runs, documents=None: cut(self, runs))


@mutant(
    Told("prove-activations", f"{LAST}.mlp", "number", plan={"pp": 2}),
    Told("prove-activations", f"{LAST}.mlp", "number", plan={"dp": 2, "zero": {"stage": 3}}),
    Told(
        "prove-activations",
        f"{LAST}.mlp",
        "number",
        plan={"pp": 2, "schedule": "dualpipe", "accumulation": 4, "recompute": "full"},
    ),
)
def one_mlp_larger_by_a_tenth(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Let the MLP of block 1 give 1.1 of what it should."""
    forward = Block.__init__

    def changed(self: Any, shape: Any, operations: Any, index: int, share: Any) -> None:
        forward(self, shape, operations, index, share)
        if index == 1:
            mlp = self.mlp.forward
            self.mlp.forward = lambda *inputs: 1.1 * mlp(*inputs)

    patch.setattr(Block, "__init__", changed)


@mutant(Told("prove-gradients", f"{LAST}.attention", "not linear", plan={"pp": 2}))
def backward_of_one_attention_scaled(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Square the gradient that enters the attention of block 1."""
    forward = Block.__init__

    def changed(self: Any, shape: Any, operations: Any, index: int, share: Any) -> None:
        forward(self, shape, operations, index, share)
        if index == 1:
            attention = self.attention.forward

            def wrong(x_ND: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
                y_ND = attention(x_ND, batch)
                if y_ND.requires_grad:
                    y_ND.register_hook(lambda dy: dy + 10 * dy * dy)
                return y_ND

            self.attention.forward = wrong

    patch.setattr(Block, "__init__", changed)
