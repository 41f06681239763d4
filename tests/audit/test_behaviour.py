"""A text as a witness: on the trained tiny Llama with one mistake at a time, and on tiny models of many families."""

import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from glassblock.audit import behaviour_study as bounds
from glassblock.audit.audit import AuditCancelled, AuditQuestion, audit_checkpoint
from glassblock.audit.behaviour_findings import behaviour_summary
from glassblock.audit.behaviour_hypotheses import exchange, hypotheses_of
from glassblock.audit.behaviour_types import BehaviourStudy, Hypothesis, Judged, Reading, Weights
from glassblock.audit.fix import Unrepaired
from glassblock.audit.gather import gather
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.changes import Add
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.checkpoint.patches import Alter, Declare, Edit, patched
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.text_states import token_log_likelihoods
from glassblock.checkpoint.text_variants import Variant, variant_log_likelihoods
from glassblock.errors import FamilyMismatch, InvalidValue
from glassblock.numerics.paired_differences import PairedDifference
from glassblock.wire.audits import Finding, Fix, Report
from glassblock.wire.behaviour import Behaviour, BehaviourHypothesis
from makers import tiny_checkpoint
from torch import Tensor

TRAINED = Path(__file__).resolve().parents[2] / "examples" / "tiny-llama"
SWAPPED = "ffn/gate-up-swapped"
# The example was trained on the texts of Python, byte by byte.
TEXT = (
    "The standard library is a collection of modules that ship with Python. A module may define functions and classes, "
    "and a program that imports it can use them by name. If the name is not found, an exception is raised."
)
# Rounding of float32 in the mean of some two hundred likelihoods near 2, each off by 1e-6 at most.
FLOAT32 = 2e-6


def ids_of(text: str = TEXT) -> Tensor:
    return torch.tensor(list(text.encode()))


def audited(checkpoint: Checkpoint | Path, **question: Any) -> tuple[Report, Behaviour]:
    report = audit_checkpoint(checkpoint, AuditQuestion(token_ids=question.pop("token_ids", ids_of()), **question))
    assert report.behaviour is not None
    return report, report.behaviour


def planted(*edits: Edit) -> Checkpoint:
    return patched(open_checkpoint(TRAINED), edits)


def swap(checkpoint: Checkpoint, layers: Iterable[int]) -> Checkpoint:
    for layer in layers:
        patch = exchange(checkpoint, layer)
        assert not isinstance(patch, Unrepaired)
        checkpoint = patched(checkpoint, patch)
    return checkpoint


def hypothesis(behaviour: Behaviour, **told: Any) -> BehaviourHypothesis:
    (found,) = [one for one in behaviour.hypotheses if all(getattr(one, key) == value for key, value in told.items())]
    return found


def better(behaviour: Behaviour) -> list[str]:
    return [one.words for one in behaviour.hypotheses if one.reading == "better"]


@pytest.fixture(scope="module")
def healthy() -> tuple[Report, Behaviour]:
    return audited(TRAINED)


@pytest.fixture(scope="module")
def mean(healthy: tuple[Report, Behaviour]) -> float:
    found = healthy[1].mean
    assert found is not None
    return found


def test_a_healthy_model_raises_no_suspicion(healthy: tuple[Report, Behaviour]) -> None:
    report, behaviour = healthy
    assert (report.findings, report.verdict) == ((), "pass")
    assert better(behaviour) == []
    assert behaviour.tokens == len(TEXT) - 1
    assert {one.kind for one in behaviour.hypotheses} == {"swap", "eps", "offset", "activation"}
    # Every layer is cheap enough to be asked about here, and each has a say of the weights beside it.
    assert {one.layers for one in behaviour.hypotheses if len(one.layers) == 1} == {(0,), (1,), (2,), (3,)}
    assert {one.weights for one in behaviour.hypotheses if one.kind == "swap"} == {"as-named"}
    assert behaviour.not_asked == ()


def test_the_mean_is_that_of_the_whole_model(mean: float) -> None:
    alone = token_log_likelihoods(open_checkpoint(TRAINED), ids_of(), "cpu", ReadMeter())
    assert mean == float(alone.double().mean())


