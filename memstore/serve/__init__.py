"""A server of one memory: OpenAI's chat endpoint, documents, the inspector, MCP and metrics."""
