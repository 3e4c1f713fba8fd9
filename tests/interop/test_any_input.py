"""Whatever a foreign file holds, it becomes a run that loads, or an error by known rules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.config.entries import merge
from echelon.config.setting_layers import gather_layers
from echelon.core.rulebook import all_rules
from echelon.core.settings.value_types import toml_text
from echelon.interop.import_context import import_context
from echelon.interop.key_reader import KeyReader
from echelon.interop.tools import TOOLS, ToolName
from tests.interop.imports import Imports

RULES = {rule.id for rule in all_rules()}

FULL: Mapping[str, list[dict[str, object]]] = {
    "deepspeed": [
        {
            "zero_optimization.stage": 3,
            "zero_optimization.offload_optimizer.device": "nvme",
            "optimizer.type": "AdamW",
            "scheduler.type": "WarmupCosineLR",
            "fp16.enabled": True,
        }
    ],
    "accelerate": [
        *({"distributed_type": "FSDP", "fsdp_config.fsdp_version": version} for version in (1, 2)),
        {"distributed_type": "DEEPSPEED"},
    ],
    "megatron": [{"--nproc-per-node": 4}],
    "horovod": [{"--num-proc": 2, "--fp16-allreduce": True}],
    "nemo": [{"trainer.precision": "bf16", "model.optim.name": "adamw"}],
    "nanotron": [{"tokens.val_check_interval": 2, "tokens.limit_val_batches": 1}],
    "llamafactory": [{"recompute_granularity": "full"}, {}],
    "axolotl": [{"base_model": "Qwen/Qwen3-4B", "optimizer": "adamw_torch"}],
    "torchtitan": [{"parallelism.pipeline_parallel_degree": 2, "validation.enabled": True}],
}
"""Files that make each reader ask for nearly all of its keys."""


def known_keys(kind: ToolName) -> list[str]:
    """Return every key that is read of a tool's file."""
    context = import_context(merge(gather_layers("nano", ()).layers), 2)
    keys: dict[str, None] = {}
    for file in FULL[kind]:
        reader = KeyReader(tool=kind, path="file", given=file)
        TOOLS[kind].read_keys(reader, context)
        keys.update(reader.known)
    return list(keys)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    st.sampled_from([1e9, 0.5, 5e8, 1e-4, 1e300, -1.0, 2**70]),
    st.sampled_from(["auto", "cpu", "nvme", "none", "bf16", "fp32", "AdamW", "SGD", "Adam", ""]),
    st.sampled_from(["WarmupLR", "linear", "FULL_SHARD", "NO_WRAP", "BACKWARD_PRE", "no", "yes"]),
    st.sampled_from(["rope", "RMSNorm", "WSD", "cosine", "full", "uniform", "muon", "optim"]),
    st.just([]),
    st.just([0.9, 0.99]),
    st.just({}),
)


def nested(flat: Mapping[str, object]) -> dict[str, Any]:
    """Return the object of dotted keys; a table wins over a value of its name."""
    found: dict[str, Any] = {}
    for key in sorted(flat, key=lambda key: -key.count(".")):
        table, *rest = key.split(".")
        inner = found.setdefault(table, {}) if rest else found
        for name in rest[:-1]:
            inner = inner.setdefault(name, {})
        inner.setdefault(rest[-1] if rest else table, flat[key])
    return found


STARTS = {
    "megatron": "torchrun --nproc-per-node 4 pretrain_gpt.py",
    "horovod": "horovodrun --num-proc 4 train.py",
}
"""What commands begin with."""


def command(kind: ToolName, flat: Mapping[str, object]) -> str:
    """Return a command of these flags: true is a flag alone, false and null none at all."""
    words = [STARTS[kind]]
    for key, value in flat.items():
        values = value if isinstance(value, list) else [value]
        if value is True:
            words.append(key)
        elif value not in (None, False, {}, ""):
            words.append(" ".join([key, *map(str, values)]))
    return " ".join(words)


def check(kind: ToolName, text: str, extends: str | None) -> None:
    """Import a file; where it is refused, by known rules, each with a message."""
    with TemporaryDirectory() as folder:
        problems = Imports(Path(folder), kind).problems(text, extends=extends, ranks=4)
    assert {problem.rule for problem in problems} <= RULES
    assert all(problem.message for problem in problems)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", TOOLS)
def test_any_values_of_any_keys(kind: ToolName) -> None:
    try_any_values(kind, 12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOOLS)
def test_many_values_of_any_keys(kind: ToolName) -> None:
    try_any_values(kind, 200)


def try_any_values(kind: ToolName, examples: int) -> None:
    """Import files with any values of any keys of a tool."""
    keys = known_keys(kind)
    assert len(keys) > 50

    @given(st.dictionaries(st.sampled_from([*keys, "misspelt"]), SCALARS, max_size=12))
    @settings(deadline=None, max_examples=examples)
    def run(flat: dict[str, object]) -> None:
        if kind in STARTS:
            given = {k: v for k, v in flat.items() if k.startswith("--") and k != "--num-proc"}
            text = command(kind, given)
        elif kind == "torchtitan":
            text = "\n".join(f"{k} = {toml_text(v)}" for k, v in flat.items() if v is not None)
        else:
            plugin = any(key.startswith("deepspeed_config") for key in flat)
            trained_by = {"distributed_type": "DEEPSPEED" if plugin else "FSDP"}
            more = trained_by if kind == "accelerate" else {}
            text = json.dumps(nested({**more, **flat}))
        check(kind, text, "nano")

    run()
