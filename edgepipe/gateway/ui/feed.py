"""What the page's event streams send: views, samples, tasks and links, each when it changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from edgepipe.clock import Clock
from edgepipe.errors import EdgepipeError
from edgepipe.gateway.ui.disks import disks_json
from edgepipe.gateway.ui.history import History
from edgepipe.gateway.ui.topic import SLOW_S, Topic, event
from edgepipe.gateway.ui.view import page_view
from edgepipe.link.admin_client import Admin
from edgepipe.wire.nodes import ClusterView
from edgepipe.wire.serving import MeasuredLinks
from edgepipe.wire.tasks import TaskState

_SAMPLE_S = 1.0
_AGAIN_S = 2.0  # pause between two attempts to follow the node's tasks
_MOST_ENDED = 20  # tasks that have ended
_MOST_LINKS = 1024  # links of 32 machines


class PageFeed:
    """Keeps what the page shows, for any number of streams. ``run`` samples."""

    def __init__(self, *, node_name: str, edgepipe_version: str, clock: Clock) -> None:
        self._node_name = node_name
        self._version = edgepipe_version
        self._clock = clock
        self._cluster = ClusterView()
        self._tasks: Sequence[TaskState] = ()
        self._links = MeasuredLinks()
        self._history = History()
        self._ended = False
        self._listeners: set[asyncio.Event] = set()
        self._view = Topic("view", self._view_json, every_s=SLOW_S)
        self._sample = Topic("sample", self._sample_json, newest=False)
        self._disk = Topic("disks", lambda: disks_json(self._cluster.members), every_s=SLOW_S)
        self._task = Topic("tasks", self._tasks_json, every_s=SLOW_S)
        self._link = Topic("links", self._links_json)
        self._topics = (self._view, self._disk, self._task, self._link, self._sample)

    def update(self, view: ClusterView) -> None:
        """Take the daemon's newest view."""
        models = [member.node.models for member in self._cluster.members]
        self._cluster = view
        if models != [member.node.models for member in view.members]:
            self._disk.version += 1
        self._changed(self._view)

    def update_tasks(self, tasks: Sequence[TaskState]) -> None:
        """Take the node's newest tasks."""
        self._tasks = tasks
        self._changed(self._task)

    def update_links(self, measured: MeasuredLinks) -> None:
        """Take measured links."""
        self._links = measured
        self._changed(self._link)

    def end(self) -> None:
        """End all streams: the gateway stops, and would wait for them."""
        self._ended = True
        for listener in self._listeners:
            listener.set()

    async def run(self) -> None:
        """Sample once a second, which wakes every stream. Ends by cancellation only."""
        while True:
            await asyncio.sleep(_SAMPLE_S)
            self.sample()

    async def follow_node(self, admin: Admin) -> None:
        """Take the links that the node measured before this gateway started; follow its tasks. Ends by cancellation."""
        while True:
            with contextlib.suppress(EdgepipeError):  # the node ends, and this process with it
                self.update_links(await admin.measure_links(remembered=True))
                async for tasks in admin.tasks():
                    self.update_tasks(tasks.tasks)
            await asyncio.sleep(_AGAIN_S)

    def sample(self) -> None:
        """Take a sample of every served model."""
        self._history.sample(entry.engine for entry in self._cluster.served)
        self._changed(self._sample)

    async def events(self, *more: Topic, news: asyncio.Event | None = None) -> AsyncGenerator[bytes]:
        """Yield the history and the present state, then each change, until ``end``. Slow readers get the newest.

        more  topics of this stream alone
        news  is set when one of them has changed
        """
        news = news or asyncio.Event()
        self._listeners.add(news)
        topics = (*more, *self._topics)
        sent = {topic: -1 if topic.newest else topic.version for topic in topics}
        at_s = dict.fromkeys(topics, float("-inf"))
        now_s = asyncio.get_running_loop().time
        try:
            yield event("history", {"at_s": round(self._clock.wall_s(), 1), "models": self._history.all()})
            while not self._ended:
                wait_s: float | None = None
                for topic in topics:
                    if topic.refresh() == sent[topic]:
                        continue
                    left_s = at_s[topic] + topic.every_s - now_s()
                    if left_s <= 0:
                        sent[topic], at_s[topic] = topic.version, now_s()
                        yield topic.event()
                    else:
                        wait_s = left_s if wait_s is None else min(wait_s, left_s)
                await _wait(news, wait_s)
        finally:
            self._listeners.discard(news)

    def _changed(self, topic: Topic) -> None:
        topic.version += 1
        for listener in self._listeners:
            listener.set()

    def _view_json(self) -> dict[str, Any]:
        return page_view(self._cluster, node_name=self._node_name, edgepipe_version=self._version)

    def _sample_json(self) -> dict[str, Any]:
        return {"at_s": round(self._clock.wall_s(), 1), "models": self._history.newest()}

    def _tasks_json(self) -> list[dict[str, Any]]:
        ended = [task for task in self._tasks if task.ended][:_MOST_ENDED]
        return [task_json(task) for task in self._tasks if not task.ended or task in ended]

    def _links_json(self) -> dict[str, Any]:
        links = [
            {
                "from": link.sender,
                "to": link.receiver,
                "one_way_ms": round(link.one_way_s * 1e3, 2),
                "bytes_per_s": round(link.bytes_per_s),
            }
            for link in self._links.links[:_MOST_LINKS]
        ]
        return {"at_s": self._links.at_ms // 1000, "links": links}


def task_json(task: TaskState) -> dict[str, Any]:
    """Return a task as the page draws it, without its result."""
    return {
        "id": task.task_id,
        "kind": task.kind,
        "model": task.model,
        "state": task.state,
        "begun_s": task.begun_us // 1_000_000,
        "ended_s": task.ended_us // 1_000_000,
        "phase": task.phase,
        "bytes_done": task.bytes_done,
        "bytes_total": task.bytes_total,
        "error": list(task.error),
    }


async def _wait(news: asyncio.Event, seconds: float | None) -> None:
    """Wait for news, at most so long."""
    try:
        async with asyncio.timeout(seconds):
            await news.wait()
            news.clear()
    except TimeoutError:
        pass