@pytest.mark.parametrize("layer", [0, 2])
def test_the_layer_put_right_has_the_healthy_likelihood_bit_for_bit(layer: int, mean: float) -> None:
    report, behaviour = audited(swap(open_checkpoint(TRAINED), [layer]))
    right = hypothesis(behaviour, layers=(layer,))
    assert (right.mean, right.weights, right.reading) == (mean, "exchanged", "better")
    (finding,) = report.findings
    assert (finding.rule, finding.layer, finding.level) == (SWAPPED, layer, "error")
    told = finding.evidence["behaviour"]
    assert told.startswith(f"layer {layer} with gate and up put right: the mean log-likelihood rises by ")
    assert f"nats over {len(TEXT) - 1} tokens" in told
    assert "within the noise" not in told
    assert right.standard_error is not None
    assert right.difference > behaviour.standard_errors * right.standard_error


def test_several_layers_are_put_right_alone_and_together(mean: float) -> None:
    report, behaviour = audited(swap(open_checkpoint(TRAINED), [1, 3]))
    together = hypothesis(behaviour, layers=(1, 3))
    assert (together.mean, together.reading) == (mean, "better")
    for layer in (1, 3):
        alone = hypothesis(behaviour, layers=(layer,))
        assert alone.weights == "exchanged"
        assert alone.mean < mean
    assert [(finding.rule, finding.layer) for finding in report.findings] == [(SWAPPED, 1), (SWAPPED, 3)]
    assert all("behaviour" in finding.evidence for finding in report.findings)
    assert any("repair, and ask again" in note for note in behaviour.notes)


def test_every_layer_exchanged(mean: float) -> None:
    _, behaviour = audited(swap(open_checkpoint(TRAINED), range(4)))
    assert hypothesis(behaviour, layers=(0, 1, 2, 3)).mean == mean


