"""The tasks: Korean numerals against known readings, held-out test sets, vocabularies, CMUdict from its package."""

import datetime
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from patchword.errors import ConfigError
from patchword.lineage.cmudict import read_cmudict
from patchword.lineage.tasks import english_words, korean_syllables, make_task
from patchword.lineage.vocabulary import EOS, PAD, Vocabulary


@pytest.mark.parametrize(
    ("number", "english", "korean"),
    [
        (7, "seven", "칠"),
        (10, "ten", "십"),
        (11, "eleven", "십일"),
        (21, "twenty one", "이십일"),
        (105, "one hundred five", "백오"),
        (1_000, "one thousand", "천"),
        (10_000, "ten thousand", "만"),
        (11_000, "eleven thousand", "만천"),
        (21_000, "twenty one thousand", "이만천"),
        (110_000, "one hundred ten thousand", "십일만"),
        (342_567, "three hundred forty two thousand five hundred sixty seven", "삼십사만이천오백육십칠"),
        (1_000_000, "one million", "백만"),
        (10_010_000, "ten million ten thousand", "천일만"),
        (100_000_000, "one hundred million", "일억"),
        (100_010_000, "one hundred million ten thousand", "일억일만"),
        (987_654_321, "nine hundred eighty seven million six hundred fifty four thousand three hundred twenty one",
         "구억팔천칠백육십오만사천삼백이십일"),
    ],
)  # fmt: skip
def test_numerals(number: int, english: str, korean: str) -> None:
    assert " ".join(english_words(number)) == english
    assert "".join(korean_syllables(number)) == korean


@pytest.mark.parametrize("name", ["reverse", "sort", "numerals", "dates"])
def test_test_set_is_held_out(name: str) -> None:
    task = make_task(name, 1, 2)  # so short that random strings often repeat
    held_out = {source for source, _ in task.test}
    drawn = task.draw(np.random.default_rng(0), 500)
    assert len(drawn) == 500
    assert not held_out & {source for source, _ in drawn}


def test_draws_depend_on_the_seed_only() -> None:
    task = make_task("numerals")
    assert task.draw(np.random.default_rng([1, 2]), 20) == task.draw(np.random.default_rng([1, 2]), 20)
    assert task.draw(np.random.default_rng([1, 2]), 20) != task.draw(np.random.default_rng([1, 3]), 20)


def test_dates_change_the_order_of_their_parts() -> None:
    pairs = dict(make_task("dates").test)
    assert len(pairs) == 1000
    for source, target in pairs.items():
        day = "".join(source[2:-4])
        parsed = datetime.datetime.strptime(" ".join([*source[:2], day, "".join(source[-4:])]), "%A %B %d %Y")
        weekday = "월화수목금토일"[parsed.weekday()]
        assert "".join(target) == f"{parsed.year}년{parsed.month}월{parsed.day}일{weekday}요일"


@pytest.mark.parametrize(("name", "change"), [("reverse", lambda s: s[::-1]), ("sort", lambda s: tuple(sorted(s)))])
def test_letters(name: str, change: object) -> None:
    task = make_task(name, 4, 6)
    lengths = [len(source) for source, _ in task.test]
    assert {lengths.count(n) for n in (4, 5, 6)} == {50}
    assert set(lengths) == {4, 5, 6}
    assert all(target == change(source) for source, target in task.test)  # type: ignore[operator]


def test_vocabulary_round_trip() -> None:
    vocabulary = Vocabulary("abc")
    rows, lengths = vocabulary.encode(["abc", "b"])
    assert rows.tolist() == [[3, 4, 5, EOS], [4, EOS, PAD, PAD]]
    assert lengths.tolist() == [4, 2]
    assert [vocabulary.decode(row) for row in rows.tolist()] == [("a", "b", "c"), ("b",)]
    assert vocabulary.decode([3, 4]) == ("a", "b"), "a sequence without an end is not cut"


def test_cmudict_archive(tmp_path: Path) -> None:
    """Words of letters only, the first pronunciation, without stress."""
    script = (
        b'/** @type */\nexport const dictionary = {\n  "\'bout": "B AW1 T",\n  "a": "AH0",\n  "cat": "K AE1 T",\n'
        b'  "cat(2)": "K AA1 T",\n  "u.s.": "Y UW1 EH1 S",\n  "thumb": "TH AH1 M"\n}\n'
    )
    with tarfile.open(tmp_path / "words.tgz", "w:gz") as tar:
        info = tarfile.TarInfo("package/index.js")
        info.size = len(script)
        tar.addfile(info, io.BytesIO(script))
    assert read_cmudict(tmp_path / "words.tgz") == {"cat": ["K", "AE", "T"], "thumb": ["TH", "AH", "M"]}


def test_unknown_task_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"translate.*reverse"):
        make_task("translate")
