"""Our default rules give the bytes of the packages that they follow, on `tests/golden/kernels`.

`provenance.json` there names package, version and function of each oracle. Left out are the inputs
where an oracle is known not to be our rule: matrices of zeros for NVFP4, an amax below the dtype's
tiny for ModelOpt's FP8 and INT8, one row for its per-channel export, one block of MXFP4 by log2.
"""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import golden_adapter
from tests.kernels.samples import difference

GOLDEN = Path(__file__).parents[1] / "golden" / "kernels"
PROVENANCE = json.loads((GOLDEN / "provenance.json").read_text())
FUNCTIONS = {
    name: f for name, f in PROVENANCE["functions"].items() if f["scheme"] in golden_adapter.SCHEMES
}
CASES = [c for c in PROVENANCE["cases"] if c["function"] in FUNCTIONS]


@pytest.fixture(scope="module")
def tensors():
    return load_file(GOLDEN / "inputs.safetensors"), load_file(GOLDEN / "outputs.safetensors")


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['function']}-{c['input']}")
def test_golden(case, tensors):
    inputs, outputs = tensors
    function = FUNCTIONS[case["function"]]
    call = (inputs[case["input"]].clone(), function["scheme"], function["settings"])
    if case.get("refused"):
        with pytest.raises(ValueError, match=r"columns|dimensions"):
            golden_adapter.quantize(*call)
        return
    got = golden_adapter.quantize(*call)
    for role in case["out"]:
        want = outputs[f"{case['function']}|{case['input']}|{role}"].flatten()
        have = got[role].flatten()
        if have.element_size() == 1:
            have = have.view(want.dtype)
        assert difference(have, want) == "", role
