"""Write a report, by the suffix of its name: `.html`, `.md` or `.json`.

It appears whole or not at all: written beside its place under a name of its own, then renamed. A
file that is there is replaced only where it is a report, so that a slip of the keys costs nobody a
config.
"""

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from lowbitcli.errors import OutputError, UsageError
from lowbitcli.report.heads import BYTES, is_report
from lowbitcli.report.markdown import markdown
from lowbitcli.report.page import page
from lowbitcli.tensors import safe
from lowbitcli.verify.nouns import Verification


def document(found: Verification) -> str:
    """Return a verification as JSON text; docs/report.md says what each key means."""
    return json.dumps(found.to_dict(), indent=1, ensure_ascii=True, allow_nan=False) + "\n"


SUFFIXES: Mapping[str, Callable[[Verification], str]] = {
    ".html": page,
    ".md": markdown,
    ".json": document,
}


def check_path(path: Path, inputs: Iterable[str | os.PathLike[str]] = ()) -> Path:
    """Refuse a report's path that cannot be written, before an hour is spent on what it tells, or
    at which is what is no report, or one of the `inputs`; return where it leads by links.

    Raises:
        UsageError: its suffix is none of SUFFIXES, or a file is there that must not be lost.
        OutputError: something is there that is no file, or its folder is not there.
    """
    shown, target = safe(str(path)), Path(os.path.realpath(path))
    is_link = os.path.islink(path)
    named = f"{shown}, a link to {safe(str(target))}," if is_link else shown
    with _os_errors(shown):
        mode = _mode(target)
        if mode is not None and not stat.S_ISREG(mode):
            what = "a directory" if stat.S_ISDIR(mode) else "no file but a device, pipe or socket"
            what = "a loop of links" if stat.S_ISLNK(mode) else what
            raise OutputError(f"{named} is {what}", hint="name a file for the report")
        if path.suffix.lower() not in SUFFIXES:
            known = ", ".join(SUFFIXES)
            raise UsageError(f"no report can be written to {shown}", hint=f"use {known}")
        if target.suffix.lower() in SUFFIXES and target.suffix.lower() != path.suffix.lower():
            raise UsageError(f"{named} has another suffix", hint="name the file that it leads to")
        folder = (target if is_link else path).parent
        if not folder.is_dir():
            raise OutputError(f"{safe(str(folder))} is no directory", hint="make it first")
        if mode is not None:
            _check_old(target, named, inputs)
    return target


def _mode(target: Path) -> int | None:
    try:
        return target.lstat().st_mode  # a link that is left is one of a loop
    except (FileNotFoundError, NotADirectoryError):
        return None


def _check_old(target: Path, named: str, inputs: Iterable[str | os.PathLike[str]]) -> None:
    """Refuse to replace a file that is an input, or no report."""
    for one in inputs:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samefile(one, target):
                message = f"{named} is to be read, not to be replaced"
                raise UsageError(message, hint="name another file for the report")
    with target.open("rb") as file:
        head = file.read(BYTES)
    if head and not is_report(head):
        message = f"{named} is there and is no report of lowbit"
        raise UsageError(message, hint="only a report is replaced: name another file")


def write(found: Verification, path: str | os.PathLike[str]) -> None:
    """Write the report of a verification to `path`, over one that is there.

    Raises:
        UsageError, OutputError: see `check_path`; OutputError also where writing fails.
    """
    path = Path(path)
    target = check_path(path)
    put(SUFFIXES[path.suffix.lower()](found), target)


def put(text: str, path: Path) -> None:
    """Write a text to `path`, whole or not at all.

    Raises:
        OutputError: writing fails.
    """
    with _os_errors(safe(str(path))):
        _replace(path, text.encode())


@contextlib.contextmanager
def _os_errors(shown: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"{shown}: {error.strerror or error}"
        raise OutputError(message, hint="name another place for the report") from error


def _replace(path: Path, data: bytes) -> None:
    fd, beside = tempfile.mkstemp(prefix=".report-", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(beside, 0o666 & ~mask)  # as any new file; mkstemp's is for its owner alone
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
