"""Recipes: those of the repository are valid; one is run and resumed."""

import inspect
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from factscope.cli.recipe import RECIPES, _finished, included_recipes, known_flags
from factscope.data.readers import read_cases
from factscope.data.registry import DATA_SETS
from factscope.editing.settings import EDITORS
from factscope.errors import BadSetting
from factscope.io import locked
from factscope.lm.sources import SHORT_NAMES
from factscope.runs import recipe as recipe_module
from factscope.runs.folder import RunFolder
from factscope.runs.recipe import flag_words, read_recipe
from factscope.runs.sweep import read_sweep

from commands import Result, Run, runner, saved_model

PAPER = sorted(RECIPES.glob("*.toml"))
SMALL = sorted((RECIPES / "small").glob("*.toml"))
DEFAULT = sorted((RECIPES / "default").glob("*.toml"))
HUB = ("gpt2-medium", "gpt2-large", "gpt2-xl", "EleutherAI/gpt-j-6b", "EleutherAI/gpt-neox-20b")
KNOWN = known_flags()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model"), spread=0.3)


@pytest.fixture
def factscope(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    no_drawing: None,
) -> Run:
    return runner(tmp_path, tmp_path / "cache", monkeypatch, capsys)


def assert_refused(result: Result, *words: str) -> None:
    assert result.code == 2
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err


# ---- those of the repository


