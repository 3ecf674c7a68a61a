"""`recipe auto` from a checkpoint to a recipe: budgets, floors, and what a run makes of it."""

import json
import os
import signal

import pytest
import torch

from lowbitcli import api, recipe
from lowbitcli.errors import OutputError, UnsupportedError, UsageError
from lowbitcli.pipeline import memory
from lowbitcli.recipe import schema
from lowbitcli.search import bundle
from lowbitcli.search import text as texts
from lowbitcli.search.write import write
from tests import experts as stacks
from tests.checkpoints import everything_below, single, weight
from tests.checkpoints import write as write_tensors
from tests.search import models
from tests.search.importances import METADATA, by_columns, errors_of
from tests.search.independent import beats_every_uniform_scheme, files

USUAL = "nvfp4,mxfp8,fp8,keep"


def choose(source, output=None, *, allowed=None, **wanted):
    return api.choose(source, api.Wanted(**wanted), allowed or api.Allowed("cpu"), output)


@pytest.mark.parametrize(
    ("make", "bits", "smaller"),
    [(models.dense, 5.8, ("nvfp4",)), (models.experts, 9.0, ("mxfp8", "fp8"))],
)
def test_a_budget_is_met_and_every_uniform_scheme_beaten(tmp_path, make, bits, smaller):
    source = make(tmp_path / "m")
    found = choose(source, bits=bits)
    reached = found.bits(found.chosen.solution.cost)
    assert 0.99 * bits <= reached <= bits
    assert found.chosen.solution.gap == 0
    assert beats_every_uniform_scheme(source, tmp_path, found, smaller) == len(smaller)
    assert {name for name, one in found.uniform.items() if found.bits(one.cost) <= bits} == {
        *smaller,
        "nvfp4",
    }


def test_bits_are_those_of_the_plan(tmp_path):
    source = models.dense(tmp_path / "m")
    path = tmp_path / "r.yaml"
    found = choose(source, path, bits=6.0, schemes="nvfp4,fp8")
    plan = api.plan_quantize(source, None, api.Request(recipe=path))
    assert plan.bits_per_weight == pytest.approx(found.bits(found.chosen.solution.cost), rel=1e-12)
    assert {w.target.name for w in plan.quantized} == {"nvfp4", "fp8_tensor"}
    assert sum(w.numel for w in plan.quantized) == found.elements


def test_a_size_is_met(tmp_path):
    source = models.dense(tmp_path / "m")
    least, most = (
        api.plan_quantize(source, None, api.Request(scheme=x)).bytes_out for x in ("nvfp4", "mxfp8")
    )
    for share in (0.1, 0.9):
        wanted = int(least + share * (most - least))
        found = choose(source, tmp_path / f"{share}.yaml", size=wanted)
        out = tmp_path / f"out-{share}"
        api.quantize(source, out, api.Request(recipe=tmp_path / f"{share}.yaml"), device="cpu")
        assert files(out) == found.chosen.bytes_out
        assert 0.99 * wanted <= files(out) <= wanted


def test_the_floor_holds_for_every_weight(tmp_path):
    source = models.dense(tmp_path / "m")
    free = choose(source, bits=6.5)
    worst = min(
        score.choices[name].least_db
        for score, name in zip(free.scores, free.chosen.names, strict=True)
    )
    floor = worst + 0.02
    path = tmp_path / "r.yaml"
    found = choose(source, path, bits=6.5, floor_db=floor)
    assert found.chosen.names != free.chosen.names
    assert found.chosen.solution.error >= free.chosen.solution.error
    made = api.quantize(source, tmp_path / "q", api.Request(recipe=path), device="cpu")
    assert min(one.sqnr_db for one in made.errors.values()) >= floor


def test_a_floor_that_nothing_reaches_is_told_with_the_weight(tmp_path):
    source = models.dense(tmp_path / "m", layers=1)
    with pytest.raises(
        UnsupportedError, match=r"no scheme reaches 60 dB for model\.layers"
    ) as told:
        choose(source, bits=8.5, floor_db=60, schemes="nvfp4,mxfp8")
    assert "comes nearest, with 3" in told.value.message
    assert told.value.hint == "add keep to --schemes, or ask for a lower --floor-db"
    assert set(choose(source, bits=16, floor_db=60).chosen.names) == {"keep"}


