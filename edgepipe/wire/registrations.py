"""Registrations of sequences at a stage, as values, and their conversion within the bounds of messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from edgepipe.ids import Epoch, SequenceId
from edgepipe.sampling import SamplingParams
from edgepipe.wire.bounds import check_numbers
from edgepipe.wire.common import epoch_of
from edgepipe.wire.sampling import sampling_from_wire, sampling_to_wire
from edgepipe.wire.sizes import ID_BYTES, MAX_END_IDS, PACKED_BYTES
from edgepipe.wire.v1 import common_pb2, stage_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A sequence that later rows refer to by number. A known number is replaced and its block table emptied.

    A long registration is sent in parts: continuing parts have columns of ids to append.
    """

    sequence: SequenceId
    sampling: SamplingParams
    choice: int = 0
    prompt_tokens: int  # absolute position p is output position p - prompt_tokens
    prompt: tuple[int, ...] = ()  # prompt tokens in order, if ``sampling.prompt_logprobs`` or ``draft``
    seen: tuple[int, ...] = ()  # prompt tokens, unique and ascending, if ``sampling.penalises_prompt``
    generated: tuple[int, ...] = ()  # output tokens so far, if ``sampling.needs_output`` or ``draft``
    end_ids: tuple[int, ...] = ()  # EOS and stop ids, if ``sampling.min_tokens``
    continues: bool = False
    draft: str = ""  # "auto" | "lookup" | "mtp" | "model": what drafts its tokens; empty: nothing

    def joined(self, part: Registration) -> Registration:
        """Return this registration with a continuing part appended."""
        return replace(
            self,
            prompt=self.prompt + part.prompt,
            seen=self.seen + part.seen,
            generated=self.generated + part.generated,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Registrations:
    """Registrations for a stage, sent before the plans that begin the sequences."""

    epoch: Epoch
    sequences: tuple[Registration, ...]


def registrations_to_wire(
    registrations: Iterable[Registration], *, epoch: common_pb2.Epoch, with_sampling: bool
) -> list[stage_pb2.ControlMessage]:
    """Pack registrations into as few messages of at most PACKED_BYTES as possible.

    Only the stage with the head gets the sampling parameters.
    """
    messages: list[stage_pb2.ControlMessage] = []
    room = 0
    for part in _parts(registrations, with_sampling=with_sampling):
        size = part.ByteSize() + _FIELD_BYTES
        if size > room:
            messages.append(stage_pb2.ControlMessage(register=stage_pb2.Registrations(epoch=epoch)))
            room = PACKED_BYTES - messages[-1].ByteSize() - _FIELD_BYTES
        messages[-1].register.sequences.append(part)
        room -= size
    return messages


def registration_bytes(
    sampling: SamplingParams, *, prompt_tokens: int, vocab_size: int, drafts: bool = False
) -> tuple[int, int]:
    """Return the maximum size of a registration without output, and the bytes per known output token.

    ``drafts``: its tokens are drafted.
    """
    grammar = len(sampling.grammar.text.encode()) if sampling.grammar is not None else 0
    prompt = prompt_tokens if sampling.prompt_logprobs or drafts else 0
    seen = min(prompt_tokens, vocab_size) if sampling.penalises_prompt else 0
    ends = MAX_END_IDS if sampling.min_tokens else 0
    fixed = _HEAD_BYTES + grammar + _BIAS_BYTES * len(sampling.logit_bias) + ID_BYTES * (prompt + seen + ends)
    return fixed, ID_BYTES if sampling.needs_output or drafts else 0


def registrations_from_wire(message: stage_pb2.Registrations) -> Registrations:
    """Convert received registrations. Raises RequestInvalid, RemoteProtocolError."""
    check_numbers(message)
    return Registrations(
        epoch=epoch_of(message.epoch),
        sequences=tuple(_registration_from_wire(register) for register in message.sequences),
    )


_HEAD_BYTES = 256  # size of all numbers of a registration
_BIAS_BYTES = ID_BYTES + 8
_FIELD_BYTES = 16  # overhead of a part, or of the message's field
_PART_IDS = PACKED_BYTES // 2 // ID_BYTES  # the other half is for the rest, mainly a grammar


def _parts(registrations: Iterable[Registration], *, with_sampling: bool) -> Iterator[stage_pb2.Register]:
    for registration in registrations:
        if not with_sampling:
            yield stage_pb2.Register(sequence=registration.sequence, prompt_tokens=registration.prompt_tokens)
            continue
        columns = [
            (name, ids[start : start + _PART_IDS])
            for name, ids in (
                ("prompt", registration.prompt),
                ("seen_steps", registration.seen),
                ("generated", registration.generated),
            )
            for start in range(0, len(ids), _PART_IDS)
        ]
        part = _registration_head(registration)
        room = _PART_IDS
        for name, ids in columns:
            if len(ids) > room:
                yield part
                part, room = stage_pb2.Register(sequence=registration.sequence, continues=True), _PART_IDS
            getattr(part, name).extend(_steps(ids) if name == "seen_steps" else ids)
            room -= len(ids)
        yield part


def _registration_head(registration: Registration) -> stage_pb2.Register:
    """Convert a registration without its long columns."""
    return stage_pb2.Register(
        sequence=registration.sequence,
        sampling=sampling_to_wire(registration.sampling),
        choice=registration.choice,
        prompt_tokens=registration.prompt_tokens,
        end_ids=registration.end_ids,
        draft=registration.draft,
    )


def _steps(ascending: tuple[int, ...]) -> Iterator[int]:
    """Yield the differences between neighbours: most take one byte."""
    return (after - before for before, after in pairwise((0, *ascending)))


def _registration_from_wire(message: stage_pb2.Register) -> Registration:
    return Registration(
        sequence=SequenceId(message.sequence),
        sampling=sampling_from_wire(message.sampling),
        choice=message.choice,
        prompt_tokens=message.prompt_tokens,
        prompt=tuple(message.prompt),
        seen=tuple(accumulate(message.seen_steps)),
        generated=tuple(message.generated),
        end_ids=tuple(message.end_ids),
        continues=message.continues,
        draft=message.draft,
    )
