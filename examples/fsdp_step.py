"""Builds the Program that `undertow demo` shows: one training step of a few Llama-3-8B layers.

    python examples/fsdp_step.py undertow/cli/data/fsdp_step.json

Sharded over 64 ranks (FSDP, resharding after forward), bfloat16 compute and float32 gradient
reductions, one sequence of 8192 tokens per rank. In captured order every collective is waited for
right after its start, as tracing a model gives it.
"""

from __future__ import annotations

import sys

from undertow.program import (
    Collective,
    CollectiveKind,
    OpClass,
    Program,
    ProgramBuilder,
    Work,
    program_to_json,
)
from undertow.program.serialize import write_whole

LAYERS = 4
RANKS = 64
TOKENS = 8192
HIDDEN, KV, FFN = 4096, 1024, 14336
HEADS, HEAD_DIM = 32, 128
BF16, FP32 = 2, 4

QKV = HIDDEN * (HIDDEN + 2 * KV)
OUT = HIDDEN * HIDDEN
UP = 2 * HIDDEN * FFN  # gate and up projection in one
DOWN = FFN * HIDDEN
PARAMETERS = QKV + OUT + UP + DOWN
ACTIVATION = TOKENS * HIDDEN * BF16


def matmul(m: int, n: int, k: int) -> Work:
    return Work(
        "aten.mm",
        OpClass.MATMUL,
        flops=2 * m * n * k,
        nbytes_read=(m * k + k * n) * BF16,
        nbytes_written=m * n * BF16,
        dtype="bfloat16",
        shape=(1, m, n, k),
    )


def attention(backward: bool = False) -> Work:
    """Causal attention: half of the scores are computed; backward takes five products for two."""
    forward = 2 * 2 * TOKENS * TOKENS * HEADS * HEAD_DIM // 2
    moved = ACTIVATION * (8 if backward else 3)
    return Work(
        "aten.scaled_dot_product_attention",
        OpClass.ATTENTION,
        flops=forward * 5 // 2 if backward else forward,
        nbytes_read=moved,
        nbytes_written=ACTIVATION,
        dtype="bfloat16",
    )


