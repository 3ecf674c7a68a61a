"""How far a run is, on stderr: a bar on a terminal, a line each ten seconds elsewhere."""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from rich import progress as bars
from rich.console import Console
from rich.table import Column

from lowbitcli.console import duration, size
from lowbitcli.tensors import safe

LINE_EVERY = 10.0  # seconds between two lines where there is no terminal

Progress = Callable[[int, int, str], None]  # done bytes, total bytes, what is being worked on


def show_progress(doing: str, *, quiet: bool = False) -> AbstractContextManager[Progress | None]:
    """Return a context whose value shows how far a run is: a bar on a terminal, lines elsewhere."""
    if quiet:
        return nullcontext()
    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        return _Bar(doing, console)
    return _Lines(doing)


class _Bar:
    """One line at the foot of the terminal, gone when the run ends."""

    def __init__(self, doing: str, console: Console) -> None:
        name = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self._bar = bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(bar_width=20),
            bars.TextColumn("{task.fields[sizes]}", markup=False),
            bars.TextColumn("{task.fields[rate]}", markup=False),
            bars.TimeRemainingColumn(compact=True),
            bars.TextColumn("{task.fields[what]}", markup=False, table_column=name),
            console=console,
            transient=True,
            expand=True,
        )
        self._task = self._bar.add_task(doing, total=None, sizes="", rate="", what="")
        self._began = time.monotonic()

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int, what: str) -> None:
        seconds = time.monotonic() - self._began
        self._bar.update(
            self._task,
            completed=done,
            total=total,
            sizes=f"{size(done)} of {size(total)}",
            rate=_rate(done, seconds),
            what=safe(what),
        )


class _Lines:
    """A plain line each ten seconds, for logs; none for a run that is shorter."""

    def __init__(self, doing: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._doing, self._clock = doing, clock
        self._began = self._last = clock()
        self._lock = threading.Lock()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, done: int, total: int, what: str) -> None:
        with self._lock:
            now = self._clock()
            if now - self._last < LINE_EVERY:
                return
            self._last = now
            seconds = now - self._began
            left = duration(seconds * (total - done) / done) if done else "unknown time"
            sys.stderr.write(
                f"{self._doing}: {size(done)} of {size(total)}, {_rate(done, seconds)}, "
                f"{left} left: {safe(what)}\n"
            )
            sys.stderr.flush()


def _rate(done: float, seconds: float) -> str:
    return f"{done / seconds / 1e9:.2f} GB/s" if seconds > 0 else "- GB/s"
