# SPDX-License-Identifier: Apache-2.0
"""Rules about strategies by name, and about what is made in their scope."""

from echelon.core.rules import Rule

STRATEGY_KNOWN = Rule(
    id="strategy-known",
    why="""
    `ec.strategy` takes a name of `echelon compare --strategies`, or what TensorFlow, PyTorch or
    Horovod call one of these. Some of their strategies are none here; the message says what to take
    instead. docs/guides/strategies.md has the table.
    """,
    bad='ec.strategy("TPUStrategy", ranks=8)',
    fixed='ec.strategy("mirrored", ranks=8)',
)

STRATEGY_RANKS = Rule(
    id="strategy-ranks",
    why="""
    A strategy is for a number of ranks, one at the least. Where a launcher has started ranks, it is
    for all of them.
    """,
    bad='ec.strategy("mirrored", ranks=0)',
    fixed='ec.strategy("mirrored", ranks=2)',
)

STRATEGY_SETTINGS = Rule(
    id="strategy-settings",
    why="""
    A strategy says how a run is split: the mesh, ZeRO's stage, threads. A setting that says
    otherwise would make it another strategy under the same name. Name the other one, or make a plan
    without a strategy.
    """,
    bad='scope.model("nano", settings=["mesh.tp=2"])       # in the scope of "mirrored"',
    fixed='scope.model("nano", settings=["optimizer.learning_rate=1e-3"])',
)

STRATEGY_SCOPE = Rule(
    id="strategy-scope",
    why="""
    What a strategy splits is made in its scope: then every parameter is one of the strategy's
    variables. A module that was made before, or elsewhere, may have parameters that others hold on
    to; a scope that has been left makes nothing any more. (TensorFlow refuses variables of another
    scope for the same reason.)
    """,
    bad="""
    model = Net()
    with ec.strategy("mirrored", ranks=2).scope() as scope:
        model, optimizer = scope.parallelize(model)
    """,
    fixed="""
    with ec.strategy("mirrored", ranks=2).scope() as scope:
        model, optimizer = scope.parallelize(Net())
    """,
)
