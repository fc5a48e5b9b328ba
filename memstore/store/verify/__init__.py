"""Verification and repair."""
