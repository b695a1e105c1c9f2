"""The JSON of vLLM-style sampling parameters -> `Parameters`, every key, type and range checked.

Numbers may come as strings ("0.7"), because Triton's vLLM backend accepts them so. Defaults are vLLM's, but greedy:
no `temperature` means 0. Without `max_tokens` a request generates 16 tokens at most, vLLM's default too.
"""

from __future__ import annotations

import difflib
import math
import secrets
from typing import Any

import msgspec
from epd_scheduler.protocol import Sampling
from epd_scheduler.request import RefusedError

DEFAULT_MAX_TOKENS = 16
_GREEDY_BELOW = 1e-5  # a smaller temperature overflows the logits; vLLM takes it as greedy as well
_HOTTEST = 1e30  # all tokens are equally likely long before; float32 ends at 3e38
_MAX_SEED = 2**63 - 1
_MAX_COUNT = 2**31 - 1
_MAX_LOGPROBS = 20
_MAX_STOPS = 64
_INF = math.inf


class Parameters(msgspec.Struct, frozen=True):
    """What a client asks of the generation."""

    sampling: Sampling
    max_tokens: int | None = None  # None: not given
    stop: tuple[str, ...] = ()
    priority: int | None = None  # class: 1 sand, 2 pebble, 3 rock; None: not given
    slo: float | None = None  # seconds to the first token; None: not given


class _Range(msgspec.Struct, frozen=True):
    low: float
    high: float = _INF
    above: bool = False  # `low` itself is refused

    def check(self, key: str, value: float) -> None:
        if not (self.low < value if self.above else self.low <= value) or not value <= self.high:
            bounds = f"{'more than' if self.above else 'at least'} {self.low:g}"
            bounds += f" and at most {self.high:g}" if self.high < _INF else ""
            raise _refuse(f"'{key}' must be {bounds}, got {value:g}")


_FLOATS = {
    "temperature": _Range(0.0),
    "top_p": _Range(0.0, 1.0, above=True),
    "min_p": _Range(0.0, 1.0),
    "repetition_penalty": _Range(1e-20, 1e20),  # beyond, logits become infinite
    "presence_penalty": _Range(-2.0, 2.0),
    "frequency_penalty": _Range(-2.0, 2.0),
    "slo": _Range(0.0, above=True),
}
_INTEGERS = {
    "max_tokens": _Range(1),
    "min_tokens": _Range(0, _MAX_COUNT),
    "top_k": _Range(-1, _MAX_COUNT),
    "seed": _Range(0, _MAX_SEED),
    "logprobs": _Range(0, _MAX_LOGPROBS),
    "priority": _Range(1, 3),
}
_OTHERS = ("stop", "stop_token_ids", "ignore_eos", "logit_bias")
_KEYS = (*_FLOATS, *_INTEGERS, *_OTHERS)


def parse(text: str | None, vocab_size: int) -> Parameters:
    """Check the JSON object `text`; None or "" means no parameter at all.

    The checkpoint's own end-of-sequence tokens are not added here. Raises RefusedError (invalid_argument).
    """
    values = _decode(text)
    for key in values:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(_KEYS)}"
            raise _refuse(f"unknown key '{key}'; {hint}")
    numbers: dict[str, Any] = {key: _float(key, values[key], span) for key, span in _FLOATS.items() if key in values}
    numbers |= {key: _integer(key, values[key], span) for key, span in _INTEGERS.items() if key in values}
    priority, slo = numbers.pop("priority", None), numbers.pop("slo", None)
    max_tokens, min_tokens = numbers.pop("max_tokens", None), numbers.get("min_tokens", 0)
    if max_tokens is not None and min_tokens > max_tokens:
        raise _refuse(f"'min_tokens' ({min_tokens}) must not exceed 'max_tokens' ({max_tokens})")
    if numbers.get("temperature", 0.0) < _GREEDY_BELOW:
        numbers["temperature"] = 0.0
    else:
        numbers["temperature"] = min(numbers["temperature"], _HOTTEST)
        numbers.setdefault("seed", secrets.randbelow(_MAX_SEED))
    numbers["top_k"] = max(0, numbers.get("top_k", 0))  # vLLM writes "off" as 0 or -1
    sampling = Sampling(
        stop_token_ids=_token_ids(values.get("stop_token_ids", []), vocab_size),
        ignore_eos=_boolean("ignore_eos", values.get("ignore_eos", False)),
        logit_bias=_logit_bias(values.get("logit_bias", {}), vocab_size),
        **numbers,
    )
    return Parameters(sampling, max_tokens, _stop(values.get("stop", [])), priority, slo)


def _refuse(message: str) -> RefusedError:
    return RefusedError("invalid_argument", f"sampling_parameters: {message}")


def _decode(text: str | None) -> dict[str, Any]:
    try:
        values = msgspec.json.decode(text) if text else {}
    except (msgspec.DecodeError, RecursionError) as error:
        raise _refuse(f"not valid JSON ({error}); NaN and Infinity are not JSON either") from error
    if not isinstance(values, dict):
        raise _refuse(f"must be a JSON object, got {_kind(values)}")
    return {key: value for key, value in values.items() if value is not None}  # null: not given


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "an integer"}
    return names.get(type(value), "a number" if isinstance(value, float) else "null")


def _float(key: str, value: Any, span: _Range) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _refuse(f"'{key}' must be a number, got {_kind(value)}")
    try:
        number = float(value)
    except (ValueError, OverflowError) as error:
        raise _refuse(f"'{key}' must be a number, got {value!r:.40}") from error
    if not math.isfinite(number):
        raise _refuse(f"'{key}' must be finite, got {value}")
    span.check(key, number)
    return number


def _integer(key: str, value: Any, span: _Range) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _refuse(f"'{key}' must be an integer, got {_kind(value)}")
    try:
        number = int(value)
    except ValueError as error:
        raise _refuse(f"'{key}' must be an integer, got {value!r:.40}") from error
    if abs(number) > _MAX_SEED:  # no key takes more than 64 bits
        raise _refuse(f"'{key}' must be at most {_MAX_SEED} in magnitude, got an integer of {number.bit_length()} bits")
    span.check(key, number)
    return number


def _boolean(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(f"'{key}' must be true or false, got {_kind(value)}")
    return value


def _token_id(key: str, value: Any, vocab_size: int) -> int:
    return _integer(key, value, _Range(0, vocab_size - 1))


def _token_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _refuse(f"'stop_token_ids' must be an array of token ids, got {_kind(value)}")
    return tuple(dict.fromkeys(_token_id("stop_token_ids", token, vocab_size) for token in value))


def _logit_bias(value: Any, vocab_size: int) -> dict[int, float]:
    if not isinstance(value, dict):
        raise _refuse(f"'logit_bias' must be an object of token id to bias, got {_kind(value)}")
    span = _Range(-100.0, 100.0)
    return {_token_id("logit_bias", key, vocab_size): _float("logit_bias", bias, span) for key, bias in value.items()}


def _stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise _refuse("'stop' must be a string or an array of strings")
    if not all(strings):
        raise _refuse("'stop' must not hold an empty string")
    if len(strings) > _MAX_STOPS:
        raise _refuse(f"'stop' may hold {_MAX_STOPS} strings at most, got {len(strings)}")
    return tuple(dict.fromkeys(strings))
