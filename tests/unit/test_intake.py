"""Requests against what transformers' processors make of the same input."""

import base64
import io
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from epd_orchestrator.checkpoint import Checkpoint, CheckpointError
from epd_orchestrator.intake import Intake, Prepared, Query
from epd_scheduler.config import LimitsConfig
from epd_scheduler.request import RefusedError
from PIL import Image

from tests import checkpoints
from tests.reference import load_processor

DIGITS = Path(__file__).parents[2] / "models/digits-vl"


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


SIZES = [(56, 56), (150, 60), (97, 301)]
PICTURES = [picture(*size, seed) for seed, size in enumerate(SIZES)]
FILES = [png(image) for image in PICTURES]


@pytest.fixture(scope="module")
def digits() -> Intake:
    return Intake(Checkpoint.load(DIGITS), LimitsConfig())


@pytest.fixture(scope="module", params=checkpoints.FAMILIES)
def checkpoint(request, tmp_path_factory):
    return checkpoints.make(request.param, tmp_path_factory.mktemp(request.param))


def ask(intake: Intake, text: str | None = None, **fields) -> Prepared:
    return intake.prepare(Query(text, **fields), seq=1, arrival=0.0)


def refusal(intake: Intake, text: str | None = None, **fields) -> str:
    with pytest.raises(RefusedError) as caught:
        ask(intake, text, **fields)
    assert caught.value.reason == "invalid_argument"
    return str(caught.value)


def test_tokens_are_those_of_the_processor_in_every_family(checkpoint) -> None:
    intake, processor = Intake(Checkpoint.load(checkpoint), LimitsConfig()), load_processor(checkpoint)
    token = intake.checkpoint.family.placeholder
    text = f"First {token} and {token}{token} naïve 中"
    got = ask(intake, text, images=tuple(FILES))
    assert list(got.request.tokens) == processor(text=[text], images=PICTURES)["input_ids"][0]
    ids = intake.checkpoint.family.placeholder_id(intake.checkpoint.config)
    covered = [index for item in got.request.items for index in range(item.start, item.start + item.rows)]
    assert covered == [index for index, token in enumerate(got.request.tokens) if token == ids]
    assert got.request.positions.shape[1] == len(got.request.tokens)
    assert [got.media[item.media] for item in got.request.items] == FILES


def test_images_without_placeholders_come_first_in_one_user_message(checkpoint) -> None:
    intake, processor = Intake(Checkpoint.load(checkpoint), LimitsConfig()), load_processor(checkpoint)
    content = [*({"type": "image"} for _ in FILES), {"type": "text", "text": "What?"}]
    prompt = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    got = ask(intake, "What?", images=tuple(FILES))
    assert list(got.request.tokens) == processor(text=[prompt], images=PICTURES)["input_ids"][0]
    assert got.prompt == "What?"


