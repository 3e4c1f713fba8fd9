"""Predictions as a CSV file, as a table of errors in 80 columns, as a JSON object."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from bench.accuracy.errors import (
    Errors,
    Quantity,
    errors,
    fitting,
    grouped,
    memory_pair,
    rate_pair,
    step_pair,
)
from bench.accuracy.groups import (
    device_of,
    is_complete,
    publisher_of,
    short,
    source_of,
    within,
)
from bench.accuracy.predict import OK, Prediction
from bench.accuracy.published.memory_settings import is_pure, words_of
from bench.accuracy.published.neighbours import OTHER_ROWS
from bench.accuracy.published.rows import Row
from bench.accuracy.published.trainer_defaults import default_of
from echelon.cost.seconds.trainers import BY_NAME

VERSION = 1
COLUMNS = (
    "id",
    "step_time_s",
    "tokens_per_s_per_gpu",
    "mem_per_gpu_gb",
    "fits",
    "status",
    "mem_kind",
    "mem_allocated_gb",
    "mem_driver_gb",
    "mem_low_gb",
    "mem_high_gb",
)
"""Columns of a file of predictions: `mem_per_gpu_gb` is of the kind that the row gives."""
LABEL = 38
MOST_OVERRULED = 12
UNDER = 0.05
"""Share by which no memory of a row of which all is known may be too little."""
HEAD = f"{'':{LABEL}}{'rows':>5}{'mean':>7}{'median':>7}{'p90':>7}{'bias':>8}{'order':>8}"


def write_predictions(path: Path, predictions: Iterable[Prediction]) -> None:
    """Write one line a row: what is predicted, whether it fits, and whether a rule refused it."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for one in predictions:
            numbers = (one.step_s, one.tokens_per_s, one.memory_gb)
            fits = "" if one.fits is None else str(one.fits).lower()
            cells = ["" if number is None else f"{number:.6g}" for number in numbers]
            memory = (one.allocated_gb, one.driver_gb, *(one.memory_band_gb or (None, None)))
            more = ["" if number is None else f"{number:.6g}" for number in memory]
            kind = one.case.measured.memory_kind if one.case else ""
            writer.writerow((one.row.id, *cells, fits, one.status, kind, *more))


def summary_text(predictions: Sequence[Prediction], *, brief: bool = False) -> str:
    """Return the summary as text; a brief one has no line for each table of a publisher."""
    return "\n".join(lines(predictions, brief=brief))


def lines(predictions: Sequence[Prediction], *, brief: bool = False) -> Iterator[str]:
    """Yield the summary in lines of at most 80 characters."""
    whole, rest = _split(predictions)
    for title, of, order_by in (
        ("seconds of a step", step_pair, rate_pair),
        ("memory of a device", memory_pair, None),
    ):
        if errors(predictions, of) is None:
            continue
        yield f"{title:{LABEL}}{HEAD[LABEL:]}"
        yield from _line("all rows of completeness A and B", errors(whole, of, order_by))
        yield from _line("other rows", errors(rest, of, order_by))
        for device, members in grouped(whole, device_of).items():
            yield from _line(device, errors(members, of, order_by))
        yield from _source_lines(whole, (of, order_by), brief=brief)
        yield ""
    yield from _known_lines(predictions)
    yield from _fitting_lines(whole)
    yield from _refused_lines(predictions)
    yield from _overruled_lines(predictions)
    if not brief:
        yield from _assumed_lines(predictions)


def to_json(predictions: Sequence[Prediction]) -> dict[str, object]:
    """Return predictions, what was assumed for each, and their errors as a JSON object."""
    whole, rest = _split(predictions)
    return {
        "version": VERSION,
        "summary": _summary(whole),
        "other_rows": _summary(rest),
        "known_memory": _known(predictions),
        "by_device": {k: _summary(v) for k, v in grouped(whole, device_of).items()},
        "by_publisher": {k: _summary(v) for k, v in grouped(whole, publisher_of).items()},
        "by_source": {k: _summary(v) for k, v in grouped(whole, source_of).items()},
        "rows": [_row_json(one) for one in predictions],
    }


