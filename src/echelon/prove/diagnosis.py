"""What a diagnosis says: the first wrong thing, where it is, the factor, the axis it points to."""

from __future__ import annotations

from dataclasses import dataclass

ROUNDING = "right but for rounding"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Name what an error looks like.

    `factor` is a word ("2", "1/dp", "token ratio", "sign", "zero", "missing sum", ...), `value`
    the number behind it where there is one, `axis` the axis that it points to ("" for none),
    `says` a sentence for people, `residual` what the explanation leaves unexplained, relative.
    """

    factor: str
    says: str
    axis: str = ""
    value: float | None = None
    residual: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Name the first wrong thing of a failed proof; `tensor` is canonical, or "" for a number."""

    rule: str
    step: int
    tensor: str
    where: str
    factor: str
    axis: str
    value: float | None
    says: str
    residual: float
    ranks: tuple[int, ...]
    num_wrong: int
    num_compared: int

    def sentence(self) -> str:
        """Return the diagnosis as one sentence."""
        axis = f" [axis {self.axis}]" if self.axis else ""
        place = f"{self.tensor} ({self.where})" if self.where else self.tensor
        return f"first wrong: {place}: {self.says}{axis}"
