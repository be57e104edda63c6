"""Edit files: an edit survives saving bit-for-bit, and a bad file gives a clear error."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from factscope.editing.edit import FORMAT, Change, Dense, Edit, EditChecks, LowRank
from factscope.errors import BadEdit
from factscope.facts import Fact
from factscope.lm.model import LM

from edits import edit_of, some_edits
from families import tiny

FACTS = (
    Fact(subject="Zürich", prompt="{} liegt in", target="東京", id="1", relation="P17"),
    Fact(subject='A "quoted" one', prompt="Where is\n{}?"),
)
CHECKS = EditChecks(
    division_factor=0.1 + 0.2, update_norm=1e-3, perplexity_before=7.5, perplexity_after=math.pi
)
SETTINGS = {
    "layer": 5,
    "prefixes": ["a", ""],
    "weight_decay": 0.1 + 0.2,
    "none": None,
    "in": {"x": True},
}

Header = dict[str, str]
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def gpt2() -> LM:
    return tiny("gpt2")


@pytest.fixture(scope="module")
def edit(gpt2: LM) -> Edit:
    """Low rank and dense, a matrix and a bias, with facts, settings and checks."""
    first, second, third, _ = some_edits(gpt2)
    changes = {**second.changes, **third.changes, **first.changes}
    return edit_of(gpt2, changes, facts=FACTS, settings=SETTINGS, checks=CHECKS)


@pytest.fixture
def path(edit: Edit, tmp_path: Path) -> Path:
    path = tmp_path / "edit.safetensors"
    edit.save(path)
    return path


def assert_same_edit(found: Edit, wanted: Edit) -> None:
    for name in ("model", "fingerprint", "method", "facts", "settings", "checks"):
        assert getattr(found, name) == getattr(wanted, name)
    assert found.changed_weights == wanted.changed_weights
    for name, change in wanted.changes.items():
        other = found.changes[name]
        if isinstance(change, LowRank):
            assert isinstance(other, LowRank)
            pairs = [(other.A, change.A), (other.B, change.B)]
        else:
            assert isinstance(other, Dense)
            pairs = [(other.delta, change.delta)]
        for tensor, same in pairs:
            assert (tensor.dtype, tensor.device.type) == (torch.float32, "cpu")
            assert tensor.is_contiguous()
            assert torch.equal(tensor.view(torch.int32), same.contiguous().view(torch.int32))


def rewrite(path: Path, change: Callable[[Header, Tensors], Any]) -> None:
    """Write the file again with a changed header or changed tensors."""
    with safe_open(path, framework="pt") as file:
        header = dict(file.metadata())
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(header, tensors)
    save_file(tensors, path, metadata=header)


def assert_refused(path: Path, *words: str) -> None:
    """Loading fails with an error that names the file and has the words."""
    with pytest.raises(BadEdit) as refused:
        Edit.load(path)
    for word in (str(path), *words):
        assert word in str(refused.value)


# ---- saving and loading


def test_a_saved_edit_is_loaded_bit_for_bit(edit: Edit, path: Path, gpt2: LM) -> None:
    loaded = Edit.load(path)
    assert_same_edit(loaded, edit)
    with edit.applied(gpt2):
        wanted = {name: gpt2.model.get_parameter(name).clone() for name in edit.changes}
    with loaded.applied(gpt2):
        for name, weight in wanted.items():
            assert torch.equal(gpt2.model.get_parameter(name), weight)


def test_edits_of_every_family_are_saved_and_loaded(lm: LM, tmp_path: Path) -> None:
    for number, edit in enumerate(some_edits(lm)):
        edit.save(tmp_path / f"{number}")
        assert_same_edit(Edit.load(tmp_path / f"{number}"), edit)


def test_extreme_numbers_are_preserved(gpt2: LM, tmp_path: Path) -> None:
    odd = torch.tensor([[0.0, -0.0, 1e-45, -1e-38], [3.4e38, 1.2e-38, -3.4e38, 1.0]])
    changes: dict[str, Change] = {"a.weight": Dense(odd), "b.weight": LowRank(odd.T, odd / 1e39)}
    edit = edit_of(gpt2, changes)
    edit.save(tmp_path / "odd")
    assert_same_edit(Edit.load(tmp_path / "odd"), edit)


def test_views_and_shared_tensors_can_be_saved(gpt2: LM, tmp_path: Path) -> None:
    whole = torch.randn(6, 6)
    changes: dict[str, Change] = {
        "a.weight": Dense(whole.T),
        "b.weight": Dense(whole),
        "c.weight": LowRank(whole[:, :2], whole[2:4]),
        "d.weight": LowRank(whole.requires_grad_()[:, :2], whole[2:4]),
    }
    edit = edit_of(gpt2, {name: change.to("cpu") for name, change in changes.items()})
    edit.save(tmp_path / "views")
    assert_same_edit(Edit.load(tmp_path / "views"), edit)


def test_tuples_in_settings_are_loaded_as_lists(edit: Edit, tmp_path: Path) -> None:
    replace(edit, settings={"layers": (3, 4)}, checks=None).save(tmp_path / "edit")
    loaded = Edit.load(tmp_path / "edit")
    assert loaded.settings == {"layers": [3, 4]}
    assert loaded.checks is None


def test_sums_and_multiples_can_be_saved(gpt2: LM, edit: Edit, tmp_path: Path) -> None:
    first, second, *_ = some_edits(gpt2)
    total = (first + second) * 0.5
    total.save(tmp_path / "edit")
    assert_same_edit(Edit.load(tmp_path / "edit"), total)


def test_header_and_tensor_names(edit: Edit, path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
        names = sorted(file.keys())
    assert header["format"] == "factscope-edit 2"
    assert (header["model"], header["fingerprint"]) == (edit.model, edit.fingerprint)
    assert json.loads(header["facts"])[0]["subject"] == "Zürich"
    assert names == [
        "transformer.h.0.mlp.c_proj.weight#A",
        "transformer.h.0.mlp.c_proj.weight#B",
        "transformer.h.1.mlp.c_proj.bias#delta",
        "transformer.h.1.mlp.c_proj.weight#delta",
    ]


def test_a_loaded_edit_does_not_depend_on_its_file(edit: Edit, path: Path) -> None:
    loaded = Edit.load(path)
    path.write_bytes(b"")
    assert_same_edit(loaded, edit)


# ---- failures of writing


def test_a_file_that_is_not_an_edit_is_not_replaced(edit: Edit, path: Path, tmp_path: Path) -> None:
    notes, tensors, empty = (tmp_path / name for name in ("notes.txt", "other", "empty"))
    notes.write_text("my notes")
    save_file({"weight": torch.ones(2)}, tensors)
    empty.touch()
    for other in (notes, tensors):
        before = other.read_bytes()
        with pytest.raises(BadEdit, match=f"{other.name} exists and is not an edit.*--force"):
            edit.save(str(other))
        assert other.read_bytes() == before
    notes_edit = replace(edit, method="new")
    notes_edit.save(notes, force=True)
    for place in (notes, path, empty):
        notes_edit.save(place)
        assert Edit.load(str(place)).method == "new"


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(
    edit: Edit, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()

    def full(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(BadEdit, match="No space left"):
        edit.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_parent_folders_are_created(edit: Edit, tmp_path: Path) -> None:
    edit.save(tmp_path / "a" / "b" / "edit")
    assert_same_edit(Edit.load(str(tmp_path / "a" / "b" / "edit")), edit)


def test_a_path_that_cannot_be_written_is_refused(edit: Edit, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "edit", tmp_path):
        with pytest.raises(BadEdit, match="cannot be written"):
            edit.save(place)


def test_settings_must_be_plain_values(edit: Edit, tmp_path: Path) -> None:
    with pytest.raises(BadEdit, match="not plain values"):
        replace(edit, settings={"at": tmp_path}).save(tmp_path / "edit")
    assert list(tmp_path.iterdir()) == []


# ---- bad files


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path / "none", "there is no file", "Edit.save")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path, "cannot be read (it is a folder)")


def test_truncated_files_are_refused(path: Path) -> None:
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    lengths = {*range(0, 16), *range(16, len(data), len(data) // 40)}
    lengths |= {header - 1, header, header + 1, len(data) - 1}
    for length in sorted(lengths):
        path.write_bytes(data[:length])
        assert_refused(path, "cannot be read", "again")
    path.write_bytes(data + b"more")
    assert_refused(path, "cannot be read")


@pytest.mark.parametrize("data", [b"", b"GGUF", b"\xff" * 100, b"{}" * 50, bytes(64)])
def test_files_that_are_not_safetensors_are_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "edit"
    path.write_bytes(data)
    assert_refused(path)


@pytest.mark.parametrize(
    "header",
    [None, {"format": "pt"}, {"kind": "factscope second moment"}, {"format": FORMAT}],
    ids=str,
)
def test_other_safetensors_files_are_refused(header: Header | None, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "other", metadata=header)
    assert_refused(tmp_path / "other", "is not an edit", "Edit.save")


def test_a_newer_version_is_refused(path: Path) -> None:
    rewrite(path, lambda header, tensors: header.update(format=f"{FORMAT} 3"))
    assert_refused(path, "has format version 3", "up to 2", "update factscope")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_file_with_nan_or_infinity_is_refused(path: Path, bad: float) -> None:
    for key in ("transformer.h.0.mlp.c_proj.weight#A", "transformer.h.1.mlp.c_proj.bias#delta"):
        data = path.read_bytes()
        rewrite(path, lambda header, tensors, key=key: tensors[key].view(-1)[3].fill_(bad))
        assert_refused(path, f"the change of {key.partition('#')[0]} is NaN or infinite")
        path.write_bytes(data)


# ---- version 1


def as_version_1(header: Header, tensors: Tensors) -> None:
    """The header as version 1 had it: `health` for `checks`, and older names of settings."""
    header["format"] = f"{FORMAT} 1"
    header["health"] = header.pop("checks")
    header["settings"] = json.dumps({"search": {"rate": 0.5}})


def test_a_version_1_file_is_read(edit: Edit, path: Path) -> None:
    rewrite(path, as_version_1)
    assert_same_edit(Edit.load(path), replace(edit, settings={"search": {"rate": 0.5}}))


def test_a_version_1_file_without_checks_is_read(edit: Edit, path: Path) -> None:
    def unchecked(header: Header, tensors: Tensors) -> None:
        as_version_1(header, tensors)
        del header["health"]

    rewrite(path, unchecked)
    assert Edit.load(path).checks is None


@pytest.mark.parametrize("key", ["settings", "facts"])
def test_a_broken_version_1_file_is_refused(path: Path, key: str) -> None:
    def broken(header: Header, tensors: Tensors) -> None:
        as_version_1(header, tensors)
        del header[key]

    rewrite(path, broken)
    assert_refused(path, f"no '{key}' in its header")


@pytest.mark.parametrize("key", ["model", "fingerprint", "method", "facts", "settings"])
def test_a_missing_header_key_is_refused(path: Path, key: str) -> None:
    rewrite(path, lambda header, tensors: header.pop(key))
    assert_refused(path, f"no '{key}' in its header")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("facts", "[{"),
        ("facts", "7"),
        ("facts", '[{"subject": "a", "prompt": "no place"}]'),
        ("facts", '[{"subject": "a", "prompt": "{}", "colour": "red"}]'),
        ("facts", '[{"subject": 5, "prompt": "{}"}]'),
        ("settings", "3"),
        ("checks", "{}"),
        ("checks", "null "),
    ],
)
def test_an_invalid_header_value_is_refused(path: Path, key: str, value: str) -> None:
    rewrite(path, lambda header, tensors: header.update({key: value}))
    assert_refused(path, "cannot be read")


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ({"w#A": torch.ones(1, 3)}, "parts ['A']"),
        ({"w#A": torch.ones(1, 3), "w#B": torch.ones(2, 2)}, "(2, 2) and (1, 3)"),
        ({"w#A": torch.ones(3), "w#B": torch.ones(2, 3)}, "(2, 3) and (3,)"),
        ({"w#A": torch.ones(1, 3), "w#delta": torch.ones(2, 3)}, "parts ['A', 'delta']"),
        ({"w": torch.ones(2, 3)}, "parts ['w']"),
        ({"w#delta": torch.ones(2, 3).half()}, "not float32"),
        ({"w#delta": torch.ones(2, 3).int()}, "not float32"),
    ],
)
def test_inconsistent_tensors_are_refused(path: Path, tensors: Tensors, word: str) -> None:
    def other(header: Header, old: Tensors) -> None:
        old.clear()
        old.update(tensors)

    rewrite(path, other)
    assert_refused(path, word)
