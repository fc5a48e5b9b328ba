"""Asking a memory that has no documents: what stands before a question is read again for each, in
its order.
"""

import time
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.baselines.reading import BaselineModel
from benchmarks.common.needle_memory import Reply, asked, judged, reply
from benchmarks.common.needles import Plan, Question
from benchmarks.common.sessions import Texts


def ask_streamed(
    model: BaselineModel, directory: Path, task: str, length: int, *, trials: int, seed: int
) -> dict[str, Any] | None:
    """Ask every question of a task behind `length` tokens of text, which are read again for each;
    None if that length cannot be asked.

    attended: tokens that a token attends to, the mean over layers; state_bytes: what was kept.
    """
    plan, texts = Plan.load(directory), Texts(directory)
    assert plan is not None
    replies: list[tuple[Question, Reply]] = []
    attended, size, began = 0.0, 0, time.perf_counter()
    for n, question in enumerate(plan.of(task)[:trials]):
        documents = plan.documents(question, length, Random(f"{seed} {task} {length} {n}"))
        if documents is None:
            return None
        with model.session() as reading:
            for name in documents:
                reading.feed(texts.ids[name].tolist())
            size = max(size, reading.past.bytes)
            replies.append((question, reply(model, reading, question, generate=False)))
            attended = reading.past.attended.per_token
    if not replies:
        return None
    kept = {"attended": attended, "state_bytes": size}
    return asked(task, length, model.lookup) | kept | judged(replies, began)
