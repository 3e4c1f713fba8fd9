"""What an error says of where a value came from is what the user typed, or the line of a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from echelon.cli.main import main


@pytest.mark.parametrize(
    ("typed", "origin"),
    [
        ("plan nano --set mesh.tp=5", "--set mesh.tp=5, preset nano"),
        ("plan llama3-8b --cluster 8xh10", "--cluster 8xh10"),
        ("plan llama3-8b --cluster 8xh100 --set mesh.tp=0", "--set mesh.tp=0"),
        ("plan llama3-8b --cluster 8xh100 --pin mesh.tp=0", "--pin mesh.tp=0"),
        ("plan llama3-8b --cluster 8xh100 --set mesh.tp=2 --pin tp=4", "--pin tp=4"),
        ("plan llama3-8b --cluster 8xh100 --set mesh.tp=7", "--set mesh.tp=7"),
        (
            "plan llama3-8b --cluster 8xh100 --trainer torchtitan --set context.kind=ulysses",
            "--set context.kind=ulysses, --trainer torchtitan",
        ),
        ("plan llama3-8b --cluster 8xh100 --objective cost", "--objective cost"),
        ("plan llama3-8b --tensor 8", "echelon plan llama3-8b --tensor 8"),
        ("plan llama3-8b --cluster 8xh100 --price 0", "--price 0"),
        ("explain zero --dp 0", "--dp 0"),
        ("explain zero --dp 4 --memory-bytes 24gigs", "--memory-bytes 24gigs"),
        ("schedule show auto -p 4 -m 0", "--microbatches 0"),
        ("schedule show 1f1b -p 4", "echelon schedule show 1f1b -p 4"),
        ("export absent.json --to megatron", "absent.json"),
        ("import absent.json", "absent.json"),
        ("plam nano", "echelon plam nano"),
    ],
)
def test_an_error_shows_what_was_typed(
    typed: str,
    origin: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(typed.split()) == 2
    error = capsys.readouterr().err
    origins = re.findall(r"^  set by: (.*?)      ", error, re.MULTILINE)
    assert origin in [one for text in origins for one in (text, *text.split(" (")[:1])], error
    assert not re.search("set by: (the |default of)", error)


def test_no_origin_is_a_word_of_ours() -> None:
    """What sets a value is a flag, a file with its line, a preset or a variable: not "the plan"."""
    sources = Path(__file__).parents[2] / "src" / "echelon"
    vague = re.compile(
        r"set_by=\"(the |default of|command)|source=\"(the (search|plan|command)|default of)"
    )
    found = [file for file in sources.rglob("*.py") if vague.search(file.read_text("utf-8"))]
    assert found == []
