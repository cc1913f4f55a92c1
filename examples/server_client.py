"""Octavo's server through the OpenAI client. Start it first:

octavo serve --port 8000
python examples/server_client.py --url http://127.0.0.1:8000
"""

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("--url", default="http://127.0.0.1:8000")
parser.add_argument("--api-key", default="none")
args = parser.parse_args()

with OpenAI(base_url=f"{args.url}/v1", api_key=args.api_key) as client:
    model = client.models.list().data[0].id
    question = [{"role": "user", "content": "Say hello to the reader."}]
    answer = client.chat.completions.create(model=model, messages=question, max_tokens=16, n=2, temperature=0.8)
    for choice in answer.choices:
        print(f"choice {choice.index}: {choice.message.content!r}")
    print("streamed: ", end="")
    with client.completions.create(model=model, prompt="Once upon a time", max_tokens=16, stream=True) as stream:
        for chunk in stream:
            print(chunk.choices[0].text if chunk.choices else "", end="", flush=True)
    print()
