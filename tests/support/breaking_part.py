"""A part of the GPU benchmark whose cases end in every way that there is."""

import os
import time
from collections.abc import Iterator

from benchmarks.gpu.part import Case, Row, Setting


def raises() -> Iterator[Row]:
    yield Row("before the error")
    raise ValueError("two lines\nof which one is told")


def hangs() -> Iterator[Row]:
    yield Row("before the time is over")
    time.sleep(600)


def dies() -> Iterator[Row]:
    yield Row("before the process ends")
    os._exit(9)


def is_wrong() -> Iterator[Row]:
    yield Row("checked", right=False)


def cases(setting: Setting) -> list[Case]:
    return [("raises", raises), ("hangs", hangs), ("dies", dies), ("is wrong", is_wrong)]
