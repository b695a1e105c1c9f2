"""Tokens -> text as they come: never half a character, never a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Incremental `tokenizer.decode(tokens, skip_special_tokens=True)`: the pieces join to the same string.

    A few tokens are decoded each time, not the whole output: from the last place but one where the text was whole, so
    that the decoder sees the left context that decides about spaces.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._first = 0  # first token of the window
        self._read = 0  # tokens whose text is out
        self._context = ""  # text of tokens first ..< read

    def push(self, token: int) -> str:
        """The text that `token` completes; "" while a character is incomplete."""
        self._tokens.append(token)
        text = self._decode(self._first)
        if len(text) <= len(self._context) or text.endswith(_REPLACEMENT):
            return ""
        piece = text[len(self._context) :]
        self._first, self._read = self._read, len(self._tokens)
        self._context = self._decode(self._first)
        return piece

    def flush(self) -> str:
        """What is left at the end of the output: bytes that never became a character, as U+FFFD."""
        piece = self._decode(self._first)[len(self._context) :]
        self._first = self._read = len(self._tokens)
        self._context = ""
        return piece

    def _decode(self, first: int) -> str:
        return self._tokenizer.decode(self._tokens[first:], skip_special_tokens=True)


class StopStrings:
    """Holds back what may be the beginning of a stop string.

    The match that ends first wins, the longest among equals, so that the result does not depend on how the text is cut
    into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def push(self, piece: str) -> str:
        """The text that is certain to lie before any stop string. After a match: "" for ever."""
        if self.matched or not self._stops:
            return "" if self.matched else piece
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.matched, self._held = True, ""
            return text[: min(ends)[1]]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class TextStream:
    """One request's output text: detokenised, cut before a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], min_tokens: int) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._unchecked = min_tokens  # tokens yet to come whose text cannot stop the request

    @property
    def stopped(self) -> bool:
        """A stop string has been found; the text is complete."""
        return self._stops.matched

    def push(self, token: int) -> str:
        """The text that may be shown now."""
        piece = self._detokenizer.push(token)
        if self._unchecked > 0:
            self._unchecked -= 1
            return piece
        return self._stops.push(piece)

    def flush(self) -> str:
        """The rest, at the end of the output; "" when a stop string ended it."""
        if self.stopped:
            return ""
        rest = self._stops.push(self._detokenizer.flush())
        return rest + self._stops.flush()
