"""What a search cannot choose around is refused by a rule, typed or in a run file."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.errors import ConfigError
from echelon.planner.search.request import make_request


@pytest.mark.parametrize(
    ("setting", "works"),
    [
        ("local_sgd.every = 4", "local_sgd.every = 0"),
        ("servers.count = 2", "servers.count = 0"),
        ('servers.updates = "asynchronous"', 'servers.updates = "synchronous"'),
    ],
)
def test_what_another_number_of_ranks_would_change(
    setting: str, works: str, tmp_path: Path
) -> None:
    run, (key, value) = tmp_path / "run.toml", setting.split(" = ")
    table, _, name = key.partition(".")
    run.write_text(f'extends = "nano"\n[{table}]\n{name} = {value}\n')
    for model, typed in (("nano", [setting.replace(" ", "").replace('"', "")]), (run, [])):
        with pytest.raises(ConfigError) as caught:
            make_request(model, cluster="8xh100", settings=typed)
        (problem,) = caught.value.problems
        assert (problem.rule, problem.key) == ("search-splits-one-training", key)
        assert problem.message.startswith(f"{setting}, and ")
        assert problem.suggestions[0] == works
        assert problem.set_by
    run.write_text(f'extends = "nano"\n[{table}]\n{works.partition(".")[2]}\n')
    assert make_request(run, cluster="8xh100").cluster.name == "8xh100"
