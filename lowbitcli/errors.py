"""Every error a user can meet, as a tree; `console.report` prints them and turns them into exit
codes.

    LowbitError
    ├── UsageError          2   the command line asks for something that makes no sense
    ├── RecipeError         3   a recipe is wrong, with file:line:col
    ├── CheckpointError     4   the source is malformed, incomplete or contradicts itself
    │   ├── UnsupportedError    4   well formed, but nothing here can take it
    │   └── NonFiniteError      4   the source holds NaN or Inf
    ├── OutputError         5   reading or writing failed: space, permission, an existing output
    ├── BusyError           6   another run holds the output
    ├── DeviceError         7   no such device, or it is out of memory
    │   └── WorkerLostError     7   processes that did the work died, again and again
    └── StoppedError      130/143   SIGINT or SIGTERM

Exit code 1 is no error: `verify` looked and found something wrong. 70 is a bug of ours, the only
case in which a traceback is shown.
"""

OK = 0
FOUND_WRONG = 1
BUG = 70


class LowbitError(Exception):
    """An error with a message for the user, a hint on what to do, and an exit code by kind."""

    exit_code = BUG

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def about(self, subject: str) -> "LowbitError":
        """Put the name of what it is about in front of the message, and return the error."""
        self.message = f"{subject}: {self.message}"
        self.args = (self.message,)
        return self


class UsageError(LowbitError):
    exit_code = 2


class RecipeError(LowbitError):
    """A recipe cannot be used; `where` is `file:line:col` and stands in front of the message."""

    exit_code = 3

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(f"{where}: {message}" if where else message, hint=hint)


class CheckpointError(LowbitError):
    exit_code = 4


class UnsupportedError(CheckpointError):
    exit_code = 4


class NonFiniteError(CheckpointError):
    exit_code = 4


class OutputError(LowbitError):
    exit_code = 5


class BusyError(LowbitError):
    exit_code = 6


class DeviceError(LowbitError):
    exit_code = 7


class WorkerLostError(DeviceError):
    """What was done is kept, and the same run again goes on with it."""

    exit_code = 7


class StoppedError(LowbitError):
    """The run was stopped by a signal; the exit code is 128 plus its number."""

    def __init__(self, signal_number: int, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.exit_code = 128 + signal_number
