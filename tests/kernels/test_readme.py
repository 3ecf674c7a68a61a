"""The examples of kernels/README.md run as they stand, on the CPU and with a smaller weight."""

import re

from tests.kernels.test_alone import KERNELS


def test_examples_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (KERNELS / "README.md").read_text(), re.S)
    code = "\n".join(blocks)
    assert len(blocks) == 3 and code.count('4096, 4096, dtype=torch.bfloat16, device="cuda"') == 1
    names: dict = {}
    exec(code.replace("4096, 4096", "256, 512").replace('"cuda"', '"cpu"'), names)
    w, lost, shown = names["w"], names["lost"], capsys.readouterr().out
    assert names["back"].shape == w.shape and names["w_again"].shape == w.shape
    assert lost.count == w.numel() and 0 < lost.relative < 0.11 and str(lost.cosine) in shown
    assert (names["w_again"] - w).abs().max() < 1e-5
    assert 0 < (names["stored"] - w).norm() / w.float().norm() < 0.11
    assert 0 < (names["k_again"].float() - names["k"].float()).norm() / names["k"].norm() < 0.11
