"""Attention to the blocks of keys that a mask names for each block of rows."""

import torch
import torch_npu

import layouts
from harness import ON_950, case, counted
from layouts import HALVES
from tensors import Batch, npu

LAYOUTS = ["TND", "BNSD"] + (["BSND"] if ON_950 else [])
PRECISE = 4 if ON_950 else 0


class Blocks:
    """A mask [sequences, heads, row blocks, key blocks] in which every block of rows sees some keys of its sequence."""

    def __init__(self, batch, shape, share=0.5):
        self.batch, self.shape = batch, list(shape)
        rows, keys = shape
        self.mask = torch.zeros(
            len(batch.rows), batch.heads, -(-max(batch.rows) // rows), -(-max(batch.keys) // keys), dtype=torch.int8
        )
        for mask, length in zip(self.mask, batch.keys):
            count = -(-length // keys)
            mask[..., :count] = torch.rand(*mask.shape[:2], count) < share
            # The block that every row sees.
            mask.scatter_(2, torch.randint(count, (*mask.shape[:2], 1)), 1)

    def visible(self, i):
        """Which keys [N, rows, keys] each head's rows of a sequence see."""
        rows, keys = self.shape
        spread = self.mask[i].bool().repeat_interleave(rows, 1).repeat_interleave(keys, 2)
        return spread[:, : self.batch.rows[i], : self.batch.keys[i]]


def call(blocks, layout, **arguments):
    batch = blocks.batch
    counted("npu_block_sparse_attention")
    named = {
        "block_sparse_mask": npu(blocks.mask),
        "block_shape": blocks.shape,
        "q_input_layout": layout,
        "kv_input_layout": layout,
        "num_key_value_heads": batch.kv_heads,
        "scale_value": batch.scale,
        "inner_precise": PRECISE,
        "actual_seq_lengths": batch.rows,
        "actual_seq_lengths_kv": batch.keys,
    }
    return torch_npu.npu_block_sparse_attention(**batch.lay_out(layout), **named | arguments)


def compare(blocks, layout, output, lse=None):
    """The log-sums have the order of the queries, which layouts of other operators have not."""
    if lse is not None and layout == "BSND":
        lse = lse.transpose(1, 2)
    layouts.compare(blocks.batch, layout, output, lse, visible=blocks.visible)


@case(layout=LAYOUTS, dtype=HALVES, shape=[(128, 128), (64, 128), (1, 128), (37, 256)], heads=[(4, 4), (4, 2), (8, 1)])
def sequences_of_several_lengths(layout, dtype, shape, heads):
    blocks = Blocks(Batch([150, 3, 40], [300, 129, 64], *heads, dim=128, dtype=dtype), shape)
    compare(blocks, layout, *call(blocks, layout, softmax_lse_flag=1))


@case(layout=LAYOUTS, dtype=HALVES, dim=[64, 128], share=[0.0, 1.0])
def one_block_and_every_block(layout, dtype, dim, share):
    blocks = Blocks(Batch([70, 20], [400, 300], dim=dim, dtype=dtype), (32, 128), share)
    compare(blocks, layout, *call(blocks, layout, softmax_lse_flag=1))


@case(layout=LAYOUTS[1:], dtype=HALVES)
def whole_tensors_need_no_lengths(layout, dtype):
    blocks = Blocks(Batch([40] * 2, [260] * 2, dtype=dtype), (16, 128))
    lengths = {"actual_seq_lengths": None, "actual_seq_lengths_kv": None}
    output, lse = call(blocks, layout, softmax_lse_flag=1, **lengths)
    compare(blocks, layout, output, lse)


@case(layout=LAYOUTS, dtype=HALVES)
def outputs_alone(layout, dtype):
    """The extension passes a tensor for the log-sums here too."""
    blocks = Blocks(Batch([40, 9], [260, 130], dtype=dtype), (16, 128))
    output, _ = call(blocks, layout)
    compare(blocks, layout, output)


@case(layout=LAYOUTS if not ON_950 else [])
def softmax_in_half_precision(layout):
    """The extension's default."""
    blocks = Blocks(Batch([40, 9], [260, 130]), (16, 128))
    output, lse = call(blocks, layout, softmax_lse_flag=1, inner_precise=1)
    compare(blocks, layout, output, lse)
