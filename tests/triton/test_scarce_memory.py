"""Servers with little memory, for each order and overlap one: what can never fit is refused, what does not fit now
waits or is computed again, with the tokens of transformers' own generate."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from epd_client.client import Client, EpdError
from epd_client.launch import Server
from PIL import Image

from models import digits
from tests.reference import Reference
from tests.triton.helpers import metrics, wait_until_idle
from tests.triton.test_same_tokens import Case, Cases, token_ids

ROOT = Path(__file__).parents[2]
KV, EMBEDDING = 128, 64  # tokens of KV cache, embedding rows
SETTINGS = f"""
model: {digits.CHECKPOINT}
kv: {{block_size: 4, blocks: {KV // 4}}}
embedding: {{block_size: 4, blocks: {EMBEDDING // 4}}}
scheduler: {{encode_tokens: 8, token_budget: 48, """
SCHEDULERS = {
    "fcfs, none": "order: fcfs, overlap: none}",
    "edf, intra": "order: edf, overlap: intra}",
    "rps, full": "order: rps, overlap: full, rps: {classifier: modality}}",
}
REQUESTS = 28
TOKENS = 32


@pytest.fixture(scope="module", params=SCHEDULERS)
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    path = tmp_path_factory.mktemp("scarce") / "epd.yaml"
    path.write_text(SETTINGS + SCHEDULERS[request.param])
    with (
        Server(ROOT / "model_repository", config_name="cpu", env={"EPD_CONFIG": str(path)}) as server,
        Client(server.grpc) as client,
    ):
        yield client
        wait_until_idle(server)
        found = {name: value for name, value in metrics(server).items() if name.startswith("epd_preemptions_total")}
        assert sum(found.values()) > 0, "there was memory enough"
        if "rps" in request.param:
            assert not found.get('epd_preemptions_total{class="sand"}')


@pytest.fixture(scope="module")
def questions() -> list[tuple[Case, list[int]]]:
    """Questions about none to six images that no other has, and their right answers."""
    cases, plain = Cases(seed=1), Reference(digits.CHECKPOINT)
    made = []
    for number in range(REQUESTS):
        if count := number % 7:
            case = cases.digits("images", [cases.render() for _ in range(count)])
        else:
            case = Case("text only", (f"{number} and", []), {"text": f"{number} and"})
        made.append((case, plain.generate(case.prompt, TOKENS, ignore_eos=True)))
    return made


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


def test_more_requests_than_memory_get_the_tokens_of_transformers(
    client: Client, questions: list[tuple[Case, list[int]]]
) -> None:
    """Six images and the answer fill the KV cache nearly alone; each request states a deadline of its own."""
    deadlines = random.Random(0)

    def ask(case: Case) -> list[int]:
        sampling = {"max_tokens": TOKENS, "ignore_eos": True, "slo": deadlines.uniform(1, 60)}
        return token_ids(client, case.arguments, sampling)

    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = list(pool.map(ask, [case for case, _ in questions]))
    assert answers == [right for _, right in questions]
