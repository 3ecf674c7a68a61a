"""What is told of a file or directory that the system does not let be read: for lack of permission
it is the run that fails, and of a checkpoint nothing is known; else the checkpoint is not whole."""

import errno

from lowbitcli.errors import CheckpointError, LowbitError, OutputError

_PERMISSION = (errno.EACCES, errno.EPERM)


def unread(where: str, error: OSError, what: str = "") -> LowbitError:
    """Return the error for the user that an OSError amounts to where `where` was to be read."""
    message = ": ".join(part for part in (where, what, error.strerror or str(error)) if part)
    if error.errno in _PERMISSION:
        hint = "no permission to read it: ask who owns it, and see the folders that it is in"
        return OutputError(message, hint=hint)
    return CheckpointError(message)
