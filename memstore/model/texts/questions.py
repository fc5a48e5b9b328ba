"""What a message asks: the question in it, by which passages are searched, and whether it asks for
anything that a memory could hold.

The phrases below are English, German and French. A message that none of them matches is a question.
"""

import re

from memstore.model.texts.sentences import Level, split

_MOST = 20_000  # characters of a message that are looked at; of a longer one, its two ends


def _any(phrases: str) -> str:
    """A pattern of any of these phrases, separated by commas, each itself a pattern."""
    found = (" ".join(phrase.split()) for phrase in phrases.split(","))
    return "(?:" + "|".join(sorted(filter(None, found), key=len, reverse=True)) + ")"


# Around a question: code, quoted mail, greeting, signature

_CODE_BLOCK = re.compile(r"^[ \t]*(```|~~~)[^\n]*\n.*?(?:^[ \t]*\1[ \t]*$|\Z)", re.M | re.S)
_QUOTED_LINE = re.compile(r"^[ \t]*>[^\n]*$", re.M)
_HEADERS = _any(
    "from, to, cc, sent, date, subject, von, an, gesendet, datum, betreff, de, à, objet"
)
_MAIL_HEADER = re.compile(
    rf"^(?:{_HEADERS} ?:[^\n]*|on [^\n]*wrote:|am [^\n]*schrieb[^\n]*:|le [^\n]*a écrit ?:"
    r"|-{2,} ?(?:original message|forwarded message|ursprüngliche nachricht)[^\n]*)$",
    re.I | re.M,
)
_CLOSING_WORDS = """
    thanks, many thanks, thanks a lot, thanks in advance, thank you, thank you very much,
    thank you in advance, thank you very much in advance, cheers, best, regards, best regards,
    kind regards, warm regards, best wishes, yours, yours sincerely, yours faithfully, sincerely,
    danke, danke im voraus, vielen dank, vielen dank im voraus, viele grüße, beste grüße,
    liebe grüße, herzliche grüße, mit freundlichen grüßen, mit besten grüßen, vg, lg, mfg,
    merci, merci beaucoup, merci d'avance, cordialement, bien à vous, bonne journée
"""
_CLOSINGS = _any(_CLOSING_WORDS)
_SIGNATURE = re.compile(
    r"^(?:--[ \t]*$|sent from my [^\n]*$|von meinem \w+ gesendet|envoyé de mon [^\n]*$"
    rf"|{_CLOSINGS}[.!]?(?:\s*[,\n]|[ \t]*\Z))",
    re.I | re.M,
)
_GREETINGS = _any(r"""
    hi, hello, hey, hiya, howdy, greetings, good (?:morning|afternoon|evening|day), dear,
    hallo, guten (?:tag|morgen|abend), moin, servus, grüß gott, liebe[rs]?, sehr geehrte[rs]?,
    bonjour, bonsoir, salut, coucou, chers?
""")
_GREETED = r"(?: [^\s,.!?:;]+){0,3}?"  # "Hi there", "Dear Ms. Miller" and the like
_GREETS = re.compile(rf"{_GREETINGS}{_GREETED}\s*(?:[,!.:–—-]+|\n|$)\s*", re.I)
_NAME = re.compile(r"[A-ZÄÖÜÉ][\w-]*(?: [A-ZÄÖÜÉ][\w-]*)?[.!]*")  # what is left of "Hi, Anna!"

# Nothing is asked: greetings, thanks, questions about the assistant

_PHATIC = re.compile(
    _any(rf"""
    {_GREETINGS}(?: (?:there|all|team|everyone|again|zusammen|alle|à tous|madame|monsieur))?,
    {_CLOSING_WORDS}, thank(?:s| you) (?:so much|again|for [^.!?\n]+), thx, ty,
    great, perfect, excellent, awesome, cool, nice, good, super, wonderful, ok, okay, alright, fine,
    got it, i see, understood, sure, yes, no, yep, nope, right, correct, well done, never ?mind,
    sorry, please, test, testing, ping, lol, haha, wow, hm+, that helps, you'?(?: a)?re welcome,
    that(?:'s| is| was) (?:very |really )?(?:helpful|great|perfect|all|fine|good|nice|it),
    bye, goodbye, see you, see you later, good ?night, nice to meet you,
    have a (?:nice|good) (?:day|weekend|evening),
    danke (?:schön|sehr), bitte, gut, prima, toll, ja, nein, alles klar, verstanden, tschüss,
    auf wiedersehen, parfait, d'accord, oui, non, au revoir,
    how(?:'s| is) it going, how are you(?: doing)?(?: today)?, what'?s up, who are you,
    what are you,
    who (?:made|built) you, what(?:'s| is) your name, what (?:can|do) you do, how do you work,
    are you (?:there|ready|real|awake|online), do you speak \w+, can you hear me,
    are you an? (?:ai|bot|robot|human|machine|person),
    (?:can|could) (?:you|anyone|someone|anybody) (?:please )?help(?: me| us)?(?: out)?,
    with (?:this|that|something|a question), help, any (?:idea|ideas|thoughts|help)( appreciated)?,
    (?:may|can) i ask (?:you )?(?:something|a question), i have a (?:quick )?question,
    (?:quick|just a) question, do you have a (?:minute|moment|second), is that ok(?:ay)?,
    wie geht(?:'s| es)(?: dir| ihnen)?, wer bist du, was kannst du, eine frage,
    (?:kannst du|können sie) (?:mir|uns)(?: bitte)? helfen, ich habe eine (?:kurze )?frage,
    comment (?:ça|ca) va, comment allez[- ]vous, ça va, qui (?:es[- ]tu|êtes[- ]vous),
    (?:peux-tu|pouvez-vous) m'aider, j'ai une question
    """),
    re.I,
)
_BETWEEN = re.compile(r"[\s,.;:!?…\-–—()\U0001f000-\U0001faff\u2600-\u27bf\ufe0f]+")

