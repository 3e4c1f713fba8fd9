# SPDX-License-Identifier: Apache-2.0
"""The run file of the controls: compiled for the page."""

from __future__ import annotations

from echelon.core.choices.context_kinds import kinds_with_degree
from echelon.page.explorer.controls import OPERATORS, PLAIN, PRECISION_LINES, Controls, Record

WITH_DEGREE = tuple(kinds_with_degree())
"""Context kinds whose degree would be chosen where a run file does not say it."""


def run_text(controls: Controls, model: Record, cluster: Record) -> str:
    """Return the run file of the controls, as TOML; what is as it is by itself is not said."""
    return (
        f'[model]\npreset = "{model["name"]}"\n\n'
        f'[cluster]\npreset = "{cluster["name"]}"\n\n'
        f"[mesh]\npp = {controls.pp}\ndp_replicate = {controls.dp_replicate}\n"
        f"dp_shard = {controls.dp_shard}\ncp = {controls.cp}\ntp = {controls.tp}\n"
        f"ep = {controls.ep}\n"
        + _flag("sequence_parallel", controls.sequence_parallel)
        + _word("tp_overlap", "tp_overlap", controls.tp_overlap)
        + _table("servers", _number("count", "servers", controls.servers))
        + f"\n[zero]\nstage = {controls.zero}\n"
        + _zero_lines(controls)
        + f'\n[pipeline]\nschedule = "{controls.schedule}"\nvirtual_stages = {controls.virtual}\n'
        f"\n[batch]\nglobal_sequences = {controls.sequences}\n"
        f"microbatch_sequences = {controls.microbatch}\nsequence_length = {controls.length}\n"
        + _table("precision", PRECISION_LINES[controls.precision])
        + _table("optimizer", _word("kind", "optimizer", controls.optimizer))
        + f'\n[recompute]\npolicy = "{controls.recompute}"\n'
        + _number("every", "every", controls.every)
        + _operators(controls)
        + _table(
            "context",
            _word("kind", "context", controls.context) + _exchange(controls),
        )
        + _table(
            "experts",
            _number("expert_tp", "expert_tp", controls.expert_tp)
            + _word("dispatch", "dispatch", controls.dispatch)
            + _number("chunks", "chunks", controls.chunks),
        )
    )


def _zero_lines(controls: Controls) -> str:
    whole = controls.zero == 3 or controls.reshard != PLAIN["reshard"]
    return (
        (f'reshard_after_forward = "{controls.reshard}"\n' if whole else "")
        + _flag("secondary", controls.secondary)
        + _word("gather", "gather", controls.gather)
        + _word("reduce", "reduce", controls.reduce)
        + _word("optimizer_offload", "optimizer_offload", controls.optimizer_offload)
        + _word("parameter_offload", "parameter_offload", controls.parameter_offload)
    )


def _exchange(controls: Controls) -> str:
    said = controls.context in WITH_DEGREE or controls.ulysses != PLAIN["ulysses"]
    return f"ulysses_degree = {controls.ulysses}\n" if said else ""


def _operators(controls: Controls) -> str:
    if controls.operators == PLAIN["operators"]:
        return ""
    words = ", ".join([f'"{one}"' for one in OPERATORS[controls.operators]])
    return f"operators = [{words}]\n"


def _table(name: str, lines: str) -> str:
    return f"\n[{name}]\n{lines}" if lines != "" else ""


def _flag(key: str, value: bool) -> str:
    return f"{key} = true\n" if value else ""


def _word(key: str, name: str, value: str) -> str:
    return f'{key} = "{value}"\n' if value != PLAIN[name] else ""


def _number(key: str, name: str, value: int) -> str:
    return f"{key} = {value}\n" if value != PLAIN[name] else ""
