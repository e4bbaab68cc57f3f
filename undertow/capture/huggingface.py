"""Any Hugging Face causal language model or encoder, by its model type or its config class.

"hf:gpt2", "hf:LlamaConfig", "hf:bert": the sizes are the config class's defaults, the weights
random; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from undertow.capture.models import Example, ModelError
from undertow.errors import unknown_name

# Attention stays one operation only without dropout: the CPU's, which we trace, has none inside.
_ATTENTION_DROPOUT = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob")


def load(name: str, batch: int, seq: int | None) -> Callable[[], Example]:
    """A function that builds the example of a model type or config class.

    load("qwen2", batch=1, seq=4096)
    """
    transformers = _transformers()
    config = _config(transformers, name)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"hf:{name} is an encoder-decoder, which is not supported")
    auto, kind = _auto_class(transformers, config, name)

    def make() -> Example:
        model = auto.from_config(config)
        if kind == "image":
            return _image_example(model, config, batch, name)
        return _text_example(model, config, batch, seq, name)

    return make


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            "models of Hugging Face need transformers: pip install 'undertow[hf]'"
        ) from error
    module: ModuleType = transformers
    return module


def _config(transformers: ModuleType, name: str) -> Any:
    types: dict[str, Any] = dict(transformers.CONFIG_MAPPING.items())
    classes = {kind.__name__: kind for kind in types.values()}
    if name not in types and name not in classes:
        raise ModelError(
            unknown_name("Hugging Face model type or config class", name, [*types, *classes])
        )
    kind = types.get(name) or classes[name]
    config = kind()
    config = getattr(config, "text_config", None) or config
    for option in _ATTENTION_DROPOUT:
        if hasattr(config, option):
            setattr(config, option, 0.0)
    return config


def _auto_class(transformers: ModuleType, config: Any, name: str) -> tuple[Any, str]:
    """Which kind of model a config makes: a masked encoder, a causal language model, or images."""
    kind = type(config)
    causal = kind in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if kind in transformers.MODEL_FOR_MASKED_LM_MAPPING:
        return transformers.AutoModelForMaskedLM, "text"
    if causal:
        return transformers.AutoModelForCausalLM, "text"
    if kind in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        return transformers.AutoModelForImageClassification, "image"
    raise ModelError(f"hf:{name} is neither a causal language model nor an encoder")


def _text_example(model: Any, config: Any, batch: int, seq: int | None, name: str) -> Example:
    longest = getattr(config, "max_position_embeddings", None) or 1024
    length = seq or min(longest, 1024)
    if length > longest:
        raise ModelError(f"hf:{name} has {longest} positions, and seq is {length}")
    tokens = torch.randint(config.vocab_size, (batch, length))
    targets = torch.randint(config.vocab_size, (batch, length))
    inputs: dict[str, Any] = {"input_ids": tokens}
    if hasattr(config, "use_cache"):
        inputs["use_cache"] = False
    return Example(model, inputs, _token_loss, (targets,), name=f"hf:{name}")


def _image_example(model: Any, config: Any, batch: int, name: str) -> Example:
    size = config.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    images = torch.randn(batch, getattr(config, "num_channels", 3), height, width)
    targets = torch.randint(config.num_labels, (batch,))
    return Example(model, {"pixel_values": images}, _class_loss, (targets,), name=f"hf:{name}")


def _token_loss(output: Any, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten())


def _class_loss(output: Any, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits.float(), targets)
