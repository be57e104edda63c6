"""Read facts and cases from files, plain or gzipped: JSON lists, JSON lines, CSV or TSV.

A record of a fact has a `subject` and a `prompt`, either a template with "{}" for the subject or a
text that contains it. Its object is `target`, `attribute` (known_1000) or `target_true`; its id is
`id`, `known_id` or `case_id`. `replacement` is another subject with as many tokens, for traces with
token replacement.

A record of a case also has the new object, `to`. Optional are the true object, `true`, and the
lists of texts `paraphrases`, `neighbours`, `neighbour_answers`, `attributes` and `generations`.
The names of CounterFact and of EasyEdit's condensed CounterFact work, too. A zsRE record is
recognised by its fields.

A CSV or TSV file has a header with these names; a list of texts is several columns of one name.
CSV cells are separated by commas or, as some spreadsheets write them, by semicolons.

ParaRel is two tables: relation → pairs of subject and object, and relation → patterns with [X]
and [Y]. The package includes facts, cases and text templates.
"""

import codecs
import csv
import gzip
import io
import json
import tomllib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from factscope.errors import BadFact
from factscope.facts import SUBJECT_SLOT, Case, Fact

T = TypeVar("T")

TARGET = ("target", "attribute", "target_true")
NEW = ("to", "target_new")
TRUE = ("true", "target_true", "ground_truth")
ID = ("id", "known_id", "case_id")
RELATION = ("relation", "relation_id")
LISTS = {
    "paraphrases": ("paraphrases", "paraphrase_prompts", "rephrase_prompt"),
    "neighbours": ("neighbours", "neighborhood_prompts", "locality_prompt"),
    "attributes": ("attributes", "attribute_prompts"),
    "generations": ("generations", "generation_prompts"),
    "neighbour_answers": ("neighbour_answers",),
}
"""Field of a case → its names in the formats."""
LIST_NAMES = {name for names in LISTS.values() for name in names}
ZSRE_FIELDS = ("src", "answers", "loc", "loc_ans")


