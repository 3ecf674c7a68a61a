"""Threads that do a run's steps: begun in order, done side by side, retired in order.

A step reads, computes and writes; while one waits for the disk others compute. What depends on
order, a checksum over slices or a scale over a whole weight, waits for its turn: steps begin in
order, so what is waited for has always begun. When one step fails, all that wait are let go.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from lowbitcli.pipeline.clock import Clock

_AHEAD = 4  # steps for each thread that are waiting or not retired yet


class AbandonedError(Exception):
    """Another step failed, and this one need not be finished."""


@dataclass(frozen=True)
class Step:
    """A piece of work for one thread, the source's bytes that it deals with, and what `retire` is
    told of it."""

    work: Callable[[], None]
    size: int = 0
    name: str = ""
    completes: tuple[object, ...] = field(default=())


class Crew:
    """`threads` workers for one device; use it in a `with`."""

    def __init__(self, threads: int, device: torch.device) -> None:
        self.threads = threads
        self.device = device
        self.clock = Clock()
        self._changed = threading.Condition()
        self._failed = False
        self._local = threading.local()
        self._before = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(threads, "lowbit", self._begin)

    def run(
        self,
        steps: Iterable[Step],
        retire: Callable[[Step], None],
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Do all steps; return False where it was stopped before the last one had begun.

        Raises:
            Exception: what the first step that failed, in order, raised.
        """
        under_way: deque[tuple[Step, Future[None]]] = deque()
        waiting = iter(steps)
        complete = True
        try:
            while True:
                if complete and is_stopped():
                    complete, waiting = False, iter(())
                    while under_way and under_way[-1][1].cancel():  # it had not begun
                        under_way.pop()
                step = next(waiting, None) if len(under_way) < _AHEAD * self.threads else None
                if step is not None:
                    under_way.append((step, self._pool.submit(self._do, step)))
                elif not under_way:
                    return complete
                while under_way and (step is None or under_way[0][1].done()):
                    oldest, future = under_way.popleft()
                    future.result()
                    retire(oldest)
                    if step is None:
                        break
        except BaseException as error:
            self._fail()
            self._pool.shutdown(cancel_futures=True)
            raise self._cause(error, under_way) from None

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait in a step until `condition` holds; what makes it hold calls `tell`.

        Raises:
            AbandonedError: another step failed.
        """
        with self.clock.stage("wait"), self._changed:
            self._changed.wait_for(lambda: self._failed or condition())
            if self._failed:
                raise AbandonedError

    def tell(self, change: Callable[[], None]) -> None:
        """Change something that other steps may be waiting for."""
        with self._changed:
            change()
            self._changed.notify_all()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._fail()
        self._pool.shutdown(cancel_futures=True)
        # A worker's own number is also the default of threads that are yet to come.
        torch.set_num_threads(self._before)

    def _begin(self) -> None:
        """Prepare a thread: on the CPU it is one of many, on a GPU it has a stream of its own."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            self._local.stream = torch.cuda.Stream(self.device)
        else:
            torch.set_num_threads(1)

    def _do(self, step: Step) -> None:
        try:
            if self.device.type == "cuda":
                with torch.cuda.stream(self._local.stream):
                    step.work()
                self._local.stream.synchronize()
            else:
                step.work()
        except BaseException:
            self._fail()
            raise

    def _fail(self) -> None:
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    @staticmethod
    def _cause(
        error: BaseException, under_way: Iterable[tuple[Step, Future[None]]]
    ) -> BaseException:
        """Return what went wrong first: a step that was let go only says that another failed."""
        if not isinstance(error, AbandonedError):
            return error
        for _, future in under_way:
            if not future.cancelled() and future.done():
                found = future.exception()
                if found is not None and not isinstance(found, AbandonedError):
                    return found
        return error


class Order:
    """Lets steps do something one after the other, by number from 0."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._next = 0

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Wait for the turn of `number`, and end it; where it fails, it does not end."""
        self._crew.wait_for(lambda: self._next == number)
        yield

        def end() -> None:
            self._next = number + 1

        self._crew.tell(end)
