"""What evens the load of experts in a Megatron-LM command, and what becomes of tokens beyond it."""

from __future__ import annotations

from echelon.config.foreign.ledger import POSITIVE, Ledger
from echelon.config.kinds import Real

KIND, COEFFICIENT = "--moe-router-load-balancing-type", "--moe-aux-loss-coeff"
Z_LOSS = "--moe-z-loss-coeff"
BIAS, RATE = "--moe-router-enable-expert-bias", "--moe-router-bias-update-rate"
CAPACITY, DROP = "--moe-expert-capacity-factor", "--moe-token-drop-policy"
PADDED = "--moe-pad-expert-input-to-capacity"
BALANCE_FLAGS = (KIND, COEFFICIENT, Z_LOSS, BIAS, RATE, CAPACITY, DROP, PADDED)

SCOPES = {"aux_loss": "microbatch", "seq_aux_loss": "sequence", "global_aux_loss": "global"}
DROPS = {"probs": "score", "position": "position"}
KINDS = {(False, False): "none", (True, False): "aux", (False, True): "bias", (True, True): "both"}
DEFAULT_RATE = 1e-3
NUMBER = Real()


def read_balance(ledger: Ledger) -> None:
    """Map the losses, the bias and the capacity of experts."""
    scope, coefficient = _auxiliary(ledger)
    rate = _bias_rate(ledger)
    kind = KINDS[coefficient > 0, rate > 0]
    if coefficient:
        ledger.set(COEFFICIENT, "experts.balance", kind, "what keeps loads even")
        ledger.set(COEFFICIENT, "experts.aux_coefficient", coefficient, "of the loss")
        source = "" if ledger.has(KIND) else ledger.default
        why = "over which tokens loads are to be even"
        ledger.set(KIND, "experts.aux_over", scope, why, source=source)
    else:
        ledger.skip(KIND, f"without {COEFFICIENT} it adds nothing")
        ledger.skip(COEFFICIENT, "nothing is added to the loss")
    if rate:
        ledger.set(BIAS, "experts.balance", kind, "what keeps loads even")
        source = "" if ledger.has(RATE) else ledger.default
        ledger.set(RATE, "experts.bias_rate", rate, "how far a bias moves", source=source)
    z_loss = ledger.number(Z_LOSS, NUMBER, setting="experts.z_coefficient")
    if z_loss is not None:
        ledger.set(Z_LOSS, "experts.z_coefficient", z_loss, "of the loss for small logits")
    _read_capacity(ledger)


def _auxiliary(ledger: Ledger) -> tuple[str, float]:
    """Return over which tokens the auxiliary loss goes, and its coefficient; 0 for none."""
    kind = ledger.word(KIND, (*SCOPES, "none"), setting="experts.balance")
    coefficient = ledger.number(COEFFICIENT, NUMBER, setting="experts.aux_coefficient")
    if kind == "none" or (kind is None and ledger.has(KIND)):
        return "", 0.0
    return SCOPES[kind or "aux_loss"], coefficient or 0.0


def _bias_rate(ledger: Ledger) -> float:
    """Return how far the bias of a router moves in a step; 0 where there is none, or it rests."""
    has_bias = ledger.flag(BIAS, setting="model.experts.router_bias")
    rate = ledger.number(RATE, NUMBER, setting="experts.bias_rate")
    if not has_bias:
        ledger.skip(BIAS, "there is no bias")
        ledger.skip(RATE, f"it counts with {BIAS} only")
        return 0.0
    ledger.set(BIAS, "model.experts.router_bias", True, "a bias that takes part in the choice")
    if rate == 0:
        ledger.skip(RATE, "the bias stays as it is")
    return DEFAULT_RATE if rate is None else rate


def _read_capacity(ledger: Ledger) -> None:
    """Map the room of an expert, which is one for each sequence here, not for a microbatch."""
    if ledger.has(CAPACITY) and ledger.given[CAPACITY] == -1:
        ledger.skip(CAPACITY, "nothing is dropped")
        factor = None
    else:
        factor = ledger.number(CAPACITY, POSITIVE, setting="experts.capacity_factor")
    drop = ledger.word(DROP, DROPS, setting="experts.drop")
    padded = ledger.flag(PADDED, setting="experts.padded")
    if factor is None:
        for key in (DROP, PADDED):
            ledger.skip(key, f"nothing is dropped without {CAPACITY}")
        return
    why = "room of an expert, counted for each sequence by itself, not for a microbatch of a rank"
    ledger.set(CAPACITY, "experts.capacity_factor", factor, why)
    source = "" if ledger.has(DROP) else ledger.default
    what = "what is dropped"
    ledger.set(DROP, "experts.drop", DROPS[drop or "probs"], what, source=source)
    if padded:
        ledger.set(PADDED, "experts.padded", True, "sizes do not depend on the routing")
    else:
        ledger.skip(PADDED, "sizes follow the routing")
