"""What each release takes, through the entry points that the extension finds in a toolkit of that release."""

import os

import torch

import block_sparse
import delta_rule
import fusion_extras
import incre
import indexer
import nsa
import prompt
import ring
import sparse
from fusion import compare as compare_training
from fusion import fusion
from harness import case, fused, refused
from layouts import compare
from reference import right_down
from tensors import Batch, npu, triangle

RELEASES = ["8.1", "8.5", "9.0", "9.1"]
RELEASE = os.environ.get("ASCEND_EMU_CANN", RELEASES[-1])
HALF, BRAIN = torch.float16, torch.bfloat16


def dense(layout, entry=1, **shape):
    batch = Batch(**shape)
    arguments = batch.lay_out(layout) | batch.lengths(layout) | batch.heads_and_scale()
    output, _ = fused(entry, **arguments, input_layout=layout)
    compare(batch, layout, output)


def paged(layout, form, block=128, rows=4, dtype=BRAIN):
    batch = Batch([rows, rows], [150, 40], dtype=dtype)
    arguments = batch.lay_out(layout) | batch.page(form, block) | batch.lengths(layout, paged=True)
    masked = {"sparse_mode": 3, "atten_mask": triangle()}
    output, _ = fused(1, **arguments, **batch.heads_and_scale(), input_layout=layout, **masked)
    compare(batch, layout, output, visible=lambda i: right_down(rows, batch.keys[i]))


def sink(dtype):
    batch = Batch([4, 9], [4, 20], dtype=dtype)
    logits = torch.randn(4).to(dtype)
    arguments = batch.lay_out("TND") | batch.lengths("TND") | batch.heads_and_scale()
    output, _ = fused(2, **arguments, input_layout="TND", learnable_sink=npu(logits))
    compare(batch, "TND", output, sink=logits)


def decodes_and_drafts(decays):
    delta_rule.decodes_and_drafts_write_a_state_behind_each_token((2, 4), (128, 128), (4, 1), decays)


def train(version, layout, softmax_layout="", **arguments):
    batch = Batch([12] * 2, [12] * 2)
    result = fusion(version, batch, layout, softmax_layout=softmax_layout, **arguments)
    compare_training(batch, layout, result, softmax_layout)


SHORT = dict(rows=[5, 9], keys=[12, 9])
# A call, and the first release that takes it; 8.1 stands for what comes before 8.5.
CALLS = {
    "packed BF16": ("8.1", lambda: dense("TND", **SHORT, dtype=BRAIN)),
    "packed FLOAT16": ("8.5", lambda: dense("TND", **SHORT, dtype=HALF)),
    "packed, 256 channels": ("8.5", lambda: dense("TND", **SHORT, dim=256, dtype=BRAIN)),
    "BNSD": ("8.1", lambda: dense("BNSD", **SHORT)),
    "NTD": ("8.5", lambda: dense("NTD", **SHORT, dtype=BRAIN)),
    "NTD_TND": ("8.1", lambda: dense("NTD_TND", **SHORT, dtype=BRAIN)),
    "BSH_BNSD": ("8.5", lambda: dense("BSH_BNSD", **SHORT)),
    "BNSD_BSND of single rows": ("8.5", lambda: dense("BNSD_BSND", rows=[1, 1], keys=[30, 9])),
    "more than 64 query heads a key head": (
        "8.5",
        lambda: dense("BNSD", rows=[3], keys=[9], heads=80, kv_heads=1),
    ),
    "rotary parts under BSND": (
        "8.5",
        lambda: dense("BSND", **SHORT, heads=2, kv_heads=2, dim=128, rope=64, dtype=BRAIN),
    ),
    "blocks of 128 under several rows": ("8.1", lambda: paged("TND", "BnBsH")),
    "blocks of 16 under several rows": ("8.5", lambda: paged("TND", "BnBsH", block=16)),
    "BnNBsD under BSND": ("8.5", lambda: paged("BSND", "BnNBsD")),
    "NZ of 16 bits under BSND": ("8.5", lambda: paged("BSND", "NZ")),
    "the fourth version": ("8.5", lambda: dense("BNSD", entry=2, **SHORT)),
    "BF16 sink, packed": ("8.5", lambda: sink(BRAIN)),
    "FLOAT16 sink, packed": ("9.0", lambda: sink(HALF)),
    "training": ("8.1", lambda: train(1, "BNSD")),
    "training, packed": ("8.1", lambda: train(1, "TND")),
    "training, slopes": ("8.1", lambda: train(2, "BSH", pse=torch.zeros(4).npu(), pse_type=2)),
    "training, packed, statistics by rows": ("8.1", lambda: train(1, "TND", softmax_layout="TND")),
    "training, packed, rotary parts": ("8.1", lambda: fusion_extras.rotary_parts(3)),
    "training, sinks": ("8.5", lambda: fusion_extras.sinks("BSND", BRAIN, 1)),
    "training, packed, sinks": ("8.5", lambda: fusion_extras.sinks("TND", BRAIN, 2)),
    "prompts": ("8.1", lambda: prompt.whole_tensors("BSH", BRAIN, (4, 2))),
    "single rows": ("8.1", lambda: incre.whole_tensors("BSH", BRAIN, (4, 2))),
    "the indexer": ("8.5", lambda: indexer.sequences_of_several_lengths(indexer.FORMS[3], BRAIN, 3, 16)),
    "the indexer, weights in single precision": (
        "9.0",
        lambda: indexer.weights_in_single_precision(indexer.FORMS[1], HALF),
    ),
    "attention to lists": ("8.5", lambda: sparse.sequences_of_several_lengths(indexer.FORMS[3], BRAIN, 3, 4)),
    "attention to lists, with sums": ("8.5", lambda: sparse.maxima_and_sums(indexer.FORMS[1], HALF, 1, 3)),
    "attention by blocks": ("9.0", lambda: block_sparse.outputs_alone("BNSD", HALF)),
    "compressed tokens": ("8.5", lambda: nsa.blocks_become_one_token(BRAIN, 32, 16, 3, 64)),
    "the newest compressed token": ("8.5", lambda: nsa.the_newest_block_goes_to_its_slot(HALF, 32, 16, 1, 64, 1)),
    "attention to compressed tokens": ("8.5", lambda: nsa.one_row_needs_no_original_lengths("TND")),
    "attention to selected blocks": ("8.5", lambda: nsa.sizes_of_selected_blocks(48, "TND")),
    "the gated delta rule, token by token": (
        "8.5",
        lambda: decodes_and_drafts((True, False)),
    ),
    "the gated delta rule, with decays of columns": (
        "9.0",
        lambda: decodes_and_drafts((True, True)),
    ),
    "the gated delta rule in chunks": ("9.1", lambda: delta_rule.prompts_end_in_a_state((2, 4), (64, 32), (70,), True)),
    "the ring update": ("8.1", lambda: ring.two_pieces("SBH", BRAIN, 64, 4)),
}


@case(what=list(CALLS))
def each_release_takes_what_it_takes(what):
    first, call = CALLS[what]
    if RELEASES.index(RELEASE) >= RELEASES.index(first):
        call()
    else:
        refused(call)
