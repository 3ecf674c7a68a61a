"""Read a JSON report back, also one of an older lowbit that did not measure as much."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lowbitcli.errors import CheckpointError
from lowbitcli.tensors import safe
from lowbitcli.verify.nouns import SCHEMA, Verification

_READER = TypeAdapter(Verification)
_HINT = "lowbit verify DST --against SRC --report FILE.json writes one"


def read(path: str | os.PathLike[str]) -> Verification:
    """Return the verification that a JSON report tells of; keys that are not known are passed over.

    Raises:
        CheckpointError: it cannot be read, is no JSON report, or one of a newer schema.
    """
    shown = safe(str(path))
    try:
        document = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{shown}: {error.strerror or error}", hint=_HINT) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{shown} is no JSON", hint=_HINT) from error
    return verification(document, shown)


def verification(document: Any, shown: str = "it") -> Verification:
    """Return the verification of a document; `shown` is what to call it.

    Raises:
        CheckpointError: see `read`.
    """
    if not isinstance(document, Mapping) or "schema" not in document:
        raise CheckpointError(f"{shown} is no report of lowbit", hint=_HINT)
    if document["schema"] != SCHEMA:
        message = f"{shown} has schema {safe(str(document['schema'])[:40])}, not {SCHEMA}"
        raise CheckpointError(message, hint="read it with the lowbit that wrote it")
    try:
        summary = dict(document["summary"])
        summary["schemes"] = {
            name: (told["tensors"], told["bytes"]) for name, told in summary["schemes"].items()
        }
        return _READER.validate_python({**document, "summary": summary})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = f"{shown} is no report of lowbit: {safe(where)}: {safe(first['msg'])}"
        raise CheckpointError(message, hint=_HINT) from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        message = f"{shown} is no report of lowbit: its summary is not one"
        raise CheckpointError(message, hint=_HINT) from error


__all__ = ["read", "verification"]
