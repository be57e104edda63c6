"""A played pass says what the pass itself says, and is taken for nothing else."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from factscope.editing.checks import with_checks
from factscope.editing.edit import Edit, LowRank
from factscope.editing.editor import Editor
from factscope.editing.hypernet import editor as learned
from factscope.editing.rome import Rome
from factscope.facts import Fact
from factscope.lm.accel import graphs as module
from factscope.lm.accel.buckets import LengthBuckets
from factscope.lm.accel.graphs import NAME, played
from factscope.lm.forward import forward
from factscope.lm.hooks import hook_outputs
from factscope.lm.model import LM
from factscope.stats.second_moment import SecondMoment

from editing_facts import FEW, PREFIXES, text_lm
from families import FAMILIES
from hypernets import EDITORS, a_network, small, weights_of

FACTS = [
    Fact(subject="The Eiffel Tower", prompt="{} is in", target="Rome"),
    Fact(subject="The Tower", prompt="{} is", target="Peru"),
    Fact(subject="The Eiffel", prompt="{} is in", target="Rome"),
    Fact(subject="Vienna", prompt="The capital of {} is", target="Norway"),
    Fact(subject="The Tower Eiffel", prompt="{} in is", target="Peru"),
    Fact(subject="Miles Davis", prompt="{} plays", target="piano"),
]


class Tape:
    """What `Recorded` is on a GPU: the same function on the same places, whatever is given."""

    graph = "there is one"
    played = 0

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.given: tuple[Tensor, ...] | None = None

    def __call__(self, *given: Tensor) -> Any:
        if self.given is None:
            self.given = tuple(x.clone() for x in given)
            self.results = self.function(*self.given)
            return self.results
        type(self).played += 1
        for place, x in zip(self.given, given, strict=True):
            place.copy_(x)
        again = self.function(*self.given)
        for place, x in zip(module._tensors(self.results), module._tensors(again), strict=True):
            place.untyped_storage().copy_(x.untyped_storage())  # also of one that was expanded
        return self.results


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Tape]]:
    """Passes are recorded and rows get room, as on a GPU."""
    for user in (module, learned):
        monkeypatch.setattr(user, "plays", lambda lm: True)
    monkeypatch.setattr(module, "CudaGraph", Tape)
    monkeypatch.setattr(module, "_memory", lambda device: 1 << 40)
    room = LengthBuckets(slots=4, past=16, tokens=8, labels=4, reads=32)
    monkeypatch.setattr(
        LengthBuckets, "of", lambda lm, facts: room if facts == 1 else LengthBuckets()
    )
    Tape.played = 0
    yield Tape
    assert Tape.graph == "there is one"


def rows(lm: LM, *ids: int) -> Tensor:
    return torch.tensor([ids], device=lm.device)


def test_the_third_pass_of_a_kind_is_played(tape: type[Tape]) -> None:
    lm = text_lm("gpt2")

    def last(ids: Tensor) -> Tensor:
        return forward(lm, ids).states[-1]

    texts = [rows(lm, 1, 2, 3), rows(lm, 4, 5, 6), rows(lm, 7, 8, 9), rows(lm, 3, 2, 1)]
    for i, ids in enumerate(texts):
        assert torch.equal(played(lm, "a", last, ids), last(ids))
        assert tape.played == max(0, i - 1)
    played(lm, "b", last, texts[0])  # another name
    played(lm, "a", last, rows(lm, 1, 2))  # another shape
    torch.set_float32_matmul_precision("high")
    try:
        played(lm, "a", last, texts[0])
    finally:
        torch.set_float32_matmul_precision("highest")
    assert tape.played == 2
    with torch.no_grad():
        lm.mlp_weight(1).mul_(1.5)  # in its place, where a recording reads it
    assert torch.equal(played(lm, "a", last, texts[0]), last(texts[0]))
    assert tape.played == 3
    block: Any = lm.blocks[1]
    block.ln_1.weight = torch.nn.Parameter(2 * block.ln_1.weight)  # in another place
    assert torch.equal(played(lm, "a", last, texts[0]), last(texts[0]))
    assert tape.played == 3


def test_a_hook_of_someone_else_is_not_passed_over(tape: type[Tape]) -> None:
    lm = text_lm("gpt2")
    ids = rows(lm, 1, 2, 3)

    def last(ids: Tensor) -> Tensor:
        return forward(lm, ids).states[-1]

    for _ in range(3):
        played(lm, "a", last, ids)
    assert tape.played == 1
    with hook_outputs((lm.mlp_out(1), lambda x: x * 2)):
        assert torch.equal(played(lm, "a", last, ids), last(ids))
    assert tape.played == 1


def test_a_recording_that_is_wrong_is_not_used(
    tape: type[Tape], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lm = text_lm("gpt2")
    wrong = 0

    def number(x: Tensor) -> Tensor:
        nonlocal wrong
        wrong += 1
        return x + wrong

    for i in range(1, 5):
        assert played(lm, "a", number, torch.zeros(2)).tolist() == [i + (i > 2)] * 2
    assert "not used" in caplog.text
    assert tape.played == 0
    monkeypatch.setattr(module, "_memory", lambda device: 0)  # nor one that is too large
    for _ in range(4):
        played(lm, "b", torch.clone, torch.zeros(2))
    assert tape.played == 0


def test_what_is_there_only_while_recording_is_left_out(tape: type[Tape]) -> None:
    """Transformers makes a causal mask for a recording that it does without otherwise."""
    lm = text_lm("gpt2")
    times = 0

    def masked(x: Tensor) -> dict[str, Any]:
        nonlocal times
        times += 1
        return {"call": [{"mask": None if times < 3 else x, "other": None}], "out": (2 * x, x)}

    for i in range(1, 5):
        found = played(lm, "a", masked, torch.full((2,), i))
        assert found["call"] == [{"mask": None, "other": None}]
        assert [x.tolist() for x in found["out"]] == [[2 * i] * 2, [i] * 2]
    assert tape.played == 2

    def one_more(x: Tensor) -> list[Tensor]:
        nonlocal times
        times += 1
        return [x] * (1 if times % 2 else 2)

    for _ in range(4):
        played(lm, "b", one_more, torch.zeros(2))
    assert tape.played == 2  # more than that may not differ


def test_the_ones_unused_longest_go(tape: type[Tape], monkeypatch: pytest.MonkeyPatch) -> None:
    lm = text_lm("gpt2")
    monkeypatch.setattr(module, "MOST", 2)
    for name in ("a", "b", "a", "c"):
        played(lm, name, torch.clone, torch.zeros(1))
    assert [key[0] for key in lm.cache[NAME]] == ["a", "c"]


# ---- editors


def edits(lm: LM, editor: Editor, facts: Sequence[Fact]) -> list[Edit]:
    """One after another, as people write them."""
    return [editor.each(lm, [fact])[0] for fact in facts]


def assert_equal(found: Sequence[Edit], wanted: Sequence[Edit]) -> None:
    for one, right in zip(found, wanted, strict=True):
        assert set(one.changes) == set(right.changes)
        for name, change in right.changes.items():
            gap = (one.changes[name].matrix() - change.matrix()).norm()
            assert gap < 1e-4 * change.matrix().norm()
        assert one.checks is not None
        assert right.checks is not None
        for name, figure in right.checks.to_dict().items():
            if figure is not None:
                assert one.checks.to_dict()[name] == pytest.approx(figure, rel=1e-4)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_rome_by_played_passes(
    family: str, tape: type[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = text_lm(family)
    width = lm.mlp_weight(1).shape[1]
    C = SecondMoment(
        matrix=torch.eye(width), layer=1, tokens=width, corpus="none", model=lm.name,
        fingerprint=lm.fingerprint,
    )  # fmt: skip
    rome = Rome(layer=1, prefixes=PREFIXES, second_moment=C, search=FEW)
    found = edits(lm, rome, FACTS)
    assert tape.played >= 5
    monkeypatch.undo()
    lm.cache.clear()
    assert_equal(found, edits(lm, rome, FACTS))


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("method", sorted(EDITORS))
def test_learned_editors_by_played_passes(
    method: str, family: str, tape: type[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = small(family)
    editor = EDITORS[method](weights=weights_of(lm, a_network(lm, method)))
    lm.cache.clear()
    found = edits(lm, editor, FACTS)
    assert tape.played >= 3
    monkeypatch.undo()
    lm.cache.clear()
    assert_equal(found, edits(lm, editor, FACTS))


def test_the_text_is_read_under_each_edit_of_its_own(tape: type[Tape]) -> None:
    lm = text_lm("gpt2")
    name = lm.name_of(lm.mlp_out(1)) + ".weight"
    made = [
        Edit(changes={name: LowRank(B, A)}, model=lm.name, fingerprint=lm.fingerprint, method="x",
             facts=())
        for B, A in [
            (torch.randn(lm.width, rank), torch.randn(rank, lm.mlp_weight(1).shape[1]))
            for rank in (1, 1, 1, 3, 5, 2, 40)
        ]
    ]  # fmt: skip
    found = [with_checks(lm, [edit])[0].checks for edit in made]
    assert tape.played == 2  # rank 1 for the third time, and up to 8 for the third time
    for edit, seen in zip(made, found, strict=True):
        assert seen is not None
        plain = replace(edit, checks=None)
        with plain.applied(lm, force=True):
            now = with_checks(lm, [plain])[0].checks
        assert now is not None
        assert seen.perplexity_after == pytest.approx(now.perplexity_before, rel=1e-4)
