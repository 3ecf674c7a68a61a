"""Ask the system to read a source while the program is still starting.

Importing a tensor library takes seconds in which a disk could have read gigabytes. Nothing is
decided by what is found here, and whatever goes wrong is left for the reader to say.
"""

import contextlib
import os
import threading
from pathlib import Path

from lowbitcli.checkpoint.directory import PIPELINE, components, inside
from lowbitcli.checkpoint.shard_index import SUFFIX
from lowbitcli.errors import CheckpointError

_MOST = 8 << 30  # bytes; and never more than a quarter of the memory that is free


def read_ahead(source: str | os.PathLike[str]) -> None:
    """Begin to bring the weights of a file or directory into the page cache, in the background."""
    threading.Thread(target=_read, args=(Path(source),), daemon=True).start()


def _read(source: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        paths = _inside(source) if source.is_dir() else [os.path.realpath(source)]
        pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        left = min(_MOST, pages // 4)
        for path in paths:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                size = min(left, os.fstat(fd).st_size)
                os.posix_fadvise(fd, 0, size, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)
            left -= size
            if left <= 0:
                return


def _inside(root: Path) -> list[str]:
    """Return the real paths of the files that the reader would open too, in order."""
    found = []
    with contextlib.suppress(CheckpointError):
        parts = components(root) if (root / PIPELINE).is_file() else ("",)
        for path in sorted(path for part in parts for path in (root / part).glob(f"*{SUFFIX}")):
            found.append(inside(root, str(path.relative_to(root))))
    return found
