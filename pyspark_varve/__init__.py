"""`format("varve")` for Spark: topics of a Kafka-compatible cluster as tables and streams.

Spark finds this package by its name, without a registration. Columns and options are those of
Spark's own Kafka source, so that a job can change between `format("varve")` and `format("kafka")`;
this one needs no jars, and reads whole record batches into Arrow.

What it has beyond that: the option `columns`, as Spark does not tell a Python source which columns
a query needs; and `pushDownPredicate`, which is false unless set: Spark 4.3 gives every use of a
DataFrame the filters of the last one (see `pipeline.datasource.batch.FilteringReader`).
"""

from pipeline.datasource.source import DefaultSource

__all__ = ["DefaultSource"]
