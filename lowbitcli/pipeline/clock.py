"""Where a run's time goes: seconds of every stage, added up over threads."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up the seconds of stages; any number of threads may."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time in the `with` as the stage `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def since_start() -> float:
    """Return the seconds since this process began."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), starttime
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
