"""The HTTP server: OpenAI's protocol over an `AsyncEngine`. Needs the extra `octavo[server]`; nothing else imports it.

It knows requests, keys, limits and text formats; it knows no blocks, no tensors and no steps. The invariant: whatever
a client sends, or stops sending, it gets one clear status, and its requests leave the engine.
"""
