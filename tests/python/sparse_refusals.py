"""Calls of sparse attention that are refused by a rule, or that strict mode ends."""

import os

import torch

import block_sparse
import indexer
import quant_indexer
import quant_sparse
import sparse
from harness import case, refused, strictly
from indexer import Choosing
from latent import Absorbed
from quant_indexer import QuantisedChoosing
from quant_sparse import Quantised
from tensors import Batch, lengths_on_device

DENSE, PACKED, PAGED = ("BSND", "BSND"), ("TND", "TND"), ("TND", "PA_BSND")
HALF, BRAIN, SINGLE, BYTE = torch.float16, torch.bfloat16, torch.float32, torch.int8


def zeros(*shape, dtype=HALF):
    return torch.zeros(shape, dtype=dtype).npu()


def made(changes):
    """Arguments, which may be functions that make them."""
    return {name: make() if callable(make) else make for name, make in changes.items()}


def choosing(form=DENSE, dim=None, **changes):
    """A call of the indexer with other arguments, which may be functions that make them."""

    def call():
        named = Choosing([2, 2], [20, 20], heads=changes.get("heads", 8)).arguments(form) | {"sparse_count": 8}
        named |= made({name: change for name, change in changes.items() if name != "heads"})
        return indexer.choose(**named)

    return call


def attending(form=DENSE, heads=8, size=1, **changes):
    def call():
        lists = sparse.Lists(Absorbed([2, 2], [20, 20], heads, HALF), 4, size)
        named = sparse.arguments(lists, form)
        return sparse.call(**named | made(changes))

    return call


def choosing_quantised(form=DENSE, heads=8, **changes):
    def call():
        named = QuantisedChoosing([2, 2], [20, 20], heads).arguments(form) | {"sparse_count": 8}
        return quant_indexer.choose(**named | made(changes))

    return call


def attending_quantised(form=DENSE, heads=8, size=1, **changes):
    def call():
        named = quant_sparse.arguments(sparse.Lists(Quantised([2, 2], [20, 20], heads, HALF), 4, size), form)
        return quant_sparse.call(**named | made(changes))

    return call


def by_blocks(layout="TND", shape=(16, 128), dtype=HALF, dim=64, **changes):
    def call():
        blocks = block_sparse.Blocks(Batch([20, 9], [140, 130], dim=dim, dtype=dtype), shape)
        named = made(changes)
        return block_sparse.call(blocks, layout, **{"softmax_lse_flag": 1} | named)

    return call


