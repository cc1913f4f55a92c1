"""A LoRA adapter in peft's format, read strictly: adapter_config.json and adapter_model.safetensors.

    W' x = W x + scale * B (A x)         scale = alpha / r, or alpha / sqrt(r) with rslora   (Hu et al. 2021)

Every key of the configuration is read, known to change nothing here, or refused by name; every tensor is an A or a B
of a pair. Which of the model's products a module is belongs to `lora_targets.py`. Knows no batches.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from octavo.errors import ModelError
from octavo.models.families.base import words
from octavo.models.safetensors_loader import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_PAIR = re.compile(r"(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
#: Keys that are read, and keys that change nothing about the product of a trained adapter.
READ = words("peft_type r lora_alpha use_rslora rank_pattern alpha_pattern bias fan_in_fan_out")
HARMLESS = words("""
    task_type auto_mapping peft_version base_model_name_or_path revision inference_mode target_modules exclude_modules
    lora_dropout layers_to_transform layers_pattern megatron_config megatron_core loftq_config eva_config
    runtime_config qalora_group_size ensure_weight_tying init_lora_weights
""")
#: Starting points of training after which the base model is the one that was downloaded.
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva", None)


@dataclass(frozen=True)
class LowRank:
    """The two halves for one module: a [r, in], b [out, r], both float; scale multiplies their product."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True)
class AdapterFiles:
    """One adapter as read. key: hash of everything that decides what it computes, whatever it is called."""

    path: Path
    key: str
    modules: Mapping[str, LowRank]  # name of the module in the model, without peft's prefix -> its halves

    @property
    def max_rank(self) -> int:
        return max(pair.a.shape[0] for pair in self.modules.values())


