"""Structured output: grammars that say which token may come next, through the llguidance library (extra `structured`).

`compiler.py` turns a `StructuredOutputs` into a `CompiledGrammar`, off the step path; `matcher.py` is the state of one
sequence. Nothing here knows the scheduler, and llguidance is imported only when the first grammar arrives.
"""
