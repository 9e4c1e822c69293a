"""Device leaves: know nothing of attention or top-k."""
