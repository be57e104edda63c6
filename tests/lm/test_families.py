"""The load-time check: every family's row fits, a wrong one is caught by name."""

from dataclasses import replace

import pytest
import torch

from factscope.errors import BadModelFile, UnknownFamily
from factscope.lm import families as family
from factscope.lm.families import check_family, family_of
from factscope.lm.model import LM

from families import tiny


@pytest.fixture(autouse=True)
def no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have no words to check."""
    monkeypatch.setattr(family, "_check_language", lambda lm: None)


def test_every_row_fits_its_family(lm: LM) -> None:
    check_family(lm)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"transposed": False}, "transposed"),
        ({"norm": ()}, "decode"),
        ({"mlp_out": "mlp.c_fc"}, "mlp_out"),
        ({"blocks": "transformer.layers"}, "blocks"),
        ({"attn_out": "attn.o_proj"}, "attn_out"),
    ],
)
def test_a_wrong_row_is_caught(fields: dict, part: str) -> None:
    lm = tiny("gpt2")
    wrong = LM(model=lm.model, tokenizer=None, family=replace(lm.family, **fields), name="wrong")
    with pytest.raises(BadModelFile, match=part):
        check_family(wrong)


def test_an_unknown_family_is_told_how_to_join() -> None:
    with pytest.raises(UnknownFamily, match=r"Linear.*FAMILIES.*CONTRIBUTING"):
        family_of(torch.nn.Linear(1, 1))
