"""``edgepipe chat``"""

from __future__ import annotations

import os
import select
import stat
import sys
from typing import Annotated

import typer

from edgepipe.cli.chat.answer_view import Thinking
from edgepipe.cli.options import DataDir, complete_known_model, data_dir_of, models_dir_of
from edgepipe.errors import RequestInvalid
from edgepipe.safe_text import as_utf8

_STDIN_WAIT_S = 1.0  # longest wait for stdin beside --prompt: an idle pipe must not stop the question
_MAX_STDIN_CHARS = 8 << 20  # the gateway's limit


def chat(
    model: Annotated[
        str,
        typer.Argument(
            help="Model to talk to; loaded if it is not served, fetched if you agree: gpt-oss:20b, ...",
            show_default=False,
            autocompletion=complete_known_model,
        ),
    ] = "",
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Ask this question, print the answer and exit.")
    ] = None,
    system: Annotated[str, typer.Option("--system", metavar="TEXT", help="Instructions before the conversation.")] = "",
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", metavar="N", min=1, help="Longest answer in tokens.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="T",
            min=0,
            max=2,
            help="0: always the likeliest token.  [default: the model makers' advice]",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Seed of the sampling: equal seeds give equal answers.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer and its figures as JSON.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown/--no-markdown", help="Format headings, lists and code; never in a pipe.")
    ] = True,
    thinking: Annotated[
        Thinking,
        typer.Option(
            "--thinking",
            help="Reasoning: fold it into one line when it ends, show all, or hide it.",
        ),
    ] = "fold",
    data_dir: DataDir = None,
) -> None:
    """Talk to a model: one prompt, piped text, or a conversation."""
    from edgepipe.cli.admin import run_async
    from edgepipe.cli.chat.conversation import ChatSettings, ask_once
    from edgepipe.cli.chat.repl import converse

    folder, question = data_dir_of(data_dir), question_of(prompt)
    if question is None:
        from edgepipe.cli.offering import offer_model, offer_named

        models_dir = models_dir_of(data_dir, None)
        model = offer_named(model, folder, models_dir) if model else offer_model(folder, models_dir)
    settings = ChatSettings(
        data_dir=folder,
        model=model,
        system=as_utf8(system),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        as_json=as_json,
        markdown=markdown,
        thinking=thinking,
    )
    if question is None:
        run_async(converse(settings))
    else:
        run_async(ask_once(settings, question))


def question_of(prompt: str | None) -> str | None:
    """Return the question: the prompt, then piped text; None for a conversation. Raises RequestInvalid."""
    piped = "" if sys.stdin is None or sys.stdin.isatty() else _piped_text(must_come=prompt is None)
    if prompt is None and sys.stdin is not None and sys.stdin.isatty():
        return None
    question = "\n\n".join(part for part in (prompt or "", piped.rstrip("\n")) if part.strip())
    if not question:
        raise RequestInvalid("the prompt is empty", next_step="edgepipe chat --prompt 'What is ...?'")
    return as_utf8(question)


def _piped_text(*, must_come: bool) -> str:
    mode = _stdin_mode()
    if not must_come and not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return ""
    if not must_come and not select.select([sys.stdin], [], [], _STDIN_WAIT_S)[0]:
        print("no text arrived on standard input: continuing without it", file=sys.stderr)
        return ""
    text = sys.stdin.read(_MAX_STDIN_CHARS + 1)
    if len(text) > _MAX_STDIN_CHARS:
        raise RequestInvalid(
            "the piped text is too long",
            fact=f"at most {_MAX_STDIN_CHARS:,} characters are allowed",
            next_step="pipe a part of it: head -c 100000 FILE | edgepipe chat --prompt 'Sum this up'",
        )
    return text


def _stdin_mode() -> int:
    try:
        return os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return 0
