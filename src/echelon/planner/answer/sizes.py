# SPDX-License-Identifier: Apache-2.0
"""What `ec.plan` returns of a model alone, on a machine without a GPU that is known: four sizes.

Each is a whole `PlanAnswer`; the page is what `echelon plan MODEL` prints, and is read from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from echelon.core.notebook import NOTEBOOK_VIEWS
from echelon.core.optional import optional_package
from echelon.core.parameters import parameters_text
from echelon.planner.answer.answer import PlanAnswer, plan_row
from echelon.planner.answer.legend import plan_cells, plan_numbers, sign_texts, words_text
from echelon.planner.answer.recommend_text import percent_of_fit
from echelon.planner.answer.search_json import answer_json, recommendation_json
from echelon.planner.answer.search_text import HEADER
from echelon.planner.recommend.recommend import Recommendation
from echelon.planner.view.document import DataTable
from echelon.planner.view.text_layout import WIDTH, data_text, fill_text

if TYPE_CHECKING:
    from pandas import DataFrame  # pyright: ignore # an optional package

_COLUMNS = (
    "tok/s: of a device. MFU: with full attention. GiB: of the fullest rank. mb: sequences of a "
    "microbatch. rec: what runs forward again."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SizesAnswer:
    """Hold what to run of a model on each of four clusters, where nobody named one.

    `sizes["8xh100"]` is the PlanAnswer of one; `print` and a notebook show all of them as a table.
    It stands for no plan: which of them is meant is for you to say.
    """

    found: tuple[Recommendation, ...]
    """What the searches ended with, the smallest cluster first."""
    unknown_gpus: str = ""
    """GPUs of this machine that the catalogue does not have, as ``2 x NVIDIA ...``."""

    @property
    def answers(self) -> Mapping[str, PlanAnswer]:
        """Return the answer of each cluster by its name, the smallest first."""
        return {one.answer.request.cluster.name: PlanAnswer(found=one) for one in self.found}

    def __getitem__(self, cluster: str) -> PlanAnswer:
        """Return the answer of a cluster; KeyError where it is none of these."""
        answers = self.answers
        if cluster not in answers:
            raise KeyError(f"{cluster!r} is none of {', '.join(answers)}")
        return answers[cluster]

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the clusters, the smallest first."""
        yield from self.answers

    def __len__(self) -> int:
        """Return how many clusters there are."""
        return len(self.found)

    def to_json(self) -> dict[str, Any]:
        """Return what `echelon plan MODEL --json` prints of them."""
        return sizes_json(self.found)

    def to_frame(self) -> DataFrame:  # pyright: ignore # unknown where pandas is not installed
        """Return a pandas DataFrame with the recommended plan of each cluster, one a row.

        Its first column is `cluster`; the others are those of `PlanAnswer.to_frame`.
        """
        pandas = cast("Any", optional_package("pandas", extra="frames", purpose="a data frame"))
        rows = [
            {"cluster": name, **plan_row(answer.recommended)}
            for name, answer in self.answers.items()
        ]
        return pandas.DataFrame(rows)

    def __str__(self) -> str:
        """Return the page that `echelon plan MODEL` prints."""
        hint = "cluster={name!r}; any COUNTxDEVICE or a cluster file will do."
        return sizes_text(self.found, self.unknown_gpus, hint).rstrip("\n")

    def __repr__(self) -> str:
        """Return the clusters in one line."""
        model = self.found[0].answer.request.model.name
        return f"<{type(self).__name__} {model} on {', '.join(self)}>"

    def _repr_html_(self) -> str | None:
        """Return the table as a notebook shows it."""
        return NOTEBOOK_VIEWS.html("sizes", self)


def sizes_json(found: Sequence[Recommendation]) -> dict[str, Any]:
    """Return what was found on each cluster as JSON values."""
    return {
        "sizes": [
            {**answer_json(one.answer), "recommended": recommendation_json(one)} for one in found
        ]
    }


def sizes_text(
    found: Sequence[Recommendation], unknown_gpus: str, hint: str, *, columns: int = WIDTH
) -> str:
    """Return what to run on each cluster as a page; no line has more columns than there are.

    `hint` says how one asks for the whole answer of the cluster `{name}`.
    """
    last = found[-1].answer.request.cluster.name
    parts = [
        "\n".join(fill_text(line, columns=columns) for line in sizes_head(found[0], unknown_gpus)),
        data_text(sizes_table(found), columns=columns),
        fill_text(sizes_legend(found), columns=columns),
        fill_text(f"The whole answer: {hint.format(name=last)}", columns=columns),
    ]
    return "\n\n".join(parts) + "\n"


def sizes_head(first: Recommendation, unknown_gpus: str) -> Iterator[str]:
    """Yield what is searched for, and why on these clusters."""
    request = first.answer.request
    numbers = request.mathematics
    here = (
        f"{unknown_gpus} of this machine is not in the catalogue (`echelon calibrate` writes a "
        "file of it)"
        if unknown_gpus
        else "this machine has no GPU"
    )
    yield (
        f"{request.model.name}: {parameters_text(request.model)}, "
        f"{numbers.global_sequences:,} sequences x {numbers.sequence_length:,} tokens a step, "
        f"by {request.trainer}."
    )
    yield (
        f"No cluster is named, and {here}: these are the smallest cluster of "
        f"{request.cluster.device.name} with a plan, and larger ones."
    )


def sizes_table(found: Sequence[Recommendation]) -> DataTable:
    """Return what to run on each cluster as a table, one a row."""
    rows: list[tuple[str, ...]] = []
    for one in found:
        choice, estimate = one.first.ranked.candidate, one.first.ranked.estimate
        rows.append(
            (
                one.answer.request.cluster.name,
                *map(words_text, plan_cells(choice)),
                *plan_numbers(estimate),
                percent_of_fit(one.first.fits),
            )
        )
    return DataTable.of(("cluster", *HEADER, "fits"), rows)


def sizes_legend(found: Sequence[Recommendation]) -> str:
    """Return what the heads and signs of the table mean."""
    cells = [cell for size in found for cell in plan_cells(size.first.ranked.candidate)]
    words = [word for cell in cells for word in cell]
    return " ".join([_COLUMNS, *sign_texts(words)])
