"""A server of one memory: OpenAI's endpoints, the inspector, MCP and metrics."""
