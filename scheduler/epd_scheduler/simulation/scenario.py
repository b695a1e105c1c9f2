"""A simulated deployment as a YAML file: model, devices, instances, and the configuration that the core gets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from epd_scheduler.config import Config, ConfigError, EmbeddingConfig, KVConfig, SchedulerConfig
from epd_scheduler.metrics_summary import SLO
from epd_scheduler.profile import Profile, load_profile
from epd_scheduler.simulation.devices import Timing
from epd_scheduler.simulation.engine import Run, Simulation
from epd_scheduler.simulation.images import Vision
from epd_scheduler.simulation.requests import Template
from epd_scheduler.simulation.topology import InstanceSpec
from epd_scheduler.workload import RequestSpec


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What serves; the workload comes apart. `kv`, `embedding` and `scheduler` are those of the server's file."""

    name: str
    profile: str  # path, relative to the scenario's file; so are the profiles of instances
    vision: Vision
    instances: tuple[InstanceSpec, ...]
    timing: Timing = Timing()
    template: Template = Template()
    kv: KVConfig = KVConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    scheduler: SchedulerConfig = SchedulerConfig()

    @property
    def config(self) -> Config:
        """The core's configuration."""
        return Config(kv=self.kv, embedding=self.embedding, scheduler=self.scheduler)


class Deployment:
    """A scenario with its profiles read, ready to be simulated at any load."""

    def __init__(self, scenario: Scenario, directory: Path) -> None:
        """Raises ProfileError."""
        self.scenario = scenario
        self._profile = load_profile(directory / scenario.profile)
        named = {spec.profile for spec in scenario.instances if spec.profile}
        self._profiles: dict[str, Profile] = {name: load_profile(directory / name) for name in named}

    def simulate(
        self, workload: list[RequestSpec], slos: Mapping[str, SLO] = MappingProxyType({}), *, record: bool = False
    ) -> Run:
        """One run; `slos` are by kind. Raises TopologyError, ProfileError, SimulationError."""
        simulation = Simulation(
            self.scenario.config,
            self.scenario.instances,
            self._profile,
            vision=self.scenario.vision,
            timing=self.scenario.timing,
            template=self.scenario.template,
            profiles=self._profiles,
            record=record,
        )
        return simulation.run(workload, slos)


def load_scenario(path: str | Path) -> Deployment:
    """Read a scenario and its profiles. Raises ConfigError, ProfileError."""
    path = Path(path)
    try:
        scenario = msgspec.yaml.decode(path.read_bytes(), type=Scenario)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}; see deploy/scenarios for some that work") from error
    return Deployment(scenario, path.parent)
