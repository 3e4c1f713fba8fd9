"""The units of an Accelerate FSDP configuration: what is gathered together, when, and its rest."""

from __future__ import annotations

from math import ceil

from echelon.config.foreign.ledger import FROM_ZERO, Ledger
from echelon.config.foreign.surroundings import Surroundings

FSDP = "fsdp_config"
WRAP = f"{FSDP}.fsdp_auto_wrap_policy"
CLASSES = f"{FSDP}.fsdp_transformer_layer_cls_to_wrap"
SMALLEST = f"{FSDP}.fsdp_min_num_params"
BACKWARD = f"{FSDP}.fsdp_backward_prefetch"
FORWARD = f"{FSDP}.fsdp_forward_prefetch"
OFFLOAD = f"{FSDP}.fsdp_offload_params"
POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
PREFETCHES = {"BACKWARD_PRE": 1, "BACKWARD_POST": 0, "NO_PREFETCH": 0}
DEFAULT_SMALLEST = 10**8


def read_units(ledger: Ledger, stage: int, version: int, around: Surroundings) -> None:
    """Map wrapping, prefetch and offload of parameters; without slices none of them counts."""
    if stage == 0:
        for key in (WRAP, CLASSES, SMALLEST, BACKWARD, FORWARD):
            ledger.skip(key, "parameters are whole on every rank")
    else:
        _read_wrapping(ledger, around)
        _read_prefetch(ledger, version)
    host = ledger.flag(OFFLOAD, setting="zero.parameter_offload")
    if host is not None:
        home = "host" if host else "none"
        for what in ("parameter", "optimizer"):
            why = "slices of parameters, and the optimizer that updates them there"
            ledger.set(OFFLOAD, f"zero.{what}_offload", home, why)


def _read_wrapping(ledger: Ledger, around: Surroundings) -> None:
    """Map the policy to whole blocks: all their classes are one here."""
    setting = "zero.unit_blocks"
    policy = ledger.word(WRAP, POLICIES, setting=setting)
    if policy is None and ledger.has(WRAP):
        return
    source = "" if ledger.has(WRAP) else ledger.default
    blocks, block = around.stage_blocks, around.block_elements
    if policy == "TRANSFORMER_BASED_WRAP":
        ledger.set(WRAP, setting, 1, "a unit is a block, whatever its class is called")
        ledger.skip(CLASSES, "every block has one class")
        ledger.skip(SMALLEST, "it is about SIZE_BASED_WRAP")
        return
    ledger.skip(CLASSES, "it is about TRANSFORMER_BASED_WRAP")
    if policy == "SIZE_BASED_WRAP":
        smallest = ledger.whole(SMALLEST, FROM_ZERO, setting=setting)
        if block and (smallest is not None or not ledger.has(SMALLEST)):
            least = DEFAULT_SMALLEST if smallest is None else smallest
            units = max(1, min(blocks, ceil(least / block)))
            why = f"blocks of {block} elements make units of at least {least}: {units}"
            if smallest is None:
                ledger.set(SMALLEST, setting, units, why, source=ledger.default)
            else:
                ledger.set(SMALLEST, setting, units, why)
        ledger.skip(WRAP, f"{setting} says how many blocks are one unit")
        return
    ledger.skip(SMALLEST, "it is about SIZE_BASED_WRAP")
    if blocks:
        why = "all blocks of a stage are one unit"
        ledger.set(WRAP, setting, blocks, why, source=source)


def _read_prefetch(ledger: Ledger, version: int) -> None:
    """Map both looks ahead to one setting, which holds for forward and for backward."""
    setting = "zero.prefetch"
    if version == 2:
        ledger.skip(BACKWARD, "FSDP 2 does not have it: one unit is gathered ahead")
        ledger.only(FORWARD, (False,), "FSDP 2 does not have it", setting=setting)
        return
    forward = ledger.flag(FORWARD, setting=setting)
    backward = ledger.word(BACKWARD, PREFETCHES, setting=setting)
    if backward is None:
        if forward:
            ledger.set(FORWARD, setting, 1, "one unit ahead, in forward and backward")
        else:
            ledger.skip(FORWARD, "zero.prefetch holds for forward and backward")
        return
    units = max(PREFETCHES[backward], int(bool(forward)))
    whys = {
        "BACKWARD_PRE": "one unit ahead, in forward and backward",
        "BACKWARD_POST": "a unit is gathered when the one before has been computed",
        "NO_PREFETCH": "a unit is gathered when the one before has been computed",
    }
    why = whys["BACKWARD_PRE" if units else backward]
    ledger.set(BACKWARD, setting, units, why)
    ledger.skip(FORWARD, "zero.prefetch holds for forward and backward")