MISTAKES: dict[str, tuple[tuple[Edit, ...], str, str, str]] = {
    "activation": ((Declare("hidden_act", "relu"),), "activation", "silu", "config/activation-conflict"),
    "eps": ((Declare("rms_norm_eps", 1.0),), "eps", "1e-05", "norm/eps-mismatch"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_no_weight_tells_is_a_warning(mistake: str, mean: float) -> None:
    edits, kind, value, rule = MISTAKES[mistake]
    report, behaviour = audited(planted(*edits))
    right = hypothesis(behaviour, kind=kind, value=value)
    assert (right.mean, right.reading) == (mean, "better")
    finding = warned(report, rule)
    assert finding.evidence["tokens"] == len(TEXT) - 1
    assert finding.evidence["value"] == value or any(finding.evidence["value"] in rival for rival in right.rivals)
    assert "A text alone convicts nothing" in finding.message
    assert report.verdict == "pass", "no error, whatever the text suspects"


def test_epsilons_that_the_text_does_not_tell_apart_are_both_named() -> None:
    report, _ = audited(planted(Declare("rms_norm_eps", 1.0)))
    told = warned(report, "norm/eps-mismatch").message
    assert "eps 1e-05 in every norm" in told
    assert "eps 1e-06 in every norm" in told


@pytest.mark.parametrize(("added", "undone"), [(1.0, "-1"), (-1.0, "+1")])
def test_an_offset_in_the_gains_is_undone(added: float, undone: str, mean: float) -> None:
    names = [name for name in open_checkpoint(TRAINED).entries if "norm" in name]
    report, behaviour = audited(planted(*(Alter(name, (Add(added),)) for name in names)))
    right = hypothesis(behaviour, kind="offset", value=undone)
    # One rounding of a gain when 1 is added, in float32, and one when it is taken away.
    assert right.mean == pytest.approx(mean, abs=FLOAT32)
    assert right.reading == "better"
    warned(report, "norm/offset")


def warned(report: Report, rule: str) -> Finding:
    (found,) = [finding for finding in report.findings if finding.rule == rule and finding.level == "warning"]
    assert found.certainty == "statistical"
    return found


def test_only_asked_rules_speak() -> None:
    report, behaviour = audited(planted(Declare("hidden_act", "relu")), rules=("container/header",))
    assert report.findings == ()
    assert hypothesis(behaviour, value="silu").reading == "better"


def test_open_layers_are_asked_first_and_stay_open(tmp_path: Path) -> None:
    """Gates of random numbers: neither the weights nor a text can tell."""
    report, behaviour = audited(tiny_checkpoint("llama", tmp_path / "random"), token_ids=torch.arange(40))
    assert report.verdict == "inconclusive"
    assert [one.layers for one in behaviour.hypotheses[:2]] == [(0,), (1,)]
    assert {one.weights for one in behaviour.hypotheses if one.kind == "swap"} == {"undecidable"}
    assert not any(finding.level == "error" for finding in report.findings)


NOTHING_ASKED = (0.0, None, (), (), ())


def asked(behaviour: Behaviour) -> tuple[object, ...]:
    return (
        behaviour.forward_passes,
        behaviour.mean,
        behaviour.hypotheses,
        behaviour.not_asked,
        behaviour.notes,
    )


@pytest.mark.parametrize(("tokens", "told"), [(2, "1 token"), (20, "19 tokens"), (32, "31 tokens")])
def test_a_text_that_is_short_is_not_asked(tokens: int, told: str) -> None:
    report, behaviour = audited(planted(Declare("hidden_act", "relu")), token_ids=ids_of()[:tokens])
    assert behaviour.not_judged == f"{told}: 32 at least are needed"
    assert (behaviour.tokens, asked(behaviour)) == (tokens - 1, NOTHING_ASKED)
    assert (report.findings, report.verdict) == ((), "pass")


def test_the_shortest_text_that_is_asked() -> None:
    _, behaviour = audited(TRAINED, token_ids=torch.arange(33))
    assert (behaviour.not_judged, behaviour.tokens) == (None, 32)
    assert behaviour.hypotheses


@pytest.mark.parametrize("repeated", ["e", "ab", "\n", "the ", "0123456789"])
def test_a_text_that_repeats_itself_is_not_asked(repeated: str) -> None:
    text = repeated * (200 // len(repeated))
    report, behaviour = audited(TRAINED, token_ids=ids_of(text))
    assert report.findings == ()
    assert behaviour.not_judged == (
        f"{len(text) - 1} tokens, {len(repeated)} of them without what repeats itself: 32 at least are needed"
    )
    assert asked(behaviour) == NOTHING_ASKED


NONSENSE: dict[str, Tensor] = {
    "every byte in turn": torch.arange(40),
    "all bytes": torch.arange(256),
    **{
        f"{count} bytes at random": torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(count))
        for count in (40, 100, 300)
    },
}


@pytest.mark.parametrize("case", NONSENSE)
@pytest.mark.parametrize("checkpoint", ["healthy", "relu"])
def test_nonsense_is_no_witness(case: str, checkpoint: str) -> None:
    """Whatever flattens the logits makes it likelier by many nats, and no likelier than by chance."""
    report, behaviour = audited(
        TRAINED if checkpoint == "healthy" else planted(Declare("hidden_act", "relu")), token_ids=NONSENSE[case]
    )
    assert max(one.difference for one in behaviour.hypotheses) > 5
    assert report.findings == ()
    assert {one.reading for one in behaviour.hypotheses} == {"undecided"}
    (told,) = [note for note in behaviour.notes if note.startswith("No witness of ")]
    assert "(-5.545 nats)" in told, "ln 256"
    assert not any(note.startswith("Contradiction") for note in behaviour.notes)


def test_a_text_is_looked_at_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_TOKENS", 100)
    _, whole = audited(TRAINED)
    _, first = audited(TRAINED, token_ids=ids_of()[:100])
    assert (whole.tokens, whole.mean, whole.hypotheses) == (99, first.mean, first.hypotheses)
    (left,) = whole.not_asked
    assert left.words == f"{len(TEXT) - 100} tokens of the text after the first 100"
    assert "100 tokens are the bound" in left.reason
    assert first.not_asked == ()
    _, several = audited(TRAINED, token_ids=ids_of()[:180].reshape(4, 45))
    assert (several.texts, several.tokens) == (2, 88)
    assert [left.words for left in several.not_asked] == ["90 tokens of the text after the first 90"]


def test_several_texts() -> None:
    rows = ids_of()[:120].reshape(2, 60)
    _, behaviour = audited(TRAINED, token_ids=rows)
    assert (behaviour.texts, behaviour.tokens) == (2, 118)


def test_against_another_engine_its_epsilon_is_asked() -> None:
    report, behaviour = audited(TRAINED, against={"rms_norm_eps": 0.5})
    theirs = hypothesis(behaviour, kind="eps", value="0.5")
    assert theirs.reading == "worse"
    (conflict,) = [finding for finding in report.findings if finding.rule == "config/eps-conflict"]
    assert conflict.evidence["behaviour"].startswith("eps 0.5 in every norm: the mean log-likelihood falls by ")


def test_a_finding_about_an_offset_has_the_text_beside_it(tmp_path: Path) -> None:
    """Gains near 1 where the family adds 1: a warning of the weights alone."""
    names = [name for name in open_checkpoint(tiny_checkpoint("gemma3", tmp_path / "g")).entries if "norm" in name]
    rows = {name: torch.full(open_checkpoint(tmp_path / "g").entries[name].shape, 1.1) for name in names}
    report, _ = audited(tiny_checkpoint("gemma3", tmp_path / "folded", tensors=rows), token_ids=torch.arange(40))
    told = [finding.evidence["behaviour"] for finding in report.findings if finding.rule == "norm/offset"]
    assert len(told) == 1, "once, by the weights, even where the text suspects the same"
    assert told[0].startswith(("1 added to every gain of the norms", "1 taken from every gain of the norms"))


NOTES: dict[str, tuple[Weights, Reading, str]] = {
    "convicted, and worse when put right": ("exchanged", "worse", "Contradiction: the weights convict"),
    "as named, and better exchanged": ("as-named", "better", "Contradiction: the weights say as named"),
    "open, and better as it stands": ("undecidable", "worse", "prefers it as it stands"),
    "open, and better exchanged": ("undecidable", "better", "prefers it otherwise"),
}


@pytest.mark.parametrize("case", NOTES)
def test_where_weights_and_text_differ_a_note_says_so(case: str) -> None:
    weights, reading, told = NOTES[case]
    checkpoint = open_checkpoint(TRAINED)
    asked = Hypothesis("swap", "layer 2 otherwise", lambda: Variant(checkpoint), (2,), weights=weights)
    difference = PairedDifference(0.5 if reading == "better" else -0.5, 0.05, 100)
    study = BehaviourStudy(1, 100, -2.0, (Judged(asked, -1.5, difference, reading),), standard_errors=3.9)
    assert any(told in note and "by 0.5 ± 0.05 nats over 100 tokens" in note for note in behaviour_summary(study).notes)


def test_captures_that_show_an_engine_at_fault_convict_no_rows() -> None:
    finding = Finding(
        rule=SWAPPED, level="error", certainty="proved", layer=1, message="", evidence={"captures": "engine"}
    )
    evidence = gather(
        open_checkpoint(TRAINED),
        AuditQuestion(),
        device=torch.device("cpu"),
        progress=lambda _done, _total, _message: None,
        cancelled=lambda: False,
    )
    offered = hypotheses_of(evidence, [finding], ())
    assert {one.weights for one in offered if isinstance(one, Hypothesis) and one.kind == "swap"} == {"as-named"}
    names = tuple(f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
    joined = finding.model_copy(
        update={"tensors": names, "fix": Fix(action="swap-tensors", description="", tensors=names)}
    )
    offered = hypotheses_of(evidence, [joined], ())  # weights that say the same gave it its repair
    (of_layer,) = (one for one in offered if isinstance(one, Hypothesis) and one.layers == (1,))
    assert of_layer.weights == "exchanged"


# What is not asked.


def test_the_bound_leaves_out_what_is_least_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "FORWARD_PASSES", 4.5)
    broken = swap(open_checkpoint(TRAINED), [1])
    _, behaviour = audited(broken)
    assert behaviour.forward_passes <= 4.5
    assert behaviour.hypotheses[0].layers == (1,)
    assert {one.reason for one in behaviour.not_asked} == {"4.5 forward passes are the bound (--certify lifts it)"}
    _, lifted = audited(broken, certify=True)
    assert lifted.not_asked == ()
    assert (lifted.bound, behaviour.bound) == (None, 4.5)
    assert len(lifted.hypotheses) == len(behaviour.hypotheses) + len(behaviour.not_asked)


def test_layers_that_nobody_suspects_are_asked_where_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "CHEAP_FLOPS", 0.0)
    _, behaviour = audited(TRAINED)
    assert not [one for one in behaviour.hypotheses if len(one.layers) == 1]
    assert [one.words for one in behaviour.not_asked] == [f"gate and up of layer {n} exchanged" for n in (3, 2, 1, 0)]


def test_states_are_held_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "STATES_BYTES", 3 * 4 * 64 * len(TEXT))
    _, behaviour = audited(TRAINED)
    assert len(behaviour.hypotheses) == 3
    assert any("shorter text" in one.reason for one in behaviour.not_asked)


