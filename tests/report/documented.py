"""Read a schema from tables of Markdown, and hold a document against it."""

import re

SECTIONS = {  # type in a table -> the section that tells of it
    "problem": "A problem",
    "check": "A check",
    "weight": "A weight",
    "kept": "A kept tensor",
    "summary": "The summary",
    "size": "A size",
    "manifest": "The manifest",
    "histogram": "A histogram",
    "figures": "Figures",
    "block": "A block",
    "side": "A side",
    "change": "A change",
}
ATOMS = {"string": (str,), "integer": (int,), "boolean": (bool,), "object": (dict,)}

Tables = dict[str, dict[str, str]]


def tables(page: str) -> Tables:
    """Return section -> key -> type, of each section with a table of keys and types."""
    found: Tables = {}
    for part in re.split(r"^#+ ", page, flags=re.M)[1:]:
        title, _, text = part.partition("\n")
        if "| key | type | value |" in text:
            table = text.partition("| key | type | value |")[2].partition("\n\n")[0]
            found[title] = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.M))
    return found


def complaints(value: object, section: str, known: Tables) -> list[str]:
    """Return where an object is not what its section says."""
    assert isinstance(value, dict)
    keys = {key: said.strip() for key, said in known[section].items()}
    found = [f"{section}: {key} is missing" for key in keys if key not in value]
    found += [f"{section}: {key} is not documented" for key in value if key not in keys]
    for key in keys:
        if key in value:
            found += _typed(value[key], keys[key], f"{section}: {key}", known)
    return found


def _typed(value: object, said: str, where: str, known: Tables) -> list[str]:
    if said.endswith(" or null"):
        return [] if value is None else _typed(value, said.removesuffix(" or null"), where, known)
    if said.startswith("list of "):
        if not isinstance(value, list):
            return [f"{where} is {value!r}, not a list"]
        one = _single(said.removeprefix("list of "))
        return [text for item in value for text in _typed(item, one, where, known)]
    if said.startswith("object of "):
        if not isinstance(value, dict):
            return [f"{where} is {value!r}, not an object"]
        one = _single(said.removeprefix("object of "))
        return [text for item in value.values() for text in _typed(item, one, where, known)]
    if said in SECTIONS:
        if not isinstance(value, dict):
            return [f"{where} is {value!r}, not an object"]
        return complaints(value, SECTIONS[said], known)
    if said == "number":
        is_number = type(value) in (int, float) or value in ("inf", "-inf", "nan")
        return [] if is_number else [f"{where} is {value!r}, not a number"]
    return [] if type(value) in ATOMS[said] else [f"{where} is {value!r}, not a {said}"]


def _single(plural: str) -> str:
    return plural if plural in SECTIONS else plural.removesuffix("s")
