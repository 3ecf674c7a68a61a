"""Losses beyond what was allowed."""

from tests.checkpoints import weight
from tests.verify.bench import Fault
from tests.verify.faults_structure import edited
from tests.verify.planted import DOWN

LOSSES = [
    Fault(
        "limits._sqnr:quality",
        "a loss beyond --fail-under",
        "dB, below 40 dB",
        edited(None),
        against=True,
        options={"fail_under_db": 40.0},
    ),
    Fault(
        "limits._relative:quality",
        "a loss beyond --max-rel-error",
        ", above 0.01",
        edited(None),
        against=True,
        options={"max_rel_error": 0.01},
    ),
    Fault(
        "limits._sqnr:quality",
        "a loss beyond a threshold of the recipe",
        "below 60 dB, the limit of '*.down_proj'",
        edited(None),
        against=True,
        options={"recipe": 'rules: [{match: "*", scheme: nvfp4}]\nthresholds: '
                           '[{match: "*.down_proj", fail_under_db: 60}]\n'},
    ),
    Fault(
        "limits._thresholds:quality",
        "a threshold of no weight",
        "the threshold of 'nothing' is that of no weight",
        edited(None),
        against=True,
        severity="warn",
        options={"recipe": 'rules: [{match: "*", scheme: nvfp4}]\nthresholds: '
                           '[{match: nothing, fail_under_db: 10}]\n'},
    ),
    Fault(
        "compare._lost:quality",
        "a weight of which hardly anything is left",
        "hardly anything of it is left: an SQNR of 0.0 dB",
        lambda bench: bench.made({DOWN + "weight": weight(128, 128).float() * 1e-40},
                                 "fp8_block128", "lowbit"),
        against=True,
        severity="warn",
    ),
]  # fmt: skip
