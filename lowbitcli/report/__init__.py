"""Tell of a verification: one self-contained HTML page, Markdown, or JSON; set two side by side.

`write_curve` tells of a search, and is imported when it is asked for: with the search comes torch,
which takes longer than all that is done here.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lowbitcli.report.read import read
from lowbitcli.report.sides import diff
from lowbitcli.report.sides_page import write_diff
from lowbitcli.report.write import SUFFIXES, check_path, write

if TYPE_CHECKING:
    from lowbitcli.report.curve import write_curve


def __getattr__(name: str) -> Any:
    """Return what is imported late."""
    if name == "write_curve":
        return importlib.import_module("lowbitcli.report.curve").write_curve
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["SUFFIXES", "check_path", "diff", "read", "write", "write_curve", "write_diff"]
