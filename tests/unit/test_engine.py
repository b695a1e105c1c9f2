"""The orchestrator's threads against workers that speak the protocol."""

import base64
import io
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from epd_orchestrator.checkpoint import Checkpoint
from epd_orchestrator.engine import Engine
from epd_orchestrator.intake import Intake, Prepared, Query
from epd_orchestrator.metrics import Value
from epd_orchestrator.runner import ServerStoppingError
from epd_orchestrator.session import Update
from epd_scheduler.config import Config, LimitsConfig
from PIL import Image

from tests.unit.peer import Peer

CHECKPOINT = Checkpoint.load(Path(__file__).parents[2] / "models/digits-vl")
WAIT = 20.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Client:
    """Collects an answer."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.updates: list[Update] = []
        self.finals = 0
        self.gone = False
        self.done = threading.Event()
        self.started = threading.Event()

    def send(self, update: Update) -> None:
        assert not self.finals
        self.updates.append(update)
        self.started.set()

    def finish(self, update: Update) -> None:
        self.updates.append(update)
        self.finals += 1
        self.world.finished(self)
        self.done.set()

    def cancelled(self) -> bool:
        assert not self.finals, "asked after its last response"
        return self.gone

    def result(self) -> tuple[str, str]:
        assert self.done.wait(WAIT), "no end"
        end = self.updates[-1].end
        assert end is not None
        return "".join(update.text for update in self.updates), end.reason

    def message(self) -> str:
        self.result()
        end = self.updates[-1].end
        assert end is not None
        return end.message


class World:
    """Three peers and an engine; checks at each call that a client is waiting."""

    def __init__(self, limits: LimitsConfig | None = None) -> None:
        roles = {"encoder": "encode", "prefill": "prefill", "decode": "decode"}
        self.peers = {name: Peer(name, (role,)) for name, role in roles.items()}  # type: ignore[arg-type]
        self.lock = threading.Lock()
        self.open: set[Client] = set()
        self.violations = 0
        self.values: list[Value] = []
        config = Config(limits=limits or LimitsConfig())
        self.engine = Engine(config, Intake(CHECKPOINT, config.limits), self.exchange, list(self.peers), self.publish)

    def check(self) -> None:
        with self.lock:
            self.violations += not self.open

    def exchange(self, name: str, data: bytes, media: bytes) -> bytes:
        self.check()
        try:
            return self.peers[name].exchange(data, media)
        finally:
            self.check()

    def publish(self, values: list[Value]) -> None:
        self.check()
        self.values += values
        self.check()

    def finished(self, client: Client) -> None:
        with self.lock:
            self.open.discard(client)

    def ask(self, text: str | None, parameters: str = "{}", **fields: object) -> Client:
        client = Client(self)
        with self.lock:
            self.open.add(client)
        self.engine.submit(Query(text, sampling_parameters=parameters, **fields), client)  # type: ignore[arg-type]
        return client


@pytest.fixture
def world() -> Iterator[World]:
    before = set(threading.enumerate())
    world = World()
    yield world
    world.engine.close()
    assert set(threading.enumerate()) == before
    assert world.violations == 0


def png(width: int = 56, height: int = 56) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue()


def test_an_answer_is_streamed_and_ends_once(world: World) -> None:
    client = world.ask("a", '{"max_tokens": 4}')
    assert client.result() == ("bcde", "length")
    assert client.finals == 1
    assert "".join(update.text for update in client.updates[:-1]) == "bcde"
    progress = client.updates[-1].progress
    assert (progress.prompt, progress.input_tokens) == ("a", 1)
    assert progress.first_token is not None
    assert progress.first_token >= progress.arrival


def test_default_length_is_that_of_vllm(world: World) -> None:
    text, reason = world.ask("!").result()
    assert (len(text), reason) == (16, "length")


def test_a_stop_string_ends_the_request_and_does_not_show(world: World) -> None:
    assert world.ask("a", '{"max_tokens": 20, "stop": ["ef"]}').result() == ("bcd", "stop")


def test_a_stop_token_ends_the_request(world: World) -> None:
    token = CHECKPOINT.tokenizer.token_to_id("e")
    assert world.ask("a", f'{{"max_tokens": 20, "stop_token_ids": [{token}]}}').result() == ("bcd", "stop")


def test_the_encoder_gets_the_media_of_each_image(world: World) -> None:
    images = (png(), png(84, 56))
    client = world.ask("Read.", images=(images[0], base64.b64encode(images[1])))
    assert client.result()[1] == "length"
    assert sorted(world.peers["encoder"].media) == sorted(images)
    assert client.updates[-1].progress.prompt == "Read."


def test_many_requests_at_once_all_get_their_own_answer(world: World) -> None:
    clients = [world.ask(chr(ord("a") + i % 8), '{"max_tokens": 6}') for i in range(60)]
    for index, client in enumerate(clients):
        first = ord("a") + index % 8
        assert client.result() == ("".join(chr(first + 1 + step) for step in range(6)), "length")


def test_a_bad_request_is_refused_and_its_neighbour_unharmed(world: World) -> None:
    good = world.ask("a", '{"max_tokens": 3}')
    bad = world.ask("a", '{"max_tokens": 0}')
    assert bad.result() == ("", "invalid_argument")
    assert "'max_tokens' must be at least 1, got 0" in bad.message()
    assert good.result() == ("bcd", "length")


def test_too_many_requests_are_refused() -> None:
    world = World(LimitsConfig(requests=2))
    world.peers["prefill"].frozen = True
    clients = [world.ask("a") for _ in range(3)]
    clients[2].result()
    world.peers["prefill"].frozen = False
    assert [client.result()[1] for client in clients] == ["length", "length", "unavailable"]
    world.engine.close()


@pytest.mark.parametrize("stage", ["encoder", "prefill", "decode"])
def test_a_client_that_leaves_ends_its_request_in_every_stage(world: World, stage: str) -> None:
    world.peers[stage].frozen = True
    client = world.ask("Read.", '{"max_tokens": 200}', images=(png(),))
    time.sleep(0.1)
    client.gone = True
    wait_until(lambda: all(session.cancelled for session in world.engine._hub.open_sessions() or ()))
    world.peers[stage].frozen = False  # the last response waits for the plan in flight
    assert client.result()[1] == "cancelled"
    assert world.ask("a", '{"max_tokens": 1}').result() == ("b", "length")
    stats = world.engine._hub.stats()
    assert (stats.queued, stats.running, stats.in_flight, stats.kv_blocks_used) == (0, 0, 0, 0)


def test_a_client_that_raises_is_treated_as_gone(world: World) -> None:
    class Broken(Client):
        def send(self, update: Update) -> None:
            raise BrokenPipeError(update.text)

    client = Broken(world)
    with world.lock:
        world.open.add(client)
    world.engine.submit(Query("a", sampling_parameters='{"max_tokens": 2000}'), client)
    assert client.result()[1] == "cancelled"


def test_a_client_that_is_slow_to_ask_once_does_not_keep_others_from_leaving(world: World) -> None:
    class Slow(Client):
        asked = False

        def cancelled(self) -> bool:
            if not self.asked:
                time.sleep(WAIT / 8)
                self.asked = True
            return False

    world.peers["decode"].frozen = True
    slow = Slow(world)
    with world.lock:
        world.open.add(slow)
    world.engine.submit(Query("a"), slow)
    wait_until(lambda: slow.asked)
    client = world.ask("a")
    client.gone = True
    assert client.result()[1] == "cancelled"
    world.peers["decode"].frozen = False
    assert slow.result()[1] == "length"


@pytest.mark.parametrize("stage", ["encoder", "prefill", "decode"])
def test_a_killed_worker_comes_back_and_nothing_hangs(world: World, stage: str) -> None:
    for peer in world.peers.values():
        peer.seconds = 0.01
    clients = [world.ask("a", '{"max_tokens": 30}', images=(png(),) if i % 2 else ()) for i in range(8)]
    time.sleep(0.1)
    world.peers[stage].alive = False
    for client in clients:
        assert client.result()[1] in ("length", "unavailable")
    refused = world.ask("Read.", images=(png(84),))  # another image: the first one's embedding is cached
    assert refused.result()[1] == "unavailable"
    assert stage in refused.message()
    world.peers[stage].start()
    time.sleep(1.1)  # it is asked again a second after the last attempt
    assert world.ask("a", '{"max_tokens": 2}', images=(png(),)).result()[1] == "length"


def test_a_worker_replaced_while_nothing_ran_is_noticed(world: World) -> None:
    assert world.ask("a", '{"max_tokens": 2}').result() == ("bc", "length")
    for peer in world.peers.values():
        peer.start()
    time.sleep(0.6)
    assert world.ask("a", '{"max_tokens": 2}').result() == ("bc", "length")
    for name in ("prefill", "decode"):  # it may have ended before the encoder was asked
        info = world.engine._hub._links[name].info
        assert info
        assert info.pid == world.peers[name].pid


def test_an_idle_worker_that_answers_late_is_there_all_the_same(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy host a call may take longer than it was asked to wait."""
    peer = world.peers["prefill"]
    prompt = peer.exchange

    def late(data: bytes, media: bytes) -> bytes:
        time.sleep(0.5)
        return prompt(data, media)

    monkeypatch.setattr(peer, "exchange", late)
    assert world.ask("a", '{"max_tokens": 2}').result() == ("bc", "length")


