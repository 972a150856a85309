"""`npu_ring_attention_update`: pieces of attention of training, merged, are the whole."""

import copy

import torch

from fusion import DTYPES, STATISTICS, TOLERANCE, fusion, statistics
from harness import case, close, reaching, refused
from reference import left_up, train
from tensors import Batch, ends, npu, separate, triangle


def update(before, piece, layout, softmax_layout="", rows=None):
    """Merges outputs, largest scores and sums of two pieces."""
    lengths = {} if layout == "SBH" else {"actual_seq_qlen": npu(torch.tensor([0, *ends(rows)]))}
    return reaching(
        "npu_ring_attention_update",
        "aclnnRingAttentionUpdateV2",
        *before[:3],
        *piece[:3],
        input_layout=layout,
        input_softmax_layout=softmax_layout,
        **lengths,
    )


def merged(one, other):
    """Two pieces of a sequence merged: outputs [N, rows, D], largest scores and sums [N, rows]."""
    largest = torch.maximum(one[1], other[1])
    weights = [piece[2] * torch.exp(piece[1] - largest) for piece in (one, other)]
    total = weights[0] + weights[1]
    output = (one[0] * weights[0][..., None] + other[0] * weights[1][..., None]) / total[..., None]
    return output, largest, total


def pieces(rows, heads, dim, dtype):
    """Outputs, largest scores and sums of sequences, as if of some keys."""
    return [
        (
            torch.randn(heads, length, dim).to(dtype),
            torch.randn(heads, length) * 3,
            torch.rand(heads, length) * 20 + 1,
        )
        for length in rows
    ]


def lay_out(parts, layout, softmax_layout):
    """Sequences of pieces as the tensors of a call."""
    outputs, *numbers = zip(*parts)
    if layout == "SBH":
        output = torch.stack(outputs).permute(2, 0, 1, 3).flatten(2)
        numbers = [torch.stack(values) for values in numbers]
    else:
        output = torch.cat(outputs, 1).transpose(0, 1)
        if softmax_layout == "TND":
            numbers = [torch.cat(values, 1).transpose(0, 1) for values in numbers]
        else:
            shape = output.shape[:2]
            numbers = [torch.cat([value.flatten() for value in values]).view(shape) for values in numbers]
    return [npu(output), *(npu(value[..., None].expand(*value.shape, 8)) for value in numbers)]


def compare(result, parts, layout, softmax_layout, rows, heads):
    output, largest, total = result
    outputs = separate(output, layout, rows, heads)
    largest = statistics(largest, "TND" if layout == "TND" else "BNSD", softmax_layout, rows, heads)
    total = statistics(total, "TND" if layout == "TND" else "BNSD", softmax_layout, rows, heads)
    for i, part in enumerate(parts):
        close(outputs[i], part[0], f"output of sequence {i}", TOLERANCE[output.dtype])
        close(largest[i], part[1], f"largest scores of sequence {i}", STATISTICS)
        close(total[i], part[2], f"sums of sequence {i}", STATISTICS)


def doubles(parts):
    return [tuple(tensor.double() for tensor in part) for part in parts]


@case(layout=["SBH", "TND, TND", "TND"], dtype=DTYPES, dim=[64, 128], heads=[1, 4])
def two_pieces(layout, dtype, dim, heads):
    layout, softmax_layout = (layout.split(", ") + [""])[:2]
    rows = [20, 20] if layout == "SBH" else [20, 7, 1]
    one, other = pieces(rows, heads, dim, dtype), pieces(rows, heads, dim, dtype)
    tensors = (lay_out(parts, layout, softmax_layout) for parts in (one, other))
    result = update(*tensors, layout, softmax_layout, rows)
    expected = [merged(*pair) for pair in zip(doubles(one), doubles(other))]
    compare(result, expected, layout, softmax_layout, rows, heads)


@case(layout=["SBH", "TND"], dtype=DTYPES, cuts=[1, 2, 5])
def keys_in_pieces(layout, dtype, cuts):
    """Calls of the operator of training over pieces of the keys, merged one after the other."""
    batch = Batch([16] * 2, [60] * 2, 4, 4, dtype=dtype)
    bounds = [0, *sorted((torch.randperm(59)[:cuts] + 1).tolist()), 60]
    result = None
    for first, last in zip(bounds, bounds[1:]):
        piece = fusion(1, of_keys(batch, slice(first, last)), layout)[:3]
        result = piece if result is None else update(result, piece, layout, "", batch.rows)
    expected = [train(*tensors, batch.scale) for tensors in zip(batch.query, batch.key, batch.value)]
    compare_loosely(result, expected, layout, batch)


def compare_loosely(result, expected, layout, batch):
    """Every piece is rounded to the dtype before the next is merged."""
    tolerance = [2 * bound for bound in TOLERANCE[result[0].dtype]]
    for i, actual in enumerate(separate(result[0], layout, batch.rows, batch.heads)):
        close(actual, expected[i][0], f"output of sequence {i}", tolerance)
    for number in (1, 2):
        values = statistics(result[number], "TND" if layout == "TND" else "BNSD", "", batch.rows, batch.heads)
        for i, actual in enumerate(values):
            close(actual, expected[i][number], f"{['', 'largest scores', 'sums'][number]} of sequence {i}", STATISTICS)


@case(dtype=DTYPES, cut=[1, 20, 39])
def a_causal_sequence_cut_over_two_cards(dtype, cut):
    """The later rows see the earlier keys whole and their own keys by a triangle."""
    batch = Batch([40], [40], 4, 4, dtype=dtype)
    expected = train(batch.query[0], batch.key[0], batch.value[0], batch.scale, left_up(40, 40))
    later = some_rows(batch, [0], first=cut)
    earlier_keys = fusion(1, of_keys(later, slice(0, cut)), "TND")
    mask = {"sparse_mode": 3, "atten_mask": triangle(torch.bool)}
    own_keys = fusion(1, of_keys(later, slice(cut, 40)), "TND", **mask)
    result = update(earlier_keys, own_keys, "TND", "", later.rows)
    compare_loosely(result, [tuple(part[:, cut:] for part in expected)], "TND", later)


