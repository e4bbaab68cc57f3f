"""The models that the benchmarks of the loop compiler compile and run, with random weights.

"small" ones have little to compute, so that calls and compilation show; "large" ones have tensors
of megabytes, so that kernels and memory do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

MODELS = ("mlp", "gpt2", "llama", "bert", "vit", "rnn", "adamw")


class Size(NamedTuple):
    width: int
    batch: int
    length: int  # tokens of a text
    image: int  # pixels along a side
    steps: int  # of the recurrent one
    unit: int  # elements of the smallest parameter that AdamW updates; the last has 100 times more


SIZES = {
    "small": Size(128, 2, 64, 64, 24, 97),
    "large": Size(256, 8, 256, 128, 24, 4001),
}


def make(name: str, size: str = "small") -> Any:
    """A function that does one step, given a way to compile."""
    import torch

    torch.manual_seed(0)
    chosen = SIZES[size]
    if name == "adamw":
        parameters = [torch.randn(chosen.unit * n, requires_grad=True) for n in range(1, 101)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=True)
        return lambda compiled: compiled(optimizer.step)()
    model, call = _model(name, chosen)
    return lambda compiled: call(compiled(model)).backward()


def _model(name: str, size: Size) -> Any:
    import torch
    from torch import nn

    half = size.width // 2
    if name == "mlp":
        layers = [layer for _ in range(6) for layer in (nn.Linear(half, half), nn.GELU())]
        batch = torch.randn(size.batch * size.length // 4, half)
        return nn.Sequential(*layers), lambda m: m(batch).square().mean()
    if name == "rnn":
        width = half // 2

        class Cell(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                h = torch.zeros(x.shape[1], width)
                for step in x.unbind(0):
                    h = torch.tanh(self.a(step) + self.b(h)) * torch.sigmoid(h)
                return h

        batch = torch.randn(size.steps, size.batch * size.length // 32, width)
        return Cell(), lambda m: m(batch).square().mean()
    return _hugging_face(name, size)


def _hugging_face(name: str, size: Size) -> Any:
    import torch
    import transformers as hf

    ids = torch.randint(3, 500, (size.batch, size.length))
    shape = {
        "hidden_size": size.width,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 2 * size.width,
    }
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "gpt2":
        config = hf.GPT2Config(
            vocab_size=500, n_embd=size.width, n_layer=4, n_head=4, n_positions=size.length,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        model = hf.GPT2LMHeadModel(config)
    elif name == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=500, **shape))
    elif name == "bert":
        model = hf.BertForMaskedLM(hf.BertConfig(vocab_size=500, **shape, **still))
        return model.train(), lambda m: m(input_ids=ids, labels=ids).loss
    else:
        kind = "single_label_classification"  # else the first call finds out, and changes the model
        config = hf.ViTConfig(
            image_size=size.image, patch_size=8, problem_type=kind, **shape, **still
        )
        image = torch.randn(size.batch, 3, size.image, size.image)
        labels = torch.arange(size.batch) % 2
        model = hf.ViTForImageClassification(config)
        return model.train(), lambda m: m(pixel_values=image, labels=labels).loss
    return model.train(), lambda m: m(input_ids=ids, labels=ids, use_cache=False).loss
