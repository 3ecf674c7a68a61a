"""Several bands of a weight at once: as many as torch has threads, each of them with one; one where
a GPU does the work."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")
MOST = 16  # each holds a few MB


class Map(Protocol):
    """What `map` is to a function of one argument."""

    def __call__(self, function: Callable[[T], R], items: Iterable[T], /) -> Iterator[R]: ...


@contextmanager
def undivided(device: torch.device) -> Iterator[None]:
    """Leave torch one thread of the CPU where the work is on a GPU: for the little that is not, the
    others would spin and wait most of the time."""
    threads = torch.get_num_threads()
    if device.type == "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def hands(device: torch.device) -> Iterator[Map]:
    """Yield a `map` whose results come in order; what one raises is raised where its turn is."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield map
        return
    torch.set_num_threads(1)  # for the pool's threads too, which begin after it
    try:
        with ThreadPoolExecutor(min(threads, MOST), "lowbit-verify") as pool:
            yield pool.map
    finally:
        torch.set_num_threads(threads)