def test_a_family_whose_layers_are_not_run_is_not_judged(tmp_path: Path) -> None:
    directory = tiny_checkpoint(
        "opt", tmp_path / "opt", tensors={"model.decoder.layers.0.self_attn.q_proj.weight": None}
    )
    report, behaviour = audited(directory, token_ids=torch.arange(20))
    assert behaviour.not_judged is not None
    assert "q_proj" in behaviour.not_judged
    assert (behaviour.mean, behaviour.hypotheses, behaviour.notes) == (None, (), ())
    assert report.checkpoint.family == "opt"


@pytest.mark.parametrize("damage", ["truncated", "unknown"])
def test_a_damaged_checkpoint_is_audited_and_not_judged(damage: str, tmp_path: Path) -> None:
    shutil.copytree(TRAINED, tmp_path / "broken")
    if damage == "truncated":
        weights = tmp_path / "broken" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        (tmp_path / "broken" / "config.json").write_text(json.dumps({"model_type": "llamax"}))
    report, behaviour = audited(tmp_path / "broken")
    assert report.verdict == "fail"
    assert behaviour.not_judged is not None
    assert behaviour.mean is None


def test_numbers_that_are_none_are_not_judged(tmp_path: Path) -> None:
    gain = torch.full((48,), float("nan"))
    directory = tiny_checkpoint("llama", tmp_path / "nan", tensors={"model.norm.weight": gain})
    report, behaviour = audited(directory, token_ids=torch.arange(40))
    assert behaviour.not_judged is not None
    assert "nan" in behaviour.not_judged
    assert report.verdict == "fail"


