"""What a consumer says of an output, and edits of what is declared of it."""

import json
from pathlib import Path

from lowbitcli import api
from lowbitcli.containers.reading import VERSIONS
from lowbitcli.verify import FAIL
from tests.checkpoints import single


def config(output: Path, edit, name: str = "config.json") -> None:
    """Edit a JSON file beside the weights; of config.json the quantization_config."""
    said = json.loads((output / name).read_text())
    edit(said["quantization_config"] if name == "config.json" else said["quantization"])
    (output / name).write_text(json.dumps(said))


def asked(output: Path, consumer: str):
    """Return the problems that a lint for one consumer alone finds."""
    found = api.verify(output, device="cpu", consumers=[consumer])
    return [one for one in found.problems if one.kind == "consumer"]


def told(output: Path, consumer: str, words: str, severity: str = FAIL):
    """Return the one finding with these words, which names the consumer and its version."""
    problems = asked(output, consumer)
    found = [one for one in problems if words in one.message]
    assert len(found) == 1, [one.message for one in problems]
    assert found[0].message.startswith(VERSIONS[consumer] + ": ")
    assert found[0].severity == severity
    return found[0]


def made(folder: Path, scheme: str, container: str, tensors, **options) -> Path:
    source = single(folder / "source", tensors, **options)
    request = api.Request(scheme=scheme, container=container)
    api.quantize(source, folder / "out", request, device="cpu")
    (folder / "out" / "lowbit.json").unlink()
    return folder / "out"
