"""Settings of a bulk producer, by Java's names and librdkafka's."""

import pytest

from config.security.clients import Cluster
from pipeline.client.producer import BulkProducer, ProduceError

NOBODY = "127.0.0.1:1"


@pytest.mark.parametrize(
    "settings", [{"buffer.memory": "much"}, {"key.serializer": "x"}, {"no.such": "1"}]
)
def test_a_setting_that_means_nothing_here_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ProduceError, match=next(iter(settings))):
        BulkProducer(Cluster(NOBODY), settings)


def test_javas_bound_of_the_queue_is_kept_to() -> None:
    settings = {"buffer.memory": "4096", "delivery.timeout.ms": "300", "linger.ms": "0"}
    sent: list[int] = []

    def send() -> None:
        with BulkProducer(Cluster(NOBODY), settings) as producer:
            for number in range(100):
                producer.send("t", None, b"x" * 1000)
                sent.append(number)

    with pytest.raises(ProduceError):
        send()
    assert 1 <= len(sent) < 10
