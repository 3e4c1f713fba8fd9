"""One setting of run.toml, and the kinds of values that several of them take."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.config.kinds import Choice, Integer, Kind, Real
from echelon.core.rulebook.mesh import DEGREE_AT_LEAST_ONE

DTYPES = ("fp64", "fp32", "bf16", "fp16")

DEGREE = Integer(rule=DEGREE_AT_LEAST_ONE, maximum=2**20)
COUNT = Integer()
FROM_ZERO = Integer(minimum=0)
POSITIVE = Real(above=True)
FRACTION = Real(below=True, maximum=1.0)
DTYPE = Choice(options=DTYPES)
OFFLOAD = Choice(options=("none", "host", "nvme"))
AT_LEAST_TWO = Integer(minimum=2, maximum=10_000)
LOSS_SCALE = Real(above=True, maximum=2.0**32)
EXPERT_COUNT = Integer(minimum=2, maximum=10_000)
EVERY = Integer(words=("never",))
OPTIONAL_COUNT = Integer(words=("none",))
OPTIONAL_REAL = Real(above=True, words=("none",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Describe one setting; a `path` is relative to the file that sets it."""

    key: str
    kind: Kind
    default: object
    about: str
    path: bool = False

    @property
    def table(self) -> str:
        """Return the dotted name of the table that holds the setting ("" for none)."""
        return self.key.rpartition(".")[0]


def setting(key: str, kind: Kind, default: object, about: str, *, path: bool = False) -> Setting:
    """Return a setting; a default of None means that there is none."""
    return Setting(key=key, kind=kind, default=default, about=about, path=path)
