"""Messages between the orchestrator and its worker instances.

One exchange: the orchestrator submits plans, the worker returns the outcomes that are ready. Both are
msgpack in one UINT8 tensor; encoded media bytes ride in a second tensor, joined.

Invariants
* A plan names every block that it reads and writes. A worker never chooses a block.
* Every submitted plan has exactly one outcome, unless its worker dies.
* Plans of one instance run in the order of submission, and so do their effects on its arenas.
* A worker keeps nothing of a request but its sampler state, and that only between `Row.open` and `Plan.close`.
* Times are `time.monotonic()` seconds; that clock is common to all processes of one host.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["encode", "prefill", "decode"]


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of all messages: immutable plain data."""


class ArenaInfo(Message, frozen=True):
    """One contiguous allocation on one device that other processes can map.

    kind "kv": shape `[blocks, layers, 2, block_size, kv_heads, head_dim]` (block-major, so that one block is one
    contiguous copy), holding decoder layers `first_layer ..< first_layer + layers`.
    kind "embedding": shape `[blocks, block_size, width]`.
    """

    id: str  # unique for the life of the allocation
    kind: Literal["kv", "embedding"]
    device: str  # "cpu:0", "cuda:1"
    handle: str  # name of the POSIX shared memory (CPU) or of the descriptor that holds the IPC handle (CUDA)
    shape: tuple[int, ...]
    dtype: str  # torch name: "float32", "bfloat16"
    first_layer: int = 0


class WorkerInfo(Message, frozen=True):
    """What an instance says of itself in the first exchange."""

    name: str
    roles: tuple[Role, ...]
    device: str
    stages: int  # pipeline stages inside the instance
    kv: tuple[ArenaInfo, ...] = ()  # one a pipeline stage's device; same number of blocks in each
    embedding: ArenaInfo | None = None
    weight_bytes: int = 0
    pid: int = 0
    bell: str = ""  # name of the doorbell that ends an exchange's wait
    emulated: bool = False  # it waits for a cost model's time instead of computing


class Sampling(Message, frozen=True):
    """Sampling parameters of one request; the defaults are those of vLLM, but greedy."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence tokens included unless `ignore_eos`
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives to report a token; None: nothing
    logit_bias: dict[int, float] = {}


class SamplerState(Message, frozen=True):
    """What an instance needs to continue sampling a sequence that it does not know."""

    sampling: Sampling
    prompt: tuple[int, ...] = ()  # for penalties; empty when no penalty is set
    output: tuple[int, ...] = ()  # tokens generated so far


class EmbedSpan(Message, frozen=True, array_like=True):
    """`count` consecutive tokens of a row take their input from the embedding arena.

    They replace row tokens `at ..< at + count` by embedding rows `first ..< first + count`, counted through `blocks`.
    """

    at: int
    count: int
    first: int
    blocks: tuple[int, ...]


class Row(Message, frozen=True, array_like=True):
    """One sequence's part of a batch: a prefill chunk (many tokens) or a decode step (one)."""

    seq: int
    start: int  # index in the sequence of the row's first token = tokens whose KV is already in the arena
    tokens: tuple[int, ...]  # empty: one token, the one that this instance sampled last for `seq`
    positions: bytes  # int32, C order, [3, n] (mRoPE) or [1, n]
    blocks: tuple[int, ...]  # block table that covers tokens 0 ..< start + n
    embeds: tuple[EmbedSpan, ...] = ()
    sample: bool = False  # sample the next token from the row's last hidden state
    open: SamplerState | None = None  # replaces whatever the instance holds for `seq`


class EncodeUnit(Message, frozen=True, array_like=True):
    """What the encoder computes alone: one image, or one tile or temporal slice of an item."""

    seq: int
    item: int
    unit: int  # index within the item
    media: int  # key of the media bytes in `Exchange.media`
    rows: int  # embedding rows that the unit must yield
    blocks: tuple[int, ...]  # destination, ceil(rows / block_size) blocks of the plan's arena


class EncodePlan(Message, frozen=True, tag="encode"):
    """Encode units in one batch and write their embeddings into `arena` (EPD's EP migration, without a copy)."""

    id: int
    instance: str
    arena: ArenaInfo  # destination: the consumer's embedding arena
    units: tuple[EncodeUnit, ...]


class BatchPlan(Message, frozen=True, tag="batch"):
    """One ragged forward. Prefill chunks and decode rows mix freely."""

    id: int
    instance: str
    rows: tuple[Row, ...]
    close: tuple[int, ...] = ()  # sequences whose sampler state is dropped before the rows run


class MigratePlan(Message, frozen=True, tag="migrate"):
    """Pull KV blocks of one sequence from the arenas of another instance into one's own (EPD's PD migration)."""

    id: int
    instance: str
    seq: int
    source: tuple[ArenaInfo, ...]
    source_blocks: tuple[int, ...]
    blocks: tuple[int, ...]
    close: tuple[int, ...] = ()


Plan = EncodePlan | BatchPlan | MigratePlan


class Sample(Message, frozen=True, array_like=True):
    """One sampled token."""

    seq: int
    token: int
    logprob: float = 0.0  # natural log; 0 unless logprobs were asked for
    top: tuple[tuple[int, float], ...] = ()  # alternatives, most likely first


class Outcome(Message, frozen=True):
    """What became of one plan."""

    plan: int
    start: float
    end: float
    samples: tuple[Sample, ...] = ()  # BatchPlan: one for each row with `sample`, in row order
    unit_errors: dict[int, str] = {}  # EncodePlan: index in `units` -> why it failed (the media's fault)
    error: str | None = None  # the whole plan failed (the worker's fault)


class Exchange(Message, frozen=True):
    """Orchestrator to worker."""

    plans: tuple[Plan, ...] = ()
    media: dict[int, tuple[int, int]] = {}  # media key -> (offset, size) in the MEDIA tensor
    wait_s: float = 0.0  # while plans are in progress: for a first outcome, or for a ring of the worker's bell
    hello: bool = False  # answer with WorkerInfo
    pid: int = 0  # the process that the plans are for; 0: whoever it is

    def plans_for(self, pid: int) -> tuple[Plan, ...]:
        """What process `pid` is to submit: nothing if it has taken the place of the one that the plans are for.

        They rely on what that one had in its arenas. The orchestrator learns it from `Reply.pending`.
        """
        return self.plans if self.pid in (0, pid) else ()


class Reply(Message, frozen=True):
    """Worker to orchestrator."""

    outcomes: tuple[Outcome, ...] = ()
    info: WorkerInfo | None = None
    pending: int = 0  # plans still without an outcome


_encoder = msgspec.msgpack.Encoder()
_exchange = msgspec.msgpack.Decoder(Exchange)
_reply = msgspec.msgpack.Decoder(Reply)


def encode(message: Exchange | Reply) -> bytes:
    """Pack a message as msgpack."""
    return _encoder.encode(message)


def decode_exchange(data: bytes | memoryview) -> Exchange:
    """Raises msgspec.ValidationError for what is not an Exchange."""
    return _exchange.decode(data)


def decode_reply(data: bytes | memoryview) -> Reply:
    """Raises msgspec.ValidationError for what is not a Reply."""
    return _reply.decode(data)
