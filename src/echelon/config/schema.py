# SPDX-License-Identifier: Apache-2.0
"""The tables and keys of run.toml, in the order of a run file.

A setting is a field of a record, whose annotation says what a run file says of it
(`core/settings/configured.py`); here stand the tables of these records, and settings that are no
field of any. Loading, checking, `echelon config show` and the resolved run.toml of a run all read
this table. A default of None means that there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from echelon.config.job import CheckpointSettings, DataSettings, ObserveSettings, TrainSettings
from echelon.core.choices.kernels import Kernels
from echelon.core.choices.local_sgd import LocalSgd
from echelon.core.choices.lora import Lora
from echelon.core.choices.updates import Updates
from echelon.core.experts import Balance, ExpertLayout
from echelon.core.mesh import Mesh
from echelon.core.model_shape import (
    Experts,
    LatentAttention,
    ModelShape,
    Multipliers,
    RopeScaling,
    Rotary,
)
from echelon.core.plan import (
    Collectives,
    Context,
    Layout,
    Mathematics,
    Optimizer,
    Pipeline,
    Precision,
    Recompute,
    Zero,
)
from echelon.core.settings.configured import settings_of
from echelon.core.settings.value_types import FRACTION, Integer, Setting, Text

_MODEL = (
    Setting("model.preset", Text(), None, "a model by name: echelon config presets"),
    Setting("model.hf_config", Text(), None, "a Hugging Face config.json", path=True),
    *settings_of(ModelShape, "model"),
    *settings_of(Rotary, "model.rotary"),
    *settings_of(RopeScaling, "model.rope_scaling"),
    *settings_of(Multipliers, "model.multipliers"),
    *settings_of(LatentAttention, "model.latent"),
    *settings_of(Experts, "model.experts"),
    *settings_of(Lora, "lora"),
    Setting("lora.dropout", FRACTION, 0.0, "of what an adapter reads; 0 alone is built"),
)
_CLUSTER = (
    Setting("cluster.preset", Text(), None, "laptop, or COUNTxDEVICE such as 8xh100"),
    Setting("cluster.file", Text(), None, "a cluster described in TOML", path=True),
)
_ZERO = settings_of(Zero, "zero")
_GATHER = [one.key for one in _ZERO].index("zero.gather")
_LAYOUT = (
    *settings_of(Mesh, "mesh"),
    *settings_of(Layout, "mesh"),
    *settings_of(Mesh, "servers", "servers"),
    *settings_of(Updates, "servers"),
    *_ZERO[: _GATHER + 1],
    *settings_of(Precision, "zero", "int8_block"),
    *_ZERO[_GATHER + 1 :],
    *settings_of(Pipeline, "pipeline"),
    Setting("pipeline.file", Text(), "none", "with schedule = file: CSV or JSON", path=True),
    Setting("pipeline.times", Text(), "none", "of units: echelon calibrate RUN", path=True),
    Setting(
        "pipeline.most_in_flight",
        Integer(words=("auto",)),
        "auto",
        "with schedule = auto or file: stages x microbatches held by a rank",
    ),
    *settings_of(Recompute, "recompute"),
    *settings_of(Context, "context"),
    *settings_of(Balance, "experts"),
    *settings_of(ExpertLayout, "experts"),
    *settings_of(Kernels, "kernels"),
    *settings_of(Collectives, "collectives"),
)
_MATHEMATICS = (
    *settings_of(Mathematics, "batch", "global_sequences"),
    *settings_of(Layout, "batch", "microbatch_sequences"),
    *settings_of(Mathematics, "batch", "sequence_length", "documents"),
    *settings_of(Precision, "precision"),
    *settings_of(Optimizer, "optimizer"),
    *settings_of(Mathematics, "train", "seed"),
    *settings_of(LocalSgd, "local_sgd"),
)
_RUN = (
    *settings_of(DataSettings, "data"),
    *settings_of(TrainSettings, "train"),
    *settings_of(CheckpointSettings, "checkpoint"),
    *settings_of(ObserveSettings, "observe"),
)

SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        one.key: one
        for one in (
            Setting(
                "extends", Text(), None, "a preset, or a run file relative to this one, to build on"
            ),
            *(*_MODEL, *_CLUSTER, *_LAYOUT, *_MATHEMATICS, *_RUN),
        )
    }
)
"""Every setting by its key, in the order in which a run file lists them."""

MODEL_SOURCES = ("model.preset", "model.hf_config")
CLUSTER_SOURCES = ("cluster.preset", "cluster.file")


def tables(settings: Mapping[str, Setting] = SETTINGS) -> tuple[str, ...]:
    """Return the dotted names of all tables, such as ``mesh`` and ``model.experts``."""
    names = dict.fromkeys(key.rpartition(".")[0] for key in settings)
    return tuple(name for name in names if name)
