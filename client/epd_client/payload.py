"""Contents for the requests of a workload: text of a wanted number of tokens, images of a wanted size."""

from __future__ import annotations

import io
import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from epd_scheduler.workload import RequestSpec
from PIL import Image

from epd_client.client import Client, EpdError

_COARSE = 16  # an image is a random one of so many pixels in each direction, enlarged


@dataclass(frozen=True)
class TextMaker:
    """Random letters, each a word: every word is the same number of tokens, and texts of one length differ."""

    tokens_word: float
    tokens_fixed: float  # of a text without words, e.g. a begin-of-sequence token

    @classmethod
    def calibrate(cls, client: Client) -> TextMaker:
        """Ask the running server how many tokens its tokenizer makes of words. Raises EpdError."""
        few, many = (_count_tokens(client, _words(string.ascii_lowercase * n)) for n in (1, 3))
        letters = len(string.ascii_lowercase)
        per_word = (many - few) / (2 * letters)
        return cls(per_word, few - per_word * letters)

    def text(self, tokens: int, random: np.random.Generator) -> str:
        """A text of `tokens` tokens, or as near as whole words come, at least one word."""
        count = max(1, round((tokens - self.tokens_fixed) / self.tokens_word))
        return _words([string.ascii_lowercase[i] for i in random.integers(len(string.ascii_lowercase), size=count)])


def noise_jpeg(width: int, height: int, random: np.random.Generator) -> bytes:
    """A random smooth picture as JPEG: no two are equal, and it compresses about as well as a photo."""
    coarse = random.integers(0, 256, (_COARSE, _COARSE, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def images(spec: RequestSpec, seed: Sequence[int], *, distinct: bool) -> list[bytes]:
    """The images of a request. If not `distinct`, all of one size are the same, in every request."""
    random = np.random.default_rng(seed)
    return [
        noise_jpeg(width, height, random if distinct else np.random.default_rng((width, height)))
        for width, height in spec.images
    ]


def _words(letters: str | Sequence[str]) -> str:
    return "".join(f" {letter}" for letter in letters)


def _count_tokens(client: Client, text: str) -> int:
    answer = client.ask(text, sampling={"max_tokens": 1, "ignore_eos": True})
    if not answer.num_input_tokens:
        raise EpdError("the server does not say how many tokens a prompt has; is it this project's?", "INTERNAL")
    return answer.num_input_tokens
