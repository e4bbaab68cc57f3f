"""Hugging Face architectures, small and with random weights, trained a step against eager.

python -m tests.loops.architectures [--only bert,t5]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from undertow.notices import counts

VOCABULARY = 120
_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
_ENCODER = {**_DECODER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}


def _tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def _images() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randn(2, 3, 32, 32, generator=random),
        "labels": torch.tensor([0, 1]),
    }


def _gpt2() -> Any:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config), _tokens()


def _t5() -> Any:
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config), _tokens()


def _bart() -> Any:
    config = hf.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_position_embeddings=64, dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    return hf.BartForConditionalGeneration(config), _tokens()


def _vit() -> Any:
    config = hf.ViTConfig(
        image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_labels=3,
    )  # fmt: skip
    return hf.ViTForImageClassification(config), _images()


def _convnext() -> Any:
    config = hf.ConvNextConfig(
        hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], num_labels=3, image_size=32
    )
    return hf.ConvNextForImageClassification(config), _images()


def _resnet() -> Any:
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3, layer_type="basic"
    )
    return hf.ResNetForImageClassification(config), _images()


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "gpt2": _gpt2,
    "llama": lambda: (hf.LlamaForCausalLM(hf.LlamaConfig(**_GROUPED)), _tokens()),
    "qwen2": lambda: (hf.Qwen2ForCausalLM(hf.Qwen2Config(**_GROUPED)), _tokens()),
    "gemma": lambda: (hf.GemmaForCausalLM(hf.GemmaConfig(**_GROUPED, head_dim=8)), _tokens()),
    "opt": lambda: (
        hf.OPTForCausalLM(
            hf.OPTConfig(**{**_DECODER, "word_embed_proj_dim": 32, "ffn_dim": 64, "dropout": 0.0})
        ),
        _tokens(),
    ),
    "gpt-neox": lambda: (hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_DECODER)), _tokens()),
    "mixtral": lambda: (
        hf.MixtralForCausalLM(
            hf.MixtralConfig(
                **_GROUPED,
                num_local_experts=4,
                num_experts_per_tok=2,
                experts_implementation="eager",
            )
        ),
        _tokens(),
    ),
    "bert": lambda: (hf.BertForMaskedLM(hf.BertConfig(**_ENCODER)), _tokens()),
    "t5": _t5,
    "bart": _bart,
    "vit": _vit,
    "convnext": _convnext,
    "resnet": _resnet,
}


def compare(name: str) -> str | None:
    """Train one step both ways; what differs, if anything does."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counts.clear()
    model, batch = ARCHITECTURES[name]()
    model.train()
    want = _step(model, model, batch)
    got = _step(model, torch.compile(model, backend="undertow"), batch)
    if not counts["graphs"] or counts["native fallback"]:
        return f"it was not compiled, or not to kernels of our own: {dict(counts)}"
    for (key, a), (_, b) in zip(got.items(), want.items(), strict=True):
        try:
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-5)
        except AssertionError as error:
            return f"{key}: {error}"
    return None


def _step(model: Any, called: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    options = {"use_cache": False} if "input_ids" in batch else {}
    loss = called(**batch, **options).loss
    loss.backward()
    found = {"loss": loss.detach()}
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[key] = parameter.grad.clone()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="names, with commas")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(ARCHITECTURES)
    failures = 0
    for name in names:
        begin = time.perf_counter()
        problem = compare(name)
        failures += problem is not None
        seconds = time.perf_counter() - begin
        print(
            f"{name:10} {problem or 'same'}  {counts['graphs']} graphs, {seconds:.0f} s", flush=True
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
