"""Tell of a verification: one self-contained HTML page, Markdown, or JSON."""

from lowbitcli.report.read import read
from lowbitcli.report.write import SUFFIXES, check_path, write

__all__ = ["SUFFIXES", "check_path", "read", "write"]
