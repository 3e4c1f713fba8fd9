"""Bugs planted in the formulas of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from echelon.core.experts import Balance
from echelon.core.model_shape import ModelShape, RopeScaling
from echelon.core.plan import Plan
from echelon.models import decoder, moe, operations, rotary
from echelon.models.decoder import Decoder, Norm
from echelon.models.operations import Operations
from echelon.proof.oracle import oracle, routing
from echelon.proof.oracle import oracle as losses
from tests.proof.independent.shared_bugs import (
    CROWDED,
    GROUPS,
    LATENT,
    MIXTURE,
    Patch,
    changed,
    shared_bug,
)


@shared_bug("rotary positions", "layers.0")
def rotary_turns_the_other_way(patch: Patch) -> None:
    changed(patch, operations, "rotary_tables", lambda tables: (tables[0], -tables[1]))


@shared_bug("rotary positions", "layers.0")
def rotary_positions_are_doubled(patch: Patch) -> None:
    right = operations.rotary_tables
    patch.setattr(
        operations,
        "rotary_tables",
        lambda shape, positions_T, *rest, **by_name: right(
            shape, positions_T * 2, *rest, **by_name
        ),
    )


@shared_bug(
    "rotary positions",
    "layers.0",
    model={
        "rope_scaling": RopeScaling(
            factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8
        ),
        "rope_theta": 100.0,
    },
)
def stretched_frequencies_are_not(patch: Patch) -> None:
    patch.setattr(rotary, "scale_frequencies", lambda frequencies_E, *_: frequencies_E)


@shared_bug("gates", "layers.0", **MIXTURE)
def gates_are_not_renormalised(patch: Patch) -> None:
    patch.setattr(
        moe,
        "gates_of",
        lambda scores, chosen, experts: scores.gather(-1, chosen) * experts.gate_scale,
    )


@shared_bug("router scores", "layers.0", **MIXTURE)
def router_scores_are_a_softmax(patch: Patch) -> None:
    patch.setattr(moe, "scores_of", lambda logits, experts: logits.softmax(-1))


@shared_bug("choice of experts", "layers.0", **GROUPS)
def groups_of_experts_are_ignored(patch: Patch) -> None:
    right = moe.choose_experts
    patch.setattr(
        moe,
        "choose_experts",
        lambda scores, bias, tokens, experts, balance: right(
            scores, bias, tokens, replace(experts, groups=1), balance
        ),
    )


@shared_bug("capacity of experts", "layers.0", **CROWDED)
def an_expert_has_room_for_one_more(patch: Patch) -> None:
    right = Balance.capacity

    def roomier(*args: Any) -> int | None:
        room = right(*args)
        return None if room is None else room + 1

    patch.setattr(Balance, "capacity", roomier)


@shared_bug("auxiliary loss", "layers.0", **MIXTURE)
def auxiliary_loss_of_raw_scores(patch: Patch) -> None:
    patch.setattr(routing, "probabilities", lambda scores, experts: scores)


@shared_bug("norm", "layers.0")
def norms_have_another_epsilon(patch: Patch) -> None:
    right = Norm.normed
    patch.setattr(
        Norm,
        "normed",
        lambda self, x: (setattr(self, "eps", 1e-6), right(self, x))[1],
    )


@shared_bug("soft cap", "layers.0", model={"soft_cap": 2.0})
def no_soft_cap(patch: Patch) -> None:
    right = operations.attention_reference
    patch.setattr(operations, "attention_reference", lambda q, k, v, seen, *_: right(q, k, v, seen))


@shared_bug("window", "layers.0", model={"window": 3})
def a_window_is_one_longer(patch: Patch) -> None:
    right = operations.visible
    patch.setattr(
        operations,
        "visible",
        lambda q, k, mask, documents: right(q, k, replace(mask, window=mask.window + 1), documents),
    )


@shared_bug("document starts", "layers.0", documents="separate")
def attention_crosses_documents(patch: Patch) -> None:
    right = operations.visible
    patch.setattr(operations, "visible", lambda q, k, mask, documents: right(q, k, mask, None))


@shared_bug("attention", "layers.0")
def query_heads_are_dealt_out_in_turn(patch: Patch) -> None:
    right = operations.attention_reference

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Any:
        times = q.shape[2] // k.shape[2]
        return right(q, k.repeat(1, 1, times, 1), v.repeat(1, 1, times, 1), *rest)

    patch.setattr(operations, "attention_reference", wrong)


@shared_bug("head", "head", tied=True)
def a_tied_head_is_flipped(patch: Patch) -> None:
    patch.setattr(Decoder, "head_weight", property(lambda self: self.embedding.weight.flip(0)))


@shared_bug("tied head", "embedding.weight", tied=True)
def a_tied_head_gives_no_gradient(patch: Patch) -> None:
    patch.setattr(Decoder, "head_weight", property(lambda self: self.embedding.weight.detach()))


@shared_bug("dropout", "embedding", model={"dropout": 0.3}, num_steps=2)
def dropout_does_not_know_the_step(patch: Patch) -> None:
    right = operations.make_key
    patch.setattr(operations, "make_key", lambda what, seed, step, site: right(what, seed, 0, site))


@shared_bug("residual sum", "layers.0")
def the_residual_stream_is_halved(patch: Patch) -> None:
    patch.setattr(Operations, "add", lambda self, x_ND, y_ND: 0.5 * x_ND + y_ND)


@shared_bug("gate of the MLP", "layers.0")
def gate_and_up_are_swapped(patch: Patch) -> None:
    right = Operations.gate
    patch.setattr(
        Operations,
        "gate",
        lambda self, x, activation: right(self, torch.cat(x.chunk(2, -1)[::-1], -1), activation),
    )


@shared_bug("activation", "layers.0", model={"gated": False, "activation": "gelu"})
def gelu_is_that_of_the_error_function(patch: Patch) -> None:
    patch.setattr(Operations, "activate", lambda self, x, activation: torch.nn.functional.gelu(x))


@shared_bug("rotary positions", "layers.0", **LATENT)
def the_shared_key_of_latent_attention_is_not_turned(patch: Patch) -> None:
    right = Operations.rotate
    patch.setattr(
        Operations,
        "rotate",
        lambda self, x, cos, sin: x if x.shape[2] == 1 else right(self, x, cos, sin),
    )


@shared_bug("attention", "layers.0", **LATENT)
def latent_keys_are_their_own_part_twice(patch: Patch) -> None:
    right = torch.cat

    class Wrong:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def cat(parts: Any, dim: int = 0) -> torch.Tensor:
            first, second = parts
            return right((first, second * (second.stride(2) != 0)), dim=dim)

    patch.setattr(decoder, "torch", Wrong())


@shared_bug("auxiliary loss", "layers.1.mlp.router.weight", **MIXTURE)
def router_losses_are_differentiated_twice(patch: Patch) -> None:
    for user in (oracle, losses):
        changed(patch, user, "routing_losses", lambda found: (2 * found[0], found[1]))


@shared_bug("z-loss", "layers.0", **MIXTURE)
def z_loss_of_shifted_logits(patch: Patch) -> None:
    changed(
        patch,
        moe,
        "route_reference",
        lambda routed: replace(routed, logits_NE=routed.logits_NE + 1.0),
    )


@shared_bug("router bias", "layers.0", **MIXTURE)
def biases_move_with_the_load(patch: Patch) -> None:
    right = routing.RoutingState.after

    def wrong(self: routing.RoutingState, plan: Plan, layers: Any) -> routing.RoutingState:
        after = right(self, plan, layers)
        biases = {i: 2 * self.biases[i] - bias for i, bias in after.biases.items()}
        return replace(after, biases=biases)

    patch.setattr(routing.RoutingState, "after", wrong)


@shared_bug("backward pass", "layers.1.attention.v.weight")
def values_get_no_gradient(patch: Patch) -> None:
    right = operations.attention_reference
    patch.setattr(
        operations,
        "attention_reference",
        lambda q, k, v, *rest: right(q, k, v.detach(), *rest),
    )


@shared_bug("embedding", "embedding", model={"positions": "learned"})
def learned_positions_begin_at_one(patch: Patch) -> None:
    right = Operations.embed

    def wrong(self: Operations, weight_VD: Any, positions: Any, batch: Any) -> torch.Tensor:
        return right(self, weight_VD, positions.roll(-1, 0), batch)

    patch.setattr(Operations, "embed", wrong)


@shared_bug("sinks", "layers.0", model={"sinks": True})
def sinks_take_nothing(patch: Patch) -> None:
    right = operations.attention_reference
    patch.setattr(
        operations,
        "attention_reference",
        lambda q, k, v, seen, scores, sinks: right(q, k, v, seen, scores, 0 * sinks - 60),
    )


@shared_bug("kind of layer", "layers.0", model={"window": 3, "layer_kinds": ("local", "global")})
def every_block_is_global(patch: Patch) -> None:
    patch.setattr(ModelShape, "layer_kind", lambda self, layer: "global")


@shared_bug("soft cap of logits", "head", model={"final_soft_cap": 0.5})
def logits_have_no_cap(patch: Patch) -> None:
    patch.setattr(Operations, "cap", lambda self, logits, soft_cap: logits)


@shared_bug("scale of scores", "layers.0", model={"attention_scale": 1.5})
def scores_have_the_usual_scale(patch: Patch) -> None:
    patch.setattr(ModelShape, "score_scale", property(lambda self: self.head_dim**-0.5))


@shared_bug(
    "rotary positions",
    "layers.0",
    model={"window": 3, "layer_kinds": ("local", "global"), "local_rope_theta": 50.0},
)
def local_blocks_turn_as_global_ones(patch: Patch) -> None:
    right = ModelShape.of_layer
    patch.setattr(
        ModelShape,
        "of_layer",
        lambda self, layer: replace(right(self, layer), rope_theta=self.rope_theta),
    )
