"""OpenAI's endpoints: completions, responses, conversations, files and vector stores."""
