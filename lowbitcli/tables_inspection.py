"""An inspection as lines of text and as a JSON document, as `tables` has the rest."""

from collections.abc import Sequence
from typing import Any

from lowbitcli.console import size
from lowbitcli.plan.inspection import Inspection
from lowbitcli.tables import columns, first, shape_of
from lowbitcli.tensors import safe


def inspection_lines(found: Inspection, *, everything: bool = False) -> list[str]:
    """Tell of a checkpoint: its files, what its weights are stored as, what is wrong with it."""
    files = f"{len(found.files):,} file" + ("s" if len(found.files) != 1 else "")
    lines = [f"{safe(str(found.path))} ({found.container}), {files}, {size(found.bytes)}", ""]
    rows: list[Sequence[str]] = [("stored as", "tensors", "elements", "size")]
    rows += [
        (name, f"{number:,}", f"{elements:,}", size(total))
        for name, (number, elements, total) in found.schemes.items()
    ]
    lines += columns(rows, right=(1, 2, 3))
    rows = [
        (weight.name, shape_of(weight.shape), weight.scheme.name if weight.scheme else weight.dtype)
        for weight in found.weights
    ]
    shown, more = first(rows, everything)
    lines += ["", *columns([("tensor", "shape", "stored as"), *shown]), *more]
    if found.findings:
        faults = [(finding.tensor, finding.kind, finding.message) for finding in found.findings]
        lines += ["", *columns([("wrong", "", ""), *faults])]
    return lines


def inspection_document(found: Inspection) -> dict[str, Any]:
    """Return a checkpoint as a JSON document; sizes in bytes."""
    return {
        "path": str(found.path),
        "container": found.container,
        "bytes": found.bytes,
        "files": dict(found.files),
        "notes": list(found.notes),
        "findings": [
            {"kind": one.kind, "tensor": one.tensor, "message": one.message}
            for one in found.findings
        ],
        "tensors": [
            {
                "name": weight.name,
                "shape": list(weight.shape),
                "dtype": weight.dtype,
                "scheme": weight.scheme.name if weight.scheme else None,
                "bytes": weight.nbytes,
                **({"nibbles": weight.nibble} if weight.nibble else {}),
            }
            for weight in found.weights
        ],
    }