@pytest.mark.parametrize(
    "path", [*PAPER, *SMALL, *DEFAULT], ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_every_recipe_is_valid(path: Path, factscope: Run) -> None:
    recipe = read_recipe(path, KNOWN)
    for step in recipe.steps:
        said = step.settings
        small = path.parent.name in ("small", "default")
        assert said["model"] in (SHORT_NAMES if small else HUB)
        assert said.get("method", "rome") in EDITORS
        assert said.get("preset", "default") in ("default", "paper")
        for key in ("data", "facts", "references"):
            name = said.get(key, "everyday")
            own_text = (step.command, name) == ("train", "text")
            assert own_text or name in DATA_SETS or Path(name).is_file()
        trained = [other.name for other in recipe.steps if other.command == "train"]
        assert "weights" not in said or said["weights"] in trained
    name = next(name for name, included in included_recipes().items() if included == path)
    shown = factscope("recipe", name, "--out", "out", "--dry-run")
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    assert lines[0] == recipe.title
    assert len(lines) == 1 + len(recipe.steps) + len(recipe.reports)
    assert all(line.startswith("factscope ") for line in lines[1:])


def test_every_recipe_has_a_small_version() -> None:
    assert len(PAPER) >= 20
    assert [path.name for path in PAPER] == [path.name for path in SMALL]


def test_included_recipes_are_listed_with_their_titles(factscope: Run) -> None:
    lines = factscope("recipe", "list").out.splitlines()
    assert len(lines) == len([*PAPER, *SMALL, *DEFAULT])
    assert lines[0].split("  ", 1)[0] == "figure-1-trace"
    assert lines[0].endswith("  Figure 1: the trace of one fact, GPT-2 XL")
    listed = json.loads(factscope("recipe", "list", "--json").out)
    assert [entry["name"] for entry in listed] == [line.split()[0] for line in lines]
    names = [entry["name"] for entry in listed]
    assert names.index("figure-2-averages") < names.index("figure-13-noises")
    assert {"small/figure-2-averages", "default/mend"} <= set(names)


def test_name_of_an_unknown_recipe(factscope: Run) -> None:
    said = factscope("recipe", "small/figure-2-average", "--out", "out")
    assert_refused(said, "did you mean 'small/figure-2-averages'?", "factscope recipe list")
    assert_refused(
        factscope("recipe", "nothing", "--out", "out"), "RECIPE is 'nothing'; `factscope"
    )


def test_every_hypernetwork_of_the_paper_has_a_recipe() -> None:
    names = {"mend", "mend-cf", "mend-zsre", "ke", "ke-cf", "ke-zsre"}
    assert {path.stem for path in DEFAULT} == names
    for path in DEFAULT:
        train, evaluate = read_recipe(path, KNOWN).steps
        assert (train.command, evaluate.command) == ("train", "evaluate")
        assert train.settings["minutes"] < 10
        assert evaluate.settings["weights"] == train.name


def test_weights_come_from_an_earlier_run(tmp_path: Path, factscope: Run) -> None:
    trained = '[[run]]\nname = "t"\ncommand = "train"\nmethod = "ke"\ndata = "text"\n'
    edited = '[[run]]\nname = "e"\ncommand = "evaluate"\nmethod = "ke"\nweights = "t"\n'
    path = tmp_path / "recipe.toml"
    path.write_text(f'title = "T"\n{trained}{edited}')
    shown = factscope("recipe", path, "--out", "o", "--dry-run", "--limit", 5, "--data", "zsre")
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    assert lines[1] == "factscope train ke --data text --out o/t"  # it learns from what it says
    assert "--weights o/t/weights.safetensors" in lines[2]
    assert "--limit 5 --data zsre" in lines[2] or "--data zsre --limit 5" in lines[2]
    path.write_text(f'title = "T"\n{edited}{trained}')
    assert_refused(factscope("recipe", path, "--out", "o"), "'t'", "trained after it")


@pytest.mark.parametrize("file", ["curie.json", "small/questions.json"])
def test_case_files_of_recipes_can_be_read(file: str) -> None:
    cases = read_cases(RECIPES / file)
    assert cases.cases
    assert not cases.problems


# ---- one run to its end


def test_a_recipe_runs_and_resumes(
    factscope: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "recipe",
        "small/prefix-ablation",
        "--model",
        model,
        "--limit",
        2,
        "--device",
        "cpu",
        "--out",
        "out",
    )
    first = factscope(*words)
    assert first.code == 0, first.err
    out = tmp_path / "out"
    sweep = read_sweep(out / "sweep")
    assert [point.settings["prefix_lengths"] for point in sweep.points] == [
        "none", "5x5,10x5", "5x10,10x10",
    ]  # fmt: skip
    assert all(point.summary is not None for point in sweep.points)
    assert (out / "report" / "index.html").is_file()
    assert (out / "report" / "sweep.pdf").is_file()
    assert "  # finished" in factscope(*words, "--dry-run").out

    def never(*args: Any, **more: Any) -> None:
        raise AssertionError("loaded again")

    monkeypatch.setattr("factscope.lm.load.load", never)
    again = factscope(*words, "--json")
    assert again.code == 0, again.err
    said = json.loads(again.out)
    assert list(said["results"]) == ["report:report"]
    assert len(said["results"]["report:report"]["points"]) == 3


def test_ctrl_c_stops_the_recipe_and_the_rerun_resumes(
    factscope: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = tmp_path / "facts.jsonl"
    facts.write_text(
        "".join(
            json.dumps({"subject": "Ann", "prompt": f"{{}} speaks {i} words of", "id": str(i)})
            + "\n"
            for i in range(3)
        )
    )
    file = tmp_path / "recipe.toml"
    file.write_text(
        f'title = "T"\n[common]\nmodel = "{model}"\ndevice = "cpu"\nfacts = "{facts}"\n'
        'samples = 2\n[[run]]\nname = "one"\ncommand = "trace"\n'
        '[[run]]\nname = "two"\ncommand = "trace"\nseed = 1\n[[report]]\nruns = ["one"]\n'
    )
    append, out = RunFolder.append, tmp_path / "out"

    def interrupted(self: RunFolder, record: Any) -> None:
        if (out / "one" / "records.jsonl").is_file():
            raise KeyboardInterrupt
        append(self, record)

    monkeypatch.setattr(RunFolder, "append", interrupted)
    stopped = factscope("recipe", file, "--out", "out")
    assert stopped.code == 130
    assert stopped.err.endswith("factscope: interrupted; the same command resumes\n")
    assert sorted(path.name for path in out.iterdir()) == ["one"]  # no second run, no report
    assert len(RunFolder.open(out / "one").trace_records()) == 1
    assert "# finished" not in factscope("recipe", file, "--out", "out", "--dry-run").out
    monkeypatch.setattr(RunFolder, "append", append)
    resumed = factscope("recipe", file, "--out", "out")
    assert resumed.code == 0, resumed.err
    assert all(len(RunFolder.open(out / name).trace_records()) == 3 for name in ("one", "two"))
    assert (out / "report").is_dir()
    shown = factscope("recipe", file, "--out", "out", "--dry-run").out
    assert shown.count("  # finished") == 2


def test_a_recipe_refuses_a_folder_that_is_in_use_or_cannot_be_written(
    factscope: Run, tmp_path: Path
) -> None:
    file = RECIPES / "small" / "prefix-ablation.toml"
    (tmp_path / "file").write_text("")
    assert_refused(factscope("recipe", file, "--out", "file"), "--out", "is a file")
    assert_refused(factscope("recipe", file, "--out", "/proc/x"), "--out", "cannot be written")
    with locked(tmp_path / "out"):
        result = factscope("recipe", file, "--out", "out")
    assert result.code == 1
    assert "factscope: out is in use by process" in result.err


@pytest.mark.parametrize("content", [b"\xff", b"[1]", b"[" * 100_000, b'{"sweep": 1}'])
def test_a_damaged_file_of_finished_runs_counts_as_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "finished.json").write_bytes(content)
    assert _finished(tmp_path) == {}


def test_statistics_are_looked_up_again(tmp_path: Path) -> None:
    """Their files are in the cache, which may have been emptied since."""
    (tmp_path / "run").mkdir()
    words = {"c": ["stats", "--layers", "1"], "run": ["trace", "--out", str(tmp_path / "run")]}
    (tmp_path / "finished.json").write_text(json.dumps(words))
    assert list(_finished(tmp_path)) == ["run"]


def test_several_runs_share_a_report(factscope: Run, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(
        'title = "t"\n[common]\nlimit = 1\ntext-length = 0\nmethod = "ft"\nsteps = 2\n'
        '[[run]]\nname = "low"\ncommand = "evaluate"\nlayer = 0\n'
        '[[run]]\nname = "high"\ncommand = "evaluate"\nlayer = "1"\n'
        '[[run]]\nname = "one"\ncommand = "trace"\nprompt = "Rome is in"\nsubject = "Rome"\n'
        "samples = 2\n"
        '[report]\nname = "both"\n'
    )
    words = ("recipe", file, "--model", model, "--device", "cpu", "--out", "out")
    done = factscope(*words, "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)["results"]
    assert list(said) == ["low", "high", "one", "report:both"]
    assert len(said["report:both"]["summaries"]) == 3
    assert (tmp_path / "out" / "one.pdf").is_file()
    assert (tmp_path / "out" / "both" / "table.csv").is_file()
    (tmp_path / "out" / "one.pdf").unlink()
    assert list(json.loads(factscope(*words, "--json").out)["results"]) == ["one", "report:both"]


def test_facts_by_the_name_of_a_data_set(factscope: Run, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(
        'title = "t"\n[[run]]\nname = "traces"\ncommand = "trace"\nfacts = "everyday"\n'
        'limit = 1\nsamples = 2\nkinds = ["states"]\n'
    )
    done = factscope("recipe", file, "--model", model, "--device", "cpu", "--out", "out")
    assert done.code == 0, done.err
    assert (tmp_path / "out" / "traces" / "records.jsonl").is_file()


# ---- mistakes

GOOD = 'title = "t"\n[[run]]\nname = "a"\ncommand = "evaluate"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no [[run]]"),
        ("title = ", "cannot read the recipe"),
        (GOOD.replace('title = "t"\n', ""), "title is missing"),
        (GOOD + 'colour = "red"\n', "run 1 (a): 'colour' is not known"),
        (GOOD + 'out = "x"\n', "'out' is not known"),
        (GOOD + "limit = 0\n", "--limit"),
        (GOOD + 'limit = "many"\n', "--limit"),
        (GOOD.replace("evaluate", "bake"), "no command 'bake'"),
        (GOOD.replace('name = "a"\n', ""), "name is missing"),
        (GOOD.replace('"a"', '"../a"'), "cannot name a folder"),
        (GOOD + GOOD.partition("\n")[2], "same name"),
        (GOOD + '[other]\nx = 1\n', "'other' is not known"),
        (GOOD + "[common]\nwindow = 3\n", "no command of this recipe has 'window'"),
        (GOOD + '[[report]]\nruns = ["b"]\n', "no run 'b'"),
        (GOOD + "[[report]]\nsteps = 3\n", "report: 'steps' is not known"),
        ('run = 3\ntitle = "t"\n', "must be tables"),
    ],
)  # fmt: skip
def test_an_invalid_recipe_is_refused(text: str, said: str, factscope: Run) -> None:
    Path("recipe.toml").write_text(text)
    assert_refused(factscope("recipe", "recipe.toml", "--out", "out"), said)
    assert not Path("out").exists()


def test_a_recipe_needs_a_folder_and_a_file(factscope: Run) -> None:
    assert_refused(factscope("recipe", PAPER[0]), "--out is required")
    assert_refused(factscope("recipe", "none.toml", "--out", "out"), "cannot read the recipe")


def test_a_changed_recipe_is_refused_by_its_run_folder(
    factscope: Run, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(GOOD + 'method = "ft"\nsteps = 2\nlimit = 1\ntext-length = 0\n')
    words = ("recipe", file, "--model", model, "--device", "cpu", "--out", "out")
    assert factscope(*words).code == 0
    file.write_text(file.read_text().replace("steps = 2", "steps = 3"))
    assert_refused(factscope(*words), "belongs to another run", "steps")


def test_settings_as_command_line_arguments() -> None:
    settings = {"kinds": ["states", "mlp"], "force": True, "gradients": False, "prompt": "A b",
                "lr": 5e-4}  # fmt: skip
    assert flag_words(settings, ["prompt"]) == [
        "A b", "--kinds", "states", "--kinds", "mlp", "--force", "--lr", "0.0005",
    ]  # fmt: skip


def test_files_in_the_recipes_folder_are_found_from_any_directory(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("[]")
    file = tmp_path / "recipe.toml"
    file.write_text(GOOD + 'data = "mine.json"\n')
    assert read_recipe(file, KNOWN).steps[0].settings["data"] == str(tmp_path / "mine.json")
    file.write_text(GOOD + "stepps = 3\n")
    with pytest.raises(BadSetting, match=r"'stepps' is not known.*steps"):
        read_recipe(file, KNOWN)


def test_a_training_is_reported_only_if_named(tmp_path: Path) -> None:
    trained = '[[run]]\nname = "trained"\ncommand = "train"\nmethod = "mend"\n'
    file = tmp_path / "recipe.toml"
    file.write_text(GOOD + trained + '[[report]]\n[[report]]\nname = "t"\nruns = ["trained"]\n')
    assert [made.runs for made in read_recipe(file, KNOWN).reports] == [("a",), ("trained",)]
    file.write_text(f'title = "t"\n{trained}[[report]]\n')
    assert read_recipe(file, KNOWN).reports[0].runs == ("trained",)


def test_the_example_in_the_docstring_is_valid(tmp_path: Path) -> None:
    text = inspect.cleandoc(recipe_module.__doc__ or "").split("\n\n", 1)[1]
    text = inspect.cleandoc(text)
    assert tomllib.loads(text)["title"].startswith("Table 4")
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    assert read_recipe(file, KNOWN).reports[0].runs == ("rome",)
