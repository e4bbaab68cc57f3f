"""How long compiling takes, cold: ours beside Inductor's, each in a process of its own.

python -m bench.compile                 all models
python -m bench.compile --only gpt2,mlp

CPU seconds of the process and the compilers that it starts, and wall seconds, for the first forward
and backward. "capture" is Dynamo and AOTAutograd with a backend that does nothing after them; a
compiler's own part is what its total has beyond that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from bench.harness import held, print_table, save_results

MODELS = ("mlp", "gpt2", "llama", "bert", "vit", "rnn", "adamw")
BACKENDS = ("capture", "ours", "inductor")


def make(name: str) -> Any:
    """A function that does one step, given a way to compile."""
    import torch

    torch.manual_seed(0)
    if name == "adamw":
        parameters = [torch.randn(97 * n, requires_grad=True) for n in range(1, 101)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=True)
        return lambda compiled: compiled(optimizer.step)()
    model, call = _model(name)
    return lambda compiled: call(compiled(model)).backward()


def _model(name: str) -> Any:
    import torch
    from torch import nn

    if name == "mlp":
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
        return nn.Sequential(*layers), lambda m: m(torch.randn(32, 64)).square().mean()
    if name == "rnn":

        class Cell(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                h = torch.zeros(x.shape[1], 32)
                for step in x.unbind(0):
                    h = torch.tanh(self.a(step) + self.b(h)) * torch.sigmoid(h)
                return h

        return Cell(), lambda m: m(torch.randn(24, 4, 32)).square().mean()
    return _hugging_face(name)


def _hugging_face(name: str) -> Any:
    import torch
    import transformers as hf

    ids = torch.randint(3, 500, (2, 64))
    small = {
        "vocab_size": 500,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 256,
    }
    if name == "gpt2":
        config = hf.GPT2Config(
            vocab_size=500, n_embd=128, n_layer=4, n_head=4, n_positions=64, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        model = hf.GPT2LMHeadModel(config)
    elif name == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**small))
    elif name == "bert":
        config = hf.BertConfig(**small, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = hf.BertForMaskedLM(config)
        return model.train(), lambda m: m(input_ids=ids, labels=ids).loss
    else:
        config = hf.ViTConfig(
            image_size=64, patch_size=8, hidden_size=128, num_hidden_layers=4,
            num_attention_heads=4, intermediate_size=256, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        image = torch.randn(2, 3, 64, 64)
        labels = torch.tensor([0, 1])
        model = hf.ViTForImageClassification(config)
        return model.train(), lambda m: m(pixel_values=image, labels=labels).loss
    return model.train(), lambda m: m(input_ids=ids, labels=ids, use_cache=False).loss


def child(name: str, backend: str) -> None:
    """Compile one model with one backend; print what it took."""
    import torch

    from bench import backends

    chosen: Any = backend
    if backend == "ours":
        chosen = backends.ours
    elif backend == "capture":
        chosen = backends.capture
    else:
        import torch._inductor.config as settings

        settings.compile_threads = 1
        settings.force_disable_caches = True
        import torch._inductor.compile_fx
    step = make(name)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))  # Dynamo's own start-up
    wall, before = time.perf_counter(), os.times()
    step(lambda function: torch.compile(function, backend=chosen))
    after = os.times()
    cpu = sum(after[:4]) - sum(before[:4])
    own = sum(sum(graph.seconds.values()) for graph in backends.COMPILED)
    kernels = sum(graph.kernels for graph in backends.COMPILED)
    found = {"cpu": cpu, "wall": time.perf_counter() - wall, "own": own, "kernels": kernels}
    print("RESULT " + json.dumps(found))


def measure(name: str, backend: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        place = {"UNDERTOW_CACHE": f"{folder}/ours", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/theirs"}
        answer = subprocess.run(
            [sys.executable, "-m", "bench.compile", "--child", name, backend],
            env={**os.environ, **place},
            capture_output=True,
            text=True,
            timeout=1200,
        )
    lines = [line for line in answer.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{name} with {backend} failed:\n{answer.stderr[-3000:]}")
    found: dict[str, float] = json.loads(lines[-1][7:])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="models, with commas")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return 0
    rows, results, own, whole = [], {}, [], []
    for name in options.only.split(",") if options.only else MODELS:
        found = {backend: measure(name, backend) for backend in BACKENDS}
        results[name] = found
        base = found["capture"]["cpu"]
        parts = {b: max(found[b]["cpu"] - base, 0.01) for b in ("ours", "inductor")}
        own.append(parts["inductor"] / parts["ours"])
        whole.append(found["inductor"]["cpu"] / found["ours"]["cpu"])
        cells = [f"{base:.1f}", f"{parts['ours']:.1f}", f"{parts['inductor']:.1f}"]
        rows.append([name, *cells, f"{own[-1]:.1f}", f"{whole[-1]:.1f}"])
        print("  ".join(rows[-1]), flush=True)
    header = ["model", "capture s", "ours s", "inductor s", "own part", "whole"]
    print_table("CPU seconds to compile, cold; times faster than Inductor", header, rows)
    means = [math.exp(sum(map(math.log, values)) / len(values)) for values in (own, whole)]
    kept = held(means[0] >= 10, f"our part {means[0]:.1f} times faster, geometric mean (10)")
    kept &= held(means[1] >= 4, f"whole compilation {means[1]:.1f} times faster (4)")
    kept &= held(min(whole) >= 1, f"slowest {min(whole):.1f} times as fast as Inductor (1)")
    if not options.only:
        save_results("compile", {"seconds": results})
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
