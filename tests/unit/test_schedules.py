"""The papers' own figures as literal schedules. Every plan takes one tick; a row of a table is a tick.

A cell says what an instance runs: `r1 image 0` encodes, `r1 0-4` prefills those tokens, `r1 +1` decodes one, `r1 <-`
pulls the KV cache. Text parts have 4 tokens and items 8, so request `[4, (8,)]` is Text1, MM1.
"""

from __future__ import annotations

import random

import msgspec
from epd_scheduler.config import Config, EmbeddingConfig, KVConfig, RPSConfig, SchedulerConfig
from epd_scheduler.core import Core
from epd_scheduler.protocol import BatchPlan, EncodePlan, Plan, Row

from tests.simulated import Cluster, expected_tokens, make_request, worker_infos


def cell(cluster: Cluster, plan: Plan) -> str:
    if isinstance(plan, EncodePlan):
        return ", ".join(f"r{unit.seq} image {unit.item}" for unit in plan.units)
    if isinstance(plan, BatchPlan):
        return ", ".join(_row(cluster, row) for row in plan.rows)
    return f"r{plan.seq} <-"


def _row(cluster: Cluster, row: Row) -> str:
    prompt = len(cluster.prompts[row.seq].tokens)
    return f"r{row.seq} +1" if row.start >= prompt else f"r{row.seq} {row.start}-{row.start + len(row.tokens)}"


class Table(Cluster):
    """A cluster in lock step."""

    def __init__(self, topology: str, stages: int = 1, kv_blocks: int = 64, **scheduler: object) -> None:
        config = Config(
            kv=KVConfig(block_size=4, blocks=kv_blocks),
            embedding=EmbeddingConfig(block_size=4, blocks=64),
            scheduler=SchedulerConfig(**{"encode_tokens": 8, "token_budget": 16, **scheduler}),  # type: ignore[arg-type]
        )
        infos = worker_infos(topology, kv_blocks, 4, 64, stages)
        super().__init__(Core(config, [info.name for info in infos]), infos, random.Random(0))
        self.prompts: dict = {}

    def ask(self, seq: int, parts: list, max_tokens: int = 1) -> None:
        media = [seq * 10 + index for index in range(len(parts))]
        self.prompts[seq] = make_request(seq, parts, max_tokens, media)
        self.add(self.prompts[seq])

    def tick(self) -> dict[str, str]:
        """One plan of every instance runs; its outcome comes in at the end of the tick."""
        self.submit()
        row = {name: cell(self, w.submitted[0]) for name, w in self.workers.items() if w.submitted}
        for worker in self.workers.values():
            if worker.submitted:
                worker.run_one(self.now)
        for worker in self.workers.values():
            while worker.finished:
                self.core.complete(worker.finished.popleft(), self.now)
        self.collect()
        return row

    def run_all(self) -> list[dict[str, str]]:
        rows = []
        while row := self.tick():
            rows.append(row)
        return rows


def test_rserve_figure_9_case_0_text_and_items_alternate() -> None:
    table = Table("e-p-d")
    table.ask(1, [4, (8,), 4, (8,)])
    assert table.run_all() == [
        {"encoder": "r1 image 0", "prefill": "r1 0-4"},
        {"encoder": "r1 image 1", "prefill": "r1 4-16"},
        {"prefill": "r1 16-24"},
    ]


def test_rserve_figure_9_case_1_consecutive_items() -> None:
    table = Table("e-p-d")
    table.ask(1, [4, (8,), (8,), 4])
    assert table.run_all() == [
        {"encoder": "r1 image 0", "prefill": "r1 0-4"},
        {"encoder": "r1 image 1", "prefill": "r1 4-12"},
        {"prefill": "r1 12-24"},
    ]


def test_without_overlap_prefill_waits_for_the_last_item() -> None:
    table = Table("e-p-d", overlap="none")
    table.ask(1, [4, (8,), 4, (8,)])
    assert table.run_all() == [
        {"encoder": "r1 image 0"},
        {"encoder": "r1 image 1"},
        {"prefill": "r1 0-16"},
        {"prefill": "r1 16-24"},
    ]


def test_rserve_algorithm_1_gathers_c_tokens_and_flushes_the_last_batch() -> None:
    table = Table("e-p-d", encode_tokens=10)
    table.ask(1, [(4,), (4,), (4,), (12,), (4,)])
    assert [row["encoder"] for row in table.run_all() if "encoder" in row] == [
        "r1 image 0, r1 image 1, r1 image 2",
        "r1 image 3",
        "r1 image 4",
    ]


def test_epd_intra_request_parallelism_spreads_one_request_over_encoders() -> None:
    table = Table("2e-p-d")
    table.ask(1, [(8,), (8,), (8,), (8,)])
    assert table.run_all() == [
        {"encoder": "r1 image 0", "encoder_1": "r1 image 1"},
        {"encoder": "r1 image 2", "encoder_1": "r1 image 3", "prefill": "r1 0-16"},
        {"prefill": "r1 16-32"},
    ]


