"""Open-loop load: every request is sent at its scheduled time, whether or not earlier ones have been answered.

One thread, one gRPC channel, a stream a request. All requests are built before the clock starts.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import grpc
import numpy as np
from epd_scheduler.metrics_summary import SLO, RequestResult
from epd_scheduler.workload import RequestSpec
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from epd_client import payload
from epd_client.client import MODEL, OPTIONS
from epd_client.errors import as_epd_error
from epd_client.payload import TextMaker
from epd_client.tensors import parse_response, request_message
from epd_client.timeline import Timeline

LEAD_S = 0.2  # between the start of the clock and the first request


@dataclass(frozen=True)
class Prepared:
    """A request that only has to be sent."""

    spec: RequestSpec
    message: service_pb2.ModelInferRequest


@dataclass
class Observation:
    """What the load generator saw of a request. Times are seconds since the start of the clock."""

    spec: RequestSpec
    sent: float = 0.0
    tokens: list[float] = field(default_factory=list)  # when each output token came
    input_tokens: int = 0
    end: float = 0.0
    error: str = ""
    timeline: Timeline | None = None

    @property
    def result(self) -> RequestResult:
        """For the metrics; latencies count from the scheduled arrival."""
        timeline = self.timeline
        preempted = [span.end - span.start for span in timeline.spans if span.name == "preempted"] if timeline else []
        return RequestResult(
            kind=self.spec.kind,
            klass=timeline.klass if timeline else "",
            arrival=self.spec.at,
            first_token=self.tokens[0] if self.tokens else None,
            end=self.tokens[-1] if self.tokens and not self.error else self.end,
            output_tokens=len(self.tokens),
            preemptions=len(preempted),
            preempted_s=sum(preempted),
            error=self.error,
        )


def prepare(
    specs: Sequence[RequestSpec],
    text: TextMaker,
    slos: Mapping[str, SLO] = MappingProxyType({}),
    *,
    seed: int = 0,
    distinct: bool = True,
) -> list[Prepared]:
    """Build the requests of a workload; each generates exactly its number of output tokens, greedily.

    A request states the time to first token that its kind's SLO allows, for servers that go by deadlines.
    """
    return [_prepare(spec, index, text, slos.get(spec.kind), seed, distinct) for index, spec in enumerate(specs)]


def run(
    url: str, requests: Sequence[Prepared], *, timeout_s: float = 300.0, done: Callable[[], None] = lambda: None
) -> list[Observation]:
    """Send the requests at their times and wait for all answers, each at most `timeout_s`; `done` is called after each.

    A request that fails is an observation with an error, too.
    """
    return asyncio.run(_run(url, requests, timeout_s, done))


def _prepare(spec: RequestSpec, index: int, text: TextMaker, slo: SLO | None, seed: int, distinct: bool) -> Prepared:
    random = np.random.default_rng([seed, index, 0])
    sampling: dict[str, Any] = {"max_tokens": spec.output_tokens, "min_tokens": spec.output_tokens, "ignore_eos": True}
    if slo and math.isfinite(slo.ttft_s):
        sampling["slo"] = slo.ttft_s
    message = request_message(
        MODEL,
        f"{spec.kind}-{index}",
        text.text(spec.text_tokens, random),
        images=payload.images(spec, [seed, index, 1], distinct=distinct),
        sampling=sampling,
        timeline=True,
    )
    return Prepared(spec, message)


async def _run(url: str, requests: Sequence[Prepared], timeout_s: float, done: Callable[[], None]) -> list[Observation]:
    async with grpc.aio.insecure_channel(url, OPTIONS) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        start = time.monotonic() + LEAD_S
        return await asyncio.gather(*(_one(stub, url, request, start, timeout_s, done) for request in requests))


async def _one(
    stub: service_pb2_grpc.GRPCInferenceServiceStub,
    url: str,
    request: Prepared,
    start: float,
    timeout_s: float,
    done: Callable[[], None],
) -> Observation:
    seen = Observation(request.spec)
    await asyncio.sleep(start + request.spec.at - time.monotonic())
    seen.sent = time.monotonic() - start
    try:
        await asyncio.wait_for(_stream(stub, request, start, seen), timeout_s)
    except TimeoutError:
        seen.error = f"DEADLINE_EXCEEDED: no complete answer within {timeout_s:.0f} s"
    except (grpc.RpcError, InferenceServerException) as error:
        wrapped = as_epd_error(error, url)
        seen.error = f"{wrapped.code}: {wrapped}"
    seen.end = time.monotonic() - start
    done()
    return seen


async def _stream(
    stub: service_pb2_grpc.GRPCInferenceServiceStub, request: Prepared, start: float, seen: Observation
) -> None:
    call = stub.ModelStreamInfer(iter([request.message]))
    failure: InferenceServerException | None = None
    try:
        async for response in call:  # to the end, after an error too: see Generation
            now = time.monotonic() - start
            try:
                chunk = parse_response(response)
            except InferenceServerException as error:
                failure = error
                continue
            if chunk is not None:
                seen.tokens += [now] * chunk.num_output_tokens
                seen.input_tokens = chunk.num_input_tokens or seen.input_tokens
                seen.timeline = chunk.timeline or seen.timeline
    finally:
        call.cancel()
    if failure is not None:
        raise failure
