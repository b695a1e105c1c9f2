"""The right answers of the demo, from plain transformers."""

from pathlib import Path
from typing import Any

import pytest
from epd_client import demo

from models import digits
from tests.reference import Messages, Reference

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(digits.CHECKPOINT)


def decode(reference: Reference, ids: list[int]) -> str:
    return str(reference.processor.tokenizer.decode(ids, skip_special_tokens=True))


def test_text_only(reference: Reference) -> None:
    count = len(demo.TEXT_ONLY_ANSWER)
    inputs = reference.processor.tokenizer(demo.TEXT_ONLY, return_tensors="pt")
    output = reference.model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    assert decode(reference, output[0, inputs["input_ids"].shape[1] :].tolist()) == demo.TEXT_ONLY_ANSWER


def test_text_between_images(reference: Reference) -> None:
    scans, labels = digits.heldout()
    content: list[dict[str, Any]] = []
    for scan in scans[:8]:
        content += [
            {"type": "image", "image": digits.render(scan)},
            {"type": "text", "text": demo.TEXT_BETWEEN},
        ]
    content[-1] = {"type": "text", "text": digits.QUESTION}
    messages: Messages = [{"role": "user", "content": content}]
    assert "".join(map(str, labels[:8])) == "58123482"
    assert decode(reference, reference.generate(messages, demo.MAX_TOKENS)) == demo.TEXT_BETWEEN_ANSWER


def test_images_whose_right_answers_are_the_labels(reference: Reference) -> None:
    """The model reads every scan that the demo chose, so a wrong answer in the demo is the server's."""
    cases = demo.Cases(ROOT)
    asked = [cases.images(1), cases.row(8), cases.images(8), *cases.twelve()]
    for case in asked:
        if images := case.arguments.get("images"):
            parts = [{"type": "image", "image": image} for image in images]
            content = [*parts, {"type": "text", "text": digits.QUESTION}]
            ids = reference.generate([{"role": "user", "content": content}], demo.MAX_TOKENS)
            assert decode(reference, ids) == case.right, case.title
