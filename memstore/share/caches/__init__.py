"""Caches of a published memory: a directory of this machine, a Valkey server that readers share."""