def test_rserve_figure_10_micro_batches_fill_up_across_requests() -> None:
    """Budget 16: what request 1 cannot use while its image is encoded goes to request 2."""
    table = Table("e-p-d")
    table.ask(1, [6, (8,)])
    table.ask(2, [20])
    assert table.run_all() == [
        {"encoder": "r1 image 0", "prefill": "r1 0-6, r2 0-10"},
        {"prefill": "r2 10-20"},  # submitted with the first: the window is two plans
        {"prefill": "r1 6-14"},
    ]


def test_rserve_intra_leaves_the_rest_of_the_budget_empty() -> None:
    table = Table("e-p-d", overlap="intra")
    table.ask(1, [6, (8,)])
    table.ask(2, [20])
    assert table.run_all() == [
        {"encoder": "r1 image 0", "prefill": "r1 0-6"},
        {"prefill": "r2 0-16"},
        {"prefill": "r1 6-14"},
        {"prefill": "r2 16-20"},
    ]


def test_decode_goes_on_while_another_request_is_prefilled() -> None:
    """One instance for prefill and decode: decode rows first, the rest of the budget to the prompt."""
    table = Table("e-pd", token_budget=8)
    table.ask(1, [8], max_tokens=4)
    rows = [table.tick()]
    table.ask(2, [12])
    assert rows + table.run_all() == [
        {"language": "r1 0-8"},
        {"language": "r1 +1"},
        {"language": "r1 +1, r2 0-7"},
        {"language": "r1 +1, r2 7-12"},
    ]


def test_decode_rows_go_by_rank_when_there_are_more_than_fit() -> None:
    """Two rows for three sequences: the last to arrive has the nearest deadline and does not wait behind the others."""
    table = Table("e-p-d", order="edf", max_rows=2)
    for seq, slo in ((1, 100.0), (2, 90.0), (3, 1.0)):
        table.prompts[seq] = msgspec.structs.replace(make_request(seq, [8], 5, []), slo=slo)
    rows = []
    for request in table.prompts.values():
        table.add(request)
        rows.append(table.tick())
    assert [row.get("decode") for row in rows + table.run_all()] == [
        None,
        "r1 <-",
        "r2 <-",
        "r1 +1",
        "r3 <-",
        "r1 +1, r2 +1",  # submitted behind the transfer of request 3, before its outcome
        "r3 +1, r2 +1",
        "r3 +1, r2 +1",
        "r3 +1, r2 +1",
        "r1 +1, r3 +1",  # as they arrived: both fit
        "r1 +1",
    ]


def test_encoding_and_batches_take_turns_when_one_plan_is_in_flight_at_a_time() -> None:
    table = Table("epd", async_scheduling=False)
    table.ask(1, [8], max_tokens=4)
    table.ask(2, [(8,), (8,), (8,)])
    assert [row["all"] for row in table.run_all()] == [
        "r2 image 0",
        "r1 0-8, r2 0-8",
        "r2 image 1",
        "r1 +1, r2 8-16",
        "r2 image 2",
        "r1 +1, r2 16-24",
        "r1 +1",
    ]


def test_an_instance_that_encodes_too_runs_no_forward_of_pieces_alone() -> None:
    """The text and image 0, 12 tokens, would overlap nothing while image 1 is encoded, unless they fill the budget."""
    schedules = {}
    for budget in (12, 20):
        table = Table("epd", token_budget=budget)
        table.ask(1, [4, (8,), (8,)])
        schedules[budget] = [row["all"] for row in table.run_all()]
    assert schedules == {
        12: ["r1 image 0", "r1 image 1", "r1 0-12", "r1 12-20"],
        20: ["r1 image 0", "r1 image 1", "r1 0-20"],
    }


def test_pieces_ride_along_in_a_batch_that_runs_anyway() -> None:
    table = Table("epd", token_budget=20)
    table.ask(1, [4, (8,), (8,)])
    rows = [table.tick()]
    table.ask(2, [4], max_tokens=3)
    rows.append(table.tick())
    table.ask(3, [2, (8,)])
    assert [row["all"] for row in rows + table.run_all()] == [
        "r1 image 0",
        "r1 image 1",
        "r1 0-12, r2 0-4",
        "r3 image 0",
        "r2 +1, r1 12-20, r3 0-2",
        "r2 +1, r3 2-10",
    ]


def test_epd_hand_over_pulls_the_cache_and_decodes_on() -> None:
    table = Table("e-p-d")
    table.ask(1, [8], max_tokens=3)
    assert table.run_all() == [
        {"prefill": "r1 0-8"},
        {"decode": "r1 <-"},
        {"decode": "r1 +1"},
        {"decode": "r1 +1"},
    ]


