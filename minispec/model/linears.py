"""How the linear layers of one model are made."""

from __future__ import annotations

from torch import Tensor

from minispec.model.int8 import BlockInt8Linear, OutputInt8Linear
from minispec.model.linear import Linear, Rows, steady_rows


class Linears:
    """Makes the linear layers of one model, all in one way.

    Args:
        deterministic: a row's result shall not depend on the rows beside it.
        quantize: ``int8`` rounds weights to 8 bits (on a CPU activations too), ``none`` keeps them.
    """

    def __init__(self, *, deterministic: bool = False, quantize: str = "none") -> None:
        self._deterministic = deterministic
        self._int8 = quantize == "int8"
        self._rows: dict[tuple[int, int], Rows] = {}

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Args:
        weight, bias: as for ``Linear``.

        Raises:
            ConfigError: see ``steady_rows``.
        """
        linear = self._made(weight, bias)
        if self._deterministic:
            shape = linear.out_features, linear.in_features
            if shape not in self._rows:
                own = linear.steady() if isinstance(linear, BlockInt8Linear) else None
                self._rows[shape] = own or steady_rows(*shape, weight.dtype)
            linear.rows = self._rows[shape]
        return linear

    def _made(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if not self._int8:
            return Linear(weight, bias)
        return OutputInt8Linear(weight, bias) if weight.is_cuda else BlockInt8Linear(weight, bias)
