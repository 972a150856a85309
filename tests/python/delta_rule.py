"""The gated delta rule: decodes, drafts and prompts of linear attention."""

import torch
import torch_npu

from harness import case, close, counted, refused
from tensors import npu

DECAYS = [(True, False), (True, True), (False, False)]
HEADS = [(1, 1), (2, 4), (2, 6)]
# Elements of a key and of a value.
DIMS = [(128, 128), (64, 32), (40, 24)]
TOLERANCE = (1e-4, 5e-3)


class Tokens:
    """Tokens of sequences, one after the other, with decays of heads and, where they are wanted, of columns."""

    def __init__(self, lengths, heads, dims, decays=(True, False)):
        self.lengths, (self.key_heads, self.value_heads), (self.key_dim, self.value_dim) = lengths, heads, dims
        tokens = sum(lengths)
        unit = torch.nn.functional.normalize
        self.query = unit(torch.randn(tokens, self.key_heads, self.key_dim), dim=-1).bfloat16()
        self.key = unit(torch.randn(tokens, self.key_heads, self.key_dim), dim=-1).bfloat16()
        self.value = torch.randn(tokens, self.value_heads, self.value_dim).bfloat16()
        self.beta = torch.rand(tokens, self.value_heads).bfloat16()
        self.g = -torch.rand(tokens, self.value_heads) if decays[0] else None
        self.gk = -torch.rand(tokens, self.value_heads, self.key_dim) if decays[1] else None
        self.scale = self.key_dim**-0.5

    def states(self, count):
        return torch.randn(count, self.value_heads, self.value_dim, self.key_dim).bfloat16()

    def step(self, token, state):
        """The state behind a token, and its outputs, in double precision."""
        group = self.value_heads // self.key_heads
        query, key = (rows[token].double().repeat_interleave(group, 0) for rows in (self.query, self.key))
        if self.g is not None:
            state = state * self.g[token].double().exp()[:, None, None]
        if self.gk is not None:
            state = state * self.gk[token].double().exp()[:, None, :]
        remembered = torch.einsum("hvk,hk->hv", state, key)
        correction = self.beta[token].double()[:, None] * (self.value[token].double() - remembered)
        state = state + torch.einsum("hv,hk->hvk", correction, key)
        return state, self.scale * torch.einsum("hvk,hk->hv", state, query)

    def on_device(self):
        return [npu(rows) for rows in (self.query, self.key, self.value)]

    def decay(self):
        return None if self.g is None else npu(self.g)


def recurrent(tokens, pool, slots, accepted=None):
    counted("npu_recurrent_gated_delta_rule")
    return torch_npu.npu_recurrent_gated_delta_rule(
        *tokens.on_device(), pool, beta=npu(tokens.beta), scale=tokens.scale,
        actual_seq_lengths=npu(torch.tensor(tokens.lengths).int()), ssm_state_indices=npu(slots.int()),
        num_accepted_tokens=None if accepted is None else npu(torch.tensor(accepted).int()),
        g=tokens.decay(), gk=None if tokens.gk is None else npu(tokens.gk),
    )


@case(heads=HEADS, dims=DIMS, lengths=[(1, 1, 1), (4, 1, 8), (2, 0, 3)], decays=DECAYS)
def decodes_and_drafts_write_a_state_behind_each_token(heads, dims, lengths, decays):
    tokens = Tokens(lengths, heads, dims, decays)
    total = sum(lengths)
    states, slots = tokens.states(total + 3), torch.randperm(total + 3)[:total]
    accepted = [max(1, length - 1) for length in lengths] if max(lengths) > 1 else None
    pool = npu(states)
    out = recurrent(tokens, pool, slots, accepted)
    expected, wanted, token = torch.empty(total, *tokens.value.shape[1:]).double(), states.double(), 0
    for sequence, length in enumerate(lengths):
        if length == 0:
            continue
        begin = token + (accepted[sequence] - 1 if accepted else 0)
        state = states[slots[begin]].double()
        for _ in range(length):
            state, expected[token] = tokens.step(token, state)
            wanted[slots[token]] = state
            token += 1
    close(out, expected, "output", tolerance=TOLERANCE)
    close(pool, wanted, "states", tolerance=TOLERANCE)


@case(heads=HEADS, dims=DIMS, lengths=[(5, 70), (64, 1, 130), (200,), (1, 1, 1)], decays=[True, False])
def prompts_end_in_a_state(heads, dims, lengths, decays):
    tokens = Tokens(lengths, heads, dims, (decays, False))
    states = tokens.states(len(lengths))
    counted("npu_chunk_gated_delta_rule")
    out, ends = torch_npu.npu_chunk_gated_delta_rule(
        *tokens.on_device(), beta=npu(tokens.beta), initial_state=npu(states),
        actual_seq_lengths=npu(torch.tensor(lengths).int()), scale=tokens.scale, g=tokens.decay(),
    )
    expected, wanted, token = torch.empty(out.shape).double(), states.double(), 0
    for sequence, length in enumerate(lengths):
        state = states[sequence].double()
        for _ in range(length):
            state, expected[token] = tokens.step(token, state)
            token += 1
        wanted[sequence] = state
    close(out, expected, "output", tolerance=TOLERANCE)
    close(ends, wanted, "states", tolerance=TOLERANCE)


@case()
def pools_of_fewer_states_than_tokens_are_refused():
    tokens = Tokens((2, 2), (1, 1), (16, 16))
    pool, slots = npu(tokens.states(3)), torch.tensor([0, 1, 2, 0])
    refused(lambda: recurrent(tokens, pool, slots), "recurrent_delta.pool", "fix: ")
