"""Tokens of a prompt and of its subject, for every kind of tokenizer.

The expected ranges are computed from the tokens' bytes, without the tokenizer's offsets.
"""

import copy
from itertools import accumulate, pairwise
from typing import Any

import pytest
from tokenizers import processors
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from factscope.editing.contexts import with_prefixes
from factscope.errors import BadFact, BadSetting, PromptTooLong
from factscope.facts import Fact
from factscope.lm.families import FAMILIES
from factscope.lm.load import from_model
from factscope.lm.model import LM
from factscope.lm.tokens import chat_fact, chat_text, encode, encode_each, encode_fact, first_token

from tokenizers_ import STYLES, tokenizer

METASPACE = ("llama", "gemma")
PREFIX = {"llama": "<s>", "opt": "</s>"}
CITY = "The Eiffel Tower is located in the city of"

FACTS = {
    "start": ("The Eiffel Tower is located in the city of", "The Eiffel Tower"),
    "middle": ("The mother tongue of Danielle Darrieux is", "Danielle Darrieux"),
    "end": ("I once saw Miles Davis", "Miles Davis"),
    "whole": ("Paris", "Paris"),
    "one letter": ("Plan B is better than", "B"),
    "comma after": ("In Oslo, the language is", "Oslo"),
    "stop at the end": ("He lives in Rome.", "Rome"),
    "quoted": ('The book "Hamlet" was written by', "Hamlet"),
    "mid-word": ("Audible.com is owned by", "Audible"),
    "inside a word": ("The Parisians live in", "Paris"),
    "second time": ("New York, New York is in the state of", "New York"),
    "accents": ("The city of Brasília is in", "Brasília"),
    "all accents": ("Ångström Éluard œuvre is by", "Éluard"),
    "cjk": ("東京タワーは日本の", "東京タワー"),
    "cjk amid english": ("The tower 東京タワー is in", "東京タワー"),
    "emoji": ("The tower 🗼 is in the city of", "🗼"),
    "joined emoji": ("The family 👩‍👩‍👧 is", "👩‍👩‍👧"),
    "two spaces": ("The  Nile  is in", "Nile"),
}


