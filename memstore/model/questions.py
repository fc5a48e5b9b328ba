"""Understand a message: the question in it, by which passages are searched, with its words spelt as
in the passages; and whether it asks for anything that a memory could hold.

The phrases below are English. A message that matches none of them is a question.
"""

import re
from collections.abc import Callable, Sequence
from string import ascii_lowercase

from memstore.model.cutting import Level, split

_MOST = 20_000  # characters of a message that are looked at; of a longer one, its two ends


def _any(phrases: str) -> str:
    """A pattern of any of these phrases, separated by commas, each itself a pattern."""
    found = (" ".join(phrase.split()) for phrase in phrases.split(","))
    return "(?:" + "|".join(sorted(filter(None, found), key=len, reverse=True)) + ")"


def _word(phrases: str) -> re.Pattern[str]:
    """A pattern that matches any of these phrases as whole words, anywhere."""
    return re.compile(rf"\b{_any(phrases)}\b", re.I)


# Around a question: code, quoted lines, a greeting

_QUOTED = re.compile(
    r"^[ \t]*(```|~~~)[^\n]*\n.*?(?:^[ \t]*\1[ \t]*$|\Z)|^[ \t]*>[^\n]*$", re.M | re.S
)
_GREETINGS = _any(
    "hi, hello, hey, hiya, howdy, greetings, good (?:morning|afternoon|evening|day), dear"
)
_GREETED = r"(?: [^\s,.!?:;]+){0,3}?"  # "Hi there", "Dear Ms. Miller" and the like
_GREETS = re.compile(rf"{_GREETINGS}{_GREETED}\s*(?:[,!.:–—-]+|\n|$)\s*", re.I)
_NAME = re.compile(r"[A-Z][\w-]*(?: [A-Z][\w-]*)?[.!]*")  # what is left of "Hi, Anna!"

# Nothing is asked: greetings, thanks, questions about the assistant

_ABOUT_ASSISTANT = re.compile(
    _any(r"""
    how(?:'s| is) it going, how are you(?: doing)?(?: today)?, what'?s up, who are you,
    what are you, who (?:made|built) you, what(?:'s| is) your name, what (?:can|do) you do,
    how do you work, are you (?:still |really )?(?:there|ready|real|awake|online), can you hear me,
    are you an? (?:ai|bot|robot|human|machine|person), do you speak \w+, is that ok(?:ay)?,
    (?:can|could) you (?:please )?help(?: me| us)?(?: out)?(?: with (?:this|that|something))?,
    (?:may|can) i ask (?:you )?(?:something|a question), do you have a (?:minute|moment|second)
    """),
    re.I,
)
_SMALL_TALK_WORDS = """
    a ah all am amazing an and answer are awesome back be been best better bot bye can care cheers
    cool correct day dear done enough enjoy evening everyone everybody excellent fine for friend
    funny get glad go good goodbye got great greetings guys haha happy have he hello help helped
    helpful helping helps here hey hi hiya hm hmm hope howdy i i'd i'll i'm i've idea interesting
    is it it's job just know later like lol lot love makes man mate me mind moment morning much my
    need never nice night no nope not now of oh ok okay on one perfect ping please pleased problem
    question quick quickly ready really right see seems sense so sorry sounds soon super sure take
    team test testing thank thanks that that's the then there think this thx to today tomorrow too
    try ty understand understood us very wait was we weekend welcome well wonderful work works
    worries wow yeah yep yes you you're your
"""
_SMALL_TALK = frozenset(_SMALL_TALK_WORDS.split())
_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*|\d+")

# Nothing is asked: changes of the answer before, invented texts, chat programs' own requests

_PLEASE = r"(?:(?:now|and|then|ok(?:ay)?,?|please|(?:can|could|would) you) )*"
_CHANGE = _any("""
    make, rewrite, rephrase, reword, paraphrase, shorten, expand, expand on, translate, reformat,
    put, turn, convert, repeat, say, simplify, summari[sz]e, condense, correct, fix, format,
    improve, polish, elaborate on, explain, write, give me, read, check, proofread
""")
_THE_ANSWER = _any(r"""
    that, this, it, the above,
    (?:the|your)(?: last| previous| first)? (?:answer|reply|response|message),
    (?:the|your) (?:last|previous) (?:one|part|sentence|paragraph)
""")
_FORM = _any(r"""
    (?:much |even |a bit |a little )*(?:short|long|simpl|clear|plain|brief|polit)er,
    (?:more |less |very )*(?:formal|casual|polite|concise|detailed|simple|short|plain|friendly),
    (?:in|into|to|as)(?: \w+)*? (?:english|german|french|spanish|italian|words|sentences?|bullets),
    (?:in|into|to|as)(?: \w+)*? (?:bullet ?points|table|list|lines?|paragraphs?|e?-?mail|markdown)
""")
_EDITS = re.compile(
    rf"{_PLEASE}(?:{_CHANGE} (?:to me )?{_THE_ANSWER}(?: (?:again|up|out|please|{_FORM}))*"
    rf"|{_FORM}|more|more details?|go on|continue|keep going|carry on|elaborate|try again|again"
    r"|repeat|once more|(?:once|one) more time|once again|start over)"
    r"(?:,? (?:please|again|now|instead))*[.!?…\s]*",
    re.I,
)
_CREATES = re.compile(
    rf"{_PLEASE}(?:write|compose|invent|make up|tell)(?: (?:me|us))? (?:a|an|another|some)"
    r"(?: \w+){0,2} (?:joke|poem|haiku|story|song|limerick|riddle)\b.*",
    re.I | re.S,
)
_CLIENT_TASK = re.compile(
    r"^\s*#{1,4} ?task:?\s|<chat_history>|<conversation>"
    r"|\b(?:title|name|headline|tags?|topics?|emoji)\b[^.\n]{0,80}"
    r"\b(?:this|the|our)(?: \w+)? (?:conversation|chat|dialog(?:ue)?|history)\b(?! course)"
    r"|\b(?:summari[sz]e|name|title|classify|label) (?:this|the|our)(?: \w+)?"
    r" (?:conversation|chat|dialog(?:ue)?|thread|messages)\b"
    r"|\b(?:suggest|generate|propose)\b[^.\n]{0,40}\bfollow[- ]?up (?:questions?|prompts?)\b",
    re.I,
)

