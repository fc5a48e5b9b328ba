"""The Model Context Protocol: a memory as tools of an agent."""