@dataclass(frozen=True)
class FactsFile:
    """The facts of a file, and a message for each record that could not be read."""

    facts: tuple[Fact, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class CasesFile:
    """The cases of a file, and a message for each record that could not be read."""

    cases: tuple[Case, ...]
    problems: tuple[str, ...]


def read_facts(path: str | Path) -> FactsFile:
    """Read a file of facts."""
    return FactsFile(
        *_read_records(Path(path), lambda record, number: _fact(record, number, TARGET))
    )


def read_cases(path: str | Path) -> CasesFile:
    """Read a file of cases: CounterFact, condensed CounterFact, zsRE or a user's own."""
    return CasesFile(*_read_records(Path(path), _case))


# ---- files


def read_text(path: Path) -> str:
    """The text of a file, plain or .gz: UTF-8, or UTF-16 with a byte order mark."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        # Spreadsheets write a byte order mark, and "Unicode text" as UTF-16.
        utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return data.decode("utf-16" if utf16 else "utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise BadFact(
            f"cannot read {path} ({reason}); give a text file in UTF-8, plain or .gz"
        ) from error


def parse_json(text: str, prefix: str = "", hint: str = "") -> Any:
    """Parse JSON; an error names the file and what it should contain."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFact(f"{prefix}not JSON ({error}){hint}") from error


def _read_records(
    path: Path, parse: Callable[[Any, int], T]
) -> tuple[tuple[T, ...], tuple[str, ...]]:
    """Parse each record, given its number in the file; also return messages for broken ones."""
    parsed: list[T] = []
    problems: list[str] = []
    text = read_text(path)
    is_list = False
    if path.name.lower().removesuffix(".gz").endswith((".csv", ".tsv")):
        records = _table_rows(path, text)
    elif is_list := text.lstrip().startswith("["):
        hint = "; write a list of records, or one record per line"
        records = enumerate(parse_json(text, f"{path} is ", hint), start=1)
    else:
        records = _json_lines(text)
    for number, record in records:
        try:
            if isinstance(record, BadFact):
                raise record
            parsed.append(parse(record, number))
        except BadFact as error:
            problems.append(f"{path.name}, {'record' if is_list else 'line'} {number}: {error}")
    if not parsed:
        shown = "; ".join(problems[:3]) or "it is empty"
        raise BadFact(f"{path} has no usable fact: {shown}")
    return tuple(parsed), tuple(problems)


def _json_lines(text: str) -> Iterator[tuple[int, Any]]:
    """The number and the record of each line, or an error in its place."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, parse_json(line)
            except BadFact as error:
                yield number, error


def _table_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any] | BadFact]]:
    """The first line and the record of each row of a CSV or TSV, or an error in its place."""
    delimiter = max(",;", key=text.lstrip().partition("\n")[0].count)
    if path.name.lower().removesuffix(".gz").endswith(".tsv"):
        delimiter = "\t"
    # If not strict, csv drops the quotes of `"Heroes" is a song by` without an error.
    lines = io.StringIO(text, newline="")
    rows = csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
    header: list[str] = []
    while True:
        number = rows.line_num + 1
        try:
            cells = [cell.strip() for cell in next(rows)]
        except StopIteration:
            return
        except csv.Error as error:
            yield number, BadFact(f"{error}; write a quote inside a quoted text twice")
            continue
        if not any(cells):
            continue
        if not header:
            header = [name.lower() for name in cells]
            _check_header(path, number, header)
        elif len(cells) > len(header):
            advice = f"put a text that contains {delimiter!r} into double quotes"
            error = BadFact(f"{len(cells)} cells under {len(header)} columns; {advice}")
            yield number, error
        else:
            record: dict[str, Any] = {}
            for name, cell in zip(header, cells, strict=False):
                if cell and name in LIST_NAMES:
                    record.setdefault(name, []).append(cell)
                elif cell:
                    record[name] = cell
            yield number, record


def _check_header(path: Path, number: int, header: list[str]) -> None:
    """Raise BadFact for a header without subject and prompt, or with a name twice."""
    columns = f"its columns are {', '.join(header)}"
    for name in ("subject", "prompt"):
        if name not in header:
            raise BadFact(f"{path}, line {number}: no column {name!r} in the header; {columns}")
    for name in header:
        if name and name not in LIST_NAMES and header.count(name) > 1:
            raise BadFact(f"{path}, line {number}: two columns are named {name!r}; {columns}")


# ---- records


def _fact(record: Any, number: int, target_names: Sequence[str]) -> Fact:
    rewrite = _rewrite(record)
    id_, relation = _first(record, ID), _first(rewrite, RELATION)
    other = rewrite.get("replacement")
    fields = {
        "id": str(number if id_ is None else id_),
        "target": _object(rewrite, target_names),
        "relation": None if relation is None else str(relation),
        "replacement": _text("replacement", other) if other else None,
    }
    subject: Any = rewrite.get("subject")
    prompt: Any = rewrite.get("prompt")
    for name, value in (("subject", subject), ("prompt", prompt)):
        if not isinstance(value, str) or not value.strip():
            raise BadFact(f"the field {name!r} is missing or empty")
    if SUBJECT_SLOT in prompt:
        return Fact(subject=subject, prompt=prompt, **fields)
    return Fact.from_text(prompt, subject, **fields)


def _case(record: Any, number: int) -> Case:
    if isinstance(record, dict) and all(name in record for name in ZSRE_FIELDS):
        return _zsre_case(record, number)
    fact, rewrite = _fact(record, number, NEW), _rewrite(record)
    if fact.target is None or not fact.target.strip():
        raise BadFact("the field 'to' is missing or empty; give the new object")
    new = _first(rewrite, NEW)
    target_id = new.get("id") if isinstance(new, dict) else None
    return Case(
        fact=fact,
        true=_object(rewrite, TRUE),
        target_id=target_id if isinstance(target_id, str) else None,
        **{field: _texts(record, names) for field, names in LISTS.items()},
    )


def _zsre_case(record: dict[str, Any], number: int) -> Case:
    """zsRE as MEND splits it: the edit writes a true fact, the first of the answers.

    There is no other object to compare it with. The neighbour is an unrelated question with an
    answer of its own. Ids count from 0, as in the paper's code.
    """
    answers = record["answers"]
    if not isinstance(answers, list) or not answers:
        raise BadFact(f"the field 'answers' is {answers!r:.60}; it must be a list of texts")
    return Case(
        fact=Fact.from_text(
            _text("src", record["src"]),
            _text("subject", record.get("subject")),
            target=_text("answers", answers[0]),
            id=str(number - 1),
        ),
        paraphrases=(_text("rephrase", record.get("rephrase")),),
        # As in the paper's code, which keeps the "nq question: " and adds a question mark.
        neighbours=(_text("loc", record["loc"]) + "?",),
        neighbour_answers=(_text("loc_ans", record["loc_ans"]),),
    )


def _rewrite(record: Any) -> dict[str, Any]:
    """The part of a record with the fact: CounterFact has it in `requested_rewrite`."""
    if not isinstance(record, dict):
        raise BadFact(f"a record must be an object with subject and prompt, not {record!r:.60}")
    rewrite = record.get("requested_rewrite", record)
    if not isinstance(rewrite, dict):
        raise BadFact(f"requested_rewrite must be an object, not {rewrite!r:.60}")
    return rewrite


def _first(record: dict[str, Any], names: Sequence[str]) -> Any:
    """The value of the first of these fields that is present."""
    return next((record[name] for name in names if record.get(name) is not None), None)


def _object(record: dict[str, Any], names: Sequence[str]) -> str | None:
    """An object: a text, or CounterFact's {"str": ..., "id": ...}."""
    value = _first(record, names)
    if isinstance(value, dict):
        value = value.get("str")
    if not isinstance(value, str | None):
        raise BadFact(f"the field {names[0]!r} is {value!r:.60}; it must be a text")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadFact(f"the field {name!r} is {value!r:.60}; it must be a text")
    return value


def _texts(record: dict[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    """A list of texts, or one text; empty if there is none."""
    name = next((name for name in names if record.get(name) is not None), names[0])
    value = record.get(name, [])
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(x, str) and x.strip() for x in texts):
        raise BadFact(f"the field {name!r} is {value!r:.60}; it must be a list of texts")
    return tuple(texts)


# ---- ParaRel


def pararel_facts(facts: str | Path, patterns: str | Path) -> Iterator[Fact]:
    """Every pair, in the first pattern of its relation that ends in the object."""
    pairs, templates = read_relation_table(Path(facts)), read_relation_table(Path(patterns))
    for relation in sorted(pairs):
        prompt = next(filter(None, map(pararel_prompt, templates.get(relation, []))), None)
        if prompt is None:
            continue
        for number, (subject, target) in enumerate(pairs[relation]):
            id_ = f"{relation}-{number}"
            yield Fact(subject=subject, prompt=prompt, target=target, relation=relation, id=id_)


def pararel_prompt(pattern: str) -> str | None:
    """The prompt template of a pattern that ends in the object, otherwise None."""
    before, object_slot, after = pattern.partition("[Y]")
    if not object_slot or before.count("[X]") != 1 or after.strip(" .") or SUBJECT_SLOT in before:
        return None
    return before.replace("[X]", SUBJECT_SLOT).strip()


def read_relation_table(path: Path) -> dict[str, list]:
    """A JSON object of lists by relation."""
    table = parse_json(read_text(path), f"{path} is ", "; expected a table by relation")
    if not isinstance(table, dict):
        raise BadFact(f"{path} is not a table by relation, as ParaRel's facts and patterns are")
    return table


# ---- data included in the package

HERE = Path(__file__).parent
EVERYDAY_CASES = HERE / "everyday_cases.jsonl"


@cache
def everyday_facts() -> tuple[Fact, ...]:
    """Facts about places, countries, books and people, most of them known to small models."""
    text = (HERE / "everyday.jsonl").read_text("utf-8")
    return tuple(Fact(**json.loads(line)) for line in text.splitlines())


@cache
def everyday_cases() -> tuple[Case, ...]:
    """Cases of well-known facts, each with all the prompts of a CounterFact record."""
    return read_cases(EVERYDAY_CASES).cases


def generation_templates(relation: str) -> tuple[str, ...]:
    """Generation prompts of a relation, with "{}" for the subject."""
    phrases = _phrases()
    return tuple(phrases["generation"].get(relation, phrases["any"]))


def neutral_sentences() -> tuple[str, ...]:
    """Neutral sentences to put before paraphrases."""
    return tuple(_phrases()["sentences"])


@cache
def _phrases() -> dict[str, Any]:
    return tomllib.loads((HERE / "phrases.toml").read_text("utf-8"))
