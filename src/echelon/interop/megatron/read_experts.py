# SPDX-License-Identifier: Apache-2.0
"""The experts of a Megatron-LM command: which there are, how they are chosen, who holds them.

Where the command has no --num-experts, what it says counts for the model that it builds on; where
that has none either, Megatron-LM ignores the flags. Others say what evens the load of experts, and
what becomes of tokens beyond it.
"""

from __future__ import annotations

from echelon.interop.abilities import by_word
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import COUNT, FROM_ZERO, NUMBER, POSITIVE, KeyReader
from echelon.interop.megatron.abilities import DROPS, SCOPES, TABLES
from echelon.interop.megatron.read_model import EXPERTS, FREQUENCY, SHARED, layer_pattern

TOP_K, FFN = "--moe-router-topk", "--moe-ffn-hidden-size"
SCORES, BEFORE = "--moe-router-score-function", "--moe-router-pre-softmax"
SCALE, DTYPE = "--moe-router-topk-scaling-factor", "--moe-router-dtype"
GROUPS, TOP_GROUPS = "--moe-router-num-groups", "--moe-router-group-topk"
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
_MODEL_FLAGS = (TOP_K, FFN, SHARED, FREQUENCY, SCORES, BEFORE, SCALE, DTYPE, GROUPS, TOP_GROUPS)
_RENORMALISE = "model.experts.renormalise"
_SUMMED = 2  # Scores of a group that are added up to rank it.


def read_experts(reader: KeyReader, context: ImportContext) -> ImportContext:
    """Map the experts; return the context with the degrees of their ranks."""
    told = {row.key for row in reader.rows}
    rules = TABLES.keys["experts"]
    reader.judge({key: rule for key, rule in rules.items() if key not in told})
    why = "routed experts of a block"
    count = reader.take(EXPERTS, "model.experts.num_experts", COUNT, why)
    built_on = context.model.experts if context.model else None
    if count is None and built_on is None:
        reader.skip_all((*_MODEL_FLAGS, *_BALANCE_FLAGS), f"there are no experts: {EXPERTS}")
        for key in (EP, ETP):
            reader.only(key, (1,), f"there are no experts: {EXPERTS}", setting="mesh.ep")
        return context
    _read_shape(reader, context, complete=count is not None)
    top_k = _read_choice(reader, complete=count is not None)
    _read_groups(reader, top_k or (built_on.top_k if built_on else None))
    read_balance(reader)
    return _read_ranks(reader, context)


def first_dense_layers(pattern: object, layers: int | None) -> int | None:
    """Return how many dense layers stand before those with experts; None for other patterns.

    A pattern is 1, or a sum of lists such as ([0]*3+[1]*58), one number for each layer.
    """
    if pattern == 1 and not isinstance(pattern, bool):
        return 0
    found = layer_pattern(pattern)
    if found is None or 1 not in found or layers not in (None, len(found)):
        return None
    dense = found.index(1)
    return None if 0 in found[dense:] else dense


def _set(reader: KeyReader, key: str, name: str, value: object, why: str) -> None:
    reader.set_or_default(key, f"model.experts.{name}", value, why)


