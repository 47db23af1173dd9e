"""A GPT written from the papers in double precision; only the parameters are read from the model, by name."""

from __future__ import annotations

import math

import torch


class Hand:
    """One forward pass over tokens `[batch, seq]` of a model without shared layers."""

    def __init__(self, model, tokens):
        self.spec, self.p = model.spec, {name: tensor.double() for name, tensor in model.named_parameters()}
        self.tokens, (self.batch, self.seq) = tokens, tokens.shape

    def norm(self, x, name):
        spec, p = self.spec, self.p
        if spec.norm == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + spec.norm_eps) * p[f"{name}.weight"]
        return x + p[f"{name}.bias"] if spec.norm == "layernorm" else x

    def linear(self, x, name):
        y = torch.einsum("bsi,oi->bso", x, self.p[f"{name}.linear.weight"])
        return y + self.p[f"{name}.linear.bias"] if self.spec.bias else y

    def turn(self, x):
        """Rotary positions, pair by pair; x is [batch, seq, heads, size]."""
        half = x.shape[-1] // 2
        out = torch.empty_like(x)
        for i in range(half):
            rate = self.spec.rotary_base ** (-2 * i / x.shape[-1])
            angle = torch.arange(self.seq, dtype=torch.float64)[:, None] * rate
            a, b = x[..., i], x[..., i + half]
            out[..., i] = a * angle.cos() - b * angle.sin()
            out[..., i + half] = b * angle.cos() + a * angle.sin()
        return out

    def attention(self, x, name):
        spec, seq = self.spec, self.seq
        y = self.norm(x, f"{name}.norm")
        shape = (self.batch, seq, spec.heads, x.shape[-1] // spec.heads)
        q, k, v = (self.linear(y, f"{name}.attention.{part}").view(shape) for part in ("query", "key", "value"))
        if spec.positions == "rotary":
            q, k = self.turn(q), self.turn(k)
        scores = spec.attention_scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        scores = scores.masked_fill(torch.arange(seq)[None] > torch.arange(seq)[:, None], -math.inf)
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        y = self.linear(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2), f"{name}.attention.out")
        return spec.branch_mult * (self.norm(y, f"{name}.norm_after") if spec.sandwich else y)

    def act(self, x):
        kind = {"geglu": "gelu", "swiglu": "silu", "reglu": "relu"}.get(self.spec.activation, self.spec.activation)
        if kind == "gelu":
            return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
        return x / (1 + torch.exp(-x)) if kind == "silu" else x.clamp(min=0)

    def ffn(self, x, name):
        spec = self.spec
        y = self.norm(x, f"{name}.norm")
        up = self.linear(y, f"{name}.feed_forward.up")
        gated = spec.activation.endswith("glu")
        inner = self.act(self.linear(y, f"{name}.feed_forward.gate")) * up if gated else self.act(up)
        y = self.linear(inner, f"{name}.feed_forward.down")
        return spec.branch_mult * (self.norm(y, f"{name}.norm_after") if spec.sandwich else y)

    def embedded(self):
        spec, p, seq = self.spec, self.p, self.seq
        h = p["embedding.token.weight"][self.tokens.long()]
        if spec.positions == "learned":
            h = h + p["embedding.position.weight"][:seq]
        if spec.positions == "sinusoidal":
            half = spec.width // 2
            rate = torch.tensor([spec.rotary_base ** (-i / half) for i in range(half)], dtype=torch.float64)
            angle = torch.arange(seq, dtype=torch.float64)[:, None] * rate
            h = h + math.sqrt(2) * spec.embedding_std * torch.cat([angle.sin(), angle.cos()], -1)
        return spec.embedding_mult * h

    def layers(self, h):
        """Block i holds the branches of one layer, or of two with order `aaff`."""
        spec, per_block, branches = self.spec, 2 if self.spec.order == "aaff" else 1, []
        for block in range(spec.depth // per_block):
            for i in range(2 * per_block):
                branches.append((self.attention if i < per_block else self.ffn, f"layers.blocks.{block}.branches.{i}"))
        if spec.stack == "residual":
            for function, name in branches:
                h = h + function(h, name)
            return h
        half = spec.width // 2
        zeros = (h, 0 * h) if spec.coupling == "momentum" else (0 * h, h)
        begin = {"duplicate": (h, h), "zeros": zeros, "split": (h[..., :half], h[..., half:])}
        a, b = getattr(self, spec.coupling.replace("-", "_"))(branches, *begin[spec.stack_input])
        if spec.stack_output.startswith("gate"):
            g = 1 / (1 + torch.exp(-self.p["layers.gate.weight"]))
            return g * a + (1 - g) * b
        both = torch.cat((a, b), -1)
        return {
            "sum-minus-input": lambda: a + b - h,
            "sum": lambda: a + b,
            "x": lambda: a,
            "y": lambda: b,
            "mean": lambda: (a + b) / 2,
            "concat": lambda: both,
        }[spec.stack_output]()

    def additive(self, branches, a, b):
        for function, name in branches:
            a, b = b, a + function(b, name)
        return a, b

    def mean(self, branches, a, b):
        """Each stream is the mean of a list; with the global index, an average that forgets."""
        lists = [[a], [b]]
        for n, (function, name) in enumerate(branches):
            mine, other = lists[n % 2], lists[(n + 1) % 2]
            f = function(sum(other) / len(other), name)
            if self.spec.index == "global":
                i = n + 1
                mine[:] = [(i * mine[0] + f) / (i + 1)]
            else:
                mine.append(f)
        return tuple(sum(items) / len(items) for items in lists)

    def affine(self, branches, a, b):
        for function, name in branches:
            s = self.spec.branch_mult * self.linear(self.norm(b, f"{name}.norm"), f"{name}.scale")
            a, b = b, a / (1 + torch.exp(-s - 2)) + function(b, name)
        return a, b

    def momentum(self, branches, x, v):
        """Sander et al. 2021, equation 1."""
        beta = self.spec.beta
        for function, name in branches:
            v = beta * v + (1 - beta) * function(x, name)
            x = x + v
        return x, v

    def modified_momentum(self, branches, a, b):
        beta = self.spec.beta
        for i, (function, name) in enumerate(branches):
            a = a + function(beta**i * b, name)
            b = b + (1 - beta) / beta ** (i + 1) * a
        return a, b

    def logits(self):
        """[batch, seq, vocab]."""
        spec, p = self.spec, self.p
        weight = p["embedding.token.weight"] if spec.tied else p["readout.weight"]
        m = spec.width / spec.base_width if spec.base_width else 1.0
        return spec.output_mult / m * self.norm(self.layers(self.embedded()), "norm") @ weight.t()
