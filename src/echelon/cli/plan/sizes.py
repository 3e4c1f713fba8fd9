"""`echelon plan MODEL` without a cluster: the GPUs of this machine, else four sizes to choose from.

The sizes are of the first of the common devices (`presets/common_devices.toml`): the smallest
cluster that has a plan, and three larger ones, each the next power of two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from echelon.cli.flags import bad_argument
from echelon.cli.output import note, print_json, spinner
from echelon.core.errors import ConfigError
from echelon.planner.view.text_layout import WIDTH, fill_text, table

if TYPE_CHECKING:
    from echelon.cli.plan.search import SearchOutputOptions
    from echelon.planner.search.request import SearchAim, SearchRequest
    from echelon.planner.search.search import SearchResult

NUM_SIZES = 4  # clusters
_LAYOUT_OR_CLUSTER = ("cluster.", "mesh.", "zero.", "pipeline.", "recompute.", "context.")
_HEADER = ("cluster", "mesh", "zero", "mb", "rec", "step s", "tok/s", "MFU", "GB")
_COLUMNS = (
    "tok/s: of a device. GB: of the fullest rank. mb: sequences of a microbatch. rec: blocks that "
    "run forward again."
)


def asks_what_exists(run: str, settings: Sequence[str]) -> bool:
    """Return whether a model is named, and nothing of its devices or its layout."""
    from echelon.planner.search.request import names_a_model

    if not names_a_model(run):
        return False
    return not any(text.strip().startswith(_LAYOUT_OR_CLUSTER) for text in settings)


def cluster_of_this_machine() -> str | None:
    """Return the cluster that the GPUs of this machine are; None without any that is catalogued.

    A machine with several kinds is the one that it has most of.
    """
    from echelon.cli.doctor import find_gpus
    from echelon.config.cluster.devices import device_preset_from_name
    from echelon.config.cluster.settings import named_cluster
    from echelon.core.cluster import Cluster

    devices = cast("list[dict[str, Any]]", find_gpus().facts["devices"])
    kinds = Counter((str(one["name"]), int(one["memory_bytes"])) for one in devices)
    for (name, memory), count in kinds.most_common(1):
        preset = device_preset_from_name(name, memory)
        if preset is None:
            note(
                f"{count} x {name} of this machine is not in the catalogue: `echelon calibrate` "
                "writes a file for --cluster"
            )
            return None
        for fewer in range(count, 0, -1):
            if isinstance(named_cluster(f"{fewer}x{preset.name}", ""), Cluster):
                return f"{fewer}x{preset.name}"
    return None


def show_sizes(
    model: str,
    wanted: SearchAim,
    shown: SearchOutputOptions,
    *,
    settings: Sequence[str],
    pins: Sequence[str],
    columns: int,
) -> int:
    """Print the best plan on each of four clusters; return the exit code, 1 without any plan."""
    _require_no_plan_flags(shown)
    with spinner("searching on four sizes", shown=not shown.json):
        answers = four_sizes(model, wanted, settings=settings, pins=pins)
    if shown.json:
        from echelon.planner.answer.search_json import answer_json

        print_json("plan", {"sizes": [answer_json(one) for one in answers]})
    elif answers:
        print(sizes_text(answers, columns=columns), end="")
    if not answers:
        note("no cluster of common devices has a plan: try shorter sequences, or fewer pins")
    return 0 if answers else 1


def four_sizes(
    model: str, wanted: SearchAim, *, settings: Sequence[str], pins: Sequence[str]
) -> list[SearchResult]:
    """Return the answers on the smallest cluster of a common device that has one, and on larger."""
    from echelon.config.cluster.devices import common_devices
    from echelon.config.cluster.settings import smallest_cluster
    from echelon.planner.search.request import make_request
    from echelon.planner.search.search import search
    from echelon.planner.search.smallest import smallest_that_fits

    def on(cluster: str) -> SearchRequest:
        aim = replace(wanted, top=1)
        return make_request(model, cluster=cluster, settings=settings, pins=pins, aim=aim)

    first = f"1x{common_devices()[0]}"
    found = smallest_that_fits(on(first))
    if found is None:
        return []
    count, names = found.num_devices, [found.name]
    while len(names) < NUM_SIZES:
        count = 1 << count.bit_length()
        names.append(smallest_cluster(first, count))
    answers = [search(on(name)) for name in names]
    return [one for one in answers if one.best is not None]


def sizes_text(answers: Sequence[SearchResult], *, columns: int = WIDTH) -> str:
    """Return the best plans on clusters as a page; no line has more columns than there are."""
    from echelon.core.parameters import num_parameters
    from echelon.core.units import short_count
    from echelon.planner.answer.legend import mesh_text, recompute_text, sign_texts

    rows: list[tuple[str, ...]] = []
    choices = [answer.first.candidate for answer in answers]
    for answer, choice in zip(answers, choices, strict=True):
        estimate = answer.first.estimate
        rows.append(
            (
                answer.request.cluster.name,
                mesh_text(choice),
                str(choice.zero) + "+h" * choice.offload,
                str(choice.microbatch),
                recompute_text(choice),
                f"{estimate.step_s:.4g}",
                f"{estimate.tokens_per_s_per_device:.0f}",
                f"{100 * estimate.mfu:.1f}",
                f"{estimate.bytes_held / 1e9:.1f}",
            )
        )
    request = answers[0].request
    numbers = request.mathematics
    head = [
        f"{request.model.name}: {short_count(num_parameters(request.model))} parameters, "
        f"{numbers.global_sequences:,} sequences x {numbers.sequence_length:,} tokens a step.",
        "No cluster is named, and this machine has no GPU that is known: these are the smallest "
        f"cluster of {request.cluster.device.name} with a plan, and larger ones.",
    ]
    last = (
        f"The whole answer: --cluster {answers[-1].request.cluster.name}; any COUNTxDEVICE or a "
        "cluster file will do."
    )
    parts = [
        "\n".join(fill_text(line, columns=columns) for line in head),
        table(_HEADER, rows, columns),
        fill_text(" ".join([_COLUMNS, *sign_texts(choices)]), columns=columns),
        fill_text(last, columns=columns),
    ]
    return "\n\n".join(parts) + "\n"


def _require_no_plan_flags(shown: SearchOutputOptions) -> None:
    """Refuse what is about one plan, where there are four."""
    flags = {
        "--out": shown.output is not None,
        "--figures": shown.figures is not None,
        "--why": shown.why,
        "--objective front": shown.front,
    }
    if given := [flag for flag, is_given in flags.items() if is_given]:
        problem: ConfigError = bad_argument(
            f"{' and '.join(given)} is about the plans of one cluster, none is named, and this "
            "machine has no GPU that is known",
            "--cluster 8xh100",
        )
        raise problem