LATENTS = lambda: zeros(4, 24, 1, 512)
# What is refused: the rule that the message must name, and the call.
CHOICES = {
    "keys of another dtype": ("indexer.dtype", choosing(key=lambda: zeros(2, 20, 1, 128, dtype=BRAIN))),
    "rows in single precision": ("indexer.dtype", choosing(query=lambda: zeros(2, 2, 8, 128, dtype=SINGLE))),
    "a layout that is not there": ("indexer.layout", choosing(layout_key="TND")),
    "too many keys": ("indexer.count", choosing(sparse_count=2049)),
    "a mode that is not there": ("indexer.sparse_mode", choosing(sparse_mode=1)),
    "a window": ("indexer.tokens", choosing(pre_tokens=128)),
    "values of keys in a cache": ("indexer.values_paged", choosing(PAGED, return_value=True)),
    "a cache without a table": ("indexer.block_table", choosing(PAGED, block_table=None)),
    "a table without a cache": (
        "indexer.block_table",
        choosing(PACKED, block_table=lambda: zeros(2, 1, dtype=torch.int32)),
    ),
    "packed rows without lengths": ("indexer.lengths", choosing(PACKED, actual_seq_lengths_query=None)),
    "a cache without lengths": ("indexer.lengths", choosing(PAGED, actual_seq_lengths_key=None)),
    "too few lengths": ("indexer.lengths", choosing(actual_seq_lengths_key=lambda: lengths_on_device([20], "BSND"))),
    "keys of another batch": ("indexer.batch", choosing(key=lambda: zeros(3, 20, 1, 128))),
    "blocks of an odd size": ("indexer.block_size", choosing(PAGED, key=lambda: zeros(4, 24, 1, 128))),
    "keys with two heads": ("indexer.head_dim", choosing(key=lambda: zeros(2, 20, 2, 128))),
    "heads of 64 elements": (
        "indexer.head_dim",
        choosing(key=lambda: zeros(2, 20, 1, 64), query=lambda: zeros(2, 2, 8, 64)),
    ),
    "too many heads": ("indexer.heads", choosing(heads=65)),
    "weights of other heads": ("indexer.weights", choosing(weights=lambda: zeros(2, 2, 7))),
}
LISTS = {
    "keys of another dtype": ("sparse_flash.dtype", attending(key=lambda: zeros(2, 20, 1, 512, dtype=BRAIN))),
    "long numbers in lists": (
        "sparse_flash.dtype",
        attending(sparse_indices=lambda: zeros(2, 2, 1, 4, dtype=torch.int64)),
    ),
    "a layout that is not there": ("sparse_flash.layout", attending(layout_kv="TND")),
    "no rotary parts": ("sparse_flash.rope", attending(query_rope=None, key_rope=None)),
    "a mode that is not there": ("sparse_flash.sparse_mode", attending(sparse_mode=2)),
    "a window": ("sparse_flash.tokens", attending(next_tokens=0)),
    "the extension's default of the mode": ("sparse_flash.attention_mode", attending(attention_mode=0)),
    "blocks of three": ("sparse_flash.sparse_block_size", attending(sparse_block_size=3)),
    "maxima over a cache": ("sparse_flash.softmax_paged", attending(PAGED, return_softmax_lse=True)),
    "a cache without a table": ("sparse_flash.block_table", attending(PAGED, block_table=None)),
    "a cache without lengths": ("sparse_flash.lengths", attending(PAGED, actual_seq_lengths_kv=None)),
    "packed rows without lengths": ("sparse_flash.lengths", attending(PACKED, actual_seq_lengths_query=None)),
    "blocks of a cache of an odd size": (
        "sparse_flash.block_size",
        attending(PAGED, key=LATENTS, value=LATENTS, key_rope=lambda: zeros(4, 24, 1, 64)),
    ),
    "three heads": ("sparse_flash.heads", attending(heads=3)),
    "rotary parts of other heads": ("sparse_flash.query_rope", attending(query_rope=lambda: zeros(2, 2, 7, 64))),
    "rotary parts of fewer keys": ("sparse_flash.key_rows", attending(key_rope=lambda: zeros(2, 19, 1, 64))),
    "lists of other rows": (
        "sparse_flash.indices",
        attending(sparse_indices=lambda: zeros(2, 3, 1, 4, dtype=torch.int32)),
    ),
}
QUANTISED_CHOICES = {
    "keys that are not quantised": ("quant_indexer.dtype", choosing_quantised(key=lambda: zeros(2, 20, 1, 128))),
    "scales in single precision": (
        "quant_indexer.dtype",
        choosing_quantised(query_dequant_scale=lambda: zeros(2, 2, 8, dtype=SINGLE)),
    ),
    "a layout that is not there": ("quant_indexer.layout", choosing_quantised(layout_key="TND")),
    "too many keys": ("quant_indexer.count", choosing_quantised(sparse_count=2049)),
    "a mode of quantisation": ("quant_indexer.quant_modes", choosing_quantised(key_quant_mode=1)),
    "a mode that is not there": ("quant_indexer.sparse_mode", choosing_quantised(sparse_mode=1)),
    "a window": ("quant_indexer.tokens", choosing_quantised(next_tokens=0)),
    "a cache without a table": ("quant_indexer.block_table", choosing_quantised(PAGED, block_table=None)),
    "packed rows without lengths": ("quant_indexer.lengths", choosing_quantised(PACKED, actual_seq_lengths_query=None)),
    "too many heads": ("quant_indexer.heads", choosing_quantised(heads=65)),
    "weights of other heads": ("quant_indexer.weights", choosing_quantised(weights=lambda: zeros(2, 2, 7))),
    "scales of fewer keys": ("quant_indexer.key_scale", choosing_quantised(key_dequant_scale=lambda: zeros(2, 19, 1))),
}
QUANTISED_LISTS = {
    "keys that are not quantised": ("quant_sparse_flash.dtype", attending_quantised(key=lambda: zeros(2, 20, 1, 656))),
    "a layout that is not there": ("quant_sparse_flash.layout", attending_quantised(layout_kv="TND")),
    "a mode that is not there": ("quant_sparse_flash.sparse_mode", attending_quantised(sparse_mode=2)),
    "the extension's default of the mode": ("quant_sparse_flash.attention_mode", attending_quantised(attention_mode=0)),
    "a mode of quantisation": ("quant_sparse_flash.quantisation", attending_quantised(value_quant_mode=0)),
    "scales apart from the rows": ("quant_sparse_flash.quantisation", attending_quantised(quant_scale_repo_mode=0)),
    "tiles of 64 elements": ("quant_sparse_flash.quantisation", attending_quantised(tile_size=64)),
    "blocks of 32": ("quant_sparse_flash.sparse_block_size", attending_quantised(sparse_block_size=32)),
    "queries without rotary parts": (
        "quant_sparse_flash.head_dim",
        attending_quantised(query=lambda: zeros(2, 2, 8, 512)),
    ),
    "keys without scales": (
        "quant_sparse_flash.head_dim",
        attending_quantised(**dict.fromkeys(("key", "value"), lambda: zeros(2, 20, 1, 640, dtype=BYTE))),
    ),
    "three heads": ("quant_sparse_flash.heads", attending_quantised(heads=3)),
    "a cache without lengths": ("quant_sparse_flash.lengths", attending_quantised(PAGED, actual_seq_lengths_kv=None)),
    "lists of other rows": (
        "quant_sparse_flash.indices",
        attending_quantised(sparse_indices=lambda: zeros(2, 3, 1, 4, dtype=torch.int32)),
    ),
}
BLOCKS = {
    "a mask of another dtype": ("block_sparse.dtype", by_blocks(block_sparse_mask=lambda: zeros(2, 4, 2, 2))),
    "a layout of Ascend 950": ("block_sparse.layout_bsnd", by_blocks("BSND")),
    "layouts that differ": ("block_sparse.layout", by_blocks(kv_input_layout="BNSD")),
    "one size of blocks": ("block_sparse.block_shape", by_blocks(block_shape=[128])),
    "blocks of 64 keys": ("block_sparse.block_keys", by_blocks(shape=(16, 64))),
    "a precision that is not there": ("block_sparse.inner_precise", by_blocks(inner_precise=2)),
    "BF16 softmax in half precision": ("block_sparse.precision", by_blocks(dtype=BRAIN, inner_precise=1)),
    "another number of key heads": ("block_sparse.kv_heads", by_blocks(num_key_value_heads=4)),
    "heads of 80 elements": ("block_sparse.head_dim", by_blocks(dim=80)),
    "packed rows without lengths": ("block_sparse.lengths", by_blocks(actual_seq_lengths=None)),
    "lengths that are ends": ("block_sparse.length_sum", by_blocks(actual_seq_lengths=[20, 29])),
    "a mask of fewer heads": (
        "block_sparse.mask",
        by_blocks(block_sparse_mask=lambda: zeros(2, 3, 2, 2, dtype=torch.int8)),
    ),
    "a flag that is not there": ("block_sparse.softmax_lse_flag", by_blocks(softmax_lse_flag=2)),
}