def _read_shape(reader: KeyReader, context: ImportContext, *, complete: bool) -> None:
    width = reader.integer(FFN, COUNT, setting="model.experts.ffn")
    dense = reader.entries.get("model.ffn")
    if width is None and complete and not reader.has(FFN):
        width = dense.value if dense and isinstance(dense.value, int) else None
    if width is not None and (complete or reader.has(FFN)):
        _set(reader, FFN, "ffn", width, "inner width of an expert, else --ffn-hidden-size")
    if width is None and context.model and context.model.experts:
        width = context.model.experts.ffn
    shared = reader.integer(SHARED, FROM_ZERO, setting="model.experts.shared_experts")
    if shared is not None and width and shared % width == 0:
        why = f"{shared} of shared width / {width} of an expert"
        reader.set(SHARED, "model.experts.shared_experts", shared // width, why)
    elif shared is not None:
        why = f"shared experts are as wide as the others: {width}"
        reader.refuse(SHARED, why, setting="model.experts.shared_experts")
    if reader.has(FREQUENCY):
        layers = reader.given.get("--num-layers")
        known = layers if isinstance(layers, int) else context.model and context.model.layers
        first = first_dense_layers(reader.given[FREQUENCY], known or None)
        if first is None:
            why = "dense layers stand before all layers with experts, one number for each layer"
            name = "model.experts.first_dense_layers"
            reader.refuse(FREQUENCY, why, suggestions=(f"{FREQUENCY} 1",), setting=name)
        else:
            _set(reader, FREQUENCY, "first_dense_layers", first, "blocks with a dense MLP first")


def _read_choice(reader: KeyReader, *, complete: bool) -> int | None:
    """Map how experts are chosen and weighted; return how many a token meets, where that is said.

    A softmax after the choice is one over all experts whose chosen scores are made to add up to 1.
    """
    why, default = "experts that a token meets", 2 if complete else None
    top_k = reader.take(TOP_K, "model.experts.top_k", COUNT, why, default=default)
    scores = reader.word(SCORES, ("softmax", "sigmoid"), setting="model.experts.router")
    before = reader.flag(BEFORE, setting=_RENORMALISE)
    if scores is not None or (complete and not reader.has(SCORES)):
        scores = scores or "softmax"
        _set(reader, SCORES, "router", scores, "of the scores")
        if scores == "sigmoid":
            reader.skip(BEFORE, "it is about softmax")
            summed = top_k != 1
        else:
            summed = not before
            if top_k == 1 and summed:
                why = "a softmax over one expert is 1, and the router gets no gradient"
                reader.refuse(TOP_K, why, suggestions=(BEFORE, f"{TOP_K} 2"), setting=_RENORMALISE)
        key = BEFORE if scores == "softmax" else SCORES
        _set(reader, key, "renormalise", summed, "whether weights of experts add up to 1")
    else:
        reader.skip(BEFORE, f"together with {SCORES} only")
    reader.take(SCALE, "model.experts.gate_scale", POSITIVE, "factor of the weights of experts")
    reader.only(DTYPE, ("fp32",), "the router is in fp32, or in fp64 where parameters are")
    return top_k


def _read_groups(reader: KeyReader, top_k: int | None) -> None:
    groups = reader.integer(GROUPS, COUNT, setting="model.experts.groups")
    top = reader.integer(TOP_GROUPS, COUNT, setting="model.experts.top_groups")
    if groups is None or top is None or groups == 1:
        reader.skip_all((GROUPS, TOP_GROUPS), "experts are not chosen by groups")
        return
    if top_k is not None and top_k // top != _SUMMED:
        why = f"a group is ranked by its best {_SUMMED} scores, there by its best topk / groups = "
        why += f"{top_k} / {top}"
        reader.refuse(TOP_GROUPS, why, setting="model.experts.top_groups")
        reader.skip(GROUPS, f"together with {TOP_GROUPS}")
        return
    reader.set(GROUPS, "model.experts.groups", groups, "groups of experts")
    reader.set(TOP_GROUPS, "model.experts.top_groups", top, "groups of a token's experts")


def _read_ranks(reader: KeyReader, context: ImportContext) -> ImportContext:
    """Map which ranks hold which experts: Megatron-LM cuts them over tp where nothing is said."""
    ep = reader.take(EP, "mesh.ep", COUNT, "shares of the experts")
    expert_tp = reader.integer(ETP, COUNT, setting="experts.expert_tp")
    tp = context.degrees["tp"]
    if expert_tp is not None or (tp > 1 and not reader.has(ETP)):
        why = "pieces of an expert, else as many as tensor ranks"
        reader.set_or_default(ETP, "experts.expert_tp", expert_tp or tp, why)
    return context.with_degrees(ep=ep or 1, expert_tp=expert_tp or tp)


KIND, COEFFICIENT = "--moe-router-load-balancing-type", "--moe-aux-loss-coeff"
Z_LOSS = "--moe-z-loss-coeff"
BIAS, RATE = "--moe-router-enable-expert-bias", "--moe-router-bias-update-rate"
CAPACITY, DROP = "--moe-expert-capacity-factor", "--moe-token-drop-policy"
PADDED = "--moe-pad-expert-input-to-capacity"
_BALANCE_FLAGS = (KIND, COEFFICIENT, Z_LOSS, BIAS, RATE, CAPACITY, DROP, PADDED)

_SCOPES = by_word(SCOPES)
KINDS = {(False, False): "none", (True, False): "aux", (False, True): "bias", (True, True): "both"}
_DEFAULT_RATE = 1e-3  # of a bias, in Megatron-LM


def read_balance(reader: KeyReader) -> None:
    """Map the losses, the bias and the capacity of experts."""
    scope, coefficient = _auxiliary(reader)
    rate = _bias_rate(reader)
    kind = KINDS[coefficient > 0, rate > 0]
    if coefficient:
        reader.set(COEFFICIENT, "experts.balance", kind, "what keeps loads even")
        reader.set(COEFFICIENT, "experts.aux_coefficient", coefficient, "of the loss")
        why = "over which tokens loads are to be even"
        reader.set_or_default(KIND, "experts.aux_over", scope, why)
    else:
        reader.skip(KIND, f"without {COEFFICIENT} it adds nothing")
        reader.skip(COEFFICIENT, "nothing is added to the loss")
    if rate:
        reader.set(BIAS, "experts.balance", kind, "what keeps loads even")
        reader.set_or_default(RATE, "experts.bias_rate", rate, "how far a bias moves")
    reader.take(Z_LOSS, "experts.z_coefficient", NUMBER, "of the loss for small logits")
    _read_capacity(reader)


def _auxiliary(reader: KeyReader) -> tuple[str, float]:
    """Return over which tokens the auxiliary loss goes, and its coefficient; 0 for none."""
    kind = reader.word(KIND, (*_SCOPES, "none"), setting="experts.balance")
    coefficient = reader.number(COEFFICIENT, NUMBER, setting="experts.aux_coefficient")
    if kind == "none" or (kind is None and reader.has(KIND)):
        return "", 0.0
    return _SCOPES[kind or "aux_loss"], coefficient or 0.0


def _bias_rate(reader: KeyReader) -> float:
    """Return how far the bias of a router moves in a step; 0 where there is none, or it rests."""
    has_bias = reader.flag(BIAS, setting="model.experts.router_bias")
    rate = reader.number(RATE, NUMBER, setting="experts.bias_rate")
    if not has_bias:
        reader.skip(BIAS, "there is no bias")
        reader.skip(RATE, f"it counts with {BIAS} only")
        return 0.0
    reader.set(BIAS, "model.experts.router_bias", True, "a bias that takes part in the choice")
    if rate == 0:
        reader.skip(RATE, "the bias stays as it is")
    return _DEFAULT_RATE if rate is None else rate


def _read_capacity(reader: KeyReader) -> None:
    """Map the room of an expert, which is one for each sequence here, not for a microbatch."""
    if reader.has(CAPACITY) and reader.given[CAPACITY] == -1:
        reader.skip(CAPACITY, "nothing is dropped")
        factor = None
    else:
        factor = reader.number(CAPACITY, POSITIVE, setting="experts.capacity_factor")
    drop = reader.word(DROP, by_word(DROPS), setting="experts.drop")
    padded = reader.flag(PADDED, setting="experts.padded")
    if factor is None:
        reader.skip_all((DROP, PADDED), f"nothing is dropped without {CAPACITY}")
        return
    why = "room of an expert, counted for each sequence by itself, not for a microbatch of a rank"
    reader.set(CAPACITY, "experts.capacity_factor", factor, why)
    reader.set_or_default(DROP, "experts.drop", by_word(DROPS)[drop or "probs"], "what is dropped")
    if padded:
        reader.set(PADDED, "experts.padded", True, "sizes do not depend on the routing")
    else:
        reader.skip(PADDED, "sizes follow the routing")
