"""Drafts for windows in flight, made beside the steps: a thread goes on behind the drafts that it has made."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from edgepipe.ids import Epoch, StepId
from edgepipe.stage.drafting import DraftWish
from edgepipe.wire.reports import Drafted

logger = logging.getLogger(__name__)


class DraftsAhead:
    """Goes on drafting sequences whose windows follow one another in flight, lot after lot. Runs on the loop.

    The steps in flight bound the queue of its thread. Lots of several sequences take turns.
    """

    def __init__(self, epoch: Epoch, on_drafted: Callable[[Drafted], None]) -> None:
        """``on_drafted``: called on the thread that drafts."""
        self._epoch = epoch
        self._on_drafted = on_drafted
        self._thread: ThreadPoolExecutor | None = None  # created for the first sequence
        self._lock = threading.Lock()  # guards ``_closed``: no job is queued behind the end
        self._closed = False

    def took(self, wish: DraftWish, step: StepId, tokens: Sequence[int]) -> None:
        """Let a step's tokens become known to a drafter, after they were reported, and go on drafting behind them."""
        wish.drafter.took(step, tokens)
        self._queue(wish)

    def close(self) -> None:
        """Draft no more. A lot that is being made is finished, and not reported."""
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _queue(self, wish: DraftWish) -> None:
        with self._lock:
            if self._closed:
                return
            if self._thread is None:
                self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafts-ahead")
            self._thread.submit(self._draft, wish)

    def _draft(self, wish: DraftWish) -> None:
        try:
            lot = wish.drafter.go_on(lot=wish.lot, most=wish.count)
        except Exception as exc:
            logger.warning("a sequence is not drafted further until its next token: %s", exc)
            return
        if lot is None or self._closed:
            return
        self._on_drafted(
            Drafted(
                epoch=self._epoch,
                step=lot.step,
                sequence=wish.sequence,
                position=lot.position,
                ids=lot.drafts.ids,
                sources=lot.drafts.sources,
                took_us=lot.took_us,
            )
        )
        self._queue(wish)
