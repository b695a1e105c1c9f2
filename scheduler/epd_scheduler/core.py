"""The scheduling core: owns every queue, block and decision; plans in, outcomes out, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from epd_scheduler import batching, encoding, handover
from epd_scheduler.assess import Assessor
from epd_scheduler.blocks import BlockPool
from epd_scheduler.config import Config, SchedulerConfig
from epd_scheduler.embeddings import EmbeddingPool
from epd_scheduler.instance import Flight, Instance
from epd_scheduler.lifecycle import Lifecycle
from epd_scheduler.memory import Memory
from epd_scheduler.order import EDF, FCFS, Order
from epd_scheduler.profile import Profile
from epd_scheduler.protocol import ArenaInfo, EncodePlan, MigratePlan, Outcome, Plan, WorkerInfo
from epd_scheduler.request import Event, RefusedError, Request
from epd_scheduler.rps import RPS
from epd_scheduler.sequence import Sequence
from epd_scheduler.stats import Stats

_MOST_FAILURES = 2  # plans that may fail under a request before it fails itself


class Core:
    """Requests and worker instances in, plans and events out.

    `now` is an argument everywhere: the same object is driven by Triton, by a simulator and by tests. Not
    thread-safe; the caller serialises.
    """

    def __init__(self, config: Config, workers: Iterable[str], profile: Profile | None = None) -> None:
        """`workers` are the instances that will join or be lost; until then requests wait for them.

        Raises ProfileError if the order needs a profile and there is none.
        """
        self.config = config
        self.order: Order = make_order(config.scheduler, profile)
        self._assessor = Assessor(config.scheduler, profile)
        self.instances: dict[str, Instance] = {}
        self.sequences: dict[int, Sequence] = {}  # all that have not ended
        self.handover: dict[int, Sequence] = {}  # prefilled, on the way to a decode instance
        self.memory = Memory(self)
        self.counters = Stats()
        self.life = Lifecycle(self)  # ends and preempts sequences
        self._awaited = set(workers)
        self._lost: dict[str, tuple[str, ...]] = {}  # name -> roles
        self._undead: list[Instance] = []  # lost ones whose plans may run yet
        self._plans: list[Plan] = []
        self._next_plan = 0

    # Instances

    def join(self, info: WorkerInfo, now: float) -> None:
        """An instance is alive. One that comes back with the same name is another one: the old one is lost."""
        self._remove(info.name, now)
        self._awaited.discard(info.name)
        self._lost.pop(info.name, None)
        kv, embeddings = self._kv_pool(info.kv), self._embedding_pool(info.embedding)
        self.instances[info.name] = Instance(info, kv, embeddings, self.config.scheduler.window(info.stages))

    def lose(self, name: str, now: float) -> None:
        """An instance is dead or given up: its plans have no outcome, what only it held must be made again elsewhere.

        It may run on and write to what its plans name, so those blocks are kept back until `reclaim`.
        """
        self._awaited.discard(name)
        instance = self._remove(name, now)
        self._lost.setdefault(name, instance.info.roles if instance else ())
        self.life.fail_unserved(now)

    def reclaim(self, pid: int) -> None:
        """A lost instance's process is idle or gone: what its plans named can be handed out."""
        for instance in [each for each in self._undead if each.info.pid == pid]:
            self._undead.remove(instance)
            for flight in instance.flights.values():
                self.life.forget_flight(flight)

    def in_flight(self, name: str) -> int:
        """Plans without an outcome on an instance."""
        instance = self.instances.get(name)
        return len(instance.flights) if instance else 0

    # Requests

    def add(self, request: Request, now: float) -> None:  # noqa: ARG002
        """Queue a request. Raises RefusedError if it can never be served or nobody is there to serve it."""
        self.memory.check_fits(request)
        sequence = Sequence(request)
        sequence.klass, sequence.deadline = self._assessor.assess(request, apart=self._encodes_apart())
        if self.order.protects(sequence.klass) and not self.memory.fits_at_once(request):
            sequence.klass = "pebble"  # whatever the client says: it cannot start with all its memory
        sequence.reserves = self.order.protects(sequence.klass)
        if reason := self.unserved(sequence):
            raise RefusedError("unavailable", reason)
        self.sequences[request.seq] = sequence
        self.order.add(sequence)

    def cancel(self, seq: int, now: float) -> None:
        """End a request at the client's wish; nothing happens if it has ended."""
        if sequence := self.sequences.get(seq):
            self.life.end(sequence, now, "cancelled", "cancelled by the client")

    def stop(self, seq: int, now: float) -> None:
        """End a request whose text matched a stop string; nothing happens if it has ended."""
        if sequence := self.sequences.get(seq):
            self.life.end(sequence, now, "stop")

    def fail(self, seq: int, message: str, now: float) -> None:
        """End a request for a fault outside the core; nothing happens if it has ended."""
        if sequence := self.sequences.get(seq):
            self.life.end(sequence, now, "internal", message)

    # Scheduling

    def step(self, now: float) -> list[Plan]:
        """Plan all that can be planned now; the caller submits each plan to its instance."""
        self.memory.begin_step()
        for instance in self.instances.values():
            if instance.batch_next:
                batching.plan_batches(self, instance, now)
        handover.plan_migrations(self, now)  # before the encodings, for it may queue a sequence again
        encoding.plan_encodes(self, now)
        for instance in self.instances.values():
            batching.plan_batches(self, instance, now)
        plans, self._plans = self._plans, []
        return plans

    def complete(self, outcome: Outcome, now: float) -> None:
        """Take in the outcome of a plan; one of a plan that is not in flight (its instance was lost) is ignored."""
        for instance in self.instances.values():
            flight = instance.flights.pop(outcome.plan, None)
            if flight is None:
                continue
            if isinstance(flight.plan, EncodePlan):
                encoding.complete_encode(self, instance, flight, outcome, now)
            elif isinstance(flight.plan, MigratePlan):
                handover.complete_migration(self, instance, flight, outcome, now)
            else:
                batching.complete_batch(self, instance, flight, outcome, now)
            return

    def drain(self) -> list[Event]:
        """Events since the last call, in order."""
        return self.life.drain()

    def stats(self) -> Stats:
        """Numbers for metrics."""
        return self.counters.snapshot(self)

    # For the planning modules

    def new_plan_id(self) -> int:
        """Ids are never reused."""
        self._next_plan += 1
        return self._next_plan

    def submit(self, instance: Instance, flight: Flight) -> None:
        """Put a plan in flight."""
        instance.flights[flight.plan.id] = flight
        self._plans.append(flight.plan)
        instance.batch_next = instance.window == 1 and isinstance(flight.plan, EncodePlan)

    def doing(self, role: str) -> list[Instance]:
        """Live instances of a stage."""
        return [instance for instance in self.instances.values() if role in instance.info.roles]

    def unserved(self, sequence: Sequence) -> str:
        """Why nobody can serve a sequence; empty while somebody can, or may still join."""
        if self._awaited:
            return ""
        needs = ["prefill", "decode"]
        if sequence.phase == "decode":
            needs = ["decode"]
        elif sequence.tracker.needs_encoding():
            needs.insert(0, "encode")
        for role in needs:
            if not self.doing(role):
                return f"no live instance for stage '{role}' {self._remedy(role)}"
        return ""

    def failed_plan(self, sequence: Sequence, message: str, now: float) -> None:
        """A plan failed under a sequence through no fault of its own: compute it again, a few times at most."""
        sequence.failures += 1
        if sequence.failures > _MOST_FAILURES:
            self.life.end(sequence, now, "internal", f"failed {sequence.failures} times, last: {message}")
        else:
            self.life.requeue(sequence, now, "failed")

    def _remedy(self, role: str) -> str:
        """Who is missing from a stage, and how to bring it back. The roles of what never joined are not known."""
        lost = sorted(name for name, roles in self._lost.items() if role in roles or not roles)
        if not lost:
            return "(none was configured); add one to the 'workers' of the orchestrator's model"
        commands = " or ".join(f"`epd reload {name}`" for name in lost)
        return f"(lost: {', '.join(lost)}); bring it back with {commands}, then send the request again"

    def _remove(self, name: str, now: float) -> Instance | None:
        """Take out an instance that is not what it was; its sequences go back to the queue."""
        if (instance := self.instances.pop(name, None)) is None:
            return None
        for flight in instance.flights.values():
            for embedding in flight.embeddings:
                assert flight.pool is not None
                flight.pool.abandon(embedding)
        if instance.flights:
            self._undead.append(instance)
        for sequence in list(self.sequences.values()):
            if sequence.seq in instance.placed:
                self.life.requeue(sequence, now, "lost")
                sequence.prefill = None
        return instance

    def _encodes_apart(self) -> bool:
        """True if encoders and prefill instances share no device."""
        encode, prefill = ({instance.info.device for instance in self.doing(role)} for role in ("encode", "prefill"))
        return encode.isdisjoint(prefill)

    def _kv_pool(self, arenas: tuple[ArenaInfo, ...]) -> BlockPool | None:
        """Instances that share arenas share the pool, so that a hand-over between them moves no byte."""
        if not arenas:
            return None
        for other in self._all_instances():
            if other.kv and other.info.kv == arenas:
                return other.kv
        return BlockPool(arenas[0].id, arenas[0].shape[0], arenas[0].shape[3])

    def _embedding_pool(self, arena: ArenaInfo | None) -> EmbeddingPool | None:
        """As `_kv_pool`; and encoders keep an arena mapped and write to it when its instance is lost."""
        if arena is None:
            return None
        for other in self._all_instances():
            for pool in (other.embeddings, *(flight.pool for flight in other.flights.values())):
                if pool and pool.arena == arena:
                    return pool
        return EmbeddingPool(arena)

    def _all_instances(self) -> Iterator[Instance]:
        """Those that may write to an arena: live ones, and lost ones that may run yet."""
        yield from self.instances.values()
        yield from self._undead


def make_order(config: SchedulerConfig, profile: Profile | None) -> Order:
    """The policy that the configuration names."""
    if config.order == "rps":
        return RPS(config.rps, config.token_budget, profile)
    return EDF() if config.order == "edf" else FCFS()