def test_a_plan_goes_out_while_a_call_waits_for_an_earlier_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd_orchestrator.link.WAIT_S", 2 * WAIT)
    peer = world.peers["prefill"]
    peer.frozen = True
    clients = []
    deadline = time.monotonic() + WAIT
    for wanted in (1, 2):
        clients.append(world.ask("a", '{"max_tokens": 2}'))
        while len(peer.plans) < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    peer.frozen = False
    assert [client.result() for client in clients] == [("bc", "length")] * 2


def test_a_worker_that_makes_no_progress_is_given_up_until_it_is_through() -> None:
    world = World(LimitsConfig(stall_seconds=1.5))
    assert world.ask("a", '{"max_tokens": 2}').result() == ("bc", "length")
    world.peers["prefill"].frozen = True
    stalled = world.ask("a", '{"max_tokens": 2}')
    assert stalled.result()[1] == "unavailable"
    world.peers["prefill"].frozen = False
    wait_until(lambda: world.ask("a", '{"max_tokens": 2}').result() == ("bc", "length"))
    world.engine.close()


@pytest.mark.parametrize("recovers", [True, False])
def test_a_lost_worker_is_ended_unless_it_comes_to_rest(monkeypatch: pytest.MonkeyPatch, recovers: bool) -> None:
    """Nobody asks it while no request is open: it has its chance with the next one."""
    world, ended = World(LimitsConfig(stall_seconds=0.7)), list[int]()
    monkeypatch.setattr("epd_orchestrator.process.runs", lambda _: True)
    monkeypatch.setattr("epd_orchestrator.process.end", ended.append)
    peer = world.peers["prefill"]
    prompt, lost = peer.exchange, peer.pid
    peer.frozen = True
    assert world.ask("a", '{"max_tokens": 2}').result()[1] == "unavailable"
    peer.frozen = not recovers
    time.sleep(1.1)
    assert ended == []

    def late(data: bytes, media: bytes) -> bytes:
        time.sleep(0.2)
        return prompt(data, media)

    monkeypatch.setattr(peer, "exchange", late)
    deadline = time.monotonic() + WAIT
    while world.ask("a", '{"max_tokens": 2}').result() != ("bc", "length"):
        assert time.monotonic() < deadline
        if ended:
            peer.frozen = False
        time.sleep(0.02)
    assert set(ended) == (set() if recovers else {lost})
    world.engine.close()


