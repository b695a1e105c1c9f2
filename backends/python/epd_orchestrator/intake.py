"""From what a client sends to a validated, tokenised `Request`. Reads image headers, decodes no pixel."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

import msgspec
from epd_backend import images as encoded_images
from epd_backend.geometry import ImageLayout
from epd_backend.positions import positions
from epd_scheduler.config import LimitsConfig
from epd_scheduler.protocol import Sampling
from epd_scheduler.request import Item, RefusedError, Request

from epd_orchestrator import conversation, sampling_parameters
from epd_orchestrator.checkpoint import Checkpoint
from epd_orchestrator.media import decode_image
from epd_orchestrator.sampling_parameters import DEFAULT_MAX_TOKENS, Parameters


class Query(msgspec.Struct, frozen=True):
    """A request as the client sent it; exactly one of `text` and `messages` is given."""

    text: str | None = None
    messages: str | None = None  # OpenAI chat JSON
    images: tuple[bytes, ...] = ()  # each encoded (JPEG, PNG, ...), as base64, or as a data URI
    sampling_parameters: str | None = None  # JSON
    logprobs: bool = False  # the sampled tokens' logprobs are wanted, whatever `sampling_parameters` say
    id: str = ""
    priority: int = 0


class Prepared(msgspec.Struct, frozen=True):
    """What the engine keeps of a request beside the core."""

    request: Request
    prompt: str  # the text as the client sent it, or as the template rendered it from messages
    media: dict[int, bytes]  # by media handle
    stop: tuple[str, ...]


class Intake:
    """Thread-safe: tokenising and hashing release the GIL, so a pool of threads may share one object."""

    def __init__(self, checkpoint: Checkpoint, limits: LimitsConfig) -> None:
        self.checkpoint = checkpoint
        self._limits = limits
        self._context = min(limits.context, checkpoint.context)
        ours = self._context == limits.context
        self._more_context = "raise 'limits.context'" if ours else "use a model with a longer context"
        self._longest_token = max(map(len, checkpoint.tokenizer.get_vocab()))
        self._placeholder = checkpoint.family.placeholder
        self._placeholder_id = checkpoint.family.placeholder_id(checkpoint.config)
        self._media = itertools.count()

    def prepare(self, query: Query, seq: int, arrival: float) -> Prepared:
        """Check everything that can be checked without the core. Raises RefusedError (invalid_argument)."""
        parameters = sampling_parameters.parse(query.sampling_parameters, self.checkpoint.vocab_size)
        self._check_count(len(query.images))
        given = [decode_image(image, f"image {index}") for index, image in enumerate(query.images)]
        prompt, images, add_special_tokens = self._prompt(query, given)
        self._check_count(len(images))
        layouts = [self._layout(image, f"image {index} of {len(images)}") for index, image in enumerate(images)]
        tokens, starts = self._tokenise(prompt, layouts, add_special_tokens)
        spans = [(start, layout.rows, layout.grid) for start, layout in zip(starts, layouts, strict=True)]
        where, delta = positions(self.checkpoint.family.positions, len(tokens), spans)
        media = {next(self._media): image for image in images}
        items = tuple(
            Item(key=hashlib.blake2b(image, digest_size=16).hexdigest(), media=handle, start=start, units=layout.units)
            for (handle, image), start, layout in zip(media.items(), starts, layouts, strict=True)
        )
        request = Request(
            seq=seq,
            tokens=tuple(tokens),
            positions=where,
            position_delta=delta,
            items=items,
            sampling=self._sampling(parameters, query.logprobs),
            max_tokens=self._max_tokens(parameters, len(tokens)),
            arrival=arrival,
            priority=query.priority if parameters.priority is None else parameters.priority,
            slo=parameters.slo,
        )
        return Prepared(request, prompt if query.text is None else query.text, media, parameters.stop)

    def _prompt(self, query: Query, given: list[bytes]) -> tuple[str, list[bytes], bool]:
        """The prompt, one placeholder an image; the images in its order; whether the tokenizer adds its BOS."""
        if (query.text is None) == (query.messages is None):
            raise _refuse("give exactly one of 'text_input' and 'messages'")
        if query.messages is not None:
            messages, images = conversation.parse(query.messages, given, self._placeholder)
            return self._render(messages, len(images)), images, False
        text = query.text or ""
        if not text:
            raise _refuse("'text_input' is empty; send some text")
        count = text.count(self._placeholder)
        if given and not count:
            parts = [{"type": "image"}] * len(given) + [{"type": "text", "text": text}]
            return self._render([{"role": "user", "content": parts}], len(given)), given, False
        if count != len(given):
            raise _refuse(
                f"'text_input' has {count} placeholders '{self._placeholder}', but {len(given)} images came with it; "
                "send one image for each, or no placeholder to have the images put first"
            )
        return text, given, True

    def _render(self, messages: list[dict[str, object]], images: int) -> str:
        template = self.checkpoint.chat_template
        if template is None:
            raise _refuse(
                "the checkpoint has no chat template; send 'text_input' as the model expects it, "
                f"with one '{self._placeholder}' for each image"
            )
        prompt = template.render(messages)
        if (count := prompt.count(self._placeholder)) != images:
            raise _refuse(f"the checkpoint's chat template made {count} placeholders of {images} images")
        return prompt

    def _check_count(self, images: int) -> None:
        if images > self._limits.images:
            raise _refuse(f"{images} images, the limit is {self._limits.images}; send fewer or raise 'limits.images'")

    def _layout(self, image: bytes, what: str) -> ImageLayout:
        limits = self._limits
        if len(image) > limits.image_bytes:
            raise _refuse(
                f"{what} has {len(image)} bytes, the limit is {limits.image_bytes}; "
                "send a smaller file or raise 'limits.image_bytes'"
            )
        try:
            width, height = encoded_images.probe(image, limits.pixels)
            checkpoint = self.checkpoint
            return checkpoint.family.layout(width, height, checkpoint.preprocessor, checkpoint.config)
        except ValueError as error:  # ImageError is one
            raise _refuse(f"{what}: {error}") from error

    def _tokenise(
        self, prompt: str, layouts: Sequence[ImageLayout], add_special_tokens: bool
    ) -> tuple[list[int], list[int]]:
        """Token ids with every placeholder repeated to its item's rows, and the index of each item's first.

        The placeholder is a token of its own, so repeating its id equals tokenising the repeated text, only faster.
        """
        pieces = prompt.split(self._placeholder)
        text = pieces[0]
        for layout, piece in zip(layouts, pieces[1:], strict=True):
            text += layout.before + self._placeholder + layout.after + piece
        if len(text) > (most := self._context * self._longest_token):  # tokenising megabytes would take seconds
            raise _refuse(
                f"the prompt has {len(text)} characters, at most {most} can fit into the context of {self._context} "
                f"tokens; shorten it or {self._more_context}"
            )
        # Not `encode`, which holds the GIL all the time.
        (encoding,) = self.checkpoint.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids = encoding.ids
        if not ids:
            raise _refuse("the prompt has no tokens; send some text")
        if (video := self.checkpoint.config.get("video_token_id")) is not None and video in ids:
            raise _refuse("the prompt contains the video placeholder; videos are not supported, send frames as images")
        tokens, starts, rows = list[int](), list[int](), iter(layouts)
        for token in ids:
            if token != self._placeholder_id:
                tokens.append(token)
                continue
            starts.append(len(tokens))
            tokens.extend([token] * next(rows).rows)
        return tokens, starts

    def _sampling(self, parameters: Parameters, logprobs: bool) -> Sampling:
        sampling = parameters.sampling
        eos = () if sampling.ignore_eos else self.checkpoint.eos_token_ids
        return msgspec.structs.replace(
            sampling,
            stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *eos))),
            logprobs=0 if logprobs and sampling.logprobs is None else sampling.logprobs,
        )

    def _max_tokens(self, parameters: Parameters, prompt: int) -> int:
        context, remedy = self._context, self._more_context
        if prompt >= context:
            raise _refuse(f"the prompt has {prompt} tokens, the context is {context}; shorten it or {remedy}")
        limit = self._limits.output_tokens
        if parameters.max_tokens is None:
            return min(max(DEFAULT_MAX_TOKENS, parameters.sampling.min_tokens), limit, context - prompt)
        if parameters.max_tokens > limit:
            raise _refuse(
                f"'max_tokens' is {parameters.max_tokens}, the limit is {limit}; "
                "lower it or raise 'limits.output_tokens'"
            )
        if prompt + parameters.max_tokens > context:
            raise _refuse(
                f"the prompt has {prompt} tokens and 'max_tokens' is {parameters.max_tokens}, together more than the "
                f"context of {context}; lower 'max_tokens' to {context - prompt} or {remedy}"
            )
        return parameters.max_tokens


def _refuse(message: str) -> RefusedError:
    return RefusedError("invalid_argument", message)