def test_messages_take_data_uris_and_the_image_input_in_content_order(digits: Intake) -> None:
    messages = [
        {"role": "system", "content": "Be exact."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "One"},
                {"type": "image_url", "image_url": {"url": uri(FILES[0])}},
                {"type": "image"},
                {"type": "text", "text": "two"},
                {"type": "image_url", "image_url": uri(FILES[2])},
            ],
        },
    ]
    got = ask(digits, messages=json.dumps(messages), images=(FILES[1],))
    assert [got.media[item.media] for item in got.request.items] == FILES
    vision = "<|vision_start|><|image_pad|><|vision_end|>"
    assert got.prompt == (
        "<|im_start|>system\nBe exact.<|im_end|>\n"
        f"<|im_start|>user\nOne{vision}{vision}two{vision}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_alone_is_the_prompt_as_it_is(digits: Intake) -> None:
    got = ask(digits, "ab")
    assert digits.checkpoint.tokenizer.decode(list(got.request.tokens)) == "ab"
    assert (got.request.items, got.media, got.prompt) == ((), {}, "ab")


def test_an_image_may_be_raw_base64_or_a_data_uri(digits: Intake) -> None:
    encoded = base64.encodebytes(FILES[0])  # with line breaks
    got = ask(digits, "a", images=(FILES[0], encoded, uri(FILES[0]).encode()))
    assert list(got.media.values()) == [FILES[0]] * 3
    assert len({item.key for item in got.request.items}) == 1
    assert len({item.media for item in got.request.items}) == 3


def test_equal_bytes_have_equal_keys_and_handles_are_never_reused(digits: Intake) -> None:
    one, two = ask(digits, "a", images=(FILES[0], FILES[1])), ask(digits, "b", images=(FILES[1],))
    assert two.request.items[0].key == one.request.items[1].key != one.request.items[0].key
    assert not set(one.media) & set(two.media)


def test_end_of_sequence_tokens_of_the_checkpoint_stop_generation(digits: Intake) -> None:
    assert ask(digits, "a").request.sampling.stop_token_ids == (256, 257)
    assert ask(digits, "a", sampling_parameters='{"stop_token_ids": [5]}').request.sampling.stop_token_ids == (
        5,
        256,
        257,
    )
    assert ask(digits, "a", sampling_parameters='{"ignore_eos": true}').request.sampling.stop_token_ids == ()


def test_logprobs_that_only_the_response_wants_are_asked_for(digits: Intake) -> None:
    assert ask(digits, "a", logprobs=True).request.sampling.logprobs == 0
    assert ask(digits, "a", logprobs=True, sampling_parameters='{"logprobs": 3}').request.sampling.logprobs == 3
    assert ask(digits, "a").request.sampling.logprobs is None


def test_output_is_limited_by_the_context_if_the_client_does_not_say() -> None:
    intake = Intake(Checkpoint.load(DIGITS), LimitsConfig(context=20, output_tokens=18))
    assert ask(intake, "abcd").request.max_tokens == 16
    assert ask(intake, "abcdefgh").request.max_tokens == 12
    assert ask(intake, "a", sampling_parameters='{"min_tokens": 17}').request.max_tokens == 17
    message = refusal(intake, "abcd", sampling_parameters='{"max_tokens": 17}')
    assert "the prompt has 4 tokens and 'max_tokens' is 17, together more than the context of 20" in message
    assert "lower 'max_tokens' to 16 or raise 'limits.context'" in message
    assert "'max_tokens' is 19, the limit is 18" in refusal(intake, "a", sampling_parameters='{"max_tokens": 19}')
    assert "the prompt has 20 tokens, the context is 20" in refusal(intake, "a" * 20)


def test_the_context_of_the_model_counts_too() -> None:
    intake = Intake(Checkpoint.load(DIGITS), LimitsConfig(context=10**6, output_tokens=10**6))
    message = refusal(intake, "a", sampling_parameters='{"max_tokens": 32768}')
    assert "more than the context of 32768; lower 'max_tokens' to 32767 or use a model with a longer context" in message


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (LimitsConfig(images=2), "3 images, the limit is 2; send fewer or raise 'limits.images'"),
        (LimitsConfig(image_bytes=100), f"image 0 of 3 has {len(FILES[0])} bytes, the limit is 100"),
        (LimitsConfig(pixels=9000), "image 2 of 3: the image has 97 x 301 pixels, more than the limit of 9000"),
        (LimitsConfig(context=30), "the context is 30; shorten it or raise 'limits.context'"),
    ],
)
def test_what_exceeds_a_limit_names_the_number_and_the_key(limits: LimitsConfig, message: str) -> None:
    assert message in refusal(Intake(Checkpoint.load(DIGITS), limits), "a", images=tuple(FILES))


def test_other_threads_run_while_a_prompt_is_tokenised() -> None:
    """With the GIL held, all answers that are being streamed would stall."""
    intake = Intake(Checkpoint.load(DIGITS), LimitsConfig(context=10**6))
    thread = threading.Thread(target=refusal, args=(intake, "a b " * 100_000))  # about a second of work
    thread.start()
    rounds = 0
    while thread.is_alive():
        time.sleep(0.001)
        rounds += 1
    assert rounds > 20