# Something is asked

_REQUESTS = _any(r"""
    what, who, whom, whose, when, where, which, why, how, is, are, was, were, am, can, could, do,
    does, did, has, have, had, will, would, should, may, must,
    (?:in|at|for|to|from|of) (?:what|which|whom),
    tell, list, give, show, find, explain, describe, summari[sz]e, name, compare, define, look up,
    search, i wonder, i(?:'d| would)? (?:want|need|like) to (?:know|find|understand), i need
""")
_ASKS = re.compile(rf"(?:(?:and|but|so|also) )*+{_PLEASE}{_REQUESTS}\b", re.I)
_QUESTION_MARK = re.compile(r"[?\u037e\u061f\uff1f][\"'\u2019\u201d\u00bb)\]*_\s!?]*$")
_REFERS = _word("""
    it, its, they, them, their, he, she, him, his, her, hers, this, that, these, those, there, then,
    one, ones, the same
""")

# Follow-ups

_GOES_ON = re.compile(r"(?:(?:and|but|so|then|ok(?:ay)?)\b[ ,]*|(?:what|how) about )+", re.I)
_SENTENCE = _word("""
    what, who, whom, whose, when, where, which, why, how, is, are, was, were, do, does, did, has,
    have, had, can, could, will, would, should, may, must
""")
_PREPOSITION = _word("""
    of, in, on, at, for, to, from, by, with, since, until, before, after, per, during, under
""")
_CODE = re.compile(r"\b([A-Za-z]+)-?\d[\w-]*")
_CAPITAL = re.compile(r"(?<= )[A-Z][\w'’-]*")
_MOST_WORDS = 6  # of a follow-up without a sentence of its own
_FEW_WORDS = 4  # of a question that hardly stands alone


def asks(message: str) -> bool:
    """Whether a chat message asks for something that a memory could hold.

    False for greetings and thanks, for changes to the last answer ("make that shorter"), for
    invented texts ("tell me a joke"), and for what chat programs ask by themselves (a title for the
    conversation).
    """
    if _CLIENT_TASK.search(message[:_MOST]):
        return False
    text = _without_frame(message)
    if not text or _is_phatic(text) or (text != message.strip() and _NAME.fullmatch(text)):
        return False
    return not (_EDITS.fullmatch(text) or _CREATES.fullmatch(text))


def query_of(message: str) -> str:
    """The question in a message, by which passages are searched: without greeting, background and
    quoted lines; the whole message if no sentence of it is a question.

    Several questions are kept, in order. A question that refers to something ("how much is it?")
    keeps the sentence before it; an unfinished sentence after a question, which is how an answer
    begins ("The pass key is"), is kept too.
    """
    text = _without_frame(message)
    if not text:
        return message.strip()
    sentences = [(text[one.start : one.end], one.level) for one in split(text)]
    wanted = [
        at
        for at, (sentence, _) in enumerate(sentences)
        if _QUESTION_MARK.search(sentence) and not _is_phatic(sentence)
    ]
    if not wanted:
        wanted = [at for at, (sentence, _) in enumerate(sentences) if _ASKS.match(sentence)]
    if not wanted:
        return text
    kept = set(wanted)
    first, last = wanted[0], len(sentences) - 1
    if _REFERS.search(sentences[first][0]) and first > 0:
        kept.add(first - 1)
    ending, level = sentences[last]
    unfinished = ending[-1].isalnum() and level < Level.LINE and not _is_phatic(ending)
    if last - 1 in kept and unfinished:
        kept.add(last)
    return " ".join(_without_greeting(sentences[at][0]) for at in sorted(kept))