def test_a_worker_that_answers_nothing_is_ended_by_a_request_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """That one is refused at once: the call that hangs tells enough."""
    world, ended = World(LimitsConfig(stall_seconds=0.7)), list[int]()
    monkeypatch.setattr("epd_orchestrator.process.runs", lambda _: True)
    monkeypatch.setattr("epd_orchestrator.process.end", ended.append)
    assert world.ask("a", '{"max_tokens": 2}').result() == ("bc", "length")
    peer, go_on = world.peers["prefill"], threading.Event()
    prompt = peer.exchange
    monkeypatch.setattr(peer, "exchange", lambda data, media: go_on.wait(WAIT) and prompt(data, media))
    assert world.ask("a", '{"max_tokens": 2}').result()[1] == "unavailable"
    time.sleep(0.8)
    assert ended == []
    assert world.ask("a", '{"max_tokens": 2}').result()[1] == "unavailable"
    assert ended == [peer.pid]
    go_on.set()
    world.engine.close()


def test_a_defect_of_the_core_fails_its_requests_and_no_later_one(world: World) -> None:
    world.peers["prefill"].frozen = True
    client = world.ask("a")

    def broken(*_: object) -> None:
        raise ZeroDivisionError("broken")

    world.engine._hub._core.complete = broken  # type: ignore[method-assign]
    world.peers["prefill"].frozen = False
    assert client.result()[1] == "internal"
    assert "ZeroDivisionError" in client.message()
    assert world.ask("a", '{"max_tokens": 2}').result() == ("bc", "length")


