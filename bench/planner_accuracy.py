"""Predict the step time and memory of published runs, and say how near the predictions are.

    python bench/planner_accuracy.py FILE.csv --out PRED.csv
    python bench/planner_accuracy.py FILE.csv --out PRED.csv --leave-out source

FILE.csv has any of the columns of published tables of runs (model sizes, device, links, degrees,
batch, what was measured); a blank cell is unknown, and takes the framework's default or the best of
the usual values. PRED.csv has `id, step_time_s, tokens_per_s_per_gpu, mem_per_gpu_gb, fits, status`
of every row; status is "ok", or the id of the rule that refused it. After these it has how memory
is meant (`mem_kind`: allocated, reserved, driver), the allocator's and the driver's number, and the
band of the former. A summary goes to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    # Run as a file: modules are found from the repository's root, not from this folder.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.accuracy.groups import LEAVE_OUT
from bench.accuracy.memory_bands import with_memory_bands
from bench.accuracy.predict import Case, Predict, Prediction, predict
from bench.accuracy.published.rows import read_rows
from bench.accuracy.report import summary_text, to_json, write_predictions


def main(arguments: list[str] | None = None) -> int:
    """Write predictions and print their errors; return 2 where the file cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, metavar="FILE.csv", help="published runs")
    parser.add_argument("--out", type=Path, required=True, metavar="PRED.csv", help="predictions")
    parser.add_argument("--brief", action="store_true", help="a line for each publisher only")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.add_argument(
        "--leave-out",
        choices=sorted(LEAVE_OUT),
        help="predict each such group with constants that are fitted anew without it",
    )
    options = parser.parse_args(arguments)
    try:
        rows = read_rows(options.file)
        with options.out.open("a", encoding="utf-8"):
            pass  # That it cannot be written is known before the work, not after it.
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    how = _left_out(options.leave_out) if options.leave_out else None
    predictions = with_memory_bands(predict(rows, how))
    write_predictions(options.out, predictions)
    if options.json:
        print(json.dumps(to_json(predictions), indent=1))
    else:
        print(summary_text(predictions, brief=options.brief))
    return 0


def _left_out(by: str) -> Predict:
    from bench.accuracy.fit import predict_strictly

    def predicted(cases: Sequence[Case]) -> Sequence[Prediction]:
        return predict_strictly(cases, LEAVE_OUT[by])

    return predicted


if __name__ == "__main__":
    sys.exit(main())
