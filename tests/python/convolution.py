"""The causal convolution of CANN, which Ascend 950 has: prompts, drafts and blocks, with new rows and in place."""

import torch
import torch_npu

from harness import case, close, counted, exact, refused
from tensors import npu

CHANNELS = 64
TOLERANCE = (1e-4, 5e-3)


def convolve(x, weight, pool, in_place=False, **arguments):
    """The convolved rows; those of a call in place are in `x` too."""
    given = {name: npu(torch.tensor(value).int()) if isinstance(value, list) else value for name, value in arguments.items()}
    if in_place:
        counted("npu_fused_causal_conv1d_v2")
        torch_npu.npu_fused_causal_conv1d_v2(x, npu(weight), pool, **given)
        return x
    counted("npu_fused_causal_conv1d")
    return torch_npu.npu_fused_causal_conv1d(x, npu(weight), pool, **given)


def windows(front, rows, weight):
    """The sums of windows of three rows, of which two are in front of the first row, in double precision."""
    all_rows = torch.cat([front, rows]).double()
    return sum(all_rows[tap : tap + len(rows)] * weight[tap].double() for tap in range(3))


def drawn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape).to(dtype)


@case(lengths=[(1, 2, 1), (9, 30, 1), (3,)], dtype=[torch.bfloat16, torch.float16], in_place=[False, True], residual=[0, 1])
def prompts_and_chunks(lengths, dtype, in_place, residual):
    total, computed = sum(lengths), [7 * (at % 2) for at in range(len(lengths))]
    x, weight, pool = drawn(total, CHANNELS, dtype=dtype), drawn(3, CHANNELS, dtype=dtype), drawn(5, 2, CHANNELS, dtype=dtype)
    lines, device = [4, 0, 2][: len(lengths)], npu(pool)
    starts = [sum(lengths[:at]) for at in range(len(lengths) + 1)]
    y = convolve(
        npu(x), weight, device, in_place, query_start_loc=starts, cache_indices=lines, num_computed_tokens=computed,
        max_query_len=max(lengths), residual_connection=residual,
    )
    wanted, after = torch.empty(total, CHANNELS).double(), pool.clone()
    for at, line in enumerate(lines):
        rows = x[starts[at] : starts[at + 1]]
        front = pool[line] if computed[at] else torch.zeros_like(pool[line])
        wanted[starts[at] : starts[at + 1]] = windows(front, rows, weight) + residual * rows.double()
        after[line] = torch.cat([front, rows])[-2:]
    close(y, wanted, "rows", tolerance=TOLERANCE)
    exact(device, after, "lines")


@case(drafts=[0, 1, 3], accepted=[1, 2, 3])
def drafts_are_taken_back(drafts, accepted):
    accepted = min(accepted, drafts + 1)
    weight, pool = drawn(3, CHANNELS), drawn(3, drafts + 2, CHANNELS)
    device = npu(pool)
    steps = [drawn(2, drafts + 1, CHANNELS) for _ in range(2)]
    convolve(npu(steps[0]), weight, device, cache_indices=[2, 0])
    y = convolve(npu(steps[1]), weight, device, cache_indices=[2, 0], num_accepted_tokens=[accepted] * 2)
    for at, line in enumerate([2, 0]):
        front = torch.cat([pool[line][-2:], steps[0][at][:accepted]])[-2:]
        close(y[at], windows(front, steps[1][at], weight), "rows", tolerance=TOLERANCE)


@case()
def blocks_keep_rows_in_front_of_their_ends():
    x, weight, pool = drawn(20, CHANNELS), drawn(3, CHANNELS), drawn(4, 2, CHANNELS)
    device = npu(pool)
    y = convolve(
        npu(x), weight, device, query_start_loc=[0, 20], cache_indices=[[3, 1, 0]], num_computed_tokens=[0],
        block_idx_first_scheduled_token=[0], block_idx_last_scheduled_token=[2], initial_state_idx=[0], block_size=8,
        max_query_len=20,
    )
    close(y, windows(torch.zeros(2, CHANNELS), x, weight), "rows", tolerance=TOLERANCE)
    exact(device, torch.stack([x[18:20], x[14:16], pool[2], x[6:8]]), "lines")


@case()
def wider_windows_are_refused():
    x, pool = npu(drawn(4, CHANNELS)), npu(drawn(1, 3, CHANNELS))
    call = lambda: convolve(x, drawn(4, CHANNELS), pool, query_start_loc=[0, 4], max_query_len=16)
    refused(call, "fused_conv.width", "fix: ")
