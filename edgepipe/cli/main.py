"""The ``edgepipe`` command: its verbs, and the exit codes of their errors."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from edgepipe.cli.output import print_bug, print_error
from edgepipe.cli.usage import bad_usage
from edgepipe.cli.verbs import STYLE, VerbGroup, add_verbs
from edgepipe.config import forget_exported_size
from edgepipe.errors import ConfigInvalid, EdgepipeError
from edgepipe.plain_words import plain
from edgepipe.safe_text import one_line, visible

_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNUSABLE = (*_FULL, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)  # no bugs of edgepipe
_SHOWN_CHARS = 60
_INTERRUPTED = 130


def make_app() -> typer.Typer:
    """Build the command with all verbs, in the order in which people need them."""
    app = typer.Typer(
        name="edgepipe",
        cls=VerbGroup,
        help="One language model over the machines you already own.",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        **STYLE,
    )
    app.callback(invoke_without_command=True)(_start)
    add_verbs(app)
    return app


def _start(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    show_version: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False,
) -> None:
    """One language model over the machines you already own."""
    if show_version:
        from edgepipe.cli.version import version

        version()
        raise typer.Exit
    if context.invoked_subcommand is None:
        from edgepipe.cli.overview import overview

        overview()


def main(args: list[str] | None = None, *, app: typer.Typer | None = None) -> NoReturn:
    """Run a command line and exit: 0, or the exit code of the error. ``app``: the command (default: ``make_app()``)."""
    given = sys.argv[1:] if args is None else args
    debug = "--debug" in given
    args = [arg for arg in given if arg != "--debug"]
    _open_closed_streams()
    _accept_other_encodings()
    if sys.stdout.isatty():
        forget_exported_size()
    try:
        status: int | None = (app or make_app())(args=args, prog_name="edgepipe", standalone_mode=False)
    except Exception as error:
        if debug:
            print(visible("".join(traceback.format_exception(error)), keep="\n"), end="", file=sys.stderr)
            sys.exit(1)
        sys.exit(_not_confirmed(error) or _show(_innermost(error), args))
    sys.exit(status or 0)


def _open_closed_streams() -> None:
    """Open streams that the caller has closed (``<&-``) as empty files; Python sets them to None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))


def _accept_other_encodings() -> None:
    """Print a question mark for text that a terminal cannot show; keep undecodable bytes of standard input."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _not_confirmed(error: Exception) -> int:
    """Return the exit code after a person answered a question with no or ^C, 0 for any other error."""
    if not isinstance(error, typer.Abort):
        return 0
    by_key = isinstance(error.__context__, KeyboardInterrupt)
    print("\n" * by_key + "nothing was changed", file=sys.stderr)
    return _INTERRUPTED if by_key else 1


def _show(error: Exception, args: Sequence[str]) -> int:
    """Print the error. Return its exit code."""
    error = bad_usage(error, args) or _unusable_file(error) or _other_alphabet(error) or error
    if isinstance(error, EdgepipeError):
        print_error(error)
        return error.exit_code
    print_bug(error)
    return 1


def _unusable_file(error: Exception) -> ConfigInvalid | None:
    """Turn a refused file access or a full disk into ConfigInvalid; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in (_UNUSABLE if error.filename else _FULL):
        return None
    fact = plain(OSError(error.errno, ""))  # the message without the file, which the error names
    if not error.filename:
        return ConfigInvalid("the output cannot be written", fact=fact, next_step="make room on its disk")
    return ConfigInvalid(
        f"{error.filename} cannot be used",
        fact=fact,
        next_step="check its permissions and free space, or choose another folder: --data-dir, --models-dir",
    )


def _other_alphabet(error: Exception) -> ConfigInvalid | None:
    """Turn an argument that is not UTF-8 into ConfigInvalid: no request can carry it. None for any other error."""
    if not isinstance(error, UnicodeEncodeError) or error.encoding != "utf-8":
        return None
    return ConfigInvalid(
        f"'{one_line(error.object, most_chars=_SHOWN_CHARS)}' is not UTF-8 text",
        next_step="type it again in a terminal that uses UTF-8",
    )


def _innermost(error: Exception) -> Exception:
    """Return the first EdgepipeError inside exception groups, else the error itself."""
    if not isinstance(error, ExceptionGroup):
        return error
    leaves = [_innermost(part) for part in error.exceptions]  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportUnknownArgumentType]
    return next((leaf for leaf in leaves if isinstance(leaf, EdgepipeError)), leaves[0])


if __name__ == "__main__":
    main()
