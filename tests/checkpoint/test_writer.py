"""Outputs appear whole or not at all; what was there stays until then."""

import errno
import os
import socket
import stat
import subprocess
import sys

import pytest

from lowbitcli.checkpoint import StagedOutput, atomic
from lowbitcli.errors import BusyError, OutputError, UsageError

OLD = b"old checkpoint"


def listing(folder):
    return sorted(os.listdir(folder))


def write_directory(target, **options):
    with StagedOutput(target, directory=True, **options) as out:
        out.create("model.safetensors", 10)
        out.write("model.safetensors", 5, b"world")
        out.write("model.safetensors", 0, b"hello")
        out.write_file("config.json", b"{}")
        out.publish()


@pytest.fixture
def old(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.safetensors").write_bytes(OLD)
    return tmp_path / "out"


def test_directory_appears_whole(tmp_path):
    write_directory(tmp_path / "deep" / "er" / "out")
    out = tmp_path / "deep" / "er" / "out"
    assert listing(out.parent) == ["out"] and listing(out) == ["config.json", "model.safetensors"]
    assert (out / "model.safetensors").read_bytes() == b"helloworld"


def test_file_appears_whole_with_the_users_mode(tmp_path):
    before = os.umask(0o027)
    try:
        with StagedOutput(tmp_path / "o.safetensors", directory=False) as out:
            out.create("o.safetensors", 4)
            out.write("o.safetensors", 0, b"data")
            out.sync("o.safetensors")
            assert out.read("o.safetensors", 1, 2) == b"at"
            assert listing(tmp_path) == [".o.safetensors.lock", ".o.safetensors.partial"]
            out.publish()
    finally:
        os.umask(before)
    assert listing(tmp_path) == ["o.safetensors"]
    assert stat.S_IMODE((tmp_path / "o.safetensors").stat().st_mode) == 0o640


@pytest.mark.parametrize("directory", [False, True])
@pytest.mark.parametrize("how", ["abort", "leave", "raise", "interrupt"])
def test_nothing_is_left_of_what_was_not_published(how, directory, tmp_path):
    error = {"raise": RuntimeError, "interrupt": KeyboardInterrupt}.get(how)
    try:
        with StagedOutput(tmp_path / "new" / "o", directory=directory) as out:
            out.create("o", 4)
            if how == "abort":
                out.abort()
                out.abort()
            if error:
                raise error
    except BaseException as caught:
        assert error is not None and isinstance(caught, error)
    assert listing(tmp_path) == []


def test_an_existing_output_needs_force(old):
    with pytest.raises(OutputError, match="exists") as caught:
        write_directory(old)
    assert "--force" in caught.value.hint and caught.value.exit_code == 5
    assert listing(old) == ["old.safetensors"] and listing(old.parent) == ["out"]


@pytest.mark.parametrize("swap", [True, False])
def test_force_replaces_a_directory(swap, old, monkeypatch):
    if not swap:
        monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)
    write_directory(old, force=True)
    assert listing(old) == ["config.json", "model.safetensors"]
    assert listing(old.parent) == ["out"]


def test_force_restores_the_old_directory_when_the_new_cannot_come(old, monkeypatch):
    monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)
    rename = os.rename

    def failing(source, target):
        if str(source).endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OutputError, match="Input/output error"):
        write_directory(old, force=True)
    assert (old / "old.safetensors").read_bytes() == OLD and listing(old.parent) == ["out"]


def test_a_crash_between_two_renames_is_put_right(old):
    old.rename(old.with_name(".out.old"))
    with pytest.raises(OutputError, match="exists"):
        write_directory(old)
    assert (old / "old.safetensors").read_bytes() == OLD and listing(old.parent) == ["out"]


def test_force_replaces_no_directory_but_a_checkpoint(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_bytes(b"x")
    with pytest.raises(OutputError, match="holds no checkpoint"):
        write_directory(tmp_path / "home", force=True)
    assert listing(tmp_path / "home") == ["thesis.tex"]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("directory", [False, True])
def test_what_appeared_meanwhile_is_not_overwritten(directory, native, tmp_path, monkeypatch):
    if not native:
        monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)
    with (
        pytest.raises(OutputError, match=r"exists|not empty"),
        StagedOutput(tmp_path / "o", directory=directory) as out,
    ):
        out.create("o", 1)
        if directory:
            (tmp_path / "o").mkdir()
            (tmp_path / "o" / "x").write_bytes(OLD)
        else:
            (tmp_path / "o").write_bytes(OLD)
        out.publish()
    kept = tmp_path / "o" / "x" if directory else tmp_path / "o"
    assert kept.read_bytes() == OLD and listing(tmp_path) == ["o"]


def test_a_link_is_written_through(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "o.safetensors").write_bytes(OLD)
    (tmp_path / "link").symlink_to("real/o.safetensors")
    with StagedOutput(tmp_path / "link", directory=False, force=True) as out:
        out.write_file("o.safetensors", b"new")
        out.publish()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "o.safetensors").read_bytes() == b"new"
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(OutputError, match="a link to nothing"):
        StagedOutput(tmp_path / "dangling", directory=False)


def test_a_stale_partial_is_removed(tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "stale").write_bytes(b"x")
    (tmp_path / "keep").mkdir()
    (tmp_path / ".o.partial").symlink_to("keep")
    write_directory(tmp_path / "out")
    with StagedOutput(tmp_path / "o", directory=False) as out:
        out.write_file("o", b"x")
        out.publish()
    assert listing(tmp_path) == ["keep", "o", "out"]
    assert listing(tmp_path / "out") == ["config.json", "model.safetensors"]


