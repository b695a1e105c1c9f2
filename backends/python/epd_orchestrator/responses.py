"""Updates -> the output tensors of Triton's vLLM backend, names, types and habits included."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from epd_scheduler.request import RefusedError, TokenEvent
from tokenizers import Tokenizer

from epd_orchestrator.session import Update

Outputs = dict[str, npt.NDArray[Any]]


class Options(msgspec.Struct, frozen=True):
    """What a client wants in its responses; names are those of the inputs."""

    stream: bool = False
    exclude_input_in_output: bool | None = None  # None: exclude if `stream`
    return_finish_reason: bool = False
    return_cumulative_logprob: bool = False
    return_logprobs: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    return_timeline: bool = False  # not in vLLM's

    def check(self) -> None:
        """Raises RefusedError for what vLLM's backend refuses too."""
        if self.stream and self.exclude_input_in_output is False:
            raise RefusedError(
                "invalid_argument", "'exclude_input_in_output' cannot be false with 'stream': leave it out or set it"
            )


class ResponseBuilder:
    """The responses to one request. Streaming, each update is one; else they are one together, with the last."""

    def __init__(self, options: Options, tokenizer: Tokenizer) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._text = ""  # not in a response yet
        self._tokens: list[TokenEvent] = []
        self._cumulative_logprob = 0.0

    def add(self, update: Update) -> Outputs | None:
        """The outputs of the next response, if one is due. Counts are of the response, logprobs add up."""
        self._text += update.text
        self._tokens += update.tokens
        if not self._options.stream and update.end is None:
            return None
        outputs = self._outputs(update)
        self._text, self._tokens = "", []
        return outputs

    def _outputs(self, update: Update) -> Outputs:
        options = self._options
        prepend = not options.stream and not options.exclude_input_in_output
        outputs = {"text_output": _strings(update.progress.prompt + self._text if prepend else self._text)}
        self._cumulative_logprob += sum(token.logprob for token in self._tokens)
        if options.return_finish_reason:
            outputs["finish_reason"] = _strings(update.end.reason if update.end else "None")
        if options.return_cumulative_logprob:
            outputs["cumulative_logprob"] = np.array([self._cumulative_logprob], np.float32)
        if options.return_logprobs:
            outputs["logprobs"] = _strings(msgspec.json.encode([self._logprobs(token) for token in self._tokens]))
        if options.return_num_input_tokens:
            outputs["num_input_tokens"] = np.array([update.progress.input_tokens], np.uint32)
        if options.return_num_output_tokens:
            outputs["num_output_tokens"] = np.array([len(self._tokens)], np.uint32)
        if options.return_timeline and update.end is not None:
            outputs["timeline"] = _strings(msgspec.json.encode(_timeline(update)))
        return outputs

    def _logprobs(self, token: TokenEvent) -> dict[str, dict[str, Any]]:
        """By token id, the sampled token first; its rank is known only if it is among the alternatives."""
        ranks = {alternative: rank for rank, (alternative, _) in enumerate(token.top, 1)}
        values = {token.token: token.logprob, **dict(token.top)}
        return {
            str(key): {
                "logprob": value,
                "rank": ranks.get(key),
                "decoded_token": self._tokenizer.decode([key], skip_special_tokens=False),
            }
            for key, value in values.items()
        }


def _strings(value: str | bytes) -> npt.NDArray[np.object_]:
    return np.array([value.encode() if isinstance(value, str) else value], np.object_)


def _timeline(update: Update) -> dict[str, Any]:
    """Times are time.monotonic() seconds of the server's host."""
    progress = update.progress
    spans = update.end.timeline if update.end else ()
    return {
        "id": progress.id,
        "priority": progress.priority,
        "class": update.end.klass if update.end else None,
        "arrival": progress.arrival,
        "end": max([progress.arrival, *(span.end for span in spans)]),
        "spans": spans,
    }
