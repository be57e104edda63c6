"""factscope models and data: what is available here, data sets, and files of facts."""

import gzip
import json
import random
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge
from rich.table import Table

from factscope.cli.flags import Command, ModelOptions, Options
from factscope.cli.output import counting, doing, note, skipped, text_table, working
from factscope.errors import BadFact, BadSetting
from factscope.facts import Case, Fact
from factscope.io import atomic_path, cache_folder, check_output_file, write_atomic
from factscope.settings import Flag, Seed

if TYPE_CHECKING:
    from factscope.lm.model import LM

# ---- models


@Command
def models(options: Options) -> None:
    """List the short names, the supported model families and the converted models."""
    from factscope.lm.families import FAMILIES
    from factscope.lm.sources import DEFAULT_MODEL, SHORT_NAMES, cached_models, is_converted

    short = [
        {
            "name": name, "description": model.description, "download_bytes": model.size,
            "licence": model.licence, "cached": is_converted(name),
        }
        for name, model in sorted(SHORT_NAMES.items())
    ]  # fmt: skip
    converted = [
        {"name": folder.name, "path": folder, "bytes": size}
        for folder, size in cached_models().items()
    ]
    families, cache = sorted(FAMILIES), cache_folder()
    rows = [
        (name, description, f"{size / 1e6:,.0f} MB", licence, "yes" if cached else "no")
        for name, description, size, licence, cached in (row.values() for row in short)
    ]
    options.print_result(
        {
            "default": DEFAULT_MODEL, "short_names": short, "families": families, "cache": cache,
            "converted": converted,
        },
        text_table(("short name", "model", "download", "licence", "cached"), rows),
        f"families: {', '.join(families)}",
        "also: a folder with safetensors, a .gguf file, a hub id",
        f"cache: {cache}",
        *(f"  {row['name']}  {row['bytes'] / 1e6:,.0f} MB" for row in converted),
    )  # fmt: skip


# ---- data sets


@Command
def list_(options: Options) -> None:
    """List the data sets, their records, and where they are."""
    from factscope.data.registry import DATA_SETS, count_records, find_local

    rows = []
    with doing("counting records"):
        for name, data in DATA_SETS.items():
            local = find_local(name)
            rows.append({
                "name": name,
                "description": data.description,
                "from": local.origin if local else "to fetch" if data.sha256 else "by hand",
                "path": local.path if local else None,
                "records": count_records(local.path) if local else None,
                "download_bytes": data.size,
                "url": data.url,
            })  # fmt: skip
    cells = []
    for row in rows:
        size = f" ({row['download_bytes'] / 1e6:,.1f} MB)" if row["from"] == "to fetch" else ""
        records = "" if row["records"] is None else f"{row['records']:,}"
        cells.append((row["name"], row["description"], records, row["from"] + size))
    options.print_result(
        {"data_sets": rows},
        text_table(("name", "description", "records", "from"), cells),
        *(f"{row['name']}: {row['path']}" for row in rows if row["path"]),
        "`factscope data get NAME` downloads one; FACTSCOPE_DATA names a folder of your own",
    )


@dataclass(frozen=True, kw_only=True)
class GetOptions(Options):
    name: Annotated[str, Flag(positional=True)]
    """A data set of `factscope data list`."""
    sha256: str | None = None
    """The SHA-256 that the downloaded file must have."""


@Command
def get(options: GetOptions) -> None:
    """Download a data set into the cache, unless it is there, and print its path."""
    from factscope.data.registry import find_data

    with working(f"downloading {options.name}") as done:
        path = find_data(options.name, sha256=options.sha256, progress=done)
    options.print_result({"name": options.name, "path": path}, str(path))


@dataclass(frozen=True, kw_only=True)
class ShowOptions(Options):
    data: Annotated[str, Flag(positional=True)]
    """A data set of `factscope data list`, or a file."""
    cases: str | None = None
    """Ids of the cases, e.g. 3,17."""
    limit: Annotated[int, Ge(1)] = 1
    """Without --cases: show only the first N."""


@Command
def show(options: ShowOptions) -> None:
    """Show cases as they are read: the edit, and the prompts that are scored."""
    from factscope.data.readers import read_cases
    from factscope.data.registry import find_data

    file = read_cases(find_data(options.data))
    skipped(file.problems[:5])
    chosen = file.cases[: options.limit]
    if options.cases is not None:
        by_id = {str(case.fact.id): case for case in file.cases}
        ids = [word.strip() for word in options.cases.split(",") if word.strip()]
        for word in ids:
            if word not in by_id:
                known = ", ".join(list(by_id)[:3])
                raise BadSetting(f"{options.data} has no case {word!r}; its ids are {known}, …")
        chosen = [by_id[word] for word in ids]
    options.print_result(
        {"cases": [asdict(case) for case in chosen]}, *(_case_table(case) for case in chosen)
    )


