"""FAISS heads on a GPU: copies of CPU engines, searched with torch tensors that never leave the
device.

Written against FAISS's documented interface. FAISS's GPU resources are for one thread each, so
every thread that searches has its own, and its own copies. FAISS's torch wrappers are not used:
importing them takes the search parameters from every other index. What of this has run, and where,
is said in docs/appendix/index.md.
"""

import threading
from typing import Any

import torch
from torch import Tensor

from memstore.errors import InvalidInput, install_extra
from memstore.index.faiss.faiss_head import HeadIndex, faiss

TEMPORARY = 256 << 20  # bytes of the device that a thread's searches may use in passing
_MOST = 2048  # lists probed, and candidates returned, of a search on a GPU

_here = threading.local()


def resources(device: int) -> Any:
    """This thread's FAISS resources on a device, made once. Raises InvalidInput where there is no
    such GPU.
    """
    library = faiss()
    held: dict[int, Any] = _here.__dict__.setdefault("resources", {})
    if device not in held:
        count = library.get_num_gpus() if hasattr(library, "StandardGpuResources") else 0
        if device >= count:
            raise InvalidInput(
                f"FAISS sees {count} GPUs, not number {device}: {install_extra('gpu')} on a "
                "machine with one, or keep the index on the CPU"
            )
        held[device] = library.StandardGpuResources()
        held[device].setTempMemory(TEMPORARY)
    return held[device]


class GpuHead:
    """A HeadIndex on a device. What is added to the head is copied there before the next search."""

    def __init__(self, head: HeadIndex, device: int) -> None:
        """Raises InvalidInput without a GPU."""
        resources(device)
        self.head, self.device = head, device
        # thread -> (keys when it was copied, the copy)
        self._copies: dict[int, tuple[int, Any]] = {}
        self._turn = torch.from_numpy(head.metric.of_queries).to(torch.device("cuda", device))

    def search(self, queries: Tensor, count: int, effort: int) -> Tensor:
        """As HeadIndex.search over all keys: queries [n, D] on the device -> int64 [n, count]
        there.
        """
        library, held = faiss(), resources(self.device)
        index = self._copy(library, held)
        moved = (queries.float() @ self._turn).contiguous()
        count = min(count, _MOST)
        scores = torch.empty(len(moved), count, device=moved.device)
        ids = torch.empty(len(moved), count, dtype=torch.int64, device=moved.device)
        parameters = library.SearchParametersIVF(
            nprobe=min(effort, int(self.head.index.nlist), _MOST)
        )
        stream = torch.cuda.current_stream(moved.device).cuda_stream
        held.setDefaultStream(self.device, library.cast_integer_to_cudastream_t(stream))
        index.search_c(
            len(moved),
            library.cast_integer_to_float_ptr(moved.data_ptr()),
            count,
            library.cast_integer_to_float_ptr(scores.data_ptr()),
            library.cast_integer_to_idx_t_ptr(ids.data_ptr()),
            parameters,
        )
        return ids

    def _copy(self, library: Any, held: Any) -> Any:
        """This thread's copy of the engine."""
        thread = threading.get_ident()
        size, copy = self._copies.get(thread, (-1, None))
        if size != self.head.size:
            copy = library.index_cpu_to_gpu(held, self.device, self.head.index)
            self._copies[thread] = (self.head.size, copy)
        return copy
