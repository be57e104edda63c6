"""Edits by captured passes, as on a GPU, equal those of eager passes."""

import pytest

from factscope.editing.hypernet import editor as module
from factscope.facts import Fact

from fake_graph import use_fake_graphs
from hypernets import EDITORS, make_network, tiny_lm, weights_of

FACTS = [
    Fact(subject="The Eiffel Tower", prompt="{} is in", target="Rome"),
    Fact(subject="The Tower", prompt="{} is", target="Peru"),
    Fact(subject="The Eiffel", prompt="{} is in", target="Rome"),
    Fact(subject="Vienna", prompt="The capital of {} is", target="Norway"),
    Fact(subject="The Tower Eiffel", prompt="{} in is", target="Peru"),
    Fact(subject="Miles Davis", prompt="{} plays", target="piano"),
]


@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom", "gemma2", "opt", "gpt_neo"])
@pytest.mark.parametrize("method", sorted(EDITORS))
def test_captured_passes_give_the_same_edits(
    method: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = tiny_lm(family)
    editor = EDITORS[method](weights=weights_of(lm, make_network(lm, method)))
    lm.cache.clear()
    expected = [editor.each(lm, [fact])[0] for fact in FACTS]
    fake = use_fake_graphs(monkeypatch)
    monkeypatch.setattr(module, "can_capture", lambda lm: True)
    lm.cache.clear()
    found = [editor.each(lm, [fact])[0] for fact in FACTS]
    assert fake.replays >= 3
    for edit, right in zip(found, expected, strict=True):
        assert set(edit.changes) == set(right.changes)
        for name, change in right.changes.items():
            gap = (edit.changes[name].matrix() - change.matrix()).norm()
            assert gap < 1e-4 * change.matrix().norm()
        assert edit.checks is not None
        assert right.checks is not None
        for name, figure in right.checks.to_dict().items():
            if figure is not None:
                assert edit.checks.to_dict()[name] == pytest.approx(figure, rel=1e-4)
