"""What an action needs before it can run, and one order in which all ranks' lists can run.

The dependencies are those of the mathematics, whoever owns the stages:

    F(s, m)        needs F(s-1, m)
    B, BW(s, m)    needs F(s, m), and B or BW(s+1, m)
    W(s, m)        needs B(s, m)
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.schedule.action import Action, ActionKind, Schedule


def result_of(action: Action) -> Action:
    """Return the name under which others wait for `action`: BW gives what B gives."""
    if action.kind is ActionKind.BW:
        return Action(ActionKind.B, action.stage, action.microbatch)
    return action


def needs_of(action: Action, num_stages: int) -> tuple[Action, ...]:
    """Return the results that `action` needs; a needed B may be made by a BW."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is ActionKind.F:
        return (Action(ActionKind.F, stage - 1, microbatch),) if stage > 0 else ()
    if action.kind is ActionKind.W:
        return (Action(ActionKind.B, stage, microbatch),)
    own = Action(ActionKind.F, stage, microbatch)
    if stage == num_stages - 1:
        return (own,)
    return (own, Action(ActionKind.B, stage + 1, microbatch))


@dataclass(frozen=True, slots=True)
class Progress:
    """Say how far the ranks come when each runs its list and waits only for what it needs.

    `order` has every action that runs, each after all that it needs. `heads[r]` is the index of
    the action at which rank `r` waits for ever; the length of its list where it finishes.
    """

    order: tuple[Action, ...]
    heads: tuple[int, ...]


def run_lists(schedule: Schedule) -> Progress:
    """Run every rank as far as it comes, with sends that never wait."""
    done: set[Action] = set()
    order: list[Action] = []
    heads = [0] * schedule.num_ranks
    waiting: dict[Action, list[int]] = {}
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        row = schedule.actions[rank]
        while heads[rank] < len(row):
            action = row[heads[rank]]
            needs = needs_of(action, schedule.num_stages)
            missing = next((need for need in needs if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            heads[rank] += 1
            order.append(action)
            result = result_of(action)
            done.add(result)
            ready.extend(waiting.pop(result, ()))
    return Progress(order=tuple(order), heads=tuple(heads))
