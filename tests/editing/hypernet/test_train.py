"""Training of hypernetworks: settings, examples, steps, evaluations and checkpoints."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from factscope.data.readers import read_cases
from factscope.editing.contexts import TokenRow, edit_request
from factscope.editing.hypernet.model import pack_tensors
from factscope.editing.hypernet.settings import KeConfig, network_config
from factscope.editing.hypernet.train import (
    BatchCache,
    CaseExamples,
    Example,
    TextExamples,
    Trainer,
    load_checkpoint_,
    split_examples,
    training_pass,
    without_overlap,
)
from factscope.errors import BadEditorWeights, BadSetting
from factscope.lm.load import load
from factscope.lm.model import LM
from factscope.runs.train import FromText

from commands import saved_model
from counterfact import record
from hypernets import EDITORS, quick_training, write_towers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model"), spread=0.3)


@pytest.fixture(scope="module")
def lm(model: Path) -> LM:
    return load(str(model), device="cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_towers(tmp_path_factory.mktemp("data") / "towers.json")


def examples_of(data: Path, **settings: Any) -> CaseExamples:
    return CaseExamples(read_cases(data).cases, **settings)


# ---- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 1}, "batch_size is 1; give 2 or more"),
        ({"lr": 0.0}, "lr is 0"),
        ({"eval_every": 0}, "eval_every is 0"),
    ],
)
def test_settings_out_of_range_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        quick_training(**settings)


def test_network_settings_are_checked() -> None:
    assert network_config("ke", lstm_width=8) == KeConfig(lstm_width=8)
    with pytest.raises(BadSetting, match="no setting 'depth'; use edit_lr, hidden_layers, rank"):
        network_config("mend", depth=3)
    with pytest.raises(BadSetting, match="method is 'rome'; only these are trained: mend, ke"):
        network_config("rome")
    with pytest.raises(BadSetting, match="rank is 0"):
        network_config("mend", rank=0)


# ---- steps and evaluations


@pytest.mark.parametrize("method", EDITORS)
def test_training_improves_edits_of_validation_facts(lm: LM, data: Path, method: str) -> None:
    before = {name: weight.clone() for name, weight in lm.model.named_parameters()}
    found = {}
    for weight in (0.01, 1.0):
        trainer = Trainer(lm, examples_of(data), quick_training(method, locality_weight=weight))
        first = trainer.evaluate()
        for _ in range(60):
            trainer.step()
        found[weight] = last = trainer.evaluate()
        assert trainer.progress.best_step == 60
        assert last.loss < first.loss
        assert first.unedited_loss == pytest.approx(last.unedited_loss, rel=1e-5)
    assert found[0.01].edit_loss < 0.6 * found[0.01].unedited_loss
    assert found[0.01].rephrase_loss < 0.6 * found[0.01].unedited_loss
    assert found[0.01].edit_accuracy > 0
    assert found[1.0].edit_loss < 0.95 * found[1.0].unedited_loss
    assert found[1.0].locality_loss < 0.5 * found[0.01].locality_loss
    for name, weight in lm.model.named_parameters():  # also the embeddings
        assert torch.equal(weight, before[name])
        assert weight.grad is None


@pytest.mark.parametrize("method", EDITORS)
@pytest.mark.parametrize("locality", ["unrelated", "neighbours"])
def test_training_losses_equal_those_of_edited_models(
    lm: LM, data: Path, method: str, locality: Any
) -> None:
    """Losses, accuracies and KL, compared with models whose weights were changed."""
    trainer = Trainer(lm, examples_of(data, locality=locality), quick_training(method))
    for _ in range(8):
        trainer.step()
    batch = trainer.validation.batch(0)
    assert batch is not None
    losses = training_pass(trainer.split, trainer.network, batch, 1, train=False)
    trainer.evaluate()
    weights = trainer.weights({})
    weights.network.load_state_dict(trainer.network.state_dict())
    source: Any = trainer.validation.examples
    indices = trainer.validation.batches[0]
    edits = EDITORS[method](weights=weights).each(lm, [source.cases[i].fact for i in indices])
    examples = source.load(lm, indices)
    for i, (edit, example) in enumerate(zip(edits, examples, strict=True)):
        # In epoch 1 a fact's locality row is the edit row of the fact two before it.
        local = example.locality or examples[(i - 2) % len(examples)].edit
        unedited = log_probs(lm, local)
        assert losses.unedited_loss[i].item() == pytest.approx(loss_of(lm, example.edit), rel=1e-4)
        with edit.applied(lm, force=True):
            edit_loss, rephrase_loss = loss_of(lm, example.edit), loss_of(lm, example.rephrase)
            assert losses.edit_loss[i].item() == pytest.approx(edit_loss, rel=1e-3)
            assert losses.rephrase_loss[i].item() == pytest.approx(rephrase_loss, rel=1e-3)
            now = log_probs(lm, local)
            kl = (unedited.exp() * (unedited - now)).sum(-1).mean().item()
            assert losses.locality_loss[i].item() == pytest.approx(kl, rel=1e-2, abs=1e-6)
            same = (unedited.argmax(-1) == now.argmax(-1)).float().mean().item()
            assert losses.locality_accuracy[i].item() == pytest.approx(same)
            predicted = log_probs(lm, example.edit).argmax(-1).tolist()
            assert bool(losses.edit_accuracy[i]) == (predicted == list(example.edit.labels))


def log_probs(lm: LM, row: TokenRow) -> torch.Tensor:
    return lm.model(torch.tensor([row.ids])).logits[0, list(row.positions)].log_softmax(-1)


def loss_of(lm: LM, row: TokenRow) -> float:
    return torch.nn.functional.nll_loss(log_probs(lm, row), torch.tensor(row.labels)).item()


def test_recomputed_states_equal_cached_ones_bit_for_bit(lm: LM, data: Path) -> None:
    trainers = [Trainer(lm, examples_of(data), quick_training()) for _ in range(2)]
    trainers[1].batches.free_bytes = 0
    losses = [[trainer.step() for _ in range(20)] for trainer in trainers]
    assert losses[0] == losses[1]
    assert len(trainers[0].batches.cached) == 9
    assert not trainers[1].batches.cached


def test_every_epoch_has_every_batch_and_other_locality_rows(lm: LM, data: Path) -> None:
    cache = Trainer(lm, examples_of(data), quick_training()).batches
    assert sorted(i for indices in cache.batches for i in indices) == list(range(34))
    assert len(cache) == 9
    for epoch in range(2):
        found = [cache.at_step(step, 0) for step in range(9 * epoch, 9 * epoch + 9)]
        assert [e for _, e in found] == [epoch] * 9
        assert len({id(batch) for batch, _ in found}) == 9
    batch = cache.batch(0)
    assert batch is not None
    rows = [batch.locality_rows(epoch)[0].ids for epoch in range(4)]
    for ids in rows:
        assert all(not torch.equal(a, b) for a, b in zip(ids, batch.edit.ids, strict=True))
    assert not torch.equal(rows[0], rows[1])


# ---- examples


def test_examples_from_cases(lm: LM, tmp_path: Path) -> None:
    towers = tmp_path / "one.json"
    towers.write_text(json.dumps([record(1)]))
    (case,) = read_cases(towers).cases
    edit = edit_request(lm, case.fact).rows[0]
    (example,) = CaseExamples((case,)).load(lm, [0])
    assert (example.edit, example.locality) == (edit, None)
    assert lm.tokenizer.decode(example.rephrase.ids).startswith("One finds Tower 1 in")
    assert example.rephrase.labels == edit.labels
    (example,) = CaseExamples((case,), "neighbours").load(lm, [0])
    assert example.locality is not None
    assert lm.tokenizer.decode(example.locality.ids).startswith("The Louvre is in")
    bare = replace(case, paraphrases=(), neighbours=())
    assert CaseExamples((bare,)).load(lm, [0]) == [Example(edit, edit, None)]
    question = replace(bare, true=None, neighbours=("Who?",), neighbour_answers=("Miles",))
    (example,) = CaseExamples((question,)).load(lm, [0])  # zsRE: the question is unrelated
    assert example.locality is not None
    assert lm.tokenizer.decode(example.locality.labels).strip() == "Miles"


def test_cases_that_the_model_cannot_read_are_skipped(lm: LM, data: Path) -> None:
    cases = list(read_cases(data).cases[:3])
    long = replace(cases[1].fact, prompt="{} " + "is in " * 100)
    examples = CaseExamples((cases[0], replace(cases[1], fact=long), cases[2]))
    assert len(examples.load(lm, [0, 1, 2])) == 2
    split = Trainer(lm, examples_of(data), quick_training()).split
    assert BatchCache(split, examples, range(1, 3), 2).batch(0) is None


def test_subjects_overlap_regardless_of_case_and_spaces(data: Path) -> None:
    (case,) = read_cases(data).cases[:1]
    same = replace(case, fact=replace(case.fact, subject="TOWER  0"))
    assert without_overlap([case], [same]) == ()


@pytest.mark.parametrize("count", [1, 9])
def test_too_few_examples_to_split_are_an_error(lm: LM, data: Path, count: int) -> None:
    with pytest.raises(BadSetting, match=f"{count} examples are too few"):
        Trainer(lm, CaseExamples(read_cases(data).cases[:count]), quick_training())
    assert split_examples(10, 64) == (range(8), range(8, 10))


def test_examples_from_text_have_sampled_continuations(lm: LM, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The capital of France is Paris. " * 40)
    source = FromText(path=text, limit=12, seq_length=8, target_tokens=3)
    first, second = source.examples(lm).load(lm, [0, 1])
    assert first.edit == first.rephrase
    assert first.locality is None
    assert len(first.edit.ids) == 8 + 2
    assert first.edit.positions == (7, 8, 9)
    assert len(first.edit.labels) == 3
    assert source.examples(lm).load(lm, [1]) == [second]
    generated = replace(source, path=None).examples(lm)
    assert len(generated) == 12
    assert isinstance(generated, TextExamples)
    again = replace(source, path=None).examples(lm)
    assert again.load(lm, [4]) == generated.load(lm, [3, 4])[1:]
    trainer = Trainer(lm, generated, quick_training())
    before = trainer.evaluate()
    for _ in range(20):
        trainer.step()
    assert trainer.evaluate().edit_loss < before.edit_loss
    for settings in (source, generated):
        with pytest.raises(BadSetting, match="target_tokens is 0"):
            replace(settings, target_tokens=0)
    with pytest.raises(BadSetting, match="has 64 tokens"):
        replace(source, target_tokens=60).examples(lm)


# ---- checkpoints


def test_a_checkpoint_of_format_1_is_an_error(lm: LM, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    header = {"format": "factscope-checkpoint 1", "progress": {"step": 3}}
    path.write_bytes(pack_tensors({"network.x": torch.zeros(1)}, header))
    with pytest.raises(BadEditorWeights, match=r"has format 1, and this factscope reads 2"):
        load_checkpoint_(Trainer(lm, examples_of(data), quick_training()), path)
