"""Where a run's time goes: seconds of every stage, added up over threads."""

import os
import threading
import time


class _Stage:
    """A stage that runs: written out, since it begins and ends a dozen times for each weight."""

    __slots__ = ("_clock", "_name", "_started")

    def __init__(self, clock: "Clock", name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._clock.add(self._name, time.perf_counter() - self._started)


class Clock:
    """Adds up the seconds of stages; any number of threads may."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    def stage(self, name: str) -> "_Stage":
        """Count the time in the `with` as the stage `name`."""
        return _Stage(self, name)

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def since_start() -> float:
    """Return the seconds since this process began."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), starttime
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
