"""Encode long texts to token ids, in a child process."""

from __future__ import annotations

import json
from pathlib import Path

from edgepipe.children.frames import HEAD, unpack_ids
from edgepipe.children.warm_child import ChildEnded, WarmChild
from edgepipe.errors import CapacityError, ModelInvalid

_START_S = 20.0  # start of an interpreter on an overloaded machine
_ENCODE_S = 60.0  # 8 MB take 4-8 s, and the first text reads the tokenizer
_ANSWER_BYTES = 8 << 10  # overhead around the ids, or an error


class LongTextEncoder:
    """Encodes with the tokenizer of a ``tokenizer.json``. The first text starts the child, which stays."""

    def __init__(self, tokenizer_path: Path) -> None:
        self._path = tokenizer_path
        self._child = WarmChild("edgepipe.text.encoding_child", start_s=_START_S)

    async def encode(self, text: str, *, add_special: bool, at_most: int, owner: str = "") -> tuple[int, list[int]]:
        """Return the text's number of tokens, and their ids if there are at most ``at_most``.

        Texts of several owners are encoded in turns. Raises QueueFull if too many of the owner's texts wait,
        CapacityError if the machine lacks time or memory, and ModelInvalid.
        """
        asked = json.dumps({"tokenizer": str(self._path), "add_special": add_special, "at_most": at_most}).encode()
        most_bytes = _ANSWER_BYTES + HEAD.size * at_most
        try:
            answer = await self._child.ask(
                asked, b"\n", text.encode(), owner=owner, within_s=_ENCODE_S, most_bytes=most_bytes
            )
        except (TimeoutError, ChildEnded) as exc:
            raise CapacityError(
                "the text could not be encoded to tokens",
                fact="this machine lacks time or memory at present",
                next_step="try again in a moment, or send a shorter text",
            ) from exc
        if answer[:1] != b"+":
            raise ModelInvalid("the tokenizer failed", fact=answer[1:].decode(errors="replace"))
        (count,) = HEAD.unpack_from(answer, 1)
        ids, _ = unpack_ids(answer, 1 + HEAD.size)
        return count, ids

    async def close(self) -> None:
        """End the child."""
        await self._child.close()
