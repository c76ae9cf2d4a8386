"""Client quotas: who may use how much, and for how long clients above their limit are throttled."""
