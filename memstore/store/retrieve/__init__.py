"""Lookups: landmark index, tiers, the selector's index, recomputed passages."""
