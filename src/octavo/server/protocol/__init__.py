"""Request bodies of the routes, as pydantic models. A field that is not in them is refused by name."""
