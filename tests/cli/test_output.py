"""Helpers of the commands: output, exit codes and overwrite checks."""

import json
import re
from pathlib import Path

import pytest

from patchword.cli.labeled_data import load_labeled_images
from patchword.cli.model_args import model_title, read_labels
from patchword.cli.output import (
    EXIT_UNREADABLE,
    MAX_LISTED,
    print_json,
    print_notes,
    print_table,
    report_unreadable,
    require_new_files,
)
from patchword.errors import ConfigError, OutputError


def test_report_unreadable_lists_reasons_and_returns_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_unreadable([], 5) == 0
    assert capsys.readouterr() == ("", "")
    assert report_unreadable([("a.png", "Cannot read a.png: damaged")], 1234) == EXIT_UNREADABLE == 3
    out, error = capsys.readouterr()
    assert out == ""
    assert "a.png" in error
    assert "1 of 1,234" in error


def test_report_unreadable_lists_a_limited_number(capsys: pytest.CaptureFixture[str]) -> None:
    report_unreadable([(str(i), f"reason {i}") for i in range(MAX_LISTED + 7)], 1000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == MAX_LISTED + 2
    assert "7 more" in lines[-2]


def test_report_unreadable_escapes_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    report_unreadable([("x", "Cannot read \x1b[31mx")], 1)
    assert "\x1b" not in capsys.readouterr().err


def test_require_new_files(tmp_path: Path) -> None:
    existing = tmp_path / "a.csv"
    existing.touch()
    require_new_files(tmp_path / "b.csv", None, overwrite=False)
    require_new_files(existing, overwrite=True)
    with pytest.raises(OutputError) as error:
        require_new_files(tmp_path / "b.csv", existing, overwrite=False)
    assert error.value.code == "output_exists"
    assert str(existing) in str(error.value)


def test_json_goes_to_standard_output_and_notes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [1]})
    print_notes(["first", "second"])
    out, error = capsys.readouterr()
    assert json.loads(out) == {"a": [1]}
    assert error == "note: first\nnote: second\n"


def test_print_table_aligns_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([("engine", "ms"), ("torch", "12.5"), ("onnx-int8", "")])
    assert capsys.readouterr().out.splitlines() == ["engine       ms", "torch      12.5", "onnx-int8"]


@pytest.mark.parametrize(
    ("reference", "title"),
    [
        ("runs/photos", "photos"),
        ("runs/photos/model.safetensors", "photos"),
        ("vit/pytorch_model.bin", "vit"),
        ("ViT-B_16.npz", "ViT-B_16.npz"),
        ("hf:google/vit-base-patch16-224", "vit-base-patch16-224"),
        ("patchword:cifar10", "patchword:cifar10"),
    ],
)
def test_model_title(reference: str, title: str) -> None:
    assert model_title(reference) == title


@pytest.mark.parametrize(
    ("name", "text", "labels"),
    [
        ("labels.txt", "cat\n\n dog \n", ["cat", "dog"]),
        ("labels.txt", "\ufeffcat\ndog\n", ["cat", "dog"]),
        ("labels.json", '["cat", 7]', ["cat", "7"]),
        ("labels.txt", '["cat", "dog"]', ["cat", "dog"]),
    ],
)
def test_read_labels(name: str, text: str, labels: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_labels(tmp_path / name) == labels


@pytest.mark.parametrize(("name", "content"), [("a.json", b"[1"), ("a.json", b"{}"), ("a.txt", b"\xff\xfe\x00")])
def test_invalid_labels_name_the_flag_and_the_file(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"--labels: .*{re.escape(name)}"):
        read_labels(tmp_path / name)


def test_no_labeled_data_means_no_images() -> None:
    assert load_labeled_images(None, {}) == []
