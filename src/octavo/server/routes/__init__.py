"""The routes, one module each: a body in, an `Exchange`, an answer out."""
