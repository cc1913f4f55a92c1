"""Octavo's paged memory inside Hugging Face transformers: a `Cache` for `model.generate`.

    from octavo.integrations.transformers import ATTENTION, PagedCache

    model.set_attn_implementation(ATTENTION)     # attend to the blocks in place; leave it out and blocks are gathered
    model.generate(**inputs, num_beams=4, past_key_values=PagedCache(model.config, max_tokens=4096))

Importing this package registers `ATTENTION` with transformers.
"""

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "octavo.integrations.transformers needs the transformers library: pip install 'transformers>=5.0'"
    ) from error

from octavo.integrations.transformers.attention import ATTENTION, register
from octavo.integrations.transformers.cache import PagedCache
from octavo.integrations.transformers.pool import PagedPool

__all__ = ["ATTENTION", "PagedCache", "PagedPool", "register"]

register()