# Nothing is asked: changes of the answer before, invented texts, chat programs' own requests

_PLEASE = (
    r"(?:(?:now|and|then|ok(?:ay)?,?|please|(?:can|could|would) you|bitte|peux-tu|kannst du) )*"
)
_CHANGE = _any("""
    make, rewrite, rephrase, reword, paraphrase, shorten, expand, expand on, translate, reformat,
    put, turn, convert, repeat, say, simplify, summari[sz]e, condense, correct, fix, format,
    improve,
    polish, elaborate on, explain, write, give me, read, check, proofread,
    formuliere?, kürze?, übersetze?, mache?, schreibe?, wiederhole?, fasse?,
    raccourcis, traduis, traduisez, reformule[rz]?, résume[rz]?, répète[rz]?, mets, mettez
""")
_THE_ANSWER = _any(r"""
    that, this, it, the above, (?:the|your) (?:last |previous )?(?:answer|reply|response|message),
    (?:the|your) (?:last|previous) (?:one|part|sentence|paragraph), das, es,
    (?:die|deine|ihre)(?: letzte)? antwort, ça, cela, (?:la|ta|votre) réponse
""")
_FORM = _any(r"""
    (?:much |even |a bit |a little )*(?:short|long|simpl|clear|plain|brief|polit)er,
    (?:more |less |very )*(?:formal|casual|polite|concise|detailed|simple|short|plain|friendly),
    kürzer, länger, einfacher, (?:plus )?(?:court|long|simple)
""")
_SHAPE = _any("""
    english, german, french, spanish, italian, words, sentences?, bullets, bullet ?points, table,
    list,
    paragraphs?, e?-?mail, haiku, poem, markdown, json, deutsch, englisch, französisch, sätzen,
    stichpunkten, tabelle, liste, anglais, allemand, français, phrases?
""")
_FORM = rf"(?:{_FORM}|(?:in|into|to|as|auf|als|en|dans)(?: \w+)*? {_SHAPE})"
_EDITS = re.compile(
    rf"{_PLEASE}(?:"
    rf"{_CHANGE} {_THE_ANSWER}(?: (?:again|up|out|bitte|nochmal|zusammen|please|{_FORM}))*"
    rf"|{_FORM}|more|more details?|go on|continue|keep going|carry on|elaborate|try again|again"
    r"|repeat|once more|start over|weiter|mach weiter|nochmal|noch einmal|continue[rz]|encore)"
    r"(?:,? (?:please|bitte|again|now|instead|s'il (?:te|vous) plaît))*[.!?…\s]*",
    re.I,
)
_CREATES = re.compile(
    rf"{_PLEASE}(?:(?:write|compose|invent|make up|tell)(?: (?:me|us))? (?:a|an|another|some)"
    r"(?: \w+){0,2} (?:joke|poem|haiku|story|song|limerick|riddle)\b.*|let'?s (?:talk|chat)\b.*"
    r"|(?:erzähl|schreib)e?(?: mir| uns)? (?:einen?|ein)(?: \w+)? (?:witz|gedicht|geschichte)\b.*"
    r"|raconte[- ]moi une (?:blague|histoire)\b.*)",
    re.I | re.S,
)
_CLIENT_TASK = re.compile(
    r"^\s*#{1,4} ?task:?\s|<chat_history>|<conversation>"
    r"|(?:^|[.:\n]\s*)(?:please |can you |now |you are to )*(?:"
    r"(?:generate|create|write|provide|give|suggest|reply with|respond with|come up with|make)\b"
    r"[^.\n]{0,60}\b(?:title|name|headline|tags?|topics?|emoji)\b[^.\n]{0,80}"
    r"\b(?:conversation|chat|dialog(?:ue)?|thread|messages?|exchange|history|discussion)\b"
    r"|(?:summari[sz]e|name|title|classify|label) (?:this|the|our)(?: \w+)?"
    r" (?:conversation|chat|dialog(?:ue)?|thread|messages)\b"
    r"|(?:suggest|generate|propose)\b[^.\n]{0,40}\bfollow[- ]?up (?:questions?|prompts?)\b)",
    re.I,
)