def _split(predictions: Sequence[Prediction]) -> tuple[list[Prediction], list[Prediction]]:
    whole = [one for one in predictions if is_complete(one.row)]
    return whole, [one for one in predictions if not is_complete(one.row)]


def _line(label: str, found: Errors | None) -> Iterator[str]:
    if found is None:
        return
    order = "" if found.order is None else f"{100 * found.order:.1f} %"
    shares = "".join(f"{100 * part:5.1f} %" for part in (found.mean, found.median, found.p90))
    bias = f"{100 * found.bias:+.1f} %"
    yield f"{short(label, LABEL):{LABEL}}{found.rows:5d}{shares}{bias:>8}{order:>8}"


def _source_lines(
    predictions: Sequence[Prediction], quantities: tuple[Quantity, Quantity | None], *, brief: bool
) -> Iterator[str]:
    """Yield a line for each publisher, and under it one for each source and framework of it."""
    for publisher, rows in grouped(predictions, publisher_of).items():
        yield from _line(publisher.removeprefix("github.com/"), errors(rows, *quantities))
        groups = grouped(rows, source_of)
        frameworks = Counter(name.partition(" | ")[0] for name in groups)
        if brief or len(groups) == 1:
            continue
        for name, members in groups.items():
            source, _, framework = name.partition(" | ")
            label = within(source, publisher)
            if frameworks[source] > 1:
                label = f"{short(label, LABEL - 20)} {short(framework, 16)}"
            yield from _line(f"  {short(label, LABEL - 2)}", errors(members, *quantities))


def _known_lines(predictions: Sequence[Prediction]) -> Iterator[str]:
    """Yield how near memory is where all settings are known, and whether others are in bands."""
    known = known_rows(predictions)
    found = errors(known, memory_pair)
    if found is not None:
        yield from _line("memory with all settings known", found)
        far = sum(1 for said, real in _pairs(known) if said / real - 1.0 < -UNDER)
        yield f"{far} of them under by more than {100 * UNDER:.0f} %"
    inside = _inside(known, predictions)
    if inside:
        yield f"{sum(inside)} of {len(inside)} other rows have their memory inside of its band"


def _pairs(predictions: Iterable[Prediction]) -> list[tuple[float, float]]:
    return [pair for pair in map(memory_pair, predictions) if pair is not None]


def _inside(known: Sequence[Prediction], predictions: Sequence[Prediction]) -> list[bool]:
    """Return of each row that is not known whether its memory is in its band."""
    taken = set(map(id, known))
    found: list[bool] = []
    for one in predictions:
        pair, band = memory_pair(one), one.memory_band_gb
        if pair is not None and band is not None and id(one) not in taken:
            found.append(band[0] <= pair[1] <= band[1])
    return found


def _fitting_lines(predictions: Sequence[Prediction]) -> Iterator[str]:
    found = fitting(predictions)
    yield f"{found.ran_said} of {found.ran} runs that ran are predicted to fit,"
    yield f"{found.failed_said} of {found.failed} that left no result are predicted not to"


def _refused_lines(predictions: Sequence[Prediction]) -> Iterator[str]:
    for one in predictions:
        if one.status != OK:
            yield f"{one.row.id}: {one.status}: {one.message}"[:80]


def _overruled_lines(predictions: Sequence[Prediction]) -> Iterator[str]:
    """Yield what a cell says that could not be taken as it stands, for the first rows."""
    found = [
        f"{one.row.id}: {note.field} is taken as {note.value}: {note.why}"
        for one in predictions
        for note in one.row.assumed
        if one.row.word(note.field) and note.why != OTHER_ROWS
    ]
    for line in found[:MOST_OVERRULED]:
        yield line[:80]
    if len(found) > MOST_OVERRULED:
        yield f"and {len(found) - MOST_OVERRULED} more cells that are taken as something else"


