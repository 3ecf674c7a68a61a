"""A file held against the safetensors library: nothing is taken that it refuses, and what both take
means the same to both."""

import time

from safetensors import SafetensorError, deserialize

from lowbitcli.checkpoint import header
from lowbitcli.errors import CheckpointError
from lowbitcli.tensors import safe

SECONDS = 0.05  # of processor time, for one header

# What the library takes and we refuse, by what is said of it.
ON_PURPOSE = (
    "does not start with {",
    "appears twice",
    "overflows 63 bits",
    "digits",
    "nested",
    "out of range",
)


def ours(blob):
    """Return what we make of a file: a header, or why it is refused."""
    try:
        length = header.json_length(blob[:8], len(blob), "x")
        return header.parse(blob[8 : 8 + length], len(blob), "x")
    except CheckpointError as error:
        assert error.exit_code == 4
        assert safe(error.message) == error.message, blob
        return error


def verdict(blob):
    """Hold a file against the library; return how it ended, the seconds it took us, and what we
    said."""
    try:
        theirs = dict(deserialize(blob))
    except SafetensorError:
        theirs = None
    seconds = SECONDS
    for _ in range(4):  # what else the process does, such as collecting, is not of the header
        began = time.process_time()
        found = ours(blob)
        seconds = min(seconds, time.process_time() - began)
        if seconds < SECONDS:
            break
    if isinstance(found, CheckpointError):
        if theirs is None:
            return "both refuse", seconds, found.message
        assert any(reason in found.message for reason in ON_PURPOSE), (found.message, blob)
        return "refused on purpose", seconds, found.message
    assert theirs is not None, ("taken, and the library refuses it", blob)
    assert found.entries.keys() == theirs.keys(), blob
    for name, (spec, start, stop) in found.entries.items():
        said = theirs[name]
        assert (spec.dtype, list(spec.shape)) == (said["dtype"], list(said["shape"])), blob
        assert blob[start:stop] == bytes(said["data"]), blob
    return "both take", seconds, ""
