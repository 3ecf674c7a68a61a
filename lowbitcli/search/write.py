"""Write a recipe: whole or not at all, and over another one only where that is asked for."""

import contextlib
import os
import tempfile
from pathlib import Path

from lowbitcli.checkpoint import atomic
from lowbitcli.errors import OutputError, UsageError
from lowbitcli.tensors import safe

SUFFIXES = (".yaml", ".yml")


def check_path(path: Path, *, force: bool | None) -> None:
    """Refuse a path that cannot be written, before weights are read; `force` None is where nobody
    can ask for another recipe to be replaced.

    Raises:
        UsageError: it is not called like a recipe.
        OutputError: something is there, or its folder is not.
    """
    where = safe(str(path))
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{where} is no name for a recipe", hint="as in recipe.yaml")
    if not path.parent.is_dir():
        raise OutputError(f"{safe(str(path.parent))} is no directory", hint="make it first")
    if os.path.lexists(path) and not (force and path.is_file()):
        hint = "--force replaces it" if force is False else "name another place"
        raise OutputError(f"{where}: exists", hint=hint)


def write(text: str, path: Path, *, force: bool | None = None) -> None:
    """Write a recipe's text.

    Raises:
        UsageError, OutputError: see `check_path`; OutputError also where writing fails.
    """
    check_path(path, force=force)
    with atomic.os_errors(path):
        fd, name = tempfile.mkstemp(prefix=".recipe-", suffix=".partial", dir=path.parent)
        beside = Path(name)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(fd)
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(beside, 0o666 & ~mask)  # as any new file; mkstemp's is for its owner alone
            if force:
                os.replace(beside, path)
            else:
                atomic.rename_new(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise


__all__ = ["check_path", "write"]
