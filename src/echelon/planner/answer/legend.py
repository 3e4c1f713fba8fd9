"""What the signs of a table of plans mean: of those that stand in it, and of no others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from echelon.core.choices.context_kinds import CONTEXT_KINDS
from echelon.planner.search.candidate import CandidatePlan
from echelon.schedule.build import SCHEDULES


def mesh_text(choice: CandidatePlan) -> str:
    """Return the degrees of a mesh that are not 1, such as ``pp16 dp2x32 tp8s``."""
    mesh = choice.mesh
    words = [f"pp{mesh.pp}"] if mesh.pp > 1 else []
    words += [f"dp{mesh.dp_text}"] if mesh.dp > 1 else []
    words += [_context_text(choice)] if mesh.cp > 1 else []
    if mesh.tp > 1:
        words.append(f"tp{mesh.tp}{'s' * choice.sequence_parallel}")
    if mesh.ep > 1:
        words.append(f"ep{mesh.ep}{'t' * (choice.expert_tp > 1)}")
    return " ".join(words) or "one rank"


def schedule_text(choice: CandidatePlan) -> str:
    """Return the schedule of a plan in ten columns; "-" without a pipeline."""
    if choice.mesh.pp == 1:
        return "-"
    short = SCHEDULES[choice.schedule].short_name
    return f"{short} x{choice.virtual}" if short else choice.schedule


def recompute_text(choice: CandidatePlan) -> str:
    """Return what runs forward again: "-", operators' first letters, "all" or one of so many."""
    signs = "".join(one[:2] for one in choice.operators)
    if choice.recompute == 0:
        return signs or "-"
    if signs:
        return f"1/{choice.recompute}+{signs}"
    return "all" if choice.recompute == 1 else f"1/{choice.recompute}"


def sign_texts(choices: Sequence[CandidatePlan]) -> Iterator[str]:
    """Yield what each sign says that the words of some plans have, of its first plan."""
    for says in (*_SIGNS, _secondary, _offload):
        if (text := _first(choices, says)) is not None:
            yield text


def _first(
    choices: Iterable[CandidatePlan], says: Callable[[CandidatePlan], str | None]
) -> str | None:
    return next((text for one in choices if (text := says(one)) is not None), None)


def _hybrid(choice: CandidatePlan) -> str | None:
    degrees = choice.mesh.data_degrees
    if len(degrees) < 2:
        return None
    replicas, shards = degrees.values()
    return f"dp{choice.mesh.dp_text}: {replicas} replicas of {shards} shards."


def _interleaved(choice: CandidatePlan) -> str | None:
    if choice.mesh.pp == 1 or not SCHEDULES[choice.schedule].short_name:
        return None
    return f"{schedule_text(choice)}: {choice.schedule}, {choice.virtual} stages on a rank."


def _context_text(choice: CandidatePlan) -> str:
    record = CONTEXT_KINDS[choice.context]
    inner = str(choice.ulysses) * (record.exchange == "inner")
    return f"cp{choice.mesh.cp}{record.symbol}{inner}"


def _context(choice: CandidatePlan) -> str | None:
    record = CONTEXT_KINDS[choice.context]
    if choice.mesh.cp == 1 or not record.symbol:
        return None
    cp, sign = choice.mesh.cp, _context_text(choice)
    if record.exchange == "inner":
        return f"{sign}: {choice.ulysses} of {cp} context ranks exchange heads."
    return f"{sign}: {choice.context} over {cp} context ranks."


def _sequence_parallel(choice: CandidatePlan) -> str | None:
    shown = choice.mesh.tp > 1 and choice.sequence_parallel
    return f"tp{choice.mesh.tp}s: with sequence parallelism." if shown else None


def _experts(choice: CandidatePlan) -> str | None:
    shown = choice.mesh.ep > 1 and choice.expert_tp > 1
    return f"ep{choice.mesh.ep}t: tensor ranks cut experts too." if shown else None


def _secondary(choice: CandidatePlan) -> str | None:
    return "+s: nodes keep slices of what ZeRO 3 gathers." if choice.keeps_slices else None


def _offload(choice: CandidatePlan) -> str | None:
    return "+h: optimizer state rests on the host." if choice.offload else None


_SIGNS = (_hybrid, _interleaved, _context, _sequence_parallel, _experts)
"""What says what the signs of a mesh and of its schedule mean."""
