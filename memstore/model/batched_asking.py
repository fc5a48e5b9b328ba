"""Several questions of one model side by side, each in a session of its own: the tokens of all
answers go through the model in one forward pass.
"""

from collections.abc import Sequence
from typing import Any

from memstore.model.answer import Answer
from memstore.model.batched_forward import read_pending
from memstore.model.chat_session import Chat


def ask_together(chats: Sequence[Chat], questions: Sequence[str], **settings: Any) -> list[Answer]:
    """Continue each session with its question -> the answers; settings: of AnswerSettings. Seconds
    and what was read from the tiers are of all of them together. Raises as Chat.ask.
    """
    answers: dict[int, Answer] = {}
    going = {
        number: chat.asking(question, **settings)
        for number, (chat, question) in enumerate(zip(chats, questions, strict=True))
    }
    while going:
        for number, steps in list(going.items()):
            try:
                next(steps)
            except StopIteration as end:
                answers[number] = end.value
                del going[number]
        pending = [one for number in going if (one := chats[number].continuation) is not None]
        if len(pending) > 1:
            read_pending(pending)
    return [answers[number] for number in range(len(chats))]
