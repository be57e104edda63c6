"""factscope data build-counterfact, and what a set consists of."""

import gzip
import json as json_module
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factscope.cli.options import Json
from factscope.cli.show import doing, notes, print_json, progress, results

if TYPE_CHECKING:
    from factscope.extras.counterfact_builder.build import FindSubjects, KnowledgeTuple, Tables
    from factscope.extras.counterfact_builder.composition import CompositionRow

__all__ = ["build_counterfact", "show_composition"]


def build_counterfact(
    facts: Annotated[Path, typer.Option(help="ParaRel's table of facts, by relation.")],
    patterns: Annotated[Path, typer.Option(help="ParaRel's table of patterns, with [X] and [Y].")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the set goes (JSON).")],
    text: Annotated[
        Path | None,
        typer.Option(help="Articles, blank lines between; for sentences and references."),
    ] = None,
    references: Annotated[
        Path | None, typer.Option(help="Where the reference texts go (JSON); needs --text.")
    ] = None,
    wikidata: Annotated[
        bool, typer.Option("--wikidata", help="Ask Wikidata for neighbours, not the table.")
    ] = False,
    relations: Annotated[
        str | None, typer.Option(help="Only these, such as P19,P27; or counterfact, the paper's.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Only records with ten neighbours and attributes.")
    ] = False,
    limit: Annotated[int | None, typer.Option(help="At most so many records.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed of all draws.")] = 0,
    json: Json = False,
) -> None:
    """Build counterfactuals as the paper does (App. D), from a table of facts and patterns."""
    from factscope.data.readers import read_relation_table
    from factscope.errors import BadFact, BadSetting
    from factscope.extras.counterfact_builder import articles, build

    if references is not None and text is None:
        raise BadSetting("--references needs --text, the articles to take them from")
    table = read_relation_table(facts)
    usable = build.usable_relations(table, read_relation_table(patterns), _wanted(relations, table))
    for problem in usable.problems:
        notes.print(problem, soft_wrap=True)
    with doing("reading the text"):
        texts = () if text is None else articles.read_articles(text)
        sentences = articles.plain_sentences(texts)
    find = _asking() if wikidata else build.subjects_in_table
    entries = build.knowledge_tuples(usable.usable, seed)
    without = sum(len(relation.pairs) for relation in usable.usable) - len(entries)
    if without:
        notes.print(f"{without} facts left out: every object of their relation is true of them")
    total = len(entries) if full or limit is None else min(limit, len(entries))
    with progress("building", total) as done:
        each = _counted(entries, done)
        made = build.build_records(each, sentences=sentences, find=find, full=full)
        records = list(islice(made, limit))
    if not records:
        raise BadFact("no record can be built; each needs an object that is false of its subject")
    summary: dict[str, Any] = {"file": str(out), "problems": list(usable.problems)}
    summary["without_counterfactual"] = without
    if references is not None:
        named = articles.articles_by_entity(texts)
        found = build.build_references(records, usable.usable, named, find)
        _write(references, found)
        summary |= {"references": str(references), "covered": _covered(records, found)}
    _write(out, records)
    _report(out, summary, json)


def show_composition(
    file: Annotated[Path, typer.Argument(help="CounterFact, or a file of one's own cases.")],
    json: Json = False,
) -> None:
    """Count what a set of cases consists of, as in the paper's Table 2."""
    _report(file, {"file": str(file)}, json)


def _counted(
    entries: "Iterable[KnowledgeTuple]", done: Callable[[int], None]
) -> "Iterator[KnowledgeTuple]":
    for entry in entries:
        done(1)
        yield entry


def _wanted(relations: str | None, table: "Tables") -> list[str]:
    """The relations that were asked for; none for all of them."""
    from factscope.extras.counterfact_builder.build import COUNTERFACT

    if relations is None:
        return []
    if relations.strip().lower() == "counterfact":
        return [name for name in COUNTERFACT if name in table]
    return [name.strip() for name in relations.split(",") if name.strip()]


def _asking() -> "FindSubjects":
    """Wikidata's answer, or the table's where it has none; each object is asked for once."""
    from factscope.extras.counterfact_builder.build import (
        Relation,
        SubjectsWithObject,
        subjects_in_table,
    )
    from factscope.extras.counterfact_builder.wikidata import Wikidata
    from factscope.io import cache_folder

    service = Wikidata(cache_folder() / "wikidata")

    @cache
    def ask(name: str, target: str) -> SubjectsWithObject:
        return service.subjects(name, target)

    def find(relation: Relation, target: str) -> SubjectsWithObject:
        found = ask(relation.name, target)
        return found if found.subjects else subjects_in_table(relation, target)

    return find


def _write(path: Path, value: Any) -> None:
    """The value as JSON, packed for .gz; the same bytes for the same value."""
    from factscope.io import write_atomic

    data = json_module.dumps(value, ensure_ascii=False, indent=1).encode()
    write_atomic(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _covered(records: Sequence[dict[str, Any]], found: dict[str, dict[str, list[str]]]) -> int:
    """How many records have a reference text."""
    rewrites = (one["requested_rewrite"] for one in records)
    return sum(r["target_new"]["str"] in found.get(r["relation_id"], {}) for r in rewrites)


def _report(file: Path, summary: dict[str, Any], json: bool) -> None:
    """The file's composition, read back from it."""
    from factscope.data.readers import read_cases
    from factscope.extras.counterfact_builder.composition import composition

    read = read_cases(file)
    for problem in read.problems:
        notes.print(f"left out: {problem}", soft_wrap=True)
    items = composition(read.cases)
    if json:
        print_json(summary | {"composition": [asdict(item) for item in items]})
        return
    _print_items(items)
    if "references" in summary:
        shown = f"{summary['covered']} of {len(read.cases)} records have reference texts"
        results.print(f"{shown}: {summary['references']}", soft_wrap=True)
    results.print(str(file), soft_wrap=True)


def _print_items(items: "Sequence[CompositionRow]") -> None:
    from rich import box
    from rich.table import Table

    table = Table("item", box=box.SIMPLE)
    for column in ("total", "per relation", "per record"):
        table.add_column(column, justify="right")
    for item in items:
        per_relation, per_record = f"{item.per_relation:,.1f}", f"{item.per_record:.2f}"
        table.add_row(item.name, f"{item.total:,}", per_relation, per_record)
    results.print(table)
