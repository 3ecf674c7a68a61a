"""Where the recipes that ship with lowbit are: in the installed package, else in the checkout."""

from pathlib import Path

from lowbitcli.errors import RecipeError

_PACKAGE = Path(__file__).resolve().parents[1]
_PLACES = (_PACKAGE / "configs", _PACKAGE.parent / "configs")

DEFAULTS = "defaults"


def folder() -> Path:
    """Return the folder of shipped recipes; raise RecipeError where the installation has none."""
    for place in _PLACES:
        if (place / f"{DEFAULTS}.yaml").is_file():
            return place
    raise RecipeError("the recipes that ship with lowbit are missing", hint="install lowbit again")


def recipes() -> dict[str, Path]:
    """Return the shipped recipes by name."""
    return {path.stem: path for path in sorted(folder().glob("*.yaml")) if path.stem != DEFAULTS}
