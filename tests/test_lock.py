"""requirements-dev.lock holds the pins of constraints-cpu.txt by hashes, and names no registry."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
APART = {"torch", "triton"}  # their builds differ from machine to machine


def named(text):
    """Return package -> version of every pin, names as registries compare them."""
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def test_the_lock_is_that_of_the_constraints():
    lock = (ROOT / "requirements-dev.lock").read_text()
    pins = named((ROOT / "constraints-cpu.txt").read_text())
    assert len(pins) > 30
    assert named(lock) == {name: version for name, version in pins.items() if name not in APART}
    for block in re.split(r"\n(?=[A-Za-z])", lock)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), block[:60]
    assert "://" not in lock
