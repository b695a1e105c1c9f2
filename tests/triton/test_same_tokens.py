"""The running server answers with the tokens of transformers' own generate: float32, greedy, many requests at once."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from epd_client.client import Client
from PIL import Image

from models import digits
from tests.reference import Prompt, Reference

AT_ONCE = 16
TOKENS = 12
SCANS, LABELS = digits.heldout()
VISION = "<|vision_start|><|image_pad|><|vision_end|>"
TEXTS = (
    "Read the digits.",
    "How many images are there?",
    "a",
    "Zähle: 1, 2, 中文 🙂!",
    "Compare them.\n\nThen add. " * 4,
)

Part = str | bytes
"""Text, or an encoded image."""


@dataclass
class Case:
    """One question: what is sent, and what transformers is asked."""

    kind: str
    prompt: Prompt
    arguments: dict[str, Any] = field(default_factory=dict)


class Cases:
    """Makes questions; equal seeds, equal questions."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def all(self) -> Iterator[Case]:
        for _ in range(20):
            yield self.text_only()
        for _ in range(24):
            yield self.digits("one image", [self.render()])
        for px in (56, 112):
            for count in (1, 2, 3, 4, 5, 6, 7, 8) * 2:
                yield self.digits(f"row of {count}, {px} px", [self.row(count, px)])
        for count in (2, 3, 4, 5, 6, 7, 8) * 4:
            yield self.digits(f"{count} images", [self.render() for _ in range(count)])
        for format in ("PNG", "JPEG", "WEBP") * 8:
            yield self.digits(format, [encode(digits.row(self.scans(3)), format), encode(self.scan(), format)])
        for way in (self.message, self.message_and_input, self.conversation, self.raw) * 14:
            yield way(self.mixed())
        for _ in range(24):
            yield self.digits("any size", [self.picture(20, 300) for _ in range(self.rng.randint(1, 3))])
        for _ in range(5):
            yield self.digits("photo", [self.picture(600, 1400, "JPEG")])

    # Contents

    def scans(self, count: int) -> Any:
        return SCANS[[self.rng.randrange(len(SCANS)) for _ in range(count)]]

    def scan(self) -> Image.Image:
        return digits.render(self.scans(1)[0])

    def render(self) -> bytes:
        return encode(self.scan(), "PNG")

    def row(self, count: int, px: int) -> bytes:
        return encode(digits.row(self.scans(count), px), "PNG")

    def picture(self, least: int, most: int, format: str = "PNG") -> bytes:
        """A smooth coloured background with digits on it, each side `least` to `most` pixels: no multiples of 28."""
        size = self.rng.randint(least, most), self.rng.randint(least, most)
        colours = np.random.default_rng(self.rng.randrange(1000)).integers(0, 256, (4, 5, 3), np.uint8)
        image = Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC)
        for _ in range(3):
            px = self.rng.randint(8, min(size))
            image.paste(digits.render(self.scans(1)[0], px), [self.rng.randint(0, side - px) for side in size])
        return encode(image, format)

    def mixed(self) -> list[Part]:
        """Up to five images and up to four texts in any order; two texts never touch."""
        parts: list[Part] = [self.rng.choice((self.render, self.small))() for _ in range(self.rng.randint(1, 5))]
        for place in sorted(self.rng.sample(range(len(parts) + 1), self.rng.randint(1, min(4, len(parts)))))[::-1]:
            parts.insert(place, self.rng.choice(TEXTS))
        return parts

    def small(self) -> bytes:
        return self.picture(20, 90)

    # Ways to send them

    def text_only(self) -> Case:
        text = " ".join(self.rng.sample(TEXTS, self.rng.randint(1, 3)))
        return Case("text only", (text, []), {"text": text})

    def digits(self, kind: str, images: Sequence[bytes]) -> Case:
        """Text and images without placeholders: the images come first."""
        return Case(kind, chat([*images, digits.QUESTION]), {"text": digits.QUESTION, "images": images})

    def message(self, parts: Sequence[Part]) -> Case:
        """All in one message, images as data URIs."""
        content = [uri_part(part) if isinstance(part, bytes) else text_part(part) for part in parts]
        return Case("message", chat(parts), {"messages": [{"role": "user", "content": content}]})

    def message_and_input(self, parts: Sequence[Part]) -> Case:
        """Images in the `image` input, named by parts of the message."""
        content = [{"type": "image"} if isinstance(part, bytes) else text_part(part) for part in parts]
        arguments = {"messages": [{"role": "user", "content": content}], "images": images_of(parts)}
        return Case("message and input", chat(parts), arguments)

    def conversation(self, parts: Sequence[Part]) -> Case:
        """A system prompt and an earlier turn with an image before it."""
        before = self.render()
        earlier = [
            {"role": "system", "content": [text_part("Be exact.")]},
            {"role": "user", "content": [uri_part(before), text_part("Which?")]},
            {"role": "assistant", "content": [text_part("7")]},
        ]
        case = self.message(parts)
        reference = [
            {**turn, "content": [reference_part(part, before) for part in turn["content"]]} for turn in earlier
        ]
        return Case("conversation", reference + chat(parts), {"messages": earlier + case.arguments["messages"]})

    def raw(self, parts: Sequence[Part]) -> Case:
        """The prompt as the model takes it, placeholders in the text."""
        text = "".join(VISION if isinstance(part, bytes) else part for part in parts)
        images = images_of(parts)
        return Case("placeholders", (text, [decode(image) for image in images]), {"text": text, "images": images})


