"""Worker instances that execute plans on a model of the arenas, for tests of the core.

A KV slot holds what the token was made of (its id, or the embedding row that replaced it), a sampled token is a hash
of everything before it. So a block used twice, a stale embedding, a wrong position or a lost chunk changes tokens.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections import deque

import msgspec
import numpy as np
from epd_scheduler.core import Core
from epd_scheduler.protocol import (
    ArenaInfo,
    BatchPlan,
    EncodePlan,
    MigratePlan,
    Outcome,
    Plan,
    Row,
    Sample,
    Sampling,
    WorkerInfo,
)
from epd_scheduler.request import EndEvent, Item, Request, TokenEvent

VOCABULARY = 50
PLACEHOLDER = 49
EOS = 0

Slot = object


def next_token(contents: list[Slot]) -> int:
    return zlib.crc32(repr(contents).encode()) % VOCABULARY


def content_of(request: Request) -> list[Slot]:
    contents: list[Slot] = list(request.tokens)
    for item in request.items:
        row = item.start
        for unit, rows in enumerate(item.units):
            for index in range(rows):
                contents[row] = (item.media, unit, index)
                row += 1
    return contents


def expected_tokens(request: Request) -> list[int]:
    """What greedy generation gives when nothing goes wrong."""
    contents, output = content_of(request), []
    while len(output) < request.max_tokens:
        token = next_token(contents)
        if token in request.sampling.stop_token_ids:
            break
        output.append(token)
        contents.append(token)
    return output


def make_request(seq: int, parts: list[int | tuple[int, ...]], max_tokens: int, media: list[int]) -> Request:
    """`parts`: an int is that many text tokens, a tuple the units of an item; `media` names each item's content."""
    tokens: list[int] = []
    items = []
    for part in parts:
        if isinstance(part, int):
            tokens += [(seq * 7 + index) % 40 + 1 for index in range(part)]
        else:
            content = media[len(items)]
            items.append(Item(key=f"media{content}", media=content, start=len(tokens), units=part))
            tokens += [PLACEHOLDER] * sum(part)
    positions = np.arange(len(tokens), dtype=np.int32)[None]
    sampling = Sampling(stop_token_ids=(EOS,))
    return Request(seq, tuple(tokens), positions, 0, tuple(items), sampling, max_tokens, arrival=float(seq))


class Arenas:
    """All memory of all devices."""

    def __init__(self) -> None:
        self._slots: dict[tuple[str, int, int], Slot] = {}

    def write(self, arena: ArenaInfo, block: int, offset: int, content: Slot) -> None:
        assert 0 <= block < arena.shape[0]
        self._slots[arena.id, block, offset] = content

    def read(self, arena: ArenaInfo, block: int, offset: int) -> Slot:
        return self._slots.get((arena.id, block, offset), "never written")


