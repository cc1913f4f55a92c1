"""Whole numbers and request ids that callers hand in: ints, and what Python itself takes for one (numpy's, a tensor's).

Never bools, floats or strings: 9.25 tokens are a mistake to be named, not to be rounded. It knows nothing else; what a
number may be is the caller's matter.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from octavo.errors import RequestError

RequestId = int | str


def whole(what: str, value: Any, error: type[ValueError] = RequestError) -> int:
    """`value` as a plain int; `error` names `what` and the value if it is no whole number."""
    if type(value) is int:
        return value
    # A tensor of bools has an index too, and numpy's bools had one.
    is_bool = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
    try:
        if not is_bool:
            return operator.index(value)
    except TypeError:
        pass
    raise error(f"{what}={value!r}: must be a whole number (an int)")


def wholes(what: str, values: Any, error: type[ValueError] = RequestError) -> list[int]:
    """A sequence or a tensor of one dimension as plain ints."""
    items = _items(what, values, error)
    return [whole(f"{what}[{place}]", value, error) for place, value in enumerate(items)]


def request_id_of(value: Any) -> RequestId:
    """An id as dictionaries keep it. True and 1.0 equal 1 there, and are refused."""
    if type(value) is int or isinstance(value, str):
        return value
    try:
        return whole("request_id", value)
    except RequestError:
        raise RequestError(f"request_id={value!r}: must be an int or a string") from None


def request_ids_of(what: str, values: Any) -> list[RequestId]:
    """Several ids. One id alone, a string most of all, is not a sequence of them."""
    return [request_id_of(value) for value in _items(what, values, RequestError)]


def _items(what: str, values: Any, error: type[ValueError]) -> Iterable[Any]:
    numbers = getattr(values, "tolist", None)  # one transfer, not one for each number
    if numbers is not None:
        values = numbers()
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
        raise error(f"{what}={values!r}: must be a list, one entry each")
    return values