def test_a_budget_below_the_least_is_told_with_the_least(tmp_path):
    source = models.dense(tmp_path / "m", layers=1)
    with pytest.raises(UsageError, match=r"4\.2 bits are too few: the least is (4\.5\d+)$") as told:
        choose(source, tmp_path / "r.yaml", bits=4.2)
    least = float(told.value.message.split()[-1])
    assert f"--bits {least}" in told.value.hint
    assert set(choose(source, bits=least).chosen.names) == {"nvfp4"}
    with pytest.raises(UsageError, match=r"the least is \d\.\d+ with 21 dB or more") as told:
        choose(source, bits=least, floor_db=21)
    assert told.value.hint.endswith(", or a lower --floor-db")
    with pytest.raises(UsageError, match="bytes are too few: the least is") as told:
        choose(source, size=1000)
    size = int(told.value.message.split()[-1])
    assert choose(source, size=size).chosen.bytes_out <= size
    assert not (tmp_path / "r.yaml").exists()


def test_more_than_all_takes_nothing_away(tmp_path):
    source = models.dense(tmp_path / "m", layers=1)
    found = choose(source, bits=20)
    assert set(found.chosen.names) == {"keep"}
    assert found.chosen.solution.error == 0
    assert "keep: true" in found.chosen.text


def test_a_recipe_for_stacks_says_their_names(tmp_path):
    source = stacks.model(tmp_path / "m", "gpt_oss")
    path = tmp_path / "r.yaml"
    choose(source, path, bits=4.6, schemes=USUAL)
    made = api.quantize(source, tmp_path / "q", api.Request(recipe=path), device="cpu")
    assert {w.target.name for w in made.plan.quantized} == {"nvfp4"}
    assert len(made.plan.quantized) == 3 * stacks.E


def test_a_scale_rule_is_written_down(tmp_path):
    source = models.dense(tmp_path / "m", layers=2)
    path = tmp_path / "r.yaml"
    found = choose(source, path, bits=4.7, schemes="nvfp4,nvfp4:mse,fp8")
    assert "nvfp4" not in found.chosen.names
    made = api.quantize(source, tmp_path / "q", api.Request(recipe=path), device="cpu")
    assert {w.rule for w in made.plan.quantized if w.target.name == "nvfp4"} == {"mse"}


def test_the_recipe_is_one_like_any_other(tmp_path, lowbit):
    source = models.experts(tmp_path / "m")
    path = tmp_path / "r.yaml"
    found = choose(source, path, bits=7)
    text = path.read_text()
    assert text == found.chosen.text
    assert lowbit("recipe", "check", path, source).code == 0
    loaded = recipe.load(str(path))
    rules = {rule.scheme for rule in loaded.rules}
    assert rules == {{"nvfp4": "nvfp4", "mxfp8": "mxfp8", "fp8": "fp8_tensor"}[x]
                     for x in set(found.chosen.names)}  # fmt: skip
    assert schema()["properties"].keys() >= {"container", "rules", "description"}
    assert f"sha256 {found.digest}" in text
    assert "budget   7 bits" in text
    assert all(f"  {score.name}\n" in text for score in found.scores)
    assert sum(line.startswith("      - ") for line in text.splitlines()) <= 3 * len(rules) + 6


def test_patterns_that_take_more_than_is_meant_are_not_believed(tmp_path, monkeypatch):
    source = models.dense(tmp_path / "m", layers=2)

    def everything(labels, others):
        return {label: ["*"] for label in labels.values()}

    monkeypatch.setattr(texts, "patterns", everything)
    with pytest.raises(UnsupportedError, match=r"no patterns tell model\.layers.* from others"):
        choose(source, bits=6.0)


