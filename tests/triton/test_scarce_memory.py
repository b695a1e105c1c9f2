"""A server with little memory: what can never fit is refused, what does not fit now waits or is computed again."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from epd_client.client import Client, EpdError
from epd_client.launch import Server
from PIL import Image

from models import digits
from tests.triton.helpers import metrics, wait_until_idle
from tests.triton.load import READING, reading

ROOT = Path(__file__).parents[2]
KV, EMBEDDING = 128, 64  # tokens of KV cache, embedding rows
SETTINGS = f"""
model: {digits.CHECKPOINT}
kv: {{block_size: 4, blocks: {KV // 4}}}
embedding: {{block_size: 4, blocks: {EMBEDDING // 4}}}
scheduler: {{encode_tokens: 8, token_budget: 48}}
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    path = tmp_path_factory.mktemp("scarce") / "epd.yaml"
    path.write_text(SETTINGS)
    with (
        Server(ROOT / "model_repository", config_name="cpu", env={"EPD_CONFIG": str(path)}) as server,
        Client(server.grpc) as client,
    ):
        yield client
        wait_until_idle(server)
        preempted = sum(value for name, value in metrics(server).items() if name.startswith("epd_preemptions_total"))
        assert preempted > 0, "there was memory enough"


def test_an_image_whose_tokens_exceed_the_embedding_pool(client: Client) -> None:
    with pytest.raises(EpdError) as caught:
        client.ask(digits.QUESTION, images=[Image.new("RGB", (9 * 28, 8 * 28))], sampling={"max_tokens": 8})
    assert caught.value.code == "INVALID_ARGUMENT"
    message = (
        "the images need 72 embedding rows at once, the pool has 64; send smaller images or raise embedding.blocks"
    )
    assert message in str(caught.value)
    fits = client.ask(digits.QUESTION, images=[Image.new("RGB", (8 * 28, 8 * 28))], sampling={"max_tokens": 8})
    assert fits.num_input_tokens > EMBEDDING


def test_a_prompt_and_output_that_exceed_the_kv_pool(client: Client) -> None:
    with pytest.raises(EpdError, match="need 129 tokens of KV cache, the pool has 128; shorten the prompt") as caught:
        client.ask("a" * 100, sampling={"max_tokens": 29})
    assert caught.value.code == "INVALID_ARGUMENT"
    assert client.ask("a" * 100, sampling={"max_tokens": 28, "ignore_eos": True}).num_output_tokens == 28


def test_more_requests_than_memory_are_all_answered(client: Client) -> None:
    """Six images need two thirds of the KV cache; long outputs outgrow it."""

    def ask(number: int) -> str:
        count = number % 6 + 1
        if number % 2:
            return client.ask(**reading(count)).text
        sampling = {"max_tokens": 32, "ignore_eos": True}
        return client.ask(**reading(count) | {"sampling": sampling}).text[:count]

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(ask, range(48)))
    assert answers == [READING[: number % 6 + 1] for number in range(48)]
