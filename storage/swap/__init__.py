"""Atomic replacement of segments: by a clean, by the removal of damage, by a killed Kafka."""
