"""Publishing, merging and pruning."""