@case(what=list(CHOICES))
def choices_are_refused(what):
    rule, call = CHOICES[what]
    refused(call, f"{rule}: ", "fix: ")
    indexer.chosen_and_compared(Choosing([2], [9]), DENSE)


@case(what=list(LISTS))
def attention_to_lists_is_refused(what):
    rule, call = LISTS[what]
    refused(call, f"{rule}: ", "fix: ")
    sparse.attended_and_compared(sparse.Lists(Absorbed([2], [9], 2, HALF), 4), DENSE)


@case(what=list(QUANTISED_CHOICES))
def choices_among_quantised_keys_are_refused(what):
    rule, call = QUANTISED_CHOICES[what]
    refused(call, f"{rule}: ", "fix: ")
    quant_indexer.chosen_and_compared(QuantisedChoosing([2], [9]), DENSE)


@case(what=list(QUANTISED_LISTS))
def attention_to_quantised_lists_is_refused(what):
    rule, call = QUANTISED_LISTS[what]
    refused(call, f"{rule}: ", "fix: ")
    quant_sparse.attended_and_compared(sparse.Lists(Quantised([2], [9], 2, HALF), 4), DENSE)


@case(what=list(BLOCKS))
def attention_by_blocks_is_refused(what):
    rule, call = BLOCKS[what]
    refused(call, f"{rule}: ", "fix: ")
    block_sparse.outputs_alone("TND", HALF)


# A program that a finding ends, and what each misuse makes of its tensors.
MISUSED = """
import sys
sys.path.insert(0, {folder!r})
import torch, torch_npu
import indexer, sparse
from indexer import Choosing
from latent import Absorbed
choice = Choosing([2, 2], [20, 20]).arguments(("TND", "PA_BSND")) | {{"sparse_count": 8}}
lists = sparse.arguments(sparse.Lists(Absorbed([2, 2], [20, 20], 8, torch.float16), 4), ("TND", "PA_BSND"))
{call}(**{named} | {{"{argument}": {tensor}}})
torch.npu.synchronize()
print("taken")
"""
MISUSES = {
    "length of a sequence out of range": ("actual_seq_lengths_key", 'choice["actual_seq_lengths_key"] + 999'),
    "block out of range": ("block_table", 'choice["block_table"] + 99'),
    "block named twice": ("sparse_indices", 'lists["sparse_indices"] * 0'),
    "entry of sparse indices left out": ("sparse_indices", 'lists["sparse_indices"] + 19'),
}


@case(finding=list(MISUSES))
def numbers_on_the_device_that_lead_outside(finding):
    folder = os.path.dirname(os.path.abspath(__file__))
    argument, tensor = MISUSES[finding]
    call, named = ("sparse.call", "lists") if "lists" in tensor else ("indexer.choose", "choice")
    code, said = strictly(MISUSED.format(folder=folder, call=call, named=named, argument=argument, tensor=tensor))
    assert code != 0 and "taken" not in said, said
    assert f"{finding}: aclnn" in said, said