def test_epd_transfers_go_by_rank_not_by_arrival_at_the_queue() -> None:
    """Nearest deadline first: request 2 is handed over first although both prompts were ready together."""
    table = Table("e-p-d", order="edf", token_budget=32)
    for seq, slo in ((1, 9.0), (2, 1.0)):
        table.prompts[seq] = msgspec.structs.replace(make_request(seq, [8], 2, []), slo=slo)
        table.add(table.prompts[seq])
    assert table.run_all() == [
        {"prefill": "r2 0-8, r1 0-8"},
        {"decode": "r2 <-"},
        {"decode": "r1 <-"},
        {"decode": "r2 +1"},  # submitted behind the transfer of request 1, before its outcome
        {"decode": "r1 +1"},
    ]


RPS = {"order": "rps", "rps": RPSConfig("modality", pebble_delay=1.5, rock_delay=100.0, share=0.0)}


def test_rps_sand_before_pebbles_before_rocks_whatever_came_first() -> None:
    """Arrivals are one second apart; a pebble outranks sand that came 1.5 s after it."""
    table = Table("e-p-d", **RPS)
    table.ask(1, [(8,), (8,)])  # rock
    table.ask(2, [(8,), 8])  # pebble
    table.ask(3, [16])  # sand, one second after the pebble: before it
    table.ask(4, [16])  # sand, two seconds after the pebble: behind it
    assert [row.get("prefill") for row in table.run_all()] == [
        "r3 0-16",
        "r4 0-16",  # the pebble's image is not encoded yet: the batch is not left empty
        "r2 0-16",
        "r1 0-8",  # as far as its images are encoded
        "r1 8-16",
    ]


def test_rps_orders_the_encoder_queue_too() -> None:
    table = Table("e-p-d", **RPS)
    table.ask(1, [(8,), (8,), (8,), (8,)])  # rock
    rows = [table.tick()]
    table.ask(2, [(8,)])  # pebble: does not wait for all of the rock's images
    encoded = [row["encoder"] for row in rows + table.run_all() if "encoder" in row]
    assert encoded == ["r1 image 0", "r1 image 1", "r2 image 0", "r1 image 2", "r1 image 3"]


def test_rps_a_waiting_rock_gets_its_share() -> None:
    """Sand without end, share 1/4: every fourth batch is the rock's, once it is owed one."""
    table = Table("e-p-d", order="rps", rps=RPSConfig("modality", 100.0, 1000.0, share=0.25))
    table.ask(1, [64, (2,), (2,)])  # rock
    rows = [table.tick()]
    for seq in range(2, 40):
        table.ask(seq, [16])
    rows += [table.tick() for _ in range(16)]
    batches = [row["prefill"] for row in rows]
    assert [index for index, batch in enumerate(batches) if batch.startswith("r1 ")] == [0, 1, 6, 10, 14]


def test_rps_sand_takes_the_memory_of_a_rock_and_is_never_preempted() -> None:
    """16 blocks of 4: the rock's 40 tokens leave 5 free, the sand's 24 + 8 tokens need 8."""
    table = Table("e-pd", kv_blocks=16, token_budget=40, **RPS)
    table.ask(1, [36, (2,), (2,)], max_tokens=8)
    for _ in range(3):
        table.tick()
    table.ask(2, [24], max_tokens=8)
    table.run_all()
    assert table.core.stats().preemptions == {"rock": 1}
    assert table.tokens == {seq: expected_tokens(request) for seq, request in table.prompts.items()}


def test_rps_sand_whose_images_do_not_fit_together_is_a_pebble() -> None:
    """64 blocks of 4 rows hold 32 images of 8 rows, whatever the client says."""
    table = Table("e-p-d", kv_blocks=128, **RPS)
    for seq, images in ((1, 32), (2, 33)):
        request = make_request(seq, [(8,)] * images, 1, [seq * 100 + index for index in range(images)])
        table.prompts[seq] = msgspec.structs.replace(request, priority=1)
        table.add(table.prompts[seq])
    table.run_all()
    assert {seq: end.klass for seq, end in table.ends.items()} == {1: "sand", 2: "pebble"}


def test_a_prefill_instance_without_memory_holds_up_no_images_of_the_other() -> None:
    """Odd requests go to `prefill`, whose memory the first one fills; even ones to `prefill_1`, which has room."""
    config = Config(
        kv=KVConfig(block_size=4, blocks=64),
        embedding=EmbeddingConfig(block_size=4, blocks=4),
        scheduler=SchedulerConfig(encode_tokens=4),
    )
    infos = worker_infos("e-2p-2d", 64, 4, 4, 1)
    cluster = Cluster(Core(config, [info.name for info in infos]), infos, random.Random(0))
    for seq in range(1, 9):
        cluster.add(make_request(seq, [(16,)] if seq % 2 else [(4,)], 1, [seq]))
    encoded = []
    for _ in range(10):  # no batch is run, so no memory comes back
        cluster.submit()
        encoder = cluster.workers["encoder"]
        if encoder.submitted:
            plan = encoder.submitted[0]
            assert isinstance(plan, EncodePlan)
            encoded += [unit.seq for unit in plan.units]
            encoder.run_one(cluster.now)
            cluster.core.complete(encoder.finished.popleft(), cluster.now)
    assert sorted(encoded) == [1, 2, 4, 6, 8]
    cluster.run()
    assert len(cluster.ends) == 8
