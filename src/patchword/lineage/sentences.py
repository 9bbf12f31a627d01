"""Sentences of a small made-up text in English words, to pre-train and fine-tune BERT without a download.

Every sentence is about one of six topics: its content words are drawn from the topic's words, the others from those of
all topics. So a word says little by itself, but words of one topic occur together. Unlabeled sentences are enough to
learn that, and labels only have to name the groups, which is what pre-training and fine-tuning divide between them.
"""

from dataclasses import dataclass

import numpy as np

from .bert_fit import SPECIAL

TOPICS = {
    "kitchen": "oven pan kettle onion butter flour spoon soup recipe pepper dough plate sauce garlic knife",
    "sea": "wave ship harbor tide anchor sailor island whale sail coral captain reef storm deck gull",
    "music": "violin drum melody choir piano rhythm concert singer chord guitar tempo stage opera flute song",
    "forest": "oak fern moss owl squirrel trail root branch deer mushroom pine fox leaf badger stream",
    "school": "pupil desk chalk exam lesson pencil teacher essay library homework ruler class grade map term",
    "space": "planet comet orbit rocket galaxy telescope moon crater star satellite eclipse meteor probe sun launch",
}
COMMON = ("the", "a", "is", "near", "with", "and", "over", "under", "sees", "finds", "old", "small", "new", "big", "to")
CONTENT_WORDS, COMMON_WORDS = 5, 6  # of each sentence
OTHER_TOPIC = 0.15  # probability that a content word is drawn from all topics
WORDS = tuple(dict.fromkeys([*COMMON, *(word for words in TOPICS.values() for word in words.split())]))
INDEX = {word: index for index, word in enumerate(WORDS, start=len(SPECIAL))}
VOCAB_SIZE, MAX_LENGTH = len(SPECIAL) + len(WORDS), CONTENT_WORDS + COMMON_WORDS + 2  # with [CLS] and [SEP]


@dataclass(frozen=True)
class Sentences:
    """Sentences as token ids, and their topics as indices of TOPICS."""

    tokens: list[list[int]]
    topics: list[int]

    def per_topic(self, count: int) -> "Sentences":
        """Return the first `count` sentences of each topic."""
        rows = [[i for i, topic in enumerate(self.topics) if topic == each][:count] for each in range(len(TOPICS))]
        chosen = [i for each in rows for i in each]
        return Sentences([self.tokens[i] for i in chosen], [self.topics[i] for i in chosen])


def draw_sentences(count: int, seed: int) -> Sentences:
    """Draw random sentences; equal arguments give equal sentences."""
    rng, content = np.random.default_rng(seed), (count, CONTENT_WORDS)
    ids = np.array([[INDEX[word] for word in words.split()] for words in TOPICS.values()])  # (topics, 15)
    topics = rng.integers(len(ids), size=count)
    own = ids[topics[:, None], rng.integers(ids.shape[1], size=content)]
    words = np.where(rng.random(content) < OTHER_TOPIC, rng.choice(ids.flatten(), content), own)
    common = rng.choice([INDEX[word] for word in COMMON], (count, COMMON_WORDS))
    tokens = rng.permuted(np.concatenate([words, common], axis=1), axis=1)  # in a random order
    return Sentences(tokens.tolist(), topics.tolist())
