"""`python -m pipeline`, which is what `varve pipeline` becomes."""

from pipeline.cli import pipeline

if __name__ == "__main__":
    pipeline(prog_name="varve pipeline")
