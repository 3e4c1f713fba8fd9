"""The experts of a Megatron-LM command: which there are, how they are chosen, who holds them.

Where the command has no --num-experts, what it says counts for the model that it builds on; where
that has none either, Megatron-LM ignores the flags. `megatron_balance.py` reads what evens loads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from echelon.config.foreign.ledger import COUNT, FROM_ZERO, POSITIVE, Ledger
from echelon.config.foreign.megatron_balance import BALANCE_FLAGS, read_balance
from echelon.config.foreign.surroundings import Surroundings

EXPERTS, TOP_K, FFN = "--num-experts", "--moe-router-topk", "--moe-ffn-hidden-size"
SHARED, FREQUENCY = "--moe-shared-expert-intermediate-size", "--moe-layer-freq"
SCORES, BEFORE = "--moe-router-score-function", "--moe-router-pre-softmax"
SCALE, DTYPE = "--moe-router-topk-scaling-factor", "--moe-router-dtype"
GROUPS, TOP_GROUPS = "--moe-router-num-groups", "--moe-router-group-topk"
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
MODEL_FLAGS = (TOP_K, FFN, SHARED, FREQUENCY, SCORES, BEFORE, SCALE, DTYPE, GROUPS, TOP_GROUPS)
RENORMALISE = "model.experts.renormalise"
SUMMED = 2  # Scores of a group that are added up to rank it.

FUSED = "operations are fused where the device can"
TRAVEL = "experts.dispatch says how tokens travel; the numbers are the same"
NOT_NEEDED: Mapping[str, str] = {
    "--moe-grouped-gemm": "the experts of a rank are always one product",
    "--moe-use-legacy-grouped-gemm": "the experts of a rank are always one product",
    "--moe-token-dispatcher-type": TRAVEL,
    "--moe-flex-dispatcher-backend": TRAVEL,
    "--moe-enable-deepep": TRAVEL,
    "--moe-deepep-num-sms": TRAVEL,
    "--moe-hybridep-num-sms": TRAVEL,
    "--moe-permute-fusion": FUSED,
    "--moe-router-fusion": FUSED,
    "--moe-per-layer-logging": "a run folder has every number of every step",
    "--moe-shared-expert-overlap": "always so: shared experts run while tokens travel",
    "--overlap-moe-expert-parallel-comm": "experts.chunks lets tokens travel in parts",
}


def read_experts(ledger: Ledger, around: Surroundings) -> Surroundings:
    """Map the experts; return the surroundings with the degrees of their ranks."""
    for key, why in NOT_NEEDED.items():
        ledger.skip(key, why)
    count = ledger.whole(EXPERTS, COUNT, setting="model.experts.num_experts")
    built_on = around.model.experts if around.model else None
    if count is None and built_on is None:
        for key in (*MODEL_FLAGS, *BALANCE_FLAGS):
            ledger.skip(key, f"there are no experts: {EXPERTS}")
        for key in (EP, ETP):
            ledger.only(key, (1,), f"there are no experts: {EXPERTS}", setting="mesh.ep")
        return around
    if count is not None:
        ledger.set(EXPERTS, "model.experts.num_experts", count, "routed experts of a block")
    _read_shape(ledger, around, complete=count is not None)
    top_k = _read_choice(ledger, complete=count is not None)
    _read_groups(ledger, top_k or (built_on.top_k if built_on else None))
    read_balance(ledger)
    return _read_ranks(ledger, around)


def first_dense_layers(pattern: object, layers: int | None) -> int | None:
    """Return how many dense layers stand before those with experts; None for other patterns.

    A pattern is 1, or a sum of lists such as ([0]*3+[1]*58), one number for each layer.
    """
    if pattern == 1 and not isinstance(pattern, bool):
        return 0
    text = re.sub(r"[\s()'\"]", "", str(pattern))
    found: list[int] = []
    for part in text.split("+"):
        match = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?", part)
        if match is None:
            return None
        found += [int(bit) for bit in match[1].split(",")] * int(match[2] or 1)
    dense = found.index(1) if 1 in found else len(found)
    if 0 in found[dense:] or 1 not in found or layers not in (None, len(found)):
        return None
    return dense


def _set(ledger: Ledger, key: str, name: str, value: object, why: str) -> None:
    source = "" if ledger.has(key) else ledger.default
    ledger.set(key, f"model.experts.{name}", value, why, source=source)


def _read_shape(ledger: Ledger, around: Surroundings, *, complete: bool) -> None:
    width = ledger.whole(FFN, COUNT, setting="model.experts.ffn")
    dense = ledger.entries.get("model.ffn")
    if width is None and complete and not ledger.has(FFN):
        width = dense.value if dense and isinstance(dense.value, int) else None
    if width is not None and (complete or ledger.has(FFN)):
        _set(ledger, FFN, "ffn", width, "inner width of an expert, else --ffn-hidden-size")
    if width is None and around.model and around.model.experts:
        width = around.model.experts.ffn
    shared = ledger.whole(SHARED, FROM_ZERO, setting="model.experts.shared_experts")
    if shared is not None and width and shared % width == 0:
        why = f"{shared} of shared width / {width} of an expert"
        ledger.set(SHARED, "model.experts.shared_experts", shared // width, why)
    elif shared is not None:
        why = f"shared experts are as wide as the others: {width}"
        ledger.refuse(SHARED, why, setting="model.experts.shared_experts")
    if ledger.has(FREQUENCY):
        layers = ledger.given.get("--num-layers")
        known = layers if isinstance(layers, int) else around.model and around.model.layers
        first = first_dense_layers(ledger.given[FREQUENCY], known or None)
        if first is None:
            why = "dense layers stand before all layers with experts, one number for each layer"
            name = "model.experts.first_dense_layers"
            ledger.refuse(FREQUENCY, why, works=(f"{FREQUENCY} 1",), setting=name)
        else:
            _set(ledger, FREQUENCY, "first_dense_layers", first, "blocks with a dense MLP first")


def _read_choice(ledger: Ledger, *, complete: bool) -> int | None:
    """Map how experts are chosen and weighted; return how many a token meets, where that is said.

    A softmax after the choice is one over all experts whose chosen scores are made to add up to 1.
    """
    top_k = ledger.whole(TOP_K, COUNT, setting="model.experts.top_k")
    if top_k is None and complete and not ledger.has(TOP_K):
        top_k = 2
    if top_k is not None:
        _set(ledger, TOP_K, "top_k", top_k, "experts that a token meets")
    scores = ledger.word(SCORES, ("softmax", "sigmoid"), setting="model.experts.router")
    before = ledger.flag(BEFORE, setting=RENORMALISE)
    if scores is not None or (complete and not ledger.has(SCORES)):
        scores = scores or "softmax"
        _set(ledger, SCORES, "router", scores, "of the scores")
        if scores == "sigmoid":
            ledger.skip(BEFORE, "it is about softmax")
            summed = top_k != 1
        else:
            summed = not before
            if top_k == 1 and summed:
                why = "a softmax over one expert is 1, and the router gets no gradient"
                ledger.refuse(TOP_K, why, works=(BEFORE, f"{TOP_K} 2"), setting=RENORMALISE)
        key = BEFORE if scores == "softmax" else SCORES
        _set(ledger, key, "renormalise", summed, "whether weights of experts add up to 1")
    else:
        ledger.skip(BEFORE, f"together with {SCORES} only")
    if (scale := ledger.number(SCALE, POSITIVE, setting="model.experts.gate_scale")) is not None:
        ledger.set(SCALE, "model.experts.gate_scale", scale, "factor of the weights of experts")
    ledger.only(DTYPE, ("fp32",), "the router is in fp32, or in fp64 where parameters are")
    return top_k


def _read_groups(ledger: Ledger, top_k: int | None) -> None:
    groups = ledger.whole(GROUPS, COUNT, setting="model.experts.groups")
    top = ledger.whole(TOP_GROUPS, COUNT, setting="model.experts.top_groups")
    if groups is None or top is None or groups == 1:
        for key in (GROUPS, TOP_GROUPS):
            ledger.skip(key, "experts are not chosen by groups")
        return
    if top_k is not None and top_k // top != SUMMED:
        why = f"a group is ranked by its best {SUMMED} scores, there by its best topk / groups = "
        why += f"{top_k} / {top}"
        ledger.refuse(TOP_GROUPS, why, setting="model.experts.top_groups")
        ledger.skip(GROUPS, f"together with {TOP_GROUPS}")
        return
    ledger.set(GROUPS, "model.experts.groups", groups, "groups of experts")
    ledger.set(TOP_GROUPS, "model.experts.top_groups", top, "groups of a token's experts")


def _read_ranks(ledger: Ledger, around: Surroundings) -> Surroundings:
    """Map which ranks hold which experts: Megatron-LM cuts them over tp where nothing is said."""
    ep = ledger.whole(EP, COUNT, setting="mesh.ep")
    if ep is not None:
        ledger.set(EP, "mesh.ep", ep, "shares of the experts")
    pieces = ledger.whole(ETP, COUNT, setting="experts.expert_tp")
    tp = around.degrees["tp"]
    if pieces is not None or (tp > 1 and not ledger.has(ETP)):
        source = "" if ledger.has(ETP) else ledger.default
        why = "pieces of an expert, else as many as tensor ranks"
        ledger.set(ETP, "experts.expert_tp", pieces or tp, why, source=source)
    return around.with_degrees(ep=ep or 1, expert_tp=pieces or tp)
