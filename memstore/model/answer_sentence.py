"""The sentence of a passage that holds an answer."""

from collections import Counter

from memstore.index.word_index import split_words
from memstore.model.sentences import split


def answer_sentence(passage: str, question: str, answer: str = "") -> str:
    """The sentence of a passage that shares most words with an answer, or else with its question.

    A word counts as much as it is rare in the passage, and a word of the answer counts twice.
    Headings are no sentences. The earliest of equal sentences is returned; the stripped passage if
    it has no sentence.
    """
    units = [unit for unit in split(passage) if not unit.heading]
    sentences = [passage[unit.start : unit.end] for unit in units]
    if not sentences:
        return passage.strip()
    words = [set(split_words(sentence)) for sentence in sentences]
    frequency = Counter(word for own in words for word in own)
    wanted = Counter(dict.fromkeys(split_words(question), 1))
    wanted.update(dict.fromkeys(split_words(answer), 2))

    def score(own: set[int]) -> float:
        return sum(wanted[word] / frequency[word] for word in own if word in wanted)

    return sentences[max(range(len(sentences)), key=lambda at: score(words[at]))]