def test_after_a_defect_of_the_core_nobody_works_beside_plans_of_the_old_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder still writes to the arena of prefill."""
    monkeypatch.setattr("epd_orchestrator.process.runs", lambda _: True)
    world.peers["encoder"].frozen = world.peers["prefill"].frozen = True
    reading = world.ask("Read.", images=(png(),))
    # Prefill has the text before the image.
    wait_until(lambda: bool(world.peers["encoder"].plans and world.peers["prefill"].plans))

    def broken(*_: object) -> None:
        raise ZeroDivisionError("broken")

    world.engine._hub._core.complete = broken  # type: ignore[method-assign]
    world.peers["prefill"].frozen = False
    assert reading.result()[1] == "internal"
    client = world.ask("a", '{"max_tokens": 2}')
    time.sleep(0.5)
    assert [link.name for link in world.engine._hub.links if link.info] == []
    world.peers["encoder"].frozen = False
    assert client.result() == ("bc", "length")


def test_a_defect_of_intake_fails_its_request_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd_orchestrator.intake.positions", lambda *_: 1 / 0)
    assert world.ask("a").result()[1] == "internal"
    monkeypatch.undo()
    assert world.ask("a", '{"max_tokens": 1}').result() == ("b", "length")


@pytest.mark.parametrize(
    ("step", "tokens"),
    [
        ("detokenizer.Detokenizer.push", 2000),
        ("detokenizer.Detokenizer.flush", 2),
        ("metrics.Metrics.first_token", 2000),
        ("metrics.Metrics.ended", 2),
    ],
)
def test_a_defect_on_the_way_of_an_answer_fails_its_request_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str, tokens: int
) -> None:
    monkeypatch.setattr(f"epd_orchestrator.{step}", lambda *_: 1 / 0)
    broken = world.ask("a", f'{{"max_tokens": {tokens}}}')
    assert broken.result()[1] == "internal"
    assert "ZeroDivisionError" in broken.message()
    monkeypatch.undo()
    assert world.ask("a", '{"max_tokens": 1}').result() == ("b", "length")


@pytest.mark.parametrize("step", ["next_work", "check_progress", "next_call", "take_reply"])
def test_a_thread_that_fails_goes_on(world: World, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    method, failed = getattr(world.engine._hub, step), threading.Event()

    def fail_once(*arguments: Any) -> Any:
        if failed.is_set() or (arguments and arguments[0].name != "prefill"):
            return method(*arguments)
        failed.set()
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(world.engine._hub, step, fail_once)
    assert world.ask("a", '{"max_tokens": 2}').result()[1] in ("length", "unavailable")
    assert failed.wait(WAIT)
    wait_until(lambda: world.ask("a", '{"max_tokens": 2}').result() == ("bc", "length"))
    world.peers["decode"].seconds = 0.01
    leaving = world.ask("a", '{"max_tokens": 2000}')
    leaving.gone = True
    assert leaving.result()[1] == "cancelled"


def test_a_thread_that_fails_again_and_again_pauses(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[object] = []
    monkeypatch.setattr(world.engine._hub, "next_call", lambda link: tries.append(link) or 1 / 0)
    world.ask("a", '{"max_tokens": 2}')
    wait_until(lambda: len(tries) >= 3)
    time.sleep(0.3)
    assert len(tries) <= 6
    monkeypatch.undo()
    wait_until(lambda: world.ask("a", '{"max_tokens": 2}').result() == ("bc", "length"))


def test_no_instance_is_blamed_when_the_server_stops(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.peers["decode"].seconds = 0.01
    client = world.ask("a", '{"max_tokens": 2000}')
    assert client.started.wait(WAIT)
    prepare, go_on = world.engine._intake.prepare, threading.Event()

    def prepare_late(*query: Any) -> Prepared:
        assert go_on.wait(WAIT)
        return prepare(*query)

    def refuse(*_: bytes) -> bytes:
        raise ServerStoppingError("Server not ready")

    monkeypatch.setattr(world.engine._intake, "prepare", prepare_late)
    late = world.ask("a")
    for peer in world.peers.values():
        monkeypatch.setattr(peer, "exchange", refuse)
    for each in (client, late, world.ask("a")):
        assert each.result()[1] == "unavailable"
        assert each.message() == "the server is stopping; send the request again later"
        go_on.set()
    monkeypatch.undo()  # a call is answered: the server did not stop
    wait_until(lambda: world.ask("a", '{"max_tokens": 1}').result() == ("b", "length"))


def test_a_worker_that_is_replaced_between_two_calls_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_orchestrator.link.WAIT_S", 0.01)
    peer = world.peers["prefill"]
    exchange = peer.exchange

    def replaced(data: bytes, media: bytes) -> bytes:
        monkeypatch.setattr(peer, "exchange", exchange)
        peer.start()
        return exchange(data, media)

    peer.frozen = True
    client = world.ask("a", '{"max_tokens": 1}')
    wait_until(lambda: bool(peer.plans))
    monkeypatch.setattr(peer, "exchange", replaced)
    assert client.result()[1] == "unavailable"
    peer.frozen = False
    assert world.ask("a", '{"max_tokens": 1}').result() == ("b", "length")


def test_a_worker_that_is_replaced_while_nothing_is_under_way_takes_no_plan_for_the_one_before(world: World) -> None:
    """It would read what is not in its arenas: here an embedding that its predecessor had."""
    images = (png(),)
    assert world.ask("Read.", '{"max_tokens": 1}', images=images).result()[1] == "length"
    world.peers["prefill"].start()
    wait_until(lambda: world.ask("Read.", '{"max_tokens": 1}', images=images).result()[1] == "length")
    assert len(world.peers["encoder"].media) == 2


def test_what_plans_for_a_replaced_idle_worker_name_is_in_use_no_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made while it is asked who it is, and an embedding's blocks are those of another instance."""
    assert world.ask("Read.", '{"max_tokens": 1}', images=(png(),)).result()[1] == "length"
    hub, peer = world.engine._hub, world.peers["encoder"]
    link, exchange = hub._links["encoder"], peer.exchange

    def late(data: bytes, media: bytes) -> bytes:
        wait_until(lambda: bool(link.outbox or link.submitted))
        return exchange(data, media)

    wait_until(lambda: hub.idle and time.monotonic() - link.replied > 0.5)
    peer.start()
    monkeypatch.setattr(peer, "exchange", late)
    assert world.ask("Read.", '{"max_tokens": 1}', images=(png(84),)).result()[1] == "length"
    assert link.info
    assert link.info.pid == peer.pid
    assert hub.stats().embedding_blocks_used == 0


