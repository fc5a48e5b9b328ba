"""Attention of shapes that a GPU has not seen: here lengths are always new."""

import threading

import torch


class _WithoutPlans:
    """While any thread is in it, torch attends on a GPU without cuDNN, which it prefers on Hopper:
    that plans for every new shape, which took 30 ms where the attention itself takes .03. Torch
    has one such choice for a process: others' threads attend without it meanwhile, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._before = 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.cuda.enable_cudnn_sdp(self._before)


without_plans = _WithoutPlans()
