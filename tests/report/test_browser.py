"""The page in a real browser: names of tensors and files that are HTML, JavaScript, or turn text
around do nothing, nothing is asked of any server, and nothing is wider than a telephone.

Skipped where no Chromium is found; LOWBIT_CHROMIUM names one.
"""

import http.server
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from lowbitcli.report.page import page
from lowbitcli.report.sides import diff
from lowbitcli.report.sides_page import page as sides_page
from lowbitcli.verify import Problem, Verification
from tests.report.made import HOSTILE, found, row

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
BROWSER = os.environ.get("LOWBIT_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (LOWBIT_CHROMIUM)"),
    pytest.mark.slow,
]


def hostile_names(port: int) -> list[str]:
    there = f"http://127.0.0.1:{port}"
    return [
        HOSTILE,
        f"<img src={there}/img onerror=\"document.title='ran'\">.weight",
        f"\"><script src='{there}/script'></script><script>document.title='ran'</script>",
        f"</pre></style></title></svg><iframe src={there}/frame></iframe>",
        f"<svg/onload=fetch('{there}/svg')>",
        f"<link rel=stylesheet href={there}/css><meta http-equiv=refresh content=0;url={there}/go>",
        f"{{{{ 7*7 }}}}{{% include '{there}' %}}",
        "javascript:document.title='ran'",
        "model.\u202eevil\u2066.\u200b\x00\x07\x1b[2J\r\n</th>.weight",
        "' style='background:url(" + there + "/style)' onmouseover='document.title=1",
        "&lt;script&gt;document.title='ran'&lt;/script&gt;",
    ]


def told(names: list[str]) -> Verification:
    problems = tuple(Problem("bound", name, name, name) for name in names)
    rows = tuple(row(name) for name in names)
    return found(
        target=names[1], problems=problems, weights=rows, fixed=(*names, f"not fixed: {names[2]}")
    )


def browse(path: Path, *options: str) -> str:
    words = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu",
        "--disable-background-networking",
        f"--user-data-dir={path.parent / 'profile'}", "--virtual-time-budget=3000", *options,
        path.as_uri(),
    ]  # fmt: skip
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture
def server():
    """Yield (port, what was asked of it)."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield one.server_port, asked
        one.shutdown()


@pytest.mark.parametrize("kind", ["verify", "diff"])
def test_hostile_names_run_nothing_and_ask_nothing(tmp_path, server, kind):
    port, asked = server
    names = hostile_names(port)
    text = page(told(names))
    if kind == "diff":
        other = told([name + "x" for name in names])
        text = sides_page(diff(told(names), other, (names[1], names[2])))
    path = tmp_path / "page.html"
    path.write_text(text)
    dom = browse(path, "--dump-dom")
    title = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)
    assert title is not None and title[1].strip() not in ("ran", "1", "")
    assert asked == []
    tags = set(re.findall(r"<([a-zA-Z][a-zA-Z0-9]*)", dom))
    assert tags.isdisjoint({"script", "img", "iframe", "link", "object", "embed"})
    assert "onerror" in dom and "<img" not in dom  # the name is there, as text
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b\x00\x07\x1b]", dom)


def test_the_same_names_do_run_where_nothing_keeps_them(tmp_path, server):
    """The test above can fail: without escaping and policy the browser runs and asks."""
    port, asked = server
    path = tmp_path / "page.html"
    names = hostile_names(port)
    path.write_text(f"<!doctype html><title>x</title><body>{names[1]}{names[2]}")
    assert "<title>ran</title>" in browse(path, "--dump-dom")
    assert {"/img", "/script"} <= set(asked)
