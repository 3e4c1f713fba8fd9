"""A gradient store without buckets: it keeps what kernels give it, as they give it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from echelon.parallel.storage.gradients import GradientStore, Reduction


class RecordedGradients(GradientStore):
    """Note what each parameter is given; products and rows are added up in float64, when asked."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        super().__init__(Reduction())
        self._noted: dict[int, list[tuple[bool, Callable[[], torch.Tensor]]]] = {}

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the one gradient that a parameter was given, maybe in parts."""
        *parts, last = self._noted[id(parameter)]
        assert all(more for more, _ in parts)
        assert not last[0]
        if not parts:
            return last[1]()
        return torch.stack([part() for _, part in (*parts, last)]).sum(0)

    def takes_parts(self, parameter: torch.Tensor) -> bool:
        """Return True: parts are added up in float64."""
        return True

    def trains(self, parameter: torch.Tensor) -> bool:
        """Return True: each parameter takes a gradient."""
        return True

    def matrices(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return None: matrices do not lie side by side."""
        return None

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Note a gradient."""
        kept = gradient.clone()
        self._note(parameter, lambda: kept)

    def add_rows(
        self, parameter: torch.Tensor, rows_N: torch.Tensor, gradient_ND: torch.Tensor
    ) -> None:
        """Note a gradient of rows."""
        kept_ND = gradient_ND.clone()

        def summed() -> torch.Tensor:
            whole = torch.zeros(parameter.shape, dtype=torch.float64)
            return whole.index_add_(0, rows_N, kept_ND.double())

        self._note(parameter, summed)

    def add_matmul(
        self,
        parameters: Sequence[torch.Tensor],
        dy_NO: torch.Tensor,
        x_NI: torch.Tensor,
        *,
        more: bool = False,
    ) -> None:
        """Note dy^T x of each parameter."""
        kept_NI = x_NI.clone()
        parts = dy_NO.clone().split([parameter.shape[0] for parameter in parameters], dim=1)
        for parameter, part in zip(parameters, parts, strict=True):
            self._note(parameter, lambda part=part: part.double().t() @ kept_NI.double(), more=more)

    def _note(
        self, parameter: torch.Tensor, gradient: Callable[[], torch.Tensor], *, more: bool = False
    ) -> None:
        self._noted.setdefault(id(parameter), []).append((more, gradient))
