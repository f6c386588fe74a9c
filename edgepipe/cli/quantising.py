"""The work of ``edgepipe models quantise``: a packed copy, and how far its predictions are from the original's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgepipe.cli.output import make_console, print_json
from edgepipe.cli.views.progress_bar import file_progress
from edgepipe.errors import ConfigInvalid, EdgepipeError
from edgepipe.safe_text import one_line

if TYPE_CHECKING:
    from edgepipe.backend.divergence import Divergence
    from edgepipe.store.quantise import PackedCopy
    from edgepipe.store.store import StoredModel

_TOKENS = 512  # part of the text: two windows


def quantise_model(root: Path, model: str, target: str, *, as_json: bool) -> None:
    """Make a packed copy in the store and print its size and divergence. Raises the errors of ``model.quantise``."""
    from edgepipe.store import quantise
    from edgepipe.store.store import ModelStore

    if target not in quantise.TARGETS:
        raise ConfigInvalid(f"--to cannot be '{target}'", next_step=f"give {' or '.join(quantise.TARGETS)}")
    store = ModelStore(root)
    store.tidy()
    with file_progress(model) as on_progress:
        made = quantise.quantise_model(store, model, target, on_progress)
    if not as_json:
        _print_sizes(made)
    measured: Divergence | None = None
    backend, reason = "", None
    try:
        backend, measured = _measure(made)
    except EdgepipeError as error:
        reason = error
    if as_json:
        print_json(_row(made, backend, measured, reason))
    elif measured is not None:
        print(
            f"mean KL divergence over {measured.num_tokens} tokens ({backend}): {measured.kl:.2g} nats; "
            f"the same most likely token after {measured.same_token:.1%} of them"
        )
    elif reason is not None:
        print(f"its KL divergence was not measured: {one_line(reason.what)}")
        if reason.next_step:
            print(f"to measure it: {one_line(reason.next_step)}, then this command again")


def _print_sizes(made: PackedCopy) -> None:
    from edgepipe.store.quantise import unpacked_text
    from edgepipe.units import format_bytes

    sizes = f"{format_bytes(made.copy.size_bytes)}, {one_line(made.original.id)} has {_size(made.original)}"
    print(f"{one_line(made.copy.id)} is {'already ' * made.already_here}here: {made.copy.path} ({sizes})")
    if made.unpacked:
        print(f"not packed, but stored as in the original: {unpacked_text(made.unpacked)}")


def _size(model: StoredModel) -> str:
    from edgepipe.units import format_bytes

    return format_bytes(model.size_bytes)


def _measure(made: PackedCopy) -> tuple[str, Divergence]:
    """Return the backend's name and the divergence. Raises EdgepipeError if it cannot be measured."""
    from edgepipe.backend.divergence import computing_backend, divergence
    from edgepipe.store.quantise import REFERENCE_TEXT

    tokens = made.original.tokenizer().encode(REFERENCE_TEXT)[:_TOKENS]
    name, backend = computing_backend()
    console = make_console(stderr=True)
    try:
        with console.status("comparing with the original"):
            return name, divergence(backend, made.original.open_weights(), made.copy.open_weights(), tokens)
    finally:
        backend.close()


def _row(made: PackedCopy, backend: str, measured: Divergence | None, reason: EdgepipeError | None) -> dict[str, Any]:
    return {
        "model": made.copy.id,
        "path": str(made.copy.path),
        "original": made.original.id,
        "already_here": made.already_here,
        "size_bytes": made.copy.size_bytes,
        "unpacked": [info.name for info in made.unpacked],
        "original_bytes": made.original.size_bytes,
        "backend": backend,
        "kl": None if measured is None else measured.kl,
        "same_token": None if measured is None else measured.same_token,
        "num_tokens": 0 if measured is None else measured.num_tokens,
        "not_measured": "" if reason is None else reason.what,
    }
