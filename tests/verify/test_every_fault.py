"""Each fault that verify and --for know of, planted and found by its own message; and no place in
the code that finds something wrong is without a planted fault."""

import ast
import inspect
import json
import re
from pathlib import Path

import pytest

from lowbitcli import api
from lowbitcli.containers import deepseek_v4
from lowbitcli.containers.reading import READS, VERSIONS, Known, No
from lowbitcli.plan.rules_names import WHAT_OF
from lowbitcli.verify import diagnose, orders, plausible, scales
from lowbitcli.verify.lint import RULES
from tests.checkpoints import LAYER, weight
from tests.verify.bench import Bench, Fault
from tests.verify.faults_activations import ACTIVATIONS
from tests.verify.faults_against import AGAINST
from tests.verify.faults_consumers import CONSUMERS
from tests.verify.faults_containers import CONTAINERS
from tests.verify.faults_loaded import LOADED
from tests.verify.faults_losses import LOSSES
from tests.verify.faults_numbers import NUMBERS
from tests.verify.faults_peers import PEERS as OF_PEERS
from tests.verify.faults_structure import STRUCTURE
from tests.verify.planted import DOWN
from tests.verify.sites import sites, watched

LISTS = (
    [*STRUCTURE, *AGAINST, *LOSSES],
    [*NUMBERS, *ACTIVATIONS],
    [*CONTAINERS, *OF_PEERS],
    [*CONSUMERS, *LOADED],
)
FAULTS = [fault for one in LISTS for fault in one]
PAGE = Path(__file__).parents[2] / "docs" / "verify-faults.md"
# Calls that pass on what another function found; those functions are sites, or in PHRASES.
PASSES = {
    "structure.declared",
    "structure.manifest:manifest",
    "structure.manifest:manifest#2",
    "structure.hashes:manifest",
    "consumers._problems:consumer",
}
# Functions that return the message, or a part of it, of a site elsewhere.
PHRASES = (
    plausible._codes,
    plausible._scale_order,
    plausible._padding,
    plausible._of_shape,
    orders.laid_out_otherwise,
    diagnose.reason,
    diagnose._codes,
    diagnose._scales,
    scales._scale,
    deepseek_v4._contradiction,
)
# What stands between two numbers of a message, of which another part is asserted.
MIDDLES = (
    "blocks have no code of 6",
    "of how they vary in that order,",
    "in the declared one",
    "times the source's",
)


@pytest.fixture
def bench(tmp_path, planted) -> Bench:
    return Bench(tmp_path, planted)


@pytest.fixture(scope="module")
def watching():
    with watched() as fired:
        yield fired


@pytest.fixture
def fired(watching):
    """Return a list that (site, message) of what is found in one test is put into."""
    watching.clear()
    return watching


def label(fault: Fault) -> str:
    return f"{fault.site}-{fault.what}" + "".join(f"-{one}" for one in fault.consumers)


@pytest.mark.parametrize("fault", FAULTS, ids=label)
def test_it_is_found_by_its_own_message(bench, fired, fault):
    found = fault.find(bench)
    assert any(site == fault.site and is_in(fault, message) for site, message in fired), fired
    told = [one for one in found.problems if fault.words in one.message]
    assert {one.severity for one in told} == {fault.severity}
    assert fault.severity == "warn" or not found.passed
    for consumer in fault.consumers:
        beginning = VERSIONS[consumer] + ": "
        asked = [one for one in told if one.message.startswith(beginning)]
        assert asked or fault.fails, (consumer, [one.message for one in found.problems])


def is_in(fault: Fault, message: str) -> bool:
    """Are the words in what a site says? Another may say the end of it."""
    return fault.words in message or (len(message) > 3 and message in fault.words)


def test_no_site_is_without_a_planted_fault():
    known = {one.name for one in sites()}
    assert len(known) > 110
    planted = {fault.site for fault in FAULTS}
    assert known - planted == PASSES
    assert planted <= known


def test_no_rule_is_without_a_fault_for_each_of_its_consumers():
    planted = {(fault.site.partition("#")[0], x) for fault in FAULTS for x in fault.consumers}
    for rule in RULES:
        name = f"{rule.check.__module__.rpartition('.')[2]}.{rule.check.__name__}"
        for consumer in rule.consumers:
            assert (name, consumer) in planted