class SimulatedWorker:
    """One instance: plans run in order of submission, and their outcomes come back in that order."""

    def __init__(self, info: WorkerInfo, arenas: Arenas) -> None:
        self.info = info
        self.arenas = arenas
        self.submitted: deque[Plan] = deque()
        self.finished: deque[Outcome] = deque()
        self.last_token: dict[int, int] = {}
        self.bad_media: set[int] = set()
        self.fail_next = False
        self.has_failed = False

    def run_one(self, now: float) -> None:
        plan = self.submitted.popleft()
        for seq in () if isinstance(plan, EncodePlan) else plan.close:
            self.last_token.pop(seq, None)
        if self.fail_next:
            self.fail_next = False
            self.has_failed = True
            self.finished.append(Outcome(plan.id, now, now, error="out of memory"))
        elif isinstance(plan, EncodePlan):
            self.finished.append(self._encode(plan, now))
        elif isinstance(plan, MigratePlan):
            self._migrate(plan)
            self.finished.append(Outcome(plan.id, now, now))
        else:
            self.finished.append(self._forward(plan, now))

    def _encode(self, plan: EncodePlan, now: float) -> Outcome:
        errors = {}
        block_size = plan.arena.shape[1]
        for index, unit in enumerate(plan.units):
            if unit.media in self.bad_media:
                errors[index] = "truncated"
                continue
            for row in range(unit.rows):
                block = unit.blocks[row // block_size]
                self.arenas.write(plan.arena, block, row % block_size, (unit.media, unit.unit, row))
        return Outcome(plan.id, now, now, unit_errors=errors)

    def _migrate(self, plan: MigratePlan) -> None:
        for source, target in zip(plan.source_blocks, plan.blocks, strict=True):
            for offset in range(self.info.kv[0].shape[3]):
                content = self.arenas.read(plan.source[0], source, offset)
                self.arenas.write(self.info.kv[0], target, offset, content)

    def _forward(self, plan: BatchPlan, now: float) -> Outcome:
        samples = []
        for row in plan.rows:
            if row.open:
                self.last_token[row.seq] = -1
            if not row.tokens and row.seq not in self.last_token:
                assert self.has_failed, f"row of {row.seq} names a token that nobody sampled"
                return Outcome(plan.id, now, now, error=f"no token was sampled for {row.seq}: its last plan failed")
            token = self._run_row(row)
            if row.sample:
                self.last_token[row.seq] = token
                samples.append(Sample(row.seq, token))
        return Outcome(plan.id, now, now, samples=tuple(samples))

    def _run_row(self, row: Row) -> int:
        kv = self.info.kv[0]
        inputs: list[Slot] = list(row.tokens) if row.tokens else [self.last_token[row.seq]]
        positions = np.frombuffer(row.positions, np.int32)
        assert positions.tolist() == list(range(row.start, row.start + len(inputs)))
        for span in row.embeds:
            assert self.info.embedding is not None
            size = self.info.embedding.shape[1]
            for index in range(span.count):
                assert inputs[span.at + index] == PLACEHOLDER
                at = span.first + index
                inputs[span.at + index] = self.arenas.read(self.info.embedding, span.blocks[at // size], at % size)
        size = kv.shape[3]
        for index, content in enumerate(inputs, row.start):
            self.arenas.write(kv, row.blocks[index // size], index % size, content)
        end = row.start + len(inputs)
        return next_token([self.arenas.read(kv, row.blocks[i // size], i % size) for i in range(end)])


class Cluster:
    """A core and its simulated workers, driven in random order."""

    def __init__(self, core: Core, infos: list[WorkerInfo], rng: random.Random) -> None:
        self.core = core
        self.rng = rng
        self.arenas = Arenas()
        self.workers: dict[str, SimulatedWorker] = {}
        self.undead: list[SimulatedWorker] = []  # given up, but they still work off their plans
        self.returning: dict[str, WorkerInfo] = {}  # who joins when its undead predecessor is done
        self._pids = itertools.count(1)
        self.now = 0.0
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, EndEvent] = {}
        self.bad_media: set[int] = set()
        for info in infos:
            self.join(info)

    def join(self, info: WorkerInfo) -> None:
        """As a new process."""
        info = msgspec.structs.replace(info, pid=next(self._pids))
        self.workers[info.name] = worker = SimulatedWorker(info, self.arenas)
        worker.bad_media = self.bad_media
        self.core.join(info, self.now)

    def lose(self, name: str, undead: bool = False) -> None:
        """An instance dies, or, `undead`, is given up while it runs on."""
        worker = self.workers.pop(name)
        self.core.lose(name, self.now)
        if undead:
            self.undead.append(worker)
        else:
            self.core.reclaim(worker.info.pid)
        self.collect()

    def _run_undead(self, worker: SimulatedWorker) -> None:
        if worker.submitted:
            worker.run_one(self.now)
            return
        name = worker.info.name
        self.undead.remove(worker)
        self.core.reclaim(worker.info.pid)
        if info := self.returning.pop(name, None):
            self.join(info)

    def add(self, request: Request) -> None:
        self.tokens[request.seq] = []
        self.core.add(request, self.now)

    def submit(self) -> list[Plan]:
        self.now += 0.001
        plans = self.core.step(self.now)
        for plan in plans:
            self.check(plan)
            self.workers[plan.instance].submitted.append(plan)
        self.collect()
        return plans

    def check(self, plan: Plan) -> None:
        worker = self.workers[plan.instance]
        scheduler = self.core.config.scheduler
        assert self.core.in_flight(plan.instance) <= worker.info.stages + scheduler.async_scheduling
        if isinstance(plan, BatchPlan):
            assert sum(len(row.tokens) or 1 for row in plan.rows) <= scheduler.token_budget
            assert len(plan.rows) <= scheduler.max_rows
            assert len({row.seq for row in plan.rows}) == len(plan.rows)

    def collect(self) -> None:
        for event in self.core.drain():
            assert event.seq not in self.ends, "an event after the end"
            if isinstance(event, TokenEvent):
                self.tokens[event.seq].append(event.token)
            else:
                self.ends[event.seq] = event

    def advance(self) -> bool:
        """Run one plan or deliver one outcome, at random; False if nothing is in flight."""
        actions = [(w, False) for w in self.workers.values() if w.submitted]
        actions += [(w, True) for w in self.workers.values() if w.finished]
        actions += [(w, False) for w in self.undead]
        if not actions:
            return False
        worker, deliver = self.rng.choice(actions)
        self.now += 0.001
        if worker in self.undead:
            self._run_undead(worker)
        elif deliver:
            self.core.complete(worker.finished.popleft(), self.now)
        else:
            worker.run_one(self.now)
        self.collect()
        return True

    def run(self, most_steps: int = 200_000) -> None:
        """Until every request has ended and no plan is in flight."""
        for _ in range(most_steps):
            self.submit()
            if not self.advance():
                assert not self.core.sequences, f"stuck with {list(self.core.sequences)}"
                return
        raise AssertionError("no end in sight")

    def assert_empty(self) -> None:
        stats = self.core.stats()
        assert stats.kv_blocks_used == 0
        assert stats.embedding_blocks_used == 0
        assert stats.in_flight == stats.queued == stats.running == 0
        for instance in self.core.instances.values():
            assert not instance.placed
            assert not instance.decoding


def worker_infos(
    topology: str, kv_blocks: int, block_size: int, embedding_blocks: int, stages: int, generation: str = ""
) -> list[WorkerInfo]:
    """Topologies: a dash separates devices; in "e-pd" one instance does P and D, in "e-p+d" two share the arenas."""

    def kv(device: str) -> tuple[ArenaInfo, ...]:
        return (
            ArenaInfo(f"kv@{device}{generation}", "kv", device, "", (kv_blocks, 1, 2, block_size, 1, 1), "float32"),
        )

    def emb(device: str) -> ArenaInfo:
        return ArenaInfo(f"emb@{device}{generation}", "embedding", device, "", (embedding_blocks, 4, 1), "float32")

    def encoder(name: str) -> WorkerInfo:
        return WorkerInfo(name, ("encode",), "cpu:0", 1)

    def prefill(name: str, device: str) -> WorkerInfo:
        return WorkerInfo(name, ("prefill",), device, stages, kv(device), emb(device))

    def decode(name: str, device: str) -> WorkerInfo:
        return WorkerInfo(name, ("decode",), device, stages, kv(device))

    both = WorkerInfo("language", ("prefill", "decode"), "cpu:1", stages, kv("cpu:1"), emb("cpu:1"))
    every = WorkerInfo("all", ("encode", "prefill", "decode"), "cpu:1", stages, kv("cpu:1"), emb("cpu:1"))
    return {
        "e-p-d": [encoder("encoder"), prefill("prefill", "cpu:1"), decode("decode", "cpu:2")],
        "2e-p-d": [encoder("encoder"), encoder("encoder_1"), prefill("prefill", "cpu:1"), decode("decode", "cpu:2")],
        "e-2p-2d": [
            encoder("encoder"),
            prefill("prefill", "cpu:1"),
            prefill("prefill_1", "cpu:3"),
            decode("decode", "cpu:2"),
            decode("decode_1", "cpu:4"),
        ],
        "e-p+d": [encoder("encoder"), prefill("prefill", "cpu:1"), decode("decode", "cpu:1")],
        "e-p+d-d": [
            encoder("encoder"),
            prefill("prefill", "cpu:1"),
            decode("decode", "cpu:1"),
            decode("decode_1", "cpu:2"),
        ],
        "e-pd": [encoder("encoder"), both],
        "epd": [every],
    }[topology]
