"""Record batches of format v2 as Arrow columns: the rows of every job and of the data source.

The columns are those of Spark's own Kafka source, by name, type and nullability, so that a job can
change between the two. `decode` is the public module; `kernels` has its compiled loops.
"""
