"""The app: help without torch, default commands, and mistakes in the words."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from factscope.cli.app import COMMANDS, Group, main
from factscope.cli.flags import Command
from factscope.cli.output import print_json
from factscope.editing.settings import EDITORS


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run words; the exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["factscope", *words])
        with pytest.raises(SystemExit) as stopped:
            main()
        shown = capsys.readouterr()
        return int(stopped.value.code or 0), shown.out, shown.err

    return run


@pytest.fixture(params=["without pydantic", "with pydantic"])
def pydantic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """cyclopts validates values with pydantic, but only if something has imported it."""
    import pydantic as _  # noqa: F401

    if request.param == "without pydantic":
        monkeypatch.delitem(sys.modules, "pydantic")


def every_command() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, entry in COMMANDS.items():
        found += [(name, second) for second in entry] if isinstance(entry, Group) else [(name,)]
    return found


@pytest.mark.parametrize("words", [(), *every_command()], ids=" ".join)
def test_every_command_has_help(run, words: tuple[str, ...]) -> None:
    code, out, err = run(*words, "--help")
    assert (code, err) == (0, "")
    assert "Usage: factscope" in out


def test_help_needs_no_torch() -> None:
    probe = (
        "import sys\nfrom factscope.cli.app import run\n"
        f"for words in {every_command()}: assert run([*words, '--help']) == 0\n"
        "heavy = {'torch', 'numpy', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_shows_defaults_choices_and_required_flags(run) -> None:
    out = run("trace", "--help")[1]
    assert "[choices: states, mlp, attn] [default: states,mlp,attn]" in out
    assert "[default: 3s]" in out
    assert "[required]" in run("evaluate", "--help")[1]
    assert "Print the result as JSON on stdout" in out


def test_help_of_a_switch_that_is_on_explains_its_negation(run) -> None:
    assert "--no-attributes leaves them out" in run("evaluate", "--help")[1]
    assert "--no-signed does not" in run("edit", "--method", "kn", "--help")[1]


def test_methods_are_those_with_settings(run) -> None:
    assert f"[choices: {', '.join(EDITORS)}]" in run("edit", "--help")[1]


def test_json_has_null_for_nan_and_text_for_paths(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"mean": math.nan, "high": math.inf, "files": [Path("a/b")], "text": "é"})
    out = capsys.readouterr().out
    assert json.loads(out) == {"mean": None, "high": None, "files": ["a/b"], "text": "é"}
    assert "é" in out


def test_help_lists_the_flags_of_the_chosen_method_and_preset(run) -> None:
    rome, kn = run("edit", "--help")[1], run("edit", "--method", "kn", "--help")[1]
    assert "--max-neurons" in kn
    assert "--max-neurons" not in rome
    assert "--clamp" in rome
    assert "--clamp" not in kn
    assert "[default: mean]" in rome
    assert "[default: bare]" in run("edit", "--preset=paper", "--help")[1]


@pytest.mark.parametrize("words", [("edit",), ("edit", "--help")])
def test_a_group_lists_its_commands_and_the_flags_of_its_default(run, words) -> None:
    code, out, _ = run(*words)
    assert code == 0
    for word in ("write", "show", "--layer", "--subject"):
        assert word in out
    assert "--layer" not in run("edit", "show", "--help")[1]


@pytest.mark.parametrize(
    "words",
    [("A prompt",), ("--layer", "3", "show"), ("--", "show"), ("write", "show"), ("-m", "x", "a")],
)
def test_without_a_command_an_edit_is_written(run, words: tuple[str, ...]) -> None:
    code, _, err = run("edit", *words)
    assert code == 2
    assert 'give a prompt, --subject "…" and the new object --to "…"' in err


@pytest.mark.usefixtures("pydantic")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trac x", 'unknown command "trac". Did you mean "trace"?'),
        ("edit x --layr 3", "--layr is not known; did you mean --layer?"),
        ("trace x --window", "--window needs a value: Layers of"),
        ("trace x y", "unexpected argument 'y'"),
        ("trace x --noise loud", "--noise is 'loud'; write 3s"),
        ("trace x --noise -3s", "--noise is -3.0; give 0 or more"),
        ("trace x --kinds mpl,attn", "--kinds is 'mpl'; choose from states, mlp, attn"),
        ("trace x --subject x --seed -1", "--seed is -1; give 0 or more"),
        ("edit x --layer top", "--layer is 'top'; give a whole number, auto or none"),
        ("edit x --method rom", "--method is 'rom'; choose from rome"),
        ("edit x --max-neurons 3", "rome has no --max-neurons (see kn); its settings are --layer"),
        ("edit show", "FILES is required: Edit files"),
        ("evaluate", "--out is required: Run folder."),
        ("train rome", "METHOD is 'rome'; only these are trained: mend, ke"),
        ("train ke --rank 3 --out x", "--rank is not known"),
        ("generate x --top-k 0", "--top-k is 0; give 1 or more"),
        ("serve --port 99999", "--port is 99999; give 0 or more and 65535 or less"),
    ],
)
def test_a_mistake_is_one_line(run, words: str, message: str) -> None:
    code, out, err = run(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"factscope: {message}")
    assert err.count("\n") == 1


@pytest.mark.usefixtures("pydantic")
@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        ("trace --window 2 --window 3", "tracing.window", 3),
        ("trace --kinds mlp,attn --kinds states", "tracing.kinds", ("mlp", "attn", "states")),
        ("trace --noise 0.25", "tracing.corruption.in_sigmas", False),
        ("trace --preset paper --seed 7", "tracing.corruption.seed", 7),
        ("trace --preset paper", "tracing.window_alignment", "paper-code"),
        ("trace --limit none", "source.limit", None),
        ("edit --layer auto", "editor.layer", "auto"),
        ("edit --stats none", "editor.second_moment", "identity"),
        ("edit --steps none --prefix-lengths none", "editor.prefix_lengths", ()),
        ("edit --method=memit --layers 3-5", "editor.layers", (3, 4, 5)),
        ("edit --method kn --max-neurons none", "editor.max_neurons", None),
        ("edit --method kn --no-signed", "editor.signed", False),
        ("edit --method ft-l --max-change 1e-4", "editor.max_change", 1e-4),
        ("edit --paraphrase a,b --paraphrase c", "comparison.paraphrase", ("a,b", "c")),
        ("train ke --lstm-width 7 --out x", "training.network.lstm_width", 7),
    ],
)
def test_values_reach_the_options(
    run, words: str, path: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(Command, "__call__", lambda self, given: found.append(self.options(given)))
    assert run(*words.split())[0] == 0
    for name in path.split("."):
        found[0] = getattr(found[0], name)
    assert found == [value]


def test_every_flag_is_documented_and_means_one_thing() -> None:
    kinds: dict[str, set[bool]] = {}
    for words in every_command():
        entry = COMMANDS[words[0]]
        command = entry if isinstance(entry, Command) else entry[words[1]]
        methods = (
            EDITORS
            if "method" in command.kind.chosen_by and not command.kind.chosen_first
            else [None]
        )
        for method in methods:
            for name, setting in command.settings({"method": method} if method else {}).items():
                assert setting.help, (words, name)
                kinds.setdefault(name, set()).add(setting.switch)
    assert not [name for name, found in kinds.items() if len(found) > 1]
