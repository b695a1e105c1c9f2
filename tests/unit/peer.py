"""A worker instance that speaks the protocol, for tests of the orchestrator.

Its language model counts: the token after t is t + 1. Its life is in the test's hands.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque

from epd_backend.doorbell import Doorbell
from epd_scheduler.protocol import (
    ArenaInfo,
    BatchPlan,
    EncodePlan,
    Outcome,
    Plan,
    Reply,
    Role,
    Sample,
    WorkerInfo,
    decode_exchange,
    encode,
)

_pids = itertools.count(2**22 + 1)  # no real process has such a number (PID_MAX_LIMIT), so none is taken for a peer


class Peer:
    """One instance; every plan takes `seconds`."""

    def __init__(self, name: str, roles: tuple[Role, ...], blocks: int = 64, seconds: float = 0.0) -> None:
        self.name = name
        self.roles = roles
        self.blocks = blocks
        self.seconds = seconds
        self.alive = True
        self.frozen = False
        self.media: list[bytes] = []  # of the units encoded
        self.lock = threading.Condition()
        self.bell = Doorbell()
        self.start()

    def start(self) -> None:
        """(Re)start as another process, which knows nothing of before."""
        with self.lock:
            self.alive = True
            self.pid = next(_pids)
            self.plans: deque[Plan] = deque()
            self.last: dict[int, int] = {}
            self.free_at = 0.0

    def info(self) -> WorkerInfo:
        language = "encode" not in self.roles
        kv = ArenaInfo(f"kv-{self.pid}", "kv", f"cpu:{self.name}", "", (self.blocks, 1, 2, 16, 1, 8), "float32")
        embedding = ArenaInfo(f"mm-{self.pid}", "embedding", f"cpu:{self.name}", "", (self.blocks, 16, 8), "float32")
        return WorkerInfo(
            name=self.name,
            roles=self.roles,
            device=f"cpu:{self.name}",
            stages=1,
            kv=(kv,) if language else (),
            embedding=embedding if "prefill" in self.roles else None,
            pid=self.pid,
            bell=self.bell.name,
        )

    def exchange(self, data: bytes, media: bytes) -> bytes:
        message = decode_exchange(data)
        with self.lock:
            pid = self.pid
            plans = message.plans_for(pid)
            self.plans.extend(plans)
            for plan in plans:
                if isinstance(plan, EncodePlan):
                    spans = (message.media[unit.media] for unit in plan.units)
                    self.media.extend(bytes(media[at : at + size]) for at, size in spans)
        deadline = time.monotonic() + message.wait_s
        outcomes: list[Outcome] = []
        rung = False
        while True:
            with self.lock:
                if not self.alive or self.pid != pid:
                    raise ConnectionError(f"'{self.name}' is not healthy")
                if not self.frozen:
                    outcomes += self._work()
                if outcomes or not self.plans or rung or time.monotonic() >= deadline:
                    info = self.info() if message.hello else None
                    self.bell.clear()
                    return encode(Reply(tuple(outcomes), info, len(self.plans)))
            rung = self.bell.wait(0.0005)

    def _work(self) -> list[Outcome]:
        """The outcomes of the plans that are through by now."""
        done: list[Outcome] = []
        now = time.monotonic()
        while self.plans:
            begin = self.free_at or now
            if begin + self.seconds > now:
                self.free_at = begin
                return done
            self.free_at = begin + self.seconds if len(self.plans) > 1 else 0.0
            done.append(self._run(self.plans.popleft(), begin))
        return done

    def _run(self, plan: Plan, begin: float) -> Outcome:
        for seq in () if isinstance(plan, EncodePlan) else plan.close:
            self.last.pop(seq, None)
        samples = []
        for row in plan.rows if isinstance(plan, BatchPlan) else ():
            token = row.tokens[-1] if row.tokens else self.last[row.seq]
            if row.sample:
                self.last[row.seq] = token + 1
                samples.append(Sample(row.seq, token + 1, -0.5))
        return Outcome(plan.id, begin, begin + self.seconds, tuple(samples))
