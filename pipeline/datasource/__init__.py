"""The data source behind `format("varve")`."""
