"""Write a report, by the suffix of its name: `.html`, `.md` or `.json`.

It appears whole or not at all: written beside its place under a name of its own, then renamed.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from lowbitcli.errors import OutputError, UsageError
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


def check_path(path: Path) -> None:
    """Refuse a report's path that cannot be written, before an hour is spent on what it tells.

    Raises:
        UsageError: its suffix is none of SUFFIXES, or it is a directory.
        OutputError: its folder is not there.
    """
    if path.suffix.lower() not in SUFFIXES:
        known = ", ".join(SUFFIXES)
        raise UsageError(f"no report can be written to {safe(str(path))}", hint=f"use {known}")
    if path.is_dir():
        raise UsageError(f"{safe(str(path))} is a directory", hint="name a file for the report")
    if not path.parent.is_dir():
        raise OutputError(f"{safe(str(path.parent))} is no directory", hint="make it first")


def write(found: Verification, path: str | os.PathLike[str]) -> None:
    """Write the report of a verification to `path`, over one that is there.

    Raises:
        UsageError, OutputError: see `check_path`; OutputError also where writing fails.
    """
    path = Path(path)
    check_path(path)
    put(SUFFIXES[path.suffix.lower()](found), path)


def put(text: str, path: Path) -> None:
    """Write a text to `path`, whole or not at all.

    Raises:
        OutputError: writing fails.
    """
    try:
        _replace(path, text.encode())
    except OSError as error:
        message = f"{safe(str(path))}: {error.strerror or error}"
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
