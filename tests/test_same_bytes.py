"""The same source gives the same bytes on every machine and device: digests are kept beside the
tests."""

import json
from pathlib import Path

import pytest

from tests.seeded import SCHEMES, digests, write

KEPT = json.loads((Path(__file__).parent / "golden" / "seeded.json").read_text())


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeded") / "source"
    write(folder)
    return folder


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cpu_gives_the_bytes_that_are_kept(source, tmp_path, scheme):
    assert digests(source, scheme, "cpu", tmp_path / "out") == {"model.safetensors": KEPT[scheme]}


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_cuda_gives_the_bytes_that_are_kept(source, tmp_path, scheme):
    assert digests(source, scheme, "cuda", tmp_path / "out") == {"model.safetensors": KEPT[scheme]}


def test_every_scheme_has_bytes_of_its_own():
    assert len(set(KEPT.values())) == len(SCHEMES) == len(KEPT)
