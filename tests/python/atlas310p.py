"""Prompts and single rows on the Atlas inference series (310P), whose fused attention they are.

Masks are of truth values and square, with a side of a multiple of 16, as hardware wants them there. The extension does not look
at the status of a first phase on this product: a call that is refused makes the process useless, so that each has its own.
"""

import os
import pathlib
import subprocess
import sys

import torch

import incre
import prompt
from harness import case
from reference import left_up
from tensors import Batch, npu, triangle

HALF = torch.float16


@case(layout=prompt.DENSE, heads=[(4, 4), (4, 2), (6, 1)])
def prompts(layout, heads):
    prompt.whole_tensors(layout, HALF, heads)


@case(layout=prompt.DENSE)
def prompts_of_several_lengths(layout):
    prompt.sequences_of_several_lengths(layout, HALF)


@case(layout=prompt.DENSE, shape=[(32, 32), (2, 32, 32), (2, 1, 32, 32)], mode=[0, 1])
def prompts_with_a_mask(layout, shape, mode):
    batch = Batch([32] * 2, [32] * 2)
    hidden = torch.rand(shape) < 0.4
    hidden[..., 0] = False
    output = prompt.prompt(batch, layout, sparse_mode=mode, atten_mask=npu(hidden))
    whole = hidden.reshape(-1, 32, 32).expand(2, 32, 32)
    prompt.compare(batch, layout, output, visible=lambda i: ~whole[i])


@case(layout=prompt.DENSE, mode=[0, 2, 3])
def causal_prompts(layout, mode):
    batch = Batch([48] * 2, [48] * 2)
    mask = triangle(torch.bool) if mode else npu(~left_up(48, 48))
    output = prompt.prompt(batch, layout, sparse_mode=mode, atten_mask=mask, next_tokens=0)
    prompt.compare(batch, layout, output, visible=lambda i: left_up(48, 48))


@case(layout=incre.LAYOUTS, heads=[(4, 4), (8, 2), (6, 1)])
def single_rows(layout, heads):
    incre.whole_tensors(layout, HALF, heads)


@case(layout=incre.LAYOUTS)
def single_rows_of_several_lengths(layout):
    incre.keys_of_several_lengths(layout, HALF)


@case(layout=incre.LAYOUTS)
def single_rows_with_a_mask(layout):
    incre.masks(layout, torch.bool, (3, 40))


@case(cache=incre.CACHES)
def single_rows_over_a_cache(cache):
    incre.caches_of_blocks(cache, HALF)


@case(layout=incre.LAYOUTS, offsets=[True, False])
def single_rows_over_int8_keys(layout, offsets):
    incre.int8_keys(layout, HALF, offsets)


# One sequence with so many rows and keys and a mask of a type.
MASKED = "(lambda *of: prompt.prompt(Batch([of[0]], [of[1]]), atten_mask=torch.zeros(*of[:2]).to(of[2]).npu()))"

# What is refused: the rule that stderr must name, and the call.
REFUSED = {
    "BF16": ("prompt.dtype", "prompt.prompt(Batch([6], [9], dtype=torch.bfloat16))"),
    "prompts without heads": ("prompt.num_heads", "prompt.prompt(Batch([6], [9]), num_heads=0)"),
    "masks of rows that are no multiple of 16": ("prompt.card_mask", f"{MASKED}(20, 20, torch.bool)"),
    "masks with more keys than rows": ("prompt.card_mask", f"{MASKED}(16, 48, torch.bool)"),
    "masks of numbers": ("prompt.card_mask_dtype", f"{MASKED}(32, 32, torch.int8)"),
    "short bands": ("prompt.card_tokens", "prompt.prompt(Batch([20], [40]), pre_tokens=5)"),
    "position bias": (
        "prompt.card_pse",
        "prompt.prompt(Batch([16], [32], dim=128), pse_shift=torch.zeros(1, 4, 16, 32).half().npu())",
    ),
    "single rows of many heads": ("incre.card_heads", "incre.incre(incre.single([9], 33, 1))"),
    "single rows of long heads": ("incre.card_heads", "incre.incre(incre.single([9], dim=256))"),
    "single rows without heads": ("num_heads.positive", "incre.incre(incre.single([9]), num_heads=0)"),
}


@case(what=list(REFUSED))
def refused_calls(what):
    rule, call = REFUSED[what]
    program = f"import torch, prompt, incre; from tensors import Batch; {call}; torch.npu.synchronize()"
    folder = pathlib.Path(__file__).parent
    environment = os.environ | {"ASCEND_EMU_TRACE": os.environ["ASCEND_EMU_TRACE"] + ".refused"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode != 0, "the call was taken"
    assert f"{rule}: " in done.stderr and "fix: " in done.stderr, done.stderr