def _assumed_lines(predictions: Sequence[Prediction]) -> Iterator[str]:
    counts: Counter[str] = Counter()
    for one in predictions:
        counts.update(dict.fromkeys(note.field for note in one.row.assumed).keys())
    if not counts:
        return
    line = "assumed where blank (rows; what and why of each: --json):"
    for name, count in counts.most_common():
        part = f" {name} {count},"
        if len(line) + len(part) > 80:
            yield line
            line = " "
        line += part
    yield line.rstrip(",")


def _summary(predictions: Sequence[Prediction]) -> Mapping[str, object]:
    step = errors(predictions, step_pair, rate_pair)
    memory = errors(predictions, memory_pair)
    return {
        "rows": len(predictions),
        "refused": sum(one.status != OK for one in predictions),
        "step_time": step.to_json() if step else None,
        "memory": memory.to_json() if memory else None,
        "fits": fitting(predictions).to_json(),
    }


def _known(predictions: Sequence[Prediction]) -> Mapping[str, object]:
    known = known_rows(predictions)
    found, inside = errors(known, memory_pair), _inside(known, predictions)
    return {
        "errors": found.to_json() if found else None,
        "others": len(inside),
        "others_inside_band": sum(inside),
    }


def _row_json(one: Prediction) -> dict[str, object]:
    measured = one.case.measured if one.case else None
    return {
        "id": one.row.id,
        "status": one.status,
        "message": one.message,
        "step_time_s": one.step_s,
        "tokens_per_s_per_gpu": one.tokens_per_s,
        "mem_per_gpu_gb": one.memory_gb,
        "mem_kind": measured.memory_kind if measured else "",
        "mem_allocated_gb": one.allocated_gb,
        "mem_driver_gb": one.driver_gb,
        "mem_band_gb": one.memory_band_gb,
        "fits": one.fits,
        "measured_step_time_s": measured.step_s if measured else None,
        "measured_from": measured.how if measured else "",
        "measured_mem_per_gpu_gb": measured.memory_gb if measured else None,
        "assumed": [
            {"field": note.field, "value": note.value, "why": note.why} for note in one.row.assumed
        ],
    }


DECIDE = frozenset(
    {
        *("tp", "pp", "cp", "dp", "ep", "vpp", "sp", "zero_stage", "micro_batch", "global_batch"),
        *("recompute", "flash_attn", "mem_kind", "year", "n_gpus", "seq_len"),
        *("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "head_dim", "vocab", "gated_mlp"),
        *("moe_topk", "moe_ffn", "shared_experts", "params_total", "params_active"),
    }
)
"""Columns that decide memory."""
CERTAIN = (OTHER_ROWS, "of the model by this name")
"""Why a blank has a value that is as good as the row's own."""
RECIPES = re.compile(r"nemo|bridge")
"""Libraries whose recipes differ in dtypes and loss, so that a default tells nothing of a row."""
BALANCED = re.compile(r"forced? balanced?|balanced by force")


def all_settings_known(one: Prediction) -> bool:
    """Return whether all is known that decides the memory of a row's run."""
    case, row = one.case, one.row
    if case is None or one.chosen is None or case.measured.memory_kind != "allocated":
        return False
    guessed = {note.field for note in row.assumed if note.why not in CERTAIN}
    guessed |= {column for column, _ in one.chosen.chosen}
    text = words_of(row)
    if guessed & DECIDE or "inferred:" in text:
        return False
    if case.model.experts and not BALANCED.search(text):
        return False
    if "cuda graph" in text:
        return False
    return _dtypes_known(row, case.program.generation)


def known_rows(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the predictions of rows of which all settings are known."""
    return [one for one in predictions if all_settings_known(one)]


def _dtypes_known(row: Row, generation: str) -> bool:
    """Return whether a row's dtypes and loss are named, or its trainer has one way only."""
    name = row.word("framework").lower()
    if any(key in name for key in BY_NAME):
        return True
    usual = None if RECIPES.search(name) else default_of(row, generation)
    gradients = row.word("gradient_dtype") or (usual.gradient_dtype if usual else "")
    states = row.word("state_dtype") or is_pure(row) or (usual and not row.word("optimizer"))
    return bool(gradients and states and (row.word("loss") or (usual and usual.loss)))