def read_adapter(path: str | Path) -> AdapterFiles:
    """An adapter's directory. Raises `ModelError` that names the key or the tensor."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise ModelError(f"lora {str(path)!r}: no such directory; give the one with {CONFIG} and {WEIGHTS}")
    if not (directory / WEIGHTS).is_file():
        pickled = "; adapter_model.bin is a pickle and never read: save it with safe_serialization=True"
        raise ModelError(f"{directory}: no {WEIGHTS}{pickled if (directory / 'adapter_model.bin').exists() else ''}")
    config = read_json(directory / CONFIG)
    where = str(directory / CONFIG)
    _check(config, where)
    halves = _halves(directory / WEIGHTS)
    if not halves:
        raise ModelError(f"{directory / WEIGHTS}: no lora_A and lora_B in it")
    _check_patterns(config, sorted(halves), where)
    modules = {name: _pair(name, found, config, where) for name, found in sorted(halves.items())}
    return AdapterFiles(directory, _key(modules), modules)


def _check(config: Any, where: str) -> None:
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise ModelError(f"{where}: peft_type={kind!r}: only LORA adapters are supported")
    if config.get("bias", "none") != "none":
        raise ModelError(f"{where}: bias={config['bias']!r}: trained biases are not supported; only 'none'")
    if config.get("init_lora_weights", True) not in PLAIN_STARTS:
        raise ModelError(
            f"{where}: init_lora_weights={config['init_lora_weights']!r} changes the base model's weights; convert the "
            "adapter to a plain one when saving it (path_initial_model_for_weight_conversion)"
        )
    for name, value in config.items():
        if name not in READ and name not in HARMLESS and value not in (None, False, [], {}, ""):
            raise ModelError(f"{where}: {name}={value!r} is not supported, and would change what the adapter computes")


def _halves(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Module -> {"A": …, "B": …}. Anything else in the file is refused."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    try:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                match = _PAIR.fullmatch(name)
                if match is None:
                    raise ModelError(
                        f"{path}: tensor {name}: only lora_A and lora_B of linear layers are supported (no DoRA, no "
                        "embeddings, no saved modules, no biases)"
                    )
                tensor = file.get_tensor(name)
                if tensor.dim() != 2 or not tensor.is_floating_point():
                    raise ModelError(
                        f"{path}: {name} is {list(tensor.shape)} of {tensor.dtype}; a float matrix is needed"
                    )
                if not bool(torch.isfinite(tensor.float()).all()):
                    raise ModelError(
                        f"{path}: {name} holds NaN or infinity; the training diverged or the file is damaged: take "
                        "another checkpoint"
                    )
                found.setdefault(match[1].removeprefix(PREFIX), {})[match[2]] = tensor
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: broken or truncated safetensors file: {error}") from error
    return found


def _pair(name: str, found: Mapping[str, torch.Tensor], config: Mapping[str, Any], where: str) -> LowRank:
    if set(found) != {"A", "B"}:
        raise ModelError(f"{where}: {name} has lora_{next(iter(found))} but not the other half")
    a, b = found["A"].float(), found["B"].float()
    rank = _of_pattern(config, "r", "rank_pattern", name, where)
    alpha = _of_pattern(config, "lora_alpha", "alpha_pattern", name, where)
    if a.shape[0] != rank or b.shape[1] != rank:
        raise ModelError(
            f"{where}: {name}: lora_A is {list(a.shape)} and lora_B {list(b.shape)}, but the rank is {rank}"
        )
    return LowRank(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _of_pattern(config: Mapping[str, Any], key: str, patterns: str, name: str, where: str) -> float:
    """The value for a module: of the first of `patterns` that it ends with, as peft matches them, else of `key`."""
    said, value = key, config.get(key, 8)
    for pattern, given in (config.get(patterns) or {}).items():
        if _matches(pattern, name):
            said, value = f"{patterns}[{pattern!r}]", given
            break
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{where}: {said}={value!r}: must be a positive number")
    return value


def _matches(pattern: str, name: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def _check_patterns(config: Mapping[str, Any], names: list[str], where: str) -> None:
    """What the configuration says about modules must be true of the tensors: else one of the two is from elsewhere."""
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict):
            raise ModelError(f"{where}: {key}={patterns!r}: must map patterns to numbers")
        for pattern in patterns:
            try:
                used = any(_matches(pattern, name) for name in names)
            except re.error as error:
                raise ModelError(f"{where}: {key}: {pattern!r} is no regular expression: {error}") from error
            if not used:
                raise ModelError(
                    f"{where}: {key}: {pattern!r} matches none of the adapter's modules ({_ends(names)}); mend or "
                    "remove it"
                )
    targets = config.get("target_modules")
    strange = [name for name in names if not _targeted(targets, name, where)]
    if strange:
        raise ModelError(
            f"{where}: target_modules={targets!r} does not name {strange[0]}, but {WEIGHTS} has tensors for it "
            f"({len(strange)} such modules); the two files do not belong together"
        )


def _targeted(targets: Any, name: str, where: str) -> bool:
    """Does target_modules take the module in? A list of names or their ends; a regular expression; nothing said."""
    if targets is None or targets == "all-linear" or targets == []:
        return True
    if isinstance(targets, list) and all(isinstance(target, str) for target in targets):
        return any(name == target or name.endswith("." + target) for target in targets)
    if not isinstance(targets, str):
        raise ModelError(f"{where}: target_modules={targets!r}: must be a list of names, or one regular expression")
    try:
        return re.fullmatch(targets, name) is not None
    except re.error as error:
        raise ModelError(f"{where}: target_modules={targets!r} is no regular expression: {error}") from error


def _ends(names: list[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))


def _key(modules: Mapping[str, LowRank]) -> str:
    """128 bits over names, shapes, scales and numbers: equal for equal adapters, and for no others."""
    digest = hashlib.blake2b(digest_size=16)
    for name, pair in modules.items():
        digest.update(f"{len(name)}:{name}|{tuple(pair.a.shape)}|{tuple(pair.b.shape)}|{pair.scale!r}|".encode())
        for half in (pair.a, pair.b):
            digest.update(half.contiguous().numpy().tobytes())
    return digest.hexdigest()
