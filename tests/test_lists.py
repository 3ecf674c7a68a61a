"""The tables of contents in code are complete: one file, one value, one line in the list."""

import importlib
from pathlib import Path

import pytest

from lowbit_kernels.ops import Ops
from lowbitcli import containers, schemes
from lowbitcli.containers.container import Container
from lowbitcli.schemes import Scheme

# Files of a room that hold no value: the type, and what several values are made with.
ROOMS = {
    schemes: (Scheme, schemes.SCHEMES, {"scheme"}),
    containers: (
        Container,
        containers.CONTAINERS,
        {
            "container",
            "layouts",
            "grouping",
            "ct_config",
            "ct_integers",
            "suffixes",
            "modelopt_config",
            "families",
            "reading",
            "inputs",
            "stacks",
        },
    ),
}


def files(package):
    folder = Path(package.__file__).parent
    return sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


def own_values(package, stem, kind):
    """Return a file's values of `kind`, less those imported from the file named after them."""
    module = importlib.import_module(f"{package.__name__}.{stem}")
    others = {other for other in files(package) if other != stem}
    values = [value for value in vars(module).values() if isinstance(value, kind)]
    return [value for value in values if value.name.replace("-", "_") not in others]


@pytest.mark.parametrize("package", ROOMS, ids=lambda package: package.__name__)
def test_each_file_holds_one_value_of_its_name_and_it_is_listed(package):
    kind, listed, without = ROOMS[package]
    stems = files(package)
    assert without <= set(stems)
    for stem in stems:
        values = own_values(package, stem, kind)
        if stem in without:
            assert values == [], f"{stem}.py holds a value, but is said to hold none"
        else:
            assert [value.name.replace("-", "_") for value in values] == [stem]
            assert any(value is values[0] for value in listed), f"{stem} is not in the list"
    assert len(listed) == len(stems) - len(without)
    assert len({value.name for value in listed}) == len(listed)


@pytest.mark.parametrize("scheme", schemes.SCHEMES, ids=lambda scheme: scheme.name)
def test_the_arithmetic_of_every_scheme_is_there(scheme):
    module, attribute = scheme.ops.split(":")
    for ending in ("", *(f"_{dtype}" for dtype in scheme.scale_dtypes)):
        ops = getattr(importlib.import_module(module), attribute + ending)
        assert isinstance(ops, Ops)


def test_no_two_schemes_share_a_name_or_an_alias():
    names = [name for scheme in schemes.SCHEMES for name in (scheme.name, *scheme.aliases)]
    assert len(names) == len(set(names))


def test_a_container_binds_schemes_that_exist():
    known = {scheme.name for scheme in schemes.SCHEMES}
    bound = {name for container in containers.CONTAINERS for name in container.bindings}
    assert bound <= known
    assert bound, "no container binds a scheme"