PAD = "<|image_pad|>"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (Query(), "give exactly one of 'text_input' and 'messages'"),
        (Query("a", messages="[]"), "give exactly one of 'text_input' and 'messages'"),
        (Query(""), "'text_input' is empty"),
        (Query(f"{PAD} a {PAD}", images=(FILES[0],)), "has 2 placeholders '<|image_pad|>', but 1 images came with it"),
        (Query(f"a {PAD}"), "has 1 placeholders '<|image_pad|>', but 0 images came with it"),
        (Query("<|video_pad|>"), "videos are not supported"),
        (Query("a", images=(b"",)), "image 0 of 1: the image is empty (0 bytes)"),
        (Query("a", images=(b"\xff\xd8\xff",)), "image 0 of 1: the data is not a readable"),
        (Query("a", images=(b"\x00\x01garbage\xff",)), "image 0 of 1: the data is not a readable"),
        (Query("a", images=(b"not base64!",)), "image 0: neither an encoded image nor valid base64"),
        (Query("a", images=(b"not base64!",)), "it is text that begins with b'not base64!'; send the bytes"),
        (Query("a", images=(b"QUJD",)), "(it begins with b'ABC', in base64 'QUJD'); send"),
        (Query("a", images=(b"data:image/png,abc",)), "a data URI must have the form"),
        (Query("a", images=(png(picture(6000, 2)),)), "aspect ratio"),
        (Query(messages="{}"), "messages: must be a non-empty array"),
        (Query(messages="[]"), "messages: must be a non-empty array"),
        (Query(messages="[1"), "messages: not valid JSON"),
        (Query(messages="[" * 10**6), "messages: not valid JSON (maximum recursion depth"),
        (Query("a", sampling_parameters="[" * 10**6), "sampling_parameters: not valid JSON (maximum recursion depth"),
        (Query("a b " * 10**6), "the prompt has 4000000 characters, at most 65536 can fit into the context of 4096"),
        (Query(messages='[{"content": "a"}]'), "message 0 must be an object with a string 'role'"),
        (Query(messages='[{"role": "user"}]'), "message 0: 'content' must be a string or an array"),
        (Query(messages='[{"role": "user", "content": [{"type": "video_url"}]}]'), "message 0, part 0: 'content' must"),
        (Query(messages='[{"role": "user", "content": [{"type": "text"}]}]'), "part 0: 'text' must be a string"),
        (Query(messages=f'[{{"role": "user", "content": "a {PAD}"}}]'), "the text contains the image placeholder"),
        (Query(messages='[{"role": "user", "content": [{"type": "image"}]}]'), "takes an image from the 'image' input"),
        (
            Query(messages='[{"role": "user", "content": "a"}]', images=(FILES[0],)),
            "the 'image' input has 1 images, but the messages use 0 of them",
        ),
        (
            Query(
                messages='[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}]'
            ),
            "the server fetches nothing; send the image itself as a data URI",
        ),
    ],
)
def test_bad_input_is_refused_with_its_cause(digits: Intake, query: Query, message: str) -> None:
    with pytest.raises(RefusedError) as caught:
        digits.prepare(query, 1, 0.0)
    assert message in str(caught.value)


def test_without_a_chat_template_the_prompt_must_be_complete(tmp_path: Path) -> None:
    for file in DIGITS.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    intake = Intake(Checkpoint.load(tmp_path), LimitsConfig())
    assert "the checkpoint has no chat template" in refusal(intake, "a", images=(FILES[0],))
    assert len(ask(intake, f"a{PAD}", images=(FILES[0],)).request.items) == 1


def test_the_template_may_be_in_the_tokenizers_configuration(tmp_path: Path) -> None:
    for file in DIGITS.iterdir():
        if file.name not in ("chat_template.jinja", "tokenizer_config.json"):
            (tmp_path / file.name).symlink_to(file)
    settings = json.loads((DIGITS / "tokenizer_config.json").read_text())
    settings["chat_template"] = [
        {"name": "default", "template": "{{ eos_token }}{{ messages[0]['content'][0]['text'] }}"}
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    got = ask(Intake(Checkpoint.load(tmp_path), LimitsConfig()), messages='[{"role": "user", "content": "hi"}]')
    assert got.prompt == "<|im_end|>hi"


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json is missing; 'model' must name a checkpoint directory"):
        Checkpoint.load(tmp_path)
