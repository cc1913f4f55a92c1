"""Octavo's server through the OpenAI client. Start it first:

octavo serve --port 8000
python examples/server_client.py --url http://127.0.0.1:8000

A server whose model still loads is waited for.
"""

import argparse
import sys
import time

from openai import APIConnectionError, APIStatusError, OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("--url", default="http://127.0.0.1:8000")
parser.add_argument("--api-key", default="none")
parser.add_argument("--wait", type=float, default=60, metavar="S", help="for a model that still loads (60)")
args = parser.parse_args()


def served_model(client: OpenAI) -> str:
    """The first model that the server has; while it loads there is none."""
    limit = time.monotonic() + args.wait
    said = False
    while True:
        try:
            models = client.models.list().data
        except APIConnectionError as error:
            sys.exit(f"no server answers at {args.url} ({error}); start one: octavo serve --port 8000")
        except APIStatusError as error:
            sys.exit(f"the server at {args.url} refuses: {error.message}")
        if models:
            return models[0].id
        if time.monotonic() >= limit:
            sys.exit(f"the model at {args.url} still loads after {args.wait:g} s; try again, or give a longer --wait")
        if not said:
            print("the model still loads: waiting", file=sys.stderr)
            said = True
        time.sleep(0.2)


with OpenAI(base_url=f"{args.url}/v1", api_key=args.api_key) as client:
    model = served_model(client)
    question = [{"role": "user", "content": "Say hello to the reader."}]
    answer = client.chat.completions.create(model=model, messages=question, max_tokens=16, n=2, temperature=0.8)
    for choice in answer.choices:
        print(f"choice {choice.index}: {choice.message.content!r}")
    print("streamed: ", end="")
    with client.completions.create(model=model, prompt="Once upon a time", max_tokens=16, stream=True) as stream:
        for chunk in stream:
            print(chunk.choices[0].text if chunk.choices else "", end="", flush=True)
    print()
