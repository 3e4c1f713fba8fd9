# SPDX-License-Identifier: Apache-2.0
"""The units of an Accelerate FSDP configuration: what is gathered together, when, and its rest."""

from __future__ import annotations

from math import ceil

from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import FROM_ZERO, KeyReader
from echelon.interop.ranks import set_offload

FSDP = "fsdp_config"
_WRAP = f"{FSDP}.fsdp_auto_wrap_policy"
_CLASSES = f"{FSDP}.fsdp_transformer_layer_cls_to_wrap"
_SMALLEST = f"{FSDP}.fsdp_min_num_params"
_BACKWARD = f"{FSDP}.fsdp_backward_prefetch"
FORWARD = f"{FSDP}.fsdp_forward_prefetch"
OFFLOAD = f"{FSDP}.fsdp_offload_params"
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_ONE_AHEAD = "one unit ahead, in forward and backward"
_PREFETCHES = {"BACKWARD_PRE": 1, "BACKWARD_POST": 0, "NO_PREFETCH": 0}
_DEFAULT_SMALLEST = 10**8  # parameters, in Accelerate


def read_units(reader: KeyReader, stage: int, version: int, context: ImportContext) -> None:
    """Map wrapping, prefetch and offload of parameters; without slices none of them counts."""
    if stage == 0:
        reader.skip_all(
            (_WRAP, _CLASSES, _SMALLEST, _BACKWARD, FORWARD), "parameters are whole on every rank"
        )
    else:
        _read_wrapping(reader, context)
        _read_prefetch(reader, version)
    host = reader.flag(OFFLOAD, setting="zero.parameter_offload")
    why = "slices of parameters, and the optimizer that updates them there"
    set_offload(reader, OFFLOAD, host, why)


def _read_wrapping(reader: KeyReader, context: ImportContext) -> None:
    """Map the policy to whole blocks: all their classes are one here."""
    setting = "zero.unit_blocks"
    policy = reader.word(_WRAP, _POLICIES, setting=setting)
    if policy is None and reader.has(_WRAP):
        return
    blocks, block = context.stage_blocks, context.block_elements
    if policy == "TRANSFORMER_BASED_WRAP":
        reader.set(_WRAP, setting, 1, "a unit is a block, whatever its class is called")
        reader.skip(_CLASSES, "every block has one class")
        reader.skip(_SMALLEST, "it is about SIZE_BASED_WRAP")
        return
    reader.skip(_CLASSES, "it is about TRANSFORMER_BASED_WRAP")
    if policy == "SIZE_BASED_WRAP":
        smallest = reader.integer(_SMALLEST, FROM_ZERO, setting=setting)
        if block and (smallest is not None or not reader.has(_SMALLEST)):
            least = _DEFAULT_SMALLEST if smallest is None else smallest
            units = max(1, min(blocks, ceil(least / block)))
            why = f"blocks of {block} elements make units of at least {least}: {units}"
            reader.set_or_default(_SMALLEST, setting, units, why)
        reader.skip(_WRAP, f"{setting} says how many blocks are one unit")
        return
    reader.skip(_SMALLEST, "it is about SIZE_BASED_WRAP")
    if blocks:
        why = "all blocks of a stage are one unit"
        reader.set_or_default(_WRAP, setting, blocks, why)


def _read_prefetch(reader: KeyReader, version: int) -> None:
    """Map both looks ahead to one setting, which holds for forward and for backward."""
    setting = "zero.prefetch"
    if version == 2:
        reader.skip(_BACKWARD, "FSDP 2 does not have it: one unit is gathered ahead")
        reader.only(FORWARD, (False,), "FSDP 2 does not have it", setting=setting)
        return
    forward = reader.flag(FORWARD, setting=setting)
    backward = reader.word(_BACKWARD, _PREFETCHES, setting=setting)
    if backward is None:
        if forward:
            reader.set(FORWARD, setting, 1, _ONE_AHEAD)
        else:
            reader.skip(FORWARD, "zero.prefetch holds for forward and backward")
        return
    units = max(_PREFETCHES[backward], int(bool(forward)))
    why = _ONE_AHEAD if units else "a unit is gathered when the one before has been computed"
    reader.set(_BACKWARD, setting, units, why)
    reader.skip(FORWARD, "zero.prefetch holds for forward and backward")