def memory_bound(op: str, op_class: OpClass, read: int, written: int) -> Work:
    return Work(op, op_class, read // BF16, read, written, "bfloat16")


class Step:
    """Collects the step, layer by layer."""

    def __init__(self) -> None:
        self.b = b = ProgramBuilder("four Llama-3-8B layers, FSDP on 64 ranks")
        b.group("fsdp", ranks=range(RANKS))
        b.input("tokens", TOKENS * 8)
        for layer in range(LAYERS):
            b.input(f"shard{layer}", PARAMETERS * BF16 // RANKS)
            b.output(f"grad_shard{layer}", PARAMETERS * FP32 // RANKS)

    def build(self) -> Program:
        self.b.buffer("x0", ACTIVATION)
        embed = memory_bound("aten.embedding", OpClass.GATHER, ACTIVATION, ACTIVATION)
        self.b.compute("embed", reads=["tokens"], writes=["x0"], work=embed, module="embed")
        for layer in range(LAYERS):
            self.forward(layer)
        self.b.buffer(f"dx{LAYERS}", ACTIVATION)
        loss = memory_bound("aten.mse_loss", OpClass.REDUCTION, ACTIVATION, ACTIVATION)
        last = f"x{LAYERS}"
        self.b.compute("loss", reads=[last], writes=[f"dx{LAYERS}"], work=loss, module="loss")
        for layer in reversed(range(LAYERS)):
            self.backward(layer)
        return self.b.build()

    def gather(self, layer: int, which: str) -> str:
        full, module = f"{which}_weights{layer}", f"layers.{layer}"
        self.b.buffer(full, PARAMETERS * BF16)
        work = Collective(CollectiveKind.ALL_GATHER, PARAMETERS * BF16 // RANKS, "bfloat16")
        name = f"{which}_gather{layer}"
        self.b.start(name, "fsdp", reads=[f"shard{layer}"], writes=[full], work=work, module=module)
        self.b.wait(f"{name}_wait", name, module=module)
        return full

    def forward(self, layer: int) -> None:
        b, weights = self.b, self.gather(layer, "fwd")
        sizes = {
            "normed": ACTIVATION,
            "qkv": TOKENS * (HIDDEN + 2 * KV) * BF16,
            "mixed": ACTIVATION,
            "mid": ACTIVATION,
            "gated": TOKENS * FFN * 2 * BF16,
            "act": TOKENS * FFN * BF16,
        }
        names = {name: f"{name}{layer}" for name in sizes}
        for name, nbytes in sizes.items():
            b.buffer(names[name], nbytes)
        x, out = f"x{layer}", f"x{layer + 1}"
        b.buffer(out, ACTIVATION)
        norm = memory_bound("aten.rms_norm", OpClass.REDUCTION, ACTIVATION, ACTIVATION)
        silu = memory_bound("aten.silu_mul", OpClass.POINTWISE, sizes["gated"], sizes["act"])
        steps = (
            ("norm", [x], "normed", norm, "norm"),
            ("qkv", ["normed", weights], "qkv", matmul(TOKENS, HIDDEN + 2 * KV, HIDDEN), "attn"),
            ("attention", ["qkv"], "mixed", attention(), "attn"),
            ("proj", ["mixed", weights, x], "mid", matmul(TOKENS, HIDDEN, HIDDEN), "attn"),
            ("up", ["mid", weights], "gated", matmul(TOKENS, 2 * FFN, HIDDEN), "mlp"),
            ("silu", ["gated"], "act", silu, "mlp"),
            ("down", ["act", weights, "mid"], out, matmul(TOKENS, HIDDEN, FFN), "mlp"),
        )
        for name, reads, writes, work, module in steps:
            b.compute(
                f"fwd_{name}{layer}",
                reads=[names.get(read, read) for read in reads],
                writes=[names.get(writes, writes)],
                work=work,
                module=f"layers.{layer}.{module}",
            )

    def backward(self, layer: int) -> None:
        b, weights, module = self.b, self.gather(layer, "bwd"), f"layers.{layer}"
        dx, dmid, grad = f"dx{layer}", f"dmid{layer}", f"grad{layer}"
        b.buffer(dmid, ACTIVATION)
        b.buffer(dx, ACTIVATION)
        b.buffer(grad, PARAMETERS * FP32)
        b.compute(
            f"bwd_mlp{layer}",
            reads=[f"dx{layer + 1}", weights, f"act{layer}", f"gated{layer}", f"mid{layer}"],
            writes=[dmid, grad],
            work=matmul(TOKENS, 2 * 3 * FFN, HIDDEN),
            module=f"{module}.mlp",
        )
        b.compute(
            f"bwd_attention{layer}",
            reads=[dmid, f"qkv{layer}", f"mixed{layer}"],
            writes=[dmid],
            work=attention(backward=True),
            module=f"{module}.attn",
        )
        b.compute(
            f"bwd_proj{layer}",
            reads=[dmid, weights, f"normed{layer}", grad],
            writes=[dx, grad],
            work=matmul(TOKENS, 2 * (2 * HIDDEN + 2 * KV), HIDDEN),
            module=f"{module}.attn",
        )
        name = f"reduce{layer}"
        work = Collective(CollectiveKind.REDUCE_SCATTER, PARAMETERS * FP32, "float32", "avg")
        b.start(name, "fsdp", reads=[grad], writes=[f"grad_shard{layer}"], work=work, module=module)
        b.wait(f"{name}_wait", name, module=module)


def fsdp_step() -> Program:
    return Step().build()


if __name__ == "__main__":
    import json

    write_whole(sys.argv[1], json.dumps(program_to_json(fsdp_step()), indent=1) + "\n")
