"""Octavo's memory inside other libraries. Each package here needs the library that it is named after."""
