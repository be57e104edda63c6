"""factscope data show: what a case of a data set asks."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from factscope.cli.options import Json
from factscope.cli.show import notes, print_json, results
from factscope.errors import BadSetting

if TYPE_CHECKING:
    from factscope.facts import Case

__all__ = ["show_cases"]


def show_cases(
    data: Annotated[str, typer.Argument(help="A data set of `factscope data list`, or a file.")],
    cases: Annotated[
        str | None, typer.Option("--cases", help="The ids of the cases, as in 3,17.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Without --cases, only the first so many.")] = 1,
    json: Json = False,
) -> None:
    """Show cases as they are read: what is rewritten, and what is asked before and after."""
    from factscope.data.readers import read_cases
    from factscope.data.registry import find_data

    file = read_cases(find_data(data))
    for problem in file.problems[:5]:
        notes.print(f"left out: {problem}", soft_wrap=True)
    chosen = file.cases[:limit] if cases is None else _named(file.cases, cases, data)
    if json:
        print_json({"cases": [asdict(case) for case in chosen]})
        return
    for case in chosen:
        _show(case)


def _named(cases: "Sequence[Case]", ids: str, data: str) -> "list[Case]":
    by_id = {str(case.fact.id): case for case in cases}
    wanted = [word.strip() for word in ids.split(",") if word.strip()]
    for word in wanted:
        if word not in by_id:
            known = ", ".join(list(by_id)[:3])
            raise BadSetting(f"{data} has no case {word!r}; its ids are {known}, …")
    return [by_id[word] for word in wanted]


def _show(case: "Case") -> None:
    from rich import box
    from rich.table import Table

    fact = case.fact
    title = " · ".join(x for x in (f"case {fact.id}", fact.relation) if x)
    table = Table("", "asked", "answer", box=box.SIMPLE, title=title, title_justify="left")
    was = "" if case.true is None else f" (was {case.true})"
    table.add_row("prompt", fact.text, f"{fact.target}{was}")
    own = case.neighbour_answers or [case.true or ""] * len(case.neighbours)
    parts = (
        ("paraphrases", case.paraphrases, [fact.target or ""] * len(case.paraphrases)),
        ("neighbours", case.neighbours, own),
        ("attributes", case.attributes, [fact.target or ""] * len(case.attributes)),
        ("texts", case.generations, ["…"] * len(case.generations)),
    )
    for name, texts, answers in parts:
        for i, (text, answer) in enumerate(zip(texts, answers, strict=True)):
            table.add_row("" if i else name, text, answer)
    results.print(table)
