"""Ingest a library on a Ray cluster, which schedules and retries batches, and runs the workers. The
only module that imports Ray.
"""

import socket
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from memstore.closing import Closing
from memstore.errors import InvalidInput, MemstoreError, StoreUnavailable, install_extra
from memstore.library import reading
from memstore.library.reading import Batch, Done, Job, Outcome

_AHEAD = 2  # batches submitted to Ray for each worker: one runs, one waits
_CONNECT = 10.0  # seconds to connect
_RETRIES = 5  # retries by Ray of a batch whose worker ended


class RayEngine(Closing):
    """A Ray cluster; a context manager that disconnects at its end. One task for each batch, on a
    CPU core or, if the cluster has one, a GPU; a worker process reuses its model for later batches.
    """

    def __init__(self, address: str | None = None, *, gpus: bool = True) -> None:
        """address: of a cluster; None: $RAY_ADDRESS, a cluster of `ray start` on this machine, or
        a new one that ends with this engine. gpus: use GPUs. Raises InvalidInput.
        """
        try:
            import ray
            import ray.exceptions
        except ImportError:
            raise InvalidInput(f"--to needs Ray: {install_extra('ray')}") from None
        self._ray = ray
        try:
            _reach(address)
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (OSError, OverflowError, ValueError, RuntimeError) as error:
            why = str(error).partition("\n")[0]
            raise InvalidInput(f"no cluster of Ray at {address or 'this machine'}: {why}") from None
        self._unit = "GPU" if gpus and ray.cluster_resources().get("GPU") else "CPU"

    @property
    def workers(self) -> int:
        """The current number of workers."""
        return max(1, int(self._ray.cluster_resources().get(self._unit, 1)))

    def read(self, job: Job, batches: Iterable[Batch]) -> Iterator[Done]:
        """Run memstore.library.reading.read_batch on all workers; results come in any order, and
        batches are taken as workers become free. A document whose workers ended repeatedly is
        refused. Raises the MemstoreError of a worker, and MemstoreError (the cluster is lost).
        """
        amount = {"num_cpus": 1} if self._unit == "CPU" else {"num_cpus": 1, "num_gpus": 1}
        task = self._ray.remote(
            max_retries=_RETRIES, retry_exceptions=[StoreUnavailable], max_calls=0, **amount
        )(reading.read_batch)
        given, wrong = self._ray.put(job), self._ray.exceptions
        again, coming = deque[Batch](), iter(batches)
        running: dict[Any, Batch] = {}
        while True:
            while len(running) < _AHEAD * self.workers:
                batch = again.popleft() if again else next(coming, None)
                if batch is None:
                    break
                running[task.remote(given, batch)] = batch
            if not running:
                return
            (done,), _ = self._ray.wait([*running])
            batch = running.pop(done)
            try:
                yield self._ray.get(done)
            except (wrong.WorkerCrashedError, wrong.OutOfMemoryError, wrong.NodeDiedError) as error:
                if len(batch) > 1:  # one document may be the cause: retry each alone
                    again += [[one] for one in batch]
                    continue
                ended = MemstoreError(
                    f"its reader was ended {_RETRIES + 1} times ({type(error).__name__}): too "
                    "little memory, perhaps"
                )
                yield Done([Outcome.refused(batch[0], ended)])
            except wrong.RayTaskError as error:
                if isinstance(error.cause, MemstoreError):
                    raise error.cause from None
                raise MemstoreError(f"a worker failed: {error.cause!r}") from error
            except wrong.RayError as error:
                why = str(error).partition("\n")[0]
                raise MemstoreError(
                    f"the cluster is lost ({type(error).__name__}: {why}); finished batches are "
                    "published, and the same command continues"
                ) from None

    def close(self) -> None:
        """Disconnect, and stop a cluster that was started here."""
        self._ray.shutdown()


def _reach(address: str | None) -> None:
    """Raise OSError at once if nothing listens; Ray would wait for minutes."""
    host, _, port = (address or "").rpartition("/")[2].rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), _CONNECT).close()
