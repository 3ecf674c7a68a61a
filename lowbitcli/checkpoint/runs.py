"""Neighbours in a file: bytes that follow each other are read, and written, by one call.

A call costs some 10 us wherever its bytes are, as much as copying 100 kB does; tensors of a few kB
that lie side by side are many calls or one.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import TypeVar

_VECTOR = 1024  # buffers of one call: IOV_MAX of Linux

T = TypeVar("T")
Span = tuple[int, int, T]  # first byte, end, and what it is for


def neighbours(spans: Iterable[Span[T]], most: int) -> Iterator[list[Span[T]]]:
    """Yield runs of spans of one file that follow each other, in order; a run has at most `most`
    bytes, or one span."""
    run: list[Span[T]] = []
    for span in sorted(spans, key=itemgetter(0)):
        if run and (span[0] != run[-1][1] or span[1] - run[0][0] > most):
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def fill(fd: int, offset: int, buffers: Sequence[memoryview]) -> None:
    """Fill buffers, one after the other, with the bytes of a file from `offset` on.

    Raises:
        EOFError: it ends before.
        OSError: it cannot be read.
    """
    left = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
    while left:
        count = os.preadv(fd, left[:_VECTOR], offset)
        if not count:
            raise EOFError
        offset += count
        left = _after(left, count)


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of buffers whose first `count` bytes are filled."""
    for number, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[number + 1 :]]
        count -= len(buffer)
    return []
