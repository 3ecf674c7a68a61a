"""Watch the matrices of a model: what is multiplied by them, squared and summed over the tokens.

    sum_j = sum over t of x_tj^2        fp64; rows are added as a tree, upper half onto lower

Every multiplication goes through a few functions of torch, so it is these that are watched, and a
matrix is known by where it lies in memory: layers, stacked experts of which one is taken at a time,
and stacks that are multiplied whole.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

ROWS = 512  # of x at once
LINEAR = (functional.linear,)
PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
STACKED = (torch.bmm, Tensor.bmm, torch.baddbmm)
ADDED = (torch.addmm, torch.baddbmm)  # what is added comes first


def squares(x: Tensor) -> Tensor:
    """Return fp64 `[C]`, the sums of squares of the columns of `x [T, C]`, in a fixed order."""
    total = torch.zeros(x.shape[-1], dtype=torch.float64, device=x.device)
    for start in range(0, len(x), ROWS):
        part = x[start : start + ROWS].double().square()
        high = 1 << max(0, len(part) - 1).bit_length()
        part = functional.pad(part, (0, 0, 0, high - len(part)))
        while high > 1:
            high //= 2
            part = part[:high] + part[high:]
        total += part[0]
    return total


@dataclass
class Seen:
    """What was multiplied by a tensor of a model: `total [E, C]` and the tokens of each expert."""

    total: Tensor
    tokens: Tensor

    @property
    def mean(self) -> Tensor:
        """Return the mean square of each column, `[E, C]`; an expert that saw no token, or nothing
        but zeros, has the mean of the others'."""
        found = self.total / self.tokens.clamp(min=1).unsqueeze(-1)
        empty = (self.total == 0).all(-1)
        if bool(empty.any()) and not bool(empty.all()):
            found[empty] = found[~empty].mean(0)
        return found


class Watch(TorchFunctionMode):
    """Sums of squares of what is multiplied by the tensors that `watched` names by their memory.

    `closed` are tensors that have been shown all they should be.
    """

    def __init__(self) -> None:
        super().__init__()
        self.watched: dict[int, tuple[str, Tensor]] = {}
        self.seen: dict[str, Seen] = {}
        self.closed: set[str] = set()

    def take(self, named: Mapping[str, Tensor]) -> None:
        """Watch the matrices and stacks among `named`."""
        for name, tensor in named.items():
            if tensor.dim() in (2, 3) and tensor.device.type != "meta":
                self.watched.setdefault(tensor.untyped_storage().data_ptr(), (name, tensor))

    def leave(self, named: Mapping[str, Tensor]) -> None:
        """Watch these no more: their memory will be another's."""
        for tensor in named.values():
            if tensor.device.type != "meta":
                self.watched.pop(tensor.untyped_storage().data_ptr(), None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = 1 if func in ADDED else 0
        if func in LINEAR or func in PRODUCTS or func in STACKED or func in ADDED:
            given = [*args, *(kwargs or {}).values()][first : first + 2]
            if len(given) == 2 and all(isinstance(x, Tensor) for x in given):
                self._look(given[0].detach(), given[1].detach(), func not in LINEAR)
        return func(*args, **(kwargs or {}))

    def _look(self, x: Tensor, w: Tensor, turned: bool) -> None:
        """Add what `w` is multiplied by; of a `turned` one inputs are the last axis but one."""
        if w.device.type == "meta" or w.dim() < 2 or not w.numel():
            return
        name, whole = self.watched.get(w.untyped_storage().data_ptr(), ("", w))
        if not name or name in self.closed:
            return
        columns = w.shape[-2] if turned else w.shape[-1]
        if x.shape[-1] != columns:
            return
        count = whole.shape[0] if whole.dim() == 3 else 1
        if w.dim() == 3:
            if x.dim() == 3 and len(x) == count:
                for expert in range(count):
                    self._add(name, expert, count, x[expert])
            return
        expert = w.storage_offset() // math.prod(whole.shape[-2:]) if count > 1 else 0
        self._add(name, expert, count, x.reshape(-1, columns))

    def _add(self, name: str, expert: int, count: int, x: Tensor) -> None:
        if name not in self.seen:
            total = torch.zeros(count, x.shape[-1], dtype=torch.float64)
            self.seen[name] = Seen(total, torch.zeros(count, dtype=torch.float64))
        seen = self.seen[name]
        seen.total[expert] += squares(x).cpu()
        seen.tokens[expert] += len(x)
