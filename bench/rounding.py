"""What ways to round weights and activations to 8 bits cost, tried in torch before there are kernels for them.

    python bench/rounding.py [--model smollm2] [--windows 16] [--window 512]

Every matrix is rounded, its inputs are rounded on the way in, and the product is taken in float32; keys and values are exact.
The text is that of bench/quality.py.

KL            of the exact model's next token from the rounded one's, thousandths of a nat, mean of all tokens
difference    of the perplexity, against the exact model; ± is its standard error
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp, sqrt
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.models.decoder import Decoder
from baton.models.layers.linear import Linear
from baton.models.load import load_model
from baton.models.names import resolve
from baton.models.reference import all_logits
from baton.native.balance import FIRST_TOKEN, TOKEN_STEP, TOKENS, best_balance
from baton.text.loading import load_model_text
from measuring.goals import markdown
from measuring.machine import CORES
from quality import windows_of

REFLECTED = (3, 5, 7, 11, 13)

Round = Callable[[Tensor], Tensor]


# Rounding


def exact(x: Tensor) -> Tensor:
    return x


def to_bytes(x: Tensor, group: int = 0) -> Tensor:
    """With one scale for a row, or for `group` numbers of it."""
    parts = x.reshape(*x.shape[:-1], -1, group) if group else x
    scale = (parts.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    return ((parts / scale).round() * scale).reshape(x.shape)


def in_groups(x: Tensor) -> Tensor:
    return to_bytes(x, 32)


def mixed(x: Tensor) -> Tensor:
    """As csrc/hadamard.h does it, but for the stretching."""
    width, apart = x.shape[-1], 1
    while width % (2 * apart) == 0:
        a, b = x.reshape(*x.shape[:-1], -1, 2, apart).unbind(-2)
        x, apart = (torch.stack((a + b, a - b), -2) / sqrt(2)).reshape(x.shape), 2 * apart
    for factor in REFLECTED:
        while width // apart % factor == 0:
            parts = x.reshape(*x.shape[:-1], -1, factor, apart)
            x, apart = (parts - 2 / factor * parts.sum(-2, keepdim=True)).reshape(x.shape), factor * apart
    return x


@dataclass(frozen=True, slots=True)
class Scheme:
    name: str
    weights: Round = exact
    activations: Round = exact
    mixed: bool = False
    balanced: bool = False


SCHEMES = (
    Scheme("weights in bytes, groups of 32 (Q8_0)", in_groups),
    Scheme("both in bytes, groups of 32 (llama.cpp's Q8_0)", in_groups, in_groups),
    Scheme("weights in bytes, one scale a row", to_bytes),
    Scheme("activations in bytes, one scale a row", exact, to_bytes),
    Scheme("the same, mixed", exact, to_bytes, mixed=True),
    Scheme("weights in bytes, one scale a row, mixed", to_bytes, mixed=True),
    Scheme("both in bytes, one scale a row, mixed", to_bytes, to_bytes, mixed=True),
    Scheme("both in bytes, one scale a row, mixed and balanced (Baton's int8)", to_bytes, to_bytes, mixed=True, balanced=True),
)


# Models


class Rounded(Linear):
    """A linear whose weight and inputs go through a scheme."""

    __slots__ = ("heard", "inputs", "plain")

    @classmethod
    def instead_of(cls, linear: Linear) -> Rounded:
        rounded = cls(linear.weight, linear.bias)
        rounded.plain, rounded.heard, rounded.inputs = linear.weight, torch.zeros(linear.weight.shape[1]), exact
        return rounded

    def take(self, scheme: Scheme) -> None:
        balance = torch.ones(self.plain.shape[1])
        if scheme.balanced:
            balance = torch.from_numpy(best_balance(self.plain.square().sum(0).numpy(), self.heard.numpy()))
        mix = mixed if scheme.mixed else exact
        self.weight = scheme.weights(mix(self.plain / balance))
        self.inputs = lambda x: scheme.activations(mix(x * balance))

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(self.inputs(x), self.weight, self.bias)

    def listen(self, x: Tensor) -> Tensor:
        self.heard = x.square().sum(0)
        return x


def rounded_linears(model: Decoder) -> Iterator[Rounded]:
    """Puts them in place of the model's."""
    owners = [(layer.attention, name) for layer in model.layers for name in ("qkv", "output")]
    owners += [(layer.mlp, name) for layer in model.layers for name in ("gate_up", "down")]
    for owner, name in [*owners, (model, "head")]:
        rounded = Rounded.instead_of(getattr(owner, name))
        setattr(owner, name, rounded)
        yield rounded


def main() -> None:
    options = read_options()
    torch.set_num_threads(CORES)
    path = resolve(options.model)
    windows = windows_of(load_model_text(str(path)).tokenizer.encode, options.window, options.windows)
    model = load_model(path).model
    linears = list(rounded_linears(model))
    for linear in linears:
        linear.inputs = linear.listen
    all_logits(model, [(FIRST_TOKEN + TOKEN_STEP * i) % model.config.vocab_size for i in range(TOKENS)])
    for linear in linears:
        linear.take(Scheme("exact"))
    expected = [all_logits(model, window).log_softmax(-1) for window in windows]

    rows = []
    for scheme in SCHEMES:
        for linear in linears:
            linear.take(scheme)
        divergences, losses = [], []
        for window, right in zip(windows, expected, strict=True):
            found = all_logits(model, window).log_softmax(-1)
            divergences += (right.exp() * (right - found)).sum(-1).tolist()
            losses.append((right - found)[:-1].gather(1, torch.tensor(window[1:])[:, None])[:, 0])
        loss = torch.cat(losses)
        difference, error = 100 * (exp(float(loss.mean())) - 1), 100 * float(loss.std()) / sqrt(len(loss))
        rows.append([scheme.name, f"{1000 * fmean(divergences):.2f}", f"{difference:+.2f} % ± {error:.2f}"])
        print(" ".join(rows[-1]), flush=True)
    print()
    print(markdown(["scheme", "KL", "difference"], rows))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as for baton serve")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    return parser.parse_args()


if __name__ == "__main__":
    main()