def _case_table(case: Case) -> Table:
    fact = case.fact
    old = "" if case.true is None else f" (was {case.true})"
    neighbour_answers = case.neighbour_answers or [case.true or ""] * len(case.neighbours)
    parts = (
        ("prompt", [fact.text], [f"{fact.target}{old}"]),
        ("paraphrases", case.paraphrases, [fact.target or ""] * len(case.paraphrases)),
        ("neighbours", case.neighbours, neighbour_answers),
        ("attributes", case.attributes, [fact.target or ""] * len(case.attributes)),
        ("texts", case.generations, ["…"] * len(case.generations)),
    )
    rows = [
        ("" if i else name, text, answer)
        for name, texts, answers in parts
        for i, (text, answer) in enumerate(zip(texts, answers, strict=True))
    ]
    title = " · ".join(x for x in (f"case {fact.id}", fact.relation) if x)
    return text_table(("", "prompt", "answer"), rows, title=title, title_justify="left")


# ---- facts that a model knows


@dataclass(frozen=True, kw_only=True)
class KnownOptions(Options):
    facts: Path
    """ParaRel's table of facts, or a facts file with templates."""
    out: Annotated[Path, Flag(short="o")]
    """File for the known facts (JSON lines)."""
    patterns: Path | None = None
    """ParaRel's table of patterns, with [X] and [Y]."""
    limit: Annotated[int | None, Ge(1)] = None
    """Use only N facts, drawn at random."""
    seed: Seed = 0
    """Seed of the draw."""
    max_new_tokens: Annotated[int, Ge(1)] = 10
    """Tokens to generate."""
    pairs: bool = False
    """Give each fact a replacement for traces with token replacement: the subject of another known
    fact of the same relation, with as many tokens and another object. Facts without one are left
    out."""
    model: ModelOptions = field(default_factory=ModelOptions)


