# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism of a DeepSpeed configuration (AutoEP): its degrees, and what it overrides.

The section names the modules of a model by patterns; here the model has its experts, and the run
builds on it. DeepSpeed 0.19.
"""

from __future__ import annotations

from echelon.interop.deepspeed.abilities import TABLES
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import COUNT, FLAG, POSITIVE, KeyReader
from echelon.interop.ranks import read_expert_degrees

TABLE = "expert_parallel"
_SWITCH = f"{TABLE}.enabled"


def read_experts(reader: KeyReader, context: ImportContext) -> ImportContext:
    """Map the section, where it is switched on; return the context with its degrees."""
    on = TABLE if isinstance(reader.given.get(TABLE), bool) else _SWITCH
    enabled = reader.flag(on, setting="mesh.ep")
    if not enabled or on == TABLE:
        if enabled:
            reader.refuse(on, f"a table with {_SWITCH} and autoep_size", setting="mesh.ep")
        reader.skip_all(reader.keys_of(TABLE), f"{on} is false")
        reader.know_table(TABLE)
        return context
    reader.skip(on, f"{TABLE}.autoep_size says over how many ranks")
    keys = (f"{TABLE}.autoep_size", f"{TABLE}.expert_tensor_parallel_size")
    context = read_expert_degrees(reader, *keys, context)
    _read_router(reader)
    reader.judge(TABLES.keys["experts"], f"{TABLE}.")
    return context


def _read_router(reader: KeyReader) -> None:
    """Map what overrides the router of the model; "auto" is what the model has."""
    as_model, router = "as the model has it", "model.experts"
    for name, setting in (
        ("top_k", "top_k"),
        ("num_expert_groups", "groups"),
        ("num_limited_groups", "top_groups"),
    ):
        key, why = f"{TABLE}.{name}", "how experts are chosen"
        reader.take(key, f"{router}.{setting}", COUNT, why, auto=as_model)
    scores = f"{TABLE}.score_func"
    if reader.is_auto(scores):
        reader.skip(scores, as_model)
    elif (word := reader.word(scores, ("softmax", "sigmoid"))) is not None:
        reader.set(scores, f"{router}.router", word, "of the scores")
    why = "whether weights of experts add up to 1"
    reader.take(f"{TABLE}.route_norm", f"{router}.renormalise", FLAG, why)
    key, why = f"{TABLE}.routed_scaling_factor", "factor of the weights of experts"
    reader.take(key, f"{router}.gate_scale", POSITIVE, why, auto=as_model)
