"""Matrix products whose rows do not know how many they are.

Rules of this file: a library chooses its summation by the shape of a product, so products run in tiles of fixed numbers
of rows. Whether a row's bits then depend on its place, its neighbours or the tile's size is not assumed but tried out
on random rows when the model is loaded; a tile of one row is independent by construction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .cuda import Cuda
from .torch_model import alike_in_company

Operand = tuple[torch.Tensor, torch.dtype]  # a weight [N, K], and the type of its products


class TiledProducts:
    """Products of rows, whose number is a multiple of ``base``, with weights; ``tiles`` are the sizes in use."""

    def __init__(self, cuda: Cuda, operands: Sequence[Operand], *, bases: Sequence[int], larger: Sequence[int]) -> None:
        """Tries out the ``operands`` that will be used. The first of ``bases`` in which all rows are independent is the
        base, else 1; those of ``larger`` that give its bits are used too."""
        self._cuda = cuda
        self.base = next((rows for rows in bases if all(self._independent(rows, o) for o in operands)), 1)
        self.tiles = [self.base]
        for rows in sorted(larger):
            if rows % self.base == 0 and all(self._agrees(rows, o) for o in operands):
                self.tiles.append(rows)

    def product(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """out[M, N] = x[M, K] weight[N, K]^T; M is a multiple of the base."""
        for begin, end in self._ranges(len(x)):
            self._cuda.product(x[begin:end], weight, out[begin:end])

    def _ranges(self, rows: int) -> Iterator[tuple[int, int]]:
        """Largest tiles first."""
        begin = 0
        for tile in reversed(self.tiles):
            while rows - begin >= tile:
                yield begin, begin + tile
                begin += tile

    def _once(self, x: torch.Tensor, operand: Operand) -> torch.Tensor:
        weight, dtype = operand
        out: torch.Tensor = self._cuda.zeros((len(x), len(weight)), dtype)
        self._cuda.product(x, weight, out)
        return out

    def _random(self, rows: int, operand: Operand) -> torch.Tensor:
        weight = operand[0]
        values = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(rows))
        return values.to(weight.device, weight.dtype)

    def _independent(self, rows: int, operand: Operand) -> bool:
        x = self._random(rows, operand)
        return alike_in_company(lambda picks: self._once(x[picks], operand), rows, x.device)

    def _agrees(self, rows: int, operand: Operand) -> bool:
        """Whether a tile of so many rows gives the bits of tiles of the base."""
        x = self._random(rows, operand)
        parts = [self._once(x[begin : begin + self.base], operand) for begin in range(0, rows, self.base)]
        return torch.equal(self._once(x, operand), torch.cat(parts))