@Command
def find_known(options: KnownOptions) -> None:
    """Find facts that a model knows: greedy decoding names the object before any other name."""
    from factscope.data.readers import pararel_facts, read_facts
    from factscope.tracing.trace import find_known

    _check_output(options.out, "--out", options.facts, options.patterns)
    if options.patterns is None:
        file = read_facts(options.facts)
        skipped(file.problems)
        facts = list(file.facts)
    else:
        facts = list(pararel_facts(options.facts, options.patterns))
    if options.limit is not None and options.limit < len(facts):
        facts = random.Random(options.seed).sample(facts, options.limit)
    lm = options.model.load()
    with working("predicting", len(facts)) as done:
        tokens = options.max_new_tokens
        known = list(find_known(lm, facts, max_new_tokens=tokens, progress=done))
    without = 0
    if options.pairs:
        paired = _with_replacements(lm, known)
        known, without = paired, len(known) - len(paired)
    lines = [
        {
            "known_id": i, "subject": fact.subject, "attribute": fact.target, "prompt": fact.text,
            "prediction": prediction, "relation_id": fact.relation,
            **({"replacement": fact.replacement} if options.pairs else {}),
        }
        for i, (fact, prediction) in enumerate(known)
    ]  # fmt: skip
    out, next_step = options.out, f"factscope trace --facts {options.out} --out RUN"
    write_atomic(out, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    result: dict[str, Any] = {"facts": len(facts), "known": len(known) + without, "file": out}
    written = f"{result['known']} of {len(facts)} facts are known to {options.model.model}: {out}"
    if options.pairs:
        result["pairs"] = len(known)
        written = f"{written}, {len(known)} with a replacement"
        next_step += " --distribution tokens"
    options.print_result(result, written, f"Next: {next_step}")


def _with_replacements(lm: "LM", known: Sequence[tuple[Fact, str]]) -> list[tuple[Fact, str]]:
    """The facts for which another one has a subject that can replace theirs."""
    from factscope.tracing.corruption import with_replacement

    facts = [fact for fact, _ in known]
    paired = []
    for fact, prediction in known:
        with suppress(BadFact):
            paired.append((with_replacement(lm, fact, facts), prediction))
    return paired


# ---- building CounterFact


@dataclass(frozen=True, kw_only=True)
class BuildOptions(Options):
    facts: Path
    """ParaRel's table of facts, by relation."""
    patterns: Path
    """ParaRel's table of patterns, with [X] and [Y]."""
    out: Annotated[Path, Flag(short="o")]
    """File for the records (JSON)."""
    text: Path | None = None
    """Articles, separated by blank lines: for sentences before paraphrases, and for references."""
    references_out: Path | None = None
    """File for the reference texts (JSON); needs --text."""
    wikidata: bool = False
    """Take neighbours from Wikidata instead of the table."""
    relations: str | None = None
    """Use only these relations, e.g. P19,P27; or counterfact for the paper's."""
    full: bool = False
    """Keep only records with ten neighbours and attributes."""
    limit: Annotated[int | None, Ge(1)] = None
    """Build at most N records."""
    seed: Seed = 0
    """Seed of all draws."""


@Command
def build_counterfact(options: BuildOptions) -> None:
    """Build counterfactuals as the paper does (App. D), from a table of facts and patterns."""
    from factscope.data.readers import read_relation_table
    from factscope.extras import counterfact_builder as builder

    limit, full = options.limit, options.full
    if options.references_out is not None and options.text is None:
        raise BadSetting("--references-out needs --text, the articles to take them from")
    inputs = options.facts, options.patterns, options.text
    _check_output(options.out, "--out", *inputs)
    if options.references_out is not None:
        _check_output(options.references_out, "--references-out", options.out, *inputs)
    table = read_relation_table(options.facts)
    patterns = read_relation_table(options.patterns)
    selected = [name.strip() for name in (options.relations or "").split(",") if name.strip()]
    if [name.lower() for name in selected] == ["counterfact"]:
        selected = [name for name in builder.COUNTERFACT if name in table]
    relations, problems = builder.usable_relations(table, patterns, selected)
    for problem in problems:
        note(problem)
    with doing("reading the text"):
        texts = () if options.text is None else builder.read_articles(options.text)
        sentences = builder.plain_sentences(texts)
    find = builder.subjects_in_table
    if options.wikidata:
        find = builder.find_in_wikidata(cache_folder() / "wikidata")
    entries = builder.knowledge_tuples(relations, options.seed)
    no_counterfactual = sum(len(relation.pairs) for relation in relations) - len(entries)
    if no_counterfactual:
        note(f"{no_counterfactual} facts skipped: every object of their relation is true of them")
    total = len(entries) if full or limit is None else min(limit, len(entries))
    with counting("building", total) as done:
        counted = (done(1.0) or entry for entry in entries)
        all_records = builder.build_records(counted, sentences=sentences, find=find, full=full)
        records = list(islice(all_records, limit))
    if not records:
        raise BadFact("no record can be built; each needs an object that is false of its subject")
    summary: dict[str, Any] = {
        "file": options.out, "problems": problems, "without_counterfactual": no_counterfactual,
    }  # fmt: skip
    outputs: dict[Path, Any] = {options.out: records}
    if options.references_out is not None:
        by_entity = builder.articles_by_entity(texts)
        references = builder.build_references(records, relations, by_entity, find)
        outputs[options.references_out] = references
        rewrites = [record["requested_rewrite"] for record in records]
        covered = sum(
            r["target_new"]["str"] in references.get(r["relation_id"], {}) for r in rewrites
        )
        summary |= {"references": options.references_out, "covered": covered}
    with ExitStack() as stack:  # after an error, as on a full disk, both files are as before
        for path, value in outputs.items():
            # Compressed for .gz; the same bytes for the same value.
            data = json.dumps(value, ensure_ascii=False, indent=1).encode()
            data = gzip.compress(data, mtime=0) if path.suffix == ".gz" else data
            stack.enter_context(atomic_path(path)).write_bytes(data)
    _print_composition(summary, options)


def _check_output(path: Path, flag: str, *others: Path | None) -> None:
    """Raise BadSetting if a file cannot be written later, or is one of the other files."""
    check_output_file(path, flag)
    if path.resolve() in [other.resolve() for other in others if other is not None]:
        raise BadSetting(f"{flag} is {str(path)!r}, which another flag names too; give a new file")


@dataclass(frozen=True, kw_only=True)
class CompositionOptions(Options):
    file: Annotated[Path, Flag(positional=True)]
    """CounterFact, or another file of cases."""


@Command
def composition(options: CompositionOptions) -> None:
    """Count what a file of cases consists of, as in the paper's Table 2."""
    _print_composition({"file": options.file}, options)


def _print_composition(summary: dict[str, Any], options: Options) -> None:
    """The composition of a file, read back from it."""
    from factscope.data.readers import read_cases
    from factscope.extras.counterfact_builder import composition

    read = read_cases(summary["file"])
    skipped(read.problems)
    items = composition(read.cases)
    rows = [
        (item.name, f"{item.total:,}", f"{item.per_relation:,.1f}", f"{item.per_record:.2f}")
        for item in items
    ]
    lines = [str(summary["file"])]
    if "references" in summary:
        covered = f"{summary['covered']} of {len(read.cases)} records have reference texts"
        lines.insert(0, f"{covered}: {summary['references']}")
    options.print_result(
        summary | {"composition": [asdict(item) for item in items]},
        text_table(("item", "total", "per relation", "per record"), rows),
        *lines,
    )