def encode(image: Image.Image, format: str) -> bytes:
    file = io.BytesIO()
    image.save(file, format)
    return file.getvalue()


def decode(image: bytes) -> Image.Image:
    return Image.open(io.BytesIO(image)).convert("RGB")


def images_of(parts: Sequence[Part]) -> list[bytes]:
    return [part for part in parts if isinstance(part, bytes)]


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def uri_part(image: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(image).decode()}"}}


def reference_part(part: dict[str, Any], image: bytes) -> dict[str, Any]:
    return {"type": "image", "image": decode(image)} if part["type"] == "image_url" else part


def chat(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """A user message as transformers takes it."""
    content = [{"type": "image", "image": decode(p)} if isinstance(p, bytes) else text_part(p) for p in parts]
    return [{"role": "user", "content": content}]


def token_ids(client: Client, arguments: dict[str, Any], sampling: dict[str, Any]) -> list[int]:
    """The tokens of an answer: the first key of each token's logprobs."""
    chunks = client.generate(**arguments, sampling=sampling, logprobs=True)
    return [int(next(iter(token))) for chunk in chunks for token in chunk.logprobs or ()]


@pytest.fixture(scope="module")
def reference() -> Reference:
    torch.set_num_threads(1)
    return Reference(digits.CHECKPOINT)


def test_the_tokens_of_transformers(client: Client, reference: Reference) -> None:
    cases = list(Cases(seed=0).all())
    random.Random(0).shuffle(cases)
    assert len(cases) >= 200
    to_the_end = [index % 2 == 0 for index in range(len(cases))]  # the other half goes on behind end-of-sequence tokens

    def ask(index: int) -> list[int]:
        sampling = {"max_tokens": TOKENS, "ignore_eos": not to_the_end[index]}
        return token_ids(client, cases[index].arguments, sampling)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(ask, range(len(cases))))
    right = [
        reference.generate(case.prompt, TOKENS, ignore_eos=not end) for case, end in zip(cases, to_the_end, strict=True)
    ]
    wrong = [
        f"{case.kind}: {answer}, not {tokens}"
        for case, answer, tokens in zip(cases, answers, right, strict=True)
        if answer != tokens
    ]
    assert not wrong, f"{len(wrong)} of {len(cases)} differ:\n" + "\n".join(wrong)


@pytest.mark.parametrize("kind", ["multi", "row"])
def test_reads_every_heldout_digit(client: Client, kind: str) -> None:
    """1 to 8 in a prompt; right are the labels of the scans."""
    groups, first = [], 0
    while first < len(SCANS):
        groups.append(range(first, min(first + len(groups) % 8 + 1, len(SCANS))))
        first = groups[-1].stop

    def ask(group: range) -> str:
        scans = [SCANS[index] for index in group]
        images = [digits.row(scans)] if kind == "row" else [digits.render(scan) for scan in scans]
        return client.ask(digits.QUESTION, images=images, sampling={"max_tokens": TOKENS}).text

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(ask, groups))
    read = "".join(answer.ljust(len(group))[: len(group)] for answer, group in zip(answers, groups, strict=True))
    right = sum(got == str(label) for got, label in zip(read, LABELS, strict=True))
    assert right / len(LABELS) >= 0.99