def test_a_name_that_is_another_one_but_for_weight_is_told_of(tmp_path):
    tensors = {"a.proj.weight": weight(64, 64), "a.proj": weight(64, 64, seed=1)}
    source = single(tmp_path / "m", tensors)
    with pytest.raises(UnsupportedError, match=r"the choice cannot be said in a recipe: .*a\.proj"):
        choose(source, bits=9.0)


def test_the_same_bytes_from_any_memory_and_number_of_threads(tmp_path, monkeypatch):
    source = models.experts(tmp_path / "m", layers=2, number=3)
    usual = choose(source, bits=6.3).chosen.text
    assert choose(source, bits=6.3, allowed=api.Allowed("cpu", 1 << 30)).chosen.text == usual
    for threads, elements in ((1, 1 << 13), (3, 1 << 12)):
        small = memory.Budget(threads, elements, 0)
        monkeypatch.setattr(memory, "budget", lambda *_, small=small: small)
        assert choose(source, bits=6.3).chosen.text == usual


def test_importance_weighs_the_errors_and_is_named(tmp_path):
    source = models.dense(tmp_path / "m", layers=2)
    file = tmp_path / "h.safetensors"
    by = by_columns(file, source)
    found = choose(source, bits=6.0, importance=file, schemes="nvfp4,fp8")
    plain = choose(source, bits=6.0, schemes="nvfp4,fp8")
    sums = errors_of(source, "nvfp4,fp8", by).weighed
    for score, other in zip(found.scores, plain.scores, strict=True):
        for name, choice in score.choices.items():
            some = [sums[name][member] for member in score.members]
            assert choice.error == pytest.approx(sum(one.error / one.signal for one in some))
            assert choice.error != pytest.approx(other.choices[name].error, rel=1e-4)
            assert choice.least_db == other.choices[name].least_db
    assert f"weighed  h by h.safetensors (512 random tokens, sha256 {by.digest}), 14 of 14" in (
        found.chosen.text
    )
    write_tensors(file, {"other": torch.zeros(8, dtype=torch.int8)}, METADATA)
    with pytest.raises(UsageError, match="has the importance of none of the 14 weights"):
        choose(source, bits=6.0, importance=file, schemes="nvfp4,fp8")


# What is written, and what is not.


def test_nothing_is_left_behind_by_what_fails(tmp_path):
    source = models.dense(tmp_path / "m", layers=1)
    before = everything_below(tmp_path)
    path = tmp_path / "r.yaml"
    with pytest.raises(UsageError, match="too few"):
        choose(source, path, bits=2)
    with pytest.raises(UsageError, match="a recipe needs a budget"):
        choose(source, path)
    with pytest.raises(UsageError, match="exclude each other"):
        choose(source, path, bits=5, size=5)
    with pytest.raises(UsageError, match="no budget"):
        choose(source, path, bits=0.0)
    with pytest.raises(UsageError, match="a finite number, not nan"):
        choose(source, path, bits=float("nan"))
    with pytest.raises(UsageError, match="nothing but keep"):
        choose(source, path, bits=5, schemes="keep")
    with pytest.raises(UsageError, match="no name for a recipe"):
        choose(source, source / "model.safetensors", bits=5)
    with pytest.raises(OutputError, match="is no directory"):
        choose(source, tmp_path / "none" / "r.yaml", bits=5)
    assert everything_below(tmp_path) == before


def test_a_recipe_that_exists_is_replaced_by_force_alone(tmp_path):
    source = models.dense(tmp_path / "m", layers=1)
    path = tmp_path / "r.yaml"
    path.write_text("mine")
    with pytest.raises(OutputError, match="exists"):
        choose(source, path, bits=5)
    assert path.read_text() == "mine"
    found = api.choose(source, api.Wanted(bits=5), api.Allowed("cpu"), path, force=True)
    assert path.read_text() == found.chosen.text
    assert sorted(x.name for x in tmp_path.iterdir()) == ["m", "r.yaml"]
    (tmp_path / "d.yaml").mkdir()
    with pytest.raises(OutputError, match="exists"):
        api.choose(source, api.Wanted(bits=5), api.Allowed("cpu"), tmp_path / "d.yaml", force=True)


