"""Retrieval tasks after the description of InfiniteBench (Zhang et al., 2024): a pass key, and a
string of digits that repeat themselves, in noise.
"""

from collections.abc import Sequence

from benchmarks.real.hay import Needle, Offsets
from benchmarks.real.plan import Plan
from benchmarks.real.shared_hay import SharedHay

TASKS = {
    "pass key": "InfiniteBench, a pass key in noise",
    "number string": "InfiniteBench, ten digits that repeat themselves",
}


def build(offsets: Offsets, lengths: Sequence[int], samples: int, seed: int) -> Plan:
    """Both tasks at each length, `samples` of each."""
    hay = SharedHay("infinite noise", offsets, None, lengths, seed)
    for number in range(samples):
        for task, said, value in (
            ("pass key", "pass key", str(hay.rng.randrange(10_000, 100_000))),
            ("number string", "sequence of digits", _repeating(hay)),
        ):
            text = f"The {said} is {value}. Remember it. {value} is the {said}."
            words = (f"What is the {said}?", f"The {said} is", (value,))
            stated = hay.passages(f"{task} {number}", [Needle(text, value)])
            hay.ask(task, number, words, stated)
    return hay.plan


def _repeating(hay: SharedHay) -> str:
    """Ten digits in runs of one to four equal ones."""
    digits, last = "", ""
    while len(digits) < 10:
        digit = hay.rng.choice([d for d in "0123456789" if d != last])
        digits, last = digits + digit * hay.rng.randint(1, 4), digit
    return digits[:10]
