"""Every error that Octavo raises on purpose.

    OctavoError
    ├── ConfigError          the engine cannot start as asked            (also a ValueError)
    │   └── ModelError       model files missing, broken or unsupported
    ├── RequestError         one request is refused; the engine is fine  (also a ValueError)
    │   ├── SamplingError    a sampling parameter is out of range or contradicts another
    │   ├── PromptError      empty prompt, ids outside the vocabulary, longer than the limit
    │   └── CapacityError    can never fit the KV pool, or the queue is full
    ├── UnavailableError     no engine to take the request now: it is loading, shutting down, or has stopped
    └── InternalError        a broken invariant: a bug in Octavo, never the caller's fault
        ├── OutOfBlocksError a caller took more blocks than the pool has (the scheduler never does)
        ├── BoundsError      a position, logical block or slot outside its table
        └── AuditError       an audit found the first inconsistent block

Messages name the offending value, the limit it broke and what to do about it.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Root of the tree: `except OctavoError` catches everything raised on purpose."""


class ConfigError(OctavoError, ValueError):
    """The engine cannot start with these settings."""


class ModelError(ConfigError):
    """Model files are missing, broken, or describe something that is not supported."""


class RequestError(OctavoError, ValueError):
    """One request is refused at the door; no other request is touched."""


class SamplingError(RequestError):
    """A sampling parameter is out of range, unknown, or contradicts another."""


class PromptError(RequestError):
    """The prompt is empty, too long, or holds ids outside the vocabulary."""


class CapacityError(RequestError):
    """The request can never fit the pool, or the queue is full; in a `PagedAttention`: not now, its pool is full."""


class UnavailableError(OctavoError, RuntimeError):
    """There is no engine to take the request: it is loading, shutting down, or has stopped."""


class InternalError(OctavoError, RuntimeError):
    """An invariant is broken: a bug in Octavo."""


class OutOfBlocksError(InternalError):
    """More blocks were taken than the pool has."""


class BoundsError(InternalError):
    """A position, logical block or slot lies outside its table."""


class AuditError(InternalError):
    """The bookkeeping contradicts itself; the message pinpoints the first bad block."""
