"""Expert parallelism of a DeepSpeed configuration (AutoEP): its degrees, and what it overrides.

The section names the modules of a model by patterns; here the model has its experts, and the run
builds on it. DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping

from echelon.config.foreign.ledger import COUNT, POSITIVE, Ledger
from echelon.config.foreign.surroundings import Surroundings

TABLE = "expert_parallel"
SWITCH = f"{TABLE}.enabled"
NAMES = "the model has its experts; no module is found by its name"
KERNELS = "the experts of a rank are always one product, whatever kernel computes it"
TRAVEL = "experts.dispatch says how tokens travel; the numbers are the same"
NOT_NEEDED: Mapping[str, str] = {
    "preset_model": NAMES,
    "moe_layer_pattern": NAMES,
    "expert_pattern": NAMES,
    "router_pattern": NAMES,
    "expert_w1": NAMES,
    "expert_w2": NAMES,
    "expert_w3": NAMES,
    "num_experts_attr": NAMES,
    "top_k_attr": NAMES,
    "has_shared_experts": NAMES,
    "shared_experts_pattern": NAMES,
    "use_grouped_mm": KERNELS,
    "disable_triton_grouped_mm": KERNELS,
    "combine_impl": KERNELS,
    "row_weighting_impl": KERNELS,
    "gate_up_impl": KERNELS,
    "async_split_plan": TRAVEL,
    "comm_backend": TRAVEL,
    "comm_num_sm": TRAVEL,
    "comm_qp_margin": TRAVEL,
    "comm_max_tokens_per_rank": TRAVEL,
    "validate_folding_routing": "every group of ranks is checked before a run",
}
ONLY: Mapping[str, tuple[tuple[object, ...], str]] = {
    "expert_activation": (("silu", "swiglu"), "a gate has SiLU"),
    "load_balance_coeff": ((), "experts.balance says what keeps loads even"),
    "route_scale": ((1, 1.0), "routed_scaling_factor is the factor of the weights"),
    "score_apply": (("auto", "post"), "what an expert gives is weighted, not what it is given"),
    "shared_experts_gate_pattern": ((), "shared experts have no gate of their own"),
}


def read_experts(ledger: Ledger, around: Surroundings) -> Surroundings:
    """Map the section, where it is switched on; return the surroundings with its degrees."""
    on = TABLE if isinstance(ledger.given.get(TABLE), bool) else SWITCH
    enabled = ledger.flag(on, setting="mesh.ep")
    if not enabled or on == TABLE:
        if enabled:
            ledger.refuse(on, f"a table with {SWITCH} and autoep_size", setting="mesh.ep")
        for key in ledger.keys_of(TABLE):
            ledger.skip(key, f"{on} is false")
        ledger.know_table(TABLE)
        return around
    ledger.skip(on, f"{TABLE}.autoep_size says over how many ranks")
    size = ledger.whole(f"{TABLE}.autoep_size", COUNT, setting="mesh.ep")
    if size is not None:
        ledger.set(f"{TABLE}.autoep_size", "mesh.ep", size, "shares of the experts")
    key = f"{TABLE}.expert_tensor_parallel_size"
    pieces = ledger.whole(key, COUNT, setting="experts.expert_tp")
    if pieces is not None:
        ledger.set(key, "experts.expert_tp", pieces, "pieces of an expert")
    _read_router(ledger)
    for name, why in NOT_NEEDED.items():
        ledger.skip(f"{TABLE}.{name}", why)
    for name, (allowed, why) in ONLY.items():
        ledger.only(f"{TABLE}.{name}", allowed, why)
    return around.with_degrees(ep=size or 1, expert_tp=pieces or 1)


def _read_router(ledger: Ledger) -> None:
    """Map what overrides the router of the model; "auto" is what the model has."""
    scores = f"{TABLE}.score_func"
    for name, setting in (
        ("top_k", "top_k"),
        ("num_expert_groups", "groups"),
        ("num_limited_groups", "top_groups"),
    ):
        key = f"{TABLE}.{name}"
        if ledger.is_auto(key):
            ledger.skip(key, "as the model has it")
        elif (value := ledger.whole(key, COUNT, setting=f"model.experts.{setting}")) is not None:
            ledger.set(key, f"model.experts.{setting}", value, "how experts are chosen")
    if ledger.is_auto(scores):
        ledger.skip(scores, "as the model has it")
    elif (word := ledger.word(scores, ("softmax", "sigmoid"))) is not None:
        ledger.set(scores, "model.experts.router", word, "of the scores")
    key = f"{TABLE}.route_norm"
    if (summed := ledger.flag(key, setting="model.experts.renormalise")) is not None:
        why = "whether weights of experts add up to 1"
        ledger.set(key, "model.experts.renormalise", summed, why)
    key = f"{TABLE}.routed_scaling_factor"
    if ledger.is_auto(key):
        ledger.skip(key, "as the model has it")
    elif (scale := ledger.number(key, POSITIVE, setting="model.experts.gate_scale")) is not None:
        ledger.set(key, "model.experts.gate_scale", scale, "factor of the weights of experts")
