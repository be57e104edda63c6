"""The app: help without torch, default commands, and mistakes in the words."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import factscope
from factscope.cli.app import COMMANDS, Group, main
from factscope.cli.flags import Command
from factscope.cli.output import print_json
from factscope.editing.settings import EDITORS

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
SCRIPTS = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]["scripts"]
MODULE, FUNCTION = SCRIPTS["factscope"].split(":")
ENTRY_POINT = f"from {MODULE} import {FUNCTION}; {FUNCTION}()"
"""What the installed script does."""


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
    assert "--layer N|auto" in run("edit", "--help")[1]
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
        (
            "trace x --subject x --noise 1e39",
            "--noise is 1e+39; give 0 or more and",
        ),
        ("trace x --subject x --noise inf", "--noise is inf; give 0 or more"),
        ("trace x --subject x --occurrence 0", "--occurrence is 0; give 1 or more"),
        ("trace x --subject x --distribution y", "--distribution is 'y'; choose from gaussian"),
        ("trace x --subject x --rng per_fact", "--rng is 'per_fact'; choose from per-fact, paper"),
        ("trace x --subject x --occurrence 2", "--occurrence is 2, but the subject 'x' occurs 1"),
        ("trace x --subject x --max-memory inf", "--max-memory is 'inf'; write a size"),
        ("trace x --subject x --kinds none", "--kinds is none, and nothing else is traced"),
        ("trace x --subject x --kinds=", "--kinds is ''; choose from states, mlp, attn"),
        ("trace x --subject x --model=", "--model is empty; give"),
        ("stats --layers none", "--layers is 'none'; write 5, 3-8 or 3,5,8"),
        ("stats --layers=", "--layers is ''; give a whole number"),
        ("trace x --dtype float8", "--dtype is 'float8'; choose from float32, tf32"),
        ("trace --facts x --out", "--out needs a value: Figure"),
        ("edit x --method kn --max-neurons 0", "--max-neurons is 0; give 1 or more"),
        ("edit x --max-new-tokens -5", "--max-new-tokens is -5; give 0 or more"),
        ("edit x --prefix-seed -1", "--prefix-seed is -1; give 0 or more"),
        ("edit x --prefixes /dev/null", "--prefixes is '/dev/null'; the file is empty"),
        ("edit x --prefixes /", "--prefixes is '/'; the file cannot be read"),
        ("edit x --ridge -1", "--ridge is -1.0; give 0 or more"),
        ("edit x --ridge inf", "--ridge is 'inf'; give a number"),
        ("edit x --kl-weight nan", "--kl-weight is 'nan'; give a number"),
        ("edit x --prefix-lengths 0x5", "--prefix-lengths is (0, 5); give 1 or more"),
        ("generate x --seed -1", "--seed is -1; give 0 or more and less than 4294967296"),
        ("evaluate --seed 4294967296 --out x", "--seed is 4294967296; give 0 or more and less"),
        ("evaluate --facts-per-edit 0 --out x", "--facts-per-edit is 0; give 1 or more"),
        ("sweep --grid layer=0-100000000 --out x", "--layer is '0-100000000'; give numbers up to"),
        ("stats --layers 0-100000000", "--layers is '0-100000000'; give numbers up to 9999"),
        ("stats --layers 1 --batch-size 0", "--batch-size is 0; give 1 or more"),
        ("stats --layers 1 --seed -1", "--seed is -1; give 0 or more"),
        ("stats --layers 1 --convergence nan", "--convergence is 'nan'; give a number or none"),
        ("stats --layers 1 --shard 5/4", "--shard is '5/4'; write 1/4 to 4/4"),
        ("stats --layers 1 --out=", "--out is ''; give a path"),
        ("train mend --max-grad-norm 0 --out x", "--max-grad-norm is 0.0; give more than 0"),
        ("train mend --edit-weight -1 --out x", "--edit-weight is -1.0; give 0 or more"),
        ("train mend --patience 0 --out x", "--patience is 0; give 1 or more"),
        ("train ke --seed -1 --out x", "--seed is -1; give 0 or more"),
        ("data find-known --facts x --out y --seed -1", "--seed is -1; give 0 or more"),
        ("data build-counterfact --facts x --patterns y --out z --seed -1", "--seed is -1; give"),
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
        ("edit --prefixes none", "editor.prefixes", None),
        ("edit --stats none", "editor.second_moment", "identity"),
        ("edit --steps none --prefix-lengths none", "editor.prefix_lengths", ()),
        ("edit --method=memit --layers 3-5", "editor.layers", (3, 4, 5)),
        ("edit --method kn --max-neurons none", "editor.max_neurons", None),
        ("edit --method memit --covariance-weight 200", "editor.covariance_weight", 200.0),
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


# ---- errors that escape a command


def raising(error: BaseException):
    def models(self: Command, given: object) -> None:
        raise error

    return models


def os_error(number: int, *names: str) -> OSError:
    return OSError(number, os.strerror(number), *names)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (os_error(errno.ENOTDIR, "a/b"), 1, "'a/b': Not a directory; give another path"),
        (
            OSError(errno.ELOOP, "Too many levels of symbolic links", "a", None, "b"),
            1,
            "'a' → 'b': Too many levels of symbolic links",
        ),
        (os_error(errno.EROFS, "/c"), 1, "'/c': Read-only file system; give another path"),
        (os_error(errno.ENOSPC), 1, "No space left on device; free some space"),
        (os_error(errno.EMFILE, "a"), 1, "'a': Too many open files; raise the limit"),
        (OSError("connection lost"), 1, "connection lost; check the disk and the network"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), 2, "a text is not valid Unicode ("),
        (RecursionError("maximum recursion depth exceeded"), 2, "the input is nested too deeply"),
        (MemoryError(), 1, "out of memory; try --dtype bfloat16"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (KeyboardInterrupt("the same command resumes"), 130, "interrupted; the same command res"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_an_escaped_error_is_one_line(
    run, error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Command, "__call__", raising(error))
    found, out, err = run("models")
    assert (found, out) == (code, "")
    assert err.startswith(f"factscope: {message}")
    assert err.count("\n") == 1


def test_a_loop_of_links_is_one_line(run, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    code, out, err = run("edit", "show", str(tmp_path / "loop"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "loop" in err


def test_other_errors_keep_their_traceback(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Command, "__call__", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        run("models")


@pytest.mark.parametrize(
    "words", [("trace", "caf\udce9"), ("edit", "show", "\ud800.edit"), ("\udcff",)]
)
def test_arguments_that_are_not_utf8(run, words: tuple[str, ...]) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err == f"factscope: the argument {words[-1]!r} is not valid UTF-8; type it again\n"


def test_invalid_bytes_and_an_ascii_terminal_in_a_process() -> None:
    command = [sys.executable, "-m", "factscope"]
    done = subprocess.run([*command, "trace", b"caf\xe9"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run(
        [*command, "edit", "--help"], capture_output=True, text=True, env=ascii_only
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("start", [["-m", "factscope"], ["-c", ENTRY_POINT]], ids=["-m", "script"])
def test_ctrl_c_during_imports(start: list[str], tmp_path: Path) -> None:
    """The first slow import, here cyclopts, is interrupted."""
    slow = "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"
    (tmp_path / "cyclopts.py").write_text(slow)
    process = subprocess.Popen(
        [sys.executable, *start, "models"], text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "factscope: interrupted\n")


def test_version(run) -> None:
    assert run("--version")[:2] == (0, f"{factscope.__version__}\n")


def test_every_flag_is_documented_and_means_one_thing() -> None:
    kinds: dict[str, list[set[str]]] = {}
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
                numbers = {int, float} & set(setting.types)
                other = "switch" if setting.switch else "number" if numbers else "text"
                kinds.setdefault(name, []).append(set(setting.choices or [other]))
    # Of one kind; of several choices, two commands may have different ones, but not only those.
    assert not {name: found for name, found in kinds.items() if not set.intersection(*found)}


def test_a_warning_is_printed_once() -> None:
    probe = (
        "import logging, sys\nfrom factscope.cli import app\n"
        "def warn(words):\n    for x in (1, 1, 2, 1): logging.warning('layer %d', x)\n"
        "app.run = warn\napp.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.stderr == "layer 1\nlayer 2\n"


def test_completion_expects_no_value_after_a_switch(run) -> None:
    """After `--json` a command is completed; after `--model` its value would be."""
    _, script, _ = run("completion", "bash")

    def completed(*words: str) -> set[str]:
        quoted = " ".join(f"'{word}'" for word in ("factscope", *words))
        lines = (script, f"COMP_WORDS=({quoted})", f"COMP_CWORD={len(words)}", "_factscope")
        shell = ["bash", "-c", "\n".join((*lines, 'echo "${COMPREPLY[@]}"'))]
        return set(subprocess.run(shell, capture_output=True, text=True, check=True).stdout.split())

    assert completed("--json", "mod") == {"models"}
    assert completed("edit", "--json", "sh") == {"show"}
    assert completed("study", "--json", "build", "--n") == {"--num-cases"}
    assert completed("completion", "--json", "ba") == {"bash"}
    assert completed("--model", "trace", "mod") == {"models"}
    assert "--no-check-model" in completed("trace", "--json", "--no-")
