"""Questions about the configs of topics, brokers, groups, loggers and client metrics."""

from typing import Final

from protocol import messages as m
from protocol.api import ApiKey
from protocol.messages import Message
from tests.broker.security.permissions.question import GROUP, TOPIC, Asked, Questions

questions: Final = Questions()

RESOURCES: Final = ((2, TOPIC), (2, "missing"), (4, "1"))

# A group, the loggers of a broker, client metrics, and a type that does not exist.
OTHER_RESOURCES: Final = ((32, GROUP), (8, "1"), (16, "metrics"), (64, "x"))


@questions.add(ApiKey.DESCRIBE_CONFIGS)
def describe_configs(_: Asked) -> Message:
    rows = [
        m.DescribeConfigsRequestResource(
            resource_type=kind, resource_name=name, configuration_keys=None
        )
        for kind, name in RESOURCES
    ]
    return m.DescribeConfigsRequest(resources=rows)


@questions.add(ApiKey.ALTER_CONFIGS)
def alter_configs(_: Asked) -> Message:
    rows = [
        m.AlterConfigsRequestResource(resource_type=kind, resource_name=name, configs=[])
        for kind, name in RESOURCES
    ]
    return m.AlterConfigsRequest(resources=rows, validate_only=True)


@questions.add(ApiKey.INCREMENTAL_ALTER_CONFIGS)
def incremental_alter_configs(_: Asked) -> Message:
    rows = [
        m.IncrementalAlterConfigsRequestResource(
            resource_type=kind,
            resource_name=name,
            configs=[
                m.IncrementalAlterConfigsRequestConfig(
                    name="retention.ms" if kind == 2 else "log.cleaner.threads",
                    config_operation=0,
                    value="1",
                )
            ],
        )
        for kind, name in RESOURCES
    ]
    return m.IncrementalAlterConfigsRequest(resources=rows, validate_only=True)


@questions.add(ApiKey.DESCRIBE_CONFIGS)
def describe_configs_of_groups_loggers_and_client_metrics(_: Asked) -> Message:
    rows = [
        m.DescribeConfigsRequestResource(
            resource_type=kind, resource_name=name, configuration_keys=None
        )
        for kind, name in OTHER_RESOURCES[:3]  # Kafka refuses all if the type of one is unknown
    ]
    return m.DescribeConfigsRequest(resources=rows)


@questions.add(ApiKey.ALTER_CONFIGS)
def alter_configs_of_groups_loggers_and_client_metrics(_: Asked) -> Message:
    rows = [
        m.AlterConfigsRequestResource(
            resource_type=kind,
            resource_name=name,
            configs=[m.AlterConfigsRequestConfig(name="nonsense", value="1")],
        )
        for kind, name in OTHER_RESOURCES
    ]
    return m.AlterConfigsRequest(resources=rows, validate_only=True)


@questions.add(ApiKey.INCREMENTAL_ALTER_CONFIGS)
def incremental_alter_configs_of_groups_loggers_and_client_metrics(_: Asked) -> Message:
    rows = [
        m.IncrementalAlterConfigsRequestResource(
            resource_type=kind,
            resource_name=name,
            configs=[
                m.IncrementalAlterConfigsRequestConfig(
                    name="nonsense", config_operation=0, value="INFO"
                )
            ],
        )
        for kind, name in OTHER_RESOURCES
    ]
    return m.IncrementalAlterConfigsRequest(resources=rows, validate_only=True)


@questions.add(ApiKey.LIST_CONFIG_RESOURCES)
def list_config_resources(_: Asked) -> Message:
    return m.ListConfigResourcesRequest(resource_types=[4])