def some_rows(batch, sequences, first=0, last=None):
    """Sequences of a batch, with some rows of the first or the last of them and all keys."""
    part = copy.copy(batch)
    part.query = [batch.query[i] for i in sequences]
    if first:
        part.query[0] = part.query[0][:, first:]
    if last is not None:
        part.query[-1] = part.query[-1][:, :last]
    part.key, part.value = [batch.key[i] for i in sequences], [batch.value[i] for i in sequences]
    return of_keys(part, slice(None))


def of_keys(batch, keys):
    """A batch with some of its keys."""
    part = copy.copy(batch)
    part.key, part.value = ([tensor[:, keys] for tensor in tensors] for tensors in (batch.key, batch.value))
    part.rows, part.keys = ([tensor.shape[1] for tensor in tensors] for tensors in (part.query, part.key))
    return part


@case(dtype=DTYPES, cut=[1, 13, 27])
def modes_7_and_8_are_a_causal_batch_cut_in_two(dtype, cut):
    """One card has the first sequences and the first rows of the next, the other card the rest."""
    lengths = [6, 10, 40, 8]
    batch = Batch(lengths, lengths, 4, 2, dtype=dtype)
    whole = [
        train(query, key, value, batch.scale, left_up(n, n))
        for query, key, value, n in zip(batch.query, batch.key, batch.value, lengths)
    ]
    mask = {"atten_mask": triangle(torch.bool), "pre_tockens": 40}
    first = some_rows(batch, [0, 1, 2], last=cut)
    result = fusion(1, first, "TND", sparse_mode=7, next_tockens=cut - 40, **mask)
    expected = [*whole[:2], tuple(part[:, :cut] for part in whole[2])]
    compare_loosely(result, expected, "TND", first)
    second = some_rows(batch, [2, 3], first=cut)
    result = fusion(1, second, "TND", sparse_mode=8, next_tockens=0, **mask)
    expected = [tuple(part[:, cut:] for part in whole[2]), whole[3]]
    compare_loosely(result, expected, "TND", second)


@case(dtype=DTYPES, cut=[12, 27], keys=[5, 12])
def mode_8_over_keys_in_two_pieces(dtype, cut, keys):
    """Rows behind a cut see all of the first keys, and those behind by a triangle."""
    batch = Batch([40], [40], 4, 4, dtype=dtype)
    expected = train(batch.query[0], batch.key[0], batch.value[0], batch.scale, left_up(40, 40))
    later = some_rows(batch, [0], first=cut)
    mask = {"sparse_mode": 8, "atten_mask": triangle(torch.bool), "pre_tockens": 40}
    parts = [
        fusion(1, of_keys(later, part), "TND", next_tockens=next_tokens, **mask)[:3]
        for part, next_tokens in ((slice(0, keys), 40 - keys), (slice(keys, 40), 0))
    ]
    result = update(*parts, "TND", "", later.rows)
    compare_loosely(result, [tuple(part[:, cut:] for part in expected)], "TND", later)


@case()
def a_row_that_one_piece_does_not_see():
    """The other piece stays as it was."""
    batch = Batch([6] * 2, [8] * 2, 4, 4, dtype=torch.float32)
    hidden = torch.zeros(6, 8, dtype=torch.bool)
    hidden[2] = True
    precise = {"sparse_mode": 1, "atten_mask": npu(hidden), "inner_precise": 2}
    unseen = fusion(1, batch, "SBH", **precise)[:3]
    seen = fusion(1, batch, "SBH")[:3]
    result = update(unseen, seen, "SBH")
    for actual, expected in zip(result, seen):
        row = (lambda tensor: tensor[2]) if actual.dim() == 3 else (lambda tensor: tensor[:, :, 2])
        close(row(actual), row(expected.cpu()), tolerance=(1e-5, 1e-5))


def call(layout="SBH", to=None, changed=lambda *pieces: pieces):
    """A call of two pieces that are changed, or named by another layout."""

    def run():
        rows = [6, 6]
        one, other = (lay_out(pieces(rows, 4, 64, torch.float16), layout, "") for _ in range(2))
        return update(*changed(one, other), to or layout, "", rows)

    return run


def both(change):
    """Changes the tensors of both pieces."""
    return lambda *pieces: tuple([tensor.contiguous() for tensor in change(*piece)] for piece in pieces)


# What is refused: the call, and what the message must have.
REFUSED = {
    "a layout that is not there": (call("TND", to="BSND"), "input_layout only supports 'SBH' or 'TND'"),
    "pieces of two shapes": (
        call(changed=lambda one, other: (one, [other[0][:5], *other[1:]])),
        "must have the same shape",
    ),
    "pieces of two dtypes": (
        call(changed=lambda one, other: (one, [other[0].float(), *other[1:]])),
        "must have the same dtype",
    ),
    "statistics of another number of rows": (
        call(changed=both(lambda output, largest, total: (output, largest[:, :, :5], total[:, :, :5]))),
        "ring.shapes: ",
        "fix: ",
    ),
    "a head size that is no multiple of 64": (
        call("TND", changed=both(lambda output, largest, total: (output[..., :40], largest, total))),
        "ring.head_dim: ",
        "fix: ",
    ),
}


@case(what=list(REFUSED))
def refused_calls(what):
    call, *texts = REFUSED[what]
    refused(call, *texts)
    two_pieces("SBH", torch.float16, 64, 4)