def lm_with(tok: Any, family: str = "gpt2") -> LM:
    """A tiny random model with the given tokenizer."""
    if family == "gemma2":
        model: Any = Gemma2ForCausalLM(
            Gemma2Config(
                vocab_size=len(tok), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                num_attention_heads=2, num_key_value_heads=1, head_dim=8,
            )
        )  # fmt: skip
    else:
        config = GPT2Config(
            vocab_size=len(tok), n_embd=16, n_layer=2, n_head=2, n_positions=64,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
    return from_model(model, tok, name="tiny", check=False)


@pytest.fixture(params=STYLES)
def style(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def lm(style: str) -> LM:
    return lm_with(tokenizer(style))


def token_bytes(style: str, token: str) -> bytes:
    """The bytes of a token; none for a special token."""
    if token in tokenizer(style).all_special_tokens:
        return b""
    if style not in METASPACE:
        back = {letter: byte for byte, letter in bytes_to_unicode().items()}
        return bytes(back[letter] for letter in token)
    if token.startswith("<0x"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def tokens_by_bytes(style: str, ids: tuple[int, ...], fact: Fact) -> tuple[int, int]:
    """The tokens that share a byte with the subject."""
    names: Any = tokenizer(style).convert_ids_to_tokens(list(ids))
    pieces = [token_bytes(style, name) for name in names]
    joined = b"".join(pieces)
    shift = len(joined) - len(fact.text.encode())  # the space that LLaMA prepends
    assert joined[shift:] == fact.text.encode()
    begin = shift + len(fact.text[: fact.subject_span[0]].encode())
    end = begin + len(fact.subject.encode())
    edges = list(accumulate(map(len, pieces), initial=0))
    inside = [i for i, (a, b) in enumerate(pairwise(edges)) if a < b and a < end and b > begin]
    return inside[0], inside[-1] + 1


@pytest.mark.parametrize("case", FACTS)
def test_subject_range_covers_the_bytes_of_the_subject(style: str, lm: LM, case: str) -> None:
    fact = Fact.from_text(*FACTS[case])
    prompt, subject = encode_fact(lm, fact)
    wanted = tokens_by_bytes(style, prompt.ids, fact)
    # The space that LLaMA prepends may be its own token, with the offset of the first letter.
    assert subject[1] == wanted[1]
    assert subject[0] == wanted[0] or (style == "llama" and subject[0] == wanted[0] - 1)
    assert fact.subject_span[0] == 0 or subject[0] == wanted[0]


def test_occurrence_selects_the_first_of_two_subjects(lm: LM) -> None:
    text, name = FACTS["second time"]
    prompt, second = encode_fact(lm, Fact.from_text(text, name))
    _, first = encode_fact(lm, Fact.from_text(text, name, occurrence=1))
    assert first[1] <= second[0]
    assert "".join(prompt.texts[slice(*first)]).strip() == name


def test_token_range_of_one_character(lm: LM) -> None:
    prompt = encode(lm, CITY)
    here = CITY.index("w")  # in Tower
    start, stop = prompt.token_range((here, here + 1))
    assert stop == start + 1
    assert "w" in prompt.texts[start]


def test_token_range_of_the_whole_text_excludes_special_tokens(style: str, lm: LM) -> None:
    prompt = encode(lm, CITY)
    assert prompt.token_range((0, len(CITY))) == (int(style in PREFIX), len(prompt))


@pytest.mark.parametrize("span", [(0, 0), (999, 1000)])
def test_token_range_without_a_token_is_an_error(lm: LM, span: tuple[int, int]) -> None:
    prompt = encode(lm, CITY)
    with pytest.raises(BadFact, match="no token overlaps"):
        prompt.token_range(span)


def test_token_texts_join_to_the_prompt(style: str, lm: LM) -> None:
    prompt = encode(lm, CITY)
    front = PREFIX.get(style, "")
    assert "".join(prompt.texts) == front + CITY
    assert len(prompt.ids) == len(prompt.offsets) == len(prompt.texts) == len(prompt)


def test_every_token_of_a_split_character_shows_the_character(lm: LM) -> None:
    prompt = encode(lm, "in 東")
    assert prompt.texts[-3:] == ("東", "東", "東")


def test_special_tokens_at_the_start(style: str, lm: LM) -> None:
    prompt = encode(lm, CITY)
    plain = encode(lm, CITY, special=False)
    front = [PREFIX[style]] if style in PREFIX else []
    assert prompt.ids == (*lm.tokenizer.convert_tokens_to_ids(front), *plain.ids)


def test_missing_bos_is_added_if_the_family_needs_it() -> None:
    tok = tokenizer("gemma")
    assert FAMILIES["gemma2"].needs_bos
    without_bos, gemma = encode(lm_with(tok), CITY), encode(lm_with(tok, "gemma2"), CITY)
    assert without_bos.ids[0] != tok.bos_token_id
    assert gemma.ids == (tok.bos_token_id, *without_bos.ids)
    assert gemma.offsets == ((0, 0), *without_bos.offsets)
    assert gemma.texts[0] == "<bos>"
    assert encode(lm_with(tok, "gemma2"), CITY, special=False).ids == without_bos.ids


def test_added_bos_shifts_the_subject() -> None:
    lm = lm_with(tokenizer("gemma"), "gemma2")
    fact = Fact.from_text(CITY, "The Eiffel Tower")
    prompt, (start, stop) = encode_fact(lm, fact)
    assert start == 1
    assert "".join(prompt.texts[start:stop]) == "The Eiffel Tower"


def test_bos_is_never_added_twice() -> None:
    lm = lm_with(tokenizer("llama"), "gemma2")
    bos = lm.tokenizer.bos_token_id
    assert encode(lm, CITY).ids.count(bos) == 1
    assert encode(lm_with(tokenizer("gemma"), "gemma2"), "<bos>" + CITY).texts[:2] == (
        "<bos>",
        "The",
    )


def appending_eos(style: str) -> Any:
    """The style's tokenizer, but one that appends EOS to every text."""
    tok: Any = copy.deepcopy(tokenizer(style))
    end = tok.eos_token
    tok.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tok.eos_token_id)]
    )
    return tok


def test_an_appended_eos_is_dropped(style: str) -> None:
    tok = appending_eos(style)
    assert tok(CITY)["input_ids"][-1] == tok.eos_token_id
    prompt = encode(lm_with(tok), CITY)
    assert prompt.ids == tuple(tok(CITY)["input_ids"][:-1])
    assert prompt.texts[-1].endswith("f")


def test_an_eos_in_the_text_is_kept() -> None:
    lm = lm_with(tokenizer("gpt2"))
    assert encode(lm, CITY + "<|endoftext|>").ids[-1] == lm.tokenizer.eos_token_id


def test_an_empty_text(style: str, lm: LM) -> None:
    if style in PREFIX:
        assert encode(lm, "").texts == (PREFIX[style],)
    else:
        with pytest.raises(BadFact, match="no tokens"):
            encode(lm, "")
    with pytest.raises(BadFact, match="no tokens"):
        encode(lm, "", special=False)


