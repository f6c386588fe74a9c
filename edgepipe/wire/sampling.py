"""Conversion of sampling parameters and log-probabilities between gateway, engine and last stage."""

from __future__ import annotations

from edgepipe.errors import RemoteProtocolError
from edgepipe.sampling import GrammarSpec, SamplingParams, TokenLogprobs
from edgepipe.sampling.params import MAX_USER_CHARS
from edgepipe.wire.v1 import common_pb2 as pb


def sampling_to_wire(params: SamplingParams) -> pb.SamplingParams:
    """Convert sampling parameters for the wire."""
    return pb.SamplingParams(
        temperature=params.temperature,
        seed=params.seed,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        bias_ids=[token for token, _ in params.logit_bias],
        bias_values=[bias for _, bias in params.logit_bias],
        logprobs=params.logprobs,
        top_logprobs=params.top_logprobs,
        prompt_logprobs=params.prompt_logprobs,
        min_tokens=params.min_tokens,
        grammar="" if params.grammar is None else params.grammar.text,
        grammar_user="" if params.grammar is None else params.grammar.user,
    )


def sampling_from_wire(message: pb.SamplingParams) -> SamplingParams:
    """Convert sampling parameters. Raises RequestInvalid, and RemoteProtocolError for columns of different lengths."""
    if len(message.bias_ids) != len(message.bias_values):
        raise RemoteProtocolError("sampling parameters have bias columns of different lengths")
    return SamplingParams(
        temperature=message.temperature,
        seed=message.seed,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(zip(message.bias_ids, message.bias_values, strict=True)),
        logprobs=message.logprobs,
        top_logprobs=message.top_logprobs,
        prompt_logprobs=message.prompt_logprobs,
        min_tokens=message.min_tokens,
        grammar=GrammarSpec(message.grammar, user=message.grammar_user[:MAX_USER_CHARS]) if message.grammar else None,
    )


def logprobs_to_wire(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    """Convert one token's log-probabilities for the wire."""
    return pb.TokenLogprobs(
        logprob=logprobs.logprob,
        top_ids=[token for token, _ in logprobs.top],
        top_logprobs=[value for _, value in logprobs.top],
    )


def logprobs_from_wire(message: pb.TokenLogprobs) -> TokenLogprobs:
    """Convert one token's log-probabilities. Raises RemoteProtocolError for columns of different lengths."""
    try:
        return TokenLogprobs(message.logprob, tuple(zip(message.top_ids, message.top_logprobs, strict=True)))
    except ValueError as exc:
        raise RemoteProtocolError("log-probabilities have columns of different lengths") from exc
