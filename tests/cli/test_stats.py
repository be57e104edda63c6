"""factscope stats: collect, merge and show second moments."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from factscope.errors import BadSetting
from factscope.io import locked
from factscope.report.training import convergence_figure
from factscope.stats import covariance
from factscope.stats.second_moment import (
    cached_path,
    find_second_moment,
    load_second_moment,
    save_second_moment,
)
from second_moments import relative_difference, second_moment

from commands import Result, Run, runner, saved_model
from tokenizers_ import TEXT


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FACTSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_figure_has_a_line_for_each_layer() -> None:
    points = [(1000 * 2**i, 0.5 / 2 ** (i / 2)) for i in range(8)]
    fig = convergence_figure({5: points, 6: points, 7: ()}, "a $model$")
    ax = fig.axes[0]
    assert [line.get_label() for line in ax.lines] == ["layer 5", "layer 6"]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    with pytest.raises(BadSetting, match="too short"):
        convergence_figure({5: ()}, "m")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny GPT-2."""
    return saved_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def stats(
    model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:  # fmt: skip
    """`factscope stats` in an empty folder with a text, on the tiny model where it takes one."""
    factscope = runner(tmp_path, cache, monkeypatch, capsys)
    (tmp_path / "t.txt").write_text(TEXT.replace(".\n", ".\n\n"))

    def run(*words: object) -> Result:
        plain = words and words[0] in ("merge", "show", "--help")
        more = () if plain else ("--model", model, "--device", "cpu", "--seq-length", 16)
        return factscope("stats", *words, *more)

    return run


def test_stats_go_to_the_cache(stats: Run, model: Path, cache: Path) -> None:
    from factscope.lm.load import load

    result = stats("--layers", 1, "--text", "t.txt", "--tokens", 400)
    assert result.code == 0, result.err
    found = find_second_moment(load(model, device="cpu"), 1)
    assert found is not None
    assert found.tokens == 400
    assert found.corpus.startswith("t.txt (sha256 ")
    assert "sequences of 16 tokens, seed 0" in found.corpus
    path = cached_path(load(model, device="cpu"), 1)
    assert str(path) in result.out
    assert "400 tokens, split-half difference 0." in result.out
    assert "% of its norm; more tokens and more varied text lower this" in result.out
    assert "the model generated" not in result.out
    assert "are few for keys of 128 dimensions" in result.err
    assert [file.name for file in path.parent.iterdir()] == ["layer-01.safetensors"]


def test_stats_of_several_layers_as_json(stats: Run, tmp_path: Path) -> None:
    result = stats(
        "-l", "0-1", "-l", 2, "--text", "t.txt", "--tokens", 320, "-o", "here", "--json",
        "--half-precision", "--figure", "c.png", "--batch-size", 4,
    )  # fmt: skip
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert [row["layer"] for row in told] == [0, 1, 2]
    assert [Path(row["file"]).name for row in told] == [f"layer-0{i}.safetensors" for i in range(3)]
    assert {row["tokens"] for row in told} == {320}
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    size = (tmp_path / "here" / "layer-00.safetensors").stat().st_size
    assert size < 128 * 128 * 4 * 0.27 + 1500
    shown = stats("show", *sorted((tmp_path / "here").iterdir()))
    assert shown.code == 0
    assert shown.out.count("128 wide") == 3


def test_shards_on_the_command_line(stats: Run, tmp_path: Path) -> None:
    flags = ("--layers", 1, "--text", "t.txt", "--tokens", 640)
    for i in (1, 2, 3):
        result = stats(*flags, "--shard", f"{i}/3", "-o", "parts")
        assert result.code == 0, result.err
        assert "factscope stats merge" in result.out
    assert stats("collect", *flags, "-o", "whole.safetensors").code == 0
    parts = sorted((tmp_path / "parts").iterdir())
    assert [part.name for part in parts] == [
        f"layer-01-shard-{i}-of-3.safetensors" for i in (1, 2, 3)
    ]
    result = stats("merge", *parts, "-o", "merged.safetensors")
    assert result.code == 0, result.err
    merged = load_second_moment(tmp_path / "merged.safetensors")
    whole = load_second_moment(tmp_path / "whole.safetensors")
    assert merged.tokens == whole.tokens == 640
    assert relative_difference(merged.matrix, whole.matrix) < 1e-6


def test_without_a_text_the_built_in_one_is_used(stats: Run, tmp_path: Path) -> None:
    result = stats("--layers", 1, "--tokens", 64, "-o", "w.safetensors", "--json")
    assert result.code == 0, result.err
    assert "the text is the built-in text" in result.err
    [row] = json.loads(result.out)
    assert row["corpus"].startswith("public_domain.txt.gz (sha256 ")
    assert (row["tokens"], row["generated"]) == (64, False)


def test_the_model_generates_a_text_if_told_to(stats: Run, tmp_path: Path) -> None:
    words = ("--layers", 1, "--tokens", 64, "--seed", 7, "-o", "w.safetensors", "--generated")
    result = stats(*words, "--json")
    assert result.code == 0, result.err
    refused = stats(*words, "--text", tmp_path / "text.txt")
    assert (refused.code, "give one of --text, --hf-dataset and" in refused.err) == (2, True)
    [row] = json.loads(result.out)
    assert row["corpus"].startswith("text generated by ")
    assert row["corpus"].endswith(", sequences of 16 tokens, seed 7")
    assert row["generated"] is True
    shown = stats("show", "w.safetensors")
    assert "% of its norm; more tokens and more varied text lower this" in shown.out
    assert "the model generated this text, which is less varied than human text" in shown.out


def test_without_a_text_wikipedia_is_used_if_it_is_there(
    stats: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "text").mkdir(parents=True)
    (tmp_path / "data" / "text" / "wikipedia.txt").write_text(TEXT)
    monkeypatch.setenv("FACTSCOPE_DATA", str(tmp_path / "data"))
    result = stats("--layers", 1, "--tokens", 64, "-o", "w.safetensors", "--json")
    assert result.code == 0, result.err
    assert "data/text/wikipedia.txt" in result.err
    [row] = json.loads(result.out)
    assert row["corpus"].startswith("wikipedia.txt (sha256 ")
    assert row["generated"] is False


def test_the_help_shows_flags_and_commands(stats: Run) -> None:
    for words in (("--help",), ("collect", "--help"), ()):
        result = stats(*words) if words else stats("--help")
        assert result.code == 0
        assert "--layers" in result.out
    result = stats("--help")
    for word in ("merge", "show", "--convergence", "--shard", "--text"):
        assert word in result.out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--layers", 9), ("layers is [9]", "layers 0 to 2")),
        (("--layers", "x"), ("--layers is 'x'",)),
        (("--layers", "3-1"), ("write 1-3",)),
        (("--layers", 1, "--text", "no.txt"), ("--text is 'no.txt'",)),
        (("--layers", 1, "--hf-dataset", "a", "--text", "t.txt"), ("give one of",)),
        (("--layers", 1, "--shard", "5/4"), ("'5/4'",)),
        (("--layers", 1, "--out", "m.npz"), ("'m.npz'", ".safetensors")),
        (("--layers", "1-2", "--out", "m.safetensors"), ("give a folder",)),
        (("--layers", 1, "--figure", "f.gif"), ("'f.gif'", ".png")),
        (
            ("--layers", 1, "--text", "binary", "--out", "new"),
            ("binary is not UTF-8 text: line 1",),
        ),
    ],
)
def test_mistakes_are_one_message(
    stats: Run, flags: tuple[object, ...], words: tuple[str, ...]
) -> None:
    Path("binary").write_bytes(bytes(range(256)))
    result = stats(*flags)
    assert (result.code, result.out) == (2, "")
    assert not Path("new").exists()
    assert result.err.count("factscope:") == 1
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err


