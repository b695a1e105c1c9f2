"""What runs inside worker instances: weights, arenas, attention, executors, sampling."""
