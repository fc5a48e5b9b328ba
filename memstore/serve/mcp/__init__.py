"""The Model Context Protocol: a memory as tools and resources of an agent."""
