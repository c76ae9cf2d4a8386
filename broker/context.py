"""What a request handler may use: the parts of the broker, and who is asking."""

from dataclasses import dataclass

from broker.fetch_sessions import FetchSessions
from broker.groups.coordinator import GroupCoordinator
from broker.stats import BrokerStats
from broker.topics import Topics
from config.address import Address
from config.settings import Settings
from storage.env import Env
from storage.log_manager import LogManager


@dataclass(slots=True)
class Services:
    """The parts of the running broker that handlers reach."""

    settings: Settings
    env: Env
    manager: LogManager
    topics: Topics
    groups: GroupCoordinator
    sessions: FetchSessions
    stats: BrokerStats
    cluster_id: str
    node_id: int


@dataclass(slots=True)
class RequestContext:
    """One connection's view of the broker. Cheap: made once per connection."""

    services: Services
    client_host: str
    client_software: tuple[str, str] = ("", "")
    reached_at: Address = Address("127.0.0.1", 0)

    @property
    def address(self) -> Address:
        """Where clients are told to connect: as configured, else the address they came by."""
        return self.services.settings.advertise or self.reached_at
