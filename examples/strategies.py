"""One script, any strategy: the line that is marked is the only one that changes.

    python examples/strategies.py             # mirrored
    python examples/strategies.py zero3       # or: zero1, tensor, pipeline, ...

The losses are the same whatever it says, but for rounding.
"""

from __future__ import annotations

import sys

import echelon as ec

SETTINGS = ["train.steps=20", "batch.global_sequences=8", "batch.sequence_length=32"]


def main(name: str) -> None:
    """Train a small model for twenty steps, and print the loss of each."""
    strategy = ec.strategy(name, ranks=2)  # the one line
    with strategy.scope() as scope:
        model = scope.model("nano", settings=SETTINGS)
    print(f"{name}: {strategy.num_replicas_in_sync} replicas in sync")
    mirrored = sum(variable.mirrored for variable in model.variables)
    print(f"{mirrored} of {len(model.variables)} variables are mirrored")
    history = model.fit(data="stdlib", settings=[f"train.run_name={name}"])
    for step, loss in enumerate(history.losses, start=1):
        print(f"step {step:2}  loss {loss:.4f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "mirrored")