# Something is asked

_REQUESTS = _any(r"""
    what, who, whom, whose, when, where, which, why, how, is, are, was, were, am, can, could, do,
    does,
    did, has, have, had, will, would, should, may, must,
    (?:in|at|for|to|from|of) (?:what|which|whom),
    tell, list, give, show, find, explain, describe, summari[sz]e, name, compare, define, look up,
    search, i wonder, i(?:'d| would)? (?:want|need|like) to (?:know|find|understand), i need,
    wer, wen, wem, wessen, wann, wo, woher, wohin, warum, wieso, weshalb, wie, welche[rsnm]?,
    ist, sind, war, hat, haben, kann, darf, muss, gibt, nenne?, zeige?, erkläre?, beschreibe?,
    suche?,
    liste, ich möchte wissen, qui, que, quoi, quand, où, comment, pourquoi, combien, quels?,
    quelles?,
    est-ce, à (?:quel|qui), donne, dis, explique, montre, cherche, je voudrais savoir
""")
_ASKS = re.compile(rf"(?:(?:and|but|so|also|und|aber|et|alors) )*{_PLEASE}{_REQUESTS}\b", re.I)
_QUESTION_MARK = re.compile(r"[?\u037e\u061f\uff1f][\"'\u2019\u201d\u00bb)\]*_\s!?]*$")
_REFERRING = _any("""
    it, its, they, them, their, he, she, him, his, her, hers, this, that, these, those, there, then,
    one, ones, the same, diese[rsnm]?, dort, davon, dafür, darin, dazu, ihn, ihm, ihre?n?,
    il, elle, ils, elles, celui-ci, celle-ci
""")
_REFERS = re.compile(rf"\b{_REFERRING}\b", re.I)


def asks(message: str) -> bool:
    """Whether a message of a chat asks for something that a memory could hold.

    False for greetings and thanks, for changes of the answer before ("make that shorter"), for
    invented texts ("tell me a joke"), and for what chat programs ask of their own accord (a title
    for the conversation).
    """
    if _CLIENT_TASK.search(message[:_MOST]):
        return False
    text = _without_frame(message)
    if not text or _is_phatic(text) or (text != message.strip() and _NAME.fullmatch(text)):
        return False
    return not (_EDITS.fullmatch(text) or _CREATES.fullmatch(text))


def query_of(message: str) -> str:
    """The question in a message, without greeting, background, quoted text and signature: what
    passages are searched by. The whole message where no sentence of it is a question.

    Several questions are kept, in order. A question that refers to something ("how much is it?")
    keeps the sentence before it; an unfinished sentence after a question, which is how an answer
    begins ("The pass key is"), is kept too.
    """
    text = _without_frame(message)
    if not text:
        return message.strip()
    sentences = [(text[one.start : one.end], one.level) for one in split(text)]
    wanted = [at for at, (sentence, _) in enumerate(sentences) if _is_question(sentence)]
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


def _without_frame(message: str) -> str:
    """A message without code blocks, quoted mail, signature and greeting."""
    if len(message) > _MOST:
        message = message[: _MOST // 2] + "\n\n" + message[-_MOST // 2 :]
    text = _MAIL_HEADER.sub("", _QUOTED_LINE.sub("", _CODE_BLOCK.sub("", message))).strip()
    signed = [found.start() for found in _SIGNATURE.finditer(text)]
    for start in signed:
        # what stands after a line of thanks is a signature if it is short
        if start and len(text) - start <= 300 and "?" not in text[start:]:
            text = text[:start].strip()
            break
    return _without_greeting(text)


def _without_greeting(text: str) -> str:
    found = _GREETS.match(text)
    return text[found.end() :].strip() if found else text


def _is_question(sentence: str) -> bool:
    return bool(_QUESTION_MARK.search(sentence)) and not _is_phatic(sentence)


def _is_phatic(text: str) -> bool:
    """Whether nothing is said but greetings, thanks and questions about the assistant."""
    if len(text) > 200:
        return False
    at = 0
    while at < len(text):
        found = _BETWEEN.match(text, at)
        if found:
            at = found.end()
            continue
        found = _PHATIC.match(text, at)
        if not found or (found.end() < len(text) and text[found.end()].isalnum()):
            return False
        at = found.end()
    return True
