"""Misspelt words of a question: a word that no passage holds is replaced by one that a passage
holds and that is one edit away (Damerau's distance of 1).
"""

import re
from collections.abc import Callable, Sequence
from string import ascii_lowercase

_WORD = re.compile(r"[^\W\d_]{4,}")


def spelled(
    question: str,
    is_common: Callable[[str], bool],
    holding: Callable[[Sequence[str]], Sequence[int]],
) -> str:
    """The question with misspelt words replaced.

    is_common: is a word one that no typing error makes, such as a token of the model? holding: how
    many passages hold each of these words, in lower case. Of several words one edit away the one
    that most passages hold is taken. The first letter stays: it is seldom wrong.
    """

    def corrected(found: re.Match[str]) -> str:
        word = found[0]
        lower = word.lower()
        if is_common(word) or holding([lower])[0]:
            return word
        others = one_edit_away(lower)
        counts = holding(others)
        most = max(counts)
        if not most:
            return word
        other = others[counts.index(most)]
        return other.capitalize() if word[0].isupper() else other

    return _WORD.sub(corrected, question)


def one_edit_away(word: str) -> list[str]:
    """Words with one letter exchanged for another, left out, added, or swapped with the next; none
    of them the first. Transpositions come first, as the commonest error.
    """
    letters = sorted({*ascii_lowercase, *word})
    splits = [(word[:at], word[at:]) for at in range(1, len(word) + 1)]
    swapped = [a + b[1] + b[0] + b[2:] for a, b in splits if len(b) > 1]
    others = [a + b[1:] for a, b in splits if b]
    others += [a + c + b[1:] for a, b in splits if b for c in letters]
    others += [a + c + b for a, b in splits for c in letters]
    return [one for one in dict.fromkeys(swapped + others) if one != word]
