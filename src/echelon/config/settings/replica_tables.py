# SPDX-License-Identifier: Apache-2.0
"""The tables of run.toml about replicas that do not sum their gradients in each step."""

from __future__ import annotations

from echelon.config.settings.value_types import COUNT, FROM_ZERO, Choice, Integer, Real, setting
from echelon.core.choices.local_sgd import DEFAULT_RESTARTS
from echelon.core.choices.updates import DEFAULT_MAX_STALENESS

SERVERS = (
    setting(
        "servers.count",
        Integer(minimum=0, maximum=10_000),
        0,
        "parameter servers beside the mesh: ranks that keep the model and update it",
    ),
    setting(
        "servers.updates",
        Choice(options=("synchronous", "asynchronous")),
        "synchronous",
        "asynchronous: each worker's gradient is applied as it comes",
    ),
    setting(
        "servers.max_staleness",
        Integer(minimum=0, maximum=10_000),
        DEFAULT_MAX_STALENESS,
        "asynchronous: steps that a worker may be ahead of the slowest; 0: as synchronous",
    ),
    setting(
        "servers.damping",
        Real(maximum=10.0),
        0.0,
        "asynchronous: the learning rate is divided by (1 + staleness) to this power",
    ),
)

LOCAL_SGD = (
    setting(
        "local_sgd.every", FROM_ZERO, 0, "steps that replicas train alone between meetings; 0: none"
    ),
    setting(
        "local_sgd.islands",
        Integer(words=("auto",)),
        "auto",
        "replicas that train alone: dp_replicate",
    ),
    setting(
        "local_sgd.outer",
        Choice(options=("sgd", "nesterov")),
        "nesterov",
        "the step from the mean of what islands moved",
    ),
    setting(
        "local_sgd.outer_learning_rate",
        Real(above=True, words=("auto",)),
        "auto",
        "of the outer step; auto: 0.7 with nesterov, 1 with sgd",
    ),
    setting(
        "local_sgd.outer_momentum",
        Real(below=True, maximum=1.0, words=("auto",)),
        "auto",
        "of nesterov, per round; auto: 0.9",
    ),
    setting(
        "local_sgd.gradients",
        Choice(options=("fp32", "int8", "fp8")),
        "fp32",
        "what islands send: differences, or codes of 8 bits",
    ),
    setting("local_sgd.fragments", COUNT, 1, "parts of the model that meet in steps of their own"),
    setting("local_sgd.delay", FROM_ZERO, 0, "steps from a meeting to its outer step"),
    setting(
        "local_sgd.min_islands",
        Integer(words=("all",)),
        "all",
        "with fewer islands the run ends; others are left out when they are lost",
    ),
    setting(
        "local_sgd.restarts",
        FROM_ZERO,
        DEFAULT_RESTARTS,
        "times that each lost island is started again, where min_islands lets the run go on",
    ),
)
