"""What Spark finds as format("varve"): thin, over the package `pipeline`."""
