"""Losses beyond what was allowed."""

from tests.verify.bench import Fault
from tests.verify.faults_structure import edited

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
]  # fmt: skip
