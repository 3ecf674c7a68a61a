"""F20: places where no output can be: exit 5, advice, and everything as it was."""

import contextlib
import ctypes
import os
import socket
from pathlib import Path

from tests import checkpoints
from tests.faults.commands import COMMANDS
from tests.faults.mounts import isolate, read_only
from tests.faults.shim import LONG, run
from tests.faults.spread import spread

CAPABILITIES = 0x20080522  # linux/capability.h, version 3


def without_privileges():
    """Let modes hold for this process, root's too."""
    head = (ctypes.c_uint32 * 2)(CAPABILITIES, 0)
    assert ctypes.CDLL(None, use_errno=True).capset(head, (ctypes.c_uint32 * 6)()) == 0


@contextlib.contextmanager
def unwritable(place, mode):
    """Let nobody write in `place`."""
    os.chmod(place, mode)
    try:
        yield
    finally:
        os.chmod(place, 0o755)


def read_only_mount(place, name):
    return place / name, (read_only(place) if isolate() else unwritable(place, 0o555))


def deep_in_a_read_only_mount(place, name):
    where, context = read_only_mount(place, name)
    return where.parent / "a" / "b" / name, context


def no_permission_to_write(place, name):
    return place / name, unwritable(place, 0o555)


def no_permission_to_look(place, name):
    (place / "folder").mkdir()
    return place / "folder" / name, unwritable(place / "folder", 0o000)


def no_permission_deep(place, name):
    return place / "a" / "b" / name, unwritable(place, 0o555)


def a_pipe(place, name):
    os.mkfifo(place / name)
    return place / name, contextlib.nullcontext()


def a_socket(place, name):
    os.chdir(place)  # the path of a socket may not be long
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(name)
    return place / name, contextlib.nullcontext()


def dev_full(place, name):
    os.symlink("/dev/full", place / name)
    return place / name, contextlib.nullcontext()


def longest_name(place, name):
    """A name that may be, but not with what an unfinished output carries more."""
    return place / name.rjust(250, "x"), contextlib.nullcontext()


def too_long_a_name(place, name):
    return place / name.rjust(300, "x"), contextlib.nullcontext()


def below_a_file(place, name):
    (place / "file").write_text("mine")
    return place / "file" / name, contextlib.nullcontext()


def a_link_to_nothing(place, name):
    os.symlink("nothing", place / name)
    return place / name, contextlib.nullcontext()


def a_link_to_itself(place, name):
    os.symlink(name, place / name)
    return place / name, contextlib.nullcontext()


def where_nothing_can_be_made(place, name):
    return Path("/proc/lowbit/a") / name, contextlib.nullcontext()


PLACES = (
    read_only_mount,
    deep_in_a_read_only_mount,
    no_permission_to_write,
    no_permission_to_look,
    no_permission_deep,
    a_pipe,
    a_socket,
    dev_full,
    longest_name,
    too_long_a_name,
    below_a_file,
    a_link_to_nothing,
    a_link_to_itself,
    where_nothing_can_be_made,
)


def test_f20_where_no_output_can_be(models, tmp_path):
    def case(item, place):
        make, command, forced = item
        where, context = make(place, command.target(place).name)
        said = (make.__name__, str(command), forced)
        with context:
            before = checkpoints.everything_below(place)
            words = [command.name, command.reads(models), "-o", where, "--device", "cpu"]
            words += ["--force"] if forced else []
            done = run(place, words, prepare=without_privileges)
            assert done.code == 5, (said, done.code, done.err)
            assert done.err.startswith("error: ") and "Traceback" not in done.err, (said, done.err)
            assert "hint: " in done.err, (said, done.err)
            assert checkpoints.everything_below(place) == before, said
        return True

    commands = COMMANDS if LONG else (COMMANDS[0], COMMANDS[3])
    items = [(make, command, False) for make in PLACES for command in commands]
    items += [(make, commands[0], True) for make in PLACES]
    refused = spread(case, items, tmp_path)
    print(f"F20: {len(PLACES)} places, {len(refused)} times exit 5 with advice")
    assert len(refused) == len(items) >= 36
