"""The model families that the one decoder covers: one small module for each group of relatives.

A family is a `Family` value: the keys of its config and their defaults, the names of its tensors, and which flags of
`ModelSpec` it sets. To add one, write it down in a module here and list the module below.
"""

from __future__ import annotations

from octavo.models.families import falcon, gemma, gpt, granite, llama, mixtral, olmo, phi, qwen, stablelm
from octavo.models.families.base import Family

FAMILIES: dict[str, Family] = {
    **llama.FAMILIES,
    **mixtral.FAMILIES,
    **qwen.FAMILIES,
    **gemma.FAMILIES,
    **phi.FAMILIES,
    **granite.FAMILIES,
    **olmo.FAMILIES,
    **stablelm.FAMILIES,
    **gpt.FAMILIES,
    **falcon.FAMILIES,
}
