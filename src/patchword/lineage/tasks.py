"""Sequence-to-sequence tasks, small enough for a minute on a laptop: each turns one sequence of tokens into another.

`reverse` and `sort` work on letters: the one is impossible without order, the other needs none. `numerals` reads
English number words and writes Korean numerals, which have groups of four digits instead of three: "hundred" becomes 십
(ten) if "thousand" follows. `dates` reads English dates and writes Korean ones, whose parts have another order. All
four are generated. `spelling` is real: English words, letter by letter, to their sounds (CMUdict).
"""

import calendar
import datetime
import functools
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..data.keyed_rng import permutation
from ..errors import ConfigError
from .cmudict import load_cmudict
from .vocabulary import Vocabulary

Pair = tuple[tuple[str, ...], tuple[str, ...]]  # the tokens of a source and of its target


@dataclass(frozen=True)
class Task:
    """A task: its vocabularies, and where pairs come from.

    Attributes:
        source: The vocabulary of the sources.
        target: The vocabulary of the targets.
        draw: Returns n random training pairs. Those of the test set are never among them.
        test: The test set.
    """

    source: Vocabulary
    target: Vocabulary
    draw: Callable[[np.random.Generator, int], list[Pair]]
    test: tuple[Pair, ...]


LETTERS = tuple(string.ascii_lowercase)
TESTS_PER_LENGTH = 50
TEST_SEED = 20201022  # of every generated test set; must never change, because reported accuracies depend on it


def letters_task(change: Callable[[Sequence[str]], Sequence[str]], min_length: int, max_length: int) -> Task:
    """A task on strings of random letters, with equally many test strings of each length."""

    def pair(rng: np.random.Generator, length: int) -> Pair:
        source = tuple(LETTERS[i] for i in rng.integers(len(LETTERS), size=length))
        return source, tuple(change(source))

    test_rng = np.random.default_rng(TEST_SEED)
    test = tuple(pair(test_rng, n) for n in range(min_length, max_length + 1) for _ in range(TESTS_PER_LENGTH))
    held_out = {source for source, _ in test}

    def draw(rng: np.random.Generator, n: int) -> list[Pair]:
        pairs = [pair(rng, length) for length in rng.integers(min_length, max_length + 1, size=n)]
        return [each if each[0] not in held_out else draw(rng, 1)[0] for each in pairs]

    vocabulary = Vocabulary(LETTERS)
    return Task(vocabulary, vocabulary, draw, test)


ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
KOREAN_DIGITS, KOREAN_UNITS, KOREAN_GROUPS = "일이삼사오육칠팔구", ("", "십", "백", "천"), ("", "만", "억")


