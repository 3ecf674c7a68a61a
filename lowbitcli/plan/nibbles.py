"""Which nibble of a byte NVFP4 has the even column in, where a user says it: `--nibbles`."""

from collections.abc import Iterable, Mapping

from lowbit_kernels.formats import E2M1
from lowbitcli.containers.layouts import is_high_first
from lowbitcli.errors import UsageError
from lowbitcli.plan.nouns import Part
from lowbitcli.schemes import Scheme
from lowbitcli.tensors import DATA, safe


def nibbles_of(said: str) -> str:
    """Return where a user says that the even column of NVFP4 is.

    Raises:
        UsageError: it is neither low nor high, nor left to the container.
    """
    if said not in ("", "low", "high"):
        raise UsageError(f"no nibble is called {safe(said)!r}", hint="low or high")
    return said


def nibble_of(scheme: Scheme | None, reads: Mapping[str, Part]) -> str:
    """Return which nibble of a byte the even column of FP4 is read from, "" of anything else."""
    if scheme is None or scheme.element is not E2M1:
        return ""
    stored = reads[DATA].stored
    return "high" if stored is not None and is_high_first(stored.layout) else "low"


def nibbles_told(
    weights: Iterable[tuple[Scheme | None, Mapping[str, Part]]], said: str
) -> list[str]:
    """Return what became of a user's word on nibbles, of weights by their scheme and parts."""
    read = {
        nibble_of(scheme, reads) for scheme, reads in weights if scheme and scheme.name == "nvfp4"
    }
    if not said or read == {said}:
        return []
    what = "its NVFP4 is always read in one way" if read else "there is no NVFP4"
    return [f"--nibbles {said} changes nothing: {what}"]