@pytest.mark.parametrize(("ids", "told"), [([5], "one token"), ([1, 256], "256"), ([1, -1], "-1")])
def test_a_text_that_is_none_of_this_model_is_refused(ids: list[int], told: str) -> None:
    with pytest.raises(InvalidValue, match=told) as caught:
        audited(TRAINED, token_ids=torch.tensor(ids))
    assert caught.value.field == "token_ids"


def test_it_stops_when_it_is_told_to() -> None:
    messages: list[str] = []

    def progress(_done: int, _total: int, message: str) -> None:
        messages.append(message)

    def cancelled() -> bool:
        return any("the text in layer 1" in message for message in messages)

    with pytest.raises(AuditCancelled):
        audit_checkpoint(TRAINED, AuditQuestion(token_ids=ids_of()), progress=progress, cancelled=cancelled)
    assert "the text in layer 2" not in messages


# The walk through the layers.


def test_a_variant_of_one_layer_reads_that_layer_once_more() -> None:
    checkpoint = open_checkpoint(TRAINED)
    other = swap(checkpoint, [3])

    def read(*variants: Variant) -> int:
        meter = ReadMeter()
        variant_log_likelihoods(checkpoint, ids_of(), variants, "cpu", meter)
        return meter.bytes

    layer = sum(entry.bytes for name, entry in checkpoint.entries.items() if ".layers.3." in name)
    head = checkpoint.entries["model.embed_tokens.weight"].bytes + checkpoint.entries["model.norm.weight"].bytes
    assert read(Variant(other, frozenset({3}))) - read() == layer + head


def test_a_variant_that_cannot_be_run_is_a_value() -> None:
    checkpoint = open_checkpoint(TRAINED)
    row = checkpoint.require_usable()
    without = replace(checkpoint, family=replace(row, attention=None))
    declared, (other,) = variant_log_likelihoods(checkpoint, ids_of(), [Variant(without)], "cpu", ReadMeter())
    assert isinstance(other, FamilyMismatch)
    assert torch.isfinite(declared).all()


GATED = ("llama", "qwen3", "gemma3", "phi3", "olmo2", "cohere", "mixtral", "qwen2_moe", "gpt_oss", "granite")
PLAIN = ("gpt2", "opt", "falcon")


@pytest.mark.parametrize("family", GATED)
def test_exchanging_twice_is_as_it_was(family: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(family, tmp_path / family))
    once = swap(checkpoint, [1])
    twice = swap(once, [1])
    ids = torch.arange(12)
    declared, others = variant_log_likelihoods(
        checkpoint, ids, [Variant(once, frozenset({1})), Variant(twice, frozenset({1}))], "cpu", ReadMeter()
    )
    first, second = others
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert torch.equal(second, declared)
    assert not torch.equal(first, declared)


@pytest.mark.parametrize("family", [*GATED, *PLAIN])
def test_every_kind_of_family_is_asked(family: str, tmp_path: Path) -> None:
    report, behaviour = audited(tiny_checkpoint(family, tmp_path / family), token_ids=torch.arange(48).view(2, 24))
    assert behaviour.not_judged is None
    asked = {one.kind for one in behaviour.hypotheses}
    assert ("swap" in asked) is (family in GATED)
    declares = any(norm.eps.keys for norm in ARCHITECTURES[family].norms)
    assert ("eps" in asked) is declares, "of a family that fixes it no config could say another one"
    assert ("activation" in asked) is (family != "gpt_oss"), "its gating brings its own"
    assert not any(finding.level == "error" for finding in report.findings)