def english_words(number: int) -> list[str]:
    """The words of a number in English, by groups of three digits: 21_000 is twenty one thousand."""
    for unit, name in ((10**6, "million"), (1000, "thousand"), (100, "hundred")):
        if number >= unit:
            rest = number % unit
            return [*english_words(number // unit), name, *(english_words(rest) if rest else [])]
    if number < 20:
        return [ONES[number]]
    return [TENS[number // 10 - 2], *([ONES[number % 10]] if number % 10 else [])]


def korean_syllables(number: int) -> list[str]:
    """The syllables of a positive number in Korean, by groups of four digits: 21_000 is 이만천.

    One (일) is not written before 십, 백 and 천, nor before 만 at the start.
    """
    syllables: list[str] = []
    for group in (2, 1, 0):
        digits = number // 10 ** (4 * group) % 10**4
        if digits == 0:
            continue
        if digits == 1 and group == 1 and not syllables:
            syllables.append("만")
            continue
        for place in (3, 2, 1, 0):
            if digit := digits // 10**place % 10:
                syllables += [] if digit == 1 and place else [KOREAN_DIGITS[digit - 1]]
                syllables += [KOREAN_UNITS[place]] if place else []
        syllables += [KOREAN_GROUPS[group]] if group else []
    return syllables


def numerals_task() -> Task:
    """English number words to Korean numerals; numbers below 10^9, with equally many of each number of digits."""

    def numbers(rng: np.random.Generator, n: int) -> list[int]:
        digits = rng.integers(1, 10, size=n)
        return [int(rng.integers(10 ** (d - 1), 10**d)) for d in digits]

    # Short numbers are few, so they are in the training set only.
    held_out = {n for n in numbers(np.random.default_rng(TEST_SEED), 1500) if n >= 10**4}

    def pair(number: int) -> Pair:
        return tuple(english_words(number)), tuple(korean_syllables(number))

    def draw(rng: np.random.Generator, n: int) -> list[Pair]:
        return [pair(number) if number not in held_out else draw(rng, 1)[0] for number in numbers(rng, n)]

    test = tuple(pair(number) for number in sorted(held_out))
    words = Vocabulary([*ONES[1:], *TENS, "hundred", "thousand", "million"])
    return Task(words, Vocabulary([*KOREAN_DIGITS, *KOREAN_UNITS[1:], *KOREAN_GROUPS[1:]]), draw, test)


SPELLING_TESTS, DATE_TESTS = 2000, 1000


MONTHS = tuple(calendar.month_name)[1:]
WEEKDAYS = tuple(calendar.day_name)
KOREAN_WEEKDAYS = tuple(f"{day}요일" for day in "월화수목금토일")
FIRST_DAY, LAST_DAY = datetime.date(1800, 1, 1).toordinal(), datetime.date(2200, 1, 1).toordinal()


def dates_task() -> Task:
    """English dates to Korean: Thursday, March 5, 1987 is 1987년 3월 5일 목요일. Digits are tokens."""

    def pair(day: int) -> Pair:
        date = datetime.date.fromordinal(day)
        weekday, month = date.weekday(), date.month
        korean = (*str(date.year), "년", *str(month), "월", *str(date.day), "일", KOREAN_WEEKDAYS[weekday])
        return (WEEKDAYS[weekday], MONTHS[month - 1], *str(date.day), *str(date.year)), korean

    order = FIRST_DAY + permutation(TEST_SEED, 0, LAST_DAY - FIRST_DAY)

    def draw(rng: np.random.Generator, n: int) -> list[Pair]:
        return [pair(int(order[i])) for i in rng.integers(DATE_TESTS, len(order), size=n)]

    digits = string.digits
    source, target = Vocabulary([*WEEKDAYS, *MONTHS, *digits]), Vocabulary([*digits, *"년월일", *KOREAN_WEEKDAYS])
    return Task(source, target, draw, tuple(pair(int(day)) for day in order[:DATE_TESTS]))


def spelling_task() -> Task:
    """English words in letters to their sounds."""
    pairs = [(tuple(word), tuple(sounds)) for word, sounds in sorted(load_cmudict().items())]
    order = permutation(TEST_SEED, 0, len(pairs))
    test, train = (tuple(pairs[i] for i in part) for part in (order[:SPELLING_TESTS], order[SPELLING_TESTS:]))

    def draw(rng: np.random.Generator, n: int) -> list[Pair]:
        return [train[i] for i in rng.integers(len(train), size=n)]

    return Task(Vocabulary(LETTERS), Vocabulary(sorted({sound for _, sounds in pairs for sound in sounds})), draw, test)


@functools.cache
def make_task(name: str, min_length: int = 4, max_length: int = 24) -> Task:
    """Makes a task by name: "reverse" or "sort", of strings with these lengths, "numerals", "dates" or "spelling".

    Raises:
        ConfigError: There is no such task.
        DownloadError: The words of "spelling" are not in the cache directory and cannot be downloaded.
    """
    if name == "reverse":
        return letters_task(lambda letters: letters[::-1], min_length, max_length)
    if name == "sort":
        return letters_task(sorted, min_length, max_length)
    if name == "numerals":
        return numerals_task()
    if name == "dates":
        return dates_task()
    if name == "spelling":
        return spelling_task()
    raise ConfigError(f"There is no task {name!r}. There are reverse, sort, numerals, dates and spelling.")
