"""The server's own numbers after requests whose numbers are known."""

from __future__ import annotations

import pytest
from epd_client.client import Client, EpdError
from epd_client.launch import Server

from tests.triton.helpers import metrics, wait_until_idle
from tests.triton.load import READING, TEXT_ONLY, reading

ANSWERS = 3
IMAGES = 5


class Change:
    """How much each metric has grown since this was made."""

    def __init__(self, server: Server) -> None:
        self._server = server
        wait_until_idle(server)
        self._before = metrics(server)

    def __getitem__(self, name: str) -> float:
        return metrics(self._server).get(name, 0.0) - self._before.get(name, 0.0)


def test_counters_and_histograms(server: Server, client: Client) -> None:
    change = Change(server)
    answers = [client.ask(**TEXT_ONLY) for _ in range(ANSWERS)]
    wait_until_idle(server)
    tokens = sum(answer.num_output_tokens for answer in answers)
    assert tokens == 12 * ANSWERS
    assert change['epd_requests_total{reason="length"}'] == ANSWERS
    assert change['epd_requests_total{reason="stop"}'] == 0
    assert change['epd_tokens_total{stage="prefill"}'] == sum(answer.num_input_tokens for answer in answers)
    assert change['epd_tokens_total{stage="decode"}'] >= tokens - ANSWERS  # a first token is the prefill's
    assert change['epd_tokens_total{stage="encode"}'] == 0
    assert change["epd_migrations_total"] == ANSWERS
    for histogram in ("epd_time_to_first_token_seconds", "epd_request_seconds"):
        assert change[f"{histogram}_count"] == ANSWERS
        assert change[f'{histogram}_bucket{{le="+Inf"}}'] == ANSWERS
    assert change['epd_class_wait_seconds_count{class="sand"}'] == ANSWERS
    assert change['epd_class_tokens_total{class="sand"}'] == change['epd_tokens_total{stage="prefill"}']
    assert 0 < change["epd_inter_token_seconds_count"] <= tokens - ANSWERS
    first, whole = change["epd_time_to_first_token_seconds_sum"], change["epd_request_seconds_sum"]
    assert 0 < first < whole <= sum(answer.total_s for answer in answers)


def test_images_are_counted_in_embedding_rows(server: Server, client: Client) -> None:
    change = Change(server)
    answer = client.ask(**reading(IMAGES))
    wait_until_idle(server)
    assert answer.text == READING[:IMAGES]
    assert change['epd_requests_total{reason="stop"}'] == 1
    assert change['epd_tokens_total{stage="prefill"}'] == answer.num_input_tokens
    assert change['epd_class_tokens_total{class="rock"}'] == answer.num_input_tokens
    assert change['epd_class_wait_seconds_count{class="rock"}'] == 1
    assert change['epd_tokens_total{stage="encode"}'] in range(0, 4 * IMAGES + 1, 4)  # less what was still in the cache


def test_refusals_are_counted_by_reason(server: Server, client: Client) -> None:
    change = Change(server)
    with pytest.raises(EpdError):
        client.ask("x", sampling={"max_tokens": 0})
    wait_until_idle(server)
    assert change['epd_requests_total{reason="invalid_argument"}'] == 1
    assert change["epd_request_seconds_count"] == 1
    assert change["epd_time_to_first_token_seconds_count"] == 0


def test_use_is_seen_while_it_lasts(server: Server, client: Client) -> None:
    generation = client.generate("1", sampling={"max_tokens": 2000, "ignore_eos": True})
    seen: dict[str, float] = {}
    for _ in generation:
        seen = metrics(server)
        if seen.get("epd_requests_running") and seen.get("epd_kv_usage"):
            break
    generation.cancel()
    assert seen["epd_requests_running"] == 1
    assert 0 < seen["epd_kv_usage"] < 1
    assert seen['epd_class_waiting{class="sand"}'] == seen['epd_class_oldest_seconds{class="sand"}'] == 0
    wait_until_idle(server)


def test_each_metric_says_what_it_is(server: Server, client: Client) -> None:
    client.ask(**reading(1))
    wait_until_idle(server)
    families = {name.split("{")[0] for name in metrics(server) if name.startswith("epd_")}
    assert families >= {
        "epd_requests_total",
        "epd_tokens_total",
        "epd_batches_total",
        "epd_migrations_total",
        "epd_class_waiting",
        "epd_class_oldest_seconds",
        "epd_class_tokens_total",
        "epd_class_wait_seconds_bucket",
        "epd_requests_waiting",
        "epd_requests_running",
        "epd_kv_usage",
        "epd_embedding_usage",
        "epd_batch_fill",
        "epd_time_to_first_token_seconds_bucket",
        "epd_inter_token_seconds_bucket",
        "epd_request_seconds_bucket",
    }
