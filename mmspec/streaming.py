"""Rounds as they come, out of a run that would only hand them to a callback.

Some runs are ours from end to end, others happen inside somebody else's loop (a pipeline calls us
in the middle of its own call). All are watched by a callback, and here that is turned inside out:
the run goes on in a thread of its own, which waits after every round until the next one is asked
for. So only one of the two threads does anything at any time, and an abandoned stream ends its run.

Threads whose rounds call one model take turns, a round each (`in_turn`): what a round notes of its
forwards hangs on the model.
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


_turns: WeakValueDictionary[int, Any] = WeakValueDictionary()  # locks of models being asked
_turns_lock = threading.Lock()


def in_turn(models: Sequence[Any], rounds: Iterator[R]) -> Iterator[R]:
    """The same rounds, each made while no other thread makes one with any of these models."""
    with _turns_lock:  # in the order of all others, so that no two wait for each other
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
    """Unwinds a run whose stream nobody reads any more."""


def streamed(run: Run[R]) -> Generator[R, None, Any]:
    """What `run` hands to its watcher, one at a time; returns what `run` returns.

    An error of the run is raised here. Closing the iterator ends the run after its present round.
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
    """The thread of a run, and the two ends of the hand-over."""

    def __init__(self, run: Run[R]) -> None:
        self.run = run
        self.out: SimpleQueue[Any] = SimpleQueue()
        self.asked: SimpleQueue[bool] = SimpleQueue()  # True = go on, False = stop
        self.error: BaseException | None = None
        self.output: Any = None
        surroundings = contextvars.copy_context()
        self.state = _ThreadState()
        self.thread = threading.Thread(target=surroundings.run, args=(self._work,), daemon=True)
        self.is_begun = False

    def next(self) -> Any:
        """The next item, or `_DONE`."""
        if self.is_begun:
            self.asked.put(True)
        else:
            self.is_begun = True
            self.thread.start()
        return self.out.get()

    def stop(self) -> None:
        """End the run, wherever it is; does nothing to one that has ended."""
        if self.is_begun:
            self.asked.put(False)
            self.thread.join()

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.output

    def _work(self) -> None:
        try:
            with self.state.entered():
                self.output = self.run(self._hand_over)
        except _Abandoned:
            pass
        except BaseException as error:  # raised again where the stream is read
            self.error = error
        finally:
            self.out.put(_DONE)

    def _hand_over(self, item: R) -> None:
        self.out.put(item)
        if not self.asked.get():
            raise _Abandoned


class _ThreadState:
    """What torch keeps per thread and a caller may have set: precision, mode, device and stream."""

    def __init__(self) -> None:
        self.autocast = {
            kind: torch.get_autocast_dtype(kind)
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        }
        self.inference = torch.is_inference_mode_enabled()
        self.cuda = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def entered(self) -> ExitStack:
        """The same in the thread that calls this."""
        stack = ExitStack()
        if self.cuda is not None:
            stack.enter_context(torch.cuda.device(self.cuda.device))
            stack.enter_context(torch.cuda.stream(self.cuda))
        if self.inference:
            stack.enter_context(torch.inference_mode())
        for kind, dtype in self.autocast.items():
            stack.enter_context(torch.autocast(kind, dtype))
        return stack
