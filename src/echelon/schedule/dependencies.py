# SPDX-License-Identifier: Apache-2.0
"""What an action needs before it can run, and one order in which all ranks' lists can run.

The dependencies are those of the mathematics, whoever owns the stages:

    F(s, m)        needs F(s-1, m)
    B, BW(s, m)    needs F(s, m), and B or BW(s+1, m)
    W(s, m)        needs B(s, m)
"""

from __future__ import annotations

from echelon.schedule.action import Action, ActionKind, Schedule


def result_name(action: Action) -> Action:
    """Return the name under which others wait for `action`: BW gives what B gives."""
    if action.kind is ActionKind.BW:
        return Action(ActionKind.B, action.stage, action.microbatch)
    return action


def required_results(action: Action, num_stages: int) -> tuple[Action, ...]:
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


def run_action_lists(schedule: Schedule) -> tuple[list[Action], list[int]]:
    """Run every rank as far as it comes, each waiting only for what it needs; sends never wait.

    Return every action that runs, each after all that it needs, and of each rank the index of the
    action at which it waits for ever: the length of its list where it finishes.
    """
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
            needs = required_results(action, schedule.num_stages)
            missing = next((need for need in needs if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            heads[rank] += 1
            order.append(action)
            result = result_name(action)
            done.add(result)
            ready.extend(waiting.pop(result, ()))
    return order, heads
