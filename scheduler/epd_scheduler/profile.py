"""The profile of a model on a host: what its plans cost. Measured by `epd profile`, or computed for hardware not here.

All times are seconds, all coefficients are at least zero, so every cost grows with the work.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from epd_scheduler.config import SchedulerConfig
from epd_scheduler.request import Class

VERSION = 1


class ProfileError(ValueError):
    """The profile file cannot be used; the message says why and how to make one."""


class EncodeCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An encode plan: `overhead + per_unit n + per_row sum(r) + per_square sum(r^2)` over its units' rows r."""

    overhead: float = 0.0
    per_unit: float = 0.0
    per_row: float = 0.0
    per_square: float = 0.0  # attention within a unit

    def seconds(self, rows: Iterable[int]) -> float:
        """Time of one plan whose units have these embedding rows."""
        total = self.overhead
        for count in rows:
            total += self.per_unit + count * (self.per_row + count * self.per_square)
        return total


class ForwardCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A batch plan of rows `(start, count)`: the roofline of one ragged forward over all layers.

    `overhead + max(floor, per_token T + per_pair A) + per_row R + per_context K` with T tokens, A query-key pairs of
    rows of more than one token, R rows, K context tokens that one-token rows read. `floor` is the time to read the
    weights: below it the forward is bound by memory.
    """

    overhead: float = 0.0
    floor: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0
    per_row: float = 0.0
    per_context: float = 0.0

    def seconds(self, rows: Iterable[tuple[int, int]]) -> float:
        """Time of one plan; a row is (tokens before it, its tokens)."""
        tokens, pairs, count, context = 0, 0.0, 0, 0
        for start, length in rows:
            count += 1
            tokens += length
            if length == 1:
                context += start + 1
            else:
                pairs += length * (start + (length + 1) / 2)
        compute = max(self.floor, self.per_token * tokens + self.per_pair * pairs)
        return self.overhead + compute + self.per_row * count + self.per_context * context


class MigrateCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A migrate plan: `overhead + per_block n`."""

    overhead: float = 0.0
    per_block: float = 0.0

    def seconds(self, blocks: int) -> float:
        """Time to pull that many KV blocks."""
        return self.overhead + blocks * self.per_block


class Centre(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Centre of a class in the plane of log10(prefill seconds) and log10(KV bytes) (RPS-Serve's classifier)."""

    name: Class
    log_prefill: float
    log_kv: float


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model on one kind of device. `source` says where each number comes from."""

    model: str
    device: str
    encode: EncodeCost
    forward: ForwardCost
    kv_bytes_token: int
    embedding_bytes_row: int
    migrate: MigrateCost = MigrateCost()
    centres: tuple[Centre, ...] = ()  # empty: not trained, the classifier refuses
    source: str = ""
    version: int = VERSION


def load_profile(path: str | Path) -> Profile:
    """Read a profile (YAML or JSON, which is YAML). Raises ProfileError."""
    try:
        profile = msgspec.yaml.decode(Path(path).read_bytes(), type=Profile)
    except OSError as error:
        raise ProfileError(f"{path}: {error}; make a profile with `epd profile`") from error
    except msgspec.DecodeError as error:
        raise ProfileError(f"{path}: {error}; make a new profile with `epd profile`") from error
    if profile.version != VERSION:
        raise ProfileError(f"{path}: version {profile.version}, this server reads {VERSION}; run `epd profile` again")
    return profile


def configured_profile(config: SchedulerConfig) -> Profile | None:
    """The profile that the configuration names, if any. Raises ProfileError."""
    return load_profile(config.profile) if config.profile else None


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile as YAML."""
    Path(path).write_bytes(msgspec.yaml.encode(profile))