def test_one_that_appears_meanwhile_stays(tmp_path):
    source = models.dense(tmp_path / "m", layers=1)
    path = tmp_path / "r.yaml"

    def meanwhile(done, total, name):
        path.write_text("somebody else's")

    with pytest.raises(OutputError, match="exists"):
        wanted, allowed = api.Wanted(bits=5), api.Allowed("cpu")
        api.choose(source, wanted, allowed, path, progress=meanwhile)
    assert path.read_text() == "somebody else's"


def test_one_that_appears_in_the_last_moment_stays_too(tmp_path, monkeypatch):
    path = tmp_path / "r.yaml"
    monkeypatch.setattr(os, "fsync", lambda _: path.write_text("somebody else's"))
    with pytest.raises(OutputError, match="File exists"):
        write("mine", path, force=False)
    assert path.read_text() == "somebody else's"
    write("mine", path, force=True)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("r.yaml", "mine")]


def test_ctrl_c_ends_it_and_writes_nothing(tmp_path, lowbit, monkeypatch):
    source = models.dense(tmp_path / "m")
    before, sent = bundle.Rows.parts, []

    def parts(self, some, *, again=False):
        if not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))
        return before(self, some, again=again)

    monkeypatch.setattr(bundle.Rows, "parts", parts)
    path = tmp_path / "r.yaml"
    said = lowbit("recipe", "auto", source, "--bits", "5", "-o", path)
    assert (said.code, said.err, said.out) == (130, "error: interrupted\n", "")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["m"]


# The command.


def test_the_command_prints_the_recipe_or_the_curve(tmp_path, lowbit):
    source = models.dense(tmp_path / "m")
    said = lowbit("recipe", "auto", source, "--bits", "5.2", "-q")
    assert said.code == 0
    path = tmp_path / "r.yaml"
    kept = lowbit("recipe", "auto", source, "--bits", "5.2", "-o", path)
    assert kept.code == 0
    assert path.read_text() == said.out
    assert "<- chosen" in kept.out
    assert kept.out.endswith(f"recipe: {path}\n")
    curve = lowbit("recipe", "auto", source)
    assert curve.code == 0
    assert "all nvfp4" in curve.out and "chosen" not in curve.out
    assert lowbit("recipe", "auto", source, "-o", path).code == 2
    assert lowbit("recipe", "auto", source, "--bits", "1").code == 2
    assert lowbit("recipe", "auto", source, "--size", "much").code == 2
    for option in ("--bits", "--floor-db"):
        for number in ("nan", "inf", "-inf"):
            said = lowbit("recipe", "auto", source, option, number)
            assert said.code == 2
            assert f"error: {option} takes a finite number, not {number}" in said.err


def test_the_document_has_every_figure(tmp_path, lowbit):
    source = models.dense(tmp_path / "m")
    said = lowbit(
        "recipe", "auto", source, "--bits", "5.2", "--json", "--schemes", "nvfp4,fp8,keep,nvfp4"
    )
    found = json.loads(said.out)
    note = "--schemes: nvfp4 is there twice; each is measured once"
    assert (found["notes"], f"note: {note}" in said.err) == ([note], True)
    assert found["schemes"] == ["nvfp4", "fp8", "keep"]
    assert found["chosen"]["bits"] <= 5.2
    assert found["chosen"]["gap"] == 0
    assert found["chosen"]["error"] == pytest.approx(
        sum(one["choices"][one["chosen"]]["error"] for one in found["units"])
    )
    assert recipe.load(str(_saved(tmp_path, found["chosen"]["recipe"]))).rules
    bits = [one["bits"] for one in found["curve"]]
    errors = [one["error"] for one in found["curve"]]
    assert bits == sorted(bits) and errors == sorted(errors, reverse=True)
    assert errors[-1] == 0 and found["curve"][-1]["db"] == "inf"
    assert sum(found["chosen"]["elements"].values()) == found["elements"]
    assert set(found["uniform"]) == {"nvfp4", "fp8", "keep"}


def _saved(folder, text):
    path = folder / "saved.yaml"
    path.write_text(text)
    return path
