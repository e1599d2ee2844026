"""The heartbeat and the timeouts of a cluster."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from zmqtrain.config.options import names_of
from zmqtrain.errors import ConfigError


class Timing(BaseModel):
    """The intervals and deadlines of a task, in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    join_timeout_s: float = Field(
        300.0, gt=0, description="seconds to wait at start for the other tasks of the cluster"
    )
    heartbeat_s: float = Field(1.0, gt=0, description="seconds between two heartbeats to each peer")
    lease_s: float = Field(
        5.0, gt=0, description="seconds of silence after which a worker is declared dead"
    )
    peer_timeout_s: float = Field(
        60.0, gt=0, description="seconds of silence after which a ps is given up"
    )
    grace_s: float = Field(
        4.0,
        gt=0,
        description="seconds for a clean end after SIGTERM, fewer than the 5 after which honcho "
        "kills (default: 4; with --on-term leave 25)",
    )

    @model_validator(mode="after")
    def _check_lease(self) -> Timing:
        if self.lease_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"{names_of('lease_s')} is {self.lease_s:g} and {names_of('heartbeat_s')} is "
                f"{self.heartbeat_s:g}; expected a lease of at least two heartbeats, since one "
                "late heartbeat would end a worker; give a longer lease"
            )
        return self
