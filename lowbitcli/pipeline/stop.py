"""SIGINT and SIGTERM as a question that a run asks between two steps, instead of an exception
anywhere.

The first signal lets what is in flight be finished; the second one is what it was before.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from lowbitcli.errors import StoppedError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Later:
    """Signals wait for the end of this `with`, and then do what they do; a second one waits for
    nothing. In the main thread only."""

    def __init__(self) -> None:
        self._came: tuple[int, FrameType | None] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Later":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        before = dict(self._before)
        _restore(self._before)
        if self._came is not None:
            _answer(before, *self._came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came is None:
            self._came = number, frame
            return
        self._came, before = None, dict(self._before)
        _restore(self._before)
        _answer(before, number, frame)


class Stop:
    """Whether somebody wants this run to end; use it in a `with`, in the main thread for effect."""

    def __init__(self) -> None:
        self.number = 0  # the signal that came
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.number != 0

    def error(self, done: int, total: int, *, kept: bool) -> StoppedError:
        """Return the error that says so, and how the run goes on."""
        word = "terminated" if self.number == signal.SIGTERM else "interrupted"
        hint = f"run again to continue ({done}/{total})" if kept else ""
        return StoppedError(self.number, word, hint=hint)

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _restore(self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number = number
            return
        handler = self._before.get(number)
        _restore(self._before)
        if callable(handler):
            handler(number, frame)
        raise KeyboardInterrupt


def _restore(before: dict[int, Any]) -> None:
    while before:
        number, handler = before.popitem()
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _answer(before: dict[int, Any], number: int, frame: FrameType | None) -> None:
    """Do what a signal does elsewhere."""
    handler = before.get(number)
    if callable(handler):
        handler(number, frame)
    elif handler != signal.SIG_IGN:
        signal.raise_signal(number)
