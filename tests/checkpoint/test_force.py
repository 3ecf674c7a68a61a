"""What `--force` may replace with a file: what looks like one of ours."""

import pytest

from lowbitcli.checkpoint.writer import StagedOutput
from lowbitcli.errors import OutputError


def test_force_replaces_no_file_but_safetensors(tmp_path):
    whole = (2).to_bytes(8, "little") + b"{}"
    for name, content in (("config.json", b"{}"), ("home", b"x" * 5000), ("near", whole + b"!")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(OutputError, match="is no safetensors file, and --force") as caught:
            StagedOutput(tmp_path / name, directory=False, force=True)
        assert caught.value.hint == "remove it first, if it is meant to go"
        assert (tmp_path / name).read_bytes() == content
    for name, content in (("broken.safetensors", b"x"), ("whole", whole), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
        with StagedOutput(tmp_path / name, directory=False, force=True) as out:
            out.create(name, 2)
            out.write(name, 0, b"hi")
            out.publish()
        assert (tmp_path / name).read_bytes() == b"hi"
