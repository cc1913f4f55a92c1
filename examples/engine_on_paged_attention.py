"""A serving engine of sixty lines on `octavo.PagedAttention`: your model, your loop, Octavo's memory.

    python examples/engine_on_paged_attention.py

`TinyModel` stands for your own model: anything that makes queries, keys and values. `Engine` is the whole rest:
admission by free blocks, continuous batching (prompts and single tokens in one step), samples that share their prompt
copy-on-write, preemption when blocks run out. At the end every answer is compared with the model computed densely.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from octavo import CapacityError, PagedAttention

LAYERS, HEADS, DIM, VOCABULARY = 2, 4, 16, 64


class TinyModel:
    """Random weights; `attend(layer, q, k, v)` is all it knows about attention."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        width = HEADS * DIM
        self.embedding = torch.randn(VOCABULARY, width, generator=draw)
        self.places = torch.randn(512, width, generator=draw)
        self.head = torch.randn(width, VOCABULARY, generator=draw)
        self.mix = [torch.randn(width, 4 * width, generator=draw) * width**-0.5 for _ in range(LAYERS)]

    def __call__(self, ids, positions, attend):
        x = self.embedding[ids] + self.places[positions]
        for layer, mix in enumerate(self.mix):
            q, k, v, gate = (F.layer_norm(x, x.shape[-1:]) @ mix).chunk(4, -1)
            x = x + attend(layer, *(t.view(-1, HEADS, DIM) for t in (q, k, v))).flatten(1) * gate.sigmoid()
        return F.layer_norm(x, x.shape[-1:]) @ self.head  # [T, vocabulary]


# -- the engine ------------------------------------------------------------------------------------------------------


class Request:
    """tokens: prompt and answer. name: its id in the pool while it runs."""

    def __init__(self, name: str, prompt: list[int], goal: int) -> None:
        self.name, self.tokens, self.goal = name, list(prompt), len(prompt) + goal


class Engine:
    """Step by step: whoever is running catches up with its tokens, all in one batch."""

    def __init__(self, model: TinyModel, num_blocks: int) -> None:
        self.model = model
        self.attn = PagedAttention(HEADS, HEADS, DIM, block_size=8, num_blocks=num_blocks, num_layers=LAYERS)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preempted = 0

    def add(self, name: str, prompt: list[int], goal: int) -> None:
        self.waiting.append(Request(name, prompt, goal))

    def fork(self, name: str, copy: str, token: int) -> None:
        """Another answer to the same prompt: shares every block, goes on with another token."""
        source = next(r for r in self.running if r.name == name)
        self.attn.fork(name, copy)
        child = Request(copy, [*source.tokens[:-1], token], 0)
        child.goal = source.goal
        self.running.append(child)

    def admit(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            try:
                self.attn.allocate(request.name, len(request.tokens) + 1)
            except CapacityError:
                if not self.running:
                    raise  # it will never fit; the message says how many blocks it takes
                return
            self.running.append(self.waiting.pop(0))

    def make_room(self) -> list[int]:
        """New tokens of each running request; the newest go back to the queue while blocks lack."""
        while True:
            counts = [len(r.tokens) - self.attn.context_len(r.name) for r in self.running]
            if self.attn.blocks_needed([r.name for r in self.running], counts) <= self.attn.num_free:
                return counts
            victim = self.running.pop()
            self.attn.free(victim.name)
            self.waiting.insert(0, victim)
            self.preempted += 1

    def step(self) -> None:
        self.admit()
        counts, names = self.make_room(), [r.name for r in self.running]
        ids = torch.tensor([t for r, n in zip(self.running, counts) for t in r.tokens[-n:]])
        positions = torch.cat([torch.arange(len(r.tokens) - n, len(r.tokens)) for r, n in zip(self.running, counts)])

        def attend(layer, q, k, v):
            return self.attn.forward(q, k, v, request_ids=names, query_lens=counts, layer=layer)

        logits = self.model(ids, positions, attend)[torch.tensor(counts).cumsum(0) - 1]
        for request, token in zip(list(self.running), logits.argmax(-1).tolist()):
            request.tokens.append(token)
            if len(request.tokens) >= request.goal:
                self.attn.free(request.name)  # its blocks are free for the next step
                self.running.remove(request)
                print(f"{request.name:>10}: {request.tokens}")


# -- proof -----------------------------------------------------------------------------------------------------------


def dense(layer, q, k, v):
    """The same attention without any cache, for one sequence."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)


def check(model: TinyModel, tokens: list[int], prompt: int) -> None:
    for end in range(prompt, len(tokens)):
        logits = model(torch.tensor(tokens[:end]), torch.arange(end), dense)
        assert int(logits[-1].argmax()) == tokens[end], "the paged answer differs from the dense one"


def main() -> None:
    model = TinyModel()
    engine = Engine(model, num_blocks=12)
    lengths = {"story": 18, "question": 5, "list": 11, "poem": 3}
    for seed, (name, length) in enumerate(lengths.items()):
        engine.add(name, [(7 * seed + 3 * i) % VOCABULARY for i in range(length)], goal=20)
    requests = list(engine.waiting)
    engine.step()
    engine.fork("story", "story, 2nd", token=42)
    requests.append(engine.running[-1])
    print(engine.attn.view(), "\n")
    while engine.running or engine.waiting:
        engine.step()
    for request in requests:
        check(model, request.tokens, lengths.get(request.name, lengths["story"] + 1))
    engine.attn.audit()
    stats = engine.attn.stats()
    print(
        f"\n{stats.steps} steps, peak {stats.peak_used} of {stats.num_blocks} blocks, {stats.copies} copied on write,"
    )
    print(f"{engine.preempted} preemptions; every token is the one that dense attention gives")


if __name__ == "__main__":
    main()
