"""``edgepipe batch run|list|show|cancel|take-over``"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from edgepipe.cli.options import DataDir, Json, data_dir_of
from edgepipe.cli.output import make_console, make_table, print_json
from edgepipe.errors import NodeUnreachable, RequestInvalid
from edgepipe.safe_text import one_line

if TYPE_CHECKING:
    from edgepipe.cli.batch_client import BatchClient, BatchView

T = TypeVar("T")
app = typer.Typer(help="Run files of requests behind interactive ones.")

_ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
_LOOK_S = 1.0  # pause between two looks at the batch
_FIRST_LINE_BYTES = 8 << 20
_INTERRUPTED = 130

_BatchId = Annotated[str, typer.Argument(metavar="BATCH", help="The batch's id, as 'batch list' shows it.")]
_Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="Wait for the end, then write the answers there."),
]


@app.callback()
def _group() -> None:
    """Run files of requests behind interactive ones."""


@app.command()
def run(
    requests: Annotated[
        Path, typer.Argument(metavar="IN.jsonl", help="Requests, one a line: custom_id, method, url, body.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT.jsonl", help="File for the answers.")],
    window: Annotated[
        str, typer.Option("--window", metavar="TIME", help="Time for the whole batch: 90m, 24h, 7d.")
    ] = "24h",
    copies: Annotated[
        int,
        typer.Option("--copies", min=1, max=2, metavar="N", help="2: another machine keeps a copy and can take over."),
    ] = 1,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Run a file of requests, write answers; ^C leaves it running."""
    endpoint = endpoint_of(requests)

    async def begin(client: BatchClient) -> BatchView:
        file_id = await client.upload(requests)
        return await client.create(file_id=file_id, endpoint=endpoint, window=window, copies=copies)

    folder = data_dir_of(data_dir)
    _follow(folder, _with_client(folder, begin).batch_id, output, as_json=as_json)


