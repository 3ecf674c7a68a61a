"""What a report of lowbit begins with: by that a file is known which another may replace.

| form | head |
|---|---|
| page | the doctype, and the program's name above the first heading |
| Markdown | the first heading |
| JSON of verify, of report diff, of recipe auto | the first keys, in their order |
"""

import re

BYTES = 1 << 16  # of a file that are looked at: a page has its style before its heading
_TEXT = rb'"(?:[^"\\]|\\.)*"'
_HEADS = tuple(
    re.compile(head, re.DOTALL)
    for head in (
        rb'<!doctype html>.*?<p class="brand">lowbit (?:verify|report diff|recipe auto)</p>',
        rb"# lowbit (?:verify|report diff|recipe auto): ",
        rb'\{\s*"schema": \d+,\s*"passed": (?:true|false),\s*"exit_code": ',
        rb'\{\s*"schema": \d+,\s*"a": \{\s*"report": ',
        rb'\{\s*"source": ' + _TEXT + rb',\s*"container": ' + _TEXT + rb',\s*"schemes": \[',
    )
)


def is_report(head: bytes) -> bool:
    """Is it a report that begins with these bytes, at most BYTES of them?"""
    return any(one.match(head) for one in _HEADS)


__all__ = ["BYTES", "is_report"]
