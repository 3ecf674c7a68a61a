"""Cases spread over the machine's cores: a worker is forked for each, with a folder of its own."""

import os
import pickle
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST = 4  # workers


def spread(
    case: Callable[[Item, Path], Result], items: Iterable[Item], folder: Path
) -> list[Result]:
    """Return what `case` returns for each item, given an empty folder below `folder`.

    The folder is emptied after each case. The first case that fails fails the test.
    """
    listed = list(items)
    count = max(1, min(MOST, len(os.sched_getaffinity(0)), len(listed)))
    workers = []
    for number in range(count):
        place = Path(tempfile.mkdtemp(prefix=f"worker{number}-", dir=folder))
        told = place.with_suffix(".told")
        pid = os.fork()
        if not pid:
            code = 1
            try:
                told.write_bytes(pickle.dumps(_stripe(case, listed[number::count], place)))
                code = 0
            except BaseException:
                told.write_text(traceback.format_exc())
            finally:
                os._exit(code)
        workers.append((pid, told))
    ended = [(os.waitpid(pid, 0)[1], told) for pid, told in workers]
    failures = [told.read_text() if told.exists() else f"{s}" for s, told in ended if s]
    assert not failures, "\n".join(failures)
    results: list[Any] = [None] * len(listed)
    for number, (_, told) in enumerate(ended):
        results[number::count] = pickle.loads(told.read_bytes())
    return results


def _stripe(case: Callable[[Item, Path], Result], items: list[Item], place: Path) -> list[Result]:
    results = []
    for item in items:
        inner = place / "place"
        inner.mkdir()
        results.append(case(item, inner))
        shutil.rmtree(inner)
    return results
