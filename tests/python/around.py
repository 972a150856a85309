"""The code around attention: copies, casts, masks, old ways of writing caches, and attention spelled out in PyTorch."""

import ctypes

import torch
import torch_npu

from harness import case, close, exact, fused, refused, strictly
from reference import attend, right_down
from tensors import Batch, npu


@case(dtype=[torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32, torch.bool])
def strided_views(dtype):
    host = torch.randint(0, 2 if dtype == torch.bool else 100, (6, 5, 8)).to(dtype)
    device = host.npu()
    views = [
        lambda x: x.transpose(0, 2),
        lambda x: x[1:5:2, :, 3:],
        lambda x: x[:, 2],
        lambda x: x.permute(1, 2, 0)[2:, ::3],
        lambda x: x[:1].expand(4, 5, 8),
    ]
    for number, view in enumerate(views):
        exact(view(device).contiguous(), view(host).contiguous(), f"view {number}, contiguous")
        exact(view(device).cpu(), view(host), f"view {number}, to the host")
        target, target_host = torch.zeros_like(device), torch.zeros_like(host)
        if number != 4:
            view(target).copy_(view(device))
            view(target_host).copy_(view(host))
            exact(target, target_host, f"view {number}, written")


@case(
    source=[torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int8, torch.bool],
    target=[torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool],
)
def casts(source, target):
    host = (torch.randn(7, 9) * 20).to(source)
    exact(host.npu().to(target), host.to(target))


# Formats of tensors in memory.
ND, NZ = 2, 29
VERSION = tuple(int(part) for part in torch_npu.__version__.split(".")[:2])


def in_memory(tensor, elements):
    """The first elements behind a tensor's address, in whatever format."""
    torch.npu.synchronize()
    host = torch.empty(elements, dtype=tensor.dtype)
    size = ctypes.c_size_t(host.nbytes)
    device, to_host = ctypes.c_void_p(tensor.data_ptr()), 2
    assert ctypes.CDLL("libascendcl.so").aclrtMemcpy(ctypes.c_void_p(host.data_ptr()), size, device, size, to_host) == 0
    return host


