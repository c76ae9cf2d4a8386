"""The result of opening all logs, as log lines."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from storage.model import TopicPartition
from storage.recovery.load_log import RecoveryCounts

NAMED_MAX: Final = 20  # topics named in a log line
LogLines: TypeAlias = tuple[tuple[str, dict[str, object]], ...]  # event and fields


@dataclass(frozen=True, slots=True)
class OpenReport:
    """The result of opening all logs, for log lines."""

    offline_directories: Mapping[str, str]  # path -> reason
    offline: Mapping[TopicPartition, str]
    taken_over: tuple[TopicPartition, ...]
    settings: LogLines  # of Kafka's metadata
    refused: tuple[tuple[str, str], ...]  # (folder, reason)
    removed: tuple[str, ...]  # folders
    notes: tuple[tuple[TopicPartition, str], ...]  # repairs
    directory_notes: tuple[tuple[str, str], ...] = ()  # repairs of directories
    unclean: tuple[str, ...] = ()  # directories without the clean-shutdown marker
    recovered_partitions: int = 0  # partitions with verified segments
    counts: RecoveryCounts = field(default_factory=RecoveryCounts)
    seconds: float = 0.0  # to open all logs

    def routine_lines(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Yield log lines about ordinary recovery after a kill, like `lines`."""
        if self.unclean or self.counts.segments_verified:
            yield (
                "log recovery finished",
                {
                    "unclean_directories": list(self.unclean),
                    "partitions": self.recovered_partitions,
                    "segments_verified": self.counts.segments_verified,
                    "bytes_verified": self.counts.bytes_verified,
                    "bytes_cut": self.counts.bytes_cut,
                    "seconds": round(self.seconds, 3),
                },
            )
        if self.counts.deleted_files:
            yield "deletion of files finished", {"files": self.counts.deleted_files}

    def lines(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Yield log lines that need an operator's attention: event and fields."""
        for directory, reason in self.offline_directories.items():
            yield "data directory went offline", {"directory": directory, "reason": reason}
        for directory, note in self.directory_notes:
            yield "data directory repaired", {"directory": directory, "reason": note}
        for partition, reason in self.offline.items():
            yield "partition went offline", {"partition": str(partition), "reason": reason}
        if self.taken_over:
            topics = sorted({partition.topic for partition in self.taken_over})
            yield (
                "folders taken over",
                {
                    "partitions": len(self.taken_over),
                    "topics": len(topics),
                    "names": topics[:NAMED_MAX],
                },
            )
        yield from self.settings
        for folder, reason in self.refused:
            yield "folder refused", {"folder": folder, "reason": reason}
        for folder in self.removed:
            yield "folder of a deleted topic removed", {"folder": folder}
        for partition, note in self.notes:
            yield "log repaired", {"partition": str(partition), "reason": note}
