"""The bench of the planner counts what a search counts, and calls calculon as its search does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.planner_speed import __main__ as command
from bench.planner_speed.__main__ import Case, computed_per_s, measure, table
from bench.planner_speed.calculon import calculon_plans_per_s

CASE = Case(model="nano", cluster="8xh100", limit_s=1.0)
FAKE = """
import json
class Llm:
    class Application:
        def __init__(self, entries): self.hidden, self.attn_heads, self.num_blocks = 8, 2, 4
    get_all_tensor_parallelisms = staticmethod(lambda procs, hidden, heads: [1, 2])
    get_all_pipeline_parallelisms = staticmethod(lambda procs, tp, blocks: [1, 4])
    get_data_parallelism = staticmethod(lambda procs, tp, pp: procs // (tp * pp))
    get_valid_pipeline_interleavings = staticmethod(lambda blocks, pp: [1])
class System:
    def __init__(self, entries): self.entries = entries
"""
SEARCH = """
class OptimalExecution:
    get_batch_size = staticmethod(lambda dp, most: most // dp * dp)
    @staticmethod
    def search(debug, top_n, layers, num_procs, max_batch_size, datatype, app, syst, tp, pp, dp,
               ppint, batch_size, activation_recompute, optimizer_sharding, tensor_par_comm_type,
               mbs_break):
        assert tp * pp * dp == num_procs and batch_size % dp == 0
        return [], 10, 1, 9, tp, pp
"""


def test_a_case_is_searched_and_its_plans_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ROUNDS", 1)
    monkeypatch.setattr(command, "COMPUTED", 2000)
    measured = measure(CASE)
    assert measured.seen >= measured.computed > 0
    assert measured.cpu_s > 0.0
    assert measured.row()[0] == "nano on 8xh100"
    assert computed_per_s(CASE) > 0.0


def test_a_table_is_markdown() -> None:
    assert table(("a", "b"), [("1", "2")]).splitlines() == [
        "| a | b |",
        "| --- | --- |",
        "| 1 | 2 |",
    ]


def test_calculon_is_measured_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "calculon.llm", None)
    assert calculon_plans_per_s(0.0) is None
    monkeypatch.delitem(sys.modules, "calculon.llm")
    package = tmp_path / "calculon" / "llm"
    package.mkdir(parents=True)
    (tmp_path / "calculon" / "__init__.py").write_text("")
    (package / "__init__.py").write_text(FAKE)
    (package / "optimal_execution.py").write_text(SEARCH)
    for folder, name in (("models", "gpt3-175B.json"), ("systems", "a100_80g.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(json.dumps({}))
    monkeypatch.syspath_prepend(str(tmp_path))
    rate = calculon_plans_per_s(0.0)
    for name in [name for name in sys.modules if name.startswith("calculon")]:
        monkeypatch.delitem(sys.modules, name)
    assert rate is not None
    assert rate > 0.0
