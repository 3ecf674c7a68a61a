"""Tell of a verification: one self-contained HTML page, Markdown, or JSON; set two side by side."""

from lowbitcli.report.curve import write_curve
from lowbitcli.report.read import read
from lowbitcli.report.sides import diff
from lowbitcli.report.sides_page import write_diff
from lowbitcli.report.write import SUFFIXES, check_path, write

__all__ = ["SUFFIXES", "check_path", "diff", "read", "write", "write_curve", "write_diff"]