def test_a_prompt_longer_than_the_context_is_an_error(style: str, lm: LM) -> None:
    room = 64 - int(style in PREFIX)
    text = "The" + " is" * (room - 1)
    assert len(encode(lm, text)) == lm.context == 64
    with pytest.raises(PromptTooLong, match=r"65 tokens.* 64"):
        encode(lm, text + " is")


def test_texts_encoded_at_once_equal_those_encoded_alone(lm: LM) -> None:
    """An error stands in the place of its text."""
    texts = [text for text, _ in FACTS.values()]
    texts.insert(3, "The" + " is" * 80)
    found = encode_each(lm, texts)
    assert isinstance(found.pop(3), PromptTooLong)
    assert found == [encode(lm, text) for text, _ in FACTS.values()]


@pytest.mark.parametrize("target", ["Paris", " Paris"])
def test_first_token_of_the_target(style: str, lm: LM, target: str) -> None:
    word = "▁P" if style in METASPACE else "ĠParis"
    found = first_token(lm, encode(lm, CITY), CITY, target)
    assert lm.tokenizer.convert_ids_to_tokens(found) == word


@pytest.mark.parametrize("style", ["gpt2", "gemma", "opt", "qwen", "bloom"])
def test_first_token_after_a_space(style: str, lm: LM) -> None:
    text = CITY + " "
    found = first_token(lm, encode(lm, text), text, "Paris")
    assert lm.tokenizer.convert_ids_to_tokens(found) == "P"


def test_no_tokenizer_needs_the_space_at_the_end_of_a_prompt(lm: LM) -> None:
    """Without it the target's tokens follow the prompt's; with it the prompt has another end."""
    fact = Fact(subject="The Eiffel Tower", prompt="{} is located in the city of ")
    prompt, _ = encode_fact(lm, fact)
    whole = encode(lm, fact.text + " Paris")
    assert whole.ids[: len(prompt)] == prompt.ids
    assert first_token(lm, prompt, fact.text, "Paris") == whole.ids[len(prompt)]
    spaced = encode(lm, fact.text + " ")
    assert whole.ids[: len(spaced)] != spaced.ids


def test_lone_surrogates_in_a_text_are_an_error(lm: LM) -> None:
    with pytest.raises(BadFact, match="not valid Unicode"):
        encode(lm, "The \udce9 Tower")


def test_first_token_after_punctuation(style: str, lm: LM) -> None:
    text = 'The capital of France is "'
    prompt = encode(lm, text)
    found = first_token(lm, prompt, text, "Paris")
    joined = encode(lm, text + " Paris")
    assert joined.ids[: len(prompt)] == prompt.ids
    assert found == joined.ids[len(prompt)]


def test_first_token_of_a_target_with_leading_whitespace() -> None:
    lm = lm_with(tokenizer("gpt2"))
    found = first_token(lm, encode(lm, CITY), CITY, "\nParis")
    assert lm.tokenizer.convert_ids_to_tokens(found) == "Ċ"


def test_trained_tokenizers_are_deterministic() -> None:
    ids = {style: tokenizer(style)(CITY)["input_ids"] for style in STYLES}
    tokenizer.cache_clear()
    assert {style: tokenizer(style)(CITY)["input_ids"] for style in STYLES} == ids


CHAT = "{{ bos_token }}user: {{ messages[0].content + '\\nassistant:\\n' }}"


def test_a_chat_template_never_adds_bos_twice(style: str) -> None:
    tok = copy.deepcopy(tokenizer(style))
    tok.chat_template = CHAT
    lm = lm_with(tok)
    fact = chat_fact(lm, Fact(subject="The Nile", prompt="Where is {}?"))
    prompt, subject = encode_fact(lm, fact)
    assert "".join(prompt.texts[slice(*subject)]).strip() == "The Nile"
    assert fact.text.endswith("user: Where is The Nile?\nassistant:\n")
    [_, prefixed] = with_prefixes(fact, ["It rains. "])
    assert prefixed.text.endswith("user: It rains. Where is The Nile?\nassistant:\n")
    bos = tok.bos_token_id
    if bos is not None:
        assert prompt.ids.count(bos) == 1
        assert prompt.ids[0] == bos


def test_a_chat_template_that_fails() -> None:
    tok = copy.deepcopy(tokenizer("gpt2"))
    tok.chat_template = "{{ raise_exception('no user here') }}"
    with pytest.raises(BadSetting, match="no user here"):
        chat_text(lm_with(tok), "Hi")
    tok.chat_template = None
    with pytest.raises(BadSetting, match="no chat template"):
        chat_text(lm_with(tok), "Hi")