HOLD = """
import sys
from lowbitcli.checkpoint import StagedOutput
with StagedOutput(sys.argv[1], directory=True):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused(tmp_path):
    target = tmp_path / "out"
    command = [sys.executable, "-c", HOLD, str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(BusyError) as caught:
            write_directory(target)
        assert caught.value.exit_code == 6
        assert listing(tmp_path) == [".out.lock", ".out.partial"]
        other.kill()
        other.wait()
    write_directory(target)
    assert listing(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", ["same", "link", "hard", "part", "holds"])
def test_the_source_is_not_written_over(kind, old):
    file = old / "old.safetensors"
    link = old.parent / "link"
    target, directory = {
        "same": (old, True),
        "link": (link, True),
        "hard": (link, False),
        "part": (file, False),
        "holds": (old.parent, True),
    }[kind]
    if kind == "link":
        link.symlink_to(old)
    if kind == "hard":
        os.link(file, link)
    with pytest.raises(UsageError, match="source"):
        StagedOutput(target, directory=directory, force=True, sources=[old])
    assert file.read_bytes() == OLD


def test_a_file_is_not_written_over_by_another_name(old):
    file = old / "old.safetensors"
    os.link(file, old.parent / "other")
    for target in (file, old.parent / "other"):
        with pytest.raises(UsageError, match="is the source"):
            StagedOutput(target, directory=False, force=True, sources=[file])


def test_pipes_devices_sockets_and_other_kinds_are_refused(tmp_path, old):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for target in (tmp_path / "pipe", "/dev/full", tmp_path / "socket"):
            with pytest.raises(OutputError, match="neither a file nor a directory"):
                StagedOutput(target, directory=False, force=True)
    with pytest.raises(OutputError, match="is a directory"):
        StagedOutput(old, directory=False, force=True)
    for target in ("/", "..", "."):
        with pytest.raises(UsageError, match="not a name"):
            StagedOutput(target, directory=True)


def test_too_little_space_is_said_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "free_bytes", lambda _: 1000)
    with (
        pytest.raises(OutputError, match="1001 bytes are needed, 1000 are free") as caught,
        StagedOutput(tmp_path / "o", directory=False) as out,
    ):
        out.create("o", 1001)
    assert str(tmp_path / "o") in caught.value.message and caught.value.hint
    assert listing(tmp_path) == []


@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate", "fsync", "open"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES])
def test_a_failing_call_leaves_the_old_one(call, code, old, monkeypatch):
    real, calls = getattr(os, call), []

    def failing(*args, **options):
        calls.append(args)
        if call == "open" and not str(args[0]).endswith("model.safetensors"):
            return real(*args, **options)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(OutputError) as caught:
        write_directory(old, force=True)
    monkeypatch.undo()
    assert calls and caught.value.exit_code == 5 and caught.value.hint
    assert os.strerror(code) in caught.value.message and str(old.parent) in caught.value.message
    if code == errno.ENOSPC:
        assert "bytes needed" in caught.value.message and "free" in caught.value.message
    assert (old / "old.safetensors").read_bytes() == OLD and listing(old.parent) == ["out"]


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real, calls = os.pwrite, []

    def short(fd, data, offset):
        calls.append(len(data))
        return real(fd, data[:3], offset)

    monkeypatch.setattr(os, "pwrite", short)
    write_directory(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"helloworld" and len(calls) > 4


def test_without_fallocate_the_size_is_set_anyway(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with StagedOutput(tmp_path / "o", directory=False) as out:
        out.create("o", 10)
        out.publish()
    assert (tmp_path / "o").stat().st_size == 10


def test_all_is_durable_before_the_rename_and_the_name_after_it(tmp_path, monkeypatch):
    synced, fsync, rename = [], os.fsync, atomic.rename_new

    def recording(fd):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def renaming(source, target):
        synced.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recording)
    monkeypatch.setattr(atomic, "rename_new", renaming)
    write_directory(tmp_path / "out")
    parent = tmp_path.name
    assert synced == ["model.safetensors", "config.json", ".out.partial", "rename", parent]


def test_names_too_long_and_folders_that_are_files(tmp_path):
    with pytest.raises(OutputError, match="too long") as caught:
        StagedOutput(tmp_path / ("x" * 250), directory=True)
    assert "shorter name" in caught.value.hint
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="Not a directory"):
        StagedOutput(tmp_path / "file" / "o", directory=True)
    assert listing(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        StagedOutput(tmp_path / "o", directory=True)
    tmp_path.chmod(0o700)


def test_copies_are_whole_and_misuse_is_a_bug(tmp_path):
    (tmp_path / "source").write_bytes(b"x" * 100_000)
    os.mkfifo(tmp_path / "pipe")
    with StagedOutput(tmp_path / "out", directory=True) as out:
        out.copy_file("a", tmp_path / "source")
        with pytest.raises(OutputError, match="not a regular file"):
            out.copy_file("b", tmp_path / "pipe")
        with pytest.raises(OutputError, match="No such file"):
            out.copy_file("b", tmp_path / "absent")
        for name in ("../x", "/x", "", ".", "..", "a/../../x", "a//b", "a/"):
            with pytest.raises(ValueError, match="not a path inside"):
                out.create(name, 1)
        with pytest.raises(ValueError, match="has no bytes"):
            out.write("a", 99_999, b"xx")
        with pytest.raises(OutputError, match="exists"):
            out.create("a", 1)
        out.copy_file("folder/b", tmp_path / "source")
        out.publish()
        out.abort()
    assert (tmp_path / "out" / "folder" / "b").read_bytes() == b"x" * 100_000
    assert (tmp_path / "out" / "a").read_bytes() == b"x" * 100_000
