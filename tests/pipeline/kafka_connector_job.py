"""A Spark session with Spark's own Kafka connector, in a process of its own.

The session that all tests share cannot have these jars: a JVM takes jars only when it starts. Every
line of standard input is a job as JSON, and gets one line of JSON in return.
"""

import json
import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from pipeline.engines.spark_session import build_session, stop_session

Client = dict[str, str]  # the options `kafka.*`


def load(spark: SparkSession, kind: str, client: Client, topic: str, **options: Any) -> DataFrame:
    reader = spark.read.format(kind).options(**client)
    return reader.option("subscribe", topic).options(**options).load()


def rows_of(rows: DataFrame) -> list[str]:
    return sorted(map(repr, rows.collect()))


def stream(
    spark: SparkSession, client: Client, source: str, sink: str, checkpoint: str
) -> list[int]:
    """One run to what is there now, from a checkpoint -> rows by batch."""
    rows = spark.readStream.format("kafka").options(**client)
    rows = rows.option("subscribe", source).option("startingOffsets", "earliest")
    rows = rows.option("maxOffsetsPerTrigger", 200).option("includeHeaders", True).load()
    writer = rows.select("key", "value", "headers").writeStream.format("kafka")
    writer = writer.options(**client).option("topic", sink)
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    return [progress["numInputRows"] for progress in query.recentProgress]


def run(spark: SparkSession, document: dict[str, Any]) -> dict[str, Any]:
    client, source, sink = document["client"], document["source"], document["sink"]
    answer: dict[str, Any] = {}
    match document["what"]:
        case "compare":
            for options in document["options"]:
                kafka = load(spark, "kafka", client, source, **options)
                varve = load(spark, "varve", client, source, **options)
                answer.setdefault("schemas", []).append(kafka.schema == varve.schema)
                results = rows_of(kafka)
                answer.setdefault("counts", []).append(len(results))
                answer.setdefault("equal", []).append(results == rows_of(varve))
        case "stream":
            answer["batches"] = stream(spark, client, source, sink, document["checkpoint"])
        case "write":
            rows = load(spark, "kafka", client, source, includeHeaders=True)
            rows = rows.select("key", "value", "partition", "headers")
            writer = rows.write.format("kafka").options(**client)
            writer.option("topic", sink).save()
    return answer


def main() -> None:
    spark = build_session("local[2]", settings={"spark.jars": ",".join(sys.argv[1:])})
    try:
        for line in sys.stdin:
            print(json.dumps(run(spark, json.loads(line))), flush=True)
    finally:
        stop_session(spark)


if __name__ == "__main__":
    main()
