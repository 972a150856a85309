"""Attention in double precision, from the formula alone; shares nothing with the emulation."""

import torch


def full(rows, keys):
    return torch.ones(rows, keys, dtype=torch.bool)


def left_up(rows, keys):
    """Sparse mode 2: row i sees the keys 0 to i."""
    return band(rows, keys, keys + rows, 0, origin=0)


def right_down(rows, keys):
    """Sparse mode 3: the last row sees every key."""
    return band(rows, keys, keys + rows, 0, origin=keys - rows)


def band(rows, keys, before, after, origin=None):
    """Sparse mode 4, and with origin 0 the band of mode 0."""
    origin = keys - rows if origin is None else origin
    row = torch.arange(rows)[:, None] + origin
    key = torch.arange(keys)[None, :]
    return (key >= row - before) & (key <= row + after)


def attend(query, key, value, scale, visible=None, bias=None, sink=None):
    """Attention of one sequence.

    query [N, rows, D], key [Nk, keys, D], value [Nk, keys, Dv], visible [rows, keys] or [N, rows, keys], bias like the
    scores, sink [N]. Returns the output [N, rows, Dv] and the natural logarithm of each row's sum [N, rows], without the
    sink. Rows that see nothing are 0 and +inf.
    """
    query, key, value = query.double(), key.double(), value.double()
    shared = query.shape[0] // key.shape[0]
    key = key.repeat_interleave(shared, dim=0)
    value = value.repeat_interleave(shared, dim=0)
    scores = query @ key.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias.double()
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    total = lse if sink is None else torch.logaddexp(lse, sink.double()[:, None])
    weights = torch.exp(scores - total[..., None])
    weights = torch.where(torch.isneginf(lse)[..., None], 0.0, weights)
    return weights @ value, torch.where(torch.isneginf(lse), torch.inf, lse)


# What stands in the place of a masked score, and the sum of a row whose scores are all masked.
LOWEST = torch.finfo(torch.float32).min
LARGEST = torch.finfo(torch.float32).max


def train(query, key, value, scale, visible=None, bias=None, sink=None, kept=None, keep_prob=1.0, corrected=True):
    """Attention of one sequence as the training operator computes it.

    The shapes are those of `attend`; kept [N, rows, keys] says which weights a dropout keeps. Returns the output [N, rows, Dv],
    and of each row the largest score and the sum of the exponentials [N, rows]. Rows that see nothing are 0 if they are
    corrected, else the mean of the values.
    """
    query, key, value = query.double(), key.double(), value.double()
    shared = query.shape[0] // key.shape[0]
    key = key.repeat_interleave(shared, dim=0)
    value = value.repeat_interleave(shared, dim=0)
    if key.shape[1] == 0:
        nothing = torch.zeros(query.shape[:2], dtype=torch.float64)
        return nothing[..., None].expand(*nothing.shape, value.shape[-1]), nothing, nothing
    scores = query @ key.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias.double()
    unseen = torch.zeros(query.shape[:2], dtype=torch.bool)
    if visible is not None:
        scores = scores.masked_fill(~visible, LOWEST)
        unseen = ~visible.any(-1).expand(unseen.shape)
    largest = scores.amax(-1)
    if sink is not None:
        largest = torch.maximum(largest, sink.double()[:, None])
    weights = torch.exp(scores - largest[..., None])
    total = weights.sum(-1)
    if sink is not None:
        total = total + torch.exp(sink.double()[:, None] - largest)
    elif corrected:
        weights = weights.masked_fill(unseen[..., None], 0.0)
        total = total.masked_fill(unseen, LARGEST)
    weights = weights / total[..., None]
    if kept is not None:
        weights = weights * kept / keep_prob
    return weights @ value, largest, total


def merge(outputs, sums):
    """Outputs [rows, D] over disjoint keys and their log-sums [rows] as one."""
    sums = torch.stack([s.double() for s in sums])
    outputs = torch.stack([o.double() for o in outputs])
    total = torch.logsumexp(sums, dim=0)
    return (outputs * torch.exp(sums - total)[..., None]).sum(0), total
