"""Mistakes in tables of position codes."""

from __future__ import annotations

import torch
from tests.audit.bugs.bug import Bug
from torch import Tensor, nn

from posenc import GridSinusoidal, Sinusoidal
from posenc.audit.tables.checking import check_table
from posenc.hf.rules import InputTable

WIDTH = 32


def sinusoids(positions: Tensor, exponents: Tensor, base: float = 10_000.0) -> Tensor:
    """Sine in even channels, cosine in odd ones, of one angle per exponent."""
    angle = positions[..., None].double() / base**exponents
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2).float()


def paper(positions: Tensor) -> Tensor:
    return sinusoids(positions, torch.arange(0, WIDTH, 2).double() / WIDTH)


def halves(positions: Tensor, divisor: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """All sines, then all cosines."""
    angle = positions[..., None].to(dtype) / 10_000.0 ** (torch.arange(WIDTH // 2).to(dtype) / divisor)
    return torch.cat([angle.sin(), angle.cos()], dim=-1).float()


PE = paper(torch.arange(512))


def added(fn):
    return lambda: check_table(fn, width=WIDTH, reads="embeddings", length=512)


def by_position(fn, **settings):
    return lambda: check_table(fn, width=WIDTH, **settings)


def of_grid(fn, **settings):
    return lambda: check_table(fn, width=WIDTH, reads="grid", **settings)


def read_at_most_512(x: Tensor) -> Tensor:
    if x.shape[1] > 512:
        raise IndexError("more than 512 tokens")
    return x + PE[None, : x.shape[1]]


def per_channel(positions: Tensor, exponent: Tensor) -> Tensor:
    angle = positions[..., None].double() / 10_000.0**exponent
    even = torch.arange(WIDTH) % 2 == 0
    return torch.where(even, angle.sin(), angle.cos()).float()


def in_half_precision(positions: Tensor) -> Tensor:
    """The product formed in float16, as a cast of positions and frequencies before it does."""
    speeds = (10_000.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH)).half()
    angle = (positions[..., None].half() * speeds).float()
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)


def in_bfloat16(positions: Tensor) -> Tensor:
    return paper(positions.bfloat16())


class Remembering(nn.Module):
    """A cache of rows keyed by how many there are, without where they start."""

    def __init__(self, key) -> None:
        super().__init__()
        self.key, self.known = key, {}

    def forward(self, positions: Tensor) -> Tensor:
        key = self.key(positions)
        if key not in self.known:
            self.known[key] = paper(positions)
        return self.known[key]


def learned(rows: int) -> nn.Embedding:
    table = nn.Embedding(rows, WIDTH)
    with torch.no_grad():
        table.weight.normal_(generator=torch.Generator().manual_seed(0))
    return table


ROBERTA, ROBERTA_514 = learned(512), learned(514)
NOT_FILLED = torch.full((512, WIDTH), float("nan"))


def axis(coordinates: Tensor) -> Tensor:
    angle = coordinates[:, None].double() * 10_000.0 ** -(torch.arange(WIDTH // 4).double() / (WIDTH // 4))
    return torch.cat([angle.sin(), angle.cos()], dim=-1).float()


def grid_table(height: int, width: int, indexing: str, first: str) -> Tensor:
    down, across = torch.arange(height), torch.arange(width)
    if indexing == "ij":
        row, column = torch.meshgrid(down, across, indexing="ij")
    else:
        column, row = torch.meshgrid(across, down, indexing="ij")
    parts = {"row": axis(row.flatten()), "column": axis(column.flatten())}
    order = ("column", "row") if first == "column" else ("row", "column")
    return torch.cat([parts[name] for name in order], dim=-1)


BUGS = [
    Bug(
        "table added along the batch",
        "table-batch-axis",
        "KasperGroesLudvigsen/influenza_transformer#9",
        added(lambda x: x + PE[: x.shape[0], None]),
        added(read_at_most_512),
    ),
    Bug(
        "one row of the table for all tokens",
        "table-same-row",
        "DiffPoseTalk/DiffPoseTalk#20",
        added(lambda x: x + PE[None, x.shape[1] - 1]),
        added(read_at_most_512),
    ),
    Bug(
        "length of embeddings read from their last axis",
        "table-length-axis",
        "huggingface/transformers#23167",
        added(lambda x: x + PE[None, : x.shape[-1]]),
        added(read_at_most_512),
    ),
    Bug(
        "sines cast to the integer dtype of positions",
        "table-integer",
        "huggingface/transformers#47674",
        by_position(lambda p: paper(p).to(p.dtype)),
        by_position(lambda p: paper(p).to(torch.get_default_dtype())),
    ),
    Bug(
        "sines cut to integers on their way into a float table",
        "table-integer",
        "huggingface/transformers#47674",
        by_position(lambda p: paper(p).long().float()),
        by_position(lambda p: paper(p).float()),
    ),
    Bug(
        "exponents counted one by one over the whole width",
        "table-divisor",
        "rasbt/LLMs-from-scratch#410",
        by_position(lambda p: sinusoids(p, torch.arange(WIDTH // 2) / WIDTH), expect="sinusoidal"),
        by_position(lambda p: sinusoids(p, torch.arange(WIDTH // 2) / (WIDTH // 2)), expect="sinusoidal"),
    ),
    Bug(
        "exponent 2i with i that steps by two already",
        "table-divisor",
        "YutaroOgawa/pytorch_advanced#79",
        by_position(lambda p: sinusoids(p, 2 * torch.arange(0, WIDTH, 2) / WIDTH), expect="sinusoidal"),
        by_position(lambda p: sinusoids(p, torch.arange(0, WIDTH, 2) / WIDTH), expect="sinusoidal"),
    ),
    Bug(
        "sine and cosine of a pair with exponents of their own",
        "table-formula",
        "SamLynnEvans/Transformer#25, jadore801120/attention-is-all-you-need-pytorch#32",
        by_position(lambda p: per_channel(p, 2 * torch.arange(WIDTH) / WIDTH)),
        by_position(lambda p: per_channel(p, 2 * (torch.arange(WIDTH) // 2) / WIDTH)),
    ),
    Bug(
        "base 1000 for 10000",
        "table-base",
        "maxjcohen/transformer#62",
        by_position(lambda p: sinusoids(p, torch.arange(0, WIDTH, 2) / WIDTH, 1_000.0), expect="sinusoidal"),
        by_position(lambda p: sinusoids(p, torch.arange(0, WIDTH, 2) / WIDTH, 10_000.0), expect="sinusoidal"),
    ),
    Bug(
        "Whisper's table with the paper's divisor",
        "table-divisor",
        "wenet-e2e/wenet#2141",
        by_position(
            lambda p: halves(p, WIDTH / 2),
            expect=Sinusoidal(WIDTH, layout="concatenated", frequency_rule="tensor2tensor"),
        ),
        by_position(
            lambda p: halves(p, WIDTH / 2 - 1),
            expect=Sinusoidal(WIDTH, layout="concatenated", frequency_rule="tensor2tensor"),
        ),
    ),
    Bug(
        "halves for a checkpoint of interleaved channels",
        "table-layout",
        "allenai/allennlp#2993, huggingface/diffusers#3981",
        by_position(lambda p: halves(p, WIDTH / 2), expect=Sinusoidal(WIDTH)),
        by_position(paper, expect=Sinusoidal(WIDTH)),
    ),
    Bug(
        "token embeddings and code scaled together",
        "table-scale",
        "the paper, §3.4: embeddings alone are multiplied by the root of the width",
        lambda: check_table(
            lambda x: (x + PE[: x.shape[1]]) * WIDTH**0.5, width=WIDTH, reads="embeddings", expect="sinusoidal"
        ),
        lambda: check_table(lambda x: x * WIDTH**0.5 + PE[: x.shape[1]], width=WIDTH, reads="embeddings", expect="sinusoidal"),
    ),
    Bug(
        "rows before padding_idx + 1 forgotten in the size of a table",
        "table-past-end",
        "huggingface/transformers#11242",
        by_position(lambda p: ROBERTA(p + 2), length=512),
        by_position(lambda p: ROBERTA_514(p + 2), length=512),
    ),
    Bug(
        "positions without the offset of padding_idx + 1",
        "table-offset",
        "huggingface/transformers#1363",
        by_position(lambda p: halves(p, WIDTH / 2 - 1), expect=InputTable("sinusoidal", None, 2, "concatenated")),
        by_position(lambda p: halves(p + 2, WIDTH / 2 - 1), expect=InputTable("sinusoidal", None, 2, "concatenated")),
    ),
    Bug(
        "table read by the number of positions, not by the positions",
        "table-positions-ignored",
        "keras-team/keras-hub#1544",
        by_position(lambda p: PE[: p.shape[-1]]),
        by_position(lambda p: PE[p]),
    ),
    Bug(
        "rows remembered by their number, without their start",
        "table-positions-ignored",
        "lucidrains/rotary-embedding-torch#11",
        by_position(Remembering(lambda p: tuple(p.shape))),
        by_position(Remembering(lambda p: (tuple(p.shape), tuple(p.flatten().tolist())))),
    ),
    Bug(
        "positions divided by the length of the call",
        "table-call-dependent",
        "positions normalised by the sequence, as in length-dependent rules: huggingface/transformers#25104",
        by_position(lambda p: paper(512 * p / p.shape[-1])),
        by_position(lambda p: paper(512 * p / 512)),
    ),
    Bug(
        "positions past the end start again",
        "table-past-end",
        "a remainder in place of an error; the error as people meet it: huggingface/transformers#9116",
        by_position(lambda p: PE[p % 512]),
        by_position(lambda p: PE[p]),
    ),
    Bug(
        "table left as allocated, never filled",
        "table-not-finite",
        "huggingface/transformers#48892",
        by_position(lambda p: NOT_FILLED[p]),
        by_position(lambda p: PE[p]),
    ),
    Bug(
        "positions cast to bfloat16 with the model",
        "table-rows-collide",
        "huggingface/candle#3520",
        by_position(in_bfloat16),
        by_position(paper),
    ),
    Bug(
        "angles formed in float16",
        "table-precision",
        "EleutherAI/gpt-neox#1003",
        by_position(in_half_precision, length=1024),
        by_position(paper, length=1024),
    ),
    Bug(
        "patches flattened column after column",
        "table-grid-transposed",
        "huggingface/transformers#41380",
        of_grid(lambda height, width: grid_table(height, width, "xy", "column")),
        of_grid(lambda height, width: grid_table(height, width, "ij", "column")),
    ),
    Bug(
        "rows in the half that MAE fills with columns",
        "table-grid-order",
        "facebookresearch/mae#18",
        of_grid(lambda height, width: grid_table(height, width, "ij", "row"), expect=GridSinusoidal(WIDTH)),
        of_grid(lambda height, width: grid_table(height, width, "ij", "column"), expect=GridSinusoidal(WIDTH)),
    ),
]