def blocks(host, across):
    """The matrices of a tensor in FRACTAL_NZ: blocks of 16 rows, one column of blocks after the other."""
    rows, columns = -host.shape[-2] % 16, -host.shape[-1] % across
    padded = torch.nn.functional.pad(host, (0, columns, 0, rows))
    batch = padded.shape[:-2]
    padded = padded.reshape(*batch, padded.shape[-2] // 16, 16, padded.shape[-1] // across, across)
    return padded.movedim(-2, -4)


@case(
    dtype=[torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32],
    shape=[(16, 32), (20, 70), (1, 1), (3, 40, 33), (2, 2, 17, 5)],
)
def weights_cast_to_nz_and_back(dtype, shape):
    host = torch.randint(-100, 100, shape).to(dtype)
    device = host.npu()
    try:
        # Where private formats are not allowed, the extension makes a copy.
        torch.npu.config.allow_internal_format = False
        plain = torch_npu.npu_format_cast(device, NZ)
        exact(plain.cpu(), host)
        torch.npu.config.allow_internal_format = True
        cast = torch_npu.npu_format_cast(device, NZ)
        assert torch_npu.get_npu_format(cast) in (NZ, "FRACTAL_NZ"), torch_npu.get_npu_format(cast)
        assert cast.shape == host.shape
        expected = blocks(host, max(16, 32 // host.element_size()))
        exact(in_memory(cast, expected.numel()), expected.flatten())
        exact(torch_npu.npu_format_cast(cast, ND).cpu(), host)
        exact(cast.cpu(), host)
        torch_npu.npu_format_cast_(device, NZ)
        exact(device.cpu(), host)
    finally:
        torch.npu.config.allow_internal_format = False


# A refusal of an operator by its name leaves its status in the extension, whose later errors show it.
PRODUCT = """
import torch
import torch_npu
torch.npu.config.allow_internal_format = True
rows, weight = torch.randn(3, 20).half(), torch.randn(20, 36).half()
cast = torch_npu.npu_format_cast(weight.npu(), 29)
try:
    torch.matmul(rows.npu(), cast)
    print("the product was taken")
except RuntimeError as error:
    print(error)
product = torch.matmul(rows.npu(), torch_npu.npu_format_cast(cast, 2))
print("in ND", torch.allclose(product.cpu().float(), rows.float() @ weight.float(), atol=0.05))
"""


@case()
def products_with_a_weight_in_nz_are_refused():
    code, said = strictly(PRODUCT)
    assert code == 0 and "the operator aclnnMatmulWeightNz is not emulated" in said and "in ND True" in said, said


@case(dtype=[torch.float16, torch.bfloat16, torch.float32])
def attention_spelled_out(dtype):
    """What a model does without the fused operator, on the device, against the reference and against the operator."""
    batch = Batch([12], [30], heads=4, kv_heads=4, dtype=dtype)
    query, key, value = (npu(x[0][None]) for x in (batch.query, batch.key, batch.value))
    hidden = torch.triu(torch.ones(12, 30, dtype=torch.bool, device="npu"), diagonal=30 - 12 + 1)
    scores = torch.matmul(query, key.transpose(-1, -2)) * batch.scale
    scores = scores.masked_fill(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(dtype)
    output = torch.matmul(weights, value)
    expected, _ = batch.expected(attend, visible=lambda i: right_down(12, 30))
    tolerance = {torch.float16: (8e-3, 8e-3), torch.bfloat16: (6e-2, 6e-2), torch.float32: (1e-4, 1e-4)}[dtype]
    close(output[0], expected[0], tolerance=tolerance)
    if dtype != torch.float32:
        mask = hidden.to(torch.int8)
        operator, _ = fused(
            1, query, key, value, **batch.heads_and_scale(), input_layout="BNSD", atten_mask=mask
        )
        close(operator[0], expected[0])


@case(dtype=[torch.float16, torch.bfloat16])
def caches_written_by_index(dtype):
    cache, rows = torch.randn(4, 16, 2, 64).to(dtype), torch.randn(5, 2, 64).to(dtype)
    slots = torch.randperm(64)[:5]
    device = npu(cache)
    device.view(-1, 2, 64)[npu(slots)] = npu(rows)
    expected = cache.clone()
    expected.view(-1, 2, 64)[slots] = rows
    exact(device, expected)
    blocks, offsets = slots // 16, slots % 16
    device[npu(blocks), npu(offsets)] = npu(rows) * 2
    expected[blocks, offsets] = rows * 2
    exact(device, expected)


@case()
def positions_slots_and_lengths_of_a_step():
    """Integer arithmetic by which a runner finds slots."""
    block_table = torch.randint(0, 50, (3, 4), dtype=torch.int32)
    requests = torch.repeat_interleave(torch.arange(3), torch.tensor([1, 4, 2]))
    positions = torch.tensor([130, 0, 1, 2, 3, 127, 128])

    def slots(table, requests, positions):
        flat = table.flatten()[requests * 4 + positions // 128]
        return flat * 128 + positions % 128

    on_device = slots(npu(block_table), npu(requests), npu(positions))
    exact(on_device, slots(block_table, requests, positions))
    lengths = torch.tensor([3, 1, 4], dtype=torch.int32)
    exact(torch.cumsum(npu(lengths), 0), torch.cumsum(lengths, 0))


@case(dtype=[torch.float16, torch.float32])
def merging_spelled_out(dtype):
    outputs, sums = torch.randn(3, 7, 4, 64).to(dtype), torch.randn(3, 7, 4, 1)

    def merged(outputs, sums):
        total = torch.logsumexp(sums, dim=0)
        return (outputs.float() * torch.exp(sums - total)).sum(0), total

    output, total = merged(npu(outputs), npu(sums))
    expected, expected_total = merged(outputs, sums)
    close(output, expected, tolerance=(1e-5, 1e-5))
    close(total, expected_total, "log-sums", tolerance=(1e-5, 1e-5))


@case()
def operators_that_are_not_there_are_refused_at_once():
    """The error comes from the line that calls the operator, and what follows is computed as before."""
    rows = torch.randn(2, 3, 8, 8).npu()
    weights = torch.randn(4, 3, 3, 3).npu()
    for _ in range(2):
        refused(lambda: torch.nn.functional.conv2d(rows, weights), "the operator aclnnConvolution is not emulated")
    close(rows + rows, rows.cpu() * 2)


@case()
def operators_whose_lack_would_pass_for_an_older_cann_are_named():
    """Without their newest versions the extension would ask for a newer CANN, or for other arguments."""
    rows, weights, ends = torch.randn(4, 64).half().npu(), torch.randn(1, 64, 32).half().npu(), torch.tensor([4]).npu()
    small, small_weights = torch.ones(4, 64, dtype=torch.int8).npu(), torch.ones(64, 32, dtype=torch.int8).npu()
    scales, row_scales = torch.ones(32).npu(), torch.ones(4).npu()
    places, experts = torch.arange(4).int().npu(), torch.zeros(4, 1).int().npu()

    def grouped():
        torch_npu.npu_grouped_matmul(
            [rows], [weights], group_list=ends, split_item=3, group_type=0, group_list_type=0
        )

    def quantised():
        torch_npu.npu_quant_matmul(
            small, small_weights, scales, pertoken_scale=row_scales, output_dtype=torch.bfloat16
        )

    def finalised():
        torch_npu.npu_moe_finalize_routing(rows, None, None, None, row_scales[:, None].half(), places, experts)

    calls = [(grouped, "GroupedMatmulV4"), (quantised, "QuantMatmulV5"), (finalised, "MoeFinalizeRoutingV2")]
    for call, operator in calls:
        refused(call, f"call aclnn{operator} failed", f"the operator aclnn{operator} is not emulated")
    # One that the extension itself names.
    refused(lambda: torch_npu.npu_moe_init_routing(rows, places[:, None], experts, 4), "aclnnMoeInitRouting")
