"""The tables and keys about experts in run.toml; `config/schema.py` lists all settings."""

from __future__ import annotations

from echelon.config.kinds import Choice, Flag, Integer, Real
from echelon.config.setting import COUNT, DEGREE, EXPERT_COUNT, FROM_ZERO, POSITIVE, setting

MODEL_EXPERTS = (
    setting("model.experts.num_experts", EXPERT_COUNT, None, "routed experts per block"),
    setting("model.experts.top_k", COUNT, None, "experts that a token meets"),
    setting("model.experts.ffn", COUNT, None, "inner width of one expert"),
    setting("model.experts.shared_experts", FROM_ZERO, 0, "experts that every token meets"),
    setting("model.experts.first_dense_layers", FROM_ZERO, 0, "blocks with a dense MLP first"),
    setting(
        "model.experts.router", Choice(options=("softmax", "sigmoid")), "softmax", "of the scores"
    ),
    setting("model.experts.router_bias", Flag(), False, "a bias that takes part in the choice"),
    setting("model.experts.renormalise", Flag(), True, "whether weights of experts add up to 1"),
    setting("model.experts.gate_scale", POSITIVE, 1.0, "factor of the weights of experts"),
    setting("model.experts.groups", COUNT, 1, "groups of experts, of equal size"),
    setting("model.experts.top_groups", COUNT, 1, "groups that a token's experts come out of"),
)

EXPERTS = (
    setting(
        "experts.balance",
        Choice(options=("none", "aux", "bias", "both")),
        "none",
        "what keeps loads even: a loss, a bias of the choice, or both",
    ),
    setting("experts.aux_coefficient", POSITIVE, 0.01, "with aux: of the loss for even loads"),
    setting(
        "experts.aux_over",
        Choice(options=("global", "sequence", "microbatch")),
        "global",
        "with aux: over which tokens loads are to be even",
    ),
    setting("experts.bias_rate", POSITIVE, 0.001, "with bias: how far it moves after a step"),
    setting("experts.z_coefficient", Real(), 0.0, "of the loss for small router logits"),
    setting(
        "experts.capacity_factor",
        Real(above=True, words=("dropless",)),
        "dropless",
        "room of an expert in each sequence: times its even share",
    ),
    setting(
        "experts.drop",
        Choice(options=("position", "score")),
        "position",
        "with a capacity: what is dropped, later tokens or lower scores",
    ),
    setting(
        "experts.route",
        Choice(options=("scores", "even", "one", "not-last")),
        "scores",
        "for benchmarks and proofs: where tokens go whatever their scores",
    ),
    setting("experts.expert_tp", DEGREE, 1, "pieces of one expert: 1, or as many as tp"),
    setting(
        "experts.zero_stage",
        Integer(minimum=0, maximum=3, words=("auto",)),
        "auto",
        "what ranks with the same experts share out; auto: zero.stage",
    ),
    setting(
        "experts.dispatch",
        Choice(options=("flat", "two-hop")),
        "flat",
        "two-hop: a token crosses to a node once",
    ),
    setting("experts.chunks", COUNT, 1, "parts of a microbatch that travel one by one"),
    setting("experts.padded", Flag(), False, "with a capacity: sizes do not depend on the routing"),
)
