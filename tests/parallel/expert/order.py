"""In which order a mixture over ranks sends, awaits and computes: what each rank notes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch

from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.parallel.expert import ExpertParallel
from echelon.parallel.expert.feed_forward import ExpertFeedForward
from tests.parallel.expert.targets import Stream, mixture_of, own_batch, rows_of
from tests.parallel.targets import build, run_and_record


def mix_in_order(context: RankContext, argument: tuple[Plan, Stream]) -> list[str]:
    """Run the mixture; return in which order what left, what arrived, and what was computed.

    "name chunk" is a motion that sets out, "name chunk!" one that was awaited.
    """
    plan, stream = argument
    built = build(context, plan)
    batch = own_batch(built, plan)
    rows = rows_of(built, plan, batch)
    mixture, experts = mixture_of(built)
    order: list[str] = []
    note_motions(experts, order)
    shared: Any = mixture.shared

    def noted(x_ND: torch.Tensor) -> torch.Tensor:
        order.append("shared")
        y_ND: torch.Tensor = type(shared).forward(shared, x_ND)
        y_ND.register_hook(lambda _: order.append("shared.backward"))
        return y_ND

    shared.forward = noted
    x_nD = stream.x_ND[rows].requires_grad_()
    with noting_experts(order):
        run_and_record(built, lambda: (mixture(x_nD, batch), x_nD), stream.dy_ND[rows])
    return order


def note_motions(experts: ExpertParallel, order: list[str]) -> None:
    """Note each motion of rows that sets out, and when it is awaited."""
    make, chunks = experts._make_dispatcher, iter(range(100))

    def noted_dispatcher(*arguments: Any) -> Any:
        made, chunk = make(*arguments), next(chunks)

        def noting(motion: Any) -> Any:
            def start(rows: Any, gates: Any, *, name: str) -> Any:
                said = f"{name.removeprefix('experts.')} {chunk}"
                order.append(said)
                arrival = motion(rows, gates, name=name)

                def arrive() -> Any:
                    order.append(f"{said}!")
                    return arrival()

                return arrive

            return start

        made.dispatch, made.combine = noting(made.dispatch), noting(made.combine)
        return made

    experts._make_dispatcher = cast(Any, noted_dispatcher)


@contextmanager
def noting_experts(order: list[str]) -> Iterator[None]:
    """Note when the experts of a chunk compute."""

    def spy(function: Any, word: str) -> Any:
        def noted(*arguments: Any) -> Any:
            order.append(word)
            return function(*arguments)

        return noted

    forward, backward = ExpertFeedForward.forward, ExpertFeedForward.backward
    with (
        patch.object(ExpertFeedForward, "forward", staticmethod(spy(forward, "experts"))),
        patch.object(
            ExpertFeedForward, "backward", staticmethod(spy(backward, "experts.backward"))
        ),
    ):
        yield