def phrases(function) -> list[str]:
    """Return what a function says: its strings of several words, without what is filled in."""
    tree = ast.parse(inspect.getsource(function))
    doc = ast.get_docstring(tree.body[0], clean=False)
    bugs = [y for x in ast.walk(tree) if isinstance(x, ast.Raise) for y in ast.walk(x)]
    texts = [x.value for x in ast.walk(tree) if isinstance(x, ast.Constant) and x not in bugs]
    return [x.strip() for x in texts if isinstance(x, str) and x != doc and len(x.split()) > 2]


@pytest.mark.parametrize("function", PHRASES, ids=lambda one: one.__name__)
def test_no_phrase_is_without_a_planted_fault(function):
    said = phrases(function)
    assert said
    for phrase in said:
        assert phrase in MIDDLES or any(phrase in x.words or x.words in phrase for x in FAULTS)


def test_what_becomes_of_what_is_missing_is_told_for_each_consumer():
    planted = [x for x in FAULTS if x.site == "rules_names.findings"]
    for told in WHAT_OF.values():
        for consumer, what in told.items():
            assert any(consumer in x.consumers and x.words.endswith(what) for x in planted), what


def answers() -> list[tuple[str, str, str, str]]:
    """Return (container, scheme, consumer, what it says) of all that is not simply read."""
    return [
        (container, scheme, consumer, answer.why)
        for consumer, containers in READS.items()
        for container, schemes in containers.items()
        for scheme, answer in schemes.items()
        if isinstance(answer, No | Known)
    ]


@pytest.mark.parametrize(("container", "scheme"), sorted({one[:2] for one in answers()}))
def test_what_is_not_simply_read_is_told_to_whom_it_concerns(bench, container, scheme):
    """The tables of `reading`, each answer by the words that it has there."""
    output = stored_as(bench, container, scheme)
    for *there, consumer, why in answers():
        if there == [container, scheme]:
            asked = api.verify(output, device="cpu", consumers=[consumer])
            assert any(why in one.message for one in asked.problems), (consumer, why)


PEERS = {("modelopt", "mxfp4"): "modelopt/mxfp4"}
PEERS |= {("torchao", x): "torchao/mx" for x in ("mxfp8", "mxfp4")}
PEERS |= {("torchao", x): "torchao/float8" for x in ("fp8_tensor", "fp8_channel", "fp8_block128")}
PEERS |= {("torchao", "nvfp4"): "torchao/nvfp4"}


def stored_as(bench: Bench, container: str, scheme: str) -> Path:
    """Return a checkpoint of experts and others in a scheme."""
    if (container, scheme) in PEERS:
        return bench.golden(PEERS[container, scheme])
    experts = f"{LAYER}mlp.experts.0."
    names = [DOWN, *(f"{experts}{one}_proj." for one in ("gate", "up", "down"))]
    names += [] if scheme == "fp8_block128" else [f"{LAYER}self_attn.q_proj."]
    tensors = {f"{name}weight": weight(128, 128) for name in names}
    scales = None
    if (container, scheme) == ("modelopt", "fp8_tensor"):
        scales = bench.folder() / "a.json"
        scales.write_text(json.dumps({name[:-1]: 3.0 for name in names}))
    return bench.made(tensors, scheme, container, activation_scales=scales)


def test_the_page_has_every_fault():
    """`python -m tests.verify.test_every_fault` prints its tables."""
    rows = re.findall(r"^\| .* \|$", PAGE.read_text(), re.MULTILINE)
    assert [row for row in rows if "`" in row] == [row for one in LISTS for row in table(one)]


def table(faults: list[Fault]) -> list[str]:
    """Return the rows of the page: what is planted, the words, for whom; each once."""
    return list(
        dict.fromkeys(
            f"| {one.what} | `{one.words}` |"
            + (f" {', '.join(one.consumers)} |" if faults is LISTS[-1] else "")
            for one in faults
        )
    )


if __name__ == "__main__":
    print("\n\n".join("\n".join(table(one)) for one in LISTS))
