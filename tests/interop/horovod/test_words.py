"""The words of a horovodrun command: variables, flags of the launcher, flags of the script."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.errors import ConfigError
from echelon.interop.horovod.words import parse_horovod

HERE = Path("run.sh")


def test_short_flags_are_the_long_ones_and_python_is_none() -> None:
    text = "HOROVOD_LOG=x horovodrun -np 4 -H a:2,b:2 -p 22 --verbose python3.11 -u t.py --lr 1e-3"
    assert parse_horovod(HERE, text) == {
        "HOROVOD_LOG": "x",
        "--num-proc": 4,
        "--hosts": "a:2,b:2",
        "--ssh-port": 22,
        "--verbose": True,
        "--lr": 0.001,
    }


def test_values_may_follow_an_equals_sign_be_several_or_negative() -> None:
    text = "horovodrun --num_proc=2 --blacklist-cooldown-range 60 300 python t.py --shift -3"
    assert parse_horovod(HERE, text) == {
        "--num-proc": 2,
        "--blacklist-cooldown-range": [60, 300],
        "--shift": -3,
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("horovodrun -np 2 -np 4 python t.py", "has --num-proc twice"),
        ("horovodrun -np 2 python t.py --num-proc 3", "has --num-proc twice"),
        ("srun horovodrun -np 2 python t.py", "has 'srun'"),
        ("horovodrun python t.py", "holds no command"),
        ("horovodrun 4 -np 2 python t.py", "'4' in front of every flag"),
        ("horovodrun -np '2", "is no command"),
    ],
)
def test_what_is_no_such_command_is_told(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_horovod(HERE, text)
    assert caught.value.rules == ("import-syntax",)
    assert said in caught.value.problems[0].message
