"""What other programs ask over HTTP: OpenAI's endpoints, the page, MCP, metrics."""