def test_mistakes_with_files(stats: Run, tmp_path: Path) -> None:
    for words in (("merge", "t.txt", "-o", "x.safetensors"), ("show", "t.txt")):
        result = stats(*words)
        assert result.code == 2
        assert "cannot read" in result.err
    save_second_moment(second_moment(), tmp_path / "a.safetensors")
    result = stats("merge", "a.safetensors", "a.safetensors", "-o", "b.safetensors")
    assert result.code == 2
    assert "given twice" in result.err


def test_a_missing_layer_is_a_usage_error(stats: Run) -> None:
    result = stats("--tokens", 5)
    assert result.code == 2
    assert "--layers" in result.err


def test_a_killed_collection_resumes(stats: Run, model: Path, tmp_path: Path) -> None:
    flags = ("--layers", 1, "--text", "t.txt", "--tokens", 1500, "--batch-size", 1)
    assert stats(*flags, "-o", "whole.safetensors").code == 0
    probe = (
        "import sys, time\n"
        "from factscope.stats import covariance\n"
        "save = covariance._PartialFile.save_if_due\n"
        "def slow(self, sums):\n"
        "    self.due = 0\n"
        "    save(self, sums)\n"
        "    time.sleep(0.05)\n"
        "covariance._PartialFile.save_if_due = slow\n"
        "from factscope.cli.app import main\n"
        "main()\n"
    )
    words = [*flags, "-o", "killed.safetensors", "--model", model, "--device", "cpu"]
    command = [sys.executable, "-c", probe, "stats", *map(str, [*words, "--seq-length", 16])]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=tmp_path)
    partial = tmp_path / "killed.safetensors.partial"
    for _ in range(6000):
        if partial.is_file() or process.poll() is not None:
            break
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert partial.is_file()
    assert not (tmp_path / "killed.safetensors").exists()
    refused = stats(*flags[:4], "--tokens", 1400, "--batch-size", 1, "-o", "killed.safetensors")
    assert refused.code == 2
    assert "other settings" in refused.err
    assert stats(*flags, "-o", "killed.safetensors").code == 0
    assert not partial.exists()
    killed, whole = (load_second_moment(tmp_path / f"{x}.safetensors") for x in ("killed", "whole"))
    assert torch.equal(killed.matrix, whole.matrix)
    assert killed.convergence_history == whole.convergence_history


