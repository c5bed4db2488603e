"""Iterate over the rounds of a run that reports them to a callback.

Some runs happen inside the loop of a library (a pipeline calls us within its own call), so all
report their rounds to a callback. Here the run is executed in a thread that waits after every
round until the next one is requested. Only one of the two threads works at any time, and closing
the stream ends the run.

Threads whose rounds call the same model alternate, one round each (`take_turns`), because hooks on
the model belong to one round.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch

R = TypeVar("R")
Run = Callable[[Callable[[R], None]], Any]


_turns: WeakValueDictionary[int, Any] = WeakValueDictionary()  # locks of models in use
_turns_lock = threading.Lock()


def take_turns(models: Sequence[Any], rounds: Iterator[R]) -> Iterator[R]:
    """The same rounds, each computed while no other thread uses any of these models."""
    with _turns_lock:  # always in the same order, so that no two threads deadlock
        turns = [
            _turns.setdefault(one, threading.RLock()) for one in sorted({id(m) for m in models})
        ]
    while True:
        with ExitStack() as held:
            for turn in turns:
                held.enter_context(turn)
            made = next(rounds, _DONE)
        if made is _DONE:
            return
        yield made


class _Abandoned(BaseException):
    """Ends a run whose stream was closed."""


def stream_rounds(run: Run[R]) -> Generator[R, None, Any]:
    """Yield what `run` passes to its callback; return what `run` returns.

    Re-raises an error of the run. Closing the iterator ends the run after its current round.
    """
    worker = _Worker(run)
    try:
        while (item := worker.next()) is not _DONE:
            yield item
    finally:
        worker.stop()
    return worker.result()


_DONE: Any = object()


class _Worker(Generic[R]):
    """The thread of a run and its queues."""

    def __init__(self, run: Run[R]) -> None:
        self.run = run
        self.out: SimpleQueue[Any] = SimpleQueue()
        self.requests: SimpleQueue[bool] = SimpleQueue()  # True = continue, False = stop
        self.error: BaseException | None = None
        self.output: Any = None
        surroundings = contextvars.copy_context()
        self.state = ThreadState()
        self.thread = threading.Thread(target=surroundings.run, args=(self._work,), daemon=True)
        self.is_begun = False

    def next(self) -> Any:
        """The next item, or `_DONE`."""
        if self.is_begun:
            self.requests.put(True)
        else:
            self.is_begun = True
            self.thread.start()
        return self.out.get()

    def stop(self) -> None:
        """End the run; does nothing if it has ended."""
        if self.is_begun:
            self.requests.put(False)
            self.thread.join()

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.output

    def _work(self) -> None:
        try:
            with self.state.enter():
                self.output = self.run(self._hand_over)
        except _Abandoned:
            pass
        except BaseException as error:  # raised again where the stream is read
            self.error = error
        finally:
            self.out.put(_DONE)

    def _hand_over(self, item: R) -> None:
        self.out.put(item)
        if not self.requests.get():
            raise _Abandoned


class ThreadState:
    """Settings that torch keeps per thread: autocast, inference mode, device and stream."""

    def __init__(self) -> None:
        self.autocast = {
            kind: torch.get_autocast_dtype(kind)
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        }
        self.inference = torch.is_inference_mode_enabled()
        self.cuda = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def enter(self) -> ExitStack:
        """Apply the settings to the calling thread."""
        stack = ExitStack()
        if self.cuda is not None:
            stack.enter_context(torch.cuda.device(self.cuda.device))
            stack.enter_context(torch.cuda.stream(self.cuda))
        if self.inference:
            stack.enter_context(torch.inference_mode())
        for kind, dtype in self.autocast.items():
            stack.enter_context(torch.autocast(kind, dtype))
        return stack
