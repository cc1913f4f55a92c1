"""`octavo version`: versions that belong in a bug report, without importing what they name."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata
from typing import Any

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "gguf")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("version", help="versions of Octavo and of what it runs on")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print name and version, one a line."""
    from octavo import __version__

    print(f"octavo {__version__}")
    print(f"python {platform.python_version()} ({platform.system()} {platform.machine()})")
    for name in PACKAGES:
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"{name} (not installed)")
    return 0