def test_finished_statistics_are_found(
    stats: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers: list[list[int]] = []
    collect = covariance.collect

    def watched(lm: Any, chosen: Any, *args: Any, **more: Any) -> Any:
        layers.append(list(chosen))
        return collect(lm, chosen, *args, **more)

    monkeypatch.setattr(covariance, "collect", watched)
    flags = ("--text", "t.txt", "--tokens", 10_000_000, "--json")  # more than the text has
    first = stats("--layers", 1, *flags)
    assert first.code == 0, first.err
    again = stats("--layers", 1, *flags)
    assert again.out == first.out
    assert "layer-01.safetensors has these statistics; delete it" in again.err
    more = stats("--layers", "1,2", *flags)
    assert [row["layer"] for row in json.loads(more.out)] == [1, 2]
    assert layers == [[1], [2]]
    assert "replaced" not in first.err + again.err + more.err
    other = stats("--layers", 1, *flags, "--seed", 5)
    assert other.code == 0
    assert "layer-01.safetensors is of other settings or of an earlier version; it" in other.err
    assert layers == [[1], [2], [1]]
    # Earlier versions did not write the settings of the collection.
    path = Path(json.loads(other.out)[0]["file"])
    save_second_moment(replace(load_second_moment(path), request=""), path)
    old = stats("--layers", 1, *flags, "--seed", 5)
    assert "or of an earlier version; it will be replaced" in old.err
    assert old.out == other.out


def test_only_a_statistics_file_is_replaced(stats: Run, tmp_path: Path) -> None:
    weights, empty = tmp_path / "model.safetensors", tmp_path / "c.safetensors"
    save_file({"weight": torch.ones(2)}, weights)
    before = weights.read_bytes()
    flags = ("--layers", 1, "--text", "t.txt", "--tokens", 64)
    empty.touch()
    assert stats(*flags, "-o", empty).code == 0
    for words in ((*flags, "--out", weights), ("merge", empty, "-o", weights)):
        refused = stats(*words)
        assert (refused.code, refused.out) == (2, "")
        assert "model.safetensors', which exists and is not a statistics file" in refused.err
    assert weights.read_bytes() == before
    assert stats("merge", empty, "-o", empty).code == 0


def test_ctrl_c_says_whether_the_collection_resumes(
    stats: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--layers", 1, "--text", "t.txt", "--tokens", 640, "--batch-size", 4, "-o", "here")
    whole = stats(*flags[:-1], "whole", "--json")
    batches, allowed = covariance.length_batches, iter([0, 2, 1000])

    def interrupted(*args: Any) -> Iterator[Any]:
        yield from islice(batches(*args), count := next(allowed))
        if count < 1000:
            raise KeyboardInterrupt

    monkeypatch.setattr(covariance, "length_batches", interrupted)
    stopped = stats(*flags)
    assert stopped.code == 130
    assert stopped.err.endswith("factscope: interrupted; the same command starts again\n")
    stopped = stats(*flags)
    assert stopped.code == 130
    assert stopped.err.endswith("factscope: interrupted; the same command resumes\n")
    resumed = stats(*flags, "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.out == whole.out.replace("whole", "here")
    assert contents(tmp_path / "here") == ["layer-01.safetensors"]


def test_a_collection_waits_for_another_one_into_the_same_file(
    stats: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--layers", 1, "--text", "t.txt", "--tokens", 64, "-o", "here")
    with ExitStack() as other_process:
        other_process.enter_context(locked(tmp_path / "here", "layer-01.safetensors"))
        waits = []

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                other_process.close()

        monkeypatch.setattr("time.sleep", sleep)
        other = stats("--layers", 2, *flags[2:])  # another layer, at the same time
        assert other.code == 0, other.err
        assert not waits
        waited = stats(*flags)
    assert waited.code == 0
    assert len(waits) == 3
    assert waited.err.count("here/layer-01.safetensors is in use by process") == 1
    assert "Waiting until it ends" in waited.err
    assert contents(tmp_path / "here") == ["layer-01.safetensors", "layer-02.safetensors"]


def test_a_full_disk_is_one_message_and_leaves_no_file(
    stats: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    result = stats("--layers", 1, "--text", "t.txt", "--tokens", 64, "-o", "here")
    assert result.code == 1
    assert "here/layer-01.safetensors (No space left on device); free some space" in result.err
    assert "Traceback" not in result.err
    assert contents(tmp_path / "here") == []


def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_folder(
    stats: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FACTSCOPE_CACHE", "/proc/cache")
    result = stats("--layers", 1, "--text", "t.txt", "--tokens", 64)
    assert result.code == 0, result.err
    assert "factscope-cache-" in result.out


def contents(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
