"""Ask a memory with OpenAI's client: a streamed answer, then its sources.

    pip install '.[serve,hf]' openai
    python examples/openai_client.py STORE "How much is the monthly rent?"

STORE is the directory of a memory, which the script serves while it runs, or the address of a
server that `memstore serve` started, such as http://127.0.0.1:8741.
"""

import json
import subprocess
import sys

from openai import OpenAI


def ask(url: str, question: str) -> None:
    """Print the answer as it arrives, and its sources."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    messages = [{"role": "user", "content": question}]
    for chunk in client.chat.completions.create(model="memstore", messages=messages, stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
        if memory := getattr(chunk, "memstore", None):  # the last chunk has it
            for source in memory["sources"]:
                print(f"\n- {source['document']}: {source['sentence']}", end="")
    print()


if __name__ == "__main__":
    store, question = sys.argv[1:]
    if store.startswith("http"):
        ask(store, question)
        sys.exit()
    command = [sys.executable, "-m", "memstore", "serve", "--store", store, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        ask(json.loads(server.stdout.readline())["url"], question)
        server.terminate()