@app.command("list")
def list_batches(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the newest batches of this machine's key."""
    from edgepipe.units import format_duration_s

    async def look(client: BatchClient) -> list[BatchView]:
        return await client.show_all()

    batches = _with_client(data_dir_of(data_dir), look)
    if as_json:
        print_json([asdict(batch) for batch in batches])
        return
    if not batches:
        print("no batches\nrun one: edgepipe batch run IN.jsonl -o OUT.jsonl")
        return
    numbers = ("LINES", "DONE", "FAILED")
    copied = ("COPY",) if any(batch.copy for batch in batches) else ()
    table = make_table("BATCH", "STATUS", *numbers, "WINDOW", *copied, right=numbers, whole=("BATCH",))
    for batch in batches:
        window = format_duration_s(batch.expires_s - batch.created_s)
        counts = (f"{batch.num_lines:,}", f"{batch.num_done:,}", f"{batch.failed:,}")
        copy = (one_line(batch.copy or "-"),) if copied else ()
        table.add_row(one_line(batch.batch_id), one_line(batch.status), *counts, window, *copy)
    make_console().print(table)


@app.command()
def show(batch: _BatchId, output: _Output = None, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show a batch; with -o, wait for its end and write the answers."""
    folder = data_dir_of(data_dir)
    if output is not None:
        _follow(folder, batch, output, as_json=as_json)
        return

    async def look(client: BatchClient) -> BatchView:
        return await client.show(batch)

    _print(_with_client(folder, look), as_json=as_json)


@app.command()
def cancel(batch: _BatchId, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Cancel a batch; finished lines keep their answers."""

    async def stop(client: BatchClient) -> BatchView:
        return await client.cancel(batch)

    _print(_with_client(data_dir_of(data_dir), stop), as_json=as_json)


@app.command("take-over")
def take_over(batch: _BatchId, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Go on here with a batch of a lost machine, from this one's copy."""

    async def take(client: BatchClient) -> BatchView:
        return await client.take_over(batch)

    _print(_with_client(data_dir_of(data_dir), take), as_json=as_json)


def endpoint_of(path: Path) -> str:
    """Return the endpoint that the first line of a file of requests names. Raises RequestInvalid, OSError."""
    with path.open("rb") as source:
        first = source.readline(_FIRST_LINE_BYTES).removeprefix(b"\xef\xbb\xbf")
    try:
        url: Any = json.loads(first)["url"]
    except (ValueError, KeyError, TypeError):
        url = None
    if url not in _ENDPOINTS:
        example = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}'
        raise RequestInvalid(
            f"the first line of {path} is no request of a batch",
            fact=f"url must be {' or '.join(_ENDPOINTS)}",
            next_step=f"write lines such as {example}",
        )
    return url


def errors_path(output: Path) -> Path:
    """Return the file for lines that failed: ``out.errors.jsonl`` beside ``out.jsonl``."""
    return output.with_name(f"{output.stem}.errors{output.suffix or '.jsonl'}")


def _with_client(data_dir: Path, work: Callable[[BatchClient], Coroutine[Any, Any, T]]) -> T:
    """Return what ``work`` returns for a client of this machine's gateway. Raises NodeUnreachable and its errors."""
    from edgepipe.cli.admin import run_async

    async def ask() -> T:
        async with await _client(data_dir) as client:
            return await work(client)

    return run_async(ask())


async def _client(data_dir: Path) -> BatchClient:
    from edgepipe.cli import admin
    from edgepipe.cli.batch_client import BatchClient
    from edgepipe.cli.find import given_key
    from edgepipe.daemon.machine.http_keys import read_key

    async with admin.connect(data_dir) as node:
        status = await node.status()
    own = next(member.node for member in status.members if member.self)
    return BatchClient(f"http://127.0.0.1:{own.http_port}", api_key=given_key(data_dir) or read_key(data_dir))


def _follow(data_dir: Path, batch_id: str, output: Path, *, as_json: bool) -> None:
    """Show the progress until the batch ends, and write its files. After ^C, say how to look again."""
    from edgepipe.cli.admin import run_async

    try:
        ended = run_async(_until_ended(data_dir, batch_id, output))
    except KeyboardInterrupt:
        text = (
            f"the batch goes on; look again: edgepipe batch show {batch_id} -o {output}    "
            f"(or end it: edgepipe batch cancel {batch_id})"
        )
        print(f"\n{text}", file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None
    _print(ended, as_json=as_json)
    if ended.status != "completed":
        raise RequestInvalid(
            f"the batch is {ended.status}",
            fact="; ".join(ended.errors) or f"{ended.num_done:,} of {ended.num_lines:,} lines have a result",
            next_step=f"edgepipe batch show {batch_id}",
        )
    if ended.failed:
        raise RequestInvalid(
            f"{ended.failed:,} of {ended.num_lines:,} lines failed",
            fact="the others have their answers",
            next_step=f"the reasons are in {errors_path(output)}",
        )


async def _until_ended(data_dir: Path, batch_id: str, output: Path) -> BatchView:
    """Look at the batch until it ends. A gateway that restarts, or a node that is away for a while, ends nothing."""
    from edgepipe.cli.views.batch_progress import batch_progress

    async with await _client(data_dir) as client:
        with batch_progress(batch_id) as shown:
            while True:
                try:
                    batch = await client.show(batch_id)
                except NodeUnreachable as exc:
                    shown.wait(exc.what)
                else:
                    shown.show(batch)
                    if batch.is_final:
                        break
                await asyncio.sleep(_LOOK_S)
        for file_id, target in ((batch.output_file, output), (batch.error_file, errors_path(output))):
            if file_id:
                await client.download(file_id, target)
        return batch


def _print(batch: BatchView, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(batch))
        return
    print(f"{one_line(batch.batch_id)} is {one_line(batch.status)}")
    print(f"{batch.completed:,} of {batch.num_lines:,} lines answered, {batch.failed:,} failed")
    print(f"{batch.input_tokens:,} tokens read, {batch.output_tokens:,} written")
    waits = batch.note if batch.note != batch.copy else ""
    for text in (*batch.errors, *([f"it waits: {waits}"] if waits else []), *([batch.copy] if batch.copy else [])):
        print(one_line(text))