def resolved(question: str, before: str) -> str:
    """Complete a follow-up that asks the same of another thing ("And of the CP-60?"): the question
    before it, with the new name or code in place of a similar one. Other questions are returned
    unchanged. before: "" if there is none.
    """
    rest, body = _fragment(question), before.strip(" ?!.")
    if not (rest and (_CODE.search(question) or _CAPITAL.search(question))):
        return question
    new, start, end = _in_place(rest, body)
    return " ".join(f"{body[:start]} {new} {body[end:]}".split()) + "?" if new else question


def _in_place(rest: str, body: str) -> tuple[str, int, int]:
    """The new words of a follow-up, and the part of the question that they replace; "" if no words
    of it are similar.
    """
    first = rest.split()[0].lower()
    if _PREPOSITION.fullmatch(first):
        same = [one for one in _PREPOSITION.finditer(body) if one[0].lower() == first]
        if same:
            return rest, same[-1].start(), _phrase_end(body, same[-1].end())
    code = _CODE.search(rest)
    if code:
        like = [at for at in _CODE.finditer(body) if at[1].lower() == code[1].lower()]
        if like:
            return code[0], *like[-1].span()
    capitals = [*_CAPITAL.finditer(body)]
    if rest[0].isupper() and capitals:
        return rest, *capitals[-1].span()
    return "", 0, 0


def _phrase_end(body: str, start: int) -> int:
    """Where the words from `start` on end: before the next preposition or verb."""
    after = [pattern.search(body, start) for pattern in (_PREPOSITION, _SENTENCE)]
    return min([at.start() for at in after if at], default=len(body))


def leans(question: str) -> bool:
    """Whether a question needs the one before it: it refers to something ("How loud is it?"), is
    not a sentence ("And the planks?"), or is very short.
    """
    few = len(question.split()) <= _FEW_WORDS
    return few or bool(_REFERS.search(question) or _fragment(question))


def _fragment(question: str) -> str:
    """The new words of a follow-up that is not a sentence; "" of other questions."""
    found = _GOES_ON.match(question)
    rest = question[found.end() :].strip(" ?!.") if found else ""
    return "" if len(rest.split()) > _MOST_WORDS or _SENTENCE.search(rest) else rest


def _without_frame(message: str) -> str:
    """A message without code blocks, quoted lines and greeting."""
    if len(message) > _MOST:
        message = message[: _MOST // 2] + "\n\n" + message[-_MOST // 2 :]
    return _without_greeting(_QUOTED.sub("", message).strip() or message)


def _without_greeting(text: str) -> str:
    found = _GREETS.match(text)
    return text[found.end() :].strip() if found else text


def _is_phatic(text: str) -> bool:
    """Whether a message holds only greetings, thanks and questions about the assistant."""
    if len(text) > 200:
        return False
    rest = _ABOUT_ASSISTANT.sub(" ", text)
    words = _WORD.findall(rest)
    unknown = [word for word in words if word.lower().replace("’", "'") not in _SMALL_TALK]
    # "Thanks, Anna!", "I'm Tom.", but not "And Anna?"
    named = len(unknown) == 1 < len(words) and unknown[0][0].isupper() and words[0] != unknown[0]
    return not unknown or (named and words[0].lower() not in ("and", "but"))


# Misspelt words

_LONG_WORD = re.compile(r"[^\W\d_]{4,}")
_LONGEST = 40  # letters: of a pasted key or page, words one edit away would fill the main memory


def spelled(
    question: str,
    is_common: Callable[[str], bool],
    holding: Callable[[Sequence[str]], Sequence[int]],
) -> str:
    """Correct the misspelt words of a question. A word that no passage holds is replaced by a word
    one edit away (Damerau's distance of 1) that passages hold.

    is_common: whether no typing error makes a word, such as a token of the model. holding: how many
    passages hold each of these words, in lower case. Of several words one edit away, the one in
    most passages is taken. The first letter stays: it is rarely wrong.
    """

    def corrected(found: re.Match[str]) -> str:
        word = found[0]
        lower = word.lower()
        if len(word) > _LONGEST or is_common(word) or holding([lower])[0]:
            return word
        others = one_edit_away(lower)
        counts = holding(others)
        most = max(counts)
        if not most:
            return word
        other = others[counts.index(most)]
        return other.capitalize() if word[0].isupper() else other

    return _LONG_WORD.sub(corrected, question)


def one_edit_away(word: str) -> list[str]:
    """Words with one letter replaced, removed, added, or swapped with the next, never the first.
    The last one is not removed, because that often gives a stem. Swaps, as most common, come first.
    """
    letters = sorted({*ascii_lowercase, *word})
    splits = [(word[:at], word[at:]) for at in range(1, len(word) + 1)]
    swapped = [a + b[1] + b[0] + b[2:] for a, b in splits if len(b) > 1]
    others = [a + b[1:] for a, b in splits if len(b) > 1]
    others += [a + c + b[1:] for a, b in splits if b for c in letters]
    others += [a + c + b for a, b in splits for c in letters]
    return [one for one in dict.fromkeys(swapped + others) if one != word]
