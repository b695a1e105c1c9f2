"""The event loop: arrivals and outcomes in order of time, and the core's plans to the simulated instances."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from epd_scheduler.config import Config
from epd_scheduler.core import Core
from epd_scheduler.metrics_summary import SLO, RequestResult
from epd_scheduler.profile import Profile
from epd_scheduler.protocol import BatchPlan, Outcome, Plan, Sample
from epd_scheduler.request import EndEvent, RefusedError, Request, TokenEvent
from epd_scheduler.simulation.devices import Busy, Device, SimulatedInstance, Timing
from epd_scheduler.simulation.images import Vision
from epd_scheduler.simulation.requests import Template, make_request
from epd_scheduler.simulation.topology import InstanceSpec, worker_infos
from epd_scheduler.stats import Stats
from epd_scheduler.workload import RequestSpec


class SimulationError(RuntimeError):
    """The core made no progress, which is a fault of the core: the message names the requests that wait."""


@dataclass
class Run:
    """What a simulated workload came to. Times are seconds from the start."""

    results: list[RequestResult]  # in order of arrival
    prompt_tokens: list[int]  # of each result
    stats: Stats
    busy: list[Busy] = field(default_factory=list)  # only if recorded
    token_times: dict[int, list[float]] = field(default_factory=dict)  # by index of the result; only if recorded


class _Progress:
    """A request under way."""

    def __init__(self, spec: RequestSpec, request: Request) -> None:
        self.spec = spec
        self.request = request
        self.first_token: float | None = None
        self.tokens = 0
        self.result: RequestResult | None = None


class Simulation:
    """Drives a core over a workload."""

    def __init__(
        self,
        config: Config,
        instances: tuple[InstanceSpec, ...],
        profile: Profile,
        *,
        vision: Vision,
        timing: Timing | None = None,
        template: Template | None = None,
        profiles: dict[str, Profile] | None = None,
        record: bool = False,
    ) -> None:
        """`profiles` are those that instances name; `record` keeps what each device did and each token's time.

        Raises TopologyError, ProfileError.
        """
        self._timing = timing or Timing()
        self._vision = vision
        self._template = template or Template()
        self._record = record
        infos = worker_infos(instances, config)
        self._core = Core(config, [info.name for info, _ in infos], profile)
        devices: dict[str, Device] = {}
        self._instances: dict[str, SimulatedInstance] = {}
        for info, spec in infos:
            device = devices.setdefault(info.device, Device(info.stages))
            own = (profiles or {})[spec.profile] if spec.profile else profile
            self._instances[info.name] = SimulatedInstance(info, own, self._timing, device)
            self._core.join(info, 0.0)
        self._events: list[tuple[float, int, Outcome | _Progress]] = []
        self._order = itertools.count()  # equal times in order of scheduling
        self._requests: list[_Progress] = []
        self._run = Run([], [], Stats())

    def run(self, workload: Iterable[RequestSpec], slos: Mapping[str, SLO] = MappingProxyType({})) -> Run:
        """Simulate until every request has ended. Raises SimulationError.

        As in `epd bench`, a request states the time to first token that its kind's SLO allows, if there is one.
        """
        for seq, spec in enumerate(workload):
            slo = slos.get(spec.kind, SLO()).ttft_s
            request = make_request(seq, spec, self._vision, self._template, slo if math.isfinite(slo) else None)
            progress = _Progress(spec, request)
            self._requests.append(progress)
            self._at(spec.at + self._timing.intake_s, progress)
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:
                self._apply(heapq.heappop(self._events)[2], now)
            for plan in self._core.step(now):
                self._submit(plan, now)
            self._collect(now)
        if self._core.sequences:
            raise SimulationError(f"requests {sorted(self._core.sequences)[:10]} wait for ever; nothing is in flight")
        self._run.results = [progress.result for progress in self._requests if progress.result]
        self._run.prompt_tokens = [len(progress.request.tokens) for progress in self._requests]
        self._run.stats = self._core.stats()
        return self._run

    def _at(self, time: float, what: Outcome | _Progress) -> None:
        heapq.heappush(self._events, (time, next(self._order), what))

    def _apply(self, event: Outcome | _Progress, now: float) -> None:
        if isinstance(event, Outcome):
            self._core.complete(event, now)
            return
        try:
            self._core.add(event.request, now)
        except RefusedError as error:
            event.result = RequestResult(kind=event.spec.kind, arrival=event.spec.at, end=now, error=str(error))

    def _submit(self, plan: Plan, now: float) -> None:
        spans = self._instances[plan.instance].run(plan, now + self._timing.exchange_s)
        if self._record:
            self._run.busy += spans
        samples: tuple[Sample, ...] = ()
        if isinstance(plan, BatchPlan):
            samples = tuple(Sample(row.seq, 1) for row in plan.rows if row.sample)
        end = spans[-1].end
        self._at(end + self._timing.exchange_s, Outcome(plan.id, spans[0].start, end, samples))

    def _collect(self, now: float) -> None:
        now += self._timing.response_s
        for event in self._core.drain():
            progress = self._requests[event.seq]
            if isinstance(event, TokenEvent):
                progress.tokens += 1
                if progress.first_token is None:
                    progress.first_token = now
                if self._record:
                    self._run.token_times.setdefault(event.seq, []).append(now)
            else:
                progress.result = _result(progress, event, now)


def _result(progress: _Progress, event: EndEvent, now: float) -> RequestResult:
    preempted = [span.end - span.start for span in event.timeline if span.name == "preempted"]
    return RequestResult(
        kind=progress.spec.kind,
        arrival=progress.spec.at,
        first_token=progress.first_token,
        end=now,
        output_tokens=progress.tokens,
        klass=event.klass,
        preemptions=len(preempted),
        preempted_s=sum(preempted),
        error="" if event.reason in ("stop", "length") else f"{event.reason}: {event.message}",
    )
