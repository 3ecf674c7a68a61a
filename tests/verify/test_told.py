"""What `lowbit verify` prints of what it found."""

from lowbitcli import tables
from tests.verify.planted import change


def test_a_problem_s_row_names_the_file(planted):
    output = planted.copy("nvfp4", "lowbit", proof=True)
    (output / "model.safetensors").rename(output / "other.safetensors")
    lines = tables.verification_lines(planted.verify(output, source=False))
    (missing,) = [line for line in lines if "only in the manifest" in line]
    (there,) = [line for line in lines if "only in the checkpoint" in line]
    assert missing.split() == [
        "fail",
        "manifest",
        "model.safetensors",
        "only",
        "in",
        "the",
        "manifest",
    ]
    assert there.split()[2] == "other.safetensors"


def test_a_problem_s_row_names_tensor_and_file(planted):
    output = planted.copy("nvfp4", "lowbit")
    change(output, lambda tensors: tensors.__delitem__("model.norm.weight"))
    lines = tables.verification_lines(planted.verify(output))
    assert any(line.split()[:3] == ["fail", "missing", "model.norm.weight"] for line in lines)