def test_closing_ends_open_requests() -> None:
    before = set(threading.enumerate())
    world = World()
    world.peers["decode"].seconds = 0.01
    clients = [world.ask("a", '{"max_tokens": 2000}') for _ in range(3)]
    assert clients[0].started.wait(WAIT)
    world.engine.close()
    assert [client.result()[1] for client in clients] == ["cancelled"] * 3
    assert set(threading.enumerate()) == before


def test_a_random_load_with_losses_and_cancellations_ends_each_request_once(world: World) -> None:
    rng = random.Random(0)
    for peer in world.peers.values():
        peer.seconds = 0.002
    clients = []
    for step in range(120):
        images = (png(28 * rng.randrange(1, 5)),) * rng.randrange(3)
        clients.append(world.ask("a", f'{{"max_tokens": {rng.randrange(1, 30)}}}', images=images))
        if rng.random() < 0.3:
            rng.choice(clients).gone = True
        if step % 40 == 20:
            world.peers[rng.choice(list(world.peers))].start()  # killed and reloaded at once
        time.sleep(rng.random() * 0.01)
    reasons = {client.result()[1] for client in clients}
    assert reasons <= {"length", "cancelled", "unavailable"}
    assert all(client.finals == 1 for client in clients)


def test_metrics_add_up(world: World) -> None:
    world.peers["decode"].seconds = 0.005
    for _ in range(3):
        world.ask("a", '{"max_tokens": 5}').result()
    world.ask("a", '{"max_tokens": 0}').result()

    def total(family: str, **labels: str) -> float:
        return sum(value.value for value in world.values if value.family == family and value.labels == labels)

    assert total("epd_requests_total", reason="length") == 3
    assert total("epd_requests_total", reason="invalid_argument") == 1
    assert total("epd_tokens_total", stage="prefill") == 3
    assert total("epd_tokens_total", stage="decode") == 12
    assert total("epd_class_tokens_total", **{"class": "sand"}) == 3
    waits = [value for value in world.values if value.family == "epd_class_wait_seconds"]
    assert [value.labels for value in waits] == [{"class": "sand"}] * 3
    assert all(0 <= value.value < 10 for value in waits)
    assert len([value for value in world.values if value.family == "epd_time_to_first_token_seconds"]) == 3
    assert len([value for value in world.values if value.family == "epd_inter_token_seconds"]) == 12
