"""The check on loading: every family's entry fits its model, a wrong one is reported by name."""

from dataclasses import replace

import pytest
import torch

from factscope.errors import BadModelFile, UnknownFamily
from factscope.lm.check import check_family
from factscope.lm.families import family_of
from factscope.lm.model import LM

from families import tiny


def test_every_entry_fits_its_family(lm: LM) -> None:
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
def test_a_wrong_entry_is_reported(fields: dict, part: str) -> None:
    lm = tiny("gpt2")
    wrong = LM(model=lm.model, tokenizer=None, family=replace(lm.family, **fields), name="wrong")
    with pytest.raises(BadModelFile, match=part):
        check_family(wrong)


def test_an_unknown_family_names_the_table_and_the_docs() -> None:
    with pytest.raises(UnknownFamily, match=r"Linear.*FAMILIES.*CONTRIBUTING"):
        family_of(torch.nn.Linear(1, 1))
