"""All logs of a broker, over several log directories."""
